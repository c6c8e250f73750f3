//! A tool's BPF object, from opening to loading: the module that `skeleton!` makes of the generated skeleton.
//!
//! Two calls do in one order what every object needs, and a tool cannot do without them. The skeleton's builder is
//! private to the module that [`skeleton!`](crate::skeleton) makes, and libbpf's own `load` consumes the skeleton,
//! which a tool gets by reference only.
//!
//! | call | what it does |
//! |---|---|
//! | `bpf::prepare(filter, ...)` | opens the object; sets filter, unwinding, stack capacity, the follower's maps |
//! | `bpf::Prepared` | the opened object: the tool sets its own options, sizes and programs |
//! | `Prepared::load()`, `Prepared::load_only(&[...])` | loads the object, or these programs of it; sets the cgroup of the filter |
//! | `bpf::Loaded` | the loaded object, to be attached |
//!
//! ```no_run
//! use memtools::process::filter::Filter;
//! use memtools::run::skeleton::StackCapacity;
//! use memtools::stacks::unwind::UnwindArgs;
//!
//! // Another object takes no stacks (`none`), or only the kernel's (`kernel`).
//! memtools::skeleton!("faults", FaultsSkelBuilder, stacks: unwound, plain: []);
//!
//! fn load(filter: &Filter, unwind: UnwindArgs) -> anyhow::Result<bpf::Loaded> {
//!     let mut open = bpf::prepare(filter, StackCapacity::of(4096), unwind)?;
//!     open.options()?.user_mode_only = 1;
//!     open.load()
//! }
//! # fn main() {}
//! ```

use anyhow::Result;

use crate::stacks::slots;
use crate::stacks::table::MAX_DEPTH;

/// Capacity of an object for call stacks, and their maximum depth.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StackCapacity {
    /// Capacity for distinct stacks at first; None if no stack is ever taken.
    pub first_entries: Option<u32>,
    /// Maximum number of frames of a stack.
    pub depth: u32,
}

impl StackCapacity {
    /// Capacity for no stack.
    pub const NONE: Self = Self {
        first_entries: None,
        depth: MAX_DEPTH,
    };

    /// Returns the capacity for `first_entries` distinct stacks at first, of the maximum depth.
    pub fn of(first_entries: u32) -> Self {
        Self {
            first_entries: Some(first_entries),
            ..Self::NONE
        }
    }

    /// Returns the number of slots for stacks that are being taken; 1 if no stack is ever taken.
    ///
    /// # Errors
    /// If the number of possible CPUs cannot be read.
    pub fn slots(self) -> Result<u32> {
        self.first_entries.map_or(Ok(1), |_| slots::count())
    }

    /// Returns this capacity if stacks are wanted, else [`StackCapacity::NONE`].
    #[must_use]
    pub fn if_wanted(self, wanted: bool) -> Self {
        if wanted { self } else { Self::NONE }
    }
}

/// Includes a tool's skeleton as the module `bpf`, with `prepare`, `Prepared` and `Loaded`
/// ([`run::skeleton`](crate::run::skeleton)). Also makes the filter, and the structs named in `plain`, readable from
/// bytes.
#[macro_export]
macro_rules! skeleton {
    ($tool:literal, $builder:ident, stacks: $stacks:tt, plain: [$($plain:ident),*]) => {
        mod bpf {
            $crate::generated!(
                $tool,
                // SAFETY: generated from C structs of integers; every bit pattern is valid.
                unsafe impl ::plain::Plain for types::filter {}
                $(,
                    // SAFETY: generated from C structs of integers; every bit pattern is valid.
                    unsafe impl ::plain::Plain for types::$plain {}
                )*
            );

            pub(crate) use generated::types;

            use anyhow::Context as _;
            use libbpf_rs::skel::{OpenSkel, SkelBuilder};
            use $crate::process::filter::Filter;

            type Open = <generated::$builder as SkelBuilder<'static>>::Output;

            /// The loaded object.
            pub(crate) type Loaded = <Open as OpenSkel<'static>>::Output;

            /// The opened object, before it is loaded.
            pub(crate) struct Prepared<'filter> {
                open: Open,
                filter: &'filter Filter,
            }

            impl std::ops::Deref for Prepared<'_> {
                type Target = Open;

                fn deref(&self) -> &Open {
                    &self.open
                }
            }

            impl std::ops::DerefMut for Prepared<'_> {
                fn deref_mut(&mut self) -> &mut Open {
                    &mut self.open
                }
            }

            /// Starts the slow part of `prepare`, on another CPU. No process may be forked until `prepare` has
            /// returned.
            #[allow(dead_code, reason = "most tools have nothing else to do meanwhile")]
            pub(crate) fn prefetch_kernel_types() {
                $crate::bpf::attach::prefetch_kernel_types::<generated::$builder>();
            }

            #[allow(dead_code, reason = "a tool loads all programs, or some")]
            impl<'filter> Prepared<'filter> {
                fn open(filter: &'filter Filter) -> anyhow::Result<Self> {
                    let mut open = $crate::bpf::attach::open::<generated::$builder>()?;
                    filter.set(&mut $crate::bpf::attach::options(&mut open.maps.rodata_data)?.filter);
                    let maps = &mut open.maps;
                    filter.share_maps(&mut maps.filter_followed, &mut maps.losses)?;
                    Ok(Self { open, filter })
                }

                /// The constants of the object.
                pub(crate) fn options(&mut self) -> anyhow::Result<&mut types::rodata> {
                    $crate::bpf::attach::options(&mut self.open.maps.rodata_data)
                }

                /// Loads the object.
                pub(crate) fn load(mut self) -> anyhow::Result<Loaded> {
                    let object = self.open.open_object_mut();
                    let with_kretprobes = $crate::bpf::attach::has_kretprobes(object);
                    self.options()?.with_kretprobes = with_kretprobes.into();
                    let loaded = self.open.load().context("failed to load")?;
                    self.filter.set_cgroup(&loaded.maps.filter_cgroup)?;
                    Ok(loaded)
                }

                /// Loads only the programs with these names, and those that unwind stacks, if stacks are taken.
                pub(crate) fn load_only(mut self, programs: &[&str]) -> anyhow::Result<Loaded> {
                    $crate::bpf::attach::load_only(self.open.open_object_mut(), programs)?;
                    self.load()
                }
            }

            $crate::prepare_skeleton!($stacks);

            /// The names of the tool's own programs.
            #[cfg(test)]
            #[allow(dead_code, reason = "for tests of tools that put names together")]
            pub(crate) fn program_names() -> std::collections::BTreeSet<String> {
                let mut open = $crate::bpf::attach::open::<generated::$builder>().expect("an object");
                $crate::bpf::attach::own_programs(open.open_object_mut())
                    .map(|program| program.name().to_string_lossy().into_owned())
                    .collect()
            }
        }
    };
}

