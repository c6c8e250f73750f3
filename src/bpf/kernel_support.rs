//! Checks of what this kernel supports and this user may do, with the remedy for what is missing.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

use anyhow::{Context, Result, bail};
use libbpf_rs::btf::BtfKind;
use memchr::memmem;
use memmap2::{Mmap, MmapOptions};
use nix::mount::{MsFlags, mount};
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use nix::sys::utsname::uname;

use crate::bpf::arch;
use crate::bpf::btf::Types;
use crate::host::capabilities::{self, Capability};

/// File with the types of the kernel.
pub const BTF: &str = "/sys/kernel/btf/vmlinux";
/// Folders where tracefs can be mounted, the usual one first.
pub const TRACEFS: [&str; 2] = ["/sys/kernel/tracing", "/sys/kernel/debug/tracing"];
const NOT_READ: &str = "failed to read the kernel's BTF, /sys/kernel/btf/vmlinux";

/// Checks what every tool needs before it loads anything. Whatever is missing is thus named, rather than reported as
/// an errno from deep inside the load.
///
/// # Errors
/// If something is missing. The message names it, and the command or setting that provides it.
pub fn preflight() -> Result<()> {
    check_capabilities(capabilities::has)?;
    check_locked_memory()?;
    check_lockdown(&fs::read_to_string("/sys/kernel/security/lockdown").unwrap_or_default())?;
    if !Path::new(BTF).exists() {
        bail!(
            "no BTF ({BTF} is not there): this needs a kernel built with CONFIG_DEBUG_INFO_BTF=y, \
             as distributions have built it since 2020, and /sys mounted"
        );
    }
    arch::check_kernel()
}

/// Checks that uprobes can be opened, which tools on user functions need.
///
/// # Errors
/// If the kernel has no uprobes. The message names the kernel's build option.
pub fn preflight_uprobes() -> Result<()> {
    if !Path::new("/sys/bus/event_source/devices/uprobe/type").exists() {
        bail!("this kernel has no uprobes: it needs CONFIG_UPROBE_EVENTS=y, and /sys mounted");
    }
    Ok(())
}

/// Checks that tracepoints can be found by name. Mounts tracefs if it is not mounted yet, as perf does. systemd
/// mounts tracefs when a system starts; in a container it may never be mounted.
///
/// # Errors
/// If tracepoints cannot be found. The message names the remedy.
pub fn preflight_tracepoints() -> Result<()> {
    let usual = TRACEFS[0];
    let looks = TRACEFS.map(read_an_id);
    if looks.iter().any(Result::is_ok) {
        return Ok(());
    }
    let refused = |look: &io::Error| look.kind() == io::ErrorKind::PermissionDenied;
    if looks[0].as_ref().is_err_and(refused) {
        bail!(
            "not permitted to look for tracepoints in {usual}{}",
            capabilities::remedy(Capability::CAP_DAC_READ_SEARCH)
        );
    }
    let none: Option<&str> = None;
    mount(
        Some("tracefs"),
        usual,
        Some("tracefs"),
        MsFlags::empty(),
        none,
    )
    .with_context(|| {
        format!("tracepoints are not to be found; as root: mount -t tracefs tracefs {usual}")
    })
}

/// Checks that ids of tracepoints can be read in this mount of tracefs. Some kernels permit every user to list
/// tracepoints, and not to read their ids.
fn read_an_id(folder: &str) -> io::Result<()> {
    let events = format!("{folder}/events");
    fs::metadata(&events)?;
    match File::open(format!("{events}/sched/sched_process_exit/id")) {
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied => Err(error),
        // Another error shows nothing about other tracepoints.
        _ => Ok(()),
    }
}

/// Whether the kernel is built with kprobes.
pub fn has_kprobes() -> bool {
    Path::new("/sys/bus/event_source/devices/kprobe/type").exists()
}

/// Whether a task can be preempted in the kernel: the kernel was built for preemption, and was not started with
/// preempt=none or preempt=voluntary. A kernel built for preemption counts as preemptible if its mode cannot be read
/// (debugfs is not mounted).
pub(crate) fn can_preempt() -> bool {
    let (version, chosen) = preemption();
    version.contains("PREEMPT")
        && !["(none)", "(voluntary)"]
            .iter()
            .any(|mode| chosen.contains(mode))
}

