//! What is kept of a trace: a folder of files, stacks in the report of a kill, and labels for a profile store.

use std::collections::BTreeMap;
use std::env;
use std::fmt::{self, Write};

use anyhow::{Context, Result};
use jiff::tz::TimeZone;
use memtools::export::saved_profile::SavedProfile;
use memtools::print::identity::Identity;
use memtools::print::text;
use memtools::push::queue::Meta;

use crate::incident;
use crate::tracing::Traced;

/// File with the profile.
pub(crate) const PROFILE: &str = "profile.pb.gz";
/// Number of stacks in a report.
const STACKS: usize = 3;
/// Number of frames of each.
const FRAMES: usize = 20;

/// Returns the name of a trace's folder.
pub(crate) fn name(traced: &Traced) -> String {
    let stamp = traced.time.with_time_zone(TimeZone::UTC);
    let what = incident::name_of(
        &traced.workload,
        traced.cgroup.as_deref().unwrap_or_default(),
    );
    format!(
        "{}-trace-{what}-{}",
        stamp.strftime("%Y%m%dT%H%M%SZ"),
        traced.pid
    )
}

/// Returns the files of a trace.
///
/// # Errors
/// If a value has no form in JSON.
pub(crate) fn files(traced: &Traced) -> Result<Vec<(&'static str, Vec<u8>)>> {
    let mut json = serde_json::to_vec_pretty(traced).context("failed to write JSON")?;
    json.push(b'\n');
    let mut report = String::new();
    // Writing to a String does not fail.
    let _ = write_stacks(traced, &mut report);
    Ok(vec![
        ("trace.json", json),
        ("report.txt", report.into_bytes()),
        (PROFILE, traced.profile.clone()),
    ])
}

/// Writes the largest stacks of a trace, for people.
pub(crate) fn write_stacks(traced: &Traced, out: &mut String) -> fmt::Result {
    let Traced {
        comm,
        pid,
        seconds,
        tool,
        ..
    } = traced;
    writeln!(
        out,
        "\n{comm} (pid {pid}) was traced by {tool} for {seconds:.0} s"
    )?;
    let profile = match SavedProfile::parse(&traced.profile) {
        Ok(profile) => profile,
        Err(error) => return writeln!(out, "its stacks are not known: {error:#}"),
    };
    // What memleak has is not freed, what faults has is touched.
    let largest = ["inuse_space", "space"]
        .into_iter()
        .find_map(|kind| profile.largest(kind, STACKS));
    let Some((stacks, sum)) = largest else {
        return writeln!(out, "its profile has no bytes");
    };
    for (names, bytes) in stacks {
        let size = |bytes: i64| text::bytes(bytes.unsigned_abs());
        writeln!(out, "  {} of {}", size(bytes), size(sum))?;
        for frame in names.frames.iter().take(FRAMES) {
            writeln!(out, "    {frame}")?;
        }
    }
    Ok(())
}

/// Returns what a profile store is told of a trace. `more` are the labels of the configuration.
pub(crate) fn meta(traced: &Traced, more: &BTreeMap<String, String>) -> Meta {
    let workload = &traced.workload;
    let unit = workload.unit.rsplit_once('.').map_or("", |(name, _)| name);
    let service = [unit, &workload.container, &traced.comm]
        .into_iter()
        .find(|name| !name.is_empty())
        .unwrap_or("unknown");
    // In a pod, the host's name is the pod's.
    let host = env::var("NODE_NAME").ok().filter(|name| !name.is_empty());
    let host = host.unwrap_or_else(|| Identity::of_this_tool().host().to_owned());
    let mut labels = vec![
        ("service_name".to_owned(), service.to_owned()),
        ("host".to_owned(), host),
        ("comm".to_owned(), traced.comm.clone()),
    ];
    let of_workload = workload.labels().into_iter();
    labels.extend(of_workload.map(|(name, value)| (name.to_owned(), value)));
    labels.extend(
        more.iter()
            .map(|(name, value)| (name.clone(), value.clone())),
    );
    let from = u64::try_from(traced.time.timestamp().as_second()).unwrap_or_default();
    Meta {
        labels,
        from_seconds: from,
        until_seconds: from + traced.seconds.ceil() as u64,
    }
}
