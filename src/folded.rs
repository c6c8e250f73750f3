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
    /// Whether frames beyond the depth limit are missing at the end.
    pub truncated: bool,
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
}

impl Line<'_> {
    /// Writes it, with its newline.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "{self} {}", self.weight)
    }
}

impl Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>, kernel_suffix: &str) -> fmt::Result {
        if self.frames.is_empty() {
            f.write_str(";[lost]")?;
        }
        if self.truncated {
            f.write_str(";[truncated]")?;
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
            truncated: false,
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

    #[test]
    fn a_cut_stack_says_so_at_its_root() {
        let line = Line {
            comm: "p",
            user: Some(Part {
                frames: vec![frame(Some("f"), None)],
                truncated: true,
            }),
            weight: 1,
            ..Line::default()
        };
        assert_eq!(text(&line), "p;[truncated];f 1\n");
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
