//! Reports by stack as heap profiles. A viewer draws a flame graph of each, and how the heap grew.
//!
//! trace_processor takes a stack's sums to be sums since the start as long as the stack keeps its number. It forgets
//! all tables at the end of a packet, and reports a missing packet where the index skips
//! (`profile_packet_sequence_state.cc`). So a stack keeps one number while it has outstanding memory. If it has
//! memory again later, it gets another number, with sums of its own. A packet contains the stacks that have changed
//! since the last one, and all the entries that these refer to.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;

use anyhow::Result;

use super::message::{
    Callstack, Frame, HeapSample, InternedString, Mapping, ProcessHeapSamples, ProfilePacket,
    TracePacket,
};
use super::{Trace, describing, process_track};
use crate::export::profile::{Profile, Sample};
use crate::print::clock;
use crate::stacks::named::{self, NamedStack, Part};

/// Heap profiles of a run, in a file that grows at each report.
pub struct Heaps {
    trace: Trace,
    tables: Tables,
    /// Stacks with outstanding memory, by process and frames, the outermost first.
    stacks: HashMap<(u32, Vec<u64>), Stack>,
    /// Number of the last new stack.
    last_number: u64,
    /// Processes that have had stacks.
    processes: BTreeSet<u32>,
    /// Number of reports that were written before.
    index: u64,
}

/// Sums of a stack.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Stack {
    number: u64,
    bytes: Totals,
    blocks: Totals,
}

/// Sums of what was allocated and freed. The format takes these sums, while a report has what is outstanding.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Totals {
    allocated: u64,
    freed: u64,
}

impl Totals {
    /// Adds the least that must have been allocated or freed for `now` to be outstanding. Returns whether anything
    /// was added.
    fn reach(&mut self, now: u64) -> bool {
        let before = self.allocated - self.freed;
        self.allocated += now.saturating_sub(before);
        self.freed += before.saturating_sub(now);
        now != before
    }

    fn is_empty(self) -> bool {
        self.allocated == self.freed
    }
}

impl Heaps {
    /// Begins a trace.
    ///
    /// # Errors
    /// If the file cannot be written, or is not a regular file.
    pub fn create(path: &Path, tool: &'static str) -> Result<Self> {
        Ok(Self {
            trace: Trace::create(path, tool)?,
            tables: Tables::default(),
            stacks: HashMap::new(),
            last_number: 0,
            processes: BTreeSet::new(),
            index: 0,
        })
    }

    /// Adds a report, with numbers of allocations and of bytes. A stack that the report lacks has no outstanding
    /// memory.
    pub fn write(&mut self, profile: &Profile) {
        let mut there: HashMap<(u32, Vec<u64>), [u64; 2]> = HashMap::new();
        for Sample { stack, values } in &profile.samples {
            let key = (stack.pid, self.tables.frames_of(stack));
            let sums = there.entry(key).or_default();
            for (sum, value) in sums.iter_mut().zip(values) {
                *sum += value;
            }
            if self.processes.insert(stack.pid) && stack.pid != 0 {
                let track = process_track(stack.pid, &stack.comm);
                self.trace.push(describing(track));
            }
        }
        for key in there.keys() {
            self.stacks.entry(key.clone()).or_insert_with(|| {
                self.last_number += 1;
                Stack {
                    number: self.last_number,
                    ..Stack::default()
                }
            });
        }
        let packet = self.packet(&there, &profile.subject);
        self.stacks
            .retain(|_, stack| !stack.bytes.is_empty() || !stack.blocks.is_empty());
        let time = self.trace.boottime(clock::monotonic_ns());
        let profile_packet = Some(packet);
        self.trace.push_at(
            time,
            TracePacket {
                profile_packet,
                ..TracePacket::default()
            },
        );
        self.trace.flush();
        self.index += 1;
    }

