//! Tests of each rule, with numbers that it should report and with those of a healthy machine.

mod holders;
mod scarcity;

use std::collections::HashMap;
use std::time::{Duration, Instant};

use memtools::host::kernel_log::{OomKill, OomScope};
use memtools::host::memory_cgroups::{DyingCgroups, MemoryCgroup, MemoryCgroups};
use memtools::host::pressure::Pressure;
use memtools::host::slabinfo::Slabinfo;
use memtools::host::values::Values;

use super::*;
use crate::accounting::{Accounting, FREE_IN_LISTS};
use crate::huge_pages::HugePages;
use crate::processes::ProcessUsage;
use crate::rankings::Holders;
use crate::snapshot::{OneShotData, Orphans, SharedSegment, Snapshot, Tmpfs};
use crate::unlinked::UnlinkedFile;

const GIB: u64 = 1 << 30;
const HEALTHY: &str = "MemTotal: 1048576 kB\nMemFree: 524288 kB\nMemAvailable: 838860 kB\n\
                       Cached: 314572 kB\nAnonPages: 209716 kB\n";

/// Healthy machine of 1 GiB, with two looks one second apart.
struct Machine {
    before: Snapshot,
    now: Snapshot,
    around: OneShotData,
    growth: HashMap<u32, i64>,
}

fn look(at: Instant, meminfo: &str, vmstat: &str) -> Snapshot {
    let (memory, counters) = (Values::parse(meminfo), Values::parse(vmstat));
    Snapshot {
        at,
        accounting: Accounting::of(&memory, &counters, "", 4096),
        memory,
        counters,
        processes: vec![ProcessUsage {
            pid: 4242,
            comm: "eater".into(),
            anon: GIB / 8,
            ..ProcessUsage::default()
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
            around: OneShotData {
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

    fn evidence(&self) -> Evidence<'_> {
        Evidence {
            before: &self.before,
            now: &self.now,
            one_shot: &self.around,
            growth: &self.growth,
        }
    }

    fn findings(&self) -> Vec<Finding> {
        let findings = judge(&self.evidence());
        let unhealthy = findings.into_iter();
        unhealthy
            .filter(|finding| finding.level > Level::Healthy)
            .collect()
    }

    /// Asserts that the machine has this finding alone, with this level, evidence and command.
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
fn what_is_to_be_acted_on_comes_first() {
    let machine = Machine::new("", "pswpin 2003\nallocstall_normal 2\n");
    let levels: Vec<Level> = machine.findings().iter().map(|one| one.level).collect();
    assert_eq!(levels, [Level::Act, Level::Look]);
}

#[test]
fn culprits_are_those_of_the_findings_and_who_grows() {
    let culprits = |machine: &Machine| {
        let evidence = machine.evidence();
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
