//! Tests of the rules about scarce memory.

use super::*;

#[test]
fn rates_of_the_counters() {
    for (vmstat, rule, level, next) in [
        (
            "allocstall_normal 7\n",
            "direct-reclaim",
            Level::Look,
            "drsnoop --summary -d 10",
        ),
        (
            "allocstall_normal 70\nallocstall_movable 70\n",
            "direct-reclaim",
            Level::Act,
            "drsnoop --summary -d 10",
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
    // A process that is new has no earlier number to compare with.
    machine.now.processes.push(ProcessUsage {
        pid: 7,
        disk_reads: reads(1 << 40),
        ..ProcessUsage::default()
    });
    machine.expect(
        "refaults",
        Level::Look,
        "; most by read(2), of eater (pid 4242), 40.0M/s from disk",
        "vmscan --by-cgroup -d 10",
    );
}

#[test]
fn who_waits_for_swap_is_named() {
    let mut machine = Machine::new("", "pswpin 1009\n");
    machine.now.processes[0].major_faults = 997;
    machine.expect(
        "swap-in",
        Level::Act,
        "; most by eater (pid 4242), which waits 997 times per second",
        "swapin -s -p 4242 -d 10",
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
        // The growth of the tools themselves does not count, and that of the other process is less than half of the loss.
        machine.growth.insert(4242, 40 << 20);
        machine.now.processes.push(ProcessUsage {
            pid: 77,
            comm: "oomkill-mt".into(),
            ..ProcessUsage::default()
        });
        machine.growth.insert(77, 90 << 20);
        let findings = machine.findings();
        assert_eq!(findings[0].rule, "running-out", "{findings:#?}");
        assert!(findings[0].evidence.ends_with(evidence), "{findings:#?}");
        assert_eq!(findings[0].next.as_deref(), Some(next));
    }
}

#[test]
fn kills_of_the_last_hour_are_to_be_acted_on() {
    let kill = |age, scope| OomKill {
        age: Duration::from_secs(age),
        pid: 7,
        comm: "victim".into(),
        anon: Some(23 << 20),
        scope,
    };
    let mut machine = Machine::new("", "oom_kill 2\n");
    let old = kill(7000, OomScope::Machine);
    machine.around.kills = Some(vec![old.clone(), kill(65, OomScope::Machine)]);
    machine.expect(
        "oom-kills",
        Level::Act,
        "1 OOM kill in the last hour, 65 s ago: victim (pid 7), 23.0M; the machine was out of memory",
        "memagent",
    );
    machine.around.kills = Some(vec![old]);
    assert_eq!(machine.findings(), []);
    machine.around.kills = None;
    machine.expect(
        "oom-kills",
        Level::Look,
        "2 OOM kills since the start",
        "sudo memtriage",
    );
}

#[test]
fn a_kill_leads_to_the_cgroup_that_was_at_its_limit() {
    let kill = |path: Option<&str>| OomKill {
        age: Duration::from_secs(5),
        pid: 7,
        comm: "victim".into(),
        anon: None,
        scope: OomScope::Cgroup(path.map(str::to_owned)),
    };
    let mut machine = Machine::new("", "oom_kill 2\n");
    machine.now.groups.limited.push(MemoryCgroup {
        folder: "/sys/fs/cgroup/my app".into(),
        path: "/my app".into(),
        current: 1 << 20,
        held: 1 << 20,
        limit: 24 << 20,
        hits: 0,
        oom_kills: 0,
    });
    let record = "memagent";
    for (path, evidence, next) in [
        (
            Some("/my app"),
            "victim (pid 7); /my app was at its limit",
            "memtriage --cgroup '/sys/fs/cgroup/my app'",
        ),
        (
            Some("/removed"),
            "victim (pid 7); /removed was at its limit",
            record,
        ),
        (None, "victim (pid 7); its cgroup was at its limit", record),
    ] {
        machine.around.kills = Some(vec![kill(None), kill(path)]);
        machine.expect("oom-kills", Level::Act, evidence, next);
    }
}

#[test]
fn pressure_is_of_some_or_of_all() {
    let mut machine = Machine::new("", "");
    let mut pressure = Pressure::default();
    pressure.some.avg10 = 11.0;
    machine.around.pressure = Some(pressure);
    machine.expect(
        "pressure",
        Level::Look,
        "11.0 %",
        "drsnoop --memcg --summary -d 10",
    );
    pressure.full.avg10 = 6.0;
    machine.around.pressure = Some(pressure);
    machine.expect(
        "pressure",
        Level::Act,
        "all at once 6.0 %",
        "drsnoop --memcg --summary -d 10",
    );
    machine.around.pressure = None;
    assert_eq!(machine.findings(), []);
}

#[test]
fn pages_in_lists_of_cpus_are_available() {
    let mut machine = Machine::new("MemAvailable: 838860 kB\n", "");
    let lists = |look: &mut Snapshot, bytes| {
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
