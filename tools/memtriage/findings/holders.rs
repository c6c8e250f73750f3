//! Rules about memory that no process shows as its own: shared memory, huge pages, slab, page tables.

use super::{Evidence, Judgement, Level, Next, level_from_thresholds};
use crate::findings::shell_word;
use crate::screen::size;
use crate::snapshot::SOCKET_BUFFERS;
use crate::who::Culprit;

/// Judges unaccounted memory. Look: a twentieth of memory is in none of the kernel's numbers. Act: three twentieths.
pub(super) fn unaccounted(evidence: &Evidence<'_>) -> Judgement {
    let bytes = u64::try_from(evidence.now.accounting.unaccounted()).unwrap_or_default();
    let share = evidence.share(bytes);
    let text = format!(
        "{}, {share:.1} % of memory, are in no number of the kernel's: pages of drivers and modules",
        size(bytes)
    );
    let next = Next::from("memleak -k 10").with_culprit(Culprit::KernelPages);
    (level_from_thresholds(share, 5.0, 15.0), text, next)
}

/// Judges sockets. Look: a twentieth of memory is in packets that no program has read, or that no peer has
/// acknowledged. Act: three twentieths.
pub(super) fn sockets(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.accounting.part(SOCKET_BUFFERS);
    let bytes = bytes.unwrap_or_default();
    let share = evidence.share(bytes);
    let text = format!(
        "socket buffers: {}, {share:.1} % of memory: packets that were not read yet, or not acknowledged",
        size(bytes)
    );
    // The memory of each socket, and its processes, are reported over netlink, which ss(8) reads.
    (
        level_from_thresholds(share, 5.0, 15.0),
        text,
        "ss --memory --processes --tcp --udp".into(),
    )
}

/// Judges slabs. Look: slabs that cannot be reclaimed have 15 % of memory. Act: 30 %.
pub(super) fn slab(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.get_or_zero("SUnreclaim");
    let mut text = format!(
        "slabs that cannot be reclaimed: {}, {:.1} % of memory",
        size(bytes),
        evidence.share(bytes)
    );
    if let Some((name, usage)) = evidence.now.slabs.largest() {
        text += &format!(
            "; largest cache: {name}, {}",
            size(usage.bytes.cast_unsigned())
        );
    }
    if let Some((name, change)) = evidence.before.slabs.fastest(&evidence.now.slabs) {
        text += &format!("; fastest: {name}, +{}", size(change.bytes.cast_unsigned()));
    }
    let level = level_from_thresholds(evidence.share(bytes), 15.0, 30.0);
    let next = Next::from("memleak -k --by-cache 10").with_culprit(Culprit::KernelSlabs);
    (level, text, next)
}

/// Judges shared memory. Look: shared memory and tmpfs have a quarter of memory. Act: half.
pub(super) fn shmem(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.get_or_zero("Shmem");
    let mut text = format!(
        "shared memory and tmpfs: {}, {:.1} % of memory",
        size(bytes),
        evidence.share(bytes)
    );
    // A holder of less than a tenth is not the cause.
    let tmpfs = evidence.one_shot.tmpfs.as_ref();
    if let Some(tmpfs) = tmpfs.filter(|tmpfs| tmpfs.bytes > bytes / 10) {
        text += &format!("; fullest tmpfs: {}, {}", tmpfs.mount, size(tmpfs.bytes));
    }
    let nameless = evidence.one_shot.nameless.as_ref();
    if let Some(nameless) = nameless.filter(|nameless| nameless.bytes > bytes / 10) {
        text += &format!(
            "; largest file without a name: {}, {}, open in pid {}",
            nameless.file,
            size(nameless.bytes),
            nameless.pid
        );
    }
    let most = evidence.largest_by(|usage| usage.shmem);
    if let Some(most) = most.filter(|usage| usage.shmem > bytes / 10) {
        text += &format!(
            "; most in {} (pid {}), {}",
            most.comm,
            most.pid,
            size(most.shmem)
        );
    }
    let level = level_from_thresholds(evidence.share(bytes), 25.0, 50.0);
    let next = Next::from("memleak -k=pages 10").with_culprit(Culprit::KernelPages);
    (level, text, next)
}

