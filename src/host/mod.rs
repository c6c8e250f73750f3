//! Room `host`: what the kernel tells about memory and the machine by itself, with nothing traced.
//!
//! | module | what it is for |
//! |---|---|
//! | [`values`] | files of named numbers: meminfo, vmstat, memory.stat |
//! | [`packages`] | which package a file is from |
//! | [`pressure`] | how long tasks were held up for want of memory |
//! | [`slabinfo`] | slab caches and the bytes of their pages |
//! | [`allocinfo`] | which lines of the kernel's code hold how much |
//! | [`memory_cgroups`] | memory cgroups of both versions: what they use, and their limits |
//! | [`mounts`] | file systems that are mounted here, and where cgroups are |
//! | [`cpus`] | CPUs that are online, and that come online later |
//! | [`kernel_log`] | OOM kills and other messages in the kernel's log |
//! | [`capabilities`] | what the kernel lets this process do |

pub mod allocinfo;
pub mod capabilities;
pub mod cpus;
pub mod kernel_log;
pub mod memory_cgroups;
pub mod mounts;
pub mod packages;
pub mod pressure;
pub mod slabinfo;
pub mod values;
