//! Functions that only pass their calls on, checked against real libraries.

#[expect(dead_code, reason = "the end-to-end tests use the rest")]
#[cfg_attr(target_arch = "aarch64", path = "e2e/harness/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "e2e/harness/x86_64.rs")]
mod arch;
#[path = "e2e/harness/libraries.rs"]
mod libraries;

use std::fs::File;

use memtools::code::elf;
use memtools::code::wrappers::{Callee, Calls, Forwarded, Forwarding};

/// Returns what a library's function does with the calls of a function that the library imports.
fn passing(library: &str, function: &str, passes: Forwarded, other: &str) -> Forwarding {
    let file = File::open(format!("{}/{library}", libraries::FOLDER))
        .unwrap_or_else(|error| panic!("{library}: {error}; see TEST_PACKAGES in the Makefile"));
    let found = elf::functions(&file, |name, _| name == function).expect("symbols");
    let [function] = &found[..] else {
        panic!("{library} has {found:?}")
    };
    let calls = Calls::of(&file).expect("its code");
    calls.forwarding(function, passes, |callee, given| {
        // A free whose argument is not the operator's own does not count.
        let freed = passes == Forwarded::Result || given.as_argument(1) == Some(1);
        callee == Callee::Import(other) && freed
    })
}

#[test]
fn the_standard_librarys_operators_pass_on() {
    for (operator, other) in [
        ("_Znwm", "malloc"),
        ("_Znam", "_Znwm"),
        ("_ZnwmRKSt9nothrow_t", "_Znwm"),
    ] {
        assert_eq!(
            passing("libstdc++.so.6", operator, Forwarded::Result, other),
            Forwarding::Always,
            "{operator}"
        );
    }
    for (operator, other) in [
        ("_ZdlPv", "free"),
        ("_ZdlPvm", "_ZdlPv"),
        ("_ZdaPv", "_ZdlPv"),
        ("_ZdlPvSt11align_val_t", "free"),
    ] {
        assert_eq!(
            passing("libstdc++.so.6", operator, Forwarded::Arguments, other),
            Forwarding::Always,
            "{operator}"
        );
    }
    // operator new never calls calloc.
    assert_eq!(
        passing("libstdc++.so.6", "_Znwm", Forwarded::Result, "calloc"),
        Forwarding::Never
    );
}

#[test]
fn allocators_own_operators_do_not() {
    let tcmalloc = "libtcmalloc_minimal.so.4";
    assert_eq!(
        passing(tcmalloc, "_Znwm", Forwarded::Result, "malloc"),
        Forwarding::Never
    );
    assert_eq!(
        passing(tcmalloc, "_ZdlPv", Forwarded::Arguments, "free"),
        Forwarding::Never
    );
    // jemalloc's operator new calls malloc only when memory has run out. Its operator delete is a jump to free.
    let jemalloc = "libjemalloc.so.2";
    assert_eq!(
        passing(jemalloc, "_Znwm", Forwarded::Result, "malloc"),
        Forwarding::Sometimes
    );
    assert_eq!(
        passing(jemalloc, "_ZdlPv", Forwarded::Arguments, "free"),
        Forwarding::Always
    );
    assert_eq!(
        passing(
            libraries::mimalloc(),
            "mi_free_size",
            Forwarded::Arguments,
            "mi_free"
        ),
        Forwarding::Always
    );
}

#[test]
fn a_function_that_returns_something_else_passes_nothing_on() {
    // The function returns a pointer into the block, behind a header.
    let library = "libstdc++.so.6";
    assert_eq!(
        passing(
            library,
            "__cxa_allocate_exception",
            Forwarded::Result,
            "malloc"
        ),
        Forwarding::Sometimes
    );
    assert_eq!(
        passing("libc.so.6", "malloc", Forwarded::Result, "malloc"),
        Forwarding::Never
    );
}