    /// Makes the packet of the stacks that have changed, with all the entries that they refer to.
    fn packet(
        &mut self,
        outstanding: &HashMap<(u32, Vec<u64>), [u64; 2]>,
        heap_name: &str,
    ) -> ProfilePacket {
        let mut packet = ProfilePacket {
            index: self.index,
            ..ProfilePacket::default()
        };
        let mut samples: HashMap<u32, Vec<HeapSample>> = HashMap::new();
        let mut frames = BTreeSet::new();
        for (key, stack) in &mut self.stacks {
            let [blocks, bytes] = outstanding.get(key).copied().unwrap_or_default();
            if !(stack.blocks.reach(blocks) | stack.bytes.reach(bytes)) {
                continue;
            }
            let (pid, frame_ids) = key;
            frames.extend(frame_ids);
            packet.callstacks.push(Callstack {
                iid: stack.number,
                frame_ids: frame_ids.clone(),
            });
            samples.entry(*pid).or_default().push(HeapSample {
                callstack_id: stack.number,
                self_allocated: stack.bytes.allocated,
                self_freed: stack.bytes.freed,
                alloc_count: stack.blocks.allocated,
                free_count: stack.blocks.freed,
            });
        }
        self.tables.describe(frames, &mut packet);
        let timestamp = clock::monotonic_ns();
        // A process without changes gets a point on the timeline, too.
        packet.process_dumps = self
            .processes
            .iter()
            .map(|pid| ProcessHeapSamples {
                pid: (*pid).into(),
                samples: samples.remove(pid).unwrap_or_default(),
                timestamp,
                heap_name: heap_name.to_owned(),
                sampling_interval_bytes: 1,
            })
            .collect();
        packet
    }

    /// Writes the buffered packets.
    ///
    /// # Errors
    /// If a packet could not be written, now or before.
    pub fn finish(&mut self) -> Result<()> {
        self.trace.finish()
    }
}

/// Strings, mappings and frames of all stacks. Each has a number, from 1 on, for the whole run.
#[derive(Default)]
struct Tables {
    strings: Vec<Vec<u8>>,
    string_numbers: HashMap<Vec<u8>, u64>,
    mappings: Vec<Mapping>,
    mapping_numbers: HashMap<Code, u64>,
    frames: Vec<Frame>,
    frame_numbers: HashMap<Frame, u64>,
}

/// Identity of a mapping: a part of a file by the file's number and start address, the kernel or one of its modules,
/// or unknown.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
enum Code {
    File { number: u32, start: u64 },
    Kernel(String),
    Unknown,
}

impl Tables {
    /// Returns the numbers of a stack's frames, the outermost first.
    fn frames_of(&mut self, stack: &NamedStack) -> Vec<u64> {
        let mut frames = Vec::new();
        for part in [&stack.kernel, &stack.user].into_iter().flatten() {
            self.part(part, &mut frames);
        }
        frames.reverse();
        frames
    }

    /// Adds the numbers of a part's frames, the innermost first.
    fn part(&mut self, part: &Part, frames: &mut Vec<u64>) {
        for frame in &part.frames {
            let number = self.frame(frame);
            frames.push(number);
        }
        if let Some(missing) = part.missing() {
            let mapping_id = self.mapping(Code::Unknown, |_| Mapping::default());
            let name = self.string(missing.as_bytes());
            frames.push(self.number(Frame {
                function_name_id: name,
                mapping_id,
                ..Frame::default()
            }));
        }
    }

    fn frame(&mut self, frame: &named::Frame) -> u64 {
        let (mapping_id, rel_pc) = match &frame.code {
            Some(code) => {
                let key = Code::File {
                    number: code.file.number,
                    start: code.range.start,
                };
                let mapping = self.mapping(key, |tables| Mapping {
                    build_id: tables.string(code.file.build_id().unwrap_or_default()),
                    start: code.range.start,
                    end: code.range.end,
                    exact_offset: code.file_offset,
                    path_string_ids: tables.path(&code.file.path()),
                    ..Mapping::default()
                });
                (mapping, frame.instruction - code.range.start)
            }
            None if frame.is_kernel() => {
                let module = frame.module.as_ref().map_or("kernel", |(name, _)| name);
                let mapping = self.mapping(Code::Kernel(module.to_owned()), |tables| Mapping {
                    path_string_ids: tables.path(&format!("[{module}]")),
                    ..Mapping::default()
                });
                (mapping, frame.instruction)
            }
            None => {
                let mapping = self.mapping(Code::Unknown, |_| Mapping::default());
                // A frame of interpreted code is identified by its name alone.
                let native = !frame.is_interpreted();
                (mapping, if native { frame.instruction } else { 0 })
            }
        };
        let function_name_id = self.string(frame.function_or_module().as_bytes());
        self.number(Frame {
            function_name_id,
            mapping_id,
            rel_pc,
            ..Frame::default()
        })
    }

