//! One look at the machine, with all the data that it reads.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::time::Instant;

use anyhow::Result;
use memtools::host::kernel_log::{self, OomKill};
use memtools::host::memory_cgroups::MemoryCgroups;
use memtools::host::mounts::{Mount, Mounts};
use memtools::host::page_size;
use memtools::host::pressure::Pressure;
use memtools::host::slabinfo::Slabinfo;
use memtools::host::values::Values;
use memtools::print::text;
use nix::sys::statvfs::statvfs;

use crate::accounting::Accounting;
use crate::huge_pages::{self, HugePages, Search};
use crate::processes::{self, ProcessUsage};
use crate::rankings::{Holders, RankBy};
use crate::unlinked::{self, UnlinkedFile};

/// Counters in /proc/vmstat of pages that were read back from swap: from a device, and from zswap.
pub(crate) const SWAP_INS: [&str; 2] = ["pswpin", "zswpin"];

/// State of the machine at one moment.
pub(crate) struct Snapshot {
    pub(crate) at: Instant,
    pub(crate) memory: Values,
    pub(crate) counters: Values,
    pub(crate) accounting: Accounting,
    pub(crate) processes: Vec<ProcessUsage>,
    pub(crate) slabs: Slabinfo,
    pub(crate) groups: MemoryCgroups,
    /// Holders that --by asks for, if these are not processes.
    pub(crate) holders: Holders,
}

impl Snapshot {
    /// Reads the state of the machine now.
    ///
    /// # Errors
    /// If /proc cannot be read, or `by` asks for numbers that this kernel does not provide, or only to root. Other
    /// numbers that only root may read are omitted.
    pub(crate) fn now(by: RankBy) -> Result<Self> {
        let memory = Values::read("/proc/meminfo")?;
        let counters = Values::read("/proc/vmstat")?;
        let zoneinfo = fs::read_to_string("/proc/zoneinfo").unwrap_or_default();
        let sockstat = fs::read_to_string("/proc/net/sockstat").unwrap_or_default();
        let page_bytes = page_size::page_bytes()?;
        let accounting = Accounting::of(&memory, &counters, &zoneinfo, page_bytes)
            .with_overlapping(SOCKET_BUFFERS, socket_buffers(&sockstat, page_bytes));
        let slabs = Slabinfo::read();
        Ok(Self {
            at: Instant::now(),
            holders: by.holders(&slabs)?,
            accounting,
            memory,
            counters,
            processes: processes::all(),
            slabs,
            groups: MemoryCgroups::read(),
        })
    }
}

/// Name of the part of memory that sockets hold.
pub(crate) const SOCKET_BUFFERS: &str = "socket buffers";

/// Returns the bytes of packets that sockets of all network namespaces hold. A line of /proc/net/sockstat has the name of
/// a protocol, and pairs of a name and a number; `mem` counts pages, and `memory` bytes.
fn socket_buffers(sockstat: &str, page_bytes: u64) -> u64 {
    let words: Vec<&str> = sockstat.split_ascii_whitespace().collect();
    let numbers = words.windows(2).filter_map(|pair| {
        let number: u64 = pair[1].parse().ok()?;
        match pair[0] {
            "mem" => Some(number.saturating_mul(page_bytes)),
            "memory" => Some(number),
            _ => None,
        }
    });
    numbers.fold(0, u64::saturating_add)
}

/// Inverse of the share of all memory from which on shared memory is searched for files without a name. Below that
/// share, no rule mentions such files.
const LARGE_SHARE: u64 = 4;

/// Data that can be judged without a second look.
pub(crate) struct OneShotData {
    pub(crate) pressure: Option<Pressure>,
    /// None if the kernel's log may not be read.
    pub(crate) kills: Option<Vec<OomKill>>,
    /// System V segments that no process has attached.
    pub(crate) orphans: Orphans,
    /// Tmpfs that uses the most memory.
    pub(crate) tmpfs: Option<Tmpfs>,
    /// Largest file in memory without a name. Searched for only if shared memory is large.
    pub(crate) nameless: Option<UnlinkedFile>,
    /// Transparent huge pages of the process that has most. Searched for only if the machine has many.
    pub(crate) huge_pages: Option<HugePages>,
}

