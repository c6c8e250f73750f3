//! --check: what works here with this configuration.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use memtools::export::spool::Spool;
use memtools::host::capabilities::{self, Capability};
use memtools::host::kernel_log::FollowedLog;
use memtools::host::pressure::Pressure;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::push::client::Client;
use memtools::run::siblings;
use memtools::serve::address::Listener;

use crate::agent::Agent;
use crate::config::{Config, Trace};
use crate::tracing;

/// Exit status if something does not work.
const LESS: u8 = 3;

/// Returns where incidents are written.
fn incidents(config: &Config) -> Result<String, String> {
    let folder = &config.spool.folder;
    if folder.as_os_str().is_empty() {
        return Ok("not written: spool.folder is empty".to_owned());
    }
    match Spool::open(folder, config.spool_limits()) {
        Ok(spool) => Ok(format!("in {}", spool.shown())),
        Err(error) => Err(format!("{error:#}")),
    }
}

/// Returns whether processes that grow can be traced.
fn traces(config: &Config) -> Result<String, String> {
    if !config.trace.enabled {
        return Ok("none: trace.enabled is false".to_owned());
    }
    siblings::path("memleak").map_err(|error| format!("{error:#}"))?;
    if let Some(lacking) = tracing::lacking() {
        return Err(lacking);
    }
    let Trace {
        processes, budget, ..
    } = &config.trace;
    Ok(format!(
        "of {processes} processes at a time that grow, {} an hour",
        String::from(*budget)
    ))
}

/// Returns where profiles are pushed.
fn push(config: &Config) -> Result<String, String> {
    match config.store() {
        None => Ok("none: push.url is empty".to_owned()),
        Some(store) => {
            let url = text::escape(&store.url).into_owned();
            let client = Client::new(store).map_err(|error| format!("{error:#}"))?;
            client.reach().map_err(|error| format!("{error:#}"))?;
            Ok(format!("to {url}"))
        }
    }
}

/// Prints a line for each ability. Returns the exit status.
///
/// # Errors
/// If the agent could not run at all.
pub(crate) fn run(config: &Config, output: &mut Output) -> Result<ExitCode> {
    let mut agent = Agent::new(config.clone())?;
    agent.look(Duration::ZERO, false);
    let groups = agent.cgroups.iter().count() as u64;
    let limited = agent
        .cgroups
        .iter()
        .filter(|group| group.now.limit.is_some());
    let limited = limited.count();
    let listens = match config.listen_address()? {
        Some(address) => Listener::bind(&address).map(|_| format!("at {address}metrics")),
        None => Ok("not served: metrics.listen is empty".to_owned()),
    };
    let lines = [
        (
            "processes",
            Ok(format!("{} processes", agent.processes.len())),
        ),
        (
            "cgroups",
            match groups {
                0 => Err("none counts memory: mount cgroups with the memory controller".to_owned()),
                _ => Ok(format!(
                    "{}, {limited} with a limit",
                    text::count_with_noun(groups, "cgroup")
                )),
            },
        ),
        (
            "pressure",
            Pressure::read("/proc/pressure/memory")
                .map(|_| "reported".to_owned())
                .ok_or_else(|| "not reported: boot with psi=1".to_owned()),
        ),
        (
            "kernel log",
            FollowedLog::open()
                .map(|_| "readable: the victims of kills are known".to_owned())
                .map_err(|error| {
                    format!("{error}{}", capabilities::remedy(Capability::CAP_SYSLOG))
                }),
        ),
        ("incidents", incidents(config)),
        ("traces", traces(config)),
        ("push", push(config)),
        ("metrics", listens.map_err(|error| format!("{error:#}"))),
    ];
    let mut works = true;
    for (what, outcome) in lines {
        works &= outcome.is_ok();
        let (mark, text) = match outcome {
            Ok(text) => ("ok  ", text),
            Err(text) => ("less", text),
        };
        output.header(&format!("{mark}  {what}: {text}"))?;
    }
    output.flush()?;
    Ok(if works {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(LESS)
    })
}
