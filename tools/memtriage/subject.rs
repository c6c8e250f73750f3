//! Accounting of the memory of one process or of one cgroup.
//!
//! | number | source | overlaps |
//! |---|---|---|
//! | `VmRSS` | /proc/PID/status | excludes `HugetlbPages` (hugetlbfs), `VmPTE` (page tables), `VmSwap` (swap) |
//! | `Swap` of shared memory | /proc/PID/smaps | in no number of the process: other processes may map it, too |
//! | `file` | memory.stat, version 2 | contains `shmem` and the swap cache (`swapcached`, from 5.17 on) |
//! | `anon` | memory.stat, version 2 | contains pages of the swap cache that are mapped |
//! | `kernel` | memory.stat, version 2, from 5.18 on | contains page tables, stacks, slab, per-CPU data, vmalloc |
//! | `total_cache` | memory.stat, version 1 | contains `total_shmem` |

use std::collections::HashMap;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use memtools::host::memory_cgroups;
use memtools::host::values::Values;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::cgroup;
use memtools::process::proc::{self, Process};
use memtools::process::smaps::{self, MappedMemory};
use memtools::run::poll::Poller;

use crate::Schedule;
use crate::accounting::Accounting;
use crate::findings::{Finding, Level};
use crate::huge_pages::HugePages;
use crate::processes::{self, ProcessUsage};
use crate::screen::{Host, ProcessRow, Table};
use crate::tendency::{Headroom, Looks};

/// Process or cgroup whose memory is shown.
pub(crate) enum Subject {
    Process(Process),
    /// Folder of a cgroup that has the memory controller, of either version.
    Cgroup(PathBuf),
}

/// State of a subject at one moment.
struct SubjectSnapshot {
    at: Instant,
    accounting: Accounting,
    /// The process, or the processes of the cgroup.
    processes: Vec<ProcessUsage>,
    /// Memory of each mapping of a process; empty for a cgroup.
    mappings: Vec<MappedMemory>,
}

/// Prints the judgement and the accounting of the subject's memory once, or as often as is scheduled, until a signal or
/// the exit of the process. `all` shows each small part, `container` the column of that name. Returns the worst level.
pub(crate) fn run<'a>(
    subject: &'a Subject,
    schedule: &Schedule,
    (all, container): (bool, bool),
    mut poller: Poller<'a>,
    output: &mut Output,
) -> Result<Level> {
    if let Subject::Process(process) = subject {
        poller.watch_exit(process);
    }
    let mut before = subject.look()?;
    let mut worst = Level::Healthy;
    for _ in 0..schedule.reports {
        if schedule.wait(&mut poller)? {
            break;
        }
        let now = match subject.look() {
            Ok(now) => now,
            Err(_) if subject.is_gone() => break,
            Err(error) => return Err(error),
        };
        worst = worst.max(subject.print(&before, &now, (all, container), output)?);
        if schedule.interval.is_some() {
            output.header("")?;
        }
        output.flush()?;
        before = now;
    }
    Ok(worst)
}

impl Subject {
    /// Opens the process with this pid, or the cgroup of this directory. Returns None without either.
    ///
    /// # Errors
    /// If there is no such process, or the cgroup has no memory controller.
    pub(crate) fn of(pid: Option<u32>, cgroup: Option<&Path>) -> Result<Option<Self>> {
        if let Some(pid) = pid {
            return Ok(Some(Self::Process(Process::open(pid)?)));
        }
        let Some(folder) = cgroup else {
            return Ok(None);
        };
        let folder = memory_cgroups::folder_with_memory(folder);
        ensure!(
            memory_cgroups::current(&folder).is_some(),
            "{} is no cgroup that counts memory; see: memtriage --by cgroup",
            text::escape_bytes(folder.as_os_str().as_bytes())
        );
        Ok(Some(Self::Cgroup(folder)))
    }

    fn is_gone(&self) -> bool {
        match self {
            Self::Process(process) => process.exited(),
            Self::Cgroup(folder) => !folder.is_dir(),
        }
    }

