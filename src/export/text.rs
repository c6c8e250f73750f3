//! Stacks as text: below the row of an event, and in the format of BCC's stackcount.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, Write};

use crate::export::folded;
use crate::stacks::named::{Frame, NamedStack, Part};

/// Writes a stack below its row: the kernel frames, `--`, the user frames, innermost first.
///
/// # Errors
/// If `out` cannot be written to.
pub fn below_row(stack: &NamedStack, out: &mut dyn Write) -> io::Result<()> {
    part_below_row(stack.kernel.as_ref(), out)?;
    writeln!(out, "    --")?;
    part_below_row(stack.user.as_ref(), out)
}

/// Writes one part of a stack below its row. Writes nothing if `part` is None.
///
/// # Errors
/// If `out` cannot be written to.
pub fn part_below_row(part: Option<&Part>, out: &mut dyn Write) -> io::Result<()> {
    let Some(part) = part else { return Ok(()) };
    if part.frames.is_empty() {
        writeln!(out, "    [lost]")?;
    }
    for row in part.frames.iter().flat_map(Frame::rows) {
        writeln!(out, "    {row}")?;
    }
    match &part.truncated {
        Some(reason) => writeln!(out, "    [truncated: {reason}]"),
        None => Ok(()),
    }
}

/// Details that [`block`] adds to the names of functions.
#[derive(Debug, Default, Clone, Copy)]
pub struct BlockStyle {
    /// Whether the pid is added.
    pub pid: bool,
    /// Whether kernel frames are marked.
    pub annotate: bool,
    /// Whether the offset in each function is added.
    pub offsets: bool,
    /// Whether the address of each frame is added.
    pub addresses: bool,
}

/// Formats a stack as BCC's stackcount prints it, up to the count: the kernel frames, `--`, the user frames,
/// innermost first, and the process.
pub fn block(stack: &NamedStack, style: BlockStyle) -> String {
    let mut block = String::new();
    for part in [&stack.kernel, &stack.user].into_iter().flatten() {
        if !block.is_empty() {
            block.push_str("    --\n");
        }
        for frame in &part.frames {
            frame_of_block(frame, style, &mut block);
        }
        if part.frames.is_empty() {
            block.push_str("  [lost]\n");
        }
        if let Some(reason) = &part.truncated {
            let _ = writeln!(block, "  [truncated: {reason}]");
        }
    }
    let _ = if style.pid {
        writeln!(block, "    {} [{}]", stack.comm, stack.pid)
    } else {
        writeln!(block, "    {}", stack.comm)
    };
    block
}

/// Adds the lines of a frame, its inlined calls first.
fn frame_of_block(frame: &Frame, style: BlockStyle, block: &mut String) {
    let suffix = if frame.is_kernel() && style.annotate {
        folded::KERNEL_MARK
    } else {
        ""
    };
    let place = frame.source_location();
    let language = frame.language().map(|language| format!(" [{language}]"));
    let language = language.unwrap_or_default();
    let own = format!("{}{suffix}{place}{language}", name(frame, style.offsets));
    for row in frame.inlined_rows().chain([own]) {
        block.push_str("  ");
        // Writing to a String does not fail.
        if style.addresses {
            let _ = write!(block, "{:<16x} ", frame.address);
        }
        let _ = writeln!(block, "{row}");
    }
}

/// Returns the function's name, with the offset only if `offsets` asks for it: offsets would split stacks that belong
/// together.
fn name(frame: &Frame, offsets: bool) -> Cow<'_, str> {
    match (&frame.symbol, &frame.module) {
        (Some((name, offset)), _) if offsets && !frame.is_interpreted() => {
            format!("{name}+{offset:#x}").into()
        }
        (Some((name, _)), _) => (&**name).into(),
        (None, Some((module, offset))) => format!("{module}+{offset:#x}").into(),
        (None, None) => "[unknown]".into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stacks::named::FrameKind;

    fn frame(symbol: Option<&str>, module: &str) -> Frame {
        Frame {
            address: 0x1234,
            symbol: symbol.map(|name| (name.into(), 4)),
            module: Some((module.into(), 0x34)),
            kind: match module {
                "kernel" => FrameKind::Kernel,
                _ => FrameKind::Native,
            },
            ..Frame::default()
        }
    }

    fn stack() -> NamedStack {
        NamedStack {
            pid: 12,
            comm: "cat".into(),
            user: Some(Part {
                frames: vec![frame(Some("__brk"), "libc.so.6"), frame(None, "cat")],
                truncated: Some("stack not readable".into()),
            }),
            ..NamedStack::default()
        }
    }

    fn kernel() -> Option<Part> {
        Some(Part {
            frames: vec![frame(Some("do_syscall_64"), "kernel")],
            truncated: None,
        })
    }

    #[test]
    fn a_block_is_stackcounts() {
        let mut stack = stack();
        assert_eq!(
            block(
                &stack,
                BlockStyle {
                    pid: true,
                    ..BlockStyle::default()
                }
            ),
            "  __brk\n  cat+0x34\n  [truncated: stack not readable]\n    cat [12]\n"
        );
        let placed = BlockStyle {
            offsets: true,
            addresses: true,
            ..BlockStyle::default()
        };
        assert!(
            block(&stack, placed)
                .starts_with("  1234             __brk+0x4\n  1234             cat+0x34\n")
        );
        let annotated = BlockStyle {
            annotate: true,
            ..BlockStyle::default()
        };
        stack.user = Some(Part::default());
        stack.kernel = kernel();
        assert_eq!(
            block(&stack, annotated),
            "  do_syscall_64_[k]\n    --\n  [lost]\n    cat\n"
        );
        stack.user = None;
        stack.kernel = None;
        assert_eq!(block(&stack, annotated), "    cat\n");
    }

    #[test]
    fn below_a_row_the_kernels_frames_come_first() {
        let text = |stack: &NamedStack| {
            let mut text = Vec::new();
            below_row(stack, &mut text).expect("memory");
            String::from_utf8(text).expect("UTF-8")
        };
        let mut stack = stack();
        stack.kernel = kernel();
        assert_eq!(
            text(&stack),
            "    do_syscall_64+0x4 [kernel]\n    --\n    __brk+0x4 [libc.so.6]\n    \
             cat+0x34 [cat]\n    [truncated: stack not readable]\n"
        );
        stack.user = Some(Part::default());
        assert!(text(&stack).ends_with("    --\n    [lost]\n"));
        stack.user = None;
        assert!(text(&stack).ends_with("    --\n"));
    }
}
