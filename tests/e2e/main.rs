//! End-to-end tests of all tools, in one binary that runs on this kernel and, copied, in the
//! guests of tests/vm.

mod brkstack;
mod drsnoop;
mod faults;
mod ffaults;
mod harness;
mod load;
mod memleak;
mod mmapsnoop;
mod oomkill;
mod pressure;
mod shmsnoop;
mod vmscan;

use std::process::ExitCode;

use libtest_mimic::Arguments;

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    // Tests wait more than they compute, but tracers slow each other's targets down.
    arguments.test_threads = arguments.test_threads.or(Some(2));
    if !arguments.list {
        harness::prepare();
    }
    let tests = [
        drsnoop::tests(),
        memleak::tests(),
        brkstack::tests(),
        faults::tests(),
        ffaults::tests(),
        mmapsnoop::tests(),
        oomkill::tests(),
        shmsnoop::tests(),
        vmscan::tests(),
        load::tests(),
    ]
    .into_iter()
    .flatten()
    .collect();
    let conclusion = libtest_mimic::run(&arguments, tests);
    load::print_verdicts();
    conclusion.exit_code()
}
