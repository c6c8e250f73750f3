//! Options of kernel mode, and the check for options that have no effect in it.

use anyhow::Result;
use memtools::parse::UsageError;
use memtools::process::filter::FilterArgs;

use crate::args::{Args, Mode};
use crate::kernel::bpf::types::cache_name;

/// Bytes of a slab cache's name, the NUL not counted.
const MAX_CACHE_NAME: usize = cache_name::CACHE_NAME_BYTES.0 as usize - 1;

/// Options of kernel mode only.
#[derive(Debug, Clone, Default, clap::Args)]
#[command(next_help_heading = "Kernel mode")]
pub(crate) struct KernelArgs {
    /// Trace kernel allocations, on behalf of the target
    #[arg(short, long, help_heading = "Target (default: the kernel)")]
    pub(crate) kernel: bool,

    /// Trace slab objects [default: these and pages]
    #[arg(hide_short_help = true, long)]
    pub(crate) slab: bool,

    /// Trace pages
    ///
    /// Without --slab, also pages that hold slab objects.
    #[arg(hide_short_help = true, long)]
    pub(crate) pages: bool,

    /// Trace per-CPU memory
    #[arg(hide_short_help = true, short = 'P', long)]
    pub(crate) percpu: bool,

    /// Trace only objects of this slab cache, such as dentry
    #[arg(hide_short_help = true, long, value_name = "CACHE", conflicts_with_all = ["pages", "percpu"])]
    pub(crate) cache: Option<String>,

    /// Report slab caches instead of stacks
    ///
    /// The change in /proc/slabinfo is shown in addition.
    #[arg(hide_short_help = true, long, conflicts_with_all = ["folded", "show_allocs", "extended"])]
    pub(crate) by_cache: bool,

    /// Ignored: the effect of this option is always on
    #[arg(hide_short_help = true, short = 'F', long)]
    pub(crate) wa_missing_free: bool,
}

/// Kinds of memory that are traced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Kinds {
    pub(super) slab: bool,
    pub(super) pages: bool,
    pub(super) percpu: bool,
}

impl KernelArgs {
    /// Returns the first of these options that was given.
    fn given(&self) -> Option<&'static str> {
        let given = [
            ("--slab", self.slab),
            ("--pages", self.pages),
            ("--percpu (-P)", self.percpu),
            ("--cache", self.cache.is_some()),
            ("--by-cache", self.by_cache),
            ("--wa-missing-free (-F)", self.wa_missing_free),
        ];
        first(&given)
    }

    pub(super) fn kinds(&self) -> Kinds {
        let chosen = self.slab || self.pages || self.percpu;
        Kinds {
            slab: self.slab || !chosen,
            pages: self.pages || !(chosen || self.cache.is_some()),
            percpu: self.percpu,
        }
    }
}

/// Whether the kernel's allocations are to be traced.
///
/// # Errors
/// If an option was given that the mode does not have.
pub(crate) fn wanted(args: &Args) -> Result<bool> {
    if !args.kernel.kernel && args.chooses_processes() {
        return match args.kernel.given() {
            Some(option) => usage(format!(
                "{option} is for the kernel's allocations: add --kernel (-k) to trace those"
            )),
            None => Ok(false),
        };
    }
    let refused = [
        ("--command (-c)", args.command.is_some()),
        ("--children", args.children),
        ("--trace (-t)", args.trace),
        ("--mode", args.mode != Mode::Leak),
        ("--obj (-O)", args.obj.is_some()),
        ("--symbols-prefix (-S)", !args.symbols_prefix.is_empty()),
        ("--sample-bytes", args.sample_bytes.is_some()),
        ("--max-overhead", args.max_overhead.is_some()),
        ("--alloc", !args.alloc.is_empty()),
        ("--free", !args.free.is_empty()),
        ("--python-objects", args.python_objects),
        ("--no-placement", args.no_placement),
        ("--container", args.containers.container),
        ("--lines", args.source.lines),
        ("--debuginfod", args.source.debuginfod),
    ];
    if let Some(option) = first(&refused) {
        return usage(format!(
            "{option} is for the allocations of a process, not of the kernel: name one with -p, \
             without --kernel (-k)"
        ));
    }
    if args.serve.serve.is_some() && args.kernel.by_cache {
        return usage("--serve is for reports by stack: leave --by-cache out".into());
    }
    if let Some(cache) = &args.kernel.cache
        && !(1..=MAX_CACHE_NAME).contains(&cache.len())
    {
        return usage(format!(
            "--cache takes a name of 1 to {MAX_CACHE_NAME} bytes; see the first column of \
             /proc/slabinfo"
        ));
    }
    Ok(true)
}

fn first(options: &[(&'static str, bool)]) -> Option<&'static str> {
    let found = options.iter().find(|(_, given)| *given);
    found.map(|(option, _)| *option)
}

fn usage<T>(message: String) -> Result<T> {
    Err(UsageError(message).into())
}

/// Returns the filter of the processes whose kernel allocations are traced.
pub(super) fn filter(args: &Args) -> FilterArgs {
    FilterArgs {
        pid: args.pid.clone(),
        name: args.name.clone(),
        cgroup: args.cgroup.clone(),
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn parse(line: &str) -> Args {
        Args::try_parse_from(line.split_whitespace()).expect(line)
    }

    #[test]
    fn without_a_process_it_is_the_kernel() {
        for (line, kernel) in [
            ("memleak", true),
            ("memleak -kn sshd 10 3", true),
            ("memleak -n sshd 10 3", false),
            ("memleak --cgroup /sys/fs/cgroup/x", false),
            ("memleak -kp 1", true),
            ("memleak -p 1", false),
            ("memleak -c true", false),
        ] {
            assert_eq!(wanted(&parse(line)).expect(line), kernel, "{line}");
        }
    }

    #[test]
    fn options_of_the_other_mode_are_refused_with_the_way_out() {
        for (line, message) in [
            ("memleak -p 1 --by-cache", "--by-cache is for the kernel's"),
            ("memleak -c true -P", "add --kernel (-k)"),
            ("memleak -k -c true", "--command (-c) is for"),
            ("memleak -O c", "--obj (-O) is for"),
            ("memleak -t", "--trace (-t) is for"),
            (
                "memleak --cache 0123456789abcdef0123456789abcdef",
                "1 to 31",
            ),
        ] {
            let error = wanted(&parse(line)).expect_err(line);
            assert!(error.is::<UsageError>(), "{line}");
            assert!(error.to_string().contains(message), "{line}: {error}");
        }
    }

    #[test]
    fn objects_and_pages_unless_told_otherwise() {
        let kinds = |line: &str| {
            let Kinds {
                slab,
                pages,
                percpu,
            } = parse(line).kernel.kinds();
            (slab, pages, percpu)
        };
        assert_eq!(kinds("memleak"), (true, true, false));
        assert_eq!(kinds("memleak --pages"), (false, true, false));
        assert_eq!(kinds("memleak --percpu"), (false, false, true));
        assert_eq!(kinds("memleak --slab --percpu"), (true, false, true));
        assert_eq!(kinds("memleak --cache dentry"), (true, false, false));
    }
}
