//! Known allocators: the signatures of their functions by name, and the names of the allocators.

use super::signature::Signature;

const ALLOCATE: Signature = Signature::allocate(1);
const REALLOCATE: Signature = Signature::allocate(2).replacing(1);
const FREE: Signature = Signature::free(1);

/// Functions of C, which can have a prefix.
const C: [(&str, Signature); 17] = [
    ("malloc", ALLOCATE),
    ("calloc", Signature::allocate(2).times(1)),
    ("realloc", REALLOCATE),
    ("reallocarray", Signature::allocate(3).times(2).replacing(1)),
    ("posix_memalign", Signature::allocate(3).storing(1)),
    ("aligned_alloc", Signature::allocate(2)),
    ("memalign", Signature::allocate(2)),
    ("valloc", ALLOCATE),
    ("pvalloc", ALLOCATE),
    ("free", FREE),
    ("free_sized", FREE),
    ("free_aligned_sized", FREE),
    // jemalloc's own.
    ("mallocx", ALLOCATE),
    ("rallocx", REALLOCATE),
    ("dallocx", FREE),
    ("sdallocx", FREE),
    // tcmalloc's own.
    ("malloc_skip_new_handler", ALLOCATE),
];

/// Prefixes of C names that allocators are built with, so that the libc's own functions stay reachable.
const PREFIXES: [&str; 7] = ["je_", "_rjem_", "tc_", "mi_", "sn_", "dl", "rp"];

/// Functions of mimalloc alone, without their prefix. Those of a heap (`mi_heap_malloc`) have the heap before the other
/// arguments.
const MIMALLOC: [(&str, Signature); 28] = [
    ("zalloc", ALLOCATE),
    ("malloc_small", ALLOCATE),
    ("zalloc_small", ALLOCATE),
    ("mallocn", Signature::allocate(2).times(1)),
    ("malloc_aligned", ALLOCATE),
    ("malloc_aligned_at", ALLOCATE),
    ("zalloc_aligned", ALLOCATE),
    ("zalloc_aligned_at", ALLOCATE),
    ("calloc_aligned", Signature::allocate(2).times(1)),
    ("calloc_aligned_at", Signature::allocate(2).times(1)),
    ("reallocn", Signature::allocate(3).times(2).replacing(1)),
    ("realloc_aligned", REALLOCATE),
    ("realloc_aligned_at", REALLOCATE),
    ("rezalloc", REALLOCATE),
    ("rezalloc_aligned", REALLOCATE),
    ("rezalloc_aligned_at", REALLOCATE),
    ("recalloc", Signature::allocate(3).times(2).replacing(1)),
    (
        "recalloc_aligned",
        Signature::allocate(3).times(2).replacing(1),
    ),
    (
        "recalloc_aligned_at",
        Signature::allocate(3).times(2).replacing(1),
    ),
    ("new", ALLOCATE),
    ("new_n", Signature::allocate(2).times(1)),
    ("new_aligned", ALLOCATE),
    ("new_aligned_nothrow", ALLOCATE),
    ("new_nothrow", ALLOCATE),
    ("new_realloc", REALLOCATE),
    ("free_size", FREE),
    ("free_size_aligned", FREE),
    ("free_aligned", FREE),
];

/// Ends of the mangled names of `operator new` and `operator new[]`: their parameters after the size. These are none,
/// std::nothrow_t, std::align_val_t, both, and tcmalloc's own. Other forms, such as placement new, take memory that was
/// allocated elsewhere.
const NEW: [&str; 8] = [
    "",
    "RKSt9nothrow_t",
    "St11align_val_t",
    "St11align_val_tRKSt9nothrow_t",
    "12__hot_cold_t",
    "RKSt9nothrow_t12__hot_cold_t",
    "St11align_val_t12__hot_cold_t",
    "St11align_val_tRKSt9nothrow_t12__hot_cold_t",
];

/// Ends of the mangled names of `operator delete` and `operator delete[]`: their parameters after the block. `m` is the
/// size.
const DELETE: [&str; 6] = [
    "",
    "m",
    "RKSt9nothrow_t",
    "St11align_val_t",
    "mSt11align_val_t",
    "St11align_val_tRKSt9nothrow_t",
];

/// Functions that the Rust compiler calls to allocate and free, by the end of their mangled names.
const RUST: [(&str, Signature); 4] = [
    ("__rust_alloc", ALLOCATE),
    ("__rust_alloc_zeroed", ALLOCATE),
    ("__rust_realloc", Signature::allocate(4).replacing(1)),
    ("__rust_dealloc", FREE),
];

/// Function by which Rust's standard library allocates if the program has no allocator of its own: it calls malloc.
const RUST_DEFAULT: &str = "__rdl_alloc";

