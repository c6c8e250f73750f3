//! BPF maps that are made while a tool runs; all others are their skeleton's.

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::{MapHandle, MapType};

/// Creates a map for so many entries of these sizes in bytes; `flags` are BPF_F_*.
pub fn create(
    kind: MapType,
    name: &str,
    (key_bytes, value_bytes): (usize, usize),
    entries: u32,
    flags: u32,
) -> Result<MapHandle> {
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as _,
        map_flags: flags,
        ..Default::default()
    };
    let (key_bytes, value_bytes) = (key_bytes as u32, value_bytes as u32);
    MapHandle::create(kind, Some(name), key_bytes, value_bytes, entries, &options)
        .with_context(|| format!("failed to create the map {name}"))
}
