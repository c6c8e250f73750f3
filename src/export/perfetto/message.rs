//! Messages of Perfetto's `protos/perfetto/trace/perfetto_trace.proto`, with the fields that are written here.
//!
//! A field in which 0 or false means something else than a missing value is optional. Repeated numbers are not
//! packed, as the schema is proto2 and trace_processor reads them so.

use prost::Message;

/// Wall clock, which `date` shows, as a value of `timestamp_clock_id` and of [`Clock::clock_id`].
pub(super) const REALTIME: u32 = 1;
/// Clock of the BPF programs' timestamps.
pub(super) const MONOTONIC: u32 = 3;
/// Clock that trace_processor takes a heap profile's own timestamp to be of.
pub(super) const MONOTONIC_COARSE: u32 = 5;
/// Clock of a trace, which goes on while the machine is suspended.
pub(super) const BOOTTIME: u32 = 6;

/// Flag of a sequence's first packet: later packets refer to nothing before it.
pub(super) const INCREMENTAL_STATE_CLEARED: u32 = 1;

/// Values of [`TrackEvent::kind`].
pub(super) const SLICE_BEGIN: i32 = 1;
pub(super) const SLICE_END: i32 = 2;
pub(super) const INSTANT: i32 = 3;
pub(super) const COUNTER: i32 = 4;

/// Values of [`Counter::unit`].
pub(super) const TIME_NS: i32 = 1;
pub(super) const COUNT: i32 = 2;
pub(super) const SIZE_BYTES: i32 = 3;

