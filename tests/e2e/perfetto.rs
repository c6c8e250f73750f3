//! `--export FILE.pftrace`: timelines, decoded by the schema that Perfetto publishes, against the rows of the same run.

mod files;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use jiff::Timestamp;
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, Tool, ToolOutput, Workload};
use crate::memleak;

pub(crate) fn tests() -> Vec<Trial> {
    let own = harness::tests! { "perfetto":
        calls_are_on_their_threads [Host],
        calls_last_as_long_as_they_took [Host],
        page_faults_are_counters [Host],
        heaps_are_what_was_reported [Host],
    };
    [own, files::tests()].into_iter().flatten().collect()
}

/// Permitted difference between times that are printed in microseconds, and of clocks that are not read at once.
const CLOSE_NS: u64 = 1_000_000;

/// Times and values of each counter, by the counter's process and name.
type Counters = BTreeMap<(u64, String), Vec<(u64, u64)>>;

/// Decoded timeline.
struct Timeline {
    packets: Vec<Value>,
    /// Tracks by their UUIDs.
    tracks: HashMap<u64, Value>,
}

/// Slice or instant on a track.
#[derive(Debug, Clone, PartialEq)]
struct TrackEvent {
    track: u64,
    name: String,
    begin: u64,
    /// End of the slice. None for an instant.
    end: Option<u64>,
    arguments: BTreeMap<String, Value>,
}

/// Returns a number. Protobuf's JSON has a number as a string if it may be large.
fn number(value: &Value) -> u64 {
    let text = value.as_str().and_then(|text| text.parse().ok());
    text.or_else(|| value.as_u64()).unwrap_or_default()
}

impl Timeline {
    /// Reads several files as one timeline.
    fn read(files: &[&Path]) -> Result<Self> {
        static SCHEMA: Mutex<Option<PathBuf>> = Mutex::new(None);
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let schema = {
            let mut schema = SCHEMA.lock().map_err(|_| anyhow::anyhow!("no schema"))?;
            if schema.is_none() {
                let compiled = root.join("target/perfetto/schema.pb");
                let script = root.join("scripts/perfetto-schema");
                let made = Command::new(script).arg(&compiled).status()?;
                ensure!(made.success(), "no schema of Perfetto: {made}");
                *schema = Some(compiled);
            }
            schema.clone().context("no schema")?
        };
        let decoded = Command::new("/usr/bin/python3")
            .arg(root.join("tests/perfetto/decode.py"))
            .arg(schema)
            .args(files)
            .output()?;
        ensure!(decoded.status.success(), "{decoded:?}");
        let packets: Vec<Value> = serde_json::from_slice(&decoded.stdout)?;
        let mut tracks: HashMap<u64, Value> = HashMap::new();
        for packet in &packets {
            let track = &packet["track_descriptor"];
            if !track.is_null() {
                tracks.insert(number(&track["uuid"]), track.clone());
            }
            // trace_processor ignores packets without a sequence.
            ensure!(number(&packet["trusted_packet_sequence_id"]) > 0);
        }
        Ok(Self { packets, tracks })
    }

    fn sequences(&self) -> BTreeSet<u64> {
        let packets = self.packets.iter();
        packets
            .map(|packet| number(&packet["trusted_packet_sequence_id"]))
            .collect()
    }

    fn events(&self) -> impl Iterator<Item = (u64, &Value)> {
        let packets = self.packets.iter();
        let events = packets.filter(|packet| !packet["track_event"].is_null());
        events.map(|packet| (number(&packet["timestamp"]), &packet["track_event"]))
    }

    /// Returns the slices and instants in the order in which they were written. The end of each slice directly
    /// follows its beginning.
    fn happened(&self) -> Result<Vec<TrackEvent>> {
        let mut all: Vec<TrackEvent> = Vec::new();
        for (time, event) in self.events() {
            let track = number(&event["track_uuid"]);
            ensure!(self.tracks.contains_key(&track), "on no track: {event}");
            match event["type"].as_str() {
                Some("TYPE_SLICE_END") => {
                    let begun = all.last_mut().context("an end without a beginning")?;
                    ensure!(begun.track == track && begun.end.is_none(), "{begun:?}");
                    begun.end = Some(time);
                }
                Some("TYPE_SLICE_BEGIN" | "TYPE_INSTANT") => {
                    let arguments = event["debug_annotations"].as_array();
                    let arguments = arguments.into_iter().flatten();
                    let named = |argument: &Value| {
                        let name = argument["name"].as_str().unwrap_or_default();
                        (name.to_owned(), argument.clone())
                    };
                    all.push(TrackEvent {
                        track,
                        name: event["name"].as_str().unwrap_or_default().to_owned(),
                        begin: time,
                        end: None,
                        arguments: arguments.map(named).collect(),
                    });
                }
                _ => {}
            }
        }
        Ok(all)
    }

