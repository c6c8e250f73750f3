//! Rows of a kill, as text and as JSON.

use std::io::{self, Write};
use std::rc::Rc;

use memtools::export::text::below_row;
use memtools::print::clock;
use memtools::print::gfp::Gfp;
use memtools::print::output;
use memtools::print::timeline::TimelineEntry;
use memtools::process::container::CgroupInfo;
use memtools::process::origin::Origin;
use memtools::stacks::named::NamedStack;
use serde::Serialize;

use crate::candidates::Candidate;

/// Kind of the limit that was reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LimitKind {
    /// The machine's memory is used up.
    Global,
    /// A memory cgroup is at its limit.
    Memcg,
    /// The nodes that a cpuset or a memory policy permits are full.
    Cpuset,
    /// No limit was reached: a kill was requested by SysRq.
    Sysrq,
}

impl LimitKind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Global => "global",
            Self::Memcg => "memcg",
            Self::Cpuset => "cpuset",
            Self::Sysrq => "sysrq",
        }
    }
}

/// Process that was killed. Values that could not be read are None.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Victim {
    pub(crate) pid: u32,
    pub(crate) comm: Option<String>,
    pub(crate) uid: Option<u32>,
    pub(crate) oom_score_adj: Option<i32>,
    pub(crate) anon_kb: Option<u64>,
    pub(crate) file_kb: Option<u64>,
    pub(crate) shmem_kb: Option<u64>,
    pub(crate) swap_kb: Option<u64>,
    pub(crate) page_tables_kb: Option<u64>,
    pub(crate) total_vm_kb: Option<u64>,
    #[serde(flatten)]
    pub(crate) cgroup_info: CgroupInfo,
}

/// Row of a kill.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "kill")]
pub(crate) struct Kill {
    /// Task that needed memory.
    #[serde(flatten)]
    pub(crate) origin: Origin,
    pub(crate) victim: Victim,
    /// Total pages where memory ran out, with swap: of the machine, or of the limit.
    pub(crate) total_pages: Option<u64>,
    pub(crate) kind: Option<LimitKind>,
    /// Cgroup that is at its limit. The id of the cgroup, which cgroups of version 1 lack, and the limit follow.
    pub(crate) limit_cgroup: Option<String>,
    pub(crate) limit_cgroup_id: Option<u64>,
    pub(crate) limit_kb: Option<u64>,
    pub(crate) order: Option<i32>,
    pub(crate) gfp_flags: Option<Gfp>,
    pub(crate) loadavg: Option<String>,
    /// Processes that the kernel ranks highest after the victim.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) candidates: Option<Vec<Candidate>>,
    /// Stacks of the task that needed memory.
    #[serde(flatten)]
    pub(crate) stack: Option<Rc<NamedStack>>,
    #[serde(skip)]
    pub(crate) extended: bool,
    /// Whether text has the victim's container.
    #[serde(skip)]
    pub(crate) container: bool,
}

/// Formats a value, or `-` for a missing one.
fn dash<T: ToString>(value: Option<T>) -> String {
    value.map_or_else(|| "-".to_owned(), |value| value.to_string())
}

/// Formats a number of KB, or `-` for a missing one.
fn kilobytes(number: Option<u64>) -> String {
    dash(number.map(|number| format!("{number} KB")))
}

impl output::Row for Kill {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let victim = &self.victim;
        write!(
            out,
            "{} Triggered by PID {} (\"{}\"), OOM kill of PID {} (\"{}\"), {} pages",
            clock::time_of_day(&self.origin.time),
            self.origin.pid,
            self.origin.comm,
            victim.pid,
            dash(victim.comm.as_ref()),
            dash(self.total_pages),
        )?;
        if let Some(loadavg) = &self.loadavg {
            write!(out, ", loadavg: {loadavg}")?;
        }
        // The cgroup is spelled as in oomkill.bt, but follows BCC's line, which stays unchanged.
        if let Some(cgroup) = &self.limit_cgroup {
            let id = dash(self.limit_cgroup_id);
            write!(out, ", CGROUP {id} (\"{cgroup}\")")?;
        }
        if self.container {
            write!(out, ", CONTAINER {}", victim.cgroup_info.name())?;
        }
        writeln!(out)?;
        if self.extended {
            self.details(out)
        } else {
            Ok(())
        }
    }

    fn moment(&self) -> TimelineEntry<'_> {
        self.origin.moment("OOM kill", None)
    }
}

impl Kill {
    fn details(&self, out: &mut dyn Write) -> io::Result<()> {
        let victim = &self.victim;
        writeln!(
            out,
            "    kind {}, cgroup {}, limit {}, order {}, gfp {}",
            dash(self.kind.map(LimitKind::name)),
            dash(self.limit_cgroup.as_ref()),
            kilobytes(self.limit_kb),
            dash(self.order),
            dash(self.gfp_flags),
        )?;
        writeln!(
            out,
            "    victim: uid {}, oom_score_adj {}, anon {}, file {}, shmem {}, swap {}, page tables {}, \
             cgroup {}",
            dash(victim.uid),
            dash(victim.oom_score_adj),
            kilobytes(victim.anon_kb),
            kilobytes(victim.file_kb),
            kilobytes(victim.shmem_kb),
            kilobytes(victim.swap_kb),
            kilobytes(victim.page_tables_kb),
            dash(victim.cgroup_info.cgroup.as_ref()),
        )?;
        for candidate in self.candidates.iter().flatten() {
            writeln!(
                out,
                "    next: PID {} (\"{}\"), oom_score {}, oom_score_adj {}, rss {} KB",
                candidate.pid,
                candidate.comm,
                candidate.oom_score,
                candidate.oom_score_adj,
                candidate.rss_kb,
            )?;
        }
        match &self.stack {
            Some(stack) => below_row(stack, out),
            None => Ok(()),
        }
    }
}

