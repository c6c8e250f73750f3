//! memagent: the numbers that it serves, against the kernel's own and against programs that hold a known amount; its
//! configuration; and what it says to systemd.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use memtools::host::capabilities::Capability;
use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{self, Tool, Workload, eventually, tool, workload};
use crate::metrics::{self, Sample};
use crate::pressure::{Group, meminfo_kb};
use crate::serve::Site;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memagent":
        numbers_are_those_of_the_kernel,
        page_cache_is_not_held,
        kills_outlive_their_cgroup,
        each_kill_leaves_an_incident,
        a_whole_cgroup_is_one_incident [Guest],
        the_machine_s_kill_is_known [Guest],
        incidents_of_others_are_refused [Once],
        a_wrong_configuration_is_refused_with_its_place [Once],
        a_hangup_loads_the_configuration_again [Once],
        systemd_is_notified [Once],
        it_keeps_what_watching_takes [Once],
    }
}

/// Running agent, with the address of its metrics.
pub(crate) struct Agent {
    pub(crate) tool: Tool,
    pub(crate) site: Site,
    pub(crate) folder: tempfile::TempDir,
}

impl Agent {
    pub(crate) fn start(config: &str) -> Result<Self> {
        Self::start_with(config, |_| {})
    }

    pub(crate) fn start_with(config: &str, change: impl FnOnce(&mut Command)) -> Result<Self> {
        let folder = harness::scratch()?;
        let file = folder.path().join("memagent.toml");
        let spool = folder.path().join("spool");
        let defaults = format!(
            "[spool]\nfolder = \"{}\"\n[metrics]\nlisten = \"0\"\n",
            spool.display()
        );
        fs::write(&file, format!("{config}\n{defaults}"))?;
        let mut command = Command::new(tool("memagent"));
        command.arg("--config").arg(&file).stdin(Stdio::null());
        change(&mut command);
        let mut tool = Tool::spawn(&mut command)?;
        let line = tool.wait_for_line("memagent: watching; metrics at http://")?;
        let address = line.split("http://").nth(1).context("no address")?;
        let address = address.split('/').next().unwrap_or_default().to_owned();
        let site = Site { address };
        Ok(Self { tool, site, folder })
    }

    fn config(&self) -> PathBuf {
        self.folder.path().join("memagent.toml")
    }

    /// Returns the incidents that were written of a cgroup with this name, oldest first; of all, without a name. Tests
    /// that run at the same time have programs killed, too.
    fn incidents(&self, name: &str) -> Result<Vec<PathBuf>> {
        let entries = fs::read_dir(self.folder.path().join("spool"))?;
        let mut folders: Vec<PathBuf> = entries
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        folders.retain(|folder| folder.to_string_lossy().contains(name));
        folders.sort();
        Ok(folders)
    }

    /// Waits for this number of incidents of a cgroup with this name, and returns the last one.
    pub(crate) fn incident(&self, name: &str, number: usize) -> Result<(PathBuf, Value)> {
        eventually("the incident is written", || {
            let incidents = self.incidents(name)?;
            let is_whole = |folder: &PathBuf| !folder.to_string_lossy().contains("/.tmp-");
            Ok(incidents.len() >= number && incidents.iter().all(is_whole))
        })?;
        let folder = self.incidents(name)?.pop().context("none")?;
        let json = fs::read(folder.join("incident.json"))?;
        Ok((folder, serde_json::from_slice(&json)?))
    }

    /// Returns the present numbers, in the older format, which promtool and Prometheus' client must accept.
    pub(crate) fn samples(&self) -> Result<Vec<Sample>> {
        let host = &self.site.address;
        let request = format!(
            "GET /metrics HTTP/1.1\r\nHost: {host}\r\nAccept: text/plain;version=0.0.4\r\n\r\n"
        );
        let answer = self.site.ask(request.as_bytes())?;
        ensure!(
            answer.status == 200 && answer.header("content-type").starts_with("text/plain"),
            "{answer:?}"
        );
        let file = self.folder.path().join("metrics");
        fs::write(&file, &answer.body)?;
        metrics::promtool_accepts(&file)?;
        metrics::read(&file)
    }