    /// Returns the counters' values, which must rise from 0 on.
    fn counters(&self) -> Result<Counters> {
        let mut counters = Counters::new();
        for (time, event) in self.events() {
            if event["type"] == "TYPE_COUNTER" {
                let track = &self.tracks[&number(&event["track_uuid"])];
                ensure!(track["counter"]["unit"].is_string(), "{track}");
                let parent = &self.tracks[&number(&track["parent_uuid"])];
                let pid = number(&parent["process"]["pid"]);
                let name = track["name"].as_str().context("no name")?;
                let values = counters.entry((pid, name.to_owned())).or_default();
                values.push((time, number(&event["counter_value"])));
            }
        }
        for (name, values) in &counters {
            let rises = values.is_sorted() && values[0].1 == 0;
            ensure!(rises, "{name:?} falls, or begins late: {values:?}");
        }
        Ok(counters)
    }

    /// Returns the last value of each counter.
    fn sums(&self) -> Result<BTreeMap<(u64, String), u64>> {
        let last = |values: Vec<(u64, u64)>| values.last().map_or(0, |(_, sum)| *sum);
        let counters = self.counters()?.into_iter();
        Ok(counters.map(|(of, values)| (of, last(values))).collect())
    }

    /// Converts a wall time of JSON into a time of the trace, by the snapshot of clocks at the beginning.
    fn time(&self, wall: &Value) -> Result<u64> {
        let snapshot = self.packets[0]["clock_snapshot"]["clocks"]
            .as_array()
            .context("no clocks")?;
        let clock = |id| {
            let clock = snapshot
                .iter()
                .find(|clock| number(&clock["clock_id"]) == id);
            clock.map(|clock| number(&clock["timestamp"]))
        };
        // trace_processor takes the time of a heap profile from the coarse monotonic clock.
        ensure!(clock(5).is_some(), "{snapshot:?}");
        let (real, boot) = (clock(1).context("no time")?, clock(6).context("no time")?);
        let wall: Timestamp = wall.as_str().context("no time")?.parse()?;
        let wall = u64::try_from(wall.as_nanosecond())?;
        Ok((wall + boot).saturating_sub(real))
    }

    /// Checks that an event agrees with a row.
    fn is_row(&self, event: &TrackEvent, row: &Value, took_ns: Option<u64>) -> Result<()> {
        let thread = &self.tracks[&event.track]["thread"];
        let of_thread = ["pid", "tid"].map(|id| number(&thread[id]) == number(&row[id]));
        ensure!(
            of_thread == [true; 2] && thread["thread_name"] == row["comm"],
            "{thread}: {row}"
        );
        ensure!(
            event.end.map(|end| end - event.begin) == took_ns,
            "{event:?}: {row}"
        );
        let end = event.end.unwrap_or(event.begin);
        let apart = end.abs_diff(self.time(&row["time"])?);
        ensure!(apart < CLOSE_NS, "{apart} ns apart: {event:?} {row}");
        let on_track = [
            "type", "time", "pid", "tid", "comm", "tool", "host", "boot_id", "schema",
        ];
        let fields = row.as_object().context("no object")?.iter();
        let fields =
            fields.filter(|(name, value)| !on_track.contains(&name.as_str()) && !value.is_null());
        ensure!(
            fields.clone().count() == event.arguments.len(),
            "{event:?}: {row}"
        );
        for (name, value) in fields {
            let argument = &event.arguments[name];
            let same = match value {
                Value::String(text) => argument["string_value"] == *text,
                Value::Number(_) => ["uint_value", "int_value"]
                    .iter()
                    .any(|kind| argument[kind].as_str() == Some(&value.to_string())),
                Value::Array(values) => {
                    let texts = argument["array_values"].as_array();
                    let texts = texts.into_iter().flatten().map(|it| &it["string_value"]);
                    texts.eq(values)
                }
                Value::Object(fields) => {
                    let known = fields.values().filter(|value| !value.is_null()).count();
                    let entries = argument["dict_entries"].as_array();
                    entries.is_some_and(|entries| entries.len() == known)
                }
                _ => false,
            };
            ensure!(same, "{name}: {value}, not {argument}");
        }
        Ok(())
    }
}

