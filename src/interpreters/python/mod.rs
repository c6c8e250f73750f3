//! CPython: which function of which file a frame executes, and which line of it.
//!
//! A Python frame in a stack is a word with bit 63 set: bits 62 to 20 name the code object, and bits 19 to
//! 0 are the instruction in it. The kernel half sends what a code object is called when it meets it first,
//! in the walk that met it ([`codes`]); so names outlive the process, and the code object.
//!
//! | module | what it is for |
//! |---|---|
//! | [`code`] | a code object, as the kernel half sends it |
//! | [`codes`] | all code objects that were met, by their words |
//! | `deaths` | probes where code objects end |
//! | [`lines`] | from an instruction to its line |
//! | `locate` | where a process has its interpreter |
//! | `offsets` | where that keeps what is read of it, by version |
//! | `pythons` | the processes whose frames the kernel half is to walk |

pub mod code;
pub mod codes;
mod deaths;
pub mod lines;
mod locate;
mod offsets;
pub(crate) mod pythons;

use std::fs::File;
use std::io::Read;

/// Whether all objects of a process come from malloc, also those of 512 bytes or less, as its environment
/// asks for (`PYTHONMALLOC`).
fn allocates_by_malloc(pid: u32) -> bool {
    const MOST_BYTES: u64 = 4 << 20;
    let mut environment = Vec::new();
    let read = File::open(format!("/proc/{pid}/environ"))
        .and_then(|file| file.take(MOST_BYTES).read_to_end(&mut environment));
    read.is_ok() && asks_for_malloc(&environment)
}

fn asks_for_malloc(environment: &[u8]) -> bool {
    let mut variables = environment.split(|byte| *byte == 0);
    variables.any(|variable| {
        [&b"PYTHONMALLOC=malloc"[..], b"PYTHONMALLOC=malloc_debug"].contains(&variable)
    })
}

#[cfg(test)]
mod tests {
    use super::asks_for_malloc;

    #[test]
    fn malloc_is_asked_for_by_its_name() {
        assert!(asks_for_malloc(b"A=1\0PYTHONMALLOC=malloc\0"));
        assert!(asks_for_malloc(b"PYTHONMALLOC=malloc_debug"));
        assert!(!asks_for_malloc(b"PYTHONMALLOC=pymalloc\0X=malloc\0"));
        assert!(!asks_for_malloc(b""));
    }
}
