//! Stacks as flame graph tools read them: one line a stack, root first, frames joined by `;`,
//! a space, and a whole number.

use std::fmt;
use std::io::{self, Write};

use crate::symbolize::Frame;

/// The user's or the kernel's part of a stack, named.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Part {
    /// Innermost first, as stacks are kept; none if the stack was lost.
    pub frames: Vec<Frame>,
    /// Why frames are missing at the root, if they are.
    pub truncated: Option<String>,
}

/// One line.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Line<'a> {
    /// The root frame.
    pub comm: &'a str,
    /// Makes the root frame `comm-PID`, so that processes of one name stay apart.
    pub pid: Option<u32>,
    /// The user stack, unless it was not asked for or there is none.
    pub user: Option<Part>,
    /// The kernel stack, likewise; it goes on from the user stack, after a frame `-`.
    pub kernel: Option<Part>,
    /// Whether kernel frames end in `_[k]`, which flame graphs show in a colour of their own.
    pub annotate: bool,
    /// What the width of the frames means.
    pub weight: u64,
}

/// All but the weight.
impl fmt::Display for Line<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut stack = String::new();
        self.write_frames(&mut stack)?;
        f.write_str(&without_number(stack))
    }
}

impl Line<'_> {
    fn write_frames(&self, f: &mut impl fmt::Write) -> fmt::Result {
        f.write_str(&frame_name(self.comm))?;
        if let Some(pid) = self.pid {
            write!(f, "-{pid}")?;
        }
        let suffix = if self.annotate { "_[k]" } else { "" };
        if let Some(user) = &self.user {
            user.fmt(f, suffix)?;
        }
        if let Some(kernel) = &self.kernel {
            if self.user.is_some() {
                f.write_str(";-")?;
            }
            kernel.fmt(f, suffix)?;
        }
        Ok(())
    }

    /// Writes it, with its newline.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{self} {}", self.weight)
    }
}

impl Part {
    fn fmt(&self, f: &mut impl fmt::Write, kernel_suffix: &str) -> fmt::Result {
        if self.frames.is_empty() {
            f.write_str(";[lost]")?;
        }
        if let Some(reason) = &self.truncated {
            write!(f, ";[truncated: {}]", frame_name(reason))?;
        }
        for frame in self.frames.iter().rev() {
            match (&frame.symbol, &frame.module) {
                (Some((name, _)), _) => write!(f, ";{}", frame_name(name))?,
                (None, Some((module, _))) => write!(f, ";[{}]", frame_name(module))?,
                (None, None) => f.write_str(";[unknown]")?,
            }
            if frame.kernel {
                f.write_str(kernel_suffix)?;
            }
        }
        Ok(())
    }
}

/// A `;` would split the frame.
fn frame_name(name: &str) -> String {
    name.replace(';', ":")
}

/// A number after a space at the end would be taken for the weight, and the weight for that of a
/// stack to compare with: flamegraph.pl draws differences.
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

    fn frame(symbol: Option<&str>, module: Option<&str>) -> Frame {
        Frame {
            address: 1,
            symbol: symbol.map(|name| (name.to_owned(), 0)),
            module: module.map(|name| (name.to_owned(), 0)),
            kernel: module == Some("kernel"),
        }
    }

    fn part(frames: &[Frame]) -> Option<Part> {
        Some(Part {
            frames: frames.to_vec(),
            truncated: None,
        })
    }

    fn text(line: &Line<'_>) -> String {
        let mut text = Vec::new();
        line.write(&mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn root_first_without_offsets() {
        let line = Line {
            comm: "my prog",
            user: part(&[
                frame(Some("leaf(int; int)"), Some("a")),
                frame(None, Some("libb.so")),
                frame(None, None),
                frame(Some("main"), Some("a")),
            ]),
            weight: 4093,
            ..Line::default()
        };
        assert_eq!(
            text(&line),
            "my prog;main;[unknown];[libb.so];leaf(int: int) 4093\n"
        );
    }

    #[test]
    fn the_kernel_goes_on_from_the_user() {
        let mut line = Line {
            comm: "p",
            pid: Some(7),
            user: part(&[frame(Some("brk"), Some("libc.so.6"))]),
            kernel: part(&[
                frame(Some("do_brk_flags"), Some("kernel")),
                frame(Some("do_syscall_64"), Some("kernel")),
            ]),
            annotate: true,
            weight: 1,
        };
        assert_eq!(
            text(&line),
            "p-7;brk;-;do_syscall_64_[k];do_brk_flags_[k] 1\n"
        );
        line.annotate = false;
        line.user = None;
        assert_eq!(text(&line), "p-7;do_syscall_64;do_brk_flags 1\n");
    }

    /// Whatever the names are: one stack, one number, and as many frames.
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
                let line = Line {
                    comm: name,
                    user: (!frames.is_empty()).then(|| part(frames)).flatten(),
                    weight: 4093,
                    ..Line::default()
                };
                let text = text(&line);
                let words: Vec<&str> = text.trim_end().rsplitn(3, char::is_whitespace).collect();
                assert_eq!(words[0], "4093", "{text}");
                // The word before it is no number.
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
        let line = Line {
            comm: "p",
            user: Some(Part {
                frames: vec![frame(Some("f"), None)],
                truncated: Some("no unwind info: libf.so".into()),
            }),
            weight: 1,
            ..Line::default()
        };
        assert_eq!(text(&line), "p;[truncated: no unwind info: libf.so];f 1\n");
    }

    #[test]
    fn a_lost_stack_says_so_and_one_that_is_not_there_does_not() {
        let mut line = Line {
            comm: "p",
            user: part(&[]),
            weight: 1,
            ..Line::default()
        };
        assert_eq!(text(&line), "p;[lost] 1\n");
        line.user = None;
        assert_eq!(text(&line), "p 1\n");
    }
}
