//! memagent: watches the memory of a machine for weeks, serves its numbers to Prometheus, and writes an incident of each
//! OOM kill.
//!
//! One loop looks at the machine, its cgroups and the kernel's log each second, and at all processes each quarter of a
//! minute. Nothing is traced until something grows: then a second process, which has kept the privileges for it, starts
//! memleak for single processes. Other threads serve HTTP, write incidents and push profiles.

mod agent;
mod budget;
mod check;
mod config;
mod incident;
mod kills;
mod metrics;
mod trace_record;
mod tracing;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use clap::Parser;
use memtools::export::spool::{Limits, Spool};
use memtools::host::capabilities::{self, Capability};
use memtools::host::kernel_log::FollowedLog;
use memtools::host::pressure::Trigger;
use memtools::print::output::Format;
use memtools::push::client::Client;
use memtools::push::queue::Queue;
use memtools::push::sender::Sender;
use memtools::run::cli;
use memtools::run::poll::Poller;
use memtools::run::privileges;
use memtools::serve::address::Listener;
use memtools::serve::report::ServedReport;
use memtools::serve::server::Server;
use nix::time::{ClockId, clock_gettime};
use sd_notify::NotifyState;

use crate::agent::Agent;
use crate::config::Config;
use crate::incident::Writer;
use crate::tracing::Tracing;

/// Stall time and window of the memory pressure that has the agent look at once: a tenth of a window, which without
/// CAP_SYS_RESOURCE has to be two seconds.
const PRESSURE: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));
/// Directory of profiles that wait to be pushed, in that of incidents.
const QUEUE: &str = "queue";
/// Maximum number of these profiles.
const MAX_QUEUED: usize = 10_000;
/// Maximum memory of responses, in bytes.
const SERVED_BYTES: usize = 8 << 20;

/// Watch the memory of this machine, its cgroups and processes, and serve metrics.
#[derive(Debug, Parser)]
#[command(
    name = "memagent",
    version,
    after_help = "\
exit status: 0 if it was stopped, 1 if it could not run, 2 for wrong usage;
with --check: 3 if it can run, but with less

examples:
  memagent                     watch until Ctrl-C or SIGTERM
  memagent -c test.toml        with another configuration
  memagent --check             is the configuration right, and what works here?
  memagent --print-config >/etc/memagent.toml
                               a file with all keys, to be edited
  systemctl reload memagent    load the configuration again, as SIGHUP does
  curl -s localhost:9754/metrics
                               the numbers
  curl -s localhost:9754/metrics | grep suspicious
                               which cgroups come near their limits"
)]
struct Args {
    /// Check the configuration and what works here, and exit
    #[arg(help_heading = "Actions", long, conflicts_with = "print_config")]
    check: bool,

    /// Print the configuration with all its keys, and exit
    #[arg(help_heading = "Actions", long)]
    print_config: bool,

    /// Read the configuration from FILE [default: /etc/memagent.toml, if it exists]
    #[arg(help_heading = "General", short, long, value_name = "FILE")]
    config: Option<PathBuf>,
}

fn main() -> ExitCode {
    cli::main(run)
}

fn run(args: Args) -> Result<ExitCode> {
    let config = Config::load(args.config.as_deref())?;
    if args.print_config || args.check {
        let (_poller, mut output) = cli::start(Format::Text, None)?;
        if args.print_config {
            let text = config.text()?;
            output.raw(|out| out.write_all(text.as_bytes()))?;
            output.flush()?;
            return Ok(ExitCode::SUCCESS);
        }
        return check::run(&config, &mut output);
    }
    watch(&args, config)?;
    Ok(ExitCode::SUCCESS)
}

/// Watches until a signal arrives.
fn watch(args: &Args, config: Config) -> Result<()> {
    let spool = spool(&config);
    let traces = traces(&config, spool.is_some());
    // The process that starts tools is forked while signals are not blocked yet, and there are no threads.
    let tracing = traces.as_ref().and_then(|_| tracing(&config));
    let mut poller = Poller::new()?;
    let hangup = Arc::new(AtomicBool::new(false));
    poller.rotate_at_hangup(Arc::clone(&hangup));
    let listener = config.listen_address()?;
    let listener = listener
        .map(|address| Listener::bind(&address))
        .transpose()?;
    let log = followed_log();
    privileges::keep_watching()?;
    let sender = sender(&config);
    let server = listener
        .map(|listener| Server::start(listener, SERVED_BYTES, privileges::keep_serving))
        .transpose()?;
    let (stalled, window) = PRESSURE;
    // Without pressure information, growth is seen all the same.
    let trigger = Trigger::some("/proc/pressure/memory", stalled, window).ok();
    let mut agent = Agent::new(config)?;
    agent.log = log;
    agent.writer = spool
        .map(|spool| Writer::start(spool, traces))
        .transpose()?;
    agent.tracing = tracing;
    agent.sender = sender;
    server.iter().for_each(|server| poller.watch(server));
    if let Some(trigger) = &trigger {
        poller.watch_exception(trigger);
    }
    agent.look(since_boot()?, false);
    match &server {
        Some(server) => memtools::message!("watching; metrics at {}metrics", server.address()),
        None => memtools::message!("watching"),
    }
    notify(&[NotifyState::Ready]);
    let mut schedule = Schedule::new(agent.config.watch.cgroups_every.0);
    loop {
        let wake = poller.wait(Some(schedule.next))?;
        if wake.stop {
            break;
        }
        if let Some(server) = server.as_ref().filter(|server| wake.is_ready(*server)) {
            server.answer(|| Ok(ServedReport::of_numbers(metrics::families(&agent))))?;
        }
        let is_pressed = trigger
            .as_ref()
            .is_some_and(|trigger| wake.is_ready(trigger));
        if wake.deadline || is_pressed {
            agent.look(since_boot()?, is_pressed);
            notify(&[NotifyState::Watchdog]);
        }
        if wake.deadline {
            agent.own.late += u64::from(schedule.advance());
        }
        if hangup.swap(false, Ordering::Relaxed) {
            reload(args, &mut agent);
            schedule.every = agent.config.watch.cgroups_every.0;
        }
    }
    notify(&[NotifyState::Stopping]);
    agent.finish();
    Ok(())
}