    /// Returns the numbers of a family whose label has this value.
    pub(crate) fn of(&self, name: &str, label: &str, value: &str) -> Result<Vec<f64>> {
        let mut samples = self.samples()?;
        samples.retain(|sample| {
            let is_labelled = sample.labels.get(label).is_some_and(|found| found == value);
            sample.name == name && (label.is_empty() || is_labelled)
        });
        Ok(samples.iter().map(|sample| sample.value).collect())
    }
}

fn is_near(number: f64, expected: u64, error: u64) -> bool {
    (number - expected as f64).abs() <= error as f64
}

fn numbers_are_those_of_the_kernel() -> Result<()> {
    let agent = Agent::start("")?;
    let total = agent.of("memagent_node_memory_bytes", "", "")?;
    ensure!(
        total == [(meminfo_kb("MemTotal")? << 10) as f64],
        "{total:?}"
    );
    let samples = agent.samples()?;
    let own = agent.tool.pid().to_string();
    let largest = samples
        .iter()
        .filter(|sample| sample.name == "memagent_process_anon_bytes");
    ensure!((1..=20).contains(&largest.count()), "{samples:?}");
    let number = |name: &str| {
        let found = samples.iter().find(|sample| sample.name == name);
        found.map(|sample| sample.value).context(name.to_owned())
    };
    ensure!(number("memagent_watched_processes")? >= 2.0, "{samples:?}");
    let rss = fs::read_to_string(format!("/proc/{own}/statm"))?;
    let rss: u64 = rss.split(' ').nth(1).context("no size")?.parse()?;
    ensure!(
        is_near(number("memagent_resident_bytes")?, rss * 4096, 2 << 20),
        "{rss}: {samples:?}"
    );
    ensure!(number("memagent_cpu_seconds_total")? < 10.0, "{samples:?}");
    let answer = agent.site.get("/metrics")?;
    let text = String::from_utf8(answer.body.clone())?;
    ensure!(
        text.ends_with("# EOF\n") && text.contains("\n# UNIT memagent_node_held_bytes bytes\n"),
        "{text}"
    );
    ensure!(agent.site.get("/")?.status == 404);
    let ended = agent.tool.interrupt()?;
    ensure!(
        ended.status.success() && ended.stdout.is_empty(),
        "{ended:?}"
    );
    Ok(())
}

fn page_cache_is_not_held() -> Result<()> {
    const MIB: u64 = 1 << 20;
    let group = Group::new("memtools-agent-held", 128 * MIB)?;
    let folder = crate::pressure::folder_on_disk()?;
    let file = folder.path().join("cache");
    let mut hog = Workload::spawn(&mut group.command(&workload("grow"), &["31", "31"]))?;
    hog.go()?;
    let writes = format!(
        "dd if=/dev/zero of={} bs=1M count=53 2>/dev/null",
        file.display()
    );
    let wrote = group.command("sh".as_ref(), &["-c", &writes]).status()?;
    ensure!(wrote.success());
    let agent = Agent::start("")?;
    let path = format!(
        "/{}",
        Path::new(&group.path())
            .file_name()
            .context("a name")?
            .display()
    );
    let of = |name: &str| agent.of(name, "cgroup", &path);
    eventually("both are seen", || {
        let [held, current] = [
            of("memagent_cgroup_held_bytes")?,
            of("memagent_cgroup_current_bytes")?,
        ];
        let [held, current] =
            [held.first(), current.first()].map(|found| found.copied().unwrap_or_default());
        Ok(is_near(held, 33 * MIB, 5 * MIB) && is_near(current, 86 * MIB, 9 * MIB))
    })?;
    let limit = of("memagent_cgroup_limit_bytes")?;
    ensure!(limit == [(128 * MIB) as f64], "{limit:?}");
    let suspicious = of("memagent_suspicious")?;
    ensure!(suspicious.is_empty(), "{suspicious:?}");
    Ok(())
}

