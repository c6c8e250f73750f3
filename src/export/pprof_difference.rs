//! Difference of two profiles of one run, in pprof's format.
//!
//! Each profile has tables of its own. So each entry that the earlier profile refers to is looked up in the tables of
//! the later one, and added where it is missing.

use std::collections::HashMap;
use std::hash::Hash;

use crate::export::pprof_message::{
    Function, Label, Line, Location, LocationKey, Mapping, Profile, Sample,
};

/// Identity of a mapping: file name, build id and file offset. Addresses are not part of it: they are those of the
/// process that was seen first.
type MappingKey = (i64, i64, u64);
/// Identity of a sample: its locations and labels.
type SampleKey = (Vec<u64>, Vec<(i64, i64, i64)>);

/// Subtracts the earlier profile from the later one. Samples whose values are all 0 are omitted.
pub(super) fn subtract(earlier: &Profile, later: &Profile) -> Profile {
    let mut sums = Sums::of(later);
    let numbers = Numbers::translated(earlier, &mut sums.tables);
    for sample in &earlier.sample {
        sums.add(numbers.sample(sample), &sample.value, -1);
    }
    for sample in &later.sample {
        sums.add(sample.clone(), &sample.value, 1);
    }
    let mut samples = sums.samples;
    samples.retain(|sample| sample.value.iter().any(|&value| value != 0));
    Profile {
        sample: samples,
        duration_nanos: later.time_nanos - earlier.time_nanos,
        ..sums.tables.profile
    }
}

/// Sums of samples, one for each stack and its labels.
struct Sums {
    tables: Tables,
    samples: Vec<Sample>,
    places: HashMap<SampleKey, usize>,
}

impl Sums {
    fn of(later: &Profile) -> Self {
        Self {
            tables: Tables::of(later),
            samples: Vec::new(),
            places: HashMap::new(),
        }
    }

    fn add(&mut self, sample: Sample, values: &[i64], sign: i64) {
        let labels = sample.label.iter();
        let labels = labels.map(|label| (label.key, label.str, label.num));
        let key = (sample.location_id.clone(), labels.collect());
        let place = *self.places.entry(key).or_insert_with(|| {
            self.samples.push(Sample {
                value: vec![0; values.len()],
                ..sample
            });
            self.samples.len() - 1
        });
        for (sum, value) in self.samples[place].value.iter_mut().zip(values) {
            *sum = sum.saturating_add(sign * value);
        }
    }
}

/// Tables of the later profile, with an index of each by its entries' identity.
struct Tables {
    profile: Profile,
    strings: HashMap<String, i64>,
    mappings: HashMap<MappingKey, u64>,
    functions: HashMap<[i64; 3], u64>,
    /// Keys have the offset in the mapping: addresses differ between profiles.
    locations: HashMap<LocationKey, u64>,
}

impl Tables {
    fn of(later: &Profile) -> Self {
        let strings = later.string_table.iter().cloned().zip(0..);
        let mappings = later.mapping.iter();
        let functions = later.function.iter();
        let locations = later.location.iter();
        Self {
            strings: strings.collect(),
            mappings: mappings.map(|of| (mapping_key(of), of.id)).collect(),
            functions: functions
                .map(|of| ([of.name, of.system_name, of.filename], of.id))
                .collect(),
            locations: locations
                .map(|of| (location_key(of, later), of.id))
                .collect(),
            profile: Profile {
                sample: Vec::new(),
                ..later.clone()
            },
        }
    }

    fn string(&mut self, text: &str) -> i64 {
        let table = &mut self.profile.string_table;
        number_of(&mut self.strings, text.to_owned(), || {
            table.push(text.to_owned());
            table.len() as i64 - 1
        })
    }

    fn mapping(&mut self, mapping: Mapping) -> u64 {
        let table = &mut self.profile.mapping;
        number_of(&mut self.mappings, mapping_key(&mapping), || {
            let id = table.len() as u64 + 1;
            table.push(Mapping { id, ..mapping });
            id
        })
    }

