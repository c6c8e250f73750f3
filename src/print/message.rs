//! Messages on stderr, and the name of the tool that they begin with.

use std::fmt;
use std::io::{self, Write};
use std::sync::OnceLock;

static TOOL: OnceLock<String> = OnceLock::new();

/// Names the tool for the rest of the process. Later calls change nothing.
pub fn set_tool(name: &str) {
    TOOL.get_or_init(|| name.to_owned());
}

/// Returns the tool's name, or `memtools` where no tool runs, as in unit tests.
pub fn tool() -> &'static str {
    TOOL.get().map_or("memtools", String::as_str)
}

/// Prints a line on stderr. A line that cannot be printed is dropped: no run ends because its messages have no reader.
pub fn print(line: fmt::Arguments<'_>) {
    // One write a line keeps it whole beside the lines of other processes.
    let _ = io::stderr().write_all(format!("{line}\n").as_bytes());
}

/// Prints a message on stderr, after the tool's name.
#[macro_export]
macro_rules! message {
    ($($message:tt)*) => {
        $crate::print::message::print(format_args!(
            "{}: {}",
            $crate::print::message::tool(),
            format_args!($($message)*)
        ))
    };
}

/// Prints a line on stderr, without the tool's name.
#[macro_export]
macro_rules! note {
    ($($line:tt)*) => {
        $crate::print::message::print(format_args!($($line)*))
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_has_one_name() {
        assert_eq!(tool(), "memtools");
        set_tool("memtools");
        set_tool("memleak");
        assert_eq!(tool(), "memtools");
    }
}
