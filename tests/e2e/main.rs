//! End-to-end tests of all tools, in one binary that runs on this kernel and, copied, in the
//! guests of tests/vm.

mod allocators;
mod attaching;
mod brkstack;
mod causes;
mod cgroups;
mod comparison;
mod containers;
mod documented;
mod drsnoop;
mod export;
mod faults;
mod ffaults;
mod follow;
mod growth;
mod harness;
mod heap;
mod heap_hostile;
mod heap_jemalloc;
mod heap_pause;
mod heapscan;
mod heapscan_screens;
mod heapscan_types;
mod hfaults;
mod hostile;
mod idle;
mod incidents;
mod java;
mod java_kits;
mod java_names;
mod kubernetes;
mod lines;
mod load;
mod memagent;
mod memleak;
mod memleak_containers;
mod memleak_kernel;
mod memleak_processes;
mod memleak_views;
mod memory;
mod memtriage;
mod metrics;
mod mmapsnoop;
mod oomkill;
mod perfetto;
mod pressure;
mod python;
mod readme;
mod running;
mod runtimes;
mod serve;
mod shmsnoop;
mod swapin;
mod traces;
mod unwind;
mod verdict;
mod verdict_exit;
mod verdict_memcheck;
mod verdict_traced;
mod vmscan;
mod worked;

#[path = "../hostile/random.rs"]
mod random;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

/// Returns the tests of all files, in the order in which they start.
fn all() -> impl Iterator<Item = Trial> {
    [
        heap::tests(),
        heap_hostile::tests(),
        heap_jemalloc::tests(),
        heap_pause::tests(),
        heapscan::tests(),
        hfaults::tests(),
        idle::tests(),
        incidents::tests(),
        containers::tests(),
        kubernetes::tests(),
        hostile::tests(),
        java::tests(),
        java_names::tests(),
        drsnoop::tests(),
        export::tests(),
        memagent::tests(),
        memleak::tests(),
        memleak_containers::tests(),
        memleak_kernel::tests(),
        memleak_processes::tests(),
        heapscan_screens::tests(),
        heapscan_types::tests(),
        memleak_views::tests(),
        memory::tests(),
        memtriage::tests(),
        causes::tests(),
        metrics::tests(),
        allocators::tests(),
        attaching::tests(),
        brkstack::tests(),
        cgroups::tests(),
        comparison::tests(),
        faults::tests(),
        ffaults::tests(),
        follow::tests(),
        growth::tests(),
        mmapsnoop::tests(),
        oomkill::tests(),
        perfetto::tests(),
        python::tests(),
        readme::tests(),
        running::tests(),
        runtimes::tests(),
        serve::tests(),
        shmsnoop::tests(),
        swapin::tests(),
        traces::tests(),
        unwind::tests(),
        verdict::tests(),
        verdict_exit::tests(),
        verdict_memcheck::tests(),
        verdict_traced::tests(),
        vmscan::tests(),
        worked::tests(),
        lines::tests(),
        load::tests(),
    ]
    .into_iter()
    .flatten()
}

fn main() -> ExitCode {
    harness::heed_signals();
    let mut arguments = Arguments::from_args();
    // Tests wait more than they compute, but tracers slow each other's targets down.
    arguments.test_threads = arguments.test_threads.or(Some(2));
    if !arguments.list {
        harness::prepare();
        harness::end_tests_that_hang();
        if let Some(reason) = harness::bpf_not_permitted() {
            eprintln!("e2e: {reason}; what needs it is ignored");
        }
    }
    let every: Vec<Trial> = all().collect();
    for (beginning, reason) in harness::arch::NOT_HERE {
        let is_one = every.iter().any(|test| test.name().starts_with(beginning));
        assert!(is_one, "no test is named {beginning} ({reason})");
    }
    let listed = harness::listed();
    let tests = every.into_iter().filter(|test| {
        listed
            .as_ref()
            .is_none_or(|listed| listed.contains(test.name()))
    });
    let conclusion = libtest_mimic::run(&arguments, tests.collect());
    load::print_verdicts();
    if !arguments.list {
        harness::print_slowest();
    }
    if let Err(error) = documented::validate() {
        eprintln!("e2e: JSON that docs/json-schema.json does not describe: {error:#}");
        return ExitCode::FAILURE;
    }
    conclusion.exit_code()
}
