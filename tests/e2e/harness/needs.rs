//! Tests, what each test needs of the kernel and of the machine, and how long each test took.

use std::cell::Cell;
use std::collections::HashSet;
use std::env;
use std::fmt;
use std::fs::{self, File};
use std::hint;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::ProgramType;
use libtest_mimic::{Completion, Failed, Trial};

use crate::harness::hung::Running;
use crate::harness::{arch, pythons, workload};

/// Number of tests whose durations are printed at the end.
pub(crate) const SLOWEST: usize = 20;

pub(crate) static DURATIONS: Mutex<Vec<(Duration, String)>> = Mutex::new(Vec::new());

/// Requirement of a test on the kernel or the machine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Need {
    /// Kprobes, which some kernels are built without.
    Kprobes,
    /// A disk of our own, whose page cache may be dropped.
    Disk,
    /// A machine of our own, whose memory may be used up.
    Guest,
    /// The programs of a whole system.
    Host,
    /// To be run once, on the host: the result does not depend on the kernel, and an emulated guest takes much time.
    Once,
    /// A kernel that runs 32-bit programs.
    Compat,
    /// Tools of other projects, which scripts/test-vm takes from Debian's packages.
    Peers,
    /// Python, which tests/vm/fetch takes from Debian's packages.
    Python,
    /// Debian 11's Python (3.9), which tests/vm/fetch takes from Debian's packages.
    Python39,
    /// Pythons of several versions, which scripts/pythons unpacks.
    Pythons,
    /// Zswap: swap that is compressed in memory.
    Zswap,
    /// Overlayfs: layered file systems, as containers have.
    Overlay,
    /// Transparent huge pages of several sizes, each with counters.
    SmallThp,
    /// Huge pages that the kernel makes of a process's present memory on request (MADV_COLLAPSE).
    Collapse,
    /// A machine of our own with file systems of user programs (FUSE), which may freeze.
    Fuse,
    /// Namespaces of unprivileged users, which some systems forbid.
    UserNamespaces,
    /// Soft-dirty marks of the pages that a process has written.
    SoftDirty,
    /// A kernel without soft-dirty marks.
    NoSoftDirty,
    /// Accounting of the kernel's memory by cgroup, BPF maps included: Linux 5.18 and later, cgroup version 2.
    KernelMemory,
}

impl Need {
    /// Returns the reason why the requirement is not met, or None if it is met.
    fn unmet_reason(self) -> Option<&'static str> {
        let (there, reason) = match self {
            Need::Kprobes => (
                Path::new("/sys/bus/event_source/devices/kprobe/type").exists(),
                "this kernel is built without kprobes",
            ),
            Need::Disk => (env::var_os("MEMTOOLS_DISK").is_some(), "no disk of our own"),
            Need::Guest => (in_guest(), "would use up this machine's memory"),
            Need::Fuse => (
                in_guest() && Path::new("/dev/fuse").exists(),
                "no guest with FUSE, which such a process could freeze",
            ),
            Need::Zswap => (
                Path::new("/sys/module/zswap").exists(),
                "this kernel is built without zswap",
            ),
            Need::Overlay => (
                fs::read_to_string("/proc/filesystems")
                    .is_ok_and(|list| list.contains("\toverlay\n")),
                "this kernel has no overlayfs, or not loaded",
            ),
            Need::Host => (!in_guest(), "a guest has only our own programs"),
            Need::SmallThp => (
                Path::new("/sys/kernel/mm/transparent_hugepage/hugepages-64kB/stats").exists(),
                "this kernel has transparent huge pages of one size",
            ),
            Need::Collapse => (
                makes_huge_pages(),
                "this kernel makes no huge pages when it is asked to (MADV_COLLAPSE)",
            ),
            Need::Once => (
                !in_guest() || env::var_os("MEMTOOLS_ONCE").is_some(),
                "the same on every kernel; runs on the host",
            ),
            Need::UserNamespaces => (
                users_make_namespaces(),
                "unprivileged users may not make namespaces here",
            ),
            Need::SoftDirty => (
                marks_written_pages().unwrap_or(false),
                "this kernel does not mark written pages (CONFIG_MEM_SOFT_DIRTY)",
            ),
            Need::NoSoftDirty => (
                !marks_written_pages().unwrap_or(true),
                "this kernel marks written pages",
            ),
            Need::KernelMemory => (
                fs::read_to_string("/sys/fs/cgroup/memory.stat")
                    .is_ok_and(|stat| stat.contains("\nkernel ")),
                "the kernel's memory is not counted by cgroup",
            ),
            Need::Compat => (runs_32_bit(), "this kernel runs no 32-bit programs"),
            Need::Peers => (workload("peers").exists(), "no peers beside the workloads"),
            Need::Python => (is_python("python3"), "no python3 in PATH"),
            Need::Pythons => (pythons::root().exists(), "no Pythons of scripts/pythons"),
            Need::Python39 => (is_python("python3.9"), "no python3.9 in PATH"),
        };
        (!there).then_some(reason)
    }
}