/// Opens the kernel's log. Without it, kills are known by the events of cgroups, without the victims.
fn followed_log() -> Option<FollowedLog> {
    let log = FollowedLog::open();
    if let Err(error) = &log {
        let remedy = capabilities::remedy(Capability::CAP_SYSLOG);
        memtools::message!(
            "failed to open the kernel's log, so that victims are not known: {error}{remedy}"
        );
    }
    log.ok()
}

/// Opens the directory of incidents. One that cannot be written to is reported, and metrics are served all the same.
fn spool(config: &Config) -> Option<Spool> {
    let folder = &config.spool.folder;
    if folder.as_os_str().is_empty() {
        return None;
    }
    let spool = Spool::open(folder, config.spool_limits());
    if let Err(error) = &spool {
        memtools::message!("{error:#}; incidents are not written");
    }
    spool.ok()
}

/// Opens the directory of traces. None if nothing is traced.
fn traces(config: &Config, has_spool: bool) -> Option<Spool> {
    if !(config.trace.enabled && has_spool) {
        return None;
    }
    let folder = config.spool.folder.join(tracing::FOLDER);
    let spool = Spool::open(&folder, config.spool_limits());
    if let Err(error) = &spool {
        memtools::message!("{error:#}; nothing is traced");
    }
    spool.ok()
}

/// Prepares traces. If that is not possible, everything else works.
fn tracing(config: &Config) -> Option<Tracing> {
    let folder = config.spool.folder.join(tracing::FOLDER);
    if let Some(lacking) = tracing::lacking() {
        memtools::message!("traces can fail: {lacking}");
    }
    match tracing::launcher(&config.trace, &folder) {
        Ok(launcher) => Some(Tracing::new(launcher, folder, &config.trace)),
        Err(error) => {
            memtools::message!("{error:#}; nothing is traced");
            None
        }
    }
}

/// Starts to push profiles. A store that is not reachable is tried again and again, but without certificates and a queue,
/// nothing is pushed.
fn sender(config: &Config) -> Option<Sender> {
    let store = config.store()?;
    let limits = Limits {
        folders: MAX_QUEUED,
        bytes: config.push.queue.0.0,
    };
    let start = || {
        let queue = Spool::open(&config.spool.folder.join(QUEUE), limits)?;
        let client = Client::new(store)?;
        Sender::start(Queue::new(queue), client, config.push.format.0)
    };
    match start() {
        Ok(sender) => Some(sender),
        Err(error) => {
            memtools::message!("{error:#}; nothing is pushed");
            None
        }
    }
}

/// Reads the configuration again. A wrong one changes nothing.
fn reload(args: &Args, agent: &mut Agent) {
    match Config::load(args.config.as_deref()) {
        Ok(config) => {
            agent.reconfigure(config);
            memtools::message!("the configuration was loaded again");
        }
        Err(error) => {
            agent.own.refused_configs += 1;
            memtools::message!("{error:#}; the configuration is unchanged");
        }
    }
}

/// Times of the looks.
struct Schedule {
    every: Duration,
    next: Instant,
}

impl Schedule {
    fn new(every: Duration) -> Self {
        Self {
            every,
            next: Instant::now() + every,
        }
    }

    /// Sets the time of the next look. Returns whether that time has passed already.
    fn advance(&mut self) -> bool {
        self.next += self.every;
        let now = Instant::now();
        let is_late = self.next <= now;
        if is_late {
            self.next = now + self.every;
        }
        is_late
    }
}

/// Returns the time since boot, including suspension.
fn since_boot() -> Result<Duration> {
    let now = clock_gettime(ClockId::CLOCK_BOOTTIME).context("failed to read the clock")?;
    Ok(now.into())
}

/// Sends a notification to systemd, if it has started the agent.
fn notify(states: &[NotifyState<'_>]) {
    // Without a receiver, systemd restarts the agent once its watchdog expires, which is the remedy.
    let _ = sd_notify::notify(states);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_is_consistent() {
        cli::assert_refuses::<Args>(&["--check --print-config", "x", "--config"]);
    }

    #[test]
    fn a_look_that_takes_too_long_is_late_once() {
        let mut schedule = Schedule::new(Duration::from_secs(60));
        assert!(!schedule.advance());
        schedule.next = Instant::now()
            .checked_sub(Duration::from_secs(600))
            .unwrap_or(schedule.next);
        assert!(schedule.advance());
        assert!(!schedule.advance());
    }
}
