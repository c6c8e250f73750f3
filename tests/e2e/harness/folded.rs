//! Folded stacks, as tools print them: a line for each stack, with its frames and its weight.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};

/// Parses folded lines into frames, outermost first, and weights. Empty lines, which separate summaries, are skipped.
pub(crate) fn folded(stdout: &str) -> Result<Vec<(Vec<&str>, u64)>> {
    let lines = stdout.lines().filter(|line| !line.is_empty());
    lines.map(stack).collect()
}

fn stack(line: &str) -> Result<(Vec<&str>, u64)> {
    let (frames, weight) = line.rsplit_once(' ').with_context(|| line.to_owned())?;
    let weight = weight.parse().with_context(|| line.to_owned())?;
    Ok((frames.split(';').collect(), weight))
}

/// Returns the weights of stacks by innermost frame. Every stack must have the root frame `root`.
pub(crate) fn by_leaf<'a>(
    stacks: impl IntoIterator<Item = (Vec<&'a str>, u64)>,
    root: &str,
) -> Result<HashMap<&'a str, u64>> {
    let mut leaves = HashMap::new();
    for (stack, weight) in stacks {
        ensure!(stack[0] == root, "{stack:?}");
        let leaf = stack.last().context("no frames")?;
        *leaves.entry(*leaf).or_insert(0) += weight;
    }
    Ok(leaves)
}