    /// Returns the number of a frame that is given without one. Adds the frame if it is new.
    fn number(&mut self, frame: Frame) -> u64 {
        let frames = &mut self.frames;
        *self.frame_numbers.entry(frame).or_insert_with(|| {
            let iid = frames.len() as u64 + 1;
            frames.push(Frame { iid, ..frame });
            iid
        })
    }

    fn mapping(&mut self, key: Code, make: impl FnOnce(&mut Self) -> Mapping) -> u64 {
        if let Some(&number) = self.mapping_numbers.get(&key) {
            return number;
        }
        let mut mapping = make(self);
        if mapping.build_id == 0 {
            mapping.build_id = self.string(b"");
        }
        mapping.iid = self.mappings.len() as u64 + 1;
        self.mapping_numbers.insert(key, mapping.iid);
        self.mappings.push(mapping);
        self.mappings.len() as u64
    }

    /// Returns the numbers of a path's components. The reader puts a slash before each.
    fn path(&mut self, path: &str) -> Vec<u64> {
        let parts = path.split('/').filter(|part| !part.is_empty());
        parts.map(|part| self.string(part.as_bytes())).collect()
    }

    fn string(&mut self, bytes: &[u8]) -> u64 {
        if let Some(&number) = self.string_numbers.get(bytes) {
            return number;
        }
        self.strings.push(bytes.to_vec());
        let number = self.strings.len() as u64;
        self.string_numbers.insert(bytes.to_vec(), number);
        number
    }

