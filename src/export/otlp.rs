//! Profiles in OpenTelemetry's protocol, which is in development: `opentelemetry.proto.collector.profiles.v1development` as
//! the Python package opentelemetry-proto 1.45 has it.
//!
//! A request has one profile for each kind of value. All refer to tables, whose first entries are empty, as the protocol
//! demands.

use std::collections::HashMap;

use anyhow::Result;
use prost::Message;

use crate::export::pprof_message as pprof;
use crate::export::saved_profile;

/// Kind and unit of the period.
const PERIOD: [&str; 2] = ["memory", "bytes"];
/// Attribute of a mapping with the build id.
const BUILD_ID: &str = "process.executable.build_id.gnu";

/// Where and when a profile was recorded.
#[derive(Debug, Clone, Copy)]
pub struct Recorded<'a> {
    /// Attributes of the resource, by name.
    pub resource: &'a [(String, String)],
    /// Begin, in nanoseconds since 1970.
    pub from_ns: u64,
    /// Duration, in nanoseconds.
    pub duration_ns: u64,
}

/// Converts a profile in pprof's format, packed by gzip or not, into a request that exports it.
///
/// # Errors
/// If the profile cannot be read, or takes too much memory.
pub fn request(profile: &[u8], recorded: &Recorded<'_>) -> Result<Vec<u8>> {
    let profile = saved_profile::parse(profile)?;
    let mut tables = Tables::of(&profile);
    let profiles = tables.profiles(&profile, recorded);
    let attributes = recorded.resource.iter().map(|(key, value)| KeyValue {
        key: key.clone(),
        value: Some(AnyValue::of(value.clone())),
    });
    let request = Request {
        resource_profiles: vec![ResourceProfiles {
            resource: Some(Resource {
                attributes: attributes.collect(),
            }),
            scope_profiles: vec![ScopeProfiles {
                scope: Some(Scope {
                    name: env!("CARGO_PKG_NAME").into(),
                    version: env!("CARGO_PKG_VERSION").into(),
                }),
                profiles,
            }],
        }],
        dictionary: Some(tables.dictionary),
    };
    Ok(request.encode_to_vec())
}

/// Tables that are filled, with the places of what they have.
struct Tables {
    dictionary: Dictionary,
    strings: HashMap<String, i32>,
    /// Places of locations, by their ids in the other format.
    locations: HashMap<u64, i32>,
    stacks: HashMap<Vec<u64>, i32>,
}

/// Returns the place that the next entry of a table will have.
fn next<T>(table: &[T]) -> i32 {
    i32::try_from(table.len()).unwrap_or(i32::MAX)
}

impl Tables {
    fn of(profile: &pprof::Profile) -> Self {
        let mut tables = Self {
            dictionary: Dictionary {
                mappings: vec![Mapping::default()],
                locations: vec![Location::default()],
                functions: vec![Function::default()],
                links: vec![Link::default()],
                strings: vec![String::new()],
                attributes: vec![Attribute::default()],
                stacks: vec![Stack::default()],
            },
            strings: HashMap::from([(String::new(), 0)]),
            locations: HashMap::new(),
            stacks: HashMap::from([(Vec::new(), 0)]),
        };
        let mappings = tables.add_mappings(profile);
        let functions = tables.add_functions(profile);
        for location in &profile.location {
            let lines = location.line.iter().map(|line| Line {
                function: functions
                    .get(&line.function_id)
                    .copied()
                    .unwrap_or_default(),
                line: line.line,
            });
            let place = next(&tables.dictionary.locations);
            tables.dictionary.locations.push(Location {
                mapping: mappings
                    .get(&location.mapping_id)
                    .copied()
                    .unwrap_or_default(),
                address: location.address,
                lines: lines.collect(),
            });
            tables.locations.insert(location.id, place);
        }
        tables
    }

