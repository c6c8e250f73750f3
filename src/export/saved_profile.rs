//! Profiles of earlier runs, which reports are compared with by the names of functions: names do not change when a
//! program is rebuilt, or mapped elsewhere.

use std::cell::Cell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::fs::File;
use std::io::{BufReader, Read};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use flate2::read::MultiGzDecoder;
use jiff::Zoned;
use prost::{Message, encoding};

use crate::export::folded;
use crate::export::pprof::Encoded;
use crate::export::pprof_message as message;
use crate::export::profile::{Profile, ValueType};
use crate::print::clock;
use crate::print::text;

/// Limit on the size of an unpacked profile, in bytes: ten times the size of 75,000 stacks of a compiler.
const MAX_BYTES: u64 = 256 << 20;
/// Limit on the memory that is built from a profile, in bytes. An entry of a table takes up to fifty times the two bytes
/// that it has in the file, and each use of a name is a copy.
const MAX_BUILT: usize = 1 << 30;
/// Limit on the size of an entry of a table in the file, in bytes: forty times a stack of 1000 frames. The memory of an
/// entry is counted after the entry is built.
const MAX_ENTRY: usize = 1 << 20;
/// First bytes of a gzip file.
const GZIP: [u8; 2] = [0x1f, 0x8b];

/// Stack as the names of its functions.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StackNames {
    /// The name of the process or thread, escaped; empty if the profile has none.
    pub comm: String,
    /// Names of the frames, innermost first, escaped; `[FILE]` for code without names. Names of kernel frames end in
    /// `_[k]`.
    pub frames: Vec<String>,
}

/// Numbers of a stack in the earlier profile and in the report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The stack.
    pub names: StackNames,
    /// The earlier profile's numbers, one for each value of the report.
    pub before: Vec<i64>,
    /// The report's numbers, one for each value of the report.
    pub now: Vec<i64>,
}

/// Profile that was read from a file.
#[derive(Debug, Clone)]
pub struct SavedProfile {
    file: String,
    until: Option<Zoned>,
    /// Kind and unit of each value.
    values: Vec<(String, String)>,
    stacks: HashMap<StackNames, Vec<i64>>,
}

impl SavedProfile {
    /// Reads a profile that `--export` of the tools wrote, or another program that writes the same values.
    ///
    /// # Errors
    /// If the file cannot be read, or is not a profile.
    pub fn read(path: &Path) -> Result<Self> {
        let file = text::escape_bytes(path.as_os_str().as_encoded_bytes());
        let read = || Self::from_reader(file.clone(), File::open(path)?);
        read().with_context(|| format!("failed to read the profile {file}"))
    }

    /// Reads a profile that is in memory.
    ///
    /// # Errors
    /// If the bytes are not a profile.
    pub fn parse(bytes: &[u8]) -> Result<Self> {
        Self::from_reader(String::new(), bytes).context("failed to read a profile")
    }

    fn from_reader(file: String, content: impl Read) -> Result<Self> {
        let built = Built::default();
        let profile = decode(&unpacked(content)?, &built)?;
        let tables = Tables::of(&profile, built);
        let kinds = profile.sample_type.iter();
        let kinds = kinds.map(|kind| Ok((tables.string(kind.kind)?, tables.string(kind.unit)?)));
        let until = jiff::Timestamp::from_nanosecond(profile.time_nanos.into());
        let until = until.ok().filter(|_| profile.time_nanos != 0);
        Ok(Self {
            file,
            until: until.map(|until| until.to_zoned(clock::time_zone())),
            values: kinds.collect::<Result<_>>()?,
            stacks: tables.stacks()?,
        })
    }

    /// Checks that reports of these values can be compared with the profile.
    ///
    /// # Errors
    /// If the profile lacks one of these values.
    pub fn expect(&self, values: &[ValueType]) -> Result<()> {
        self.places(values).map(drop)
    }

    /// Returns the profile's file, and when the profile was made.
    pub fn name(&self) -> String {
        match &self.until {
            Some(until) => format!("{} of {}", self.file, until.strftime("%Y-%m-%d %H:%M:%S")),
            None => self.file.clone(),
        }
    }

    /// Returns the file's name, escaped.
    pub fn file(&self) -> &str {
        &self.file
    }