/// Functions of the C library that map memory, which have no prefix.
const MAPPING: [(&str, Signature); 3] = [
    ("mmap", Signature::map()),
    ("munmap", Signature::unmap()),
    ("mremap", Signature::remap()),
];

/// Functions that identify an allocator, with its name.
const MARKERS: [(&str, &str); 8] = [
    ("dallocx", "jemalloc"),
    ("tc_version", "tcmalloc"),
    ("mi_version", "mimalloc"),
    ("__asan_init", "AddressSanitizer"),
    ("__hwasan_init", "HWAddressSanitizer"),
    ("__tsan_init", "ThreadSanitizer"),
    // mallopt is also in replacements of malloc, such as Chromium's and the sanitizers'.
    ("__libc_mallopt", "glibc"),
    ("__malloc_donate", "musl"),
];

/// Returns the signature of a function of this name, if it is to be probed. With a `prefix`, only C functions of this
/// prefix and functions that map memory are to be probed. With an empty one, the functions of all known allocators are.
pub(crate) fn signature(name: &str, prefix: &str) -> Option<Signature> {
    if let Some(mapping) = find(&MAPPING, name) {
        return Some(mapping);
    }
    if !prefix.is_empty() {
        return find(&C, name.strip_prefix(prefix)?);
    }
    let prefixes = PREFIXES
        .iter()
        .filter_map(|prefix| name.strip_prefix(prefix));
    find(&C, name)
        .or_else(|| prefixes.into_iter().find_map(|name| find(&C, name)))
        .or_else(|| of_mimalloc(name))
        .or_else(|| of_cxx(name))
        .or_else(|| of_rust(name))
}

/// Whether a function of this name can be a program's own and have nothing to do with an allocator, unless others can
/// call it, too.
pub(crate) fn is_common_name(name: &str) -> bool {
    find(&C, name).is_some() || find(&MAPPING, name).is_some()
}

/// Whether a function of this name asks another one for more bytes than it was requested.
pub(crate) fn rounds_up(name: &str) -> bool {
    name.ends_with("pvalloc")
}

/// Whether a function of this name identifies an allocator.
pub(crate) fn is_marker(name: &str) -> bool {
    marked(name).is_some() || name.ends_with(RUST_DEFAULT)
}

/// Returns the name of the allocator with these functions, in a file of this name.
pub(crate) fn name(functions: &[&str], module: &str) -> &'static str {
    let only = |is: fn(&str) -> Option<Signature>| {
        let mut known = functions
            .iter()
            .filter(|name| find(&MAPPING, name).is_none());
        known.all(|name| is(name).is_some())
    };
    match functions.iter().find_map(|name| marked(name)) {
        Some(marked) => marked,
        // musl is stripped of its local symbols.
        None if module.contains("musl") => "musl",
        None if only(of_rust) => "Rust's own",
        None if only(of_cxx) => "operator new",
        None => "malloc",
    }
}

fn marked(name: &str) -> Option<&'static str> {
    let without_prefix = PREFIXES.iter().find_map(|prefix| name.strip_prefix(prefix));
    MARKERS
        .iter()
        .find(|(marker, _)| *marker == name || without_prefix == Some(marker))
        .map(|(_, allocator)| *allocator)
}

/// Whether Rust's functions, if there are any, call malloc, because the program has no allocator of
/// its own.
pub(crate) fn is_rusts_default(functions: &[&str]) -> bool {
    functions.iter().any(|name| name.ends_with(RUST_DEFAULT))
}

/// Returns the signatures of the functions that are known by name, as often as there are such functions.
pub(crate) fn signatures() -> impl Iterator<Item = Signature> {
    let known = C.iter().chain(&MAPPING).chain(&RUST).chain(&MIMALLOC);
    known.map(|&(_, signature)| signature)
}

/// Whether the Rust compiler calls a function of this name to allocate or free.
pub(crate) fn is_of_rust(name: &str) -> bool {
    of_rust(name).is_some()
}

fn of_mimalloc(name: &str) -> Option<Signature> {
    let name = name.strip_prefix("mi_")?;
    let Some(of_heap) = name.strip_prefix("heap_") else {
        return find(&MIMALLOC, name);
    };
    // mi_heap_new makes a heap. mi_heap_alloc_new is mi_new with a heap.
    let of_heap = match of_heap.strip_prefix("alloc_") {
        Some(operator) => operator,
        None if of_heap == "new" => return None,
        None => of_heap,
    };
    find(&MIMALLOC, of_heap)
        .or_else(|| find(&C, of_heap))
        .filter(|signature| signature.allocates())
        .map(Signature::one_further)
}

