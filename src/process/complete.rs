//! Completion of processes and cgroups in shells, as values of options.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::Path;

use clap_complete::engine::CompletionCandidate;

use crate::host::mounts::Mounts;
use crate::process::cgroup;
use crate::process::proc::{self, Process};

/// Cgroups that are listed at most to complete one. A host with more cgroups has them deep in its tree.
const MAX_CGROUPS: usize = 4096;

/// Completes the id of a process; each candidate has the process's name as help.
pub fn pids(current: &OsStr) -> Vec<CompletionCandidate> {
    let begun = current.to_string_lossy();
    let programs = programs().into_iter().filter_map(|process| {
        let pid = process.pid().to_string();
        let wanted = pid.starts_with(&*begun);
        wanted.then(|| CompletionCandidate::new(pid).help(Some(process.comm().into())))
    });
    programs.collect()
}

/// Completes the name of a process; each candidate has the number of processes of this name as help.
pub fn names(current: &OsStr) -> Vec<CompletionCandidate> {
    let begun = current.to_string_lossy();
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    for process in programs() {
        *names.entry(process.comm()).or_default() += 1;
    }
    let wanted = names
        .into_iter()
        .filter(|(name, _)| name.starts_with(&*begun));
    let candidates = wanted.map(|(name, count)| {
        let processes = if count == 1 { "process" } else { "processes" };
        CompletionCandidate::new(name).help(Some(format!("{count} {processes}").into()))
    });
    candidates.collect()
}

/// Completes a cgroup of version 2, by its path below the mount.
pub fn cgroups(current: &OsStr) -> Vec<CompletionCandidate> {
    let mounts = Mounts::now();
    let Some(mount) = mounts.cgroup2() else {
        return Vec::new();
    };
    let folders = cgroup::folders(mount, MAX_CGROUPS).into_iter();
    let mut paths: Vec<OsString> = folders
        .take(MAX_CGROUPS)
        .filter_map(|folder| {
            let path = folder.strip_prefix(mount).ok()?;
            Some(Path::new("/").join(path).into_os_string())
        })
        .collect();
    let begun = current.as_encoded_bytes();
    paths.retain(|path| path.as_encoded_bytes().starts_with(begun));
    paths.into_iter().map(CompletionCandidate::new).collect()
}

/// All processes that run programs.
fn programs() -> Vec<Process> {
    let pids = proc::all().unwrap_or_default().into_iter();
    let processes = pids.filter_map(|pid| Process::open(pid).ok());
    processes
        .filter(|process| process.check_user_process().is_ok())
        .collect()
}