/// Defines the function `prepare` of [`skeleton!`], depending on the stacks that the object takes.
#[doc(hidden)]
#[macro_export]
macro_rules! prepare_skeleton {
    (none) => {
        /// Opens the object, and sets up its filter.
        pub(crate) fn prepare(filter: &Filter) -> anyhow::Result<Prepared<'_>> {
            Prepared::open(filter)
        }
    };
    (kernel) => {
        /// Opens the object, and sets up its filter and the kernel's stacks.
        pub(crate) fn prepare(
            filter: &Filter,
            stacks: $crate::run::skeleton::StackCapacity,
        ) -> anyhow::Result<Prepared<'_>> {
            let mut prepared = Prepared::open(filter)?;
            let slots = stacks.slots()?;
            let options = prepared.options()?;
            options.stack_depth = stacks.depth;
            options.stack_slot_count = slots;
            let maps = &mut prepared.maps;
            $crate::stacks::slots::set_capacity(slots, [&mut maps.stack_slots], [])?;
            $crate::stacks::table::set_capacity(&mut maps.stacks, [], stacks.first_entries)?;
            Ok(prepared)
        }
    };
    (unwound) => {
        /// Opens the object, and sets up its filter and the stacks of processes.
        pub(crate) fn prepare(
            filter: &Filter,
            stacks: $crate::run::skeleton::StackCapacity,
            unwind: $crate::stacks::unwind::UnwindArgs,
        ) -> anyhow::Result<Prepared<'_>> {
            let mut prepared = Prepared::open(filter)?;
            let slots = stacks.slots()?;
            let options = prepared.options()?;
            options.stack_depth = stacks.depth;
            options.stack_slot_count = slots;
            options.unwind_mode = unwind.mode();
            options.unwind_namespace = unwind.namespace()?;
            options.interpreters = unwind.interpreters();
            options.python_lines = unwind.python_lines();
            let maps = &mut prepared.maps;
            let of_slots = [&mut maps.stack_slots, &mut maps.python_slots];
            let with_spare = [&mut maps.mappings, &mut maps.unwind_places];
            $crate::stacks::slots::set_capacity(slots, of_slots, with_spare)?;
            let others = [
                &mut maps.unwind_files,
                &mut maps.unwind_cache,
                &mut maps.unwind_asked,
                &mut maps.unwind_missing,
            ];
            $crate::stacks::table::set_capacity(&mut maps.stacks, others, stacks.first_entries)?;
            if stacks.first_entries.is_none() || unwind.interpreters() == 0 {
                let of_interpreters = [
                    &mut maps.hotspot_processes,
                    &mut maps.python_slots,
                    &mut maps.python_buckets,
                    &mut maps.python_processes,
                    &mut maps.python_codes,
                ];
                for map in of_interpreters {
                    $crate::bpf::map_create::set_capacity(map, 1)?;
                }
            }
            if stacks.first_entries.is_none() {
                $crate::bpf::attach::disable_unwind_programs(prepared.open.open_object_mut());
            }
            Ok(prepared)
        }
    };
}