/// Returns the signature of a C++ operator by its mangled name: `_Znwm` is `operator new(unsigned long)`, `_ZdaPv`
/// `operator delete[](void*)`.
fn of_cxx(name: &str) -> Option<Signature> {
    let rest = |starts: [&str; 2]| starts.iter().find_map(|start| name.strip_prefix(start));
    if let Some(rest) = rest(["_Znwm", "_Znam"]) {
        return NEW.contains(&rest).then_some(ALLOCATE);
    }
    let rest = rest(["_ZdlPv", "_ZdaPv"])?;
    DELETE.contains(&rest).then_some(FREE)
}

/// Returns the signature of one of Rust's functions, by the plain name, or since Rust 1.87 by
/// `_RNvCs...___rustc12___rust_alloc`.
fn of_rust(name: &str) -> Option<Signature> {
    let name = match name.strip_prefix("_RNvCs") {
        Some(mangled) => {
            let (_, item) = mangled.split_once("_7___rustc")?;
            item.trim_start_matches(|c: char| c.is_ascii_digit())
                .strip_prefix('_')?
        }
        None => name,
    };
    find(&RUST, name)
}

fn find(table: &[(&str, Signature)], name: &str) -> Option<Signature> {
    table
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, signature)| *signature)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_known_by_name_and_prefix() {
        for name in [
            "malloc",
            "je_malloc",
            "_rjem_malloc",
            "mi_malloc",
            "tc_malloc",
        ] {
            assert_eq!(signature(name, ""), Some(ALLOCATE), "{name}");
        }
        assert_eq!(signature("je_malloc", "je_"), Some(ALLOCATE));
        assert_eq!(signature("my_free", "my_"), Some(FREE));
        assert_eq!(signature("my_free", ""), None);
        // With a prefix, functions without it are not probed.
        assert_eq!(signature("malloc", "je_"), None);
        assert_eq!(signature("mmap", "je_"), Some(Signature::map()));
        assert_eq!(signature("mallocator", ""), None);
    }

    #[test]
    fn a_heap_comes_before_the_other_arguments() {
        assert_eq!(
            signature("mi_heap_calloc", ""),
            Some(Signature::allocate(3).times(2))
        );
        assert_eq!(
            signature("mi_heap_realloc", ""),
            Some(Signature::allocate(3).replacing(2))
        );
        assert_eq!(signature("mi_heap_delete", ""), None);
        assert_eq!(signature("mi_heap_new", ""), None);
    }

    #[test]
    fn operators_of_cxx_in_all_forms() {
        for name in ["_Znwm", "_ZnamRKSt9nothrow_t", "_ZnwmSt11align_val_t"] {
            assert_eq!(signature(name, ""), Some(ALLOCATE), "{name}");
        }
        for name in ["_ZdlPv", "_ZdaPvm", "_ZdlPvmSt11align_val_t"] {
            assert_eq!(signature(name, ""), Some(FREE), "{name}");
        }
        // operator new(unsigned long, void*) and operator new(unsigned long, Pool&)
        assert_eq!(signature("_ZnwmPv", ""), None);
        assert_eq!(signature("_ZnwmR4Pool", ""), None);
    }

    #[test]
    fn what_the_rust_compiler_calls() {
        let mangled = "_RNvCsfLfy6EI15iL_7___rustc14___rust_realloc";
        let realloc = Signature::allocate(4).replacing(1);
        assert_eq!(signature(mangled, ""), Some(realloc));
        assert_eq!(signature("__rust_dealloc", ""), Some(FREE));
        assert_eq!(
            signature("_RNvCsfLfy6EI15iL_7___rustc10rust_panic", ""),
            None
        );
        assert!(is_rusts_default(&[
            "_RNvCsfLfy6EI15iL_7___rustc11___rdl_alloc"
        ]));
    }

    #[test]
    fn allocators_are_told_apart() {
        assert_eq!(name(&["malloc", "__libc_mallopt"], "libc.so.6"), "glibc");
        assert_eq!(name(&["malloc", "mallopt"], "chrome"), "malloc");
        assert_eq!(
            name(&["__asan_init", "malloc", "mallopt"], "libasan.so.8"),
            "AddressSanitizer"
        );
        assert_eq!(
            name(&["je_malloc", "je_dallocx"], "redis-server"),
            "jemalloc"
        );
        assert_eq!(name(&["malloc", "free"], "ld-musl-riscv64.so.1"), "musl");
        assert_eq!(name(&["_Znwm", "_ZdlPv", "mmap"], "server"), "operator new");
        assert_eq!(name(&["malloc", "free"], "server"), "malloc");
    }
}
