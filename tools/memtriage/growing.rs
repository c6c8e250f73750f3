//! Growth of parts of memory and of processes while memtriage keeps looking.

use std::cmp::Reverse;
use std::collections::{HashMap, VecDeque};
use std::io::{self, Write};
use std::time::Instant;

use memtools::print::output::Row;
use memtools::process::container::{self, CgroupInfo};
use serde::Serialize;

use crate::screen::{change, size};
use crate::snapshot::Snapshot;

/// Number of looks that are remembered, which is also the width of a sparkline.
const LOOKS: usize = 30;
/// Growth below which nothing is shown, in bytes.
const MIN_GROWTH: u64 = 1 << 20;
/// Maximum number of rows.
const MAX_ROWS: usize = 5;
/// Name of the part whose growth is not shown.
const FREE: &str = "free";
/// Bars of a sparkline, in eighths of a line's height.
const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];

/// Item whose size is remembered.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum ItemKey {
    Part(&'static str),
    /// Process by its pid and its start time, as pids are reused.
    Process(u32, u64),
    Unaccounted,
}

/// Sizes of all items at the last looks.
#[derive(Debug, Default)]
pub(crate) struct Growth {
    sizes: HashMap<ItemKey, Sizes>,
    looks: VecDeque<Instant>,
}

/// Sizes of one item, the newest last, in bytes.
#[derive(Debug, Default)]
struct Sizes {
    name: String,
    bytes: VecDeque<u64>,
}

impl Growth {
    /// Adds the sizes of a look.
    pub(crate) fn add(&mut self, look: &Snapshot) {
        let parts = look.accounting.parts.iter();
        let parts = parts.filter(|part| part.name != FREE);
        let parts = parts.map(|part| (ItemKey::Part(part.name), part.name, part.bytes));
        let rest = u64::try_from(look.accounting.unaccounted()).unwrap_or(0);
        let rest = [(ItemKey::Unaccounted, "unaccounted", rest)];
        let processes = look.processes.iter().map(|usage| {
            let what = ItemKey::Process(usage.pid, usage.started);
            (what, usage.comm.as_str(), usage.anon_and_swap())
        });
        self.add_sizes(look.at, parts.chain(rest).chain(processes));
    }

    fn add_sizes<'a>(&mut self, at: Instant, sizes: impl Iterator<Item = (ItemKey, &'a str, u64)>) {
        let mut before = std::mem::take(&mut self.sizes);
        for (what, name, bytes) in sizes {
            let mut kept = before.remove(&what).unwrap_or_default();
            name.clone_into(&mut kept.name);
            if kept.bytes.len() == LOOKS {
                kept.bytes.pop_front();
            }
            kept.bytes.push_back(bytes);
            self.sizes.insert(what, kept);
        }
        if self.looks.len() == LOOKS {
            self.looks.pop_front();
        }
        self.looks.push_back(at);
    }

    /// Returns the items that have grown most over the remembered looks, the largest growth first; with the column
    /// CONTAINER if that is requested.
    pub(crate) fn rows(&self, container: bool) -> Vec<Growing> {
        let row = |(what, sizes): (&ItemKey, &Sizes)| {
            let (first, last) = (*sizes.bytes.front()?, *sizes.bytes.back()?);
            let growth_bytes = last
                .checked_sub(first)
                .filter(|grown| *grown >= MIN_GROWTH)?;
            let begun = self.looks.len().checked_sub(sizes.bytes.len())?;
            let seconds = *self.looks.back()? - *self.looks.get(begun)?;
            let (what, pid) = match what {
                ItemKey::Process(pid, _) => ("process", Some(*pid)),
                ItemKey::Part(_) | ItemKey::Unaccounted => ("part", None),
            };
            Some(Growing {
                what,
                name: sizes.name.clone(),
                pid,
                cgroup_info: None,
                container,
                bytes: last,
                growth_bytes,
                seconds: seconds.as_secs_f64(),
                sizes: sizes.bytes.iter().copied().collect(),
            })
        };
        let mut rows: Vec<Growing> = self.sizes.iter().filter_map(row).collect();
        rows.sort_by(|a, b| {
            let key = |row: &Growing| (Reverse(row.growth_bytes), row.name.clone(), row.pid);
            key(a).cmp(&key(b))
        });
        rows.truncate(MAX_ROWS);
        for row in &mut rows {
            row.cgroup_info = row.pid.map(CgroupInfo::of_process);
        }
        rows
    }
}

/// Row of an item that has grown.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "growing")]
pub(crate) struct Growing {
    /// Kind of the item: `part` of memory, or `process`.
    what: &'static str,
    name: String,
    /// Pid of a process. The sizes are of its anonymous and swapped memory. None for a part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pid: Option<u32>,
    /// Cgroup of the process. None for a part.
    #[serde(flatten)]
    cgroup_info: Option<CgroupInfo>,
    /// Whether text has the column CONTAINER.
    #[serde(skip)]
    pub(crate) container: bool,
    bytes: u64,
    growth_bytes: u64,
    /// Time in which the item grew, in seconds.
    seconds: f64,
    /// Size at each look, in bytes.
    #[serde(skip)]
    sizes: Vec<u64>,
}

