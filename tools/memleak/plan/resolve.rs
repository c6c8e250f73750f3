//! Resolution of options into a plan.

use std::time::Duration;

use memtools::export::format::FileFormat;
use memtools::parse::UsageError;
use memtools::process::filter::FilterArgs;
use memtools::run::target::TargetArgs;

use super::known::PlanKind;
use super::{
    FunctionSettings, KernelPlan, MemorySettings, Moment, OutputSettings, Plan, ProcessPlan,
    Recording, ReportSettings, VerdictSettings, can_be_joined, subject,
};
use crate::args::{Args, Mode};
use crate::difference::FailOn;
use crate::kernel::args::MAX_CACHE_NAME;
use crate::processes::pool::{AllocSpec, FreeSpec};
use crate::sampling::Sampling;
use crate::sums::View;

/// Time between reports, unless INTERVAL says otherwise.
const DEFAULT_INTERVAL: Duration = Duration::from_secs(5);

impl Plan {
    /// Resolves the options of a command line.
    ///
    /// # Errors
    /// If the plan does not know one of the options, or if options conflict, where that is more than a conflict of two.
    pub(crate) fn of(args: Args) -> Result<Self, UsageError> {
        let kind = kind(&args);
        kind.expect_known(&args.given)?;
        expect_order_of_sizes(&args)?;
        expect_object_of_failure(&args)?;
        Ok(match kind {
            PlanKind::Processes => Self::Processes(process_plan(args)?.into()),
            PlanKind::Judged => {
                let verdict = verdict_settings(&args)?;
                Self::Judged(process_plan(args)?.into(), verdict)
            }
            PlanKind::Kernel => Self::Kernel(kernel_plan(args)?.into()),
        })
    }
}

fn kind(args: &Args) -> PlanKind {
    let are_processes_chosen = !args.pid.is_empty()
        || args.command.is_some()
        || args.name.is_some()
        || args.cgroup.is_some()
        || args.children;
    if args.verdict.verdict {
        PlanKind::Judged
    } else if args.kernel.kernel.is_some() || !are_processes_chosen {
        PlanKind::Kernel
    } else {
        PlanKind::Processes
    }
}

fn expect_order_of_sizes(args: &Args) -> Result<(), UsageError> {
    if args.min_size > args.max_size {
        return usage(format!(
            "--min-size (-z) {} is larger than --max-size (-Z) {}",
            args.min_size, args.max_size
        ));
    }
    Ok(())
}

/// Refuses a condition of --fail-on without the option whose result it is on.
fn expect_object_of_failure(args: &Args) -> Result<(), UsageError> {
    match (args.difference.fail_on, &args.difference.diff) {
        (Some(FailOn::Unreachable), _) if !args.verdict.verdict => {
            usage("--fail-on unreachable requires --verdict")
        }
        (Some(FailOn::Growth(_)), None) => {
            usage("--fail-on 'growth>BYTES' requires --diff OLD.pb.gz")
        }
        _ => Ok(()),
    }
}

fn process_plan(args: Args) -> Result<ProcessPlan, UsageError> {
    let target = target(&args);
    if target.children && target.filter.pid.is_empty() && target.command.is_none() {
        return usage("--children requires -p or -c");
    }
    let recording = recording(&args);
    let is_one_process = target.filter.pid.len() <= 1 && !can_be_joined(&target);
    if recording.mode == Mode::Peak && !(is_one_process && recording.is_complete()) {
        return usage("--mode peak requires one process, with all blocks: use -p or -c alone");
    }
    Ok(ProcessPlan {
        recording,
        memory: memory(&args),
        report: report(&args, &recording),
        unwind: args.unwind,
        source: args.source,
        containers: args.containers.clone(),
        verbose: args.verbose,
        outputs: outputs(&args, target.to_string()),
        target,
        functions: functions(args),
    })
}

fn kernel_plan(args: Args) -> Result<KernelPlan, UsageError> {
    if args.kernel.by_cache {
        args.export
            .expect("with --by-cache", &FileFormat::OF_SUMS)?;
        if args.serve.serve.is_some() {
            return usage("--serve is for reports by stack: leave --by-cache out");
        }
    }
    if let Some(cache) = &args.kernel.cache
        && !(1..=MAX_CACHE_NAME).contains(&cache.len())
    {
        return usage(format!(
            "--cache takes a name of 1 to {MAX_CACHE_NAME} bytes; see the first column of \
             /proc/slabinfo"
        ));
    }
    let kinds = args.kernel.kinds();
    if args.kernel.cache.is_some() && (kinds.pages || kinds.percpu) {
        return usage("--cache is for slab objects: leave pages and percpu out of --kernel (-k)");
    }
    let recording = recording(&args);
    let target = target(&args);
    Ok(KernelPlan {
        kinds,
        by_cache: args.kernel.by_cache,
        recording,
        memory: memory(&args),
        report: report(&args, &recording),
        outputs: outputs(&args, target.to_string()),
        filter: target.filter,
        verbose: args.verbose,
        cache: args.kernel.cache,
    })
}

