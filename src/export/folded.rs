//! Folded stacks, which flame graph tools read: one line for each stack, root first, frames joined by `;`, then a
//! space and a whole number.

use std::borrow::Cow;
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};

use anyhow::Result;

use crate::code::lines::SourceLine;
use crate::export::profile::{Profile, Sample};
use crate::stacks::named::{Frame, NamedStack, Part};

/// Suffix of the names of kernel frames, by which flame graphs colour them.
pub(super) const KERNEL_MARK: &str = "_[k]";
/// Suffix of the names of inlined calls.
pub(super) const INLINED_MARK: &str = "_[i]";

/// Stack as a line without its weight: `comm;main;f`.
#[derive(Debug, Clone, Copy)]
pub struct Folded<'a> {
    /// The stack. The kernel part follows the user part, after a frame `-`.
    pub stack: &'a NamedStack,
    /// Whether the root frame is `comm-PID`, so that processes of one name stay apart.
    pub pid: bool,
    /// Whether kernel frames end in `_[k]`, and inlined calls in `_[i]`, which flame graphs show in colours of their own.
    pub annotate: bool,
    /// Whether inlined calls are frames even if reports do not show them.
    pub inlined: bool,
}

impl fmt::Display for Folded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut line = String::new();
        self.write_frames(&mut line)?;
        f.write_str(&without_number(line))
    }
}

impl<'a> Folded<'a> {
    /// Makes a line of the stack alone, without pid, marks and hidden inlined calls.
    pub fn new(stack: &'a NamedStack) -> Self {
        Self {
            stack,
            pid: false,
            annotate: false,
            inlined: false,
        }
    }

    /// Writes the line, with its weight and a newline.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn write(&self, weight: u64, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{self} {weight}")
    }

    fn write_frames(&self, f: &mut impl fmt::Write) -> fmt::Result {
        let stack = self.stack;
        f.write_str(&escape(&*stack.comm))?;
        if self.pid {
            write!(f, "-{}", stack.pid)?;
        }
        if let Some(user) = &stack.user {
            self.write_part(user, f)?;
        }
        if let Some(kernel) = &stack.kernel {
            if stack.user.is_some() {
                f.write_str(";-")?;
            }
            self.write_part(kernel, f)?;
        }
        Ok(())
    }

    fn write_part(&self, part: &Part, f: &mut impl fmt::Write) -> fmt::Result {
        if let Some(missing) = part.missing() {
            write!(f, ";{}", escape(missing))?;
        }
        for frame in part.frames.iter().rev() {
            f.write_str(";")?;
            f.write_str(&name(frame))?;
            if frame.is_kernel() && self.annotate {
                f.write_str(KERNEL_MARK)?;
            }
            if self.inlined || frame.source.shown {
                for call in frame.source.inlined().iter().rev() {
                    let mark = if self.annotate { INLINED_MARK } else { "" };
                    write!(f, ";{}{mark}", inlined_name(call))?;
                }
            }
        }
        Ok(())
    }
}

/// Writes a profile, the largest stack first, with its main value.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(profile: &Profile, out: &mut dyn Write) -> Result<()> {
    let mut weights: HashMap<String, u64> = HashMap::new();
    for Sample { stack, values } in &profile.samples {
        let weight = values.get(profile.main_value).copied().unwrap_or_default();
        *weights.entry(Folded::new(stack).to_string()).or_default() += weight;
    }
    let mut lines: Vec<_> = weights.into_iter().collect();
    lines.sort_by(|(a, of_a), (b, of_b)| (Reverse(of_a), a).cmp(&(Reverse(of_b), b)));
    for (line, weight) in lines.into_iter().filter(|(_, weight)| *weight > 0) {
        writeln!(out, "{line} {weight}")?;
    }
    Ok(())
}

/// Returns the function of an inlined call.
pub(super) fn inlined_name(call: &SourceLine) -> Cow<'_, str> {
    escape(call.function.as_deref().unwrap_or("[unknown]"))
}

/// Returns the frame's function, or else its module in brackets.
pub(super) fn name(frame: &Frame) -> Cow<'_, str> {
    escape(frame.function_or_module())
}

/// Replaces each `;`, which would split the frame.
pub(super) fn escape<'a>(name: impl Into<Cow<'a, str>>) -> Cow<'a, str> {
    let name = name.into();
    match name.contains(';') {
        true => name.replace(';', ":").into(),
        false => name,
    }
}

