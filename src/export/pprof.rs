//! Profiles in pprof's format, which `go tool pprof`, Pyroscope, Parca, speedscope, Perfetto and
//! Grafana read: one message of google/pprof's `proto/profile.proto`, compressed.
//!
//! Stacks of one program that runs several times, at other addresses each time, share locations: the address of a
//! location is the one at which its code was first seen.

use std::collections::{HashMap, HashSet};
use std::env;
use std::io::Write;

use anyhow::{Context, Result};
use flate2::Compression;
use flate2::write::GzEncoder;
use jiff::Zoned;
use prost::Message;

use crate::code::lines::SourceLine;
use crate::export::pprof_difference as difference;
use crate::export::pprof_message as message;
use crate::export::pprof_text;
use crate::export::profile::{Profile, Sample};
use crate::print::{identity, text};
use crate::process::address_space::MappedCode;
use crate::process::container::CgroupInfo;
use crate::stacks::named::{Frame, NamedStack, Part};

/// Start of the kernel's half of the address space.
const KERNEL_START: u64 = 1 << 63;

/// Writes the profile with all its values.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(profile: &Profile, out: &mut dyn Write) -> Result<()> {
    Encoded::of(profile).write(out)
}

/// Profile in pprof's format: text and numbers alone, so that another thread can compress it.
#[derive(Debug, Clone)]
pub struct Encoded(pub(super) message::Profile);

impl Encoded {
    /// Encodes the profile with all its values.
    pub fn of(profile: &Profile) -> Self {
        Self(Builder::build(profile))
    }

    /// Subtracts an earlier profile of the same run from this one. The numbers of a stack are below 0 where it has
    /// less than before. Stacks that have not changed are omitted.
    pub fn since(&self, earlier: &Self) -> Self {
        Self(difference::subtract(&earlier.0, &self.0))
    }

    /// Writes the profile as text, as Go programs do. Returns false, and writes nothing, if the profile is not of a
    /// heap.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub(crate) fn write_text(&self, out: &mut dyn Write) -> Result<bool> {
        pprof_text::write(&self.0, out).context("failed to write")
    }

    /// Writes the profile, compressed.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn write(&self, out: &mut dyn Write) -> Result<()> {
        let mut gzip = GzEncoder::new(out, Compression::default());
        gzip.write_all(&self.0.encode_to_vec())
            .context("failed to write")?;
        gzip.finish().context("failed to write")?;
        Ok(())
    }
}

/// Message whose tables have each entry once. Ids of mappings, functions and locations begin at 1.
#[derive(Default)]
struct Builder {
    message: message::Profile,
    strings: HashMap<String, i64>,
    mappings: HashMap<Code, u64>,
    functions: HashMap<[i64; 3], u64>,
    locations: HashMap<message::LocationKey, u64>,
    /// Cgroups and containers by process.
    cgroups: HashMap<u32, CgroupInfo>,
    /// Whether a stack's name is that of a thread, not of its process.
    by_thread: bool,
}

/// Identity of a mapping: a part of a file by the file's number and offset, or the kernel or one of its modules.
#[derive(PartialEq, Eq, Hash)]
enum Code {
    File {
        number: u32,
        offset: u64,
    },
    Kernel(String),
    /// None, in a profile of several programs.
    SeveralPrograms,
}

impl Builder {
    fn build(profile: &Profile) -> message::Profile {
        let mut builder = Self {
            by_thread: profile.by_thread,
            ..Self::default()
        };
        builder.string("");
        // pprof takes the first mapping for the main program.
        match programs(profile)[..] {
            [] => {}
            [program] => drop(builder.mapping_of(program)),
            _ => drop(builder.add_mapping(Code::SeveralPrograms, message::Mapping::default())),
        }
        for sample in profile.samples.iter().filter(|sample| !is_empty(sample)) {
            builder.sample(sample);
        }
        builder.head(profile);
        builder.message
    }

    fn head(&mut self, profile: &Profile) {
        let types: Vec<_> = profile
            .values
            .iter()
            .map(|value| self.value_type(value.kind, value.unit))
            .collect();
        if let Some(main) = profile.values.get(profile.main_value) {
            self.message.default_sample_type = self.string(main.kind);
            self.message.period_type = Some(self.value_type("space", "bytes"));
        }
        self.message.sample_type = types;
        self.message.period = 1;
        let nanos = |time: &Zoned| time.timestamp().as_nanosecond();
        let (since, until) = (nanos(&profile.since), nanos(&profile.until));
        self.message.time_nanos = i64::try_from(until).unwrap_or_default();
        self.message.duration_nanos = i64::try_from(until - since).unwrap_or_default();
        let what = format!(
            "{} {}: {}",
            profile.tool,
            env!("CARGO_PKG_VERSION"),
            profile.contents()
        );
        let machine = format!("host: {}", identity::host_name());
        let command = format!("command: {}", command_line());
        let comments = [&what, &machine, &command]
            .into_iter()
            .chain(&profile.remarks);
        self.message.comment = comments.map(|comment| self.string(comment)).collect();
    }