/// Whether a task can be preempted at any time in the kernel, when its share of the CPU ends: `preempt=full`, or a
/// real-time kernel. With `preempt=lazy`, a task is preempted in the kernel only by real-time tasks, or when it stays
/// there for a whole tick. If the mode cannot be read (debugfs is not mounted), the kernel's command line counts.
pub(crate) fn preempts_at_any_time() -> bool {
    let (version, chosen) = preemption();
    let command_line = fs::read_to_string("/proc/cmdline").unwrap_or_default();
    is_preempted_at_any_time(&version, &chosen, &command_line)
}

/// Returns the kernel's version line, which says how the kernel was built, and the modes of preemption with the present
/// one in parentheses. Each is empty if it cannot be read.
fn preemption() -> (String, String) {
    let version = uname().map(|name| name.version().to_string_lossy().into_owned());
    let chosen = fs::read_to_string("/sys/kernel/debug/sched/preempt");
    (version.unwrap_or_default(), chosen.unwrap_or_default())
}

fn is_preempted_at_any_time(version: &str, chosen: &str, command_line: &str) -> bool {
    if version.contains("PREEMPT_RT") || !version.contains("PREEMPT") {
        return version.contains("PREEMPT_RT");
    }
    if chosen.contains('(') {
        return chosen.contains("(full)");
    }
    let mut options = command_line.split_ascii_whitespace().rev();
    match options.find_map(|option| option.strip_prefix("preempt=")) {
        Some(mode) => mode == "full",
        None => !version.contains("PREEMPT_DYNAMIC") && !version.contains("PREEMPT_LAZY"),
    }
}

/// Whether a program on the tracepoint of a system call can be preempted, and kprobes can replace it. A preempted
/// program is skipped for all other tasks on its CPU (7.2 and later): of 19,360 calls by eight threads on two CPUs,
/// 16,251 were seen. Tools then use programs on kprobes of the system calls' functions.
pub(crate) fn preempts_system_call_programs() -> bool {
    has_kprobes() && btf_has_name("trace_call_bpf_faultable")
}

/// Whether a program on the tracepoint of a system call gets no kernel stack: before 6.12. It is given the registers
/// of the user's code.
pub fn system_call_programs_lack_kernel_stacks() -> bool {
    is_before(6, 12)
}

/// Whether a program on a raw tracepoint can be preempted, and is then skipped for all other tasks on its CPU: from
/// 7.0 on. Before 7.0, tracepoints are called with preemption off. A raw tracepoint costs less than a tracepoint of
/// tracefs, most of all when it is detached: 4 ms for vmscan, not 330.
pub fn preempts_raw_tracepoints() -> bool {
    !is_before(7, 0) && can_preempt()
}

/// Whether the kernel's release is before `major.minor`. Returns false if the release cannot be parsed.
pub fn is_before(major: u32, minor: u32) -> bool {
    let release = || {
        let name = uname().ok()?;
        let release = name.release().to_str()?;
        let numbers = release.split(|c: char| !c.is_ascii_digit());
        let mut numbers = numbers.map(|number| number.parse::<u32>().ok());
        Some((numbers.next()??, numbers.next()??))
    };
    release().is_some_and(|release| release < (major, minor))
}

/// Prints a note on stderr if BPF programs cannot know whose memory limit a task reclaims for (reclaim.bpf.h).
pub fn warn_if_no_reclaim_target() {
    if !btf_has_name("target_mem_cgroup") {
        crate::message!("this kernel's BTF lacks struct scan_control: LIMITED is not known");
    }
}

/// Whether a type, function or enumerator of this name is in the kernel's BTF.
///
/// A name in BTF tells what the kernel was built from, not what the kernel permits: attach to find that out.
pub fn btf_has_name(name: &str) -> bool {
    // Names are NUL-terminated in BTF's string section.
    let needle = [b"\0", name.as_bytes(), b"\0"].concat();
    let Ok(btf) = File::open(BTF) else {
        return false;
    };
    match map(&btf) {
        Ok(bytes) => memmem::find(&bytes, &needle).is_some(),
        Err(_) => contains(btf, &needle).unwrap_or(false),
    }
}

