//! Heap profiles as text, in the format of Go programs at `/debug/pprof/heap?debug=1`: for people, and for tools that
//! read the older format.
//!
//! ```text
//! heap profile: 1009: 31279 [1009: 31279] @ heap/2
//! 1009: 31279 [1009: 31279] @ 0x4018ce 0x40195e
//! #    0x4018ce    inner    /usr/src/lines/inner.h:1009
//! #    0x4018ce    allocate    /usr/src/lines/lines.c:3006
//! #    0x40195e    main    /usr/src/lines/lines.c:4011
//! ```
//!
//! The numbers are the objects and bytes in use, and in brackets the objects and bytes allocated. Half of the number
//! after `heap/` is the mean distance between samples: 1, as all numbers are complete or scaled already.

use std::cmp::Reverse;
use std::io::{self, Write};

use crate::export::pprof_message::{Location, Profile, Sample};

/// Indexes of two numbers among a sample's values.
#[derive(Debug, Clone, Copy)]
struct Pair {
    objects: usize,
    bytes: usize,
}

/// Writes a profile that has numbers of a heap. Returns false, and writes nothing, for any other profile.
pub(super) fn write(profile: &Profile, out: &mut dyn Write) -> io::Result<bool> {
    let in_use = pair(profile, "inuse");
    let allocated = pair(profile, "alloc");
    if in_use.or(allocated).is_none() {
        return Ok(false);
    }
    // Without numbers of allocations, the numbers in use serve for both: whatever is in use was allocated. Without
    // numbers in use, these are 0.
    let numbers = |sample: &Sample| [in_use, allocated.or(in_use)].map(|pair| of(pair, sample));
    let line = |[[objects, bytes], [all, all_bytes]]: [[i64; 2]; 2]| {
        format!("{objects}: {bytes} [{all}: {all_bytes}] @")
    };
    let mut samples: Vec<&Sample> = profile.sample.iter().collect();
    samples.sort_by_key(|sample| Reverse(numbers(sample).map(|[_, bytes]| bytes)));
    let total = samples.iter().fold([[0; 2]; 2], |mut total, sample| {
        let numbers = numbers(sample);
        for (sum, number) in total.iter_mut().flatten().zip(numbers.iter().flatten()) {
            *sum += number;
        }
        total
    });
    writeln!(out, "heap profile: {} heap/2", line(total))?;
    for sample in samples {
        let locations = sample
            .location_id
            .iter()
            .filter_map(|&id| location(profile, id));
        let locations: Vec<&Location> = locations.collect();
        write!(out, "{}", line(numbers(sample)))?;
        for location in &locations {
            write!(out, " {:#x}", location.address)?;
        }
        writeln!(out)?;
        for location in &locations {
            stack_lines(profile, location, out)?;
        }
        writeln!(out)?;
    }
    for comment in &profile.comment {
        writeln!(out, "# {}", string(profile, *comment))?;
    }
    Ok(true)
}

/// Writes a line for each function at a location. All but the last function are inlined.
fn stack_lines(profile: &Profile, location: &Location, out: &mut dyn Write) -> io::Result<()> {
    let address = location.address;
    if location.line.is_empty() {
        return writeln!(out, "#\t{address:#x}");
    }
    for line in &location.line {
        let function = (line.function_id as usize).checked_sub(1);
        let function = function.and_then(|at| profile.function.get(at));
        let name = function.map_or("", |function| string(profile, function.name));
        write!(out, "#\t{address:#x}\t{name}")?;
        match function.map_or("", |function| string(profile, function.filename)) {
            "" => writeln!(out)?,
            file => writeln!(out, "\t{file}:{}", line.line)?,
        }
    }
    Ok(())
}

/// Returns the indexes of the objects and bytes of a kind, such as `inuse`. None if the profile lacks either.
fn pair(profile: &Profile, kind: &str) -> Option<Pair> {
    let at = |unit: &str| {
        let name = format!("{kind}_{unit}");
        let mut types = profile.sample_type.iter();
        types.position(|value| string(profile, value.kind) == name)
    };
    Some(Pair {
        objects: at("objects")?,
        bytes: at("space")?,
    })
}

/// Returns the two numbers of a sample; 0 for a missing one.
fn of(pair: Option<Pair>, sample: &Sample) -> [i64; 2] {
    pair.map_or([0; 2], |pair| {
        [pair.objects, pair.bytes].map(|at| sample.value.get(at).copied().unwrap_or_default())
    })
}

fn location(profile: &Profile, id: u64) -> Option<&Location> {
    profile.location.get((id as usize).checked_sub(1)?)
}

fn string(profile: &Profile, index: i64) -> &str {
    let text = profile.string_table.get(index as usize);
    text.map_or("", String::as_str)
}
