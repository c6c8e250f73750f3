//! BPF maps that are made while a tool runs; all others are their skeleton's.

use std::fs;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result};
use libbpf_rs::libbpf_sys::{self, BPF_F_NO_PREALLOC, bpf_map_create_opts};
use libbpf_rs::{AsRawLibbpf, MapHandle, MapType, OpenMapMut, OpenObject};

use crate::bpf::kernel_support;

/// The flag of a hash map whose entries are made when they are needed: BPF_F_NO_PREALLOC.
///
/// Kernels before 6.1 warn of such a map of a tracing program, once, in their log. Where a warning is to stop
/// the machine (kernel.panic_on_warn) it is 0, and memory for all entries is set aside at once.
pub fn as_needed() -> u32 {
    // Asked first, as every tool starts by this, and the kernel's types take longer to look through.
    let panic_on_warn = fs::read_to_string("/proc/sys/kernel/panic_on_warn");
    let stops = panic_on_warn.is_ok_and(|value| value.trim() != "0")
        && !kernel_support::btf_has_name("bpf_mem_alloc");
    if stops { 0 } else { BPF_F_NO_PREALLOC }
}

/// Has an opened object's hash maps, and those that its arrays of maps are to have, made as [`as_needed`]
/// says.
pub(crate) fn choose_when(open: &mut OpenObject) -> Result<()> {
    if as_needed() != 0 {
        return Ok(());
    }
    for mut map in open.maps_mut() {
        let flags = map.map_flags();
        if flags & BPF_F_NO_PREALLOC != 0 {
            map.set_map_flags(flags & !BPF_F_NO_PREALLOC)
                .context("failed to have memory for a map set aside")?;
        }
        if map.map_type() == MapType::ArrayOfMaps {
            replace_inner(&mut map)?;
        }
    }
    Ok(())
}

/// Has an array of hash maps take those whose memory is set aside at once.
fn replace_inner(map: &mut OpenMapMut<'_>) -> Result<()> {
    // SAFETY: the object lives, and so do its maps. The one that an array is to have is only read.
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
    // libbpf has its number until it loads the object.
    std::mem::forget(made);
    Ok(())
}

/// Creates a map for so many entries of these sizes in bytes; `flags` are BPF_F_*.
///
/// # Errors
/// If the kernel does not make the map, for want of memory or privilege.
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

/// Gives a map of an opened skeleton room for so many entries, or a ring buffer so many bytes. What no program
/// uses that is to be loaded gets one entry: there is no map without.
///
/// # Errors
/// If libbpf refuses it.
pub fn size(map: &mut OpenMapMut<'_>, entries: u32) -> Result<()> {
    map.set_max_entries(entries)
        .with_context(|| format!("failed to size the map {}", map.name().to_string_lossy()))
}

/// Makes a map of an opened skeleton now, and not at load.
///
/// # Errors
/// If the kernel does not make the map, for want of memory or privilege.
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
///
/// # Errors
/// If the skeleton has been loaded, or the map is of another kind.
pub fn use_instead(map: &mut OpenMapMut<'_>, made: &impl AsFd) -> Result<()> {
    map.reuse_fd(made.as_fd())
        .context("failed to replace a map before load")
}

/// Creates an array of so many maps that are like this one.
///
/// # Errors
/// If the kernel does not make the map, for want of memory or privilege.
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

/// A map for a test; None, which stderr is told by the test's name, where nobody but root may make one.
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
        Err(_) if !nix::unistd::geteuid().is_root() => {
            let test = std::thread::current().name().unwrap_or("a test").to_owned();
            eprintln!("not run: {test}: it makes BPF maps, which takes root");
            None
        }
        Err(error) => panic!("{error:#}"),
    }
}
