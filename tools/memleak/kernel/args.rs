//! Options of kernel mode.

use clap::ValueEnum;

use crate::kernel::bpf::types::cache_name;

/// Bytes of a slab cache's name, the NUL not counted.
pub(crate) const MAX_CACHE_NAME: usize = cache_name::CACHE_NAME_BYTES.0 as usize - 1;

/// Options of kernel mode only.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Kernel mode")]
pub(crate) struct KernelArgs {
    /// Trace kernel allocations: slab, pages or percpu
    ///
    /// With a target, these are allocations on its behalf. The default is slab,pages. Without slab, pages include
    /// those that hold slab objects.
    #[arg(short, long, help_heading = "Target (default: the kernel)", value_name = "WHAT", num_args = 0.., require_equals = true, value_delimiter = ',', value_enum, hide_possible_values = true)]
    pub(crate) kernel: Option<Vec<Memory>>,

    /// Trace per-CPU allocations of the kernel: --kernel=percpu
    #[arg(hide_short_help = true, short = 'P', long)]
    pub(crate) percpu: bool,

    /// Trace only objects of this slab cache, such as dentry
    #[arg(
        hide_short_help = true,
        long,
        value_name = "CACHE",
        conflicts_with = "percpu"
    )]
    pub(crate) cache: Option<String>,

    /// Report slab caches instead of stacks
    ///
    /// The change in /proc/slabinfo is shown in addition.
    #[arg(hide_short_help = true, long, conflicts_with_all = ["folded", "show_allocs", "extended"])]
    pub(crate) by_cache: bool,

    /// Ignored: the effect of this option is always on
    #[arg(hide = true, short = 'F', long)]
    pub(crate) wa_missing_free: bool,
}

/// Kind of memory that the kernel allocates.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Memory {
    /// Slab objects
    Slab,
    /// Pages
    Pages,
    /// Per-CPU memory
    Percpu,
}

/// Kinds of memory that are traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Kinds {
    pub(crate) slab: bool,
    pub(crate) pages: bool,
    pub(crate) percpu: bool,
}

impl KernelArgs {
    /// Returns the kinds of memory that these options choose.
    pub(crate) fn kinds(&self) -> Kinds {
        let listed = self.kernel.as_deref().unwrap_or_default();
        let has = |memory| listed.contains(&memory);
        let is_chosen = !listed.is_empty() || self.percpu;
        Kinds {
            slab: has(Memory::Slab) || !is_chosen,
            pages: has(Memory::Pages) || !(is_chosen || self.cache.is_some()),
            percpu: has(Memory::Percpu) || self.percpu,
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::args::Args;

    fn parse(line: &str) -> Args {
        Args::try_parse_from(line.split_whitespace()).expect(line)
    }

    #[test]
    fn objects_and_pages_unless_told_otherwise() {
        let kinds = |line: &str| {
            let Kinds {
                slab,
                pages,
                percpu,
            } = parse(line).kernel.kinds();
            (slab, pages, percpu)
        };
        assert_eq!(kinds("memleak"), (true, true, false));
        assert_eq!(kinds("memleak -k=pages"), (false, true, false));
        assert_eq!(kinds("memleak --percpu"), (false, false, true));
        assert_eq!(kinds("memleak -k=slab --percpu"), (true, false, true));
        assert_eq!(kinds("memleak -kp 1"), (true, true, false));
        assert_eq!(kinds("memleak --kernel=slab,percpu"), (true, false, true));
        assert_eq!(kinds("memleak --cache dentry"), (true, false, false));
    }
}