impl OneShotData {
    /// Reads the data that need no second look.
    pub(crate) fn of(look: &Snapshot) -> Self {
        let huge_pages =
            huge_pages::worth_searching(&look.memory).then(|| Search::begin(&look.processes));
        let shmem = look.memory.get_or_zero("Shmem");
        let is_large = shmem >= look.accounting.total / LARGE_SHARE;
        let segments = fs::read_to_string("/proc/sysvipc/shm").unwrap_or_default();
        Self {
            pressure: Pressure::read("/proc/pressure/memory"),
            kills: kernel_log::oom_kills(),
            orphans: Orphans::parse(&segments),
            tmpfs: fullest_tmpfs(&Mounts::now()),
            nameless: is_large.then(unlinked::largest).flatten(),
            huge_pages: huge_pages.and_then(Search::end),
        }
    }
}

/// Mounted tmpfs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tmpfs {
    pub(crate) mount: String,
    pub(crate) bytes: u64,
}

fn fullest_tmpfs(mounts: &Mounts) -> Option<Tmpfs> {
    let used = |mount: &Mount| {
        let folder = mount.folder.as_path();
        let stat = statvfs(folder).ok()?;
        let blocks = stat.blocks().saturating_sub(stat.blocks_free());
        Some(Tmpfs {
            mount: text::escape_bytes(folder.as_os_str().as_bytes()),
            bytes: blocks.saturating_mul(stat.fragment_size()),
        })
    };
    mounts
        .iter()
        .filter(|mount| matches!(&*mount.kind, "tmpfs" | "devtmpfs"))
        .filter_map(used)
        .max_by_key(|one| one.bytes)
}

/// System V shared memory that no process has attached, and that stays until a process removes it.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Orphans {
    pub(crate) segments: u64,
    /// Size of the segments in memory and swap, in bytes.
    pub(crate) bytes: u64,
    pub(crate) largest: Option<SharedSegment>,
}

/// Segment of System V shared memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct SharedSegment {
    /// Id of the segment, which ipcrm(1) takes.
    pub(crate) id: u32,
    /// Pid of the process that created the segment, which may have exited.
    pub(crate) creator: u32,
    pub(crate) bytes: u64,
}

impl Orphans {
    /// Parses the lines of /proc/sysvipc/shm: key, id, permissions, size, creator, last user, attach count; the last
    /// two numbers are bytes in memory and in swap.
    fn parse(segments: &str) -> Self {
        let mut orphans = Self::default();
        for line in segments.lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            let [.., resident, swapped] = fields[..] else {
                continue;
            };
            if fields.get(6) != Some(&"0") {
                continue;
            }
            let bytes = |field: &str| field.parse::<u64>().unwrap_or_default();
            let number = |at: usize| fields.get(at)?.parse().ok();
            let bytes = bytes(resident) + bytes(swapped);
            orphans.segments += 1;
            orphans.bytes += bytes;
            let segment = |(id, creator)| SharedSegment { id, creator, bytes };
            let segment = number(1).zip(number(4)).map(segment);
            let size = |segment: Option<SharedSegment>| segment.map_or(0, |segment| segment.bytes);
            if size(segment) > size(orphans.largest) {
                orphans.largest = segment;
            }
        }
        orphans
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_segments_that_nobody_has_attached_are_orphans() {
        let text = "\
       key      shmid perms                  size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime                   rss                  swap
         0          1   600                 40960   100   100      0     0     0     0     0          0          0          1                  8192                  4096
         0          2   600                 40960   100   100      2     0     0     0     0          0          0          1                 40960                     0
";
        assert_eq!(
            Orphans::parse(text),
            Orphans {
                segments: 1,
                bytes: 12288,
                largest: Some(SharedSegment {
                    id: 1,
                    creator: 100,
                    bytes: 12288
                })
            }
        );
        assert_eq!(Orphans::parse(""), Orphans::default());
    }

    #[test]
    fn packets_of_all_protocols_are_added_up() {
        let text = "sockets: used 17\nTCP: inuse 1 orphan 0 tw 0 alloc 1 mem 3\nUDP: inuse 0 mem 2\n\
                    UDPLITE: inuse 0\nRAW: inuse 0\nFRAG: inuse 1 memory 100\n";
        assert_eq!(socket_buffers(text, 4096), 5 * 4096 + 100);
    }

    #[test]
    fn a_look_adds_up() {
        let look = Snapshot::now(RankBy::Process).expect("/proc is there");
        assert!(look.accounting.total > 0);
        assert!(
            look.processes
                .iter()
                .any(|usage| usage.pid == std::process::id())
        );
    }
}