/// Starts a tool on a process, with a timeline.
fn start(tool: &str, pid: &str, file: &Path, args: &[&str], live: &str) -> Result<Tool> {
    let file = file.to_str().context("not UTF-8")?;
    let args = [&["-j", "-p", pid, "--export", file], args].concat();
    let mut tool = Tool::start(tool, &args)?;
    tool.wait_for_stderr(live)?;
    Ok(tool)
}

/// Returns the rows of a type.
fn rows(ended: &ToolOutput, kind: &str) -> Result<Vec<Value>> {
    ensure!(ended.status.success(), "{ended:?}");
    let mut rows = ended.objects()?;
    rows.retain(|row| row["type"] == kind);
    Ok(rows)
}

fn calls_are_on_their_threads() -> Result<()> {
    let folder = harness::scratch()?;
    for (tool, call, args) in [
        ("mmapsnoop", "mmap", &[][..]),
        ("brkstack", "brk", &["--events"]),
    ] {
        let file = folder.path().join(format!("{tool}.pftrace"));
        let mut program = Workload::start("contend", &["8", "1009", call])?;
        let live = format!("tracing {call}(2)");
        let tool = start(tool, &program.pid(), &file, args, &live)?;
        program.work()?;
        let rows = rows(&tool.interrupt()?, "call")?;
        let timeline = Timeline::read(&[&file])?;
        let events = timeline.happened()?;
        ensure!(
            rows.len() == 8 * 1009 && events.len() == rows.len(),
            "{call}"
        );
        for (event, row) in events.iter().zip(&rows) {
            ensure!(event.name == call, "{event:?}");
            timeline.is_row(event, row, None)?;
        }
        let threads: BTreeSet<u64> = events.iter().map(|event| event.track).collect();
        ensure!(threads.len() == 8, "{call}: {threads:?}");
    }
    Ok(())
}

fn calls_last_as_long_as_they_took() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("shm.pftrace");
    let mut program = Workload::start("shm", &["101"])?;
    let tool = start("shmsnoop", &program.pid(), &file, &[], "tracing shmget(2)")?;
    program.work()?;
    let rows = rows(&tool.interrupt()?, "call")?;
    let timeline = Timeline::read(&[&file])?;
    let events = timeline.happened()?;
    ensure!(rows.len() > 500 && events.len() == rows.len());
    for (event, row) in events.iter().zip(&rows) {
        ensure!(row["call"] == event.name, "{event:?}: {row}");
        timeline.is_row(event, row, row["latency_ns"].as_u64())?;
    }
    Ok(())
}

/// Reports come every tenth of a second. The counters have the reports' sums.
fn page_faults_are_counters() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("faults.pftrace");
    let mut program = Workload::start("minor", &["10007"])?;
    let pid = program.pid();
    let number: u64 = pid.parse()?;
    let live = "tracing page faults";
    let tool = start("faults", &pid, &file, &["0.1"], live)?;
    let by_file = folder.path().join("ffaults.pftrace");
    let other = start("ffaults", &pid, &by_file, &["0.1"], live)?;
    program.work()?;
    let reports = rows(&tool.interrupt()?, "stack")?;
    let faults: u64 = reports.iter().filter_map(|row| row["count"].as_u64()).sum();
    let timeline = Timeline::read(&[&file])?;
    let sums = timeline.sums()?;
    ensure!(faults >= 10_007, "{faults}");
    ensure!(
        sums[&(number, "page faults".to_owned())] == faults,
        "{sums:?}"
    );
    let bytes = sums[&(number, "page faults, bytes".to_owned())];
    ensure!(bytes >= 10_007 * 4096, "{sums:?}");

    let mut files: BTreeMap<(u64, String), u64> = BTreeMap::new();
    for row in rows(&other.interrupt()?, "file")? {
        let file = row["file"].as_str().context("no file")?;
        let sum = files.entry((0, format!("faults on {file}"))).or_default();
        *sum += row["faults"].as_u64().context("no number")?;
    }
    let sums = Timeline::read(&[&by_file])?.sums()?;
    ensure!(
        sums == files && !files.is_empty(),
        "{sums:?}, not {files:?}"
    );
    Ok(())
}

