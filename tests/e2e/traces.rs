//! memagent's traces: whom it traces, what its probes leave alone, what becomes of the profile of a process that is killed,
//! and what a profile store gets, decoded by classes that OpenTelemetry publishes.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use anyhow::{Context, Result, ensure};
use caps::{CapSet, Capability, CapsHashSet};
use libtest_mimic::Trial;
use memtools::host::capabilities;
use nix::sys::prctl::set_no_new_privs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::harness::{self, Workload, eventually, workload};
use crate::kubernetes;
use crate::memagent::Agent;
use crate::pressure::Group;

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "traces":
        a_killed_process_was_traced_and_its_sibling_pays_nothing,
        what_memleak_cannot_trace_is_traced_by_faults,
        what_does_not_grow_is_not_traced,
        nothing_is_traced_by_default [Once],
        what_costs_a_process_too_much_ends,
        profiles_are_pushed_until_the_store_takes_them [Host],
        check_names_the_store_that_is_away [Once],
        nothing_runs_on_without_the_agent,
    }
}

/// Memory limit of the processes of a test, in bytes.
const LIMIT: u64 = 64 << 20;
/// Configuration that has the processes of a test traced: those of a cgroup, by its name, as tests run beside each other.
fn traced(group: &str) -> String {
    format!("[trace]\nenabled = true\nfor = \"10s\"\nallow = [\"{group}\"]\n")
}

/// Starts a program that takes so many megabytes a second, up to so many.
fn grow(group: &Group, args: &[&str]) -> Result<Workload> {
    group.forbid_swap()?;
    let mut grow = Workload::spawn(&mut group.command(&workload("grow"), args))?;
    grow.go()?;
    Ok(grow)
}

fn signal(workload: &Workload, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(workload.pid().parse()?), signal)?)
}

/// Returns the processes that a process has started, with their names.
fn children(pid: u32) -> Result<Vec<(u32, String)>> {
    let mut children = Vec::new();
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread that has ended meanwhile has no children, and a process that has ended has no name.
        let list = fs::read_to_string(task?.path().join("children")).unwrap_or_default();
        for child in list.split_whitespace() {
            if let Ok(name) = fs::read_to_string(format!("/proc/{child}/comm")) {
                children.push((child.parse()?, name.trim_end().to_owned()));
            }
        }
    }
    Ok(children)
}

/// Returns the tools that the agent's launcher runs now.
fn tools(agent: &Agent) -> Result<Vec<(u32, String)>> {
    let launcher = children(agent.tool.pid())?;
    let (launcher, _) = launcher.first().context("no launcher")?;
    children(*launcher)
}

/// Waits until the agent has a process traced, which is stopped until memleak has attached: on a busy machine, it would be
/// killed before.
fn hold_until_traced(agent: &mut Agent, grow: &Workload) -> Result<()> {
    let said = format!("grow (pid {}) grows in ", grow.pid());
    agent.tool.wait_for_stderr(&said)?;
    signal(grow, Signal::SIGSTOP)?;
    eventually("memleak has written a profile", || {
        let file = traces(agent).join(".tmp-trace-0/profile.pb.gz");
        Ok(file.exists())
    })
}

fn traces(agent: &Agent) -> PathBuf {
    agent.folder.path().join("spool/traces")
}

/// Returns the whole traces that were written.
fn written(agent: &Agent) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(traces(agent))?;
    let paths = entries.map(|entry| Ok(entry?.path()));
    let mut folders: Vec<PathBuf> = paths.collect::<Result<_>>()?;
    folders.retain(|folder| !folder.to_string_lossy().contains("/.tmp-"));
    Ok(folders)
}

