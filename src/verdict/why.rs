//! Row of `--why`: who holds blocks, as a tree.

use std::io::{self, Write};

use crate::print::output::Row;
use crate::print::text;
use serde::Serialize;

use super::judge::Tree;

/// Limits of a tree: the branches that are shown below one branch, and the levels that are shown.
const MAX_BRANCHES: usize = 8;
const MAX_DEPTH: usize = 12;

/// Holders of the blocks that --why asks for.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "why")]
pub struct Why {
    pub(super) question: String,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    /// Number of blocks whose holders are in the tree.
    pub(super) traced_blocks: u64,
    pub(super) tree: Vec<Branch>,
    /// Number of smaller holders that the tree omits.
    pub(super) more: usize,
}

/// A holder, and what it refers to.
#[derive(Debug, Serialize)]
pub(super) struct Branch {
    pub(super) holder: String,
    pub(super) blocks: u64,
    pub(super) bytes: u64,
    pub(super) below: Vec<Branch>,
    /// Number of holders omitted below: the smaller ones, or all where the tree is cut off.
    pub(super) more: usize,
}

impl Branch {
    /// Returns the branches of a tree that are shown, the largest first, and the number of branches omitted.
    pub(super) fn list(tree: &Tree, depth: usize) -> (Vec<Self>, usize) {
        let mut list: Vec<_> = tree.below.iter().collect();
        list.sort_by_key(|(_, tree)| std::cmp::Reverse(tree.sum.bytes));
        list.truncate(if depth == MAX_DEPTH { 0 } else { MAX_BRANCHES });
        let branch = |(holder, tree): (&String, &Tree)| {
            let (below, more) = Self::list(tree, depth + 1);
            Self {
                holder: holder.clone(),
                blocks: tree.sum.blocks,
                bytes: tree.sum.bytes,
                below,
                more,
            }
        };
        let more = tree.below.len() - list.len();
        (list.into_iter().map(branch).collect(), more)
    }

    /// Writes branches, and that `more` branches are not shown.
    fn text_of(list: &[Self], more: usize, depth: usize, out: &mut dyn Write) -> io::Result<()> {
        list.iter().try_for_each(|branch| branch.text(depth, out))?;
        if more > 0 {
            let indent = "  ".repeat(depth);
            writeln!(out, "\t{indent}... and {} more", text::grouped(more as u64))?;
        }
        Ok(())
    }

    fn text(&self, depth: usize, out: &mut dyn Write) -> io::Result<()> {
        let blocks = text::count_with_noun(self.blocks, "block");
        let bytes = text::grouped(self.bytes);
        let indent = "  ".repeat(depth);
        writeln!(out, "\t{indent}{} ({bytes} bytes in {blocks})", self.holder)?;
        Self::text_of(&self.below, self.more, depth + 1, out)
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
        let (blocks, bytes) = (
            text::count_with_noun(*blocks, "block"),
            text::grouped(*bytes),
        );
        write!(out, "WHY {question}: {bytes} bytes in {blocks}")?;
        if self.traced_blocks < self.blocks {
            write!(
                out,
                ", of which the first {} are followed",
                self.traced_blocks
            )?;
        }
        writeln!(out)?;
        Branch::text_of(&self.tree, self.more, 0, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::verdict::judge::Sum;

    #[test]
    fn a_tree_says_how_many_of_its_holders_are_not_shown() {
        let leaf = |bytes| Tree {
            sum: Sum { blocks: 1, bytes },
            ..Tree::default()
        };
        let mut tree = leaf(0);
        for number in 0..20 {
            tree.below.insert(format!("g_{number}"), leaf(number));
        }
        let largest = tree.below.get_mut("g_19").expect("it was inserted");
        largest.below.insert("Node".into(), leaf(19));
        // A chain that is one level deeper than what is shown.
        let deep = (0..MAX_DEPTH).fold(leaf(1), |tree, _| {
            let below = [("Node".to_owned(), tree)].into();
            Tree { below, ..leaf(1) }
        });
        let (mut list, cut) = Branch::list(
            &Tree {
                below: [("g".to_owned(), deep)].into(),
                ..leaf(1)
            },
            0,
        );
        assert_eq!((list.len(), cut), (1, 0));
        while let Some(branch) = list.pop() {
            assert_eq!(
                branch.more,
                usize::from(branch.below.is_empty()),
                "{branch:?}"
            );
            list = branch.below;
        }
        let (tree, more) = Branch::list(&tree, 0);
        let why = Why {
            question: "16".into(),
            blocks: 20,
            bytes: 190,
            traced_blocks: 20,
            tree,
            more,
        };
        assert_eq!((why.tree.len(), why.more), (MAX_BRANCHES, 12));
        let mut lines = Vec::new();
        why.text(&mut lines).expect("memory");
        let lines = String::from_utf8(lines).expect("UTF-8");
        assert!(
            lines.ends_with("\tg_12 (12 bytes in 1 block)\n\t... and 12 more\n"),
            "{lines}"
        );
        assert_eq!(lines.matches(" more\n").count(), 1, "{lines}");
    }
}
