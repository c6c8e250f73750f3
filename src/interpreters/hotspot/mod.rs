//! HotSpot: the code that the virtual machine of a Java process generates, and the functions in this code.
//!
//! Compiled functions have no frame pointers and no unwind information. The virtual machine keeps its own data about
//! them in its memory, and exports the addresses of this data for debuggers. With this data the BPF side
//! (`bpf/include/hotspot.bpf.h`) unwinds the frames of compiled functions.
//!
//! | module | what it is for |
//! |---|---|
//! | `arch` | what is known of the frames on one architecture |
//! | `perf_map_request` | the perf map that HotSpot writes on request |
//! | `vm_structs` | the layout of HotSpot's classes: offsets, sizes, and addresses of static fields |
//! | `code_heaps` | the heaps of generated code, and the descriptions of their blocks |
//! | `hotspots` | the processes whose frames the BPF side walks |
//! | `inlined` | the functions that are inlined into compiled ones |
//! | `line_table` | the source lines of bytecode |
//! | `machine` | the functions that blocks of generated code belong to |
//! | `methods` | the names and source lines of functions, by their `Method`s |
//! | `numbers` | the encoding of HotSpot's numbers |
//! | [`names`] | cache of the names that were read, by process |

#[cfg_attr(target_arch = "aarch64", path = "aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "x86_64.rs")]
mod arch;
mod code_heaps;
pub(crate) mod hotspots;
mod inlined;
mod line_table;
pub(in crate::interpreters) mod machine;
mod methods;
pub mod names;
mod numbers;
mod perf_map_request;
pub(in crate::interpreters) mod vm_structs;