/// Returns the release of this kernel, such as `6.1.0-56-cloud-amd64`.
pub(crate) fn release() -> String {
    fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default()
}

/// Whether this is a guest of tests/vm. A guest is emulated, and a hundred times slower than the machine.
pub(crate) fn in_guest() -> bool {
    env::var_os("MEMTOOLS_GUEST").is_some()
}

pub(crate) fn runs_32_bit() -> bool {
    Command::new(workload("compat32"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .is_ok()
}

/// Whether a user without privileges may make a user namespace. Sysctls, AppArmor and chroot(2) can forbid it.
fn users_make_namespaces() -> bool {
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    let ended = command
        .args(["unshare", "--user", "true"])
        .stderr(Stdio::null())
        .status();
    ended.is_ok_and(|status| status.success())
}

/// Whether the kernel makes a huge page of this process's memory on request.
fn makes_huge_pages() -> bool {
    const HUGE_PAGE: usize = 2 << 20;
    let mut memory = vec![1_u8; 2 * HUGE_PAGE];
    let start = memory.as_mut_ptr();
    let start = start.wrapping_add(start.align_offset(HUGE_PAGE));
    // SAFETY: the memory is ours, and has the same bytes afterwards.
    unsafe { libc::madvise(start.cast(), HUGE_PAGE, libc::MADV_COLLAPSE) == 0 }
}

/// Whether the soft-dirty mark of a page is clear before a write to the page, and set after it.
fn marks_written_pages() -> Result<bool> {
    const PAGE: usize = 4096;
    const MARK: u64 = 1 << 55;
    let mut pages = vec![1_u8; 2 * PAGE];
    fs::write("/proc/self/clear_refs", "4")?;
    let pagemap = File::open("/proc/self/pagemap")?;
    let at = (pages.as_ptr() as u64).div_ceil(PAGE as u64) * 8;
    let is_marked = || -> Result<bool> {
        let mut entry = [0; 8];
        pagemap.read_exact_at(&mut entry, at)?;
        Ok(u64::from_le_bytes(entry) & MARK != 0)
    };
    let before = is_marked()?;
    hint::black_box(&mut pages).fill(2);
    Ok(!before && is_marked()?)
}

/// Whether `program` starts a Python. pyenv has programs of these names that start none.
fn is_python(program: &str) -> bool {
    let mut command = Command::new(program);
    let ended = command.args(["-c", ""]).stderr(Stdio::null()).status();
    ended.is_ok_and(|status| status.success())
}

thread_local! {
    /// Whether memleak is to probe functions at their entries in the test that this thread runs.
    pub(super) static AT_ENTRIES: Cell<bool> = const { Cell::new(false) };
}

/// Makes memleak probe functions at their entries (--no-placement) for the rest of this test.
pub(crate) fn probe_entries() {
    AT_ENTRIES.set(true);
}

/// Makes a test in which memleak probes functions at their entries. No number may depend on where memleak places
/// its probes.
pub(crate) fn at_entries(tool: &str, name: &str, run: fn() -> Result<()>) -> Trial {
    test(&format!("{tool}::at_entries::{name}"), &[], move || {
        probe_entries();
        run()
    })
}

/// Makes a test that runs where its needs are met, and is ignored with the reason elsewhere.
pub(crate) fn test(
    name: &str,
    needs: &'static [Need],
    run: impl FnOnce() -> Result<()> + Send + 'static,
) -> Trial {
    boxed_test(name, needs, Box::new(run))
}

/// Makes a test. This is not generic, so that it is compiled once, and not for each of 600 functions.
fn boxed_test(
    name: &str,
    needs: &'static [Need],
    run: Box<dyn FnOnce() -> Result<()> + Send>,
) -> Trial {
    let own_name = name.to_owned();
    Trial::ignorable_test(name, move || {
        let absent = arch::NOT_HERE.iter();
        if let Some((_, reason)) = absent.rev().find(|(name, _)| own_name.starts_with(name)) {
            return Ok(Completion::ignored_with(*reason));
        }
        let unmet = needs.iter().find_map(|need| need.unmet_reason());
        if let Some(reason) = unmet {
            return Ok(Completion::ignored_with(reason));
        }
        if let Some(reason) = bpf_not_permitted() {
            return Ok(Completion::ignored_with(reason));
        }
        AT_ENTRIES.set(false);
        let started = Instant::now();
        let result = {
            let _running = Running::new(&own_name);
            run()
        };
        let took = (started.elapsed(), own_name);
        if let Ok(mut durations) = DURATIONS.lock() {
            durations.push(took);
        }
        match result {
            Ok(()) => Ok(Completion::Completed),
            Err(error) => match error.downcast_ref::<NotHere>() {
                Some(NotHere(reason)) => Ok(Completion::ignored_with(*reason)),
                None => Err(Failed::from(format!("{error:?}"))),
            },
        }
    })
}

/// Reads the names of the tests to run, one per line, from the file that MEMTOOLS_TESTS names. Returns None if
/// the variable is not set.
pub(crate) fn listed() -> Option<HashSet<String>> {
    let path = env::var_os("MEMTOOLS_TESTS")?;
    let list = fs::read_to_string(&path);
    let list = list.unwrap_or_else(|error| panic!("MEMTOOLS_TESTS, {}: {error}", path.display()));
    Some(list.lines().map(str::to_owned).collect())
}

/// Prints the tests that took longest. Called after the last test.
pub(crate) fn print_slowest() {
    let Ok(mut durations) = DURATIONS.lock() else {
        return;
    };
    durations.sort_unstable_by(|one, other| other.cmp(one));
    let all: Duration = durations.iter().map(|(took, _)| *took).sum();
    println!("{} tests took {} s:", durations.len(), all.as_secs());
    for (took, name) in durations.iter().take(SLOWEST) {
        println!("  {:5.1} s  {name}", took.as_secs_f64());
    }
}

/// Error of a test that cannot run on this machine: the test is ignored, with the reason.
#[derive(Debug)]
pub(crate) struct NotHere(pub(crate) &'static str);

impl fmt::Display for NotHere {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for NotHere {}

/// Returns why this machine's kernel does not let us trace, or None if it does. scripts/test-host looks for the first
/// words, and runs these tests in a guest.
pub(crate) fn bpf_not_permitted() -> Option<&'static str> {
    static REASON: LazyLock<Option<&'static str>> = LazyLock::new(|| {
        let tracefs = [
            "/sys/kernel/tracing/events",
            "/sys/kernel/debug/tracing/events",
        ];
        if !nix::unistd::geteuid().is_root() {
            Some("BPF is not permitted here: not root")
        } else if !may_administer().unwrap_or(false) {
            Some("BPF is not permitted here: no CAP_SYS_ADMIN, as in most containers")
        } else if !ProgramType::Tracepoint.is_supported().unwrap_or(false) {
            Some("BPF is not permitted here: bpf(2) loads no program")
        } else if !Path::new("/sys/kernel/btf/vmlinux").exists() {
            Some("BPF is not permitted here: no types of the kernel in /sys/kernel/btf/vmlinux")
        } else if !tracefs.iter().any(|folder| Path::new(folder).exists()) {
            Some("BPF is not permitted here: no tracefs on /sys/kernel/tracing")
        } else {
            None
        }
    });
    *REASON
}

/// Whether we have CAP_SYS_ADMIN, which includes CAP_BPF and CAP_PERFMON. Tests also mount and make namespaces.
fn may_administer() -> Result<bool> {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = fs::read_to_string("/proc/self/status")?;
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = u64::from_str_radix(effective.unwrap_or_default().trim(), 16)?;
    Ok(effective >> CAP_SYS_ADMIN & 1 == 1)
}