#[derive(Clone, PartialEq, Message)]
pub(super) struct TracePacket {
    #[prost(message, optional, tag = "6")]
    pub(super) clock_snapshot: Option<ClockSnapshot>,
    #[prost(uint64, tag = "8")]
    pub(super) timestamp: u64,
    /// The field `trusted_packet_sequence_id`, which identifies the writer of the packet.
    #[prost(uint32, tag = "10")]
    pub(super) sequence: u32,
    #[prost(message, optional, tag = "11")]
    pub(super) track_event: Option<TrackEvent>,
    #[prost(uint32, tag = "13")]
    pub(super) sequence_flags: u32,
    #[prost(message, optional, tag = "37")]
    pub(super) profile_packet: Option<ProfilePacket>,
    #[prost(uint32, tag = "58")]
    pub(super) timestamp_clock_id: u32,
    #[prost(message, optional, tag = "60")]
    pub(super) track_descriptor: Option<TrackDescriptor>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ClockSnapshot {
    #[prost(message, repeated, tag = "1")]
    pub(super) clocks: Vec<Clock>,
    #[prost(uint32, tag = "2")]
    pub(super) primary_trace_clock: u32,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Clock {
    #[prost(uint32, tag = "1")]
    pub(super) clock_id: u32,
    #[prost(uint64, tag = "2")]
    pub(super) timestamp: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackDescriptor {
    #[prost(uint64, tag = "1")]
    pub(super) uuid: u64,
    #[prost(string, tag = "2")]
    pub(super) name: String,
    #[prost(message, optional, tag = "3")]
    pub(super) process: Option<Process>,
    #[prost(message, optional, tag = "4")]
    pub(super) thread: Option<Thread>,
    #[prost(uint64, tag = "5")]
    pub(super) parent_uuid: u64,
    #[prost(message, optional, tag = "8")]
    pub(super) counter: Option<Counter>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Process {
    #[prost(int32, tag = "1")]
    pub(super) pid: i32,
    #[prost(string, tag = "6")]
    pub(super) process_name: String,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Thread {
    #[prost(int32, tag = "1")]
    pub(super) pid: i32,
    #[prost(int64, tag = "2")]
    pub(super) tid: i64,
    #[prost(string, tag = "5")]
    pub(super) thread_name: String,
}

#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct Counter {
    #[prost(int32, tag = "3")]
    pub(super) unit: i32,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TrackEvent {
    #[prost(message, repeated, tag = "4")]
    pub(super) debug_annotations: Vec<DebugAnnotation>,
    /// The field `type`.
    #[prost(int32, tag = "9")]
    pub(super) kind: i32,
    #[prost(uint64, tag = "11")]
    pub(super) track_uuid: u64,
    #[prost(string, repeated, tag = "22")]
    pub(super) categories: Vec<String>,
    #[prost(string, tag = "23")]
    pub(super) name: String,
    #[prost(int64, optional, tag = "30")]
    pub(super) counter_value: Option<i64>,
}

/// Argument of an event: a name and values of one of these types.
#[derive(Clone, PartialEq, Message)]
pub(super) struct DebugAnnotation {
    #[prost(bool, optional, tag = "2")]
    pub(super) bool_value: Option<bool>,
    #[prost(uint64, optional, tag = "3")]
    pub(super) uint_value: Option<u64>,
    #[prost(int64, optional, tag = "4")]
    pub(super) int_value: Option<i64>,
    #[prost(double, optional, tag = "5")]
    pub(super) double_value: Option<f64>,
    #[prost(string, optional, tag = "6")]
    pub(super) string_value: Option<String>,
    #[prost(string, tag = "10")]
    pub(super) name: String,
    #[prost(message, repeated, tag = "11")]
    pub(super) dict_entries: Vec<DebugAnnotation>,
    #[prost(message, repeated, tag = "12")]
    pub(super) array_values: Vec<DebugAnnotation>,
}

/// Heap profile, with the tables that its ids refer to. Ids begin at 1.
#[derive(Clone, PartialEq, Message)]
pub(super) struct ProfilePacket {
    #[prost(message, repeated, tag = "1")]
    pub(super) strings: Vec<InternedString>,
    #[prost(message, repeated, tag = "2")]
    pub(super) frames: Vec<Frame>,
    #[prost(message, repeated, tag = "3")]
    pub(super) callstacks: Vec<Callstack>,
    #[prost(message, repeated, tag = "4")]
    pub(super) mappings: Vec<Mapping>,
    #[prost(message, repeated, tag = "5")]
    pub(super) process_dumps: Vec<ProcessHeapSamples>,
    /// Number of the profile packet in its sequence.
    #[prost(uint64, tag = "7")]
    pub(super) index: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct InternedString {
    #[prost(uint64, tag = "1")]
    pub(super) iid: u64,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) str: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Message)]
pub(super) struct Frame {
    #[prost(uint64, tag = "1")]
    pub(super) iid: u64,
    #[prost(uint64, tag = "2")]
    pub(super) function_name_id: u64,
    #[prost(uint64, tag = "3")]
    pub(super) mapping_id: u64,
    /// Offset of the instruction from the start of the mapping.
    #[prost(uint64, tag = "4")]
    pub(super) rel_pc: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Callstack {
    #[prost(uint64, tag = "1")]
    pub(super) iid: u64,
    /// Frames, the outermost first.
    #[prost(uint64, repeated, packed = "false", tag = "2")]
    pub(super) frame_ids: Vec<u64>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Mapping {
    #[prost(uint64, tag = "1")]
    pub(super) iid: u64,
    /// Id of the string that holds the build id, as bytes.
    #[prost(uint64, tag = "2")]
    pub(super) build_id: u64,
    #[prost(uint64, tag = "4")]
    pub(super) start: u64,
    #[prost(uint64, tag = "5")]
    pub(super) end: u64,
    /// Ids of the path's components.
    #[prost(uint64, repeated, packed = "false", tag = "7")]
    pub(super) path_string_ids: Vec<u64>,
    /// File offset that is mapped at `start`.
    #[prost(uint64, tag = "8")]
    pub(super) exact_offset: u64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct ProcessHeapSamples {
    #[prost(uint64, tag = "1")]
    pub(super) pid: u64,
    #[prost(message, repeated, tag = "2")]
    pub(super) samples: Vec<HeapSample>,
    #[prost(uint64, tag = "9")]
    pub(super) timestamp: u64,
    #[prost(string, tag = "11")]
    pub(super) heap_name: String,
    #[prost(uint64, tag = "12")]
    pub(super) sampling_interval_bytes: u64,
}

/// Sums of one stack since the start. Outstanding memory is what was allocated less what was freed.
#[derive(Clone, Copy, PartialEq, Message)]
pub(super) struct HeapSample {
    #[prost(uint64, tag = "1")]
    pub(super) callstack_id: u64,
    #[prost(uint64, tag = "2")]
    pub(super) self_allocated: u64,
    #[prost(uint64, tag = "3")]
    pub(super) self_freed: u64,
    #[prost(uint64, tag = "5")]
    pub(super) alloc_count: u64,
    #[prost(uint64, tag = "6")]
    pub(super) free_count: u64,
}
