//! HotSpot: where a process that runs Java has the code that its virtual machine has generated.
//!
//! Compiled functions keep no frame pointers, and have no unwind information. What the virtual machine
//! itself knows of them is in its memory, and it exports where, for debuggers: by that the kernel half
//! (`bpf/include/hotspot.bpf.h`) finds their callers.
//!
//! | module | what it is for |
//! |---|---|
//! | `asked_map` | the perf map that it writes when it is asked for one |
//! | `vm_structs` | what HotSpot tells of its classes: offsets, sizes, and addresses of static fields |
//! | `code_heaps` | where it has its code, and how blocks of that are described |
//! | `hotspots` | the processes whose frames the kernel half is to walk |
//! | `inlined` | which functions are compiled into others |
//! | `line_table` | which lines of the source bytecode is from |
//! | `machine` | what blocks of its code are of |
//! | `methods` | what functions are called, and their lines, by their `Method`s |
//! | `numbers` | how it writes numbers |
//! | [`names`] | the names that were read, by process |

mod asked_map;
mod code_heaps;
pub(crate) mod hotspots;
mod inlined;
mod line_table;
mod machine;
mod methods;
pub mod names;
mod numbers;
mod vm_structs;