fn kills_outlive_their_cgroup() -> Result<()> {
    let group = Group::new("memtools-agent-kill", 24 << 20)?;
    group.forbid_swap()?;
    let agent = Agent::start("")?;
    let kills =
        |agent: &Agent| agent.of("memagent_oom_kills_total", "cgroup", "/memtools-agent-kill");
    for killed in 1..=2 {
        let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
        hog.go()?;
        hog.wait()?;
        eventually("the kill is counted", || {
            Ok(kills(&agent)? == [f64::from(killed)])
        })?;
    }
    drop(group);
    eventually("the cgroup is not watched any more", || {
        let held = agent.of(
            "memagent_cgroup_held_bytes",
            "cgroup",
            "/memtools-agent-kill",
        )?;
        Ok(held.is_empty())
    })?;
    ensure!(kills(&agent)? == [2.0], "{:?}", kills(&agent)?);
    Ok(())
}

/// Starts a process in a cgroup that will be killed, and returns its pid.
fn killed_in(group: &Group) -> Result<u64> {
    let mut hog = Workload::spawn(&mut group.command(&workload("hog"), &["64", "77"]))?;
    let pid = hog.pid().parse()?;
    hog.go()?;
    hog.wait()?;
    Ok(pid)
}

fn each_kill_leaves_an_incident() -> Result<()> {
    let group = Group::new("memtools-agent-incident", 24 << 20)?;
    group.forbid_swap()?;
    let agent = Agent::start("")?;
    let path = "/memtools-agent-incident";
    // A service that is started again and again.
    for number in 1..=2 {
        let before = jiff::Timestamp::now();
        let pid = killed_in(&group)?;
        let after = jiff::Timestamp::now();
        let (folder, incident) = agent.incident("memtools-agent-incident", number)?;
        let time: jiff::Timestamp = incident["time"].as_str().context("no time")?.parse()?;
        // The log's clock lags behind by up to a second.
        let slack = jiff::SignedDuration::from_secs(1);
        ensure!(
            before - slack <= time && time <= after + slack,
            "{before} {time} {after}"
        );
        let victim = &incident["victims"][0];
        ensure!(
            victim["pid"] == pid && victim["comm"] == "hog",
            "{incident}"
        );
        let anon = victim["anon_bytes"].as_u64().unwrap_or_default() >> 20;
        ensure!((16..=24).contains(&anon), "{incident}");
        ensure!(
            incident["limit"] == "cgroup" && incident["limit_cgroup"] == path,
            "{incident}"
        );
        ensure!(
            incident["limit_bytes"] == 24 << 20 && incident["cgroup"] == path,
            "{incident}"
        );
        ensure!(incident["trigger"] == "hog", "{incident}");
        let read = |file: &str| fs::read_to_string(folder.join(file));
        let log = read("kmsg.txt")?;
        ensure!(
            log.contains(&format!("Killed process {pid} (hog)")),
            "{log}"
        );
        ensure!(log.contains("hog invoked oom-killer"), "{log}");
        let report = read("report.txt")?;
        ensure!(
            report.contains(&format!("hog (pid {pid}) was killed")),
            "{report}"
        );
        let before = read("before.jsonl")?;
        for place in [path, "machine"] {
            let place = format!("\"place\":\"{place}\"");
            ensure!(before.lines().any(|line| line.contains(&place)), "{before}");
        }
        let mode =
            |path: &Path| -> Result<u32> { Ok(path.metadata()?.permissions().mode() & 0o777) };
        ensure!(mode(&folder)? == 0o700 && mode(&folder.join("report.txt"))? == 0o600);
    }
    let kills = agent.samples()?;
    let kills = kills.iter().filter(|sample| {
        sample.name == "memagent_oom_kills_total"
            && sample
                .labels
                .get("cgroup")
                .is_some_and(|cgroup| cgroup == path)
    });
    let kills: Vec<_> = kills
        .map(|kill| (kill.labels.get("limit").cloned(), kill.value))
        .collect();
    ensure!(kills == [(Some("cgroup".to_owned()), 2.0)], "{kills:?}");
    Ok(())
}

