//! Stacks as flame graph tools read them: one line a stack, root first, frames joined by `;`,
//! a space, and a whole number.

use std::io::{self, Write};

use crate::symbolize::Frame;

/// Writes one line. `frames` come innermost first, as stacks are kept.
pub fn write(
    out: &mut dyn Write,
    comm: &str,
    frames: &[Frame],
    truncated: bool,
    weight: u64,
) -> io::Result<()> {
    write!(out, "{}", frame_name(comm))?;
    if truncated {
        write!(out, ";[truncated]")?;
    }
    for frame in frames.iter().rev() {
        match (&frame.symbol, &frame.module) {
            (Some((name, _)), _) => write!(out, ";{}", frame_name(name))?,
            (None, Some((module, _))) => write!(out, ";[{}]", frame_name(module))?,
            (None, None) => write!(out, ";[unknown]")?,
        }
    }
    writeln!(out, " {weight}")
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
        }
    }

    #[test]
    fn root_first_without_offsets() {
        let frames = [
            frame(Some("leaf(int; int)"), Some("a")),
            frame(None, Some("libb.so")),
            frame(None, None),
            frame(Some("main"), Some("a")),
        ];
        let mut line = Vec::new();
        write(&mut line, "my prog", &frames, false, 4093).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&line),
            "my prog;main;[unknown];[libb.so];leaf(int: int) 4093\n"
        );
    }

    #[test]
    fn a_cut_stack_says_so_at_its_root() {
        let mut line = Vec::new();
        write(&mut line, "p", &[frame(Some("f"), None)], true, 1).expect("memory");
        assert_eq!(String::from_utf8_lossy(&line), "p;[truncated];f 1\n");
    }
}