    fn function(&mut self, function: Function) -> u64 {
        let table = &mut self.profile.function;
        number_of(
            &mut self.functions,
            [function.name, function.system_name, function.filename],
            || {
                let id = table.len() as u64 + 1;
                table.push(Function { id, ..function });
                id
            },
        )
    }

    /// Returns the id of the location at this offset in its mapping. Adds a location with these lines if it is
    /// missing.
    fn location(&mut self, mapping: u64, offset: u64, line: Vec<Line>) -> u64 {
        let address = offset.wrapping_add(start_of(mapping, &self.profile));
        let table = &mut self.profile.location;
        let key = LocationKey::new(mapping, offset, &line);
        number_of(&mut self.locations, key, || {
            let id = table.len() as u64 + 1;
            table.push(Location {
                id,
                mapping_id: mapping,
                address,
                line,
            });
            id
        })
    }
}

/// Numbers of the earlier profile's entries in the later profile's tables.
struct Numbers {
    strings: Vec<i64>,
    locations: HashMap<u64, u64>,
}

impl Numbers {
    fn translated(earlier: &Profile, tables: &mut Tables) -> Self {
        let strings = earlier.string_table.iter();
        let strings: Vec<i64> = strings.map(|text| tables.string(text)).collect();
        let string = |index: i64| strings.get(index as usize).copied().unwrap_or_default();
        let mut mappings = HashMap::from([(0, 0)]);
        for mapping in &earlier.mapping {
            let translated = tables.mapping(Mapping {
                filename: string(mapping.filename),
                build_id: string(mapping.build_id),
                ..*mapping
            });
            mappings.insert(mapping.id, translated);
        }
        let mut functions = HashMap::from([(0, 0)]);
        for function in &earlier.function {
            let translated = tables.function(Function {
                name: string(function.name),
                system_name: string(function.system_name),
                filename: string(function.filename),
                ..*function
            });
            functions.insert(function.id, translated);
        }
        let mut locations = HashMap::new();
        for location in &earlier.location {
            let mapping = mappings.get(&location.mapping_id);
            let mapping = mapping.copied().unwrap_or_default();
            let line = location.line.iter().map(|line| Line {
                function_id: functions
                    .get(&line.function_id)
                    .copied()
                    .unwrap_or_default(),
                ..*line
            });
            let offset = offset_of(location, earlier);
            let translated = tables.location(mapping, offset, line.collect());
            locations.insert(location.id, translated);
        }
        Self { strings, locations }
    }

    fn sample(&self, sample: &Sample) -> Sample {
        let string = |index: i64| self.strings.get(index as usize).copied();
        let label = |label: &Label| Label {
            key: string(label.key).unwrap_or_default(),
            str: string(label.str).unwrap_or_default(),
            num: label.num,
        };
        let locations = sample.location_id.iter();
        Sample {
            location_id: locations
                .map(|id| self.locations.get(id).copied().unwrap_or_default())
                .collect(),
            value: Vec::new(),
            label: sample.label.iter().map(label).collect(),
        }
    }
}

fn number_of<K: Eq + Hash, N: Copy>(
    numbers: &mut HashMap<K, N>,
    key: K,
    add: impl FnOnce() -> N,
) -> N {
    *numbers.entry(key).or_insert_with(add)
}

fn mapping_key(mapping: &Mapping) -> MappingKey {
    (mapping.filename, mapping.build_id, mapping.file_offset)
}

fn location_key(location: &Location, profile: &Profile) -> LocationKey {
    let offset = offset_of(location, profile);
    LocationKey::new(location.mapping_id, offset, &location.line)
}

fn offset_of(location: &Location, profile: &Profile) -> u64 {
    let start = start_of(location.mapping_id, profile);
    location.address.wrapping_sub(start)
}