fn a_whole_cgroup_is_one_incident() -> Result<()> {
    let group = Group::new("memtools-agent-group", 24 << 20)?;
    group.forbid_swap()?;
    group.set("memory.oom.group", "1")?;
    let other = Workload::spawn(&mut group.command(&workload("hog"), &["1"]))?;
    let agent = Agent::start("")?;
    let pid = killed_in(&group)?;
    let (_, incident) = agent.incident("", 1)?;
    let victims = incident["victims"].as_array().context("no victims")?;
    let pids: Vec<u64> = victims
        .iter()
        .filter_map(|victim| victim["pid"].as_u64())
        .collect();
    let expected = [pid, other.pid().parse()?];
    ensure!(
        pids.len() == 2 && expected.iter().all(|pid| pids.contains(pid)),
        "{incident}"
    );
    // The first victim is killed, and counted, twice.
    let events = fs::read_to_string(format!("{}/memory.events", group.path()))?;
    let counted = events
        .lines()
        .find_map(|line| line.strip_prefix("oom_kill "));
    let counted: f64 = counted.context("no kills")?.parse()?;
    eventually("each kill of the kernel is counted", || {
        Ok(agent.of(
            "memagent_oom_kills_total",
            "cgroup",
            "/memtools-agent-group",
        )? == [counted])
    })?;
    ensure!(
        agent.incidents("")?.len() == 1,
        "{:?}",
        agent.incidents("")?
    );
    Ok(())
}

fn the_machine_s_kill_is_known() -> Result<()> {
    let megabytes = meminfo_kb("MemTotal")? / 1024 + 50;
    let agent = Agent::start("")?;
    let mut hog = Workload::start("hog", &[&megabytes.to_string(), "900"])?;
    let pid: u64 = hog.pid().parse()?;
    hog.go()?;
    hog.wait()?;
    let (_, incident) = agent.incident("", 1)?;
    ensure!(
        incident["limit"] == "machine" && incident["limit_cgroup"].is_null(),
        "{incident}"
    );
    ensure!(incident["victims"][0]["pid"] == pid, "{incident}");
    ensure!(
        incident["limit_bytes"] == meminfo_kb("MemTotal")? << 10,
        "{incident}"
    );
    eventually("it is counted", || {
        Ok(agent.of("memagent_oom_kills_total", "limit", "machine")? == [1.0])
    })
}

fn incidents_of_others_are_refused() -> Result<()> {
    let folder = harness::scratch()?;
    let spool = folder.path().join("memagent");
    fs::create_dir(&spool)?;
    fs::set_permissions(&spool, PermissionsExt::from_mode(0o777))?;
    let file = folder.path().join("x.toml");
    let path = file.to_str().context("a name")?;
    let config = format!(
        "[spool]\nfolder = \"{}\"\n[metrics]\nlisten = \"0\"\n",
        spool.display()
    );
    fs::write(&file, config)?;
    let checked = harness::run("memagent", &["--config", path, "--check"])?;
    ensure!(checked.status.code() == Some(3), "{checked:?}");
    ensure!(
        checked
            .stdout
            .contains("less  incidents: others may write into "),
        "{checked:?}"
    );
    let mut agent = Tool::start("memagent", &["--config", path])?;
    agent.wait_for_stderr("incidents are not written")?;
    agent.wait_for_stderr("watching; metrics at ")?;
    Ok(())
}