/// Judges orphaned segments. Look: a hundredth of memory is in segments that no process has attached. Act: a tenth.
pub(super) fn orphaned_shm(evidence: &Evidence<'_>) -> Judgement {
    let orphans = evidence.one_shot.orphans;
    let share = evidence.share(orphans.bytes);
    let text = format!(
        "{} System V segments that no process has attached hold {}, {share:.1} % of memory{}",
        orphans.segments,
        size(orphans.bytes),
        orphans.largest.map_or_else(String::new, |largest| format!(
            "; largest: id {}, made by pid {}, {}",
            largest.id,
            largest.creator,
            size(largest.bytes)
        ))
    );
    (
        level_from_thresholds(share, 1.0, 10.0),
        text,
        "shmsnoop -e -d 60".into(),
    )
}

/// Judges the huge page pool. Look: a twentieth of memory is in huge pages that are neither used nor reserved. Act: a
/// fifth.
pub(super) fn huge_page_pool(evidence: &Evidence<'_>) -> Judgement {
    let of = |name| evidence.now.memory.get_or_zero(name);
    let idle = of("HugePages_Free").saturating_sub(of("HugePages_Rsvd")) * of("Hugepagesize");
    let share = evidence.share(idle);
    let text = format!(
        "{} of the huge page pool's {} are not used by anybody, {share:.1} % of memory",
        size(idle),
        size(of("Hugetlb"))
    );
    (
        level_from_thresholds(share, 5.0, 20.0),
        text,
        "hfaults -e -d 60".into(),
    )
}

/// Judges zeros in transparent huge pages. Look: a twentieth of memory is zeros in huge pages of one process. Act:
/// three twentieths.
pub(super) fn huge_page_zeros(evidence: &Evidence<'_>) -> Judgement {
    let Some(huge) = &evidence.one_shot.huge_pages else {
        let bytes = evidence.now.memory.get_or_zero("AnonHugePages");
        let text = format!("transparent huge pages: {}", size(bytes));
        return (Level::Healthy, text, "".into());
    };
    let share = evidence.share(huge.zero_bytes);
    let mut processes = evidence.now.processes.iter();
    let process = processes.find(|usage| usage.pid == huge.pid);
    let text = format!(
        "{} (pid {}) has {}: {share:.1} % of memory",
        process.map_or("", |usage| usage.comm.as_str()),
        huge.pid,
        huge.summary()
    );
    let next = format!("hfaults --thp -p {} -d 10", huge.pid);
    (level_from_thresholds(share, 5.0, 15.0), text, next.into())
}

/// Judges page tables. Look: page tables have a twentieth of memory. Act: three twentieths.
pub(super) fn page_tables(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.memory.get_or_zero("PageTables");
    let share = evidence.share(bytes);
    let text = format!("page tables: {}, {share:.1} % of memory", size(bytes));
    let next = Next::from("faults --by-process -d 10").with_culprit(Culprit::KernelPages);
    (level_from_thresholds(share, 5.0, 15.0), text, next)
}

/// Judges vmalloc. Look: the kernel's vmalloc area has a tenth of memory. Act: a quarter.
pub(super) fn vmalloc(evidence: &Evidence<'_>) -> Judgement {
    let bytes = evidence.now.accounting.part("vmalloc").unwrap_or_default();
    let share = evidence.share(bytes);
    let text = format!("vmalloc: {}, {share:.1} % of memory", size(bytes));
    let next = Next::from("memleak -k 10").with_culprit(Culprit::KernelPages);
    (level_from_thresholds(share, 10.0, 25.0), text, next)
}

/// Judges dying cgroups. Look: a thousand removed cgroups hold memory. Act: ten thousand.
pub(super) fn dying_cgroups(evidence: &Evidence<'_>) -> Judgement {
    let dying = evidence.now.groups.dying;
    let mut text = format!("{dying} removed cgroups still hold memory");
    let mut next = Next::from("memtriage --by cgroup");
    let most = evidence.now.groups.most_dying.as_ref();
    if let Some(most) = most.filter(|most| most.path != "/") {
        text += &format!("; {} of them were below {}", most.count, most.path);
        let folder = most.folder.to_string_lossy();
        next = Next::from(format!("memtriage --cgroup {}", shell_word(&folder)));
    }
    (level_from_thresholds(dying as f64, 1e3, 1e4), text, next)
}