/// Returns the number of bytes of a process's code that differ from the files that it is mapped from.
fn changed_code(pid: &str) -> Result<usize> {
    let memory = File::open(format!("/proc/{pid}/mem"))?;
    let mut changed = 0;
    for line in fs::read_to_string(format!("/proc/{pid}/maps"))?.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [range, "r-xp", offset, _, _, path] = fields[..] else {
            continue;
        };
        // The vDSO has no file.
        let Ok(file) = File::open(path) else {
            continue;
        };
        let (from, to) = range.split_once('-').context("a range")?;
        let from = u64::from_str_radix(from, 16)?;
        let length = u64::from_str_radix(to, 16)? - from;
        let mut mapped = vec![0; usize::try_from(length)?];
        memory.read_exact_at(&mut mapped, from)?;
        let mut stored = vec![0; mapped.len()];
        let mut read = 0;
        let offset = u64::from_str_radix(offset, 16)?;
        while let count @ 1.. = file.read_at(&mut stored[read..], offset + read as u64)? {
            read += count;
        }
        let pairs = mapped[..read].iter().zip(&stored[..read]);
        changed += pairs.filter(|(mapped, stored)| mapped != stored).count();
    }
    Ok(changed)
}

/// Waits until a process's code is as in its files. Before Linux 6.6, breakpoints are removed after the tool has ended.
fn code_is_restored(process: &Workload) -> Result<()> {
    eventually("no code is changed", || {
        Ok(changed_code(&process.pid())? == 0)
    })
}

/// Has a command run with the capabilities that the systemd unit for traces leaves, but without CAP_SYS_ADMIN where the
/// unit says that it is not needed.
fn limit_as_the_unit_does(command: &mut Command) -> Result<()> {
    let unit = include_str!("../../packaging/memagent-trace.service");
    let mut lines = unit.lines();
    let bounding = lines.find_map(|line| line.strip_prefix("CapabilityBoundingSet="));
    let bounding = bounding.context("no capabilities")?.split(' ');
    let mut kept: CapsHashSet = bounding.map(str::parse).collect::<Result<_, _>>()?;
    if !kubernetes::uprobes_want_sys_admin()? && !capabilities::perf_events_want_sys_admin() {
        kept.remove(&Capability::CAP_SYS_ADMIN);
    }
    let all = caps::runtime::thread_all_supported();
    let dropped: Vec<Capability> = all.difference(&kept).copied().collect();
    let limit = move || {
        for capability in &dropped {
            caps::drop(None, CapSet::Bounding, *capability).map_err(io::Error::other)?;
        }
        Ok(set_no_new_privs()?)
    };
    // SAFETY: system calls between fork and exec.
    unsafe { command.pre_exec(limit) };
    Ok(())
}

fn a_killed_process_was_traced_and_its_sibling_pays_nothing() -> Result<()> {
    let group = Group::new("memtools-agent-traced.service", LIMIT)?;
    let beside = Group::new("memtools-agent-beside", 16 * LIMIT)?;
    let mut limited = Ok(());
    let mut agent = Agent::start_with(&traced("memtools-agent-traced.service"), |command| {
        limited = limit_as_the_unit_does(command);
    })?;
    limited?;
    let sibling = grow(&beside, &["1", "1000"])?;
    let mut grown = grow(&group, &["4", "1000"])?;
    hold_until_traced(&mut agent, &grown)?;
    let running = tools(&agent)?;
    let names: Vec<&str> = running.iter().map(|(_, name)| &**name).collect();
    ensure!(names == ["memleak"], "{running:?}");
    ensure!(
        changed_code(&grown.pid())? > 0,
        "no probe is in the traced process"
    );
    let changed = changed_code(&sibling.pid())?;
    ensure!(
        changed == 0,
        "{changed} bytes of the sibling's code were changed"
    );
    let traced = agent.of("memagent_traced_processes", "", "")?;
    ensure!(traced == [1.0], "{traced:?}");
    signal(&grown, Signal::SIGCONT)?;
    grown.wait()?;

    let (folder, incident) = agent.incident("memtools-agent-traced", 1)?;
    let pid: u64 = grown.pid().parse()?;
    ensure!(incident["victims"][0]["pid"] == pid, "{incident}");
    let trace = &incident["traced"];
    ensure!(
        trace["pid"] == pid && trace["tool"] == "memleak",
        "{incident}"
    );
    ensure!(trace["ended"] == "exited", "{incident}");
    let reason = &trace["reason"];
    ensure!(reason == "now" || reason == "mark", "{incident}");
    ensure!(trace["hits"].as_u64() > Some(0), "{incident}");
    let report = fs::read_to_string(folder.join("report.txt"))?;
    ensure!(report.contains("\n    take_more"), "{report}");
    let profile = fs::read(folder.join("profile.pb.gz"))?;
    eventually("the trace is written", || Ok(written(&agent)?.len() == 1))?;
    let kept = written(&agent)?.pop().context("no trace")?;
    ensure!(
        fs::read(kept.join("profile.pb.gz"))? == profile,
        "another profile"
    );
    let json: Value = serde_json::from_slice(&fs::read(kept.join("trace.json"))?)?;
    ensure!(json["type"] == "trace" && json["pid"] == pid, "{json}");
    let ended = agent.of("memagent_traces_total", "ended", "exited")?;
    ensure!(ended == [1.0], "{ended:?}");
    ensure!(tools(&agent)?.is_empty(), "a tool runs on");
    Ok(())
}

