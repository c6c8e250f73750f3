//! Checks that the man pages name every type and field of JSON that a tool prints in any test.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::process::Command;
use std::sync::Mutex;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::harness;

/// Schema number of the types and fields that the man pages name.
const SCHEMA: u64 = 1;

/// Fields whose own fields have names that the kernel gives.
const NAMED_BY_THE_KERNEL: [&str; 1] = ["tracepoints"];

/// A line of each shape that any tool has printed.
static SEEN: Mutex<BTreeMap<String, String>> = Mutex::new(BTreeMap::new());

/// JSON Schema of all lines, as it is published.
const JSON_SCHEMA: &str = include_str!("../../docs/json-schema.json");

/// Program that validates the lines of a file, and prints those that are not valid.
const VALIDATOR: &str = "\
import json, sys
from jsonschema import Draft202012Validator as Validator
schema = json.load(open(sys.argv[1]))
Validator.check_schema(schema)
validator = Validator(schema)
for line in open(sys.argv[2]):
    for error in validator.iter_errors(json.loads(line)):
        print(f'{list(error.absolute_path)}: {error.message[:400]}: {line.strip()[:400]}')
";

/// Fails unless lines of all shapes that tools have printed are valid by the published schema, as Python's jsonschema
/// finds.
pub(crate) fn validate() -> Result<()> {
    let seen = SEEN.lock().ok().context("a test has panicked")?;
    if seen.is_empty() || harness::in_guest() {
        return Ok(());
    }
    let folder = harness::scratch()?;
    let [schema, lines] = ["schema", "lines"].map(|name| folder.path().join(name));
    fs::write(&schema, JSON_SCHEMA)?;
    let text: Vec<_> = seen.values().map(String::as_str).collect();
    fs::write(&lines, text.join("\n"))?;
    let validated = Command::new("/usr/bin/python3")
        .args(["-c", VALIDATOR])
        .args([&schema, &lines])
        .output()?;
    let errors = String::from_utf8_lossy(&validated.stderr);
    ensure!(
        validated.status.success(),
        "no validation: install python3-jsonschema: {errors}"
    );
    ensure!(
        validated.stdout.is_empty(),
        "{}",
        String::from_utf8_lossy(&validated.stdout)
    );
    println!(
        "\nvalid by docs/json-schema.json: {} lines of different shapes",
        seen.len()
    );
    Ok(())
}

/// Returns the types of a value and of all fields in it. Strings, numbers and their like differ only in type.
fn shape(value: &Value) -> String {
    match value {
        Value::Null => "null".to_owned(),
        Value::Bool(_) => "boolean".to_owned(),
        Value::Number(number) => if number.is_f64() { "number" } else { "integer" }.to_owned(),
        Value::String(_) => "string".to_owned(),
        Value::Array(values) => {
            let shapes: BTreeSet<_> = values.iter().map(shape).collect();
            format!("{shapes:?}")
        }
        Value::Object(fields) => {
            let fields = fields.iter().map(|(name, field)| match name.as_str() {
                "type" | "tool" => format!("{name}={field}"),
                _ => format!("{name}:{}", shape(field)),
            });
            format!("{{{}}}", fields.collect::<Vec<_>>().join(","))
        }
    }
}

/// Returns the man page of one of our tools.
fn man_page(tool: &str) -> Option<&'static str> {
    Some(match tool {
        "brkstack" => include_str!("../../tools/brkstack.8"),
        "drsnoop" => include_str!("../../tools/drsnoop.8"),
        "faults" => include_str!("../../tools/faults.8"),
        "ffaults" => include_str!("../../tools/ffaults.8"),
        "heapscan" => include_str!("../../tools/heapscan.8"),
        "hfaults" => include_str!("../../tools/hfaults.8"),
        "memleak" => include_str!("../../tools/memleak.8"),
        "memtriage" => include_str!("../../tools/memtriage.8"),
        "mmapsnoop" => include_str!("../../tools/mmapsnoop.8"),
        "oomkill" => include_str!("../../tools/oomkill.8"),
        "shmsnoop" => include_str!("../../tools/shmsnoop.8"),
        "swapin" => include_str!("../../tools/swapin.8"),
        "vmscan" => include_str!("../../tools/vmscan.8"),
        _ => return None,
    })
}

/// Fails if a tool has printed an object of a type, or with a field, that its man page does not name.
pub(crate) fn check(tool: &str, stdout: &str) -> Result<()> {
    let Some(page) = man_page(tool).filter(|_| stdout.starts_with('{')) else {
        return Ok(());
    };
    let section = page
        .split(".SH ")
        .find(|section| section.starts_with("JSON\n"));
    let section = section.with_context(|| format!("{tool}.8 has no section JSON"))?;
    let types: HashSet<&str> = section
        .lines()
        .filter_map(|line| line.strip_prefix(".B "))
        .collect();
    let words: HashSet<&str> = section
        .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .collect();
    for line in stdout.lines() {
        // A truncated line was waited for in vain, and the test that reads it reports that.
        let Ok(object) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let kind = object["type"].as_str();
        let kind = kind.with_context(|| format!("{tool}: no type: {line}"))?;
        ensure!(
            types.contains(kind),
            "{tool}.8 has no type {kind}{}: {line}",
            remedy(tool)
        );
        ensure!(object["schema"] == SCHEMA, "{tool}: no schema: {line}");
        ensure!(object["tool"] == tool, "not of {tool}: {line}");
        if let Ok(mut seen) = SEEN.lock() {
            seen.entry(shape(&object))
                .or_insert_with(|| line.to_owned());
        }
        expect_fields(&object, &words)
            .with_context(|| format!("{tool}.8 and {line}{}", remedy(tool)))?;
    }
    Ok(())
}

/// Returns the advice for a type or field that is missing from the man page.
fn remedy(tool: &str) -> String {
    format!(
        "; name it in the section JSON of tools/{tool}.8, then run: MEMTOOLS_DOCS=docs cargo test --test schema"
    )
}

/// Fails if the name of a field, at any depth, is not among `words`.
fn expect_fields(value: &Value, words: &HashSet<&str>) -> Result<()> {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                ensure!(words.contains(name.as_str()), "no field {name}");
                if !NAMED_BY_THE_KERNEL.contains(&name.as_str()) {
                    expect_fields(field, words)?;
                }
            }
        }
        Value::Array(values) => {
            for value in values {
                expect_fields(value, words)?;
            }
        }
        _ => {}
    }
    Ok(())
}