    fn look(&self) -> Result<SubjectSnapshot> {
        match self {
            Self::Process(process) => {
                let pid = process.pid();
                let mappings = smaps::read(pid)?;
                let status = Values::read(proc::file(pid, "status"))?;
                let usage = processes::one(pid).with_context(|| {
                    format!("process {pid} has exited, or is a thread of the kernel, which has no memory of its own")
                })?;
                Ok(SubjectSnapshot {
                    at: Instant::now(),
                    accounting: of_process(&status, &mappings, &SharedFiles::of(pid), &stacks(pid)),
                    processes: vec![usage],
                    mappings,
                })
            }
            Self::Cgroup(folder) => {
                let current = memory_cgroups::current(folder).context("the cgroup is gone")?;
                let stat = Values::read(folder.join("memory.stat"))?;
                let kernel = memory_cgroups::kernel_of_version_1(folder);
                Ok(SubjectSnapshot {
                    at: Instant::now(),
                    accounting: of_cgroup(current, &stat, kernel),
                    processes: processes::of(cgroup::processes_below(folder)?),
                    mappings: Vec::new(),
                })
            }
        }
    }

    fn print(
        &self,
        before: &SubjectSnapshot,
        now: &SubjectSnapshot,
        (all, container): (bool, bool),
        output: &mut Output,
    ) -> Result<Level> {
        let mut table = Table::new(&before.accounting, &now.accounting, all);
        match self {
            Self::Process(process) => table.pid = Some(process.pid()),
            Self::Cgroup(folder) => table.cgroup = Some(folder.display().to_string()),
        }
        let memory = Values::read("/proc/meminfo")?;
        output.row(&Host::now(&memory, now.at - before.at))?;
        output.header("")?;
        let growth = processes::growth(&before.processes, &now.processes);
        let finding = self.judge(before, now, &growth, &memory);
        output.row(&finding)?;
        output.row(&table)?;
        if let (Self::Process(_), Some(usage)) = (self, now.processes.first()) {
            let growth = growth.get(&usage.pid).copied().unwrap_or_default();
            output.header(&ProcessRow::header(container))?;
            output.row(&ProcessRow::new(usage, growth, container))?;
            if let Some(huge) = HugePages::of(usage.pid, &now.mappings) {
                output.row(&huge)?;
            }
        }
        Ok(finding.level)
    }

    /// Judges the subject by two looks at it. `growth` is that of its processes in between.
    fn judge(
        &self,
        before: &SubjectSnapshot,
        now: &SubjectSnapshot,
        growth: &HashMap<u32, i64>,
        memory: &Values,
    ) -> Finding {
        let processes = now.processes.iter();
        let process = processes.max_by_key(|usage| {
            let grown = growth.get(&usage.pid).copied().unwrap_or_default();
            (grown, usage.anon_and_swap())
        });
        let (age, folder) = match self {
            Self::Process(process) => {
                let path = cgroup::of_process(process.pid()).unwrap_or_default();
                let folder = memory_cgroups::folder_with_memory(Path::new(&path));
                (now.processes.first().and_then(ProcessUsage::age), folder)
            }
            Self::Cgroup(folder) => (None, folder.clone()),
        };
        let looks = Looks {
            before: &before.accounting,
            now: &now.accounting,
            between: now.at - before.at,
            process,
            age,
            headroom: Headroom::of(&folder, memory),
        };
        looks.judge()
    }
}

/// Devices of the tmpfs mounts that a process sees.
struct SharedFiles(Vec<(u32, u32)>);

impl SharedFiles {
    fn of(pid: u32) -> Self {
        let mounts = fs::read_to_string(proc::file(pid, "mountinfo")).unwrap_or_default();
        Self::parse(&mounts)
    }

    /// Parses the lines of mountinfo: numbers, device, root, mount point, options, `-`, kind of file system.
    fn parse(mounts: &str) -> Self {
        let device = |line: &str| {
            let (mount, kind) = line.split_once(" - ")?;
            let (major, minor) = mount.split(' ').nth(2)?.split_once(':')?;
            let is_tmpfs = kind.starts_with("tmpfs ") || kind.starts_with("devtmpfs ");
            is_tmpfs.then_some((major.parse().ok()?, minor.parse().ok()?))
        };
        Self(mounts.lines().filter_map(device).collect())
    }