/// Returns this kernel's name of something that was renamed: the first of `names` that is in the kernel's BTF.
/// `names` begins with the newest name. All known renamed hooks are listed in
/// [`kernel_differences`](crate::bpf::kernel_differences).
pub fn first_name_in_btf(names: &[&'static str]) -> Option<&'static str> {
    names.iter().copied().find(|name| btf_has_name(name))
}

/// Calls `look_at` with the kernel's BTF, and returns its result.
pub(crate) fn with_btf<T>(look_at: impl FnOnce(&[u8]) -> T) -> Result<T> {
    let mut btf = File::open(BTF).context(NOT_READ)?;
    if let Ok(bytes) = map(&btf) {
        return Ok(look_at(&bytes));
    }
    let mut bytes = Vec::new();
    btf.read_to_end(&mut bytes).context(NOT_READ)?;
    Ok(look_at(&bytes))
}

/// Maps the kernel's BTF into memory without a copy, which kernels support from 6.16 on.
fn map(btf: &File) -> io::Result<Mmap> {
    // SAFETY: the kernel never changes its BTF. It refuses a shared mapping.
    unsafe { MmapOptions::new().map_copy_read_only(btf) }
}

/// Whether a file contains the bytes of `needle`. Only a piece of the file is in memory at a time: BTF has six
/// megabytes, more than all other memory of a tool.
fn contains(mut file: impl Read, needle: &[u8]) -> io::Result<bool> {
    let mut piece = vec![0; 256 << 10];
    let mut kept = 0;
    loop {
        let read = file.read(&mut piece[kept..])?;
        if read == 0 {
            return Ok(false);
        }
        let filled = kept + read;
        if memmem::find(&piece[..filled], needle).is_some() {
            return Ok(true);
        }
        // The needle may begin in this piece and end in the next one.
        kept = filled.min(needle.len() - 1);
        piece.copy_within(filled - kept..filled, 0);
    }
}

/// Names of the kernel's own tracepoints, sorted; those of modules are not among them.
///
/// # Errors
/// If the kernel has no BTF, or it cannot be read.
pub fn tracepoints() -> Result<Vec<String>> {
    with_btf(tracepoints_in)
}

/// The type names of a tracepoint's arguments, in their order, pointers and qualifiers omitted:
/// `gfp_t`, `int`, `task_struct`. None if the kernel has no such tracepoint.
///
/// Programs on raw tracepoints get the arguments by position, and positions change.
///
/// # Errors
/// If the kernel has no BTF, or it does not tell the arguments.
pub fn tracepoint_arguments(tracepoint: &str) -> Result<Option<Vec<String>>> {
    let arguments = with_btf(|btf| {
        let types = Types::parse(btf)?;
        let handler = format!("btf_trace_{tracepoint}");
        let Some(handler) = types.find(BtfKind::Typedef, &handler) else {
            return Some(None);
        };
        // The type is a pointer to a function, whose first argument is the tracepoint's own data.
        let function = types.base(&types.base(&handler)?)?;
        let arguments = types.arguments(&function)?;
        Some(Some(arguments.into_iter().skip(1).collect()))
    });
    arguments?.with_context(|| {
        format!("the kernel's BTF does not describe the arguments of {tracepoint}")
    })
}

/// Returns the type name of the result of a kernel function, such as `int` or `bool`.
///
/// # Errors
/// If the kernel has no BTF, or it does not tell the result.
pub fn function_result(function: &str) -> Result<String> {
    let result = with_btf(|btf| {
        let types = Types::parse(btf)?;
        let function = types.base(&types.find(BtfKind::Func, function)?)?;
        types.unqualified_name(function.size_or_type)
    });
    result?.with_context(|| format!("the kernel's BTF does not say what {function} returns"))
}

/// Finds the tracepoints in BTF, where each has a type for its arguments, `btf_trace_NAME`.
fn tracepoints_in(btf: &[u8]) -> Vec<String> {
    let names = btf.split(|&byte| byte == 0);
    let mut tracepoints: Vec<String> = names
        .filter_map(|name| name.strip_prefix(b"btf_trace_"))
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect();
    tracepoints.sort();
    tracepoints
}

fn check_capabilities(has: impl Fn(Capability) -> bool) -> Result<()> {
    if has(Capability::CAP_SYS_ADMIN) {
        return Ok(());
    }
    let missing: Vec<String> = [Capability::CAP_BPF, Capability::CAP_PERFMON]
        .into_iter()
        .filter(|&wanted| !has(wanted))
        .map(|missing| missing.to_string())
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "not permitted to load BPF programs ({} missing): run it as root, with sudo, or in a \
         container with --privileged",
        missing.join(" and ")
    );
}

/// Checks the limit of locked memory. Before 5.11 BPF maps count as locked memory, and are not charged to a memory
/// cgroup. libbpf raises the limit when it loads a program.
fn check_locked_memory() -> Result<()> {
    let (limit, _) = getrlimit(Resource::RLIMIT_MEMLOCK)?;
    if capabilities::has(Capability::CAP_SYS_RESOURCE)
        || limit == RLIM_INFINITY
        || !is_before(5, 11)
        || !btf_has_name("bpf_map_memory")
    {
        return Ok(());
    }
    bail!(
        "BPF maps are locked memory before Linux 5.11, of which {limit} bytes are permitted{}",
        capabilities::remedy(Capability::CAP_SYS_RESOURCE)
    );
}

fn check_lockdown(lockdown: &str) -> Result<()> {
    if lockdown.contains("[confidentiality]") {
        bail!(
            "the kernel is locked down ([confidentiality] in /sys/kernel/security/lockdown), which \
             forbids BPF programs to read memory: boot with lockdown=integrity or without it"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_found_across_pieces() {
        let piece = 256 << 10;
        for at in [0, 1, piece - 3, piece - 1, piece, 2 * piece - 2] {
            let mut bytes = vec![b'.'; 3 * piece];
            bytes[at..at + 4].copy_from_slice(b"name");
            assert!(contains(&bytes[..], b"name").unwrap(), "at {at}");
            assert!(!contains(&bytes[..], b"nane").unwrap(), "at {at}");
        }
        assert!(!contains(&b""[..], b"name").unwrap());
    }

    #[test]
    fn root_or_the_two_capabilities_suffice() {
        let check = |held: &[Capability]| check_capabilities(|wanted| held.contains(&wanted));
        assert!(check(&[Capability::CAP_SYS_ADMIN]).is_ok());
        assert!(check(&[Capability::CAP_BPF, Capability::CAP_PERFMON]).is_ok());
        let error = check(&[Capability::CAP_BPF]).unwrap_err().to_string();
        assert!(error.contains("CAP_PERFMON missing"), "{error}");
        assert!(!error.contains("CAP_BPF"), "{error}");
    }

    #[test]
    fn tracepoints_are_types_in_btf() {
        let strings = b"\x9f\xeb\0int\0btf_trace_oom\0not_btf_trace_x\0btf_trace_mm_a\0";
        assert_eq!(tracepoints_in(strings), ["mm_a", "oom"]);
    }

    #[test]
    fn full_preemption_is_seen_or_chosen() {
        const DYNAMIC: &str = "#1 SMP PREEMPT_DYNAMIC Debian 6.12.57-1";
        for (version, chosen, command_line, preempted) in [
            ("#1 SMP Debian 5.10", "", "preempt=full", false),
            ("#1 SMP PREEMPT Arch", "", "quiet", true),
            ("#1 SMP PREEMPT_RT Debian", "", "preempt=none", true),
            (DYNAMIC, "none voluntary (full)", "preempt=none", true),
            (DYNAMIC, "none (voluntary) full", "preempt=full", false),
            (DYNAMIC, "full (lazy)", "", false),
            (DYNAMIC, "", "quiet preempt=none preempt=full", true),
            (DYNAMIC, "", "preempt=full preempt=lazy", false),
            (DYNAMIC, "", "quiet", false),
        ] {
            let found = is_preempted_at_any_time(version, chosen, command_line);
            assert_eq!(found, preempted, "{version}, {chosen}, {command_line}");
        }
    }

    #[test]
    fn only_confidentiality_forbids() {
        assert!(check_lockdown("none [integrity] confidentiality\n").is_ok());
        assert!(check_lockdown("").is_ok());
        assert!(check_lockdown("none integrity [confidentiality]\n").is_err());
    }
}
