//! Counts of the BPF programs, by the names of files, as a report.

use std::cmp::Reverse;
use std::collections::HashMap;
use std::mem::offset_of;
use std::ops::Range;

use anyhow::Result;
use libbpf_rs::MapMut;
use memtools::bpf::map_cache::EntryCache;
use memtools::bpf::map_counts::Counts;
use memtools::bpf::types;
use memtools::export::exposition::MetricKind;
use memtools::export::metrics::{Family, Metrics};
use memtools::print::clock::{self, Clock};
use memtools::print::file_path::{self, PathExtent};
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::container::{self, CgroupResolver};

use crate::args::Args;
use crate::attach::FaultDetails;
use crate::bpf::Loaded;
use crate::bpf::types::{count, count_key, file_record, memory as Memory, name_record};
use crate::row::{Columns, FileFaults};

/// Bounds of the width of the column FILE, which is as wide as its widest entry.
const FILE_COLUMN: Range<usize> = 24..64;

pub(crate) static FAULTS: Family = Family {
    name: "memtools_file_page_faults_total",
    help: "Page faults, by file.",
    labels: &["file", "unit", "container"],
    kind: MetricKind::Counter,
};

pub(crate) static MAJOR: Family = Family {
    name: "memtools_file_major_page_faults_total",
    help: "Page faults that waited for a disk or for swap, by file.",
    labels: &["file", "unit", "container"],
    kind: MetricKind::Counter,
};

/// Key of the counts, as it is printed.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Key {
    pub(crate) file: String,
    pub(crate) pid: u32,
    pub(crate) comm: String,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Count {
    pub(crate) faults: u64,
    pub(crate) major: u64,
    pub(crate) write: u64,
    pub(crate) exec: u64,
    /// Id of the cgroup that the process was in last; 0 if cgroups are not requested.
    pub(crate) cgroup: u64,
}

/// Reader of the counts, which prints what has been added since the last report.
pub(crate) struct Report<'a> {
    counts: Counts<'a, MapMut<'static>, count_key, count>,
    cgroup_resolver: Option<CgroupResolver<'a>>,
    names: EntryCache<'a, MapMut<'static>, String>,
    knows: FaultDetails,
    args: &'a Args,
}

impl<'a> Report<'a> {
    pub(crate) fn new(args: &'a Args, skel: &'a Loaded, knows: FaultDetails) -> Self {
        let maps = &skel.maps;
        Self {
            counts: Counts::new(&maps.counts, &maps.counts_a, &maps.counts_b),
            cgroup_resolver: CgroupResolver::if_wanted(args.wants_cgroups(), &maps.cgroup_paths),
            names: EntryCache::new(&maps.files),
            knows,
            args,
        }
    }

    pub(crate) fn print(&mut self, output: &mut Output, metrics: &mut Metrics) -> Result<()> {
        let mut rows: Vec<(Key, Count)> = self.take()?.into_iter().collect();
        for (key, count) in &rows {
            let resolver = self.cgroup_resolver.as_mut();
            let cgroup_info = resolver.map(|resolver| resolver.of(count.cgroup));
            let [unit, container] = container::labels(cgroup_info.as_ref());
            let labels = [&key.file, unit, container];
            metrics.add(&FAULTS, &labels, count.faults);
            if self.knows.major {
                metrics.add(&MAJOR, &labels, count.major);
            }
        }
        rows.sort_by_cached_key(|(key, count)| (count.faults, Reverse(key.clone())));
        let skip = self
            .args
            .top
            .map_or(0, |top| rows.len().saturating_sub(top));

        let time = Clock::new().local(clock::monotonic_ns());
        if self.args.timestamp {
            output.header(&clock::time_of_day(&time))?;
        }
        let files = rows.iter().skip(skip).map(|(key, _)| &*key.file);
        let columns = Columns {
            by_process: self.args.by_process,
            container: self.args.containers.container,
            types: self.args.r#type,
            file: file_width(files),
        };
        output.header(&columns.header())?;
        for (key, count) in rows.into_iter().skip(skip) {
            let mut row = FileFaults::new(key, count, &time, self.knows, columns);
            row.cgroup_info = self
                .cgroup_resolver
                .as_mut()
                .map(|cgroup_resolver| cgroup_resolver.of(count.cgroup));
            output.row(&row)?;
        }
        if self.args.interval.is_some() {
            output.header("")?;
        }
        output.flush()
    }

    fn take(&mut self) -> Result<HashMap<Key, Count>> {
        let mut sums: HashMap<Key, Count> = HashMap::new();
        for (key, value) in self.counts.take()? {
            let file = match key.memory {
                Memory::MEMORY_FILE => self.name(&key)?,
                Memory::MEMORY_ANONYMOUS => "[anon]".to_owned(),
                Memory::MEMORY_HEAP => "[heap]".to_owned(),
                Memory::MEMORY_STACK => "[stack]".to_owned(),
                _ => "[unknown]".to_owned(),
            };
            let key = Key {
                file,
                pid: key.pid,
                comm: text::from_c(&key.comm),
            };
            // Files of the same name are counted together, unless whole paths distinguish them.
            let sum = sums.entry(key).or_default();
            sum.faults += value.faults;
            sum.major += value.major;
            sum.write += value.write;
            sum.exec += value.exec;
            sum.cgroup = value.cgroup;
        }
        self.names.end_round()?;
        Ok(sums)
    }

    fn name(&mut self, key: &count_key) -> Result<String> {
        let path = self.args.path;
        let name = self
            .names
            .get(&id_bytes(key), |record| name_of(record, path))?;
        Ok(name.unwrap_or_else(|| "[lost]".to_owned()))
    }
}

/// Returns the width of the column FILE for these entries, in characters.
fn file_width<'a>(files: impl Iterator<Item = &'a str>) -> usize {
    let widest = files.map(|file| file.chars().count()).max();
    widest
        .unwrap_or(0)
        .clamp(FILE_COLUMN.start, FILE_COLUMN.end)
}

/// Returns the name or the path in a `file_record`, which may be cut. None if the BPF program is still writing the
/// record, or could not write it.
fn name_of(record: &[u8], path: bool) -> Result<Option<String>> {
    let &name_record {
        bytes, complete, ..
    } = types::view(record)?;
    let names = &record[offset_of!(file_record, names)..];
    let names = &names[..names.len().min(bytes as usize)];
    if names.is_empty() {
        return Ok(None);
    }
    if !path {
        return Ok(Some(file_path::name(names)));
    }
    // Values of file_path() in bpf/include/file.bpf.h.
    let reach = match complete {
        1 => PathExtent::Complete,
        2 => PathExtent::Unlinked,
        _ => PathExtent::Truncated,
    };
    Ok(Some(file_path::path(names, reach)))
}

/// Encodes a file's id as a key of the map of names.
fn id_bytes(key: &count_key) -> Vec<u8> {
    let mut bytes = key.file.inode.to_ne_bytes().to_vec();
    bytes.extend(key.file.device.to_ne_bytes());
    bytes.extend(key.file.generation.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_column_is_as_wide_as_its_widest_entry_in_characters() {
        let name = "\u{e9}".repeat(30);
        assert_eq!(file_width(["a", &name].into_iter()), 30);
        assert_eq!(file_width(["a"].into_iter()), FILE_COLUMN.start);
        let longest = "a".repeat(99);
        assert_eq!(file_width([&*longest].into_iter()), FILE_COLUMN.end);
    }
}