    fn value_type(&mut self, kind: &str, unit: &str) -> message::ValueType {
        message::ValueType {
            kind: self.string(kind),
            unit: self.string(unit),
        }
    }

    fn sample(&mut self, sample: &Sample) {
        let NamedStack {
            pid,
            comm,
            user,
            kernel,
            ..
        } = &sample.stack;
        let mut locations = Vec::new();
        for part in [kernel, user].into_iter().flatten() {
            self.part(part, &mut locations);
        }
        let mut labels = Vec::new();
        if *pid != 0 {
            labels.push(message::Label {
                key: self.string("pid"),
                num: (*pid).into(),
                ..message::Label::default()
            });
        }
        labels.push(self.label("comm", comm));
        if self.by_thread {
            labels.push(self.label("thread", comm));
        }
        for (key, value) in self.groups(*pid) {
            labels.push(self.label(key, &value));
        }
        let values = sample.values.iter();
        self.message.sample.push(message::Sample {
            location_id: locations,
            value: values
                .map(|&value| i64::try_from(value).unwrap_or(i64::MAX))
                .collect(),
            label: labels,
        });
    }

    fn label(&mut self, key: &str, value: &str) -> message::Label {
        message::Label {
            key: self.string(key),
            str: self.string(value),
            ..message::Label::default()
        }
    }

    /// Returns the labels of the cgroup that a process is in now: its path, container and systemd unit. There are none
    /// for the kernel's own, and for a process that has exited.
    fn groups(&mut self, pid: u32) -> Vec<(&'static str, String)> {
        let group = self
            .cgroups
            .entry(pid)
            .or_insert_with(|| CgroupInfo::of_process(pid));
        let unit = group.unit();
        let service = unit.and_then(|unit| unit.strip_suffix(".service"));
        let labels = [
            ("cgroup", group.cgroup.as_deref()),
            ("container", group.container_id.as_deref()),
            ("unit", unit),
            ("service", service),
        ];
        let known = labels
            .into_iter()
            .filter_map(|(key, value)| Some((key, value?.to_owned())));
        known.collect()
    }

    fn part(&mut self, part: &Part, locations: &mut Vec<u64>) {
        for frame in &part.frames {
            let location = self.frame(frame);
            locations.push(location);
        }
        if let Some(missing) = part.missing() {
            let line = self.line([&missing, ""], None);
            locations.push(self.location(0, 0, vec![line]));
        }
    }

    fn frame(&mut self, frame: &Frame) -> u64 {
        let (mapping, address) = match &frame.code {
            Some(code) => {
                let mapping = self.mapping_of(code);
                let start = self.start_of(mapping);
                (mapping, frame.instruction - code.range.start + start)
            }
            None if frame.is_kernel() => {
                let module = frame.module.as_ref().map_or("kernel", |(name, _)| name);
                (self.kernel_mapping(module), frame.instruction)
            }
            // Function and line are all that identifies an interpreted frame.
            None if frame.is_interpreted() => (0, 0),
            None => (0, frame.instruction),
        };
        let lines = self.lines(frame);
        if !frame.source.lines.is_empty()
            && let Some(index) = (mapping as usize).checked_sub(1)
            && let Some(mapping) = self.message.mapping.get_mut(index)
        {
            mapping.has_filenames = true;
            mapping.has_line_numbers = true;
            mapping.has_inline_frames = true;
        }
        self.location(mapping, address, lines)
    }

    /// Returns the lines of the functions that a frame's instruction is in. All but the last function are inlined.
    fn lines(&mut self, frame: &Frame) -> Vec<message::Line> {
        let mut lines = Vec::new();
        for call in frame.source.inlined() {
            let name = call.function.as_deref().unwrap_or("[unknown]");
            lines.push(self.line([name, ""], Some(call)));
        }
        let own = frame.source.lines.last();
        let symbol = frame.symbol.as_ref().map(|(name, _)| &**name);
        let place = frame
            .module
            .as_ref()
            .map(|(module, offset)| format!("{module}+{offset:#x}"));
        let name = symbol
            .or_else(|| own?.function.as_deref())
            .or(place.as_deref());
        // pprof would shorten a name that is equal to its mangled form, as it demangles such names itself.
        let mangled = frame.mangled.as_ref().map(|name| text::display_name(name));
        if let Some(name) = name {
            lines.push(self.line([name, mangled.as_deref().unwrap_or_default()], own));
        }
        lines
    }