impl Growing {
    /// Returns the header, with CONTAINER if that column is requested.
    pub(crate) fn header(container: bool) -> String {
        let container = container::header(container);
        format!("\nGROWING                      {container}    SIZE    GROWTH     IN")
    }
}

impl Row for Growing {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let name = match self.pid {
            Some(pid) => format!("{} ({pid})", self.name),
            None => self.name.clone(),
        };
        let growth = change(self.growth_bytes.try_into().unwrap_or(i64::MAX));
        let seconds = self.seconds.round();
        let column = match &self.cgroup_info {
            Some(cgroup_info) => container::column(Some(cgroup_info), self.container),
            None => container::empty_column(self.container),
        };
        writeln!(
            out,
            "{name:<28.28} {column}{:>8} {growth:>9} {seconds:>4} s  {}",
            size(self.bytes),
            sparkline(&self.sizes)
        )
    }
}

/// Draws a bar for each number, scaled from the smallest to the largest of them.
fn sparkline(numbers: &[u64]) -> String {
    let least = numbers.iter().min().copied().unwrap_or(0);
    let range = numbers.iter().max().map_or(0, |most| most - least).max(1);
    let bar = |number: &u64| {
        let height = (number - least) as f64 / range as f64 * (BARS.len() - 1) as f64;
        BARS[height.round() as usize]
    };
    numbers.iter().map(bar).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    const MB: u64 = 1 << 20;

    #[test]
    fn a_sparkline_is_from_the_least_to_the_most() {
        assert_eq!(sparkline(&[10, 20, 30, 80]), "▁▂▃█");
        assert_eq!(sparkline(&[7, 7]), "▁▁");
        assert_eq!(sparkline(&[0, u64::MAX]), "▁█");
        assert_eq!(sparkline(&[]), "");
    }

    #[test]
    fn what_grows_most_is_first_and_what_is_gone_is_forgotten() {
        let mut growth = Growth::default();
        let start = Instant::now();
        for look in 0..3 {
            let mut sizes = vec![
                (ItemKey::Part("slab"), "slab", 100 * MB + look * MB),
                (ItemKey::Process(7, 1), "java", 10 * MB + look * 4 * MB),
                (ItemKey::Process(8, 1), "sh", 10 * MB - look),
                // Pid 9 is another process at each look.
                (ItemKey::Process(9, look), "cc1", 10 * MB * (1 + look)),
            ];
            if look < 2 {
                sizes.push((ItemKey::Process(6, 1), "gone", look * 100 * MB));
            }
            let at = start + Duration::from_secs(look);
            growth.add_sizes(at, sizes.into_iter());
        }
        let rows = growth.rows(false);
        let found: Vec<_> = rows
            .iter()
            .map(|row| (row.name.as_str(), row.pid, row.growth_bytes, row.seconds))
            .collect();
        assert_eq!(
            found,
            [("java", Some(7), 8 * MB, 2.0), ("slab", None, 2 * MB, 2.0)]
        );
        let mut text = Vec::new();
        let mut rows = growth.rows(true);
        rows[0].cgroup_info = Some(CgroupInfo::at(Some("/db.service".into())));
        rows.iter()
            .try_for_each(|row| row.text(&mut text))
            .expect("memory");
        assert_eq!(
            format!(
                "{}\n{}",
                Growing::header(true),
                String::from_utf8_lossy(&text)
            ),
            "\nGROWING                      CONTAINER            SIZE    GROWTH     IN\n\
             java (7)                     db                  18.0M     +8.0M    2 s  ▁▅█\n\
             slab                                              102M     +2.0M    2 s  ▁▅█\n"
        );
        let mut text = Vec::new();
        let rows = growth.rows(false);
        rows[0].text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8(text).expect("UTF-8"),
            "java (7)                        18.0M     +8.0M    2 s  ▁▅█\n"
        );
    }

    #[test]
    fn growth_is_of_the_looks_that_are_remembered() {
        let mut growth = Growth::default();
        let start = Instant::now();
        let looks = LOOKS as u64 + 11;
        for look in 0..looks {
            let at = start + Duration::from_secs(look);
            let size = (ItemKey::Unaccounted, "unaccounted", look * MB);
            growth.add_sizes(at, [size].into_iter());
        }
        let rows = growth.rows(false);
        let remembered = LOOKS as u64 - 1;
        assert_eq!(rows[0].growth_bytes, remembered * MB);
        assert_eq!(rows[0].seconds, remembered as f64);
        assert_eq!(rows[0].sizes.len(), LOOKS);
    }
}