    /// Returns the stacks that have most of one kind of value, the largest first, and the sum over all stacks. None
    /// if the profile has no such value.
    pub fn largest(&self, kind: &str, most: usize) -> Option<(Vec<(&StackNames, i64)>, i64)> {
        let place = self.values.iter().position(|(other, _)| other == kind)?;
        let value = |values: &[i64]| values.get(place).copied().unwrap_or_default();
        let mut stacks: Vec<(&StackNames, i64)> = self
            .stacks
            .iter()
            .map(|(names, values)| (names, value(values)))
            .filter(|(_, value)| *value > 0)
            .collect();
        let sum = stacks.iter().map(|(_, value)| value).sum();
        stacks.sort_by(|(names, value), (other_names, other)| {
            other.cmp(value).then(names.cmp(other_names))
        });
        stacks.truncate(most);
        Some((stacks, sum))
    }

    /// Returns the numbers before and now of each stack that the profile or the report has, in no order.
    ///
    /// # Errors
    /// If the profile lacks a value that the report has.
    pub fn changes(&self, report: &Profile) -> Result<Vec<Change>> {
        let places = self.places(&report.values)?;
        let report = Encoded::of(report);
        let mut now = Tables::of(&report.0, Built::unlimited()).stacks()?;
        let mut changes = Vec::new();
        for (names, values) in &self.stacks {
            let value = |&place: &usize| values.get(place).copied().unwrap_or_default();
            changes.push(Change {
                names: names.clone(),
                before: places.iter().map(value).collect(),
                now: now.remove(names).unwrap_or_else(|| vec![0; places.len()]),
            });
        }
        let new = now.into_iter().map(|(names, now)| Change {
            names,
            before: vec![0; places.len()],
            now,
        });
        changes.extend(new);
        Ok(changes)
    }

    /// Returns the indexes of these values among those of a stack.
    fn places(&self, values: &[ValueType]) -> Result<Vec<usize>> {
        let place = |value: &ValueType| {
            let found = self
                .values
                .iter()
                .position(|(kind, unit)| kind == value.kind && unit == value.unit);
            found.with_context(|| {
                let there: Vec<&str> = self.values.iter().map(|(kind, _)| &**kind).collect();
                format!(
                    "{} is of {}, not of {}",
                    self.file,
                    there.join(" and "),
                    value.kind
                )
            })
        };
        values.iter().map(place).collect()
    }
}

/// Reads a file, and unpacks it if it is gzipped.
fn unpacked(content: impl Read) -> Result<Vec<u8>> {
    let mut file = BufReader::new(content);
    let mut magic = Vec::new();
    file.by_ref().take(2).read_to_end(&mut magic)?;
    let is_packed = magic == GZIP;
    let all = magic.chain(file);
    let mut bytes = Vec::new();
    let read = if is_packed {
        let mut unpacked = MultiGzDecoder::new(all).take(MAX_BYTES);
        unpacked.read_to_end(&mut bytes)
    } else {
        all.take(MAX_BYTES).read_to_end(&mut bytes)
    };
    read.context("it is no whole gzip file")?;
    ensure!(
        (bytes.len() as u64) < MAX_BYTES,
        "it is larger than 256 MiB"
    );
    Ok(bytes)
}

/// Reads the message of a profile, packed by gzip or not.
pub(super) fn parse(bytes: &[u8]) -> Result<message::Profile> {
    decode(&unpacked(bytes)?, &Built::default())
}

/// Decodes a profile field by field, and stops when too much memory is built.
fn decode(mut bytes: &[u8], built: &Built) -> Result<message::Profile> {
    const WRONG: &str = "it is no profile of pprof's format";
    let mut profile = message::Profile::default();
    built.add(bytes.len())?;
    while !bytes.is_empty() {
        let before = bytes.len();
        let (tag, wire_type) = encoding::decode_key(&mut bytes).ok().context(WRONG)?;
        if wire_type == encoding::WireType::LengthDelimited {
            let length = encoding::decode_varint(&mut &*bytes).ok().context(WRONG)?;
            ensure!(
                length <= MAX_ENTRY as u64,
                "it is damaged: an entry is too large"
            );
        }
        let context = encoding::DecodeContext::default();
        let merged = profile.merge_field(tag, wire_type, &mut bytes, context);
        merged.ok().context(WRONG)?;
        built.add(entry_bytes(&profile, tag) + (before - bytes.len()))?;
    }
    ensure!(!profile.sample_type.is_empty(), WRONG);
    Ok(profile)
}