    /// Whether pages of this mapping are shared memory: of tmpfs, of memfd_create(2), of System V, or of a mapping
    /// that is shared with children.
    fn has(&self, one: &MappedMemory) -> bool {
        let path = one.mapping.path.to_string_lossy();
        let nameless = ["/memfd:", "/SYSV", "/dev/zero (deleted)"];
        nameless.iter().any(|name| path.starts_with(name)) || self.0.contains(&one.mapping.device)
    }
}

/// Returns the stack pointers of those threads of a process that are blocked.
fn stacks(pid: u32) -> Vec<u64> {
    let threads = fs::read_dir(format!("/proc/{pid}/task"));
    let pointer = |thread: fs::DirEntry| {
        let call = fs::read_to_string(thread.path().join("syscall")).ok()?;
        let hex = call.split_ascii_whitespace().rev().nth(1)?;
        u64::from_str_radix(hex.strip_prefix("0x")?, 16).ok()
    };
    let threads = threads.into_iter().flatten().flatten();
    threads.filter_map(pointer).collect()
}

fn of_process(
    status: &Values,
    mappings: &[MappedMemory],
    shared: &SharedFiles,
    stacks: &[u64],
) -> Accounting {
    let (mut heap, mut stack, mut anonymous, mut written) = (0, 0, 0, 0);
    let (mut files, mut shmem, mut hugetlb, mut swap) = (0, 0, 0, 0);
    for one in mappings {
        hugetlb += one.hugetlb;
        if shared.has(one) {
            shmem += one.resident;
            continue;
        }
        swap += one.swap;
        let path = one.mapping.path.to_string_lossy();
        let is_stack = || stacks.iter().any(|at| one.mapping.range.contains(at));
        if path == "[heap]" {
            heap += one.resident;
        } else if path == "[stack]" || is_stack() {
            stack += one.resident;
        } else if path.starts_with('/') {
            written += one.anonymous;
            files += one.resident.saturating_sub(one.anonymous);
        } else {
            anonymous += one.resident;
        }
    }
    let of = |name| status.get_or_zero(name);
    Accounting::new(
        "resident, swapped, tables",
        of("VmRSS") + of("VmSwap") + of("HugetlbPages") + of("VmPTE"),
        [
            ("heap (brk)", heap),
            ("anonymous mappings", anonymous),
            ("stacks", stack),
            ("files' written data", written),
            ("files, read only", files),
            ("shared memory", shmem),
            ("huge page pool", hugetlb),
            ("swapped out", swap),
            ("page tables", of("VmPTE")),
        ],
    )
}

/// Accounts for the memory of a cgroup. `kernel` is the kernel's memory, in bytes, of a cgroup of version 1, whose
/// memory.stat lacks it.
fn of_cgroup(current: u64, stat: &Values, kernel: Option<u64>) -> Accounting {
    let of = |name| stat.get_or_zero(name);
    if let Some(kernel) = kernel {
        let parts = [
            ("anonymous", of("total_rss")),
            (
                "file cache",
                of("total_cache").saturating_sub(of("total_shmem")),
            ),
            ("shmem and tmpfs", of("total_shmem")),
            ("kernel", kernel),
        ];
        return Accounting::new("memory.usage_in_bytes", current, parts);
    }
    let lists = [
        "active_anon",
        "inactive_anon",
        "active_file",
        "inactive_file",
        "unevictable",
    ];
    let on_lists: u64 = lists.into_iter().map(of).sum();
    let file = of("file").saturating_sub(of("swapcached"));
    let unmapped = on_lists.saturating_sub(of("anon") + file);
    let kernel = [
        ("page tables", of("pagetables") + of("sec_pagetables")),
        ("kernel stacks", of("kernel_stack")),
        ("slab, reclaimable", of("slab_reclaimable")),
        ("slab", of("slab_unreclaimable")),
        ("per-CPU data", of("percpu")),
        ("vmalloc", of("vmalloc")),
    ];
    let named: u64 = kernel.iter().map(|(_, bytes)| bytes).sum();
    let parts = [
        ("anonymous", of("anon")),
        ("swap cache", unmapped.min(of("swapcached"))),
        ("file cache", file.saturating_sub(of("shmem"))),
        ("shmem and tmpfs", of("shmem")),
        ("sockets", of("sock")),
        ("zswap", of("zswap")),
        ("huge page pool", of("hugetlb")),
        ("kernel, other", of("kernel").saturating_sub(named)),
    ];
    let parts = parts.into_iter().chain(kernel);
    Accounting::new("memory.current", current, parts)
}

