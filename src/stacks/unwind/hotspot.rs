//! Whether HotSpot's generated code can be walked by frame pointers: HotSpot keeps them if it was started with
//! `-XX:+PreserveFramePointer`.

use memchr::memmem;

use super::UnwindTarget;
use crate::process::reader;

const OPTION: &[u8] = b"PreserveFramePointer";

/// Whether all these processes were started with the option. False if none are named, since any of them may lack it.
pub(super) fn keep_frame_pointers(whose: &UnwindTarget) -> bool {
    match whose {
        UnwindTarget::Processes(pids) => !pids.is_empty() && pids.iter().all(|&pid| keeps(pid, "")),
        UnwindTarget::Command { pid, line, .. } => keeps(*pid, line),
    }
}

/// Whether a process was started with the option, by its environment (`JAVA_TOOL_OPTIONS`), its command line, and the
/// command that it is to execute.
fn keeps(pid: u32, line: &str) -> bool {
    let environment = reader::environment(pid).unwrap_or_default();
    let arguments = reader::arguments(pid).unwrap_or_default();
    is_on(&[&environment, &arguments, line.as_bytes()].concat())
}

/// Whether the option is given, and turned on by its last occurrence.
fn is_on(options: &[u8]) -> bool {
    let last = memmem::rfind(options, OPTION);
    last.is_some_and(|at| options[..at].ends_with(b"-XX:+"))
}

#[cfg(test)]
mod tests {
    use super::is_on;

    #[test]
    fn the_last_option_counts() {
        let command =
            b"JAVA_TOOL_OPTIONS=-XX:-PreserveFramePointer\0java\0-XX:+PreserveFramePointer\0A";
        assert!(is_on(command));
        assert!(!is_on(&command[..45]));
        assert!(!is_on(b"java\0A\0PreserveFramePointer"));
        assert!(!is_on(b""));
    }
}
