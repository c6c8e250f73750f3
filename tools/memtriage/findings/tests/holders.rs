//! Tests of the rules about holders of memory, and about cgroups near their limits.

use super::*;

#[test]
fn huge_pages_of_zeros() {
    let mut machine = Machine::new("", "");
    machine.around.huge_pages = Some(HugePages {
        pid: 4242,
        bytes: GIB / 8,
        samples: 64,
        zero_bytes: GIB / 10,
        error_bytes: GIB / 100,
    });
    machine.expect(
        "huge-page-zeros",
        Level::Look,
        "eater (pid 4242) has 128M in transparent huge pages, of which 80.0 % ± 8 % have only zeros: 10.0 % of memory",
        "hfaults --thp -p 4242 -d 10",
    );
}

#[test]
fn parts_of_memory() {
    for (meminfo, rule, level, evidence, next) in [
        (
            "MemAvailable: 102400 kB\n",
            "available",
            Level::Look,
            "9.8 % of memory; largest: eater (pid 4242)",
            "memleak -p 4242 10",
        ),
        (
            "SUnreclaim: 170000 kB\nMemFree: 354288 kB\n",
            "slab",
            Level::Look,
            "16.2 % of memory",
            "memleak -k --by-cache 10",
        ),
        (
            "MemFree: 424288 kB\n",
            "unaccounted",
            Level::Look,
            "9.5 % of memory",
            "memleak -k 10",
        ),
        (
            "Shmem: 262144 kB\n",
            "shmem",
            Level::Look,
            "256M, 25.0 % of memory",
            "memleak -k=pages 10",
        ),
        (
            "HugePages_Total: 128\nHugePages_Free: 120\nHugePages_Rsvd: 8\nHugepagesize: 2048 kB\n\
             Hugetlb: 262144 kB\nMemFree: 262144 kB\n",
            "huge-page-pool",
            Level::Act,
            "224M of the huge page pool's 256M",
            "hfaults -e -d 60",
        ),
        (
            "PageTables: 60000 kB\nMemFree: 464288 kB\n",
            "page-tables",
            Level::Look,
            "5.7 %",
            "faults --by-process -d 10",
        ),
        (
            "VmallocUsed: 110000 kB\nMemFree: 414288 kB\n",
            "vmalloc",
            Level::Look,
            "10.5 %",
            "memleak -k 10",
        ),
        (
            "SwapTotal: 1000 kB\nSwapFree: 50 kB\n",
            "swap-full",
            Level::Look,
            "95 %",
            "swapin -d 10",
        ),
    ] {
        let mut machine = Machine::new(meminfo, "");
        // Nothing has changed meanwhile.
        machine.before.memory = machine.now.memory.clone();
        machine.expect(rule, level, evidence, next);
    }
}

#[test]
fn cgroups_that_were_left_out_are_told() {
    let mut machine = Machine::new("", "");
    machine.now.groups.left_out = true;
    assert_eq!(machine.findings(), []);
    let all = judge(&machine.evidence());
    let limits = all.iter().find(|finding| finding.rule == "cgroup-limit");
    let limits = limits.expect("it is judged");
    assert_eq!(
        limits.evidence,
        "0 cgroups have a limit, and none is near it; cgroups beyond the first 20000 are not examined"
    );
}

/// A cgroup that is half empty, but will be full in some seconds.
#[test]
fn a_cgroup_that_fills_up_is_a_finding() {
    let group = |current: u64| MemoryCgroup {
        folder: "/sys/fs/cgroup/a".into(),
        path: "/a".into(),
        current,
        held: current,
        limit: GIB,
        hits: 0,
        oom_kills: 0,
    };
    let mut machine = Machine::new("", "");
    machine.before.groups.limited = vec![group(GIB / 2 - (20 << 20))];
    machine.now.groups.limited = vec![group(GIB / 2)];
    machine.expect(
        "cgroup-limit",
        Level::Act,
        "/a uses 50 % of its 1.0G, and hits that limit 0 times per second; at 20.0M/s all of it is used in 26 s",
        "memleak --cgroup /sys/fs/cgroup/a 10",
    );
    machine.before.groups.limited = vec![group(GIB / 2 - (1 << 19))];
    assert_eq!(machine.findings(), []);
}