/// Returns the memory that the last entry of the table with this tag takes, in bytes, with its place in an index.
fn entry_bytes(profile: &message::Profile, tag: u32) -> usize {
    /// Bytes of an index per entry. A table grows by doubling, and so is up to half empty.
    const INDEX: usize = 4 * size_of::<(u64, usize)>();
    fn table<T>(entries: &[T]) -> usize {
        2 * size_of::<T>() * usize::from(!entries.is_empty())
    }
    match tag {
        2 => {
            let of = |sample: &message::Sample| {
                (sample.location_id.capacity() + sample.value.capacity()) * size_of::<u64>()
                    + sample.label.capacity() * size_of::<message::Label>()
            };
            table(&profile.sample) + profile.sample.last().map_or(0, of)
        }
        3 => table(&profile.mapping) + INDEX,
        4 => {
            let of = |location: &message::Location| {
                location.line.capacity() * size_of::<message::Line>()
            };
            table(&profile.location) + profile.location.last().map_or(0, of) + INDEX
        }
        5 => table(&profile.function) + INDEX,
        _ => 2 * size_of::<String>(),
    }
}

/// Memory that was built from a profile, in bytes.
#[derive(Debug)]
struct Built {
    bytes: Cell<usize>,
    limit: usize,
}

impl Default for Built {
    fn default() -> Self {
        Self {
            bytes: Cell::new(0),
            limit: MAX_BUILT,
        }
    }
}

impl Built {
    /// Memory for a profile of our own.
    fn unlimited() -> Self {
        Self {
            limit: usize::MAX,
            ..Self::default()
        }
    }

    fn add(&self, bytes: usize) -> Result<()> {
        let sum = self.bytes.get().saturating_add(bytes);
        self.bytes.set(sum);
        ensure!(
            sum <= self.limit,
            "reading it takes more than {} MiB of memory",
            self.limit >> 20
        );
        Ok(())
    }
}

/// Tables of a profile, with an index of each by the ids of its entries.
struct Tables<'a> {
    profile: &'a message::Profile,
    built: Built,
    locations: HashMap<u64, &'a message::Location>,
    functions: HashMap<u64, &'a message::Function>,
    mappings: HashMap<u64, &'a message::Mapping>,
}

impl<'a> Tables<'a> {
    fn of(profile: &'a message::Profile, built: Built) -> Self {
        let locations = profile.location.iter();
        let functions = profile.function.iter();
        let mappings = profile.mapping.iter();
        Self {
            profile,
            built,
            locations: locations.map(|entry| (entry.id, entry)).collect(),
            functions: functions.map(|entry| (entry.id, entry)).collect(),
            mappings: mappings.map(|entry| (entry.id, entry)).collect(),
        }
    }

    fn string(&self, index: i64) -> Result<String> {
        let strings = &self.profile.string_table;
        let string = usize::try_from(index).ok().and_then(|at| strings.get(at));
        let string = string.context("it is damaged: a string is missing")?;
        let shown = text::display_name(string);
        self.built.add(2 * size_of::<String>() + shown.capacity())?;
        Ok(shown)
    }

    /// Sums up the values of each stack, over all processes and addresses.
    fn stacks(&self) -> Result<HashMap<StackNames, Vec<i64>>> {
        let mut stacks: HashMap<StackNames, Vec<i64>> = HashMap::new();
        for sample in &self.profile.sample {
            let before = self.built.bytes.get();
            match stacks.entry(self.names(sample)?) {
                Entry::Vacant(new) => {
                    // The entry is in a table that is up to half empty.
                    let entry = 2 * size_of::<(StackNames, Vec<i64>)>();
                    self.built.add(entry + size_of_val(&*sample.value))?;
                    new.insert(sample.value.clone());
                }
                Entry::Occupied(mut sums) => {
                    // Its names are dropped.
                    self.built.bytes.set(before);
                    for (sum, value) in sums.get_mut().iter_mut().zip(&sample.value) {
                        *sum = sum.saturating_add(*value);
                    }
                }
            }
        }
        Ok(stacks)
    }