/// A program without an allocator that memleak knows.
fn what_memleak_cannot_trace_is_traced_by_faults() -> Result<()> {
    let group = Group::new("memtools-agent-faults.service", LIMIT)?;
    group.forbid_swap()?;
    let mut agent = Agent::start(&traced("memtools-agent-faults.service"))?;
    let program = workload("grow-stripped");
    let mut grown = Workload::spawn(&mut group.command(&program, &["4", "1000"]))?;
    grown.go()?;
    let said = format!("grow-stripped (pid {}) grows in ", grown.pid());
    agent.tool.wait_for_stderr(&said)?;
    signal(&grown, Signal::SIGSTOP)?;
    eventually("faults waits for events", || {
        let tools = tools(&agent)?;
        let faults = tools.iter().find(|(_, name)| name == "faults");
        Ok(faults.is_some_and(|(pid, _)| harness::waits_for_events(*pid).unwrap_or(false)))
    })?;
    signal(&grown, Signal::SIGCONT)?;
    grown.wait()?;
    let (folder, incident) = agent.incident("memtools-agent-faults", 1)?;
    let trace = &incident["traced"];
    ensure!(
        trace["tool"] == "faults" && trace["hits"].is_null(),
        "{incident}"
    );
    let report = fs::read_to_string(folder.join("report.txt"))?;
    ensure!(report.contains("was traced by faults for"), "{report}");
    ensure!(folder.join("profile.pb.gz").exists());
    Ok(())
}

/// A cgroup near its limit whose process does not grow any more when the agent starts.
fn what_does_not_grow_is_not_traced() -> Result<()> {
    let group = Group::new("memtools-agent-still.service", LIMIT)?;
    let grown = grow(&group, &["40", "56"])?;
    let statm = format!("/proc/{}/statm", grown.pid());
    eventually("it has grown", || {
        let statm = fs::read_to_string(&statm)?;
        let resident = statm.split(' ').nth(1).context("no pages")?;
        Ok(resident.parse::<u64>()? * 4096 >= 56 << 20)
    })?;
    let agent = Agent::start(&traced("memtools-agent-still.service"))?;
    let suspicious = |agent: &Agent| {
        agent.of(
            "memagent_suspicious",
            "cgroup",
            "/memtools-agent-still.service",
        )
    };
    eventually("the cgroup is suspicious", || {
        Ok(suspicious(&agent)? == [1.0])
    })?;
    // Two more looks at the processes.
    let looks = |agent: &Agent| agent.of("memagent_cpu_seconds_total", "", "");
    let before = looks(&agent)?;
    eventually("it looks on", || Ok(looks(&agent)? > before))?;
    ensure!(tools(&agent)?.is_empty(), "{:?}", tools(&agent)?);
    Ok(())
}