/// Returns what each report has outstanding, as bytes and blocks, and the functions in the stacks of all reports.
fn heaps(timeline: &Timeline) -> Result<(Vec<[u64; 2]>, BTreeSet<String>)> {
    let mut stacks: HashMap<u64, [u64; 2]> = HashMap::new();
    let (mut sums, mut functions) = (Vec::new(), BTreeSet::new());
    let profiles = timeline
        .packets
        .iter()
        .map(|packet| &packet["profile_packet"]);
    for (index, profile) in profiles.filter(|profile| !profile.is_null()).enumerate() {
        ensure!(number(&profile["index"]) == index as u64, "{profile}");
        let list = |field: &str| profile[field].as_array().cloned().unwrap_or_default();
        let by_id = |field: &str| {
            let entries = list(field).into_iter();
            let entries = entries.map(|entry| (number(&entry["iid"]), entry));
            entries.collect::<HashMap<u64, Value>>()
        };
        let [strings, frames, mappings] = ["strings", "frames", "mappings"].map(by_id);
        let callstacks = by_id("callstacks");
        for dump in list("process_dumps") {
            ensure!(number(&dump["timestamp"]) > 0, "{dump}");
            for sample in dump["samples"].as_array().into_iter().flatten() {
                let stack = number(&sample["callstack_id"]);
                let [came, went, blocks_came, blocks_went] =
                    ["self_allocated", "self_freed", "alloc_count", "free_count"]
                        .map(|field| number(&sample[field]));
                stacks.insert(stack, [came - went, blocks_came - blocks_went]);
                let frame_ids = callstacks[&stack]["frame_ids"].as_array();
                for frame in frame_ids.context("no frames")? {
                    let frame = &frames[&number(frame)];
                    // A packet contains everything that it refers to.
                    let mapping = &mappings[&number(&frame["mapping_id"])];
                    ensure!(strings.contains_key(&number(&mapping["build_id"])));
                    let name = &strings[&number(&frame["function_name_id"])]["str"];
                    functions.insert(name.as_str().unwrap_or_default().to_owned());
                }
            }
        }
        let sum = |at: usize| stacks.values().map(|stack| stack[at]).sum();
        sums.push([sum(0), sum(1)]);
    }
    Ok((sums, functions))
}

/// Two processes are traced, with a report after each round of the first one.
fn heaps_are_what_was_reported() -> Result<()> {
    const ROUNDS: usize = 3;
    let folder = harness::scratch()?;
    let file = folder.path().join("heap.pftrace");
    let mut program = Workload::start("alloc", &["churn", &ROUNDS.to_string(), "101"])?;
    let mut leaks = Workload::start("alloc", &["leak", "31", "4093"])?;
    let pids = [program.pid(), leaks.pid()].join(",");
    let args = ["-o", "0", "-T", "1000", "0.5"];
    let mut tool = start("memleak", &pids, &file, &args, memleak::READY)?;
    leaks.work()?;
    for round in 1..=ROUNDS {
        program.round(round == ROUNDS)?;
        tool.wait_for_output("\"type\":\"report\"")?;
    }
    let ended = tool.interrupt()?;
    let number = |report: &Value, field: &str| report[field].as_u64().unwrap_or_default();
    let reports = rows(&ended, "report")?;
    let reports = reports
        .iter()
        .map(|report| [number(report, "bytes"), number(report, "allocations")]);
    let reports: Vec<[u64; 2]> = reports.collect();
    let (sums, functions) = heaps(&Timeline::read(&[&file])?)?;
    ensure!(sums == reports, "{sums:?}, not {reports:?}");
    ensure!(sums.len() > ROUNDS && sums[0] != sums[ROUNDS], "{sums:?}");
    // In the schema strings are bytes, which JSON has in base64: "leak_malloc".
    ensure!(functions.contains("bGVha19tYWxsb2M="), "{functions:?}");
    Ok(())
}
