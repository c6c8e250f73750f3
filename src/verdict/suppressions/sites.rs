//! Matching of stacks with patterns of calls.

use crate::print::demangle::demangle;
use crate::stacks::named::Frame;

use super::FramePattern;

/// Functions of the allocator, one of which has allocated each block. They have frames in Memcheck's stacks, but not in
/// the stacks of a trace.
const ALLOCATORS: [&str; 8] = [
    "malloc",
    "calloc",
    "realloc",
    "memalign",
    "posix_memalign",
    "aligned_alloc",
    "valloc",
    "reallocarray",
];

impl FramePattern {
    fn is(&self, site: &Site) -> bool {
        match self {
            Self::Function(pattern) => {
                // Patterns are of mangled names, but some stacks have only demangled names.
                let is = |name: &&str| {
                    matches(pattern, name)
                        || (pattern.starts_with("_Z") && demangle(pattern) == **name)
                };
                site.functions.iter().any(is)
            }
            Self::Object(pattern) => site.object.is_some_and(|path| matches(pattern, path)),
            Self::Source(pattern, line) => site.source.is_some_and(|(file, number)| {
                let base = file.rsplit('/').next().unwrap_or(file);
                (matches(pattern, base) || matches(pattern, file))
                    && line.is_none_or(|line| line == number)
            }),
            Self::Any => true,
        }
    }
}

/// Call of a stack, with what patterns are matched with.
#[derive(Debug, Default)]
pub(super) struct Site<'a> {
    functions: Vec<&'a str>,
    object: Option<&'a str>,
    source: Option<(&'a str, u32)>,
}

impl<'a> Site<'a> {
    /// Returns the calls of a stack, innermost first: the call of the allocator, then the frames with their inlined
    /// calls.
    pub(super) fn of(frames: &'a [Frame]) -> Vec<Self> {
        let mut sites = vec![Self {
            functions: ALLOCATORS.to_vec(),
            ..Self::default()
        }];
        for frame in frames {
            let object = frame
                .code
                .as_ref()
                .and_then(|code| code.file.raw_path().to_str());
            for call in frame.source.inlined() {
                sites.push(Self {
                    functions: call.function.as_deref().into_iter().collect(),
                    object,
                    source: call.file.as_deref().map(|file| (file, call.line)),
                });
            }
            let place = frame.source.lines.last();
            let place = place.and_then(|line| Some((line.file.as_deref()?, line.line)));
            let function = frame.symbol.as_ref().map(|(name, _)| &**name);
            sites.push(Self {
                functions: function
                    .into_iter()
                    .chain(frame.mangled.as_deref())
                    .collect(),
                object,
                source: place,
            });
        }
        sites
    }
}

/// Whether the innermost calls match the patterns. The time is bounded by the product of both lengths.
pub(super) fn begins_with(sites: &[Site], callers: &[FramePattern]) -> bool {
    // By number of calls: whether the patterns so far can have matched as many. With `...`, several numbers are
    // possible.
    let mut taken = vec![false; sites.len() + 1];
    taken[0] = true;
    for caller in callers {
        if *caller == FramePattern::Any {
            let first = taken.iter().position(|&can| can).unwrap_or(taken.len());
            taken[first..].fill(true);
            continue;
        }
        for at in (0..sites.len()).rev() {
            taken[at + 1] = taken[at] && caller.is(&sites[at]);
        }
        taken[0] = false;
    }
    taken.contains(&true)
}

/// Whether a text matches a pattern, in which `*` matches any text and `?` any byte. The time is bounded by the product
/// of both lengths.
fn matches(pattern: &str, text: &str) -> bool {
    let (pattern, text) = (pattern.as_bytes(), text.as_bytes());
    let (mut at, mut of, mut star) = (0, 0, None);
    while of < text.len() {
        match pattern.get(at) {
            Some(b'*') => {
                star = Some((at, of));
                at += 1;
            }
            Some(&byte) if byte == b'?' || byte == text[of] => {
                at += 1;
                of += 1;
            }
            _ => {
                // The last star matches one more byte.
                let Some((star_at, star_of)) = star else {
                    return false;
                };
                star = Some((star_at, star_of + 1));
                at = star_at + 1;
                of = star_of + 1;
            }
        }
    }
    pattern[at.min(pattern.len())..]
        .iter()
        .all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_take_as_long_as_they_are() {
        assert!(matches("*", "") && matches("a*c?", "abbcd") && matches("**b", "ab"));
        assert!(!matches("a*c?", "abbc") && !matches("", "a") && !matches("?", ""));
        let pattern = "*a".repeat(200);
        assert!(!matches(&pattern, &"a".repeat(199)));
        assert!(matches(&pattern, &"a".repeat(10_000)));
    }
}
