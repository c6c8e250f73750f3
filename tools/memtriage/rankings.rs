//! Holders of memory: the largest processes, cgroups, slab caches, or lines of the kernel's code.

use std::collections::HashMap;
use std::io::{self, Write};
use std::sync::Once;

use anyhow::{Result, ensure};
use clap::ValueEnum;
use memtools::host::allocinfo;
use memtools::host::memory_cgroups::{self, MAX_GROUPS};
use memtools::host::slabinfo::Slabinfo;
use memtools::parse::UsageError;
use memtools::print::output::{Output, Row};
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::processes;
use crate::screen::{ProcessRow, change, size};
use crate::snapshot::Snapshot;

/// What --by chooses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum RankBy {
    /// Processes, by their share of memory, with swapped memory
    Process,
    /// Processes, by swapped memory
    Swap,
    /// Processes, by growth since the last sample
    Growth,
    /// Cgroups, with the cgroups below them
    Cgroup,
    /// Slab caches of the kernel
    Slab,
    /// Lines of the kernel's code that allocate (/proc/allocinfo)
    Code,
}

/// Memory that cgroups, slab caches or lines of code hold, by their names.
pub(crate) type Holders = HashMap<String, Held>;

/// Bytes that a holder has, and the number of its objects, if this is known.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    bytes: u64,
    objects: Option<u64>,
}

impl RankBy {
    /// Reads the holders now. Empty for processes, which are read by [`processes::all`].
    ///
    /// # Errors
    /// If the kernel does not provide the numbers, or this user may not read them.
    pub(crate) fn holders(self, slabs: &Slabinfo) -> Result<Holders> {
        Ok(match self {
            Self::Process | Self::Swap | Self::Growth => Holders::new(),
            Self::Cgroup => {
                let sizes = memory_cgroups::sizes();
                if sizes.left_out {
                    say_that_cgroups_are_left_out();
                }
                let held = |bytes| Held {
                    bytes,
                    objects: None,
                };
                let groups = sizes.groups.into_iter();
                groups
                    .map(|group| (group.path, held(group.current)))
                    .collect()
            }
            Self::Slab => {
                ensure!(
                    !slabs.is_empty(),
                    "failed to read /proc/slabinfo, which is of root alone"
                );
                let held = |(name, usage): (&str, memtools::host::slabinfo::Usage)| {
                    let held = Held {
                        bytes: usage.bytes.try_into().unwrap_or_default(),
                        objects: usage.objects.try_into().ok(),
                    };
                    (name.to_owned(), held)
                };
                slabs.caches().map(held).collect()
            }
            Self::Code => {
                let held = |site: allocinfo::Site| {
                    let held = Held {
                        bytes: site.bytes,
                        objects: Some(site.calls),
                    };
                    (site.code, held)
                };
                allocinfo::read()?.into_iter().map(held).collect()
            }
        })
    }

    /// Refuses the column CONTAINER for holders that are in no container.
    ///
    /// # Errors
    /// If the holders are slab caches or lines of the kernel's code.
    pub(crate) fn expect_containers(self) -> Result<()> {
        let what = match self {
            Self::Process | Self::Swap | Self::Growth | Self::Cgroup => return Ok(()),
            Self::Slab => "slab caches",
            Self::Code => "lines of the kernel's code",
        };
        let message = format!(
            "{what} are in no container: --container goes with --by process, swap, growth or cgroup"
        );
        Err(UsageError(message).into())
    }

    /// Prints the `top` largest holders, or with --by growth the processes that have grown most. Processes and
    /// cgroups have the column CONTAINER if that is requested.
    pub(crate) fn print(
        self,
        before: &Snapshot,
        now: &Snapshot,
        growth: &HashMap<u32, i64>,
        (top, container): (usize, bool),
        output: &mut Output,
    ) -> Result<()> {
        let (what, title) = match self {
            Self::Process | Self::Swap | Self::Growth => {
                output.header(&ProcessRow::header(container))?;
                for usage in processes::largest(now.processes.clone(), growth, self, top) {
                    let grown = growth.get(&usage.pid).copied().unwrap_or_default();
                    output.row(&ProcessRow::new(&usage, grown, container))?;
                }
                return Ok(());
            }
            Self::Cgroup => ("cgroup", "CGROUP"),
            Self::Slab => ("slab", "SLAB CACHE"),
            Self::Code => ("code", "CODE OF THE KERNEL"),
        };
        let mut rows: Vec<HolderRow<'_>> = now
            .holders
            .iter()
            .map(|(name, held)| {
                let earlier = before.holders.get(name).map_or(0, |held| held.bytes);
                HolderRow {
                    what,
                    name,
                    cgroup_info: (self == Self::Cgroup).then(|| CgroupInfo::at(Some(name.clone()))),
                    container,
                    bytes: held.bytes,
                    objects: held.objects,
                    growth_bytes: held.bytes.cast_signed() - earlier.cast_signed(),
                }
            })
            .collect();
        rows.sort_by(|a, b| b.bytes.cmp(&a.bytes).then_with(|| a.name.cmp(b.name)));
        rows.truncate(top);
        output.header(&format!(
            "\n{title:<48} {}{:>9} {:>8} {:>9}",
            container::header(container),
            "OBJECTS",
            "SIZE",
            "CHANGE"
        ))?;
        rows.iter().try_for_each(|row| output.row(row))
    }
}

/// Reports on stderr, once in a run, that not all cgroups were read.
fn say_that_cgroups_are_left_out() {
    static SAID: Once = Once::new();
    SAID.call_once(|| {
        memtools::message!(
            "only the first {MAX_GROUPS} cgroups of a version are read, in the order of their paths; see \
             another one with: memtriage --cgroup CGROUP"
        );
    });
}

/// Row of a cgroup, a slab cache or a line of code, one of the largest.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "holder")]
struct HolderRow<'a> {
    /// `cgroup`, `slab` or `code`.
    what: &'static str,
    name: &'a str,
    /// Path and container of a cgroup. None for the kernel's own memory.
    #[serde(flatten)]
    cgroup_info: Option<CgroupInfo>,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    container: bool,
    bytes: u64,
    objects: Option<u64>,
    growth_bytes: i64,
}

impl Row for HolderRow<'_> {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:<48} {}{:>9} {:>8} {:>9}",
            self.name,
            container::column(self.cgroup_info.as_ref(), self.container),
            self.objects
                .map_or("-".into(), |objects| objects.to_string()),
            size(self.bytes),
            match self.growth_bytes {
                0 => String::new(),
                grown => change(grown),
            }
        )
    }
}