fn target(args: &Args) -> TargetArgs {
    TargetArgs {
        command: args.command.clone(),
        children: args.children,
        filter: FilterArgs {
            pid: args.pid.clone(),
            name: args.name.clone(),
            cgroup: args.cgroup.clone(),
        },
    }
}

fn functions(args: Args) -> FunctionSettings {
    let allocate = args.alloc.into_iter().map(|AllocSpec(named)| named);
    let free = args.free.into_iter().map(|FreeSpec(named)| named);
    FunctionSettings {
        object: args.obj,
        prefix: args.symbols_prefix,
        named: allocate.chain(free).collect(),
        python_objects: args.python_objects,
        at_entries: args.no_placement,
        only_allocations: args.mode == Mode::Alloc,
        verbose: args.verbose,
    }
}

fn recording(args: &Args) -> Recording {
    Recording {
        mode: args.mode,
        min_size: args.min_size,
        max_size: args.max_size,
        sample_rate: args.sample_rate,
        sampling: Sampling::new(args.sample_bytes, args.max_overhead.is_some()),
        max_overhead: args.max_overhead,
        only_totals: args.combined_only,
        trace: args.trace,
    }
}

fn memory(args: &Args) -> MemorySettings {
    MemorySettings {
        limit: args.mem_limit,
        blocks: args.max_allocs,
        stacks: args.stack_storage_size,
        stack_depth: args.perf_max_stack_depth,
        is_served: args.serve.serve.is_some(),
        reports_blocks: !args.combined_only,
    }
}

fn report(args: &Args, recording: &Recording) -> ReportSettings {
    let view = match recording.mode {
        Mode::Leak => View::Outstanding,
        Mode::Alloc => View::Allocated,
        Mode::Churn => View::Churned,
        Mode::Peak => View::Peak,
    };
    ReportSettings {
        interval: args.interval.unwrap_or(DEFAULT_INTERVAL),
        given_interval: args.interval,
        count: args.count,
        format: args.format(),
        view,
        top: args.top,
        sort: args.sort,
        older_ms: args.older,
        extended: args.extended,
        show_allocs: args.show_allocs,
        addresses: !args.combined_only,
        keeps_trends: args.serve.serve.is_some(),
        subject: subject(view, recording),
    }
}

fn outputs(args: &Args, target: String) -> OutputSettings {
    OutputSettings {
        file: args.output.clone(),
        export: args.export.clone(),
        earlier: args.difference.diff.clone(),
        permitted_growth: match args.difference.fail_on {
            Some(FailOn::Growth(bytes)) => Some(bytes),
            _ => None,
        },
        serve: args.serve.clone(),
        target,
    }
}

fn verdict_settings(args: &Args) -> Result<VerdictSettings, UsageError> {
    let verdict = &args.verdict;
    Ok(VerdictSettings {
        moment: moment(args)?,
        why: verdict.why.clone(),
        suppressions: verdict.suppressions.clone(),
        copies: verdict.copies.clone(),
        top: args.top,
        container: args.containers.container,
        fails_on_leaks: args.difference.fail_on == Some(FailOn::Unreachable),
    })
}

/// Returns the time of a verdict.
///
/// # Errors
/// If not exactly one process was named, or there is no time at which its memory can be examined.
fn moment(args: &Args) -> Result<Moment, UsageError> {
    let idle = args.verdict.idle;
    match (&args.pid[..], &args.command, args.interval) {
        ([pid], None, None) => usage(format!(
            "--verdict requires INTERVAL: memleak -p {pid} --verdict 60 1; without a trace: heapscan -p {pid}"
        )),
        ([_], None, Some(interval)) | ([], Some(_), Some(interval)) => {
            if idle.is_some_and(|idle| idle > interval) {
                return usage(
                    "--idle monitors the last part of INTERVAL: INTERVAL has to be as long, or longer",
                );
            }
            let count = args.count;
            Ok(Moment::Every {
                interval,
                count,
                idle,
            })
        }
        ([], Some(_), None) if idle.is_some() => {
            usage("--idle requires INTERVAL: nothing runs at the exit of a command")
        }
        ([], Some(_), None) => Ok(Moment::Exit),
        _ => usage("--verdict requires one process: use -p PID, or -c COMMAND"),
    }
}

fn usage<T>(message: impl Into<String>) -> Result<T, UsageError> {
    Err(UsageError(message.into()))
}

#[cfg(test)]
mod tests {
    use super::super::tests::plan;
    use super::*;

    fn refusal(line: &str) -> String {
        let error = plan(line).expect_err(line);
        assert!(error.is::<UsageError>(), "{line}: {error}");
        error.to_string()
    }

    #[test]
    fn without_a_process_it_is_the_kernel() {
        for (line, is_kernel) in [
            ("memleak", true),
            ("memleak -kn sshd 10 3", true),
            ("memleak -n sshd 10 3", false),
            ("memleak --cgroup /sys/fs/cgroup", false),
            ("memleak -kp 1", true),
            ("memleak -p 1", false),
            ("memleak -c true", false),
        ] {
            let plan = plan(line).expect(line);
            assert_eq!(matches!(plan, Plan::Kernel(_)), is_kernel, "{line}");
        }
    }