/// Row of a process that was killed along with a victim: with its cgroup (memory.oom.group), or because it shares the
/// victim's memory.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "also_killed")]
pub(crate) struct AlsoKilled {
    /// Task that needed memory.
    #[serde(flatten)]
    pub(crate) origin: Origin,
    pub(crate) victim: Victim,
}

impl output::Row for AlsoKilled {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let victim = &self.victim;
        let comm = dash(victim.comm.as_ref());
        writeln!(out, "    also killed: PID {} (\"{comm}\")", victim.pid)
    }

    fn moment(&self) -> TimelineEntry<'_> {
        self.origin.moment("OOM kill of another", None)
    }
}

#[cfg(test)]
mod tests {
    use memtools::print::output::Row;
    use memtools::stacks::named::{Frame, Part};

    use super::*;

    fn kill() -> Kill {
        Kill {
            origin: Origin {
                time: "2019-08-01T21:03:39+00:00[+00:00]".parse().expect("a time"),
                pid: 3297,
                tid: 3297,
                comm: "ntpd".into(),
                cgroup_info: None,
            },
            victim: Victim {
                pid: 22516,
                comm: Some("perl".into()),
                ..Victim::default()
            },
            total_pages: Some(3_850_642),
            kind: None,
            limit_cgroup: None,
            limit_cgroup_id: None,
            limit_kb: None,
            order: None,
            gfp_flags: None,
            loadavg: Some("0.99 0.39 0.30 3/282 22724".into()),
            candidates: None,
            stack: None,
            extended: false,
            container: false,
        }
    }

    fn text(row: &impl Row) -> String {
        let mut text = Vec::new();
        row.text(&mut text).expect("memory");
        String::from_utf8(text).expect("UTF-8")
    }

    #[test]
    fn the_line_is_bccs() {
        assert_eq!(
            text(&kill()),
            "21:03:39 Triggered by PID 3297 (\"ntpd\"), OOM kill of PID 22516 (\"perl\"), \
             3850642 pages, loadavg: 0.99 0.39 0.30 3/282 22724\n"
        );
    }

    #[test]
    fn a_cgroup_at_its_limit_comes_behind_bccs_line() {
        let mut kill = Kill {
            limit_cgroup: Some("/db.service".into()),
            limit_cgroup_id: Some(4321),
            ..kill()
        };
        assert!(text(&kill).ends_with(" 3/282 22724, CGROUP 4321 (\"/db.service\")\n"));
        kill.limit_cgroup_id = None;
        assert!(text(&kill).ends_with(" 3/282 22724, CGROUP - (\"/db.service\")\n"));
        kill.container = true;
        assert!(text(&kill).ends_with(" (\"/db.service\"), CONTAINER -\n"));
    }

    #[test]
    fn what_is_not_known_is_a_dash_or_null() {
        let kill = Kill {
            total_pages: None,
            loadavg: None,
            extended: true,
            victim: Victim {
                pid: 7,
                ..Victim::default()
            },
            ..kill()
        };
        assert_eq!(
            text(&kill),
            "21:03:39 Triggered by PID 3297 (\"ntpd\"), OOM kill of PID 7 (\"-\"), - pages\n    \
             kind -, cgroup -, limit -, order -, gfp -\n    victim: uid -, oom_score_adj -, anon -, \
             file -, shmem -, swap -, page tables -, cgroup -\n"
        );
        let json = serde_json::to_string(&kill).expect("JSON");
        assert!(json.contains(r#""total_pages":null,"kind":null"#), "{json}");
    }

    #[test]
    fn details_come_below() {
        let part = |frame| Part {
            frames: vec![frame],
            truncated: None,
        };
        let kill = Kill {
            kind: Some(LimitKind::Memcg),
            limit_cgroup: Some("/db.service".into()),
            limit_kb: Some(8192),
            order: Some(0),
            gfp_flags: Some(Gfp(0xcc0)),
            candidates: Some(vec![Candidate {
                pid: 5,
                comm: "sh".into(),
                oom_score: 667,
                oom_score_adj: 0,
                rss_kb: 900,
            }]),
            stack: Some(Rc::new(NamedStack {
                kernel: Some(part(Frame::of_test("oom_kill_process", 0x1, "kernel"))),
                user: Some(part(Frame::of_test("main", 0x2, "ntpd"))),
                ..NamedStack::default()
            })),
            extended: true,
            ..kill()
        };
        let text = text(&kill);
        for line in [
            "\n    kind memcg, cgroup /db.service, limit 8192 KB, order 0, gfp GFP_KERNEL\n",
            "\n    next: PID 5 (\"sh\"), oom_score 667, oom_score_adj 0, rss 900 KB\n",
            "\n    oom_kill_process+0x1 [kernel]\n    --\n    main+0x2 [ntpd]\n",
        ] {
            assert!(text.contains(line), "{text}");
        }
    }
}
