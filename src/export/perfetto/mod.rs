//! Traces for ui.perfetto.dev and its trace_processor.
//!
//! A trace is a sequence of packets, so that the concatenated files of several tools are one timeline. Therefore the
//! number of a track is derived from the subject of the track, the same in every tool; the number of a sequence of
//! packets is derived from the run; and all times are of CLOCK_BOOTTIME.
//!
//! | module | what it is for |
//! |---|---|
//! | `message` | the packets |
//! | `tracks` | events of threads, and counts, as packets |
//! | `heap` | reports by stack as heap profiles |

mod heap;
mod message;
mod tracks;

use std::fs::File;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::mem;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Error, Result};
use nix::time::{ClockId, clock_gettime};

pub use self::heap::Heaps;
use self::message::{TracePacket, TrackDescriptor};
pub use self::tracks::Tracks;
use crate::print::clock;
use crate::print::file_name::FileName;

/// Bytes of packets that are buffered before they are written.
const FLUSH_BYTES: usize = 1 << 20;
/// Change in the difference of CLOCK_BOOTTIME and CLOCK_MONOTONIC that is ignored, as both cannot be read at once. A
/// larger change is a time in which the machine was suspended.
const READ_APART: Duration = Duration::from_millis(1);

/// File of a trace. Packets are appended. The file has whole packets only, even if the disk is full.
struct Trace {
    file: File,
    /// The path, escaped.
    name: String,
    tool: &'static str,
    /// Number of this run's sequence of packets.
    sequence: u32,
    /// Encoded packets that are not written yet.
    packets: Vec<u8>,
    /// Size of the packets that are written, in bytes.
    written: u64,
    /// Lead of CLOCK_BOOTTIME over CLOCK_MONOTONIC.
    suspended: Duration,
    failed: Option<Error>,
}

impl Trace {
    /// Begins a trace in a new file, or truncates an existing one.
    fn create(path: &Path, tool: &'static str) -> Result<Self> {
        let place = FileName::find(path)?;
        let name = place.shown().to_owned();
        let file = place.replaceable().and_then(|_| place.open_empty());
        let file = file.with_context(|| format!("failed to write {name}"))?;
        let suspended = suspended();
        let run = (tool, std::process::id(), clock::monotonic_ns());
        let mut trace = Self {
            file,
            name,
            tool,
            sequence: (hash(&run) as u32).max(1),
            packets: Vec::new(),
            written: 0,
            suspended,
            failed: None,
        };
        trace.push(TracePacket {
            sequence_flags: message::INCREMENTAL_STATE_CLEARED,
            clock_snapshot: Some(clocks()),
            ..TracePacket::default()
        });
        trace.flush();
        Ok(trace)
    }

    /// Adds a packet, and sets its number of the sequence.
    fn push(&mut self, packet: TracePacket) {
        let packet = TracePacket {
            sequence: self.sequence,
            ..packet
        };
        // Field 1 of the message `Trace` is `packet`.
        prost::encoding::message::encode(1, &packet, &mut self.packets);
        if self.packets.len() > FLUSH_BYTES {
            self.flush();
        }
    }

    /// Adds a packet with a timestamp of CLOCK_BOOTTIME.
    fn push_at(&mut self, timestamp: u64, packet: TracePacket) {
        self.push(TracePacket {
            timestamp,
            timestamp_clock_id: message::BOOTTIME,
            ..packet
        });
    }

    /// Converts a recent time of CLOCK_MONOTONIC to CLOCK_BOOTTIME.
    fn boottime(&mut self, monotonic_ns: u64) -> u64 {
        let suspended = suspended();
        if suspended.abs_diff(self.suspended) > READ_APART {
            self.suspended = suspended;
        }
        let ahead = u64::try_from(self.suspended.as_nanos()).unwrap_or(u64::MAX);
        monotonic_ns.saturating_add(ahead)
    }

