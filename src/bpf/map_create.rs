//! BPF maps that are made while a tool runs; all others are their skeleton's.

use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::bpf_map_create_opts;
use libbpf_rs::{MapHandle, MapType, OpenMapMut};

/// Creates a map for so many entries of these sizes in bytes; `flags` are BPF_F_*.
pub fn create(
    kind: MapType,
    name: &str,
    (key_bytes, value_bytes): (usize, usize),
    entries: u32,
    flags: u32,
) -> Result<MapHandle> {
    let options = bpf_map_create_opts {
        map_flags: flags,
        ..Default::default()
    };
    create_with(kind, name, (key_bytes, value_bytes), entries, options)
}

/// Makes a map of an opened skeleton now, and not at load.
pub fn create_before_load(map: &mut OpenMapMut<'_>) -> Result<MapHandle> {
    let name = map.name().to_string_lossy();
    let sizes = (map.key_size() as usize, map.value_size() as usize);
    let made = create(
        map.map_type(),
        &name,
        sizes,
        map.max_entries(),
        map.map_flags(),
    )?;
    use_instead(map, &made)?;
    Ok(made)
}

/// Has a skeleton use this map instead of one that it would make at load.
pub fn use_instead(map: &mut OpenMapMut<'_>, made: &impl AsFd) -> Result<()> {
    map.reuse_fd(made.as_fd())
        .context("failed to replace a map before load")
}

/// Creates an array of so many maps that are like this one.
pub fn create_array_of(like: &MapHandle, name: &str, entries: u32) -> Result<MapHandle> {
    let options = bpf_map_create_opts {
        inner_map_fd: like.as_fd().as_raw_fd().cast_unsigned(),
        ..Default::default()
    };
    let sizes = (size_of::<u32>(), size_of::<u32>());
    create_with(MapType::ArrayOfMaps, name, sizes, entries, options)
}

fn create_with(
    kind: MapType,
    name: &str,
    (key_bytes, value_bytes): (usize, usize),
    entries: u32,
    options: bpf_map_create_opts,
) -> Result<MapHandle> {
    let options = bpf_map_create_opts {
        sz: size_of::<bpf_map_create_opts>() as _,
        ..options
    };
    let (key_bytes, value_bytes) = (key_bytes as u32, value_bytes as u32);
    MapHandle::create(kind, Some(name), key_bytes, value_bytes, entries, &options)
        .with_context(|| format!("failed to create the map {name}"))
}
