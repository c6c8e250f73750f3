//! memleak's ground truth once more, with the probes at the entries of functions: no number may depend
//! on where it places them.

use anyhow::{Result, ensure};
use libtest_mimic::Trial;

use crate::allocators::{
    a_pool_of_the_programs_own, a_rust_program_with_its_own_allocator,
    jemalloc_beside_glibc_is_exact, jemalloc_in_the_program_is_exact, jemalloc_is_exact,
    mimalloc_is_exact, musl_in_the_program_is_exact, tcmalloc_is_exact,
    thread_storms_leave_nothing,
};
use crate::memleak::{
    a_tenth_is_recorded, balanced_code_reports_nothing, big_blocks_count_once,
    combined_totals_equal_the_blocks, every_function_is_exact, failed_calls_are_no_allocations,
    parts_of_mappings_are_unmapped, realloc_corner_cases, threads_exact, trace_prints_every_call,
};
use crate::memleak_processes::each_of_two_has_its_own;
use crate::memleak_views::{
    allocations_are_counted_freed_or_not, double_frees_are_counted_with_their_stack,
    unknown_frees_are_counted_with_their_stack,
};
use crate::{harness, memleak};

/// All of these tests.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::at_entries", AtEntries:
        entries_are_probed,
        every_function_is_exact,
        balanced_code_reports_nothing,
        realloc_corner_cases,
        failed_calls_are_no_allocations,
        big_blocks_count_once,
        parts_of_mappings_are_unmapped,
        threads_exact,
        combined_totals_equal_the_blocks,
        trace_prints_every_call,
        a_tenth_is_recorded,
        jemalloc_is_exact,
        jemalloc_in_the_program_is_exact,
        jemalloc_beside_glibc_is_exact,
        tcmalloc_is_exact,
        mimalloc_is_exact,
        musl_in_the_program_is_exact,
        thread_storms_leave_nothing,
        a_rust_program_with_its_own_allocator,
        a_pool_of_the_programs_own,
        each_of_two_has_its_own,
        allocations_are_counted_freed_or_not,
        double_frees_are_counted_with_their_stack,
        unknown_frees_are_counted_with_their_stack,
    }
}

fn entries_are_probed() -> Result<()> {
    let ended = memleak::trace("alloc", &["hold"], &["-v", "60"])?;
    let places: Vec<&str> = ended.stderr.split("is probed at ").skip(1).collect();
    ensure!(places.len() > 2, "{}", ended.stderr);
    for place in places {
        let place = place.lines().next().unwrap_or_default();
        ensure!(place.ends_with("+0x0"), "{place}");
    }
    Ok(())
}
