//! Filter of the tasks that are traced: `-p`, `-n`, `--cgroup`, and `-t` in tools that have it.
//!
//! The BPF programs apply the filter, in `bpf/include/filter.bpf.h`. The tool itself is never traced.
//!
//! `prepare` and `load`, which [`skeleton!`](crate::skeleton) generates, set a filter in a BPF object.

use std::fmt;
use std::fs::{self, File};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process;

use anyhow::{Context, Result, bail};
use clap_complete::engine::ArgValueCompleter;
use libbpf_rs::{MapCore, MapFlags, OpenMapMut};
use nix::sys::statfs::{CGROUP2_SUPER_MAGIC, fstatfs};
use plain::Plain;

use crate::bpf::types;
use crate::host::mounts::Mounts;
use crate::parse::UsageError;
use crate::print::text;
use crate::process::cgroup;
use crate::process::complete;
use crate::process::follow::Follower;
use crate::process::proc::{self, Process};

/// Maximum number of processes that `-p` accepts.
const MAX_PIDS: usize = 512;
/// Number of bits of a slot's index in the hash table of processes on the BPF side. The table has four slots for each
/// of [`MAX_PIDS`], so that almost any factor places all processes.
const SLOT_BITS: u32 = types::filter_table::FILTER_SLOT_BITS.0;
const SLOTS: usize = types::filter_table::FILTER_SLOTS.0 as usize;
const PROBES: usize = types::filter_table::FILTER_PROBES.0 as usize;
/// Maximum length of a task's name in bytes, without the NUL.
const MAX_NAME: usize = 15;
/// Inode of the initial PID namespace, the same on every kernel (PROC_PID_INIT_INO).
const INITIAL_PID_NAMESPACE: u32 = 0xeffffffc;

/// Options of every tool that traces tasks.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct FilterArgs {
    /// Trace only these processes
    #[arg(help_heading = "Target", short, long, value_name = "PID[,PID...]", value_delimiter = ',', value_parser = proc::parse_pid, add = ArgValueCompleter::new(complete::pids))]
    pub pid: Vec<u32>,

    /// Trace only tasks whose name (comm) contains NAME
    #[arg(help_heading = "Target", short, long, value_name = "NAME", add = ArgValueCompleter::new(complete::names))]
    pub name: Option<String>,

    /// Trace only this cgroup, systemd unit or container
    ///
    /// CGROUP is the path of a cgroup (version 2), the name of a systemd unit, or the ID of a container or pod. Cgroups
    /// below it are included.
    #[arg(help_heading = "Target", long, value_name = "CGROUP", value_parser = cgroup_path, add = ArgValueCompleter::new(complete::cgroups))]
    pub cgroup: Option<PathBuf>,
}

/// Describes in words what is traced, escaped, such as `pid 1234`.
impl fmt::Display for FilterArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut parts = Vec::new();
        if !self.pid.is_empty() {
            let comm = |pid: &u32| {
                let comm = Process::open(*pid).map(|process| process.comm());
                comm.map_or_else(
                    |_| format!("pid {pid}"),
                    |comm| format!("pid {pid} ({comm})"),
                )
            };
            parts.push(self.pid.iter().map(comm).collect::<Vec<_>>().join(", "));
        }
        if let Some(name) = &self.name {
            parts.push(format!("tasks named {}", text::escape(name)));
        }
        if let Some(cgroup) = &self.cgroup {
            let path = text::escape_bytes(cgroup.as_os_str().as_bytes());
            parts.push(format!("cgroup {path}"));
        }
        if parts.is_empty() {
            parts.push("the whole system".to_owned());
        }
        f.write_str(&parts.join(", "))
    }
}

