//! BPF maps that are created while a tool runs, beside those that a skeleton creates at load, and second handles of
//! maps.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::{self, BPF_F_NO_PREALLOC, bpf_map_create_opts};
use libbpf_rs::{AsRawLibbpf, MapHandle, MapType, OpenMapMut, OpenObject};

use crate::bpf::kernel_support;

/// Returns the flag of a hash map whose entries are allocated when they are needed: BPF_F_NO_PREALLOC.
///
/// Kernels before 6.1 warn once in their log if a tracing program uses such a map. Where a warning stops the machine
/// (kernel.panic_on_warn), the function returns 0, and the kernel allocates all entries at once.
pub fn no_prealloc_flag() -> u32 {
    // Checked first, as every tool calls this at its start, and searching the kernel's BTF takes longer.
    let panic_on_warn = fs::read_to_string("/proc/sys/kernel/panic_on_warn");
    let stops = panic_on_warn.is_ok_and(|value| value.trim() != "0")
        && !kernel_support::btf_has_name("bpf_mem_alloc");
    if stops { 0 } else { BPF_F_NO_PREALLOC }
}

/// Clears BPF_F_NO_PREALLOC of an opened object's hash maps, and of the hash maps in its arrays of maps, where
/// [`no_prealloc_flag`] returns 0.
pub(crate) fn apply_prealloc_policy(open: &mut OpenObject) -> Result<()> {
    if no_prealloc_flag() != 0 {
        return Ok(());
    }
    for mut map in open.maps_mut() {
        let flags = map.map_flags();
        if flags & BPF_F_NO_PREALLOC != 0 {
            map.set_map_flags(flags & !BPF_F_NO_PREALLOC)
                .context("failed to allocate the memory of a map in advance")?;
        }
        if map.map_type() == MapType::ArrayOfMaps {
            replace_inner(&mut map)?;
        }
    }
    Ok(())
}

/// Replaces the inner hash map of an array of maps by one whose entries are allocated at once.
fn replace_inner(map: &mut OpenMapMut<'_>) -> Result<()> {
    // SAFETY: the object lives, and so do its maps. The inner map is only read.
    let (kind, sizes, entries) = unsafe {
        let inner = libbpf_sys::bpf_map__inner_map(map.as_libbpf_object().as_ptr());
        if inner.is_null() {
            return Ok(());
        }
        let sizes = (
            libbpf_sys::bpf_map__key_size(inner) as usize,
            libbpf_sys::bpf_map__value_size(inner) as usize,
        );
        let kind = MapType::from(libbpf_sys::bpf_map__type(inner));
        (kind, sizes, libbpf_sys::bpf_map__max_entries(inner))
    };
    if kind != MapType::Hash {
        return Ok(());
    }
    let made = create(kind, "inner", sizes, entries, 0)?;
    map.set_inner_map_fd(made.as_fd())
        .context("failed to replace the map that an array of maps is to have")?;
    // libbpf uses the descriptor's number until it loads the object, so the descriptor stays open.
    std::mem::forget(made);
    Ok(())
}

/// Creates a map for up to `entries` entries, with keys and values of these sizes in bytes. `flags` are BPF_F_*.
///
/// # Errors
/// If the kernel does not make the map, because memory or a privilege is missing.
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

/// Sets the capacity of a map of an opened skeleton, in entries; for a ring buffer, in bytes. Callers pass 1 for a
/// map that no program to be loaded uses, as a map cannot have no entries.
///
/// # Errors
/// If libbpf refuses the capacity.
pub fn set_capacity(map: &mut OpenMapMut<'_>, entries: u32) -> Result<()> {
    map.set_max_entries(entries)
        .with_context(|| format!("failed to size the map {}", map.name().to_string_lossy()))
}

/// Makes a skeleton use this map instead of the one that it would create at load.
///
/// # Errors
/// If the skeleton has been loaded, or the map is of another kind.
pub(crate) fn reuse(map: &mut OpenMapMut<'_>, made: &impl AsFd) -> Result<()> {
    map.reuse_fd(made.as_fd())
        .context("failed to replace a map before load")
}

/// Creates an array of `entries` maps, whose inner maps are of the kind and sizes of `like`.
///
/// # Errors
/// If the kernel does not make the map, because memory or a privilege is missing.
pub(crate) fn create_array_of(like: &MapHandle, name: &str, entries: u32) -> Result<MapHandle> {
    let options = bpf_map_create_opts {
        inner_map_fd: like.as_fd().as_raw_fd().cast_unsigned(),
        ..Default::default()
    };
    let sizes = (size_of::<u32>(), size_of::<u32>());
    create_with(MapType::ArrayOfMaps, name, sizes, entries, options)
}

/// Opens a map a second time, for a thread or a value that outlives the first handle.
///
/// # Errors
/// If the kernel has no memory for another file descriptor.
pub(crate) fn reopen<'a, Map>(map: &'a Map) -> Result<MapHandle>
where
    MapHandle: TryFrom<&'a Map, Error = libbpf_rs::Error>,
{
    MapHandle::try_from(map).context("failed to open a map a second time")
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

/// Whether the kernel refused because of our privileges.
#[cfg(test)]
fn is_denied(error: &anyhow::Error) -> bool {
    let cause = error.downcast_ref::<libbpf_rs::Error>();
    cause.is_some_and(|cause| cause.kind() == libbpf_rs::ErrorKind::PermissionDenied)
}

/// Creates a map for a test. Returns None, and prints the test's name on stderr, where this is not permitted, except in
/// CI, where no test may be skipped.
#[cfg(test)]
#[expect(clippy::print_stderr, reason = "a test that does not run says so")]
pub(crate) fn create_for_test(
    kind: MapType,
    sizes: (usize, usize),
    entries: u32,
    flags: u32,
) -> Option<MapHandle> {
    match create(kind, "for_test", sizes, entries, flags) {
        Ok(map) => Some(map),
        Err(error) if is_denied(&error) && std::env::var_os("CI").is_none() => {
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            eprintln!("not run: {test}: it makes BPF maps, which takes root or CAP_BPF");
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}