/// Replaces the space before a number at the end of the stack by `_`. flamegraph.pl, which draws differences, would
/// take the number for the first of two weights.
fn without_number(mut stack: String) -> String {
    let digits = stack.trim_end_matches(|c: char| c.is_ascii_digit() || c == '.');
    let end = digits.len();
    let last = digits.chars().next_back();
    if let Some(space) = last.filter(|c| end < stack.len() && c.is_whitespace()) {
        stack.replace_range(end - space.len_utf8()..end, "_");
    }
    stack
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::named::FrameKind;

    fn frame(symbol: Option<&str>, module: Option<&str>) -> Frame {
        Frame {
            address: 1,
            symbol: symbol.map(|name| (name.into(), 0)),
            module: module.map(|name| (name.into(), 0)),
            kind: match module {
                Some("kernel") => FrameKind::Kernel,
                _ => FrameKind::Native,
            },
            ..Frame::default()
        }
    }

    fn part(frames: &[Frame]) -> Option<Part> {
        Some(Part {
            frames: frames.to_vec(),
            truncated: None,
        })
    }

    fn stack(comm: &str, user: Option<Part>) -> NamedStack {
        NamedStack {
            pid: 7,
            comm: comm.to_owned(),
            user,
            ..NamedStack::default()
        }
    }

    fn text(line: Folded<'_>, weight: u64) -> String {
        let mut text = Vec::new();
        line.write(weight, &mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn root_first_without_offsets() {
        let frames = [
            frame(Some("leaf(int; int)"), Some("a")),
            frame(None, Some("libb.so")),
            frame(None, None),
            frame(Some("main"), Some("a")),
        ];
        assert_eq!(
            text(Folded::new(&stack("my prog", part(&frames))), 4093),
            "my prog;main;[unknown];[libb.so];leaf(int: int) 4093\n"
        );
    }

    #[test]
    fn functions_of_python_have_their_lines() {
        let frames = [
            frame(Some("malloc"), Some("libc.so.6")),
            Frame::of_python(1 << 63, "load_orders", Some(("/srv/orders.py", Some(41)))),
            Frame::of_python(1 << 63, "<module>", Some(("/srv/orders.py", None))),
        ];
        assert_eq!(
            text(Folded::new(&stack("python3", part(&frames))), 7),
            "python3;<module> (orders.py);load_orders (orders.py:41);malloc 7\n"
        );
    }

    #[test]
    fn the_kernel_goes_on_from_the_user() {
        let mut stack = stack("p", part(&[frame(Some("brk"), Some("libc.so.6"))]));
        stack.kernel = part(&[
            frame(Some("do_brk_flags"), Some("kernel")),
            frame(Some("do_syscall_64"), Some("kernel")),
        ]);
        let marked = Folded {
            pid: true,
            annotate: true,
            ..Folded::new(&stack)
        };
        assert_eq!(
            text(marked, 1),
            "p-7;brk;-;do_syscall_64_[k];do_brk_flags_[k] 1\n"
        );
        stack.user = None;
        let with_pid = Folded {
            pid: true,
            ..Folded::new(&stack)
        };
        assert_eq!(text(with_pid, 1), "p-7;do_syscall_64;do_brk_flags 1\n");
    }

    /// Flame graph tools find one stack, one number and the right number of frames, whatever the names are.
    #[test]
    fn flame_graph_tools_understand_it() {
        let odd = [
            "main",
            "f(int, 7)",
            "a;b",
            "operator new 12",
            "x 1.5",
            "v 3 4",
        ];
        for name in odd {
            for frames in [
                &[][..],
                &[frame(Some(name), None)],
                &[frame(None, Some(name))],
            ] {
                let user = (!frames.is_empty()).then(|| part(frames)).flatten();
                let text = text(Folded::new(&stack(name, user)), 4093);
                let words: Vec<&str> = text.trim_end().rsplitn(3, char::is_whitespace).collect();
                assert_eq!(words[0], "4093", "{text}");
                // The word before the weight is no number.
                assert!(
                    words.len() < 3 || words[1].parse::<f64>().is_err(),
                    "{text}"
                );
                let stack = text.trim_end().strip_suffix(" 4093").expect("a weight");
                assert_eq!(stack.split(';').count(), 1 + frames.len(), "{text}");

                let mut image = Vec::new();
                let mut options = inferno::flamegraph::Options::default();
                inferno::flamegraph::from_lines(&mut options, text.lines(), &mut image)
                    .expect("a flame graph");
                let image = String::from_utf8_lossy(&image);
                assert!(image.contains("(4,093 samples, 100%)"), "{text}{image}");
            }
        }
    }

    #[test]
    fn a_cut_stack_says_so_at_its_root() {
        let cut = Part {
            frames: vec![frame(Some("f"), None)],
            truncated: Some("no unwind info: libf.so".into()),
        };
        assert_eq!(
            text(Folded::new(&stack("p", Some(cut))), 1),
            "p;[truncated: no unwind info: libf.so];f 1\n"
        );
    }

    #[test]
    fn a_lost_stack_says_so_and_one_that_is_not_there_does_not() {
        assert_eq!(text(Folded::new(&stack("p", part(&[]))), 1), "p;[lost] 1\n");
        assert_eq!(text(Folded::new(&stack("p", None)), 1), "p 1\n");
    }
}