#[test]
fn each_cgroup_near_its_limit_is_a_finding() {
    let group = |path: &str, current: u64, hits: u64| MemoryCgroup {
        folder: format!("/sys/fs/cgroup{path}").into(),
        path: path.into(),
        current,
        held: current,
        limit: 1000,
        hits,
        oom_kills: 0,
    };
    let mut machine = Machine::new("", "");
    machine.before.groups.limited = vec![group("/a", 100, 5), group("/b c", 950, 5)];
    machine.now.groups.limited = machine.before.groups.limited.clone();
    machine.expect(
        "cgroup-limit",
        Level::Look,
        "/b c uses 95 % of its 1000B",
        "memleak --cgroup '/sys/fs/cgroup/b c' 10",
    );
    machine.now.groups.version_1 = true;
    assert_eq!(
        machine.findings()[0].next.as_deref(),
        Some("faults --by-process -d 10")
    );
    machine.now.groups.limited[0].hits = 105;
    let findings = machine.findings();
    assert_eq!(findings.len(), 2, "{findings:#?}");
    assert!(
        findings[0]
            .evidence
            .starts_with("/a uses 10 % of its 1000B, and hits"),
        "{findings:#?}"
    );
    assert_eq!(findings[0].level, Level::Act);
    assert_eq!(
        findings[0].next.as_deref(),
        Some("drsnoop --memcg --summary -d 10")
    );
    machine.now.groups.limited[0].current = 990;
    assert_eq!(
        machine.findings()[0].evidence,
        "/a uses 10 % of its 1000B, 99 % with page cache, and hits that limit 100 times per second"
    );
    machine.now.groups.limited[0].hits = 5;
    machine.now.groups.limited[0].oom_kills = 1;
    assert_eq!(machine.findings()[0].level, Level::Act);
    // Hits before the first look are no evidence of a problem now.
    machine.now.groups.limited.push(group("/new", 10, 100_003));
    assert_eq!(machine.findings().len(), 2);
}

#[test]
fn shared_memory_that_nobody_has() {
    let mut machine = Machine::new("", "");
    machine.around.orphans = Orphans {
        segments: 3,
        bytes: GIB / 64,
        largest: Some(SharedSegment {
            id: 11,
            creator: 77,
            bytes: GIB / 128,
        }),
    };
    machine.expect(
        "orphaned-shm",
        Level::Look,
        "3 System V segments that no process has attached hold 16.0M, 1.6 % of memory; largest: id 11, made by pid 77, 8.0M",
        "shmsnoop -e -d 60",
    );

    let mut machine = Machine::new("Shmem: 524288 kB\n", "");
    machine.around.tmpfs = Some(Tmpfs {
        mount: "/run".into(),
        bytes: GIB / 2,
    });
    machine.expect(
        "shmem",
        Level::Act,
        "fullest tmpfs: /run, 512M",
        "memleak -k=pages 10",
    );
    machine.around.nameless = Some(UnlinkedFile {
        file: "memfd:cache".into(),
        pid: 4242,
        bytes: GIB / 4,
    });
    machine.expect(
        "shmem",
        Level::Act,
        "; largest file without a name: memfd:cache, 256M, open in pid 4242",
        "memleak -k=pages 10",
    );
}

#[test]
fn removed_cgroups() {
    let mut machine = Machine::new("", "");
    machine.now.groups.dying = 1009;
    machine.expect(
        "dying-cgroups",
        Level::Look,
        "1009",
        "memtriage --by cgroup",
    );
    let mut most = DyingCgroups {
        folder: "/sys/fs/cgroup/a b".into(),
        path: "/a b".into(),
        count: 997,
    };
    machine.now.groups.most_dying = Some(most.clone());
    machine.expect(
        "dying-cgroups",
        Level::Look,
        "1009 removed cgroups still hold memory; 997 of them were below /a b",
        "memtriage --cgroup '/sys/fs/cgroup/a b'",
    );
    "/".clone_into(&mut most.path);
    machine.now.groups.most_dying = Some(most);
    machine.expect("dying-cgroups", Level::Look, "", "memtriage --by cgroup");
}