    #[test]
    fn an_option_without_effect_is_refused_with_the_way_out() {
        for (line, message) in [
            ("memleak -p 1 --by-cache", "--by-cache is for the kernel's"),
            ("memleak -c true -P", "add --kernel (-k)"),
            ("memleak -k -c true", "--command (-c) is for"),
            ("memleak -O c", "--obj (-O) is for"),
            ("memleak -t", "--trace (-t) is for"),
            ("memleak -k --unwind fp", "--unwind is for"),
            ("memleak -k --mode churn", "--mode is for"),
            (
                "memleak -k --max-pause 20",
                "--max-pause requires --verdict",
            ),
            ("memleak -p 1 --pre-copy", "--pre-copy requires --verdict"),
            (
                "memleak -p 1 --verdict 60 -z 9",
                "conflicts with --min-size (-z)",
            ),
            (
                "memleak -p 1 --verdict 60 -k",
                "conflicts with --kernel (-k)",
            ),
            (
                "memleak -p 1 --verdict 60 --sort age",
                "conflicts with --sort",
            ),
            (
                "memleak --cache 0123456789abcdef0123456789abcdef",
                "1 to 31",
            ),
            (
                "memleak -k=pages --cache filp",
                "--cache is for slab objects",
            ),
            ("memleak --children 9", "--children requires -p or -c"),
        ] {
            let refusal = refusal(line);
            assert!(refusal.contains(message), "{line}: {refusal}");
        }
    }

    /// Lines of BCC's memleak, then of libbpf-tools', which mean the same here.
    #[test]
    fn the_lines_of_bcc_are_plans() {
        for line in [
            "memleak -p 1 -t",
            "memleak -ap 1 10",
            "memleak -c ./allocs",
            "memleak -o 60000",
            "memleak --older 60000 -p 1",
            "memleak -s 5",
            "memleak --sample-rate 5 -p 1",
            "memleak --sort count",
            "memleak --combined-only -p 1",
            "memleak --wa-missing-free",
            "memleak -T 5",
            "memleak --top 5 -p 1",
            "memleak -z 16 -Z 32",
            "memleak --min-size 16 --max-size 32 -p 1",
            "memleak -p 1 -O c",
            "memleak -p 1 --obj c",
            "memleak --percpu",
            "memleak -p 1 --symbols-prefix je_",
            "memleak 10 3",
            "memleak -C",
            "memleak -F",
            "memleak -P",
            "memleak -p 1 -S je_",
            "memleak -v",
            "memleak --stack-storage-size 10240 --perf-max-stack-depth 127",
        ] {
            if let Err(error) = plan(line) {
                panic!("{line}: {error}");
            }
        }
    }

    #[test]
    fn a_peak_is_of_all_blocks_of_one_process() {
        let check = |options: &str| plan(&format!("memleak --mode peak {options}"));
        for right in ["-p 1", "-c true"] {
            let Ok(Plan::Processes(plan)) = check(right) else {
                panic!("{right}");
            };
            assert_eq!(plan.recording.mode, Mode::Peak);
        }
        for wrong in [
            "-p 1,2",
            "-p 1 --children",
            "-n name",
            "-p 1 -z 2",
            "-p 1 -s 2",
        ] {
            assert!(check(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_verdict_is_of_one_process_and_its_moment() {
        let moment = |line: &str| match plan(line).expect(line) {
            Plan::Judged(_, verdict) => Some(verdict.moment),
            _ => None,
        };
        let seconds = Duration::from_secs(60);
        let every = |count, idle| {
            Some(Moment::Every {
                interval: seconds,
                count,
                idle,
            })
        };
        assert_eq!(moment("memleak -p 1"), None);
        assert_eq!(moment("memleak -p 1 --verdict 60"), every(None, None));
        for line in [
            "memleak -p 1 --verdict 60 1",
            "memleak -c true --verdict 60 1",
        ] {
            assert_eq!(moment(line), every(Some(1), None));
        }
        let idle = "memleak -p 1 --verdict 60 1 --idle 60";
        assert_eq!(moment(idle), every(Some(1), Some(seconds)));
        let exit = "memleak -c true --verdict --suppressions file";
        assert_eq!(moment(exit), Some(Moment::Exit));
        for wrong in [
            "memleak --verdict 60",
            "memleak -p 1,2 --verdict 60",
            "memleak -p 1 --verdict 60 --idle 60.1",
            "memleak -c true --verdict --idle 60",
            "memleak -p 1 --fail-on unreachable",
            "memleak -p 1 --fail-on growth>1M",
        ] {
            refusal(wrong);
        }
        let untraced = refusal("memleak -p 7 --verdict");
        assert!(untraced.ends_with("heapscan -p 7"), "{untraced}");
    }

    #[test]
    fn a_verdict_is_of_all_blocks() {
        for wrong in [
            "memleak -p 1 --why 24",
            "memleak -p 1 --verdict 60 --idle 60 --pre-copy",
            "memleak -p 1 --verdict 60 --mode alloc",
            "memleak -p 1 --verdict=60",
        ] {
            assert!(plan(wrong).is_err(), "{wrong:?}");
        }
    }
}
