//! Each rule by numbers that it is made for, and by those of a healthy machine.

use std::time::Instant;

use memtools::host::memory_cgroups::{Dying, MemoryCgroups};
use memtools::host::pressure::Pressure;
use memtools::host::slabinfo::Slabinfo;
use memtools::host::values::Values;

use super::*;
use crate::accounting::Accounting;
use crate::huge_pages::HugePages;
use crate::look::{Orphans, Segment, Tmpfs};
use crate::nameless::Nameless;
use crate::whose::Holders;

const GIB: u64 = 1 << 30;
const HEALTHY: &str = "MemTotal: 1048576 kB\nMemFree: 524288 kB\nMemAvailable: 838860 kB\n\
                       Cached: 314572 kB\nAnonPages: 209716 kB\n";

/// A healthy machine of 1 GiB, looked at twice in a second.
struct Machine {
    before: Look,
    now: Look,
    around: Surroundings,
    growth: HashMap<u32, i64>,
}

fn look(at: Instant, meminfo: &str, vmstat: &str) -> Look {
    let (memory, counters) = (Values::parse(meminfo), Values::parse(vmstat));
    Look {
        at,
        accounting: Accounting::of(&memory, &counters, "", 4096),
        memory,
        counters,
        processes: vec![Usage {
            pid: 4242,
            comm: "eater".into(),
            anon: GIB / 8,
            ..Usage::default()
        }],
        slabs: Slabinfo::default(),
        groups: MemoryCgroups::default(),
        holders: Holders::new(),
    }
}

