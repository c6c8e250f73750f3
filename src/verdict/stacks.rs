//! Symbolized stacks of blocks' allocations: which of them are suppressed, and which contain a function.

use std::collections::HashMap;

use crate::stacks::named::{Frame, NamedStack};
use anyhow::Result;

use super::report::Origin;
use super::suppressions::{LeakKind, Suppressions};
use super::traced_blocks::{AllocSite, TracedBlocks};

/// Source of the stacks that blocks were allocated by.
pub trait Stacks {
    /// Returns the symbolized stack of an id. Returns None if nothing was traced.
    ///
    /// # Errors
    /// If the stack cannot be read.
    fn symbolize(&mut self, stack: u64) -> Result<Option<NamedStack>>;

    /// Returns the symbolized stack, and the ages of the blocks that it has allocated. Returns None if nothing was
    /// traced.
    ///
    /// # Errors
    /// If the stack cannot be read.
    fn origin(&mut self, born: AllocSite) -> Result<Option<Origin>>;
}

/// Source of stacks of a verdict without a trace.
pub struct Untraced;

impl Stacks for Untraced {
    fn symbolize(&mut self, _: u64) -> Result<Option<NamedStack>> {
        Ok(None)
    }

    fn origin(&mut self, _: AllocSite) -> Result<Option<Origin>> {
        Ok(None)
    }
}

/// Symbolized stacks of the traced blocks, and what suppresses them.
#[derive(Debug, Default)]
pub(super) struct SymbolizedStacks {
    /// Symbolized stacks. Empty if no option needs them.
    stacks: HashMap<u64, NamedStack>,
    /// Numbers of the entries that suppress leaks, by stack and kind of leak.
    suppressed: HashMap<(u64, LeakKind), usize>,
}

impl SymbolizedStacks {
    /// Symbolizes the stacks of the traced blocks, if options ask for something that is looked up in the names.
    pub(super) fn of(
        seen: &TracedBlocks,
        suppressions: &Suppressions,
        why: &[String],
        stacks: &mut dyn Stacks,
    ) -> Result<Self> {
        let mut known = Self::default();
        if why.is_empty() && suppressions.count() == 0 {
            return Ok(known);
        }
        for key in seen.stacks() {
            let Some(stack) = stacks.symbolize(key)? else {
                continue;
            };
            let found = suppressions.find(frames(&stack)).into_iter();
            let found = found.map(|(kind, entry)| ((key, kind), entry));
            known.suppressed.extend(found);
            known.stacks.insert(key, stack);
        }
        Ok(known)
    }

    /// Returns the number of the entry that suppresses leaks of this kind, allocated by this stack.
    pub(super) fn suppressed(&self, key: u64, kind: LeakKind) -> Option<usize> {
        self.suppressed.get(&(key, kind)).copied()
    }

    /// Whether a function of this name is in the stack. The name may omit the parameters and the enclosing scopes.
    pub(super) fn has_function(&self, key: u64, name: &str) -> bool {
        let stack = self.stacks.get(&key);
        let mut symbols = stack
            .into_iter()
            .flat_map(frames)
            .filter_map(|frame| frame.symbol.as_ref());
        symbols.any(|(symbol, _)| is_called(symbol, name))
    }
}

fn frames(stack: &NamedStack) -> &[Frame] {
    stack.part().map_or(&[], |part| &part.frames)
}

/// Whether a name means a function. `app::Session::open(int)` is meant by its full name, by `app::Session::open` and by
/// `open`.
fn is_called(symbol: &str, name: &str) -> bool {
    let base = without_parameters(symbol);
    let is_scoped = || {
        let before = base.strip_suffix(name);
        before.is_some_and(|before| before.is_empty() || before.ends_with("::"))
    };
    symbol == name || (!name.is_empty() && is_scoped())
}

/// Returns a function's name without the parameters at its end.
fn without_parameters(symbol: &str) -> &str {
    let whole = symbol.strip_suffix(" const").unwrap_or(symbol);
    if !whole.ends_with(')') {
        return whole;
    }
    let mut depth = 0;
    for (at, byte) in whole.bytes().enumerate().rev() {
        match byte {
            b')' => depth += 1,
            b'(' => depth -= 1,
            _ => (),
        }
        if depth == 0 {
            return &whole[..at];
        }
    }
    whole
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_meant_by_their_names_in_each_form() {
        let symbol = "(anonymous namespace)::Session::open(int, void (*)(int)) const";
        for name in [
            symbol,
            "(anonymous namespace)::Session::open",
            "Session::open",
            "open",
        ] {
            assert!(is_called(symbol, name), "{name}");
        }
        for name in ["", "pen", "Session", "ssion::open", "open(int)"] {
            assert!(!is_called(symbol, name), "{name}");
        }
        assert!(is_called("main", "main") && !is_called("main2", "main"));
        assert!(is_called(")", ")") && !is_called("f)", "f"));
    }
}