impl FilterArgs {
    /// Checks that the selected processes, thread and cgroup exist. `tid` is the `-t` of a tool; it takes precedence
    /// over `-p`.
    ///
    /// # Errors
    /// If a process, thread or cgroup does not exist, or cannot do what is traced, or a name is not valid.
    pub fn resolve(&self, tid: Option<u32>, tasks: TaskKind) -> Result<Filter> {
        for &pid in &self.pid {
            tasks.expect(&Process::open(pid)?)?;
        }
        if let Some(tid) = tid {
            tasks.expect(&Process::of_thread(tid)?)?;
        }
        let cgroup = self.cgroup.as_deref().map(open_cgroup).transpose()?;
        let (name, name_mask) = match &self.name {
            Some(name) => name_and_mask(name.as_bytes())?,
            None => Default::default(),
        };
        let (pid_factor, pids) = build_pid_table(&self.pid)?;

        Ok(Filter {
            options: types::filter {
                pids,
                pid_factor,
                pid_count: self.pid.len() as u32,
                only_pid: self.pid.first().copied().unwrap_or(0),
                tid: tid.unwrap_or(0),
                own_pid: process::id(),
                pid_namespace: pid_namespace()?,
                name,
                name_mask,
                by_name: self.name.is_some().into(),
                by_cgroup: cgroup.is_some().into(),
                ..types::filter::default()
            },
            cgroup,
            follower: None,
        })
    }
}

/// Kind of tasks that can do what a tool traces.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TaskKind {
    /// Tasks of programs, which have user memory.
    Programs,
    /// All tasks, including kernel threads.
    All,
}

impl TaskKind {
    fn expect(self, process: &Process) -> Result<()> {
        match self {
            Self::Programs => process.check_user_process(),
            Self::All => process.expect_running(),
        }
    }
}

/// Builds the hash table of these processes, and returns it with the factor of its hash. Each process is in one of
/// the slots from `pid * factor >> (32 - SLOT_BITS)` on, with no empty slot in between.
fn build_pid_table(pids: &[u32]) -> Result<(u32, [u32; SLOTS])> {
    if pids.len() > MAX_PIDS {
        let message = format!(
            "--pid (-p) takes at most {MAX_PIDS} processes, not {}: put them into a cgroup and give \
             --cgroup",
            pids.len()
        );
        return Err(UsageError(message).into());
    }
    // Multiples of an odd number without a pattern in its bits.
    let factors = (1..1000u32).map(|n| n.wrapping_mul(0x9e37_79b1) | 1);
    let mut placed = factors.filter_map(|factor| Some((factor, place_by(factor, pids)?)));
    placed
        .next()
        .context("failed to place the processes of --pid (-p): give fewer")
}

fn place_by(factor: u32, pids: &[u32]) -> Option<[u32; SLOTS]> {
    let mut slots = [0; SLOTS];
    for &pid in pids {
        let first = (pid.wrapping_mul(factor) >> (32 - SLOT_BITS)) as usize;
        let mut probes = (first..first + PROBES).map(|slot| slot % SLOTS);
        let slot = probes.find(|&slot| slots[slot] == 0 || slots[slot] == pid)?;
        slots[slot] = pid;
    }
    Some(slots)
}

/// Filter in the form that the BPF side needs.
#[derive(Debug)]
pub struct Filter {
    options: types::filter,
    cgroup: Option<OwnedFd>,
    follower: Option<Follower>,
}

impl Filter {
    /// Also traces the descendants of the processes of `-p` that start from now on.
    ///
    /// # Errors
    /// If the follower's programs cannot be loaded or attached.
    pub fn follow(&mut self) -> Result<()> {
        self.options.follow = 1;
        self.follower = Some(Follower::start(self)?);
        Ok(())
    }

    /// Replaces the skeleton's maps `filter_followed` and `losses` by those of the follower, if there is a follower.
    /// To be called before load.
    ///
    /// # Errors
    /// If libbpf refuses to share a map.
    pub fn share_maps(
        &self,
        followed: &mut OpenMapMut<'_>,
        losses: &mut OpenMapMut<'_>,
    ) -> Result<()> {
        let follower = self.follower.as_ref();
        follower.map_or(Ok(()), |follower| follower.share_maps(followed, losses))
    }

    /// Returns how often the kernel has skipped a program of the follower. Each time, a process may not be followed.
    pub(crate) fn skipped_runs(&self) -> Result<u64> {
        let follower = self.follower.as_ref();
        follower.map_or(Ok(0), Follower::skipped_runs)
    }