impl Machine {
    fn new(more_memory: &str, vmstat: &str) -> Self {
        let first = Instant::now();
        Self {
            before: look(first, HEALTHY, ""),
            now: look(
                first + Duration::from_secs(1),
                &format!("{HEALTHY}{more_memory}"),
                vmstat,
            ),
            around: Surroundings {
                pressure: Some(Pressure::default()),
                kills: Some(Vec::new()),
                orphans: Orphans::default(),
                tmpfs: None,
                nameless: None,
                huge_pages: None,
            },
            growth: HashMap::new(),
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let findings = judge(&Evidence {
            before: &self.before,
            now: &self.now,
            around: &self.around,
            growth: &self.growth,
        });
        let unhealthy = findings.into_iter();
        unhealthy
            .filter(|finding| finding.level > Level::Healthy)
            .collect()
    }

    /// The machine has this finding alone, with this level, evidence and command.
    fn expect(&self, rule: &str, level: Level, evidence: &str, next: &str) {
        let findings = self.findings();
        assert_eq!(findings.len(), 1, "{rule}: {findings:#?}");
        let finding = &findings[0];
        assert_eq!(
            (finding.rule, finding.level),
            (rule, level),
            "{findings:#?}"
        );
        assert!(finding.evidence.contains(evidence), "{findings:#?}");
        assert_eq!(finding.next.as_deref(), Some(next));
    }
}

#[test]
fn a_healthy_machine_has_no_finding() {
    let machine = Machine::new("", "allocstall_normal 0\npswpin 5\n");
    assert_eq!(machine.findings(), []);
}

#[test]
fn rates_of_the_counters() {
    for (vmstat, rule, level, next) in [
        (
            "allocstall_normal 7\n",
            "direct-reclaim",
            Level::Look,
            "drsnoop -d 10",
        ),
        (
            "allocstall_normal 70\nallocstall_movable 70\n",
            "direct-reclaim",
            Level::Act,
            "drsnoop -d 10",
        ),
        ("pswpin 101\n", "swap-in", Level::Look, "swapin -s -d 10"),
        ("pswpin 1009\n", "swap-in", Level::Act, "swapin -s -d 10"),
        (
            "pswpin 53\nzswpin 53\n",
            "swap-in",
            Level::Look,
            "swapin -s -d 10",
        ),
        (
            "workingset_refault_file 1009\npgmajfault 32\n",
            "refaults",
            Level::Look,
            "ffaults --path -d 10",
        ),
        (
            "compact_stall 2\n",
            "compaction",
            Level::Look,
            "vmscan --compaction -d 10",
        ),
    ] {
        let machine = Machine::new("", vmstat);
        machine.expect(rule, level, "", next);
    }
}

#[test]
fn refaults_while_memory_is_free_are_worth_a_look_only() {
    let refaults = "workingset_refault 10007\npgmajfault 1000\n";
    let machine = Machine::new("", refaults);
    machine.expect(
        "refaults",
        Level::Look,
        "although 512M are free",
        "ffaults --path -d 10",
    );
    let full = "MemFree: 104857 kB\nCached: 734003 kB\n";
    let machine = Machine::new(full, refaults);
    machine.expect(
        "refaults",
        Level::Act,
        "10007 file pages/s",
        "ffaults --path -d 10",
    );
}

#[test]
fn refaults_without_faults_are_of_who_reads_most() {
    let mut machine = Machine::new("", "workingset_refault_file 10007\npgmajfault 300\n");
    let reads = |bytes| Some(bytes);
    machine.before.processes[0].disk_reads = reads(1 << 30);
    machine.now.processes[0].disk_reads = reads((1 << 30) + (40 << 20));
    // Nobody knows how much it had read before.
    machine.now.processes.push(Usage {
        pid: 7,
        disk_reads: reads(1 << 40),
        ..Usage::default()
    });
    machine.expect(
        "refaults",
        Level::Look,
        "; most by read(2), of eater (pid 4242), 40.0M/s from disk",
        "vmscan -k -d 10",
    );
}

#[test]
fn who_waits_for_swap_is_named() {
    let mut machine = Machine::new("", "pswpin 1009\n");
    machine.now.processes[0].major_faults = 997;
    machine.expect(
        "swap-in",
        Level::Act,
        "; most by eater (pid 4242), which waits 997 times a second",
        "swapin -s -d 10",
    );
}

#[test]
fn pages_that_are_copied_are_of_who_writes_to_them() {
    let grown = "MemAvailable: 733860 kB\nMemFree: 419430 kB\nAnonPages: 314574 kB\n";
    let mut machine = Machine::new(grown, "");
    // Half of 102 MiB or more.
    machine.now.processes[0].minor_faults = 13_200;
    let expect = |machine: &Machine, evidence: &str, next: &str| {
        let finding = &machine.findings()[0];
        assert_eq!(finding.rule, "running-out");
        assert!(finding.evidence.ends_with(evidence), "{finding:#?}");
        assert_eq!(finding.next.as_deref(), Some(next));
    };
    expect(
        &machine,
        "; anonymous grows by 102M/s, but no process: eater (pid 4242) writes to pages that it shares since a fork",
        "faults --bytes -p 4242 -d 10",
    );
    let other = "; anonymous grows by 102M/s";
    machine.now.processes[0].minor_faults = 13_000;
    expect(&machine, other, "faults --by-process -d 10");
    // Processes have grown, each by little.
    machine.now.processes[0].minor_faults = 26_000;
    for pid in 5000..5040 {
        machine.growth.insert(pid, 2 << 20);
    }
    expect(&machine, other, "faults --by-process -d 10");
}

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
            "memleak -k --pages 10",
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
fn memory_that_runs_out_names_who_takes_it() {
    let mut machine = Machine::new("MemAvailable: 733860 kB\n", "");
    machine.growth.insert(4242, 100 << 20);
    machine.expect(
        "running-out",
        Level::Act,
        "in 7 s; eater (pid 4242) grows by 100M/s",
        "memleak -p 4242 10",
    );
    let slower = Machine::new("MemAvailable: 828860 kB\n", "");
    assert_eq!(slower.findings()[0].level, Level::Look);
    // Of 41 MB that are left, 8 MB come and go.
    let used_up = |available: u64| {
        let mut machine = Machine::new(&format!("MemAvailable: {available} kB\n"), "");
        machine.before.memory = Values::parse("MemAvailable: 40000 kB\n");
        machine.findings()
    };
    assert_eq!(used_up(32_000)[0].rule, "available");
    assert_eq!(used_up(28_000)[0].rule, "running-out");
}

#[test]
fn memory_that_runs_out_names_the_part_that_no_process_has_taken() {
    let taken = |part: &str| format!("MemAvailable: 733860 kB\nMemFree: 419430 kB\n{part}");
    for (part, evidence, next) in [
        (
            "SUnreclaim: 104858 kB\n",
            "; slab grows by 102M/s",
            "memleak -k --by-cache 10",
        ),
        (
            "PageTables: 104858 kB\n",
            "; page tables grows by 102M/s",
            "memleak -k 10",
        ),
        ("", "; unaccounted grows by 102M/s", "memleak -k 10"),
        (
            "AnonPages: 314574 kB\n",
            "; anonymous grows by 102M/s",
            "faults --by-process -d 10",
        ),
    ] {
        let mut machine = Machine::new(&taken(part), "");
        // A process that has grown by less than half of it, and memtriage itself.
        machine.growth.insert(4242, 40 << 20);
        machine.now.processes.push(Usage {
            pid: std::process::id(),
            ..Usage::default()
        });
        machine.growth.insert(std::process::id(), 90 << 20);
        let findings = machine.findings();
        assert_eq!(findings[0].rule, "running-out", "{findings:#?}");
        assert!(findings[0].evidence.ends_with(evidence), "{findings:#?}");
        assert_eq!(findings[0].next.as_deref(), Some(next));
    }
}

#[test]
fn kills_of_the_last_hour_are_to_be_acted_on() {
    let kill = |age| Kill {
        age: Duration::from_secs(age),
        pid: 7,
        comm: "victim".into(),
        by_cgroup: true,
    };
    let mut machine = Machine::new("", "oom_kill 2\n");
    machine.around.kills = Some(vec![kill(7000), kill(65)]);
    machine.expect(
        "oom-kills",
        Level::Act,
        "1 OOM kills in the last hour; the last, 65 s ago: victim (pid 7), for its cgroup's limit",
        "oomkill -e",
    );
    machine.around.kills = Some(vec![kill(7000)]);
    assert_eq!(machine.findings(), []);
    machine.around.kills = None;
    machine.expect(
        "oom-kills",
        Level::Look,
        "2 OOM kills since the start",
        "oomkill",
    );
}

#[test]
fn pressure_is_of_some_or_of_all() {
    let mut machine = Machine::new("", "");
    let mut pressure = Pressure::default();
    pressure.some.avg10 = 11.0;
    machine.around.pressure = Some(pressure);
    machine.expect("pressure", Level::Look, "11.0 %", "drsnoop --memcg -d 10");
    pressure.full.avg10 = 6.0;
    machine.around.pressure = Some(pressure);
    machine.expect(
        "pressure",
        Level::Act,
        "all at once 6.0 %",
        "drsnoop --memcg -d 10",
    );
    machine.around.pressure = None;
    assert_eq!(machine.findings(), []);
}

#[test]
fn each_cgroup_near_its_limit_is_a_finding() {
    let group = |path: &str, current: u64, hits: u64| MemoryCgroup {
        folder: format!("/sys/fs/cgroup{path}").into(),
        path: path.into(),
        current,
        inactive_file: 0,
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
        Some("drsnoop --memcg -e -d 10")
    );
    machine.now.groups.limited[0].hits = 5;
    machine.now.groups.limited[0].oom_kills = 1;
    assert_eq!(machine.findings()[0].level, Level::Act);
    // All that it ever hit is no evidence of now.
    machine.now.groups.limited.push(group("/new", 10, 100_003));
    assert_eq!(machine.findings().len(), 2);
}

#[test]
fn shared_memory_that_nobody_has() {
    let mut machine = Machine::new("", "");
    machine.around.orphans = Orphans {
        segments: 3,
        bytes: GIB / 64,
        largest: Some(Segment {
            id: 11,
            creator: 77,
            bytes: GIB / 128,
        }),
    };
    machine.expect(
        "orphaned-shm",
        Level::Look,
        "3 System V segments that nobody has attached hold 16.0M, 1.6 % of memory; largest: id 11, made by pid 77, 8.0M",
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
        "memleak -k --pages 10",
    );
    machine.around.nameless = Some(Nameless {
        file: "memfd:cache".into(),
        pid: 4242,
        bytes: GIB / 4,
    });
    machine.expect(
        "shmem",
        Level::Act,
        "; largest file without a name: memfd:cache, 256M, open in pid 4242",
        "memleak -k --pages 10",
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
    let mut most = Dying {
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

#[test]
fn what_is_to_be_acted_on_comes_first() {
    let machine = Machine::new("", "pswpin 2003\nallocstall_normal 2\n");
    let levels: Vec<Level> = machine.findings().iter().map(|one| one.level).collect();
    assert_eq!(levels, [Level::Act, Level::Look]);
}

#[test]
fn culprits_are_those_of_the_findings_and_who_grows() {
    let culprits = |machine: &Machine| {
        let evidence = Evidence {
            before: &machine.before,
            now: &machine.now,
            around: &machine.around,
            growth: &machine.growth,
        };
        super::culprits(judge(&evidence), &evidence)
    };
    let mut machine = Machine::new("", "pswpin 2003\nallocstall_normal 2\ncompact_stall 2\n");
    machine.growth.insert(4242, 1 << 20);
    assert_eq!(
        culprits(&machine),
        [
            ("swap-in", Culprit::Readers),
            ("direct-reclaim", Culprit::Reclaimers),
            ("growing", Culprit::Process(4242)),
        ]
    );
    machine.growth.insert(4242, (1 << 20) - 1);
    assert_eq!(culprits(&machine).len(), 2);
    assert_eq!(culprits(&Machine::new("", "")), []);
}

#[test]
fn pages_in_lists_of_cpus_are_available() {
    let mut machine = Machine::new("MemAvailable: 838860 kB\n", "");
    let lists = |look: &mut Look, bytes| {
        let parts = look.accounting.parts.iter_mut();
        let mut lists = parts.filter(|part| part.name == FREE_IN_LISTS);
        lists.next().expect("a part").bytes = bytes;
    };
    lists(&mut machine.before, 30 << 20);
    lists(&mut machine.now, 10 << 20);
    let findings = machine.findings();
    assert_eq!(findings[0].rule, "running-out", "{findings:#?}");
    assert!(
        findings[0].evidence.starts_with("at 20.0M/s"),
        "{findings:#?}"
    );
}