/// Without traces, there is no process with the privileges for them.
fn nothing_is_traced_by_default() -> Result<()> {
    let agent = Agent::start("")?;
    let children = children(agent.tool.pid())?;
    ensure!(children.is_empty(), "{children:?}");
    ensure!(agent.of("memagent_traced_processes", "", "")?.is_empty());
    ensure!(!traces(&agent).exists());
    Ok(())
}

/// A program that allocates all the time, and whose probes would slow it down.
fn what_costs_a_process_too_much_ends() -> Result<()> {
    let group = Group::new("memtools-agent-cost.service", LIMIT)?;
    let config = traced("memtools-agent-cost.service");
    let mut agent = Agent::start(&config.replace("\"10s\"", "\"2m\""))?;
    let grown = grow(&group, &["4", "1000", "20011"])?;
    agent
        .tool
        .wait_for_stderr(&format!("grow (pid {}) grows in ", grown.pid()))?;
    // The process is not to reach its limit while the trace begins.
    signal(&grown, Signal::SIGSTOP)?;
    group.set_limit(1000 * LIMIT)?;
    signal(&grown, Signal::SIGCONT)?;
    eventually("the trace has ended", || Ok(written(&agent)?.len() == 1))?;
    let kept = written(&agent)?.pop().context("no trace")?;
    let json: Value = serde_json::from_slice(&fs::read(kept.join("trace.json"))?)?;
    ensure!(json["ended"] == "cost", "{json}");
    ensure!(json["hits"].as_u64() > Some(20_011), "{json}");
    let ended = agent.of("memagent_traces_total", "ended", "cost")?;
    ensure!(ended == [1.0], "{ended:?}");
    ensure!(tools(&agent)?.is_empty(), "a tool runs on");
    code_is_restored(&grown)
}

/// A store that does not answer.
fn check_names_the_store_that_is_away() -> Result<()> {
    let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
    let folder = harness::scratch()?;
    let file = folder.path().join("x.toml");
    let path = file.to_str().context("a name")?;
    let config = format!(
        "[trace]\nenabled = true\n[push]\nurl = \"http://127.0.0.1:{port}\"\n\
         [spool]\nfolder = \"{}\"\n[metrics]\nlisten = \"0\"\n",
        folder.path().join("spool").display()
    );
    fs::write(&file, config)?;
    let checked = harness::run("memagent", &["--config", path, "--check"])?;
    ensure!(checked.status.code() == Some(3), "{checked:?}");
    for line in [
        "ok    traces: of 2 processes at a time that grow, 10m an hour\n",
        "less  push: io: Connection refused",
    ] {
        ensure!(checked.stdout.contains(line), "{checked:?}");
    }
    Ok(())
}

/// Request that a store got.
struct Received {
    line: String,
    headers: Vec<(String, String)>,
    body: Vec<u8>,
}

/// Serves the requests of an agent with these answers, the last of which is repeated.
fn store(answers: &'static [&'static str]) -> Result<(u16, Receiver<Received>)> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let port = listener.local_addr()?.port();
    let (sender, received) = channel();
    thread::spawn(move || {
        for (number, stream) in listener.incoming().enumerate() {
            let answer = answers[number.min(answers.len() - 1)];
            let Ok(request) = stream
                .map_err(Into::into)
                .and_then(|stream| exchange(stream, answer))
            else {
                continue;
            };
            if sender.send(request).is_err() {
                break;
            }
        }
    });
    Ok((port, received))
}

