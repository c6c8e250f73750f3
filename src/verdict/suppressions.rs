//! Suppressions in valgrind's file format (`--suppressions`): patterns of call stacks whose leaks are not reported.
//!
//! Only Memcheck's entries about leaks are used. Other entries are omitted, and counted.

mod sites;

use std::fs::File;
use std::io::Read;
use std::path::Path;

use crate::stacks::named::Frame;
use anyhow::{Context, Result, bail, ensure};

use sites::{Site, begins_with};

/// Limits of a suppression file. Valgrind's own limits are lower.
const MAX_BYTES: u64 = 16 << 20;
const MAX_CALLERS: usize = 500;
const LONGEST_LINE: usize = 4096;

/// Kinds of leaks that Memcheck tells apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum LeakKind {
    Definite,
    Indirect,
    Possible,
    Reachable,
}

impl LeakKind {
    /// All kinds.
    pub(super) const EACH: [Self; 4] = [
        Self::Definite,
        Self::Indirect,
        Self::Possible,
        Self::Reachable,
    ];

    const NAMES: [(&'static str, Self); 4] = [
        ("definite", Self::Definite),
        ("indirect", Self::Indirect),
        ("possible", Self::Possible),
        ("reachable", Self::Reachable),
    ];
}

/// Entries of all files, in their order.
#[derive(Debug, Default)]
pub struct Suppressions {
    entries: Vec<Entry>,
    /// Number of entries that are of another tool, or not about leaks.
    ignored: u64,
}

/// Entry of a file: leaks that are not reported.
#[derive(Debug, PartialEq, Eq)]
struct Entry {
    name: String,
    kinds: Vec<LeakKind>,
    /// Patterns of the stack's first frames, innermost first.
    callers: Vec<FramePattern>,
}

/// Pattern of a frame of a stack, or of any number of frames.
#[derive(Debug, Clone, PartialEq, Eq)]
enum FramePattern {
    /// `fun:` the function, by its name or its mangled name.
    Function(String),
    /// `obj:` the file that its code is in.
    Object(String),
    /// `src:` the source file, and the line.
    Source(String, Option<u32>),
    /// `...` any frames, or none.
    Any,
}

impl Suppressions {
    /// Reads suppression files.
    ///
    /// # Errors
    /// If a file cannot be read, or is not in valgrind's format. A format error names the line.
    pub fn read(paths: &[impl AsRef<Path>]) -> Result<Self> {
        let mut all = Self::default();
        for path in paths {
            let path = path.as_ref();
            let read = || {
                let mut text = Vec::new();
                let mut file = File::open(path)?.take(MAX_BYTES + 1);
                file.read_to_end(&mut text)?;
                Ok::<_, std::io::Error>(text)
            };
            let text = read().with_context(|| format!("failed to read {}", path.display()))?;
            ensure!(
                text.len() as u64 <= MAX_BYTES,
                "{} has more than {} MB: this is no file of suppressions",
                path.display(),
                MAX_BYTES >> 20
            );
            all.add(&String::from_utf8_lossy(&text))
                .with_context(|| format!("bad suppressions in {}", path.display()))?;
        }
        Ok(all)
    }

    /// Adds the entries of a file.
    fn add(&mut self, text: &str) -> Result<()> {
        let long = text.lines().position(|line| line.len() > LONGEST_LINE);
        if let Some(before) = long {
            bail!("line {}: longer than {LONGEST_LINE} bytes", before + 1);
        }
        let lines = (1..).zip(text.lines().map(str::trim));
        let mut lines = lines.filter(|(_, line)| !line.is_empty() && !line.starts_with('#'));
        while let Some((number, line)) = lines.next() {
            ensure!(
                line == "{",
                "line {number}: an entry begins with {{, alone on its line"
            );
            match Entry::parse(number, &mut lines)? {
                Some(entry) => self.entries.push(entry),
                None => self.ignored += 1,
            }
        }
        Ok(())
    }

    /// Returns the number of entries that were omitted.
    pub fn ignored(&self) -> u64 {
        self.ignored
    }

    /// Whether patterns need source lines.
    pub fn want_source(&self) -> bool {
        let callers = self.entries.iter().flat_map(|entry| &entry.callers);
        callers
            .into_iter()
            .any(|caller| matches!(caller, FramePattern::Source(..)))
    }

    /// Returns the kinds of leaks that are suppressed for a stack with these frames, each with the number of the first
    /// entry that suppresses it.
    pub(super) fn find(&self, frames: &[Frame]) -> Vec<(LeakKind, usize)> {
        let sites = Site::of(frames);
        // Our stacks have no frame of the allocator's own function, but have one of operator new, which calls it.
        let fits = |entry: &Entry| {
            begins_with(&sites[1..], &entry.callers) || begins_with(&sites, &entry.callers)
        };
        let entries = self.entries.iter().enumerate();
        let fitting: Vec<_> = entries.filter(|(_, entry)| fits(entry)).collect();
        let first_of = |kind: LeakKind| {
            let mut of_kind = fitting
                .iter()
                .filter(|(_, entry)| entry.kinds.contains(&kind));
            of_kind.next().map(|&(number, _)| (kind, number))
        };
        LeakKind::EACH.into_iter().filter_map(first_of).collect()
    }