    /// Sets the skeleton's constant `filter`. Its type in that skeleton is generated from the same C struct as ours.
    /// To be called before load.
    pub fn set<T: Plain>(&self, constant: &mut T) {
        const {
            assert!(size_of::<T>() == size_of::<types::filter>());
        }
        // SAFETY: both are plain data of the same size.
        let (from, to) = unsafe {
            (
                plain::as_bytes(&self.options),
                plain::as_mut_bytes(constant),
            )
        };
        to.copy_from_slice(from);
    }

    /// Stores the cgroup, if one is selected, in the loaded skeleton's map `filter_cgroup`.
    ///
    /// # Errors
    /// If the kernel refuses the map entry.
    pub fn set_cgroup(&self, map: &impl MapCore) -> Result<()> {
        let Some(cgroup) = &self.cgroup else {
            return Ok(());
        };
        map.update(
            &0u32.to_ne_bytes(),
            &cgroup.as_raw_fd().to_ne_bytes(),
            MapFlags::ANY,
        )
        .context("failed to filter by cgroup")
    }
}

/// Returns the bytes of the name and a mask with 0xff for each of them, both as long as the kernel's comm.
fn name_and_mask(name: &[u8]) -> Result<([u8; 16], [u8; 16])> {
    if name.is_empty() || name.len() > MAX_NAME {
        let message = format!(
            "--name (-n) takes 1 to {MAX_NAME} bytes, as the kernel keeps of a task's name; see: ps \
             -e -o comm"
        );
        return Err(UsageError(message).into());
    }
    let (mut bytes, mut mask) = ([0; 16], [0; 16]);
    bytes[..name.len()].copy_from_slice(name);
    mask[..name.len()].fill(0xff);
    Ok((bytes, mask))
}

/// Returns the directory of a cgroup. The cgroup can be given by its directory, by its path below the mount as tools
/// print it, or by the name of what runs in it (`cgroup::find_by_name`).
///
/// # Errors
/// If several cgroups have this name: the message lists all of them.
pub fn cgroup_path(name: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(name);
    let mounts = Mounts::now();
    let Some(mount) = mounts.cgroup2().filter(|_| !path.is_dir()) else {
        return Ok(path);
    };
    let below = mount.join(name.trim_start_matches('/'));
    if below.is_dir() {
        return Ok(below);
    }
    match &cgroup::find_by_name(mount, name)[..] {
        // If the path cannot be opened, the error is reported when it is opened.
        [] => Ok(path),
        [only] => Ok(only.clone()),
        several => {
            let shown = several
                .iter()
                .map(|path| text::escape_bytes(path.as_os_str().as_bytes()));
            let shown: Vec<String> = shown.collect();
            Err(format!("several cgroups go by it: {}", shown.join(", ")))
        }
    }
}

/// Opens a cgroup of version 2. The kernel would accept a cgroup of version 1, but it would never match.
fn open_cgroup(path: &Path) -> Result<OwnedFd> {
    let name = path.display();
    let remedy = || match Mounts::now().cgroup2() {
        Some(mount) => {
            let mount = text::escape_bytes(mount.as_os_str().as_bytes());
            format!("see: find {mount} -type d")
        }
        None => "there is none yet: mount -t cgroup2 none DIRECTORY".into(),
    };
    let folder =
        File::open(path).with_context(|| format!("failed to open cgroup {name}; {}", remedy()))?;
    let kind = fstatfs(folder.as_fd()).context("failed to examine the cgroup")?;
    if kind.filesystem_type() != CGROUP2_SUPER_MAGIC || !folder.metadata()?.is_dir() {
        bail!("{name} is not a cgroup of version 2; {}", remedy());
    }
    Ok(folder.into())
}