fn exchange(stream: TcpStream, answer: &str) -> Result<Received> {
    let mut reader = BufReader::new(&stream);
    let mut lines = Vec::new();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line)?;
        match line.trim_end() {
            "" => break,
            line => lines.push(line.to_owned()),
        }
    }
    let headers: Vec<(String, String)> = lines[1..]
        .iter()
        .filter_map(|line| line.split_once(": "))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.to_owned()))
        .collect();
    let length = headers.iter().find(|(name, _)| name == "content-length");
    let length: usize = length.context("no length")?.1.parse()?;
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    (&stream).write_all(answer.as_bytes())?;
    Ok(Received {
        line: lines.remove(0),
        headers,
        body,
    })
}

/// Answers of a store that is not ready, is short of time, breaks off, and then takes profiles.
const LIES: &[&str] = &[
    "HTTP/1.1 503 Busy\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 429 Slow\r\nConnection: close\r\nRetry-After: 1\r\nContent-Length: 0\r\n\r\n",
    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 100\r\n\r\nbroken",
    "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 0\r\n\r\n",
];

fn profiles_are_pushed_until_the_store_takes_them() -> Result<()> {
    let group = Group::new("memtools-agent-push.service", LIMIT)?;
    for format in ["pyroscope", "otlp"] {
        let (port, received) = store(LIES)?;
        let token = harness::scratch()?;
        let token_file = token.path().join("token");
        fs::write(&token_file, "secret-token\n")?;
        let config = format!(
            "{}[push]\nurl = \"http://127.0.0.1:{port}\"\nformat = \"{format}\"\n\
             token_file = \"{}\"\n[labels]\nregion = \"here\"\n",
            traced("memtools-agent-push.service"),
            token_file.display()
        );
        let mut agent = Agent::start(&config)?;
        let mut grown = grow(&group, &["4", "1000"])?;
        hold_until_traced(&mut agent, &grown)?;
        signal(&grown, Signal::SIGCONT)?;
        // The process's end by its limit ends the trace.
        grown.wait()?;
        let requests: Vec<Received> = LIES
            .iter()
            .map(|_| {
                received
                    .recv_timeout(harness::TIMEOUT)
                    .context("no request")
            })
            .collect::<Result<_>>()?;
        for request in &requests {
            let header = |wanted: &str| {
                let mut headers = request.headers.iter();
                headers
                    .find(|(name, _)| name == wanted)
                    .map(|(_, value)| &**value)
            };
            ensure!(header("authorization") == Some("Bearer secret-token"));
            ensure!(request.body == requests[0].body && request.line == requests[0].line);
        }
        eventually("it is counted", || {
            Ok(agent.of("memagent_push_sent_total", "", "")? == [1.0]
                && agent.of("memagent_push_failures_total", "", "")? == [3.0]
                && agent.of("memagent_push_queued_bytes", "", "")? == [0.0])
        })?;
        eventually("the trace is written", || Ok(written(&agent)?.len() == 1))?;
        let kept = written(&agent)?
            .pop()
            .context("no trace")?
            .join("profile.pb.gz");
        expect_same(format, &requests[0], &kept)?;
        let ended = agent.tool.interrupt()?;
        ensure!(!ended.stderr.contains("secret-token"), "{ended:?}");
    }
    Ok(())
}

/// Compares what was pushed with a profile, by other projects' code.
fn expect_same(format: &str, request: &Received, profile: &Path) -> Result<()> {
    let labels: &[&str] = if format == "otlp" {
        ensure!(
            request
                .line
                .starts_with("POST /v1development/profiles HTTP/1.1"),
            "{}",
            request.line
        );
        &[
            "service.name=memtools-agent-push",
            "process.executable.name=grow",
            "region=here",
        ]
    } else {
        ensure!(
            request
                .line
                .starts_with("POST /ingest?name=memtools-agent-push%7B"),
            "{}",
            request.line
        );
        &[]
    };
    ensure!(
        format == "otlp" || request.line.contains("region%3Dhere"),
        "{}",
        request.line
    );
    let folder = harness::scratch()?;
    let body = folder.path().join("body");
    fs::write(&body, &request.body)?;
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("target");
    let packages = ["opentelemetry-proto", "protobuf"].map(|name| root.join(name));
    let output = Command::new("python3")
        .args(["-c", DECODE, format])
        .args([&body, profile])
        .args(labels)
        .env("PYTHONPATH", std::env::join_paths(packages)?)
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    Ok(())
}

