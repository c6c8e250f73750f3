//! CPython: the function, the file and the line that a Python frame executes.
//!
//! A Python frame in a stack is a word with bit 63 set. Bits 62 to 20 identify the code object, and bits 19 to 0 are
//! the instruction in the code object. The BPF side sends the names of a code object during the first walk that meets
//! the code object ([`codes`]). So the names outlive the process and the code object.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | what the search for thread states needs of one architecture |
//! | [`code`] | a code object, as the BPF side sends it |
//! | [`codes`] | all code objects that were met, by their words in stacks |
//! | `dealloc_probes` | probes on the function that frees code objects |
//! | [`lines`] | the source line of an instruction |
//! | `locate` | the search for the interpreter of a process |
//! | `offsets` | offsets in CPython's structs, by version |
//! | `pythons` | the processes whose Python frames the BPF side walks |

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
pub mod code;
pub mod codes;
mod dealloc_probes;
pub mod lines;
pub(in crate::interpreters) mod locate;
mod offsets;
pub(crate) mod pythons;

use crate::process::reader;

/// Returns whether all objects of a process come from malloc, including objects of 512 bytes or less, because the
/// environment variable `PYTHONMALLOC` asks for malloc.
fn allocates_by_malloc(pid: u32) -> bool {
    reader::environment(pid).is_ok_and(|environment| asks_for_malloc(&environment))
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