    /// Writes the buffered packets. After a failure nothing more is written.
    fn flush(&mut self) {
        let packets = mem::take(&mut self.packets);
        if self.failed.is_some() || packets.is_empty() {
            return;
        }
        match self.file.write_all(&packets) {
            Ok(()) => self.written += packets.len() as u64,
            Err(error) => {
                // Half a packet would be read as damage, so it is cut off. If that fails, the write error is reported
                // all the same.
                let _ = self.file.set_len(self.written);
                let error = Error::new(error).context(format!("failed to write {}", self.name));
                crate::message!("{error:#}: the timeline ends here");
                self.failed = Some(error);
            }
        }
    }

    fn finish(&mut self) -> Result<()> {
        self.flush();
        self.failed.take().map_or(Ok(()), Err)
    }
}

/// Writes the buffered packets when a run ends early, as when the reader of its output exits.
impl Drop for Trace {
    fn drop(&mut self) {
        self.flush();
    }
}

/// Kinds of tracks, in the upper four bits of a track's number. The bits below identify the track's subject. Every
/// build of every tool has the same numbers for processes and threads.
const PROCESS: u64 = 1 << 60;
const THREAD: u64 = 2 << 60;
const OTHER: u64 = 3 << 60;

/// Hashes a value. The hash is the same in every run of this build.
fn hash(what: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    what.hash(&mut hasher);
    hasher.finish()
}

/// Returns the number of a track that only one tool writes to.
fn own_number(what: &impl Hash) -> u64 {
    OTHER | hash(what) >> 4
}

/// Describes the track of a process. `name` may be the name of one of its threads.
fn process_track(pid: u32, name: &str) -> TrackDescriptor {
    TrackDescriptor {
        uuid: PROCESS | u64::from(pid),
        process: Some(message::Process {
            pid: pid.cast_signed(),
            process_name: name.to_owned(),
        }),
        ..TrackDescriptor::default()
    }
}

/// Makes the packet that describes a track.
fn describing(track: TrackDescriptor) -> TracePacket {
    TracePacket {
        track_descriptor: Some(track),
        ..TracePacket::default()
    }
}

fn now(clock: ClockId) -> Duration {
    clock_gettime(clock).map(Duration::from).unwrap_or_default()
}

fn suspended() -> Duration {
    now(ClockId::CLOCK_BOOTTIME).saturating_sub(now(ClockId::CLOCK_MONOTONIC))
}

/// Reads the clocks, from which a viewer computes wall time.
fn clocks() -> message::ClockSnapshot {
    let clocks = [
        (message::BOOTTIME, ClockId::CLOCK_BOOTTIME),
        (message::MONOTONIC, ClockId::CLOCK_MONOTONIC),
        (message::MONOTONIC_COARSE, ClockId::CLOCK_MONOTONIC),
        (message::REALTIME, ClockId::CLOCK_REALTIME),
    ];
    let read = |(clock_id, clock)| message::Clock {
        clock_id,
        timestamp: u64::try_from(now(clock).as_nanos()).unwrap_or(u64::MAX),
    };
    message::ClockSnapshot {
        // CLOCK_MONOTONIC is sent for the coarse clock, too, which lags by milliseconds.
        clocks: clocks.map(read).into(),
        primary_trace_clock: message::BOOTTIME,
    }
}

#[cfg(test)]
mod tests {
    use prost::Message;

    use super::*;

    /// The message `Trace`.
    #[derive(Clone, PartialEq, Message)]
    pub(super) struct Packets {
        #[prost(message, repeated, tag = "1")]
        pub(super) packet: Vec<TracePacket>,
    }

    #[test]
    fn a_time_in_which_the_machine_was_suspended_counts() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.pftrace");
        let mut trace = Trace::create(&path, "faults").expect("room");
        let ahead = trace.boottime(0);
        assert_eq!(trace.boottime(7), ahead + 7);
        // A wrong difference: the clocks are read anew, and differ from it by too much.
        trace.suspended += Duration::from_secs(1);
        assert!(trace.boottime(7).abs_diff(ahead + 7) < READ_APART.as_nanos() as u64);
    }
}