/// Adds up the values of both, by kind, and compares them.
const DECODE: &str = r#"
import gzip, sys
kind, body, profile, *labels = sys.argv[1:]
body, profile = open(body, "rb").read(), gzip.decompress(open(profile, "rb").read())

def number(data, at):
    value = shift = 0
    while True:
        byte = data[at]; at += 1
        value |= (byte & 127) << shift; shift += 7
        if byte < 128: return value, at

def fields(data):
    at = 0
    while at < len(data):
        tag, at = number(data, at)
        if tag & 7 == 0: value, at = number(data, at)
        else:
            assert tag & 7 == 2, tag
            length, at = number(data, at); value = data[at:at + length]; at += length
        yield tag >> 3, value

def packed(data):
    at, values = 0, []
    while at < len(data):
        value, at = number(data, at); values.append(value)
    return values

def sums(data):
    parts = list(fields(data))
    strings = [value.decode() for field, value in parts if field == 6]
    kinds = [strings[dict(fields(value))[1]] for field, value in parts if field == 1]
    found, stacks = dict.fromkeys(kinds, 0), set()
    for field, sample in parts:
        if field == 2:
            of = list(fields(sample))
            stacks.add(b"".join(value for field, value in of if field == 1))
            values = [one for field, value in of if field == 2 for one in packed(value)]
            for name, value in zip(kinds, values): found[name] += value
    return found, strings

expected, strings = sums(profile)
assert expected["inuse_space"] > 1 << 20, expected
if kind == "pyroscope":
    assert gzip.decompress(body) == profile
else:
    from opentelemetry.proto.collector.profiles.v1development import profiles_service_pb2 as service
    request = service.ExportProfilesServiceRequest(); request.ParseFromString(gzip.decompress(body))
    tables = request.dictionary
    for name in ("mapping", "location", "function", "link", "attribute", "stack"):
        table = getattr(tables, name + "_table"); assert table[0] == type(table[0])(), name
    assert tables.string_table[0] == ""
    resource, = request.resource_profiles
    found = {one.key: one.value.string_value for one in resource.resource.attributes}
    for label in labels:
        name, value = label.split("="); assert found[name] == value, found
    scope, = resource.scope_profiles
    got, functions = {}, set()
    for one in scope.profiles:
        got[tables.string_table[one.sample_type.type_strindex]] = sum(v for s in one.samples for v in s.values)
        assert one.time_unix_nano > 0 and one.duration_nano > 0 and one.period > 0
        assert tables.string_table[one.period_type.type_strindex] == "memory"
        for sample in one.samples:
            for location in tables.stack_table[sample.stack_index].location_indices:
                for line in tables.location_table[location].lines:
                    functions.add(tables.string_table[tables.function_table[line.function_index].name_strindex])
    assert got == expected, (got, expected)
    assert "take_more" in functions, functions
"#;

/// A killed agent leaves no tool behind.
fn nothing_runs_on_without_the_agent() -> Result<()> {
    let group = Group::new("memtools-agent-ends.service", LIMIT)?;
    let mut agent = Agent::start(&traced("memtools-agent-ends.service"))?;
    let grown = grow(&group, &["4", "1000"])?;
    hold_until_traced(&mut agent, &grown)?;
    let (launcher, _) = children(agent.tool.pid())?.pop().context("no launcher")?;
    let (memleak, _) = tools(&agent)?.pop().context("no memleak")?;
    agent.tool.signal(Signal::SIGKILL)?;
    eventually("all have ended", || {
        let runs = |pid: u32| {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat"));
            stat.is_ok_and(|stat| !stat.contains(") Z "))
        };
        Ok(!runs(launcher) && !runs(memleak))
    })?;
    code_is_restored(&grown)
}