    /// Puts these frames into a packet, with the mappings and strings that they refer to.
    fn describe(&self, frames: BTreeSet<u64>, packet: &mut ProfilePacket) {
        let at = |number: &u64| *number as usize - 1;
        packet.frames = frames.iter().map(|frame| self.frames[at(frame)]).collect();
        let mappings: BTreeSet<u64> = packet.frames.iter().map(|it| it.mapping_id).collect();
        let mappings = mappings.iter().map(|it| self.mappings[at(it)].clone());
        packet.mappings = mappings.collect();
        let of_mappings = packet.mappings.iter();
        let of_mappings =
            of_mappings.flat_map(|it| it.path_string_ids.iter().chain([&it.build_id]));
        let of_frames = packet.frames.iter().map(|it| &it.function_name_id);
        let strings: BTreeSet<u64> = of_mappings.chain(of_frames).copied().collect();
        let string = |&iid: &u64| InternedString {
            iid,
            str: self.strings[at(&iid)].clone(),
        };
        packet.strings = strings.iter().map(string).collect();
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use prost::Message;

    use super::super::tests::Packets;
    use super::*;
    use crate::export::profile::ValueType;

    fn report(samples: &[(u32, &str, [u64; 2])]) -> Profile {
        let sample = |&(pid, function, values): &(u32, &str, [u64; 2])| Sample {
            stack: NamedStack {
                pid,
                user: Some(Part {
                    frames: vec![named::Frame {
                        symbol: Some((function.into(), 0)),
                        ..named::Frame::default()
                    }],
                    truncated: None,
                }),
                ..NamedStack::default()
            },
            values: values.to_vec(),
        };
        Profile {
            tool: "memleak",
            target: "pid 7".to_owned(),
            subject: "outstanding allocations".to_owned(),
            since: clock::now(),
            until: clock::now(),
            values: vec![
                ValueType::count("inuse_objects", "allocations"),
                ValueType::bytes("inuse_space"),
            ],
            main_value: 1,
            by_thread: false,
            samples: samples.iter().map(sample).collect(),
            remarks: Vec::new(),
        }
    }

    /// Reads the samples of each packet by function: bytes allocated and freed, blocks allocated and freed.
    fn read(path: &Path) -> Vec<Vec<(String, [u64; 4])>> {
        let bytes = fs::read(path).expect("a file");
        let packets = Packets::decode(&*bytes).expect("packets").packet;
        let profiles = packets.into_iter().filter_map(|it| it.profile_packet);
        let all = profiles.enumerate().map(|(index, packet)| {
            assert_eq!(packet.index, index as u64);
            let string = |iid| {
                let found = packet.strings.iter().find(|it| it.iid == iid);
                String::from_utf8(found.expect("a string").str.clone()).expect("UTF-8")
            };
            let function = |stack| {
                let found = packet.callstacks.iter().find(|it| it.iid == stack);
                let frame = found.expect("a stack").frame_ids[0];
                let found = packet.frames.iter().find(|it| it.iid == frame);
                let frame = found.expect("a frame");
                let mapping = packet.mappings.iter().find(|it| it.iid == frame.mapping_id);
                assert_eq!(string(mapping.expect("a mapping").build_id), "");
                string(frame.function_name_id)
            };
            let dumps = packet.process_dumps.iter().flat_map(|dump| &dump.samples);
            let sums = dumps.map(|it| {
                let sums = [
                    it.self_allocated,
                    it.self_freed,
                    it.alloc_count,
                    it.free_count,
                ];
                (function(it.callstack_id), sums)
            });
            let mut sums: Vec<_> = sums.collect();
            sums.sort();
            sums
        });
        all.collect()
    }

    #[test]
    fn what_is_there_is_what_came_less_what_went() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.pftrace");
        let mut heaps = Heaps::create(&path, "memleak").expect("room");
        heaps.write(&report(&[(7, "a", [2, 20]), (7, "b", [1, 5])]));
        heaps.write(&report(&[(7, "a", [5, 50]), (7, "b", [1, 5])]));
        heaps.write(&report(&[(7, "a", [4, 41])]));
        heaps.write(&report(&[(7, "a", [4, 41]), (7, "b", [2, 3])]));
        heaps.finish().expect("room");
        let sums = |function: &str, sums| (function.to_owned(), sums);
        assert_eq!(
            read(&path),
            [
                vec![sums("a", [20, 0, 2, 0]), sums("b", [5, 0, 1, 0])],
                // Nothing has changed in b.
                vec![sums("a", [50, 0, 5, 0])],
                vec![sums("a", [50, 9, 5, 1]), sums("b", [5, 5, 1, 1])],
                // To the reader this is another stack: it would not accept sums that fall.
                vec![sums("b", [3, 0, 2, 0])],
            ]
        );
    }

    #[test]
    fn the_same_function_of_two_processes_is_two_stacks() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.pftrace");
        let mut heaps = Heaps::create(&path, "memleak").expect("room");
        heaps.write(&report(&[
            (7, "a", [2, 20]),
            (8, "a", [1, 5]),
            (7, "a", [1, 1]),
        ]));
        let sums = |sums| ("a".to_owned(), sums);
        assert_eq!(read(&path), [vec![sums([5, 0, 1, 0]), sums([21, 0, 3, 0])]]);
        let numbers: BTreeSet<u64> = heaps.stacks.values().map(|stack| stack.number).collect();
        assert_eq!(numbers, BTreeSet::from([1, 2]));
        // A stack without outstanding memory is dropped, and its number is not used again.
        heaps.write(&report(&[]));
        assert!(heaps.stacks.is_empty());
        heaps.write(&report(&[(8, "a", [1, 5])]));
        assert_eq!(
            heaps.stacks.values().next().map(|stack| stack.number),
            Some(3)
        );
    }
}