/// Returns the start address of a mapping; 0 without a mapping.
fn start_of(mapping: u64, profile: &Profile) -> u64 {
    let place = (mapping as usize).checked_sub(1);
    let mapping = place.and_then(|place| profile.mapping.get(place));
    mapping.map_or(0, |mapping| mapping.memory_start)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes a profile of a program that is mapped from `start` on, with these stacks of one frame each.
    fn profile(start: u64, time_nanos: i64, stacks: &[(&str, i64)]) -> Profile {
        let mut profile = Profile {
            string_table: vec![String::new(), "/bin/p".into(), "comm".into(), "p".into()],
            mapping: vec![Mapping {
                id: 1,
                memory_start: start,
                filename: 1,
                ..Mapping::default()
            }],
            time_nanos,
            ..Profile::default()
        };
        for (id, (name, value)) in (1..).zip(stacks) {
            profile.string_table.push((*name).to_owned());
            profile.function.push(Function {
                id,
                name: profile.string_table.len() as i64 - 1,
                ..Function::default()
            });
            profile.location.push(Location {
                id,
                mapping_id: 1,
                address: start + name.len() as u64,
                line: vec![Line {
                    function_id: id,
                    ..Line::default()
                }],
            });
            profile.sample.push(Sample {
                location_id: vec![id],
                value: vec![*value],
                label: vec![Label {
                    key: 2,
                    str: 3,
                    num: 0,
                }],
            });
        }
        profile
    }

    #[test]
    fn what_is_gone_is_below_0_and_what_stayed_is_left_out() {
        let earlier = profile(0x1000, 5, &[("gone", 7), ("stays", 11), ("grows", 13)]);
        let later = profile(0x9000, 8, &[("grows", 30), ("new", 23), ("stays", 11)]);
        let between = subtract(&earlier, &later);
        let mut stacks = Vec::new();
        for sample in &between.sample {
            let location = &between.location[sample.location_id[0] as usize - 1];
            let function = &between.function[location.line[0].function_id as usize - 1];
            let name = between.string_table[function.name as usize].as_str();
            // Addresses are those of the later profile.
            assert_eq!(location.address, 0x9000 + name.len() as u64);
            assert_eq!(between.string_table[sample.label[0].str as usize], "p");
            stacks.push((name, sample.value[0]));
        }
        stacks.sort_unstable();
        assert_eq!(stacks, [("gone", -7), ("grows", 17), ("new", 23)]);
        assert_eq!((between.mapping.len(), between.duration_nanos), (1, 3));
    }

    #[test]
    fn nothing_has_changed_from_a_profile_to_itself() {
        let profile = profile(0x1000, 5, &[("a", 7), ("bb", 11)]);
        let between = subtract(&profile, &profile);
        assert!(between.sample.is_empty(), "{between:?}");
        assert_eq!(between.location.len(), 2);
    }
    /// Makes a profile of one interpreted function, with stacks of one frame each, by its lines.
    fn interpreted(lines: &[(i64, i64)]) -> Profile {
        let mut profile = Profile {
            string_table: vec![String::new(), "f".into()],
            function: vec![Function {
                id: 1,
                name: 1,
                ..Function::default()
            }],
            ..Profile::default()
        };
        for (id, &(line, value)) in (1..).zip(lines) {
            profile.location.push(Location {
                id,
                line: vec![Line {
                    function_id: 1,
                    line,
                }],
                ..Location::default()
            });
            profile.sample.push(Sample {
                location_id: vec![id],
                value: vec![value],
                ..Sample::default()
            });
        }
        profile
    }

    #[test]
    fn lines_of_an_interpreted_function_are_told_apart() {
        let earlier = interpreted(&[(10, 100), (20, 200), (30, 7)]);
        let later = interpreted(&[(20, 205), (10, 100)]);
        let between = subtract(&earlier, &later);
        let lines = between.sample.iter().map(|sample| {
            let location = &between.location[sample.location_id[0] as usize - 1];
            (location.line[0].line, sample.value[0])
        });
        let mut lines: Vec<_> = lines.collect();
        lines.sort_unstable();
        assert_eq!(lines, [(20, 5), (30, -7)]);
    }
}
