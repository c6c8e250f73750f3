//! What `--verdict` prints.

use std::io::{self, Write};

use memtools::print::output::Row;
use memtools::print::text;
use serde::Serialize;

use super::judge::{Group, Kind, Sums, Tree};

/// Branches of a tree that are shown below one, and how deep.
const MOST_BRANCHES: usize = 8;
const MOST_DEPTH: usize = 12;

/// The verdict on a process: its blocks by class.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "verdict")]
pub(super) struct Verdict {
    pub(super) pid: u32,
    pub(super) comm: String,
    /// By image.
    pub(super) pauses_us: Vec<u64>,
    pub(super) copied_bytes: u64,
    pub(super) allocator: String,
    pub(super) coverage: &'static str,
    pub(super) references: usize,
    #[serde(flatten)]
    pub(super) sums: Sums,
}

impl Row for Verdict {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let pauses = self.pauses_us.iter();
        let pauses: Vec<_> = pauses
            .map(|&us| format!("{:.1} ms", us as f64 / 1000.0))
            .collect();
        writeln!(
            out,
            "verdict on {} (pid {}), which stood still for {}; {} copied",
            self.comm,
            self.pid,
            pauses.join(" and "),
            text::bytes(self.copied_bytes)
        )?;
        let sums = &self.sums;
        let all = [
            ("unreachable", sums.unreachable, "a leak"),
            (
                "unreachable via these",
                sums.unreachable_via,
                "lost with them",
            ),
            (
                "undecided",
                sums.undecided,
                "unreachable in the last copy only",
            ),
            (
                "in Python's cycles",
                sums.python_cycles,
                "to be freed by its garbage collector",
            ),
            ("reachable", sums.reachable, ""),
            (
                "reachable, interior only",
                sums.interior_only,
                "through a middle, or an address in another form",
            ),
        ];
        let blocks = all.iter().map(|(_, sum, _)| sum.blocks).sum();
        writeln!(
            out,
            "{}; coverage: {}: {}",
            self.allocator,
            self.coverage,
            text::counted(blocks, "block")
        )?;
        for (name, sum, remark) in all {
            if sum.blocks == 0 && name != "unreachable" {
                continue;
            }
            let (blocks, bytes) = (text::counted(sum.blocks, "block"), text::bytes(sum.bytes));
            let remark = if sum.blocks > 0 { remark } else { "" };
            let line = format!("{name:>26} {blocks:>18} {bytes:>12}  {remark}");
            writeln!(out, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// Blocks of a kind that nothing refers to, with what was lost with them.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "lost")]
pub(super) struct Lost {
    #[serde(flatten)]
    pub(super) what: What,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) via_blocks: u64,
    pub(super) via_bytes: u64,
    pub(super) address: String,
}

/// A kind of blocks.
#[derive(Debug, Serialize)]
pub(super) struct What {
    pub(super) name: Option<String>,
    pub(super) size_bytes: Option<u64>,
}

impl From<&Kind> for What {
    fn from(kind: &Kind) -> Self {
        match kind {
            Kind::Type(name) => Self {
                name: Some(text::escape(name).into_owned()),
                size_bytes: None,
            },
            Kind::Size(bytes) => Self {
                name: None,
                size_bytes: Some(*bytes),
            },
        }
    }
}

impl What {
    fn text(&self) -> String {
        match (&self.name, self.size_bytes) {
            (Some(name), _) => name.clone(),
            (None, size) => format!("unnamed, {} bytes each", size.unwrap_or_default()),
        }
    }
}

impl Lost {
    pub(super) fn of(group: &Group, address: u64) -> Self {
        Self {
            what: (&group.kind).into(),
            blocks: group.sum.blocks,
            bytes: group.sum.bytes,
            via_blocks: group.via.blocks,
            via_bytes: group.via.bytes,
            address: format!("{address:#x}"),
        }
    }
}

impl Row for Lost {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "\t{} bytes in {} unreachable",
            text::grouped(self.bytes),
            text::counted(self.blocks, "block"),
        )?;
        if self.via_blocks > 0 {
            write!(
                out,
                " (+ {} bytes in {} via)",
                text::grouped(self.via_bytes),
                text::counted(self.via_blocks, "block")
            )?;
        }
        let Self { what, address, .. } = self;
        writeln!(out, ": {}, such as {address}", what.text())
    }
}

/// Blocks of a kind that can be reached, and what one of them is held by.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "held")]
pub(super) struct Held {
    #[serde(flatten)]
    pub(super) what: What,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) address: String,
    /// The nearest holder first.
    pub(super) chain: Vec<String>,
    pub(super) chain_blocks: usize,
    pub(super) root: String,
}

impl Row for Held {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let mut chain = self.chain.clone();
        if self.chain_blocks > chain.len() {
            chain.push(format!(
                "... {} blocks",
                self.chain_blocks - self.chain.len()
            ));
        }
        chain.push(self.root.clone());
        writeln!(
            out,
            "\t{} bytes in {} reachable: {} <- {}",
            text::grouped(self.bytes),
            text::counted(self.blocks, "block"),
            self.what.text(),
            chain.join(" <- ")
        )
    }
}

/// What holds the blocks that --why asks for.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "why")]
pub(super) struct Why {
    pub(super) question: String,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// Blocks that the tree is of.
    pub(super) traced_blocks: u64,
    pub(super) tree: Vec<Branch>,
}

/// A holder, and what it refers to.
#[derive(Debug, Serialize)]
pub(super) struct Branch {
    pub(super) holder: String,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) below: Vec<Branch>,
}

impl Branch {
    /// The branches of a tree, the largest first, as far as they are shown.
    pub(super) fn list(tree: &Tree, depth: usize) -> Vec<Self> {
        if depth == MOST_DEPTH {
            return Vec::new();
        }
        let mut list: Vec<_> = tree.below.iter().collect();
        list.sort_by_key(|(_, tree)| std::cmp::Reverse(tree.sum.bytes));
        list.truncate(MOST_BRANCHES);
        let branch = |(holder, tree): (&String, &Tree)| Self {
            holder: holder.clone(),
            blocks: tree.sum.blocks,
            bytes: tree.sum.bytes,
            below: Self::list(tree, depth + 1),
        };
        list.into_iter().map(branch).collect()
    }

    fn text(&self, depth: usize, out: &mut dyn Write) -> io::Result<()> {
        let blocks = text::counted(self.blocks, "block");
        let bytes = text::grouped(self.bytes);
        let indent = "  ".repeat(depth);
        writeln!(out, "\t{indent}{} ({bytes} bytes in {blocks})", self.holder)?;
        self.below
            .iter()
            .try_for_each(|branch| branch.text(depth + 1, out))
    }
}

impl Row for Why {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            question,
            blocks,
            bytes,
            ..
        } = self;
        let (blocks, bytes) = (text::counted(*blocks, "block"), text::grouped(*bytes));
        write!(out, "WHY {question}: {bytes} bytes in {blocks}")?;
        if self.traced_blocks < self.blocks {
            write!(
                out,
                ", of which the first {} are followed",
                self.traced_blocks
            )?;
        }
        writeln!(out)?;
        self.tree.iter().try_for_each(|branch| branch.text(0, out))
    }
}