#[cfg(test)]
mod tests {
    use std::ops::Range;

    use memtools::process::proc::Mapping;

    use super::*;

    fn kib(accounting: &Accounting) -> Vec<(&'static str, u64)> {
        let parts = accounting.parts.iter();
        parts
            .filter(|part| part.bytes > 0)
            .map(|part| (part.name, part.bytes >> 10))
            .collect()
    }

    #[test]
    fn what_is_resident_is_in_one_part() {
        let mapped = |path: &str, range: Range<u64>, resident: u64, anonymous: u64| MappedMemory {
            mapping: Mapping {
                range,
                executable: false,
                file_offset: 0,
                device: (0, if path.starts_with("/run") { 25 } else { 1 }),
                inode: 1,
                path: path.into(),
            },
            resident: resident << 10,
            anonymous: anonymous << 10,
            huge: 0,
            hugetlb: if path == "/anon_hugepage" { 2 << 20 } else { 0 },
            swap: 1 << 10,
        };
        let mappings = [
            mapped("/usr/bin/cat", 0..10, 40, 4),
            mapped("[heap]", 10..20, 100, 100),
            mapped("", 20..30, 50, 50),
            mapped("", 30..40, 20, 20),
            mapped("[stack]", 40..50, 8, 8),
            mapped("/run/x", 50..60, 7, 0),
            mapped("/memfd:y (deleted)", 60..70, 9, 0),
            mapped("/anon_hugepage", 70..80, 0, 0),
        ];
        let status =
            Values::parse("VmRSS: 235 kB\nVmSwap: 6 kB\nHugetlbPages: 2048 kB\nVmPTE: 12 kB\n");
        let mounts =
            "22 1 0:25 / /run rw - tmpfs tmpfs rw\n23 1 0:1 / / rw - ext4 /dev/vda rw\nx\n";
        let accounting = of_process(&status, &mappings, &SharedFiles::parse(mounts), &[35]);
        assert_eq!(
            kib(&accounting),
            [
                ("heap (brk)", 100),
                ("anonymous mappings", 50),
                ("stacks", 28),
                ("files' written data", 4),
                ("files, read only", 36),
                ("shared memory", 16),
                ("huge page pool", 2048),
                ("swapped out", 6),
                ("page tables", 12),
            ]
        );
        assert_eq!(accounting.unaccounted(), 1 << 10);
    }

    #[test]
    fn overlaps_of_a_cgroup_are_taken_out_once() {
        let stat = Values::parse(
            "anon 100000\nfile 50000\nkernel 30000\nshmem 8000\nswapcached 5000\nactive_anon 60000\n\
             inactive_anon 51000\nactive_file 20000\ninactive_file 17000\nunevictable 0\n\
             slab_reclaimable 7000\nslab_unreclaimable 9000\npagetables 4000\nkernel_stack 2000\n\
             percpu 1000\nsock 300\n",
        );
        let accounting = of_cgroup(180_000, &stat, None);
        let of = |name| accounting.part(name);
        assert_eq!(of("file cache"), Some(37_000));
        // 148000 are on the lists, 100000 of them mapped and anonymous, 45000 of files.
        assert_eq!(of("swap cache"), Some(3000));
        assert_eq!(of("kernel, other"), Some(7000));
        assert_eq!(accounting.unaccounted(), 180_000 - 178_300);
    }

    #[test]
    fn a_cgroup_of_version_1_has_four_parts() {
        let stat = Values::parse("cache 1\ntotal_cache 900\ntotal_rss 500\ntotal_shmem 300\n");
        let accounting = of_cgroup(1500, &stat, Some(90));
        let parts: Vec<u64> = accounting.parts.iter().map(|part| part.bytes).collect();
        assert_eq!(parts, [500, 600, 300, 90]);
        assert_eq!(accounting.unaccounted(), 10);
    }
}