    /// Adds the mappings. Returns their places by id.
    fn add_mappings(&mut self, profile: &pprof::Profile) -> HashMap<u64, i32> {
        let mut places = HashMap::new();
        for mapping in &profile.mapping {
            let build_id = string(profile, mapping.build_id).to_owned();
            let mut attributes = Vec::new();
            if !build_id.is_empty() {
                attributes.push(next(&self.dictionary.attributes));
                let key = self.string(BUILD_ID);
                self.dictionary.attributes.push(Attribute {
                    key,
                    value: Some(AnyValue::of(build_id)),
                });
            }
            let filename = self.string(string(profile, mapping.filename));
            places.insert(mapping.id, next(&self.dictionary.mappings));
            self.dictionary.mappings.push(Mapping {
                start: mapping.memory_start,
                limit: mapping.memory_limit,
                offset: mapping.file_offset,
                filename,
                attributes,
            });
        }
        places
    }

    /// Adds the functions. Returns their places by id.
    fn add_functions(&mut self, profile: &pprof::Profile) -> HashMap<u64, i32> {
        let mut places = HashMap::new();
        for function in &profile.function {
            let entry = Function {
                name: self.string(string(profile, function.name)),
                system_name: self.string(string(profile, function.system_name)),
                filename: self.string(string(profile, function.filename)),
                start_line: function.start_line,
            };
            places.insert(function.id, next(&self.dictionary.functions));
            self.dictionary.functions.push(entry);
        }
        places
    }

    /// Returns the profiles, one for each kind of value.
    fn profiles(&mut self, profile: &pprof::Profile, recorded: &Recorded<'_>) -> Vec<Profile> {
        let period = PERIOD.map(|name| self.string(name));
        let period_type = Some(ValueType {
            kind: period[0],
            unit: period[1],
        });
        let mut profiles = Vec::new();
        for (place, kind) in profile.sample_type.iter().enumerate() {
            let sample_type = Some(ValueType {
                kind: self.string(string(profile, kind.kind)),
                unit: self.string(string(profile, kind.unit)),
            });
            let mut samples = Vec::new();
            for sample in &profile.sample {
                let value = sample.value.get(place).copied().unwrap_or_default();
                if value != 0 {
                    let stack = self.stack(&sample.location_id);
                    samples.push(Sample {
                        stack,
                        values: vec![value],
                    });
                }
            }
            profiles.push(Profile {
                sample_type,
                samples,
                time_ns: recorded.from_ns,
                duration_ns: recorded.duration_ns,
                period_type,
                // Receivers take a period of 0 for a profile of CPU time.
                period: profile.period.max(1),
            });
        }
        profiles
    }

    fn stack(&mut self, ids: &[u64]) -> i32 {
        if let Some(&place) = self.stacks.get(ids) {
            return place;
        }
        let place = next(&self.dictionary.stacks);
        let locations = ids
            .iter()
            .map(|id| self.locations.get(id).copied().unwrap_or_default());
        self.dictionary.stacks.push(Stack {
            locations: locations.collect(),
        });
        self.stacks.insert(ids.to_vec(), place);
        place
    }

    fn string(&mut self, text: &str) -> i32 {
        if let Some(&place) = self.strings.get(text) {
            return place;
        }
        let place = next(&self.dictionary.strings);
        self.dictionary.strings.push(text.to_owned());
        self.strings.insert(text.to_owned(), place);
        place
    }
}

fn string(profile: &pprof::Profile, place: i64) -> &str {
    let place = usize::try_from(place).ok();
    let string = place.and_then(|place| profile.string_table.get(place));
    string.map_or("", String::as_str)
}

/// `ExportProfilesServiceRequest`.
#[derive(Clone, PartialEq, Message)]
struct Request {
    #[prost(message, repeated, tag = "1")]
    resource_profiles: Vec<ResourceProfiles>,
    #[prost(message, optional, tag = "2")]
    dictionary: Option<Dictionary>,
}

#[derive(Clone, PartialEq, Message)]
struct ResourceProfiles {
    #[prost(message, optional, tag = "1")]
    resource: Option<Resource>,
    #[prost(message, repeated, tag = "2")]
    scope_profiles: Vec<ScopeProfiles>,
}

