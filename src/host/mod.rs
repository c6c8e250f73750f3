//! Reports of the kernel itself about memory and the machine, without tracing.
//!
//! | module | what it is for |
//! |---|---|
//! | [`values`] | files of named numbers: meminfo, vmstat, memory.stat |
//! | [`page_size`] | the size of a page |
//! | [`packages`] | the package that a file belongs to |
//! | [`pressure`] | how long tasks were stalled because memory was short |
//! | [`slabinfo`] | slab caches and the bytes of their pages |
//! | [`allocinfo`] | memory by the lines of the kernel's code that allocate it |
//! | `cgroup_tree` | the tree of cgroups of a hierarchy |
//! | [`memory_cgroups`] | memory cgroups of both versions: their usage, and their limits |
//! | [`mounts`] | mounted file systems, and the mount points of cgroups |
//! | [`cpus`] | CPUs that are online, and that come online later |
//! | [`kernel_log`] | OOM kills and other messages in the kernel's log |
//! | [`capabilities`] | the capabilities of this process |

pub mod allocinfo;
pub mod capabilities;
pub(crate) mod cgroup_tree;
pub mod cpus;
pub mod kernel_log;
pub mod memory_cgroups;
pub mod mounts;
pub mod packages;
pub mod page_size;
pub mod pressure;
pub mod slabinfo;
pub mod values;