    /// Returns the line of a function by its name and its mangled name, which is empty if there is none.
    fn line(&mut self, names: [&str; 2], place: Option<&SourceLine>) -> message::Line {
        let file = place.and_then(|place| place.file.as_deref());
        message::Line {
            function_id: self.function(names, file.unwrap_or("")),
            line: place.map_or(0, |place| place.line.into()),
        }
    }

    fn location(&mut self, mapping: u64, address: u64, line: Vec<message::Line>) -> u64 {
        let locations = &mut self.message.location;
        let key = message::LocationKey::new(mapping, address, &line);
        *self.locations.entry(key).or_insert_with(|| {
            let id = locations.len() as u64 + 1;
            locations.push(message::Location {
                id,
                mapping_id: mapping,
                address,
                line,
            });
            id
        })
    }

    fn function(&mut self, [name, mangled]: [&str; 2], file: &str) -> u64 {
        let [name, system_name, filename] = [name, mangled, file].map(|text| self.string(text));
        let functions = &mut self.message.function;
        *self
            .functions
            .entry([name, system_name, filename])
            .or_insert_with(|| {
                let id = functions.len() as u64 + 1;
                functions.push(message::Function {
                    id,
                    name,
                    system_name,
                    filename,
                    start_line: 0,
                });
                id
            })
    }

    fn mapping_of(&mut self, code: &MappedCode) -> u64 {
        let key = Code::File {
            number: code.file.number,
            offset: code.file_offset,
        };
        if let Some(&id) = self.mappings.get(&key) {
            return id;
        }
        let path = code.file.path();
        let build_id = code.file.build_id().unwrap_or_default();
        let build_id = text::hex(build_id);
        let mapping = message::Mapping {
            memory_start: code.range.start,
            memory_limit: code.range.end,
            file_offset: code.file_offset,
            filename: self.string(&path),
            build_id: self.string(&build_id),
            has_functions: true,
            ..message::Mapping::default()
        };
        self.add_mapping(key, mapping)
    }

    fn kernel_mapping(&mut self, module: &str) -> u64 {
        let key = Code::Kernel(module.to_owned());
        if let Some(&id) = self.mappings.get(&key) {
            return id;
        }
        let mapping = message::Mapping {
            memory_start: KERNEL_START,
            memory_limit: u64::MAX,
            filename: self.string(&format!("[{module}]")),
            has_functions: true,
            ..message::Mapping::default()
        };
        self.add_mapping(key, mapping)
    }

    fn add_mapping(&mut self, key: Code, mapping: message::Mapping) -> u64 {
        let id = self.message.mapping.len() as u64 + 1;
        self.message
            .mapping
            .push(message::Mapping { id, ..mapping });
        self.mappings.insert(key, id);
        id
    }

    fn start_of(&self, mapping: u64) -> u64 {
        let mapping = self.message.mapping.get(mapping as usize - 1);
        mapping.map_or(0, |mapping| mapping.memory_start)
    }

    fn string(&mut self, text: &str) -> i64 {
        if let Some(&index) = self.strings.get(text) {
            return index;
        }
        let index = self.message.string_table.len() as i64;
        self.message.string_table.push(text.to_owned());
        self.strings.insert(text.to_owned(), index);
        index
    }
}

fn is_empty(sample: &Sample) -> bool {
    sample.values.iter().all(|&value| value == 0)
}

/// Returns the programs that the processes of a profile run, each once.
fn programs(profile: &Profile) -> Vec<&MappedCode> {
    let samples = profile.samples.iter().filter(|sample| !is_empty(sample));
    let programs = samples.filter_map(|sample| sample.stack.program.as_ref());
    let mut seen = HashSet::new();
    programs
        .filter(|program| seen.insert(program.file.number))
        .collect()
}

/// Returns the command line of this tool, quoted for a shell, and escaped.
fn command_line() -> String {
    let words = env::args_os().map(|word| word.to_string_lossy().into_owned());
    let line = shell_words::join(words);
    text::escape(&line).into_owned()
}

#[cfg(test)]
mod tests;