    /// Returns the name of an entry.
    pub(super) fn name(&self, number: usize) -> &str {
        &self.entries[number].name
    }

    /// Returns the number of entries.
    pub(super) fn count(&self) -> usize {
        self.entries.len()
    }
}

impl Entry {
    /// Parses an entry, from the line after its opening brace to the closing brace. `begins` is the line of the opening
    /// brace. Returns None if the entry is not about Memcheck's leaks.
    fn parse<'a>(
        begins: usize,
        lines: &mut impl Iterator<Item = (usize, &'a str)>,
    ) -> Result<Option<Self>> {
        let mut is_closed = false;
        let rest: Vec<_> = lines
            .take_while(|(_, line)| {
                is_closed = *line == "}";
                !is_closed
            })
            .collect();
        let mut rest = rest.into_iter();
        let end = || format!("line {begins}: this entry has no kind, such as Memcheck:Leak");
        let (_, name) = rest.next().with_context(end)?;
        let (number, kind) = rest.next().with_context(end)?;
        let (tools, kind) = kind.split_once(':').with_context(|| {
            format!("line {number}: a kind is written as TOOL:KIND, such as Memcheck:Leak")
        })?;
        let is_memcheck = tools.split(',').any(|tool| tool.trim() == "Memcheck");
        let mut entry = Self {
            name: name.to_owned(),
            kinds: LeakKind::EACH.to_vec(),
            callers: Vec::new(),
        };
        ensure!(
            is_closed,
            "line {begins}: this entry has no end, which is }}"
        );
        if !is_memcheck || kind.trim() != "Leak" {
            return Ok(None);
        }
        for (number, line) in rest {
            match line.strip_prefix("match-leak-kinds:") {
                Some(kinds) if entry.callers.is_empty() => {
                    entry.kinds = leak_kinds(kinds)
                        .with_context(|| format!("line {number}: bad match-leak-kinds"))?;
                }
                _ => entry.callers.push(
                    FramePattern::parse(line)
                        .with_context(|| format!("line {number}: not understood: {line}"))?,
                ),
            }
            ensure!(
                entry.callers.len() <= MAX_CALLERS,
                "line {number}: more than {MAX_CALLERS} frames"
            );
        }
        ensure!(
            entry
                .callers
                .iter()
                .any(|caller| *caller != FramePattern::Any),
            "line {begins}: this entry names no frame, and would suppress all"
        );
        Ok(Some(entry))
    }
}

/// Parses a list of kinds such as `definite,possible`. The list may also be `all` or `none`.
fn leak_kinds(list: &str) -> Result<Vec<LeakKind>> {
    match list.trim() {
        "all" => return Ok(LeakKind::EACH.to_vec()),
        "none" => return Ok(Vec::new()),
        _ => (),
    }
    let kind = |word: &str| {
        let found = LeakKind::NAMES
            .iter()
            .find(|(name, _)| *name == word.trim());
        found.map(|(_, kind)| *kind).with_context(|| {
            format!("{word} is not one of definite, indirect, possible, reachable, all, none")
        })
    };
    list.split(',').map(kind).collect()
}

impl FramePattern {
    fn parse(line: &str) -> Result<Self> {
        if line == "..." {
            return Ok(Self::Any);
        }
        let (what, pattern) = line
            .split_once(':')
            .context("a frame begins with fun:, obj: or src:, or is ...")?;
        let pattern = pattern.trim();
        match what {
            "fun" => Ok(Self::Function(pattern.to_owned())),
            "obj" => Ok(Self::Object(pattern.to_owned())),
            "src" => {
                let place = pattern.rsplit_once(':');
                let line = place.and_then(|(_, line)| line.parse().ok());
                let file = place.filter(|_| line.is_some());
                Ok(Self::Source(
                    file.map_or(pattern, |(file, _)| file).to_owned(),
                    line,
                ))
            }
            _ => bail!("a frame begins with fun:, obj: or src:, or is ..."),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(function: &str) -> Frame {
        Frame {
            symbol: Some((function.into(), 7)),
            ..Frame::default()
        }
    }

    fn parsed(text: &str) -> Result<Suppressions> {
        let mut all = Suppressions::default();
        all.add(text)?;
        Ok(all)
    }

    #[test]
    fn entries_about_leaks_are_taken_and_others_counted() {
        let all = parsed(
            "# a comment\n{\n  <pool>\n  Memcheck:Leak\n  match-leak-kinds: definite,indirect\n\n  \
             fun:malloc\n  fun:pool_*\n  obj:*/libpool.so.?\n  src:pool.c:41\n  ...\n}\n\
             {\n  cond\n  Memcheck:Cond\n  fun:f\n}\n\
             {\n  race\n  Helgrind:Race\n  fun:f\n}\n\
             {\n  both\n  drd,Memcheck:Leak\n  fun:f\n}\n",
        )
        .expect("valid");
        assert_eq!((all.entries.len(), all.ignored()), (2, 2));
        let pool = &all.entries[0];
        assert_eq!(pool.name, "<pool>");
        assert_eq!(pool.kinds, [LeakKind::Definite, LeakKind::Indirect]);
        let source = FramePattern::Source("pool.c".into(), Some(41));
        assert_eq!(pool.callers[3..], [source, FramePattern::Any]);
        assert_eq!(all.entries[1].kinds.len(), 4);
        assert!(all.want_source());
    }

    #[test]
    fn what_is_wrong_is_named_with_its_line() {
        for (text, says) in [
            ("fun:f\n", "line 1: an entry begins"),
            ("{\n", "line 1: this entry has no kind"),
            ("{\n}\n", "line 1: this entry has no kind"),
            ("{\nname\nLeak\nfun:f\n}\n", "line 3: a kind is written"),
            (
                "{\nname\nMemcheck:Leak\n}\n",
                "line 1: this entry names no frame",
            ),
            ("{\nname\nMemcheck:Leak\n...\n}\n", "names no frame"),
            (
                "{\nname\nMemcheck:Leak\nfun:f\n",
                "line 1: this entry has no end",
            ),
            (
                "\n{\nname\nMemcheck:Leak\nfn:f\n}\n",
                "line 5: not understood: fn:f",
            ),
            (
                "{\nname\nMemcheck:Leak\nmatch-leak-kinds: some\nfun:f\n}\n",
                "line 4: bad match-leak-kinds",
            ),
        ] {
            let error = format!("{:#}", parsed(text).expect_err(text));
            assert!(error.contains(says), "{text}: {error}");
        }
        let wide = format!("{{\nname\nMemcheck:Leak\nfun:{}\n}}\n", "f".repeat(4096));
        let error = parsed(&wide).expect_err("too wide").to_string();
        assert_eq!(error, "line 4: longer than 4096 bytes");
        let long = format!("{{\nname\nMemcheck:Leak\n{}}}\n", "fun:f\n".repeat(501));
        let error = parsed(&long).expect_err("too long").to_string();
        assert_eq!(error, "line 504: more than 500 frames");
    }

    #[test]
    fn stacks_begin_with_the_allocator_or_not() {
        let find = |callers: &str, frames: &[&str]| {
            let text = format!("{{\nname\nMemcheck:Leak\n{callers}\n}}\n");
            let frames: Vec<_> = frames.iter().copied().map(frame).collect();
            let all = parsed(&text).expect("valid");
            let found = all.find(&frames);
            found.iter().any(|(kind, _)| *kind == LeakKind::Definite)
        };
        let stack = ["fill", "load", "load", "main"];
        for callers in [
            "fun:malloc\nfun:fill",
            "fun:*alloc\nfun:fill\nfun:load",
            "fun:fill",
            "...\nfun:main",
            "fun:malloc\n...\nfun:load\nfun:main",
            "...\nfun:l?ad\n...\nfun:load",
        ] {
            assert!(find(callers, &stack), "{callers}");
        }
        for callers in [
            "fun:load",
            "fun:malloc\nfun:load",
            "fun:fill\n...\nfun:fill",
            "fun:fill\n...\nfun:fi*",
            "fun:fill\nfun:load\nfun:load\nfun:main\nfun:_start",
            "obj:*\nfun:load",
            "src:*",
        ] {
            assert!(!find(callers, &stack), "{callers}");
        }
        let new = ["operator new(unsigned long)", "app::Session::open(int)"];
        assert!(find("fun:_Znwm\nfun:_ZN3app7Session4openEi", &new));
        assert!(find("fun:_Znwm\nfun:app::Session::*", &new));
        assert!(!find("fun:_Znwm\nfun:_ZN3app7Session4openEv", &new));
    }

    #[test]
    fn wildcards_match_mangled_names() {
        let mut open = frame("app::Session::open(int)");
        open.mangled = Some("_ZN3app7Session4openEi".into());
        for (pattern, fits) in [
            ("_ZN3app7Session*", true),
            ("_Z*4openE?", true),
            ("app::Session::*", true),
            ("_ZN3app5Cache*", false),
            ("_Z*4openEv", false),
        ] {
            let text = format!("{{\nname\nMemcheck:Leak\nfun:{pattern}\n}}\n");
            let found = parsed(&text)
                .expect("valid")
                .find(std::slice::from_ref(&open));
            assert_eq!(!found.is_empty(), fits, "{pattern}");
        }
    }

    #[test]
    fn kinds_are_looked_at() {
        let text = "{\nname\nMemcheck:Leak\nmatch-leak-kinds: possible\nfun:f\n}\n";
        let all = parsed(text).expect("valid");
        let frames = [frame("f")];
        assert_eq!(all.find(&frames), [(LeakKind::Possible, 0)]);
    }
}
