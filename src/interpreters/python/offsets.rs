//! Offsets in CPython's structs, by minor version.
//!
//! The offsets are those of regular builds. From 3.13 on the interpreter itself publishes most of them
//! (`_Py_DebugOffsets`); if the published offsets differ, the interpreter is another kind of build.

use super::arch;
use crate::bpf::types::{python_chain as Chain, python_process};

/// Offsets of one version, in bytes, as [`of`] returns them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Offsets {
    /// In `_PyRuntime`: the pthread key of the thread state (`int created; unsigned key`). None in versions without a
    /// key.
    pub(super) key: Option<u64>,
    /// In `_PyRuntime`: the first interpreter.
    pub(super) interpreters: u64,
    /// In an interpreter: the next one.
    pub(super) next_interpreter: u64,
    /// In an interpreter: the state of its first thread.
    pub(super) threads: u64,
    /// In a thread state: the next one.
    pub(super) next_thread: u64,
    /// The offsets that the BPF side needs.
    pub(super) process: python_process,
}

/// Returns the offsets of version 3.`minor`. None if the version is not supported.
pub(super) fn of(minor: u8) -> Option<Offsets> {
    let (interpreters, next_interpreter, threads) = match minor {
        10 => (32, 0, 8),
        11 => (40, 0, 16),
        12 => (40, 0, 72),
        13 => (632, 7264, 7344),
        14 => (808, 7272, 7344),
        15 => (936, 7264, 7336),
        _ => return None,
    };
    Some(Offsets {
        key: arch::key_offset(minor),
        interpreters,
        next_interpreter,
        threads,
        next_thread: 8,
        process: process(minor),
    })
}

fn process(minor: u8) -> python_process {
    let common = python_process {
        code_first_line: 68,
        code_file: 112,
        code_name: 128,
        code_lines: 136,
        text_ascii: 40,
        text_other: 56,
        bytes: 32,
        frame_bytes: 80,
        minor,
        ..python_process::default()
    };
    match minor {
        10 => python_process {
            thread: 176,
            frame: 24,
            cframe: 48,
            cframe_previous: 8,
            frame_code: 32,
            frame_previous: 24,
            frame_instruction: 96,
            frame_bytes: 112,
            code_first_line: 40,
            code_file: 104,
            code_name: 112,
            code_lines: 120,
            text_ascii: 48,
            text_other: 72,
            chain: Chain::PYTHON_SINGLE_FRAMES.0 as u8,
            ..common
        },
        11 => python_process {
            thread: 152,
            cframe: 56,
            cframe_frame: 8,
            cframe_previous: 16,
            frame_code: 32,
            frame_previous: 48,
            frame_instruction: 56,
            frame_mark: 68,
            mark: 1,
            code_bytecode: 184,
            code_first_line: 72,
            text_ascii: 48,
            text_other: 72,
            chain: Chain::PYTHON_MARKED_FRAMES.0 as u8,
            ..common
        },
        12 => python_process {
            thread: 136,
            cframe: 56,
            cframe_frame: 0,
            cframe_previous: 8,
            frame_mark: 70,
            code_bytecode: 192,
            ..entry_frames(common)
        },
        _ => python_process {
            thread: if minor < 15 { 152 } else { 176 },
            frame: 72,
            frame_mark: if minor < 14 { 70 } else { 74 },
            code_bytecode: if minor < 14 { 200 } else { 208 },
            ..entry_frames(common)
        },
    }
}

fn entry_frames(common: python_process) -> python_process {
    python_process {
        frame_code: 0,
        frame_previous: 8,
        frame_instruction: 56,
        mark: 3,
        chain: Chain::PYTHON_ENTRY_FRAMES.0 as u8,
        ..common
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_read_of_each_version_lies_in_what_is_read_at_once() {
        // PYTHON_STATE_BYTES and PYTHON_ENTRY_FRAME_BYTES of the BPF side.
        const STATE: u16 = 192;
        const FRAME: u16 = 80;
        for minor in 10..=15 {
            let process = of(minor).expect("a known version").process;
            for field in [process.thread, process.frame, process.cframe] {
                assert!(field + 8 <= STATE, "3.{minor}: {field}");
            }
            let entry = (process.frame_previous + 8, process.frame_mark + 1);
            assert!(entry.0 <= FRAME && entry.1 <= FRAME, "3.{minor}");
            assert!(
                process.frame_instruction + 8 <= process.frame_bytes,
                "3.{minor}"
            );
            assert!((process.frame == 0) == (11..=12).contains(&minor));
        }
        assert!(of(9).is_none() && of(16).is_none());
    }
}