    fn names(&self, sample: &message::Sample) -> Result<StackNames> {
        let mut comm = String::new();
        for label in &sample.label {
            if self.string(label.key)? == "comm" {
                comm = self.string(label.str)?;
            }
        }
        let mut frames = Vec::new();
        for id in &sample.location_id {
            let location = self.locations.get(id).copied();
            let location = location.context("it is damaged: a location is missing")?;
            self.frames(location, &mut frames)?;
        }
        Ok(StackNames { comm, frames })
    }

    /// Adds the names of the functions at a location to `frames`. All but the last function are inlined.
    fn frames(&self, location: &message::Location, frames: &mut Vec<String>) -> Result<()> {
        let mapping = self.mappings.get(&location.mapping_id).copied();
        let file = mapping.map(|mapping| self.string(mapping.filename));
        let file = file.transpose()?.unwrap_or_default();
        let mark = if file.starts_with('[') && location.address > i64::MAX as u64 {
            folded::KERNEL_MARK
        } else {
            ""
        };
        for line in &location.line {
            let function = self.functions.get(&line.function_id).copied();
            let function = function.context("it is damaged: a function is missing")?;
            let name = self.string(function.name)?;
            // In flame graphs, functions without a name are their module.
            let place = name.rsplit_once("+0x").map(|(module, _)| module);
            match place.filter(|&module| module == module_of(&file)) {
                Some(module) => frames.push(format!("[{module}]{mark}")),
                None => frames.push(name + mark),
            }
        }
        if location.line.is_empty() {
            frames.push(format!("[{}]{mark}", module_of(&file)));
        }
        Ok(())
    }
}

