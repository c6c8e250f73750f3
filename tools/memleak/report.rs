//! What is outstanding, grouped by stack, and how it is printed.

use std::collections::HashMap;
use std::io::{self, Write};

use jiff::Zoned;
use memtools::clock;
use memtools::losses::Losses;
use memtools::output::Row;
use memtools::symbolize::Frame;
use serde::{Serialize, Serializer};

use crate::args::SortKey;

/// An allocation that was not freed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Allocation {
    pub(crate) address: u64,
    /// Bytes asked for.
    pub(crate) size: u64,
    /// Id of the stack that made it.
    pub(crate) stack: u64,
    /// How many calls it stands for: 1, or 0 for a further part of a mapping that has a hole.
    pub(crate) calls: u64,
}

/// What one stack has outstanding.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Total {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
}

/// Totals by stack id.
pub(crate) type Totals = HashMap<u64, Total>;

/// Adds up allocations by stack.
pub(crate) fn add_up<'a>(
    totals: &mut Totals,
    allocations: impl IntoIterator<Item = &'a Allocation>,
) {
    for allocation in allocations {
        let total = totals.entry(allocation.stack).or_default();
        total.bytes += allocation.size;
        total.allocations += allocation.calls;
    }
}

/// The `top` stacks with the most outstanding, the largest last.
pub(crate) fn largest(totals: &Totals, key: SortKey, top: usize) -> Vec<(u64, Total)> {
    let mut stacks: Vec<(u64, Total)> = totals
        .iter()
        .filter(|(_, total)| total.allocations > 0)
        .map(|(&stack, &total)| (stack, total))
        .collect();
    stacks.sort_by_key(|&(stack, Total { bytes, allocations })| match key {
        SortKey::Size => (bytes, allocations, stack),
        SortKey::Count => (allocations, bytes, stack),
    });
    stacks.split_off(stacks.len().saturating_sub(top))
}

/// The head of a report, and in JSON its sums.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "report")]
pub(crate) struct Head {
    #[serde(serialize_with = "rfc3339")]
    pub(crate) time: Zoned,
    pub(crate) pid: u32,
    pub(crate) comm: String,
    /// Stacks asked for.
    #[serde(skip)]
    pub(crate) top: usize,
    /// Stacks with anything outstanding.
    pub(crate) stacks: usize,
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    pub(crate) lost: Losses,
}

impl Row for Head {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let time = clock::time_of_day(&self.time);
        writeln!(
            out,
            "[{time}] Top {} stacks with outstanding allocations:",
            self.top
        )
    }
}

/// An outstanding block of `--show-allocs`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "allocation")]
pub(crate) struct Block {
    #[serde(serialize_with = "hex")]
    pub(crate) address: u64,
    pub(crate) size_bytes: u64,
    #[serde(serialize_with = "hex")]
    pub(crate) stack_id: u64,
}

impl Row for Block {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\taddr = {:x} size = {}",
            self.address, self.size_bytes
        )
    }
}

/// One stack with what it has outstanding.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "stack")]
pub(crate) struct Group {
    pub(crate) bytes: u64,
    pub(crate) allocations: u64,
    #[serde(serialize_with = "hex")]
    pub(crate) stack_id: u64,
    /// Innermost first; none if the stack was lost.
    pub(crate) frames: Vec<Frame>,
    /// Whether outer frames are missing because of the depth limit.
    pub(crate) truncated: bool,
    /// Whether addresses are printed, which the BCC tool leaves out with --combined-only.
    #[serde(skip)]
    pub(crate) addresses: bool,
}

impl Row for Group {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "\t{} bytes in {} allocations from stack",
            self.bytes, self.allocations
        )?;
        for frame in &self.frames {
            if self.addresses {
                writeln!(out, "\t\t0x{:016x}\t{frame}", frame.address)?;
            } else {
                writeln!(out, "\t\t{frame}")?;
            }
        }
        if self.frames.is_empty() {
            writeln!(out, "\t\tstack information lost")?;
        } else if self.truncated {
            writeln!(out, "\t\t[truncated: deeper than --perf-max-stack-depth]")?;
        }
        Ok(())
    }
}

