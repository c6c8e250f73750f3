//! Events of threads as slices, and counts as counters that never fall.

use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::Result;
use jiff::Zoned;
use serde_json::Value;

use super::message::{self, DebugAnnotation, TracePacket, TrackDescriptor, TrackEvent};
use super::{THREAD, Trace, describing, hash, own_number, process_track};
use crate::print::clock::{self, Clock};
use crate::print::timeline::{Count, Event, Timeline, Unit};

/// Limit on the tracks that are remembered as described. Beyond it all are described once more.
const MAX_DESCRIBED: usize = 1 << 16;
/// Limit on the number of counters. Counts beyond it are added up in one counter for the others of that name.
const MAX_COUNTERS: usize = 10_000;
/// Fields of a row that an event's track or its name shows already.
const ON_TRACK: [&str; 5] = ["type", "time", "pid", "tid", "comm"];

/// Timeline of a tool, in a file that grows at each flush.
pub struct Tracks {
    trace: Trace,
    clock: Clock,
    /// Start of the timeline, by CLOCK_BOOTTIME.
    began: u64,
    /// Numbers of the tracks that are described, each with a hash of the track's name.
    described: HashSet<(u64, u64)>,
    /// Value of each counter, by the number of its track.
    sums: HashMap<u64, u64>,
}

impl Tracks {
    /// Begins a timeline. `tool` names the track of events that belong to no process.
    ///
    /// # Errors
    /// If the file cannot be written, or is not a regular file.
    pub fn create(path: &Path, tool: &'static str) -> Result<Self> {
        let mut trace = Trace::create(path, tool)?;
        Ok(Self {
            began: trace.boottime(clock::monotonic_ns()),
            trace,
            clock: Clock::new(),
            described: HashSet::new(),
            sums: HashMap::new(),
        })
    }

    fn boottime(&mut self, time: &Zoned) -> u64 {
        self.trace.boottime(self.clock.monotonic_ns(time))
    }

    /// Describes a track, unless it is described already. Returns its number.
    fn describe(&mut self, track: TrackDescriptor) -> u64 {
        let uuid = track.uuid;
        let called = (&track.name, track.thread.as_ref().map(|it| &it.thread_name));
        let process = track.process.as_ref().map(|it| &it.process_name);
        if self.described.len() >= MAX_DESCRIBED {
            self.described.clear();
        }
        if self.described.insert((uuid, hash(&(called, process)))) {
            self.trace.push(describing(track));
        }
        uuid
    }

    /// Returns the track of events that belong to no process.
    fn own_track(&mut self) -> u64 {
        let tool = self.trace.tool;
        self.describe(TrackDescriptor {
            uuid: own_number(&("tool", tool)),
            name: tool.to_owned(),
            ..TrackDescriptor::default()
        })
    }

    fn thread_track(&mut self, event: &Event<'_>) -> u64 {
        self.describe(TrackDescriptor {
            uuid: THREAD | u64::from(event.tid),
            thread: Some(message::Thread {
                pid: event.pid.cast_signed(),
                tid: event.tid.into(),
                thread_name: event.comm.to_owned(),
            }),
            ..TrackDescriptor::default()
        })
    }

    fn counter_track(&mut self, count: &Count<'_>) -> u64 {
        let tool = self.trace.tool;
        let pid = count.process.map(|(pid, _)| pid);
        let mut uuid = own_number(&("counter", tool, &count.name, pid));
        let mut name = count.name.to_string();
        let mut process = count.process;
        if self.sums.len() >= MAX_COUNTERS && !self.sums.contains_key(&uuid) {
            name.push_str(", others");
            uuid = own_number(&("others", tool, &name));
            process = None;
        }
        let parent_uuid = match process {
            Some((pid, comm)) => self.describe(process_track(pid, comm)),
            None => self.own_track(),
        };
        let unit = match count.unit {
            Unit::Count => message::COUNT,
            Unit::Bytes => message::SIZE_BYTES,
            Unit::Nanoseconds => message::TIME_NS,
        };
        self.describe(TrackDescriptor {
            uuid,
            name,
            parent_uuid,
            counter: Some(message::Counter { unit }),
            ..TrackDescriptor::default()
        })
    }

    fn push_event(&mut self, time: u64, event: TrackEvent) {
        self.trace.push_at(
            time,
            TracePacket {
                track_event: Some(event),
                ..TracePacket::default()
            },
        );
    }

    /// Makes an event without a duration. The row's fields are its arguments.
    fn instant(&self, track_uuid: u64, name: &str, row: &Value) -> TrackEvent {
        TrackEvent {
            kind: message::INSTANT,
            track_uuid,
            categories: vec![self.trace.tool.to_owned()],
            name: name.to_owned(),
            debug_annotations: arguments(row),
            counter_value: None,
        }
    }

    fn push_sum(&mut self, time: u64, track_uuid: u64, sum: u64) {
        let event = TrackEvent {
            kind: message::COUNTER,
            track_uuid,
            counter_value: Some(i64::try_from(sum).unwrap_or(i64::MAX)),
            ..TrackEvent::default()
        };
        self.push_event(time, event);
    }
}