/// Returns the module that a mapping's file is in stacks.
fn module_of(file: &str) -> &str {
    let name = file.rsplit('/').next().filter(|name| !name.is_empty());
    name.unwrap_or("unknown").trim_matches(['[', ']'])
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;
    use crate::export::profile::Sample;
    use crate::stacks::named::{Frame, NamedStack, Part};

    const VALUES: [ValueType; 2] = [
        ValueType::count("inuse_objects", "allocations"),
        ValueType::bytes("inuse_space"),
    ];

    fn sample(names: &[&str], address: u64, values: [u64; 2]) -> Sample {
        let frame = |name: &&str| Frame {
            address,
            instruction: address,
            symbol: Some(((*name).into(), address)),
            ..Frame::default()
        };
        let user = Part {
            frames: names.iter().map(frame).collect(),
            truncated: None,
        };
        Sample {
            stack: NamedStack {
                pid: address as u32,
                comm: "demo".into(),
                user: Some(user),
                ..NamedStack::default()
            },
            values: values.to_vec(),
        }
    }

    fn profile(samples: Vec<Sample>) -> Profile {
        Profile {
            tool: "memleak",
            target: "pid 1".into(),
            subject: "outstanding allocations".into(),
            since: clock::now(),
            until: clock::now(),
            values: VALUES.to_vec(),
            main_value: 1,
            by_thread: false,
            samples,
            remarks: Vec::new(),
        }
    }

    fn written(profile: &Profile) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let mut out = file.as_file();
        Encoded::of(profile).write(&mut out).expect("room");
        file
    }

    #[test]
    fn stacks_are_the_same_by_their_names() {
        // Built anew: other addresses, in two processes.
        let earlier = profile(vec![
            sample(&["leak", "main"], 0x1000, [1, 10]),
            sample(&["leak", "main"], 0x2000, [2, 20]),
            sample(&["gone", "main"], 0x1500, [4, 40]),
        ]);
        let now = profile(vec![
            sample(&["leak", "main"], 0x9000, [7, 70]),
            sample(&["new", "main"], 0x9500, [5, 50]),
        ]);
        let earlier = SavedProfile::read(written(&earlier).path()).expect("a profile");
        let mut changes = earlier.changes(&now).expect("comparable");
        changes.sort_by(|one, other| one.names.cmp(&other.names));
        let found: Vec<_> = changes
            .iter()
            .map(|change| (&*change.names.frames[0], &*change.before, &*change.now))
            .collect();
        assert_eq!(
            found,
            [
                ("gone", &[4, 40][..], &[0, 0][..]),
                ("leak", &[3, 30], &[7, 70]),
                ("new", &[0, 0], &[5, 50]),
            ]
        );
        assert!(changes.iter().all(|change| change.names.comm == "demo"));
    }

    #[test]
    fn the_largest_stacks_come_first_and_the_sum_is_of_all() {
        let profile = profile(vec![
            sample(&["small", "main"], 0x1000, [9, 10]),
            sample(&["large", "main"], 0x2000, [1, 200]),
            sample(&["none", "main"], 0x2500, [0, 0]),
            sample(&["middle", "main"], 0x3000, [2, 30]),
        ]);
        let read = SavedProfile::read(written(&profile).path()).expect("a profile");
        let (stacks, sum) = read.largest("inuse_space", 2).expect("the value is there");
        let stacks: Vec<_> = stacks
            .iter()
            .map(|(names, value)| (&*names.frames[0], *value))
            .collect();
        assert_eq!((stacks, sum), (vec![("large", 200), ("middle", 30)], 240));
        let (all, sum) = read
            .largest("inuse_objects", 9)
            .expect("the value is there");
        assert_eq!(
            (all.len(), all[0].0.frames[0].as_str(), sum),
            (3, "small", 12)
        );
        assert_eq!(read.largest("delay", 9), None);
    }

    #[test]
    fn what_is_no_such_profile_is_refused_with_the_reason() {
        let path = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().expect("a file");
            file.write_all(bytes).expect("room");
            file
        };
        let refusal = |file: &tempfile::NamedTempFile| {
            format!("{:#}", SavedProfile::read(file.path()).expect_err("wrong"))
        };
        for bytes in [&b""[..], b"text\n", b"\x0a\xff"] {
            let refusal = refusal(&path(bytes));
            assert!(
                refusal.ends_with("it is no profile of pprof's format"),
                "{refusal}"
            );
        }
        let whole = written(&profile(vec![sample(&["f"], 1, [1, 1])]));
        let bytes = std::fs::read(whole.path()).expect("a file");
        let cut = refusal(&path(&bytes[..bytes.len() / 2]));
        assert!(cut.contains("no whole gzip file"), "{cut}");
        let earlier = SavedProfile::read(whole.path()).expect("a profile");
        let other = earlier
            .expect(&[ValueType::bytes("alloc_space")])
            .expect_err("other values");
        let other = other.to_string();
        assert!(
            other.ends_with(" is of inuse_objects and inuse_space, not of alloc_space"),
            "{other}"
        );
    }

    #[test]
    fn numbers_out_of_tables_are_no_panic() {
        let whole = Encoded::of(&profile(vec![sample(&["f"], 1, [1, 1])])).0;
        let mut damaged = whole.clone();
        damaged.sample[0].location_id = vec![77];
        assert!(Tables::of(&damaged, Built::default()).stacks().is_err());
        let mut damaged = whole.clone();
        damaged.function[0].name = i64::MIN;
        assert!(Tables::of(&damaged, Built::default()).stacks().is_err());
        let mut damaged = whole;
        damaged.location[0].line[0].function_id = 9;
        assert!(Tables::of(&damaged, Built::default()).stacks().is_err());
    }

    #[test]
    fn what_is_built_is_limited_not_what_is_read() {
        let built = || Built {
            limit: 1 << 20,
            ..Built::default()
        };
        let refused = |bytes: &[u8]| {
            let error = decode(bytes, &built()).expect_err("too much");
            error.to_string()
        };
        // Empty samples, strings, locations and functions: twenty to two hundred bytes are built of the two of each.
        for tag in [0x12, 0x32, 0x22, 0x2a] {
            let refused = refused(&[tag, 0].repeat(30_000));
            assert!(
                refused.contains("takes more than 1 MiB"),
                "{tag}: {refused}"
            );
        }
        let mut large = vec![0x32, 0xff, 0xff, 0xff, 0x7f];
        large.resize(64, 0);
        assert!(refused(&large).contains("an entry is too large"));

        // A name of 4000 bytes in each of 1000 frames: a few kilobytes.
        let name = "f".repeat(4000);
        let stack = profile(vec![sample(&vec![&*name; 1000], 1, [1, 1])]);
        let encoded = Encoded::of(&stack);
        let bytes = encoded.0.encode_to_vec();
        assert!(bytes.len() < 64 << 10, "{}", bytes.len());
        let tables = Tables::of(&encoded.0, built());
        let error = tables.stacks().expect_err("too much").to_string();
        assert!(error.contains("takes more than 1 MiB"), "{error}");
    }
}