#[derive(Clone, PartialEq, Message)]
struct Resource {
    #[prost(message, repeated, tag = "1")]
    attributes: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct KeyValue {
    #[prost(string, tag = "1")]
    key: String,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct AnyValue {
    #[prost(string, optional, tag = "1")]
    string: Option<String>,
}

impl AnyValue {
    fn of(text: String) -> Self {
        Self { string: Some(text) }
    }
}

#[derive(Clone, PartialEq, Message)]
struct ScopeProfiles {
    #[prost(message, optional, tag = "1")]
    scope: Option<Scope>,
    #[prost(message, repeated, tag = "2")]
    profiles: Vec<Profile>,
}

/// `InstrumentationScope`.
#[derive(Clone, PartialEq, Message)]
struct Scope {
    #[prost(string, tag = "1")]
    name: String,
    #[prost(string, tag = "2")]
    version: String,
}

#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, optional, tag = "1")]
    sample_type: Option<ValueType>,
    #[prost(message, repeated, tag = "2")]
    samples: Vec<Sample>,
    #[prost(fixed64, tag = "3")]
    time_ns: u64,
    #[prost(uint64, tag = "4")]
    duration_ns: u64,
    #[prost(message, optional, tag = "5")]
    period_type: Option<ValueType>,
    #[prost(int64, tag = "6")]
    period: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct ValueType {
    #[prost(int32, tag = "1")]
    kind: i32,
    #[prost(int32, tag = "2")]
    unit: i32,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(int32, tag = "1")]
    stack: i32,
    #[prost(int64, repeated, tag = "4")]
    values: Vec<i64>,
}

/// `ProfilesDictionary`.
#[derive(Clone, PartialEq, Message)]
struct Dictionary {
    #[prost(message, repeated, tag = "1")]
    mappings: Vec<Mapping>,
    #[prost(message, repeated, tag = "2")]
    locations: Vec<Location>,
    #[prost(message, repeated, tag = "3")]
    functions: Vec<Function>,
    #[prost(message, repeated, tag = "4")]
    links: Vec<Link>,
    #[prost(string, repeated, tag = "5")]
    strings: Vec<String>,
    #[prost(message, repeated, tag = "6")]
    attributes: Vec<Attribute>,
    #[prost(message, repeated, tag = "7")]
    stacks: Vec<Stack>,
}

#[derive(Clone, PartialEq, Message)]
struct Mapping {
    #[prost(uint64, tag = "1")]
    start: u64,
    #[prost(uint64, tag = "2")]
    limit: u64,
    #[prost(uint64, tag = "3")]
    offset: u64,
    #[prost(int32, tag = "4")]
    filename: i32,
    #[prost(int32, repeated, tag = "5")]
    attributes: Vec<i32>,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(int32, tag = "1")]
    mapping: i32,
    #[prost(uint64, tag = "2")]
    address: u64,
    #[prost(message, repeated, tag = "3")]
    lines: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Line {
    #[prost(int32, tag = "1")]
    function: i32,
    #[prost(int64, tag = "2")]
    line: i64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Function {
    #[prost(int32, tag = "1")]
    name: i32,
    #[prost(int32, tag = "2")]
    system_name: i32,
    #[prost(int32, tag = "3")]
    filename: i32,
    #[prost(int64, tag = "4")]
    start_line: i64,
}

/// Link to a span, which our profiles do not have.
#[derive(Clone, Copy, PartialEq, Message)]
struct Link {}

#[derive(Clone, PartialEq, Message)]
struct Stack {
    #[prost(int32, repeated, tag = "1")]
    locations: Vec<i32>,
}

/// `KeyValueAndUnit`.
#[derive(Clone, PartialEq, Message)]
struct Attribute {
    #[prost(int32, tag = "1")]
    key: i32,
    #[prost(message, optional, tag = "2")]
    value: Option<AnyValue>,
}