impl Timeline for Tracks {
    fn event(&mut self, event: &Event<'_>, row: &Value) {
        let end = self.boottime(event.end);
        let track_uuid = self.thread_track(event);
        let instant = self.instant(track_uuid, &event.name, row);
        let Some(took_ns) = event.took_ns else {
            return self.push_event(end, instant);
        };
        let begin = TrackEvent {
            kind: message::SLICE_BEGIN,
            ..instant
        };
        self.push_event(end.saturating_sub(took_ns), begin);
        let finish = TrackEvent {
            kind: message::SLICE_END,
            track_uuid,
            ..TrackEvent::default()
        };
        self.push_event(end, finish);
    }

    fn count(&mut self, count: &Count<'_>) {
        let time = self.boottime(count.time);
        let track = self.counter_track(count);
        if !self.sums.contains_key(&track) {
            self.push_sum(self.began, track, 0);
        }
        let sum = self.sums.entry(track).or_default();
        *sum += count.increase;
        let sum = *sum;
        self.push_sum(time, track, sum);
    }

    fn remark(&mut self, name: &str, row: &Value) {
        let time = self.trace.boottime(clock::monotonic_ns());
        let track = self.own_track();
        let instant = self.instant(track, name, row);
        self.push_event(time, instant);
    }

    fn flush(&mut self) {
        self.trace.flush();
    }

    fn finish(&mut self) -> Result<()> {
        self.trace.finish()
    }
}

/// Converts the fields of a row to arguments, except for the fields in [`ON_TRACK`].
fn arguments(row: &Value) -> Vec<DebugAnnotation> {
    let fields = row.as_object().into_iter().flatten();
    let own = fields.filter(|(name, _)| !ON_TRACK.contains(&name.as_str()));
    own.filter_map(|(name, value)| argument(name, value))
        .collect()
}

/// Converts a field to an argument; None if its value is unknown.
fn argument(name: &str, value: &Value) -> Option<DebugAnnotation> {
    let mut argument = DebugAnnotation {
        name: name.to_owned(),
        ..DebugAnnotation::default()
    };
    match value {
        Value::Null => return None,
        Value::Bool(value) => argument.bool_value = Some(*value),
        Value::Number(number) if number.is_u64() => argument.uint_value = number.as_u64(),
        Value::Number(number) if number.is_i64() => argument.int_value = number.as_i64(),
        Value::Number(number) => argument.double_value = number.as_f64(),
        Value::String(text) => argument.string_value = Some(text.clone()),
        Value::Array(values) => {
            let values = values.iter().filter_map(|value| self::argument("", value));
            argument.array_values = values.collect();
        }
        Value::Object(fields) => {
            let fields = fields.iter();
            let fields = fields.filter_map(|(name, value)| self::argument(name, value));
            argument.dict_entries = fields.collect();
        }
    }
    Some(argument)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prost::Message;
    use serde_json::json;

    use super::super::tests::Packets;
    use super::*;

    fn count<'a>(pid: u32, time: &'a Zoned) -> Count<'a> {
        Count {
            name: "page faults".into(),
            unit: Unit::Count,
            process: Some((pid, "sh")),
            time,
            increase: 3,
        }
    }

    #[test]
    fn counters_are_bounded_and_lose_nothing() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.pftrace");
        let mut tracks = Tracks::create(&path, "faults").expect("room");
        let time = Clock::new().local(clock::monotonic_ns());
        let pids = MAX_COUNTERS as u32 + 7;
        for pid in (1..=pids).chain(1..=pids) {
            tracks.count(&count(pid, &time));
        }
        tracks.finish().expect("room");
        let bytes = fs::read(&path).expect("a file");
        let mut names = HashMap::new();
        let mut sums = HashMap::new();
        for packet in Packets::decode(&*bytes).expect("packets").packet {
            if let Some(track) = packet.track_descriptor {
                let before = names.insert(track.uuid, track.name);
                assert_eq!(before, None, "described twice");
            }
            if let Some(event) = packet.track_event {
                sums.insert(event.track_uuid, event.counter_value.expect("a value"));
            }
        }
        assert_eq!(sums.len(), MAX_COUNTERS + 1);
        assert_eq!(sums.values().sum::<i64>(), 2 * 3 * i64::from(pids));
        let others = names
            .iter()
            .filter(|(_, name)| *name == "page faults, others");
        let others: Vec<i64> = others.map(|(uuid, _)| sums[uuid]).collect();
        assert_eq!(others, [2 * 3 * 7]);
    }

    #[test]
    fn arguments_are_the_fields_that_are_known() {
        let row = json!({
            "type": "call", "pid": 1, "comm": "sh",
            "size": 7, "below": -7, "ratio": 0.5, "sync": false, "name": "a", "error": null,
            "flags": ["X", null], "victim": {"pid": 9, "uid": null},
        });
        let arguments = arguments(&row);
        let named = |name: &str| {
            let found = arguments.iter().find(|argument| argument.name == name);
            found.cloned().expect(name)
        };
        assert_eq!(arguments.len(), 7);
        assert_eq!(named("size").uint_value, Some(7));
        assert_eq!(named("below").int_value, Some(-7));
        assert_eq!(named("ratio").double_value, Some(0.5));
        assert_eq!(named("sync").bool_value, Some(false));
        assert_eq!(named("name").string_value.as_deref(), Some("a"));
        assert_eq!(named("flags").array_values.len(), 1);
        assert_eq!(named("victim").dict_entries.len(), 1);
    }
}