/// Returns the inode of our PID namespace; 0 for the initial namespace, whose PIDs are those of the kernel.
pub(crate) fn pid_namespace() -> Result<u32> {
    let link = fs::read_link("/proc/self/ns/pid")
        .context("failed to read /proc/self/ns/pid; is /proc mounted?")?;
    let inode = namespace_inode(&link.to_string_lossy())
        .with_context(|| format!("{} names no namespace", link.display()))?;
    Ok(if inode == INITIAL_PID_NAMESPACE {
        0
    } else {
        inode
    })
}

/// Returns 4026531836 for `pid:[4026531836]`.
fn namespace_inode(link: &str) -> Option<u32> {
    link.strip_prefix("pid:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(args: &FilterArgs) -> Result<Filter> {
        args.resolve(None, TaskKind::Programs)
    }

    #[test]
    fn nothing_asked_for_filters_only_the_tool_itself() {
        let options = resolve(&FilterArgs::default()).expect("valid").options;
        assert_eq!(options.own_pid, process::id());
        assert_eq!(
            (
                options.pid_count,
                options.tid,
                options.by_name,
                options.by_cgroup
            ),
            (0, 0, 0, 0)
        );
    }

    #[test]
    fn processes_must_be_there_and_not_too_many() {
        let args = |pid: Vec<u32>| FilterArgs {
            pid,
            ..FilterArgs::default()
        };
        let options = resolve(&args(vec![1, process::id()]))
            .expect("valid")
            .options;
        assert_eq!(options.pid_count, 2);
        let mut placed = options.pids.to_vec();
        placed.retain(|&pid| pid != 0);
        placed.sort_unstable();
        assert_eq!(placed, [1, process::id()]);

        let error = resolve(&args(vec![1, i32::MAX as u32])).unwrap_err();
        assert!(error.to_string().contains("no process has PID"), "{error}");
        let error = resolve(&args(vec![1; 513])).unwrap_err();
        assert!(
            error.is::<UsageError>() && error.to_string().contains("--cgroup"),
            "{error}"
        );
        let error = args(Vec::new())
            .resolve(Some(i32::MAX as u32), TaskKind::Programs)
            .unwrap_err();
        assert!(error.to_string().contains("ps -L"), "{error}");
    }

    #[test]
    fn all_processes_find_a_slot() {
        for step in [1, 2, 16, 2048, 8191] {
            let pids: Vec<u32> = (1..=MAX_PIDS as u32).map(|n| n * step).collect();
            let (factor, slots) = build_pid_table(&pids).expect("room");
            for pid in pids {
                let first = (pid.wrapping_mul(factor) >> (32 - SLOT_BITS)) as usize;
                // The same lookup as on the BPF side.
                let mut probes = (first..first + PROBES).map(|slot| slots[slot % SLOTS]);
                let found = probes.find(|&here| here == 0 || here == pid);
                assert_eq!(found, Some(pid), "of every {step}th");
            }
        }
    }

    #[test]
    fn names_have_1_to_15_bytes() {
        let (name, mask) = name_and_mask(b"sh").expect("valid");
        assert_eq!(
            (&name[..3], &mask[..3]),
            (&b"sh\0"[..], &[0xff, 0xff, 0][..])
        );
        assert!(name_and_mask(&[b'x'; 15]).is_ok());
        for wrong in [&b""[..], &[b'x'; 16]] {
            assert!(name_and_mask(wrong).unwrap_err().is::<UsageError>());
        }
    }

    #[test]
    fn what_is_no_cgroup_is_refused_with_the_place_where_they_are() {
        for wrong in ["/tmp", "/no/such/cgroup"] {
            let error = open_cgroup(Path::new(wrong)).unwrap_err();
            let text = format!("{error:#}");
            assert!(text.contains(wrong), "{text}");
            assert!(
                text.contains("find /") || text.contains("mount -t cgroup2"),
                "{text}"
            );
        }
    }

    #[test]
    fn a_namespace_is_known_by_its_inode() {
        assert_eq!(
            namespace_inode("pid:[4026531836]"),
            Some(INITIAL_PID_NAMESPACE)
        );
        assert_eq!(namespace_inode("pid:[x]"), None);
        assert_eq!(namespace_inode("net:[1]"), None);
    }
}