/// One call of `--trace`.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "call")]
pub(crate) struct Call {
    #[serde(serialize_with = "rfc3339")]
    pub(crate) time: Zoned,
    pub(crate) pid: u32,
    pub(crate) tid: u32,
    pub(crate) comm: String,
    pub(crate) step: Step,
    pub(crate) size_bytes: u64,
    #[serde(serialize_with = "hex")]
    pub(crate) address: u64,
}

/// Where in a call it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Step {
    AllocEntered,
    AllocExited,
    FreeEntered,
}

impl Row for Call {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            comm,
            tid,
            size_bytes: size,
            address,
            ..
        } = self;
        write!(out, "{} {comm}-{tid}: ", self.time.strftime("%H:%M:%S.%6f"))?;
        match self.step {
            Step::AllocEntered => writeln!(out, "alloc entered, size = {size}"),
            Step::AllocExited => writeln!(out, "alloc exited, size = {size}, result = {address:x}"),
            Step::FreeEntered => {
                writeln!(out, "free entered, address = {address:x}, size = {size}")
            }
        }
    }
}

fn rfc3339<S: Serializer>(time: &Zoned, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&clock::rfc3339(time))
}

fn hex<S: Serializer>(value: &u64, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_str(&format_args!("{value:#x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn totals() -> Totals {
        let allocation = |stack, size| Allocation {
            address: 0,
            size,
            stack,
            calls: 1,
        };
        let mut totals = Totals::new();
        add_up(
            &mut totals,
            &[
                allocation(1, 100),
                allocation(2, 10),
                allocation(2, 20),
                allocation(3, 50),
            ],
        );
        totals
    }

    fn order(key: SortKey, top: usize) -> Vec<u64> {
        largest(&totals(), key, top)
            .into_iter()
            .map(|(stack, _)| stack)
            .collect()
    }

    #[test]
    fn the_largest_come_last_and_the_smallest_are_dropped() {
        assert_eq!(order(SortKey::Size, 10), [2, 3, 1]);
        assert_eq!(order(SortKey::Size, 1), [1]);
        assert_eq!(order(SortKey::Count, 10), [3, 1, 2]);
        assert_eq!(order(SortKey::Size, 0), [0; 0]);
    }

    #[test]
    fn parts_of_one_mapping_count_once() {
        let mut totals = Totals::new();
        let part = |calls| Allocation {
            address: 0,
            size: 4096,
            stack: 1,
            calls,
        };
        add_up(&mut totals, &[part(1), part(0)]);
        assert_eq!(
            totals[&1],
            Total {
                bytes: 8192,
                allocations: 1
            }
        );
    }

    #[test]
    fn text_is_bccs() {
        let frame = Frame {
            address: 0x55d0c8a01136,
            symbol: Some(("main".to_owned(), 0x6d)),
            module: Some(("allocs".to_owned(), 0x1136)),
            kernel: false,
        };
        let mut group = Group {
            bytes: 80,
            allocations: 5,
            stack_id: 0x1f,
            frames: vec![frame],
            truncated: false,
            addresses: true,
        };
        let mut text = Vec::new();
        group.text(&mut text).expect("memory");
        group.addresses = false;
        group.text(&mut text).expect("memory");
        group.frames.clear();
        group.text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "\t80 bytes in 5 allocations from stack\n\t\t0x000055d0c8a01136\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tmain+0x6d [allocs]\n\
             \t80 bytes in 5 allocations from stack\n\t\tstack information lost\n"
        );
        let json = serde_json::to_string(&group).expect("JSON");
        assert_eq!(
            json,
            r#"{"type":"stack","bytes":80,"allocations":5,"stack_id":"0x1f","frames":[],"truncated":false}"#
        );
    }
}
