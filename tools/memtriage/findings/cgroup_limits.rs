//! Rules about cgroups that are near their limits.

use memtools::host::memory_cgroups::MemoryCgroup;

use super::{Evidence, Judgement, Level, Next, level_from_thresholds, shell_word};
use crate::screen::size;
use crate::who::Culprit;

/// Limit on the cgroups near their limit that are shown.
const MAX_CGROUPS: usize = 3;

/// Share of the limit, in percent, from which on page cache is named.
const CACHE_PERCENT: f64 = 10.0;
/// Growth per second from which a cgroup's growth is no noise.
const GROWS: f64 = (1 << 20) as f64;

/// Judges the cgroups with a limit. Look: a cgroup uses nine tenths of its limit, or will use all of it in two minutes.
/// Act: it will in half a minute; or between the two looks, it hit the limit ten times per second, or a process of it
/// was killed. Each such cgroup is a finding, the worst first.
pub(super) fn judge(evidence: &Evidence<'_>) -> Vec<Judgement> {
    let groups = &evidence.now.groups;
    let limited = &groups.limited;
    let mut judged: Vec<(f64, Judgement)> = limited
        .iter()
        .map(|group| (group.percent(), cgroup_limit(evidence, group)))
        .filter(|(_, (level, ..))| *level > Level::Healthy)
        .collect();
    judged.sort_by(|(percent, (level, ..)), (other_percent, (other, ..))| {
        other.cmp(level).then(other_percent.total_cmp(percent))
    });
    judged.truncate(MAX_CGROUPS);
    if judged.is_empty() {
        let mut text = format!(
            "{} cgroups have a limit, and none is near it",
            limited.len()
        );
        if let Some(remark) = groups.remark() {
            text += "; ";
            text += &remark;
        }
        return vec![(Level::Healthy, text, "".into())];
    }
    judged.into_iter().map(|(_, judgement)| judgement).collect()
}

fn cgroup_limit(evidence: &Evidence<'_>, group: &MemoryCgroup) -> Judgement {
    let mut earlier = evidence.before.groups.limited.iter();
    let earlier = earlier.find(|earlier| earlier.folder == group.folder);
    // A cgroup that is new since the first look is judged by its usage alone.
    let earlier = earlier.unwrap_or(group);
    let hits = group.hits.saturating_sub(earlier.hits) as f64 / evidence.seconds();
    let kills = group.oom_kills.saturating_sub(earlier.oom_kills);
    let growth = group.held.saturating_sub(earlier.held) as f64 / evidence.seconds();
    let left = match growth {
        GROWS.. => group.limit.saturating_sub(group.held) as f64 / growth,
        _ => f64::INFINITY,
    };
    let level = level_from_thresholds(group.percent(), 90.0, f64::INFINITY)
        .max(level_from_thresholds(-left, -120.0, -30.0))
        .max(level_from_thresholds(hits, f64::INFINITY, 10.0))
        .max(level_from_thresholds(kills as f64, f64::INFINITY, 1.0));
    let whole = group.current as f64 * 100.0 / group.limit.max(1) as f64;
    let with_cache = if whole >= group.percent() + CACHE_PERCENT {
        format!(", {whole:.0} % with page cache")
    } else {
        String::new()
    };
    let mut text = format!(
        "{} uses {:.0} % of its {}{with_cache}, and hits that limit {hits:.0} times per second",
        group.path,
        group.percent(),
        size(group.limit)
    );
    if left <= 120.0 {
        let growth = size(growth as u64);
        text += &format!("; at {growth}/s all of it is used in {left:.0} s");
    }
    if kills > 0 {
        text += &format!("; {kills} of its processes were killed just now");
    }
    let next = if hits >= 10.0 {
        Next::from("drsnoop --memcg --summary -d 10").with_culprit(Culprit::Reclaimers)
    } else if evidence.now.groups.version_1 {
        // memleak supports only cgroups of version 2.
        Next::from("faults --by-process -d 10").with_culprit(Culprit::Processes)
    } else {
        let folder = group.folder.to_string_lossy();
        let command = format!("memleak --cgroup {} 10", shell_word(&folder));
        Next::from(command).with_culprit(Culprit::Cgroup(group.folder.clone(), group.path.clone()))
    };
    (level, text, next)
}