fn a_wrong_configuration_is_refused_with_its_place() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("x.toml");
    let path = file.to_str().context("a name")?;
    fs::write(&file, "[rule]\nmark = \"90%\"\nsooon = \"1m\"\n")?;
    let place = format!("{path} is wrong: line 3, column 1: unknown field `sooon`");
    for more in [None, Some("--check"), Some("--print-config")] {
        let args: Vec<&str> = ["--config", path].into_iter().chain(more).collect();
        let ended = harness::run("memagent", &args)?;
        ensure!(
            ended.status.code() == Some(1) && ended.stderr.contains(&place),
            "{ended:?}"
        );
    }
    let spool = folder.path().join("spool");
    let config = format!(
        "[spool]\nfolder = \"{}\"\n[metrics]\nlisten = \"0\"\n",
        spool.display()
    );
    fs::write(&file, config)?;
    let checked = harness::run("memagent", &["--config", path, "--check"])?;
    ensure!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    ensure!(
        checked
            .stdout
            .contains("ok    metrics: at http://127.0.0.1:"),
        "{checked:?}"
    );
    // What is printed is a configuration.
    let printed = harness::run("memagent", &["--config", path, "--print-config"])?;
    ensure!(printed.status.success(), "{printed:?}");
    fs::write(&file, &printed.stdout)?;
    let again = harness::run("memagent", &["--config", path, "--print-config"])?;
    ensure!(
        again.stdout == printed.stdout && again.stdout.contains("listen = \"0\"\n"),
        "{again:?}"
    );
    Ok(())
}

fn a_hangup_loads_the_configuration_again() -> Result<()> {
    let mut agent = Agent::start("")?;
    let processes = |agent: &Agent| -> Result<usize> {
        Ok(agent.of("memagent_process_anon_bytes", "", "")?.len())
    };
    ensure!(processes(&agent)? > 1);
    let config = fs::read_to_string(agent.config())?;
    fs::write(agent.config(), format!("{config}processes = 1\n"))?;
    agent.tool.signal(Signal::SIGHUP)?;
    agent
        .tool
        .wait_for_stderr("the configuration was loaded again")?;
    eventually("one process is left", || Ok(processes(&agent)? == 1))?;
    fs::write(agent.config(), "[metrics]\nprocesses = \"many\"\n")?;
    agent.tool.signal(Signal::SIGHUP)?;
    agent
        .tool
        .wait_for_stderr("the configuration is unchanged")?;
    eventually("it is counted", || {
        Ok(agent.of("memagent_configurations_refused_total", "", "")? == [1.0])
    })?;
    ensure!(processes(&agent)? == 1);
    Ok(())
}

/// No thread can execute a program, trace a process or write other users' files.
fn it_keeps_what_watching_takes() -> Result<()> {
    let agent = Agent::start("")?;
    let most = [
        Capability::CAP_SYSLOG,
        Capability::CAP_DAC_READ_SEARCH,
        Capability::CAP_SYS_RESOURCE,
    ];
    let most: u64 = most.iter().map(Capability::bitmask).sum();
    for task in fs::read_dir(format!("/proc/{}/task", agent.tool.pid()))? {
        let status = fs::read_to_string(task?.path().join("status"))?;
        let field = |name: &str| {
            let mut lines = status.lines();
            lines.find_map(|line| line.strip_prefix(name))
        };
        let held = field("CapPrm:\t").context("no capabilities")?;
        ensure!(u64::from_str_radix(held, 16)? & !most == 0, "{status}");
        // Without the line, the kernel has no filters.
        ensure!(
            field("Seccomp:\t").is_none_or(|mode| mode == "2"),
            "{status}"
        );
    }
    ensure!(agent.tool.interrupt()?.status.success(), "it failed");
    Ok(())
}

fn systemd_is_notified() -> Result<()> {
    let folder = harness::scratch()?;
    let path = folder.path().join("notify");
    let socket = UnixDatagram::bind(&path)?;
    socket.set_read_timeout(Some(harness::TIMEOUT))?;
    let agent = Agent::start_with("", |command| {
        command.env("NOTIFY_SOCKET", &path);
    })?;
    let mut buffer = [0; 256];
    let mut next = || -> Result<String> {
        let length = socket.recv(&mut buffer)?;
        Ok(String::from_utf8_lossy(&buffer[..length])
            .trim_end()
            .to_owned())
    };
    ensure!(next()? == "READY=1");
    ensure!(next()? == "WATCHDOG=1");
    agent.tool.signal(Signal::SIGTERM)?;
    let last = std::iter::from_fn(|| next().ok()).find(|said| said != "WATCHDOG=1");
    ensure!(last.as_deref() == Some("STOPPING=1"), "{last:?}");
    let ended = agent.tool.wait()?;
    ensure!(ended.status.success(), "{ended:?}");
    Ok(())
}
