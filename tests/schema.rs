//! docs/json.md, the JSON fields of all tools in one place, must agree with the man pages. Every end-to-end test
//! compares what the tools print with the man pages (tests/e2e/documented.rs).
//!
//! To add a field, name it in the section JSON of the man page. Then
//! `MEMTOOLS_DOCS=docs cargo test --test schema` writes docs/json.md and docs/json-schema.json anew.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

const HEAD: &str = "\
# The fields of JSON

With `--json` (`-j`) each tool prints one object per line. All have `type`, `tool` (types of several tools have the same name), `host`, `boot_id`, and
`schema`: the number of the types and fields below, now 1. [json-schema.json](json-schema.json) is for validators.
It rises when a type or a field goes, or gets another name or meaning, and stays when one is added: ignore what you do not know.
`time` is when something was, as of RFC 3339. Names of fields end in their unit. Null is what is not known, or was not requested. Addresses are
strings, hexadecimal.

This page is made of the man pages, and `tests/e2e` compares each object that a tool prints with them. To add a field, name it in the section JSON of
the man page; `MEMTOOLS_DOCS=docs cargo test --test schema` then writes this page and the schema anew.
";

/// Type of object, or field or fields of it: names, and description.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    names: Vec<String>,
    text: String,
}

/// Returns the man pages of all tools, by tool.
fn man_pages() -> BTreeMap<String, String> {
    let folder = fs::read_dir(Path::new(ROOT).join("tools")).expect("tools/");
    let pages = folder.filter_map(|entry| {
        let path = entry.expect("an entry").path();
        let tool = path.file_name()?.to_str()?.strip_suffix(".8")?.to_owned();
        Some((tool, fs::read_to_string(path).expect("a man page")))
    });
    pages.collect()
}

/// Parses the entries of a man page's section JSON.
fn entries(tool: &str, page: &str) -> Vec<Entry> {
    let section = page
        .split(".SH ")
        .find_map(|section| section.strip_prefix("JSON\n"))
        .unwrap_or_else(|| panic!("tools/{tool}.8 has no section JSON"));
    let described = section.split(".TP\n").skip(1);
    described
        .map(|entry| {
            let (names, text) = entry.split_once('\n').expect("a name and a text");
            let names = names
                .split_once(' ')
                .filter(|(request, _)| request.starts_with(".B"))
                .map(|(_, names)| names.split([' ', ',', '"']).filter(|name| !name.is_empty()))
                .unwrap_or_else(|| panic!("tools/{tool}.8: no name of a type or field: {names}"));
            let lines = text.lines().map(|line| match line.strip_prefix(".BR ") {
                Some(bold) => format!("`{}`", bold.replacen(' ', "`", 1)).replace("`,`", "`,"),
                None => match line.strip_prefix(".B ").or(line.strip_prefix(".I ")) {
                    Some(bold) => format!("`{bold}`"),
                    None => line.to_owned(),
                },
            });
            Entry {
                names: names.map(plain).collect(),
                text: plain(&lines.collect::<Vec<_>>().join(" ")),
            }
        })
        .collect()
}

/// Returns text without troff's escapes.
fn plain(text: &str) -> String {
    let text = text.replace("\\-", "-");
    assert!(!text.contains('\\'), "troff that is not known here: {text}");
    text.replace('|', "\\|").trim().to_owned()
}

fn table(heading: &str, entries: &[(Entry, Option<String>)]) -> String {
    let tools = entries.iter().any(|(_, tools)| tools.is_some());
    let (more, rule) = if tools { (" of |", "---|") } else { ("", "") };
    let mut table =
        format!("\n## {heading}\n| type or field | what it has |{more}\n|---|---|{rule}\n");
    for (entry, tools) in entries {
        let names = entry.names.join("`, `");
        let tools = tools
            .as_deref()
            .map_or_else(String::new, |tools| format!(" {tools} |"));
        writeln!(table, "| `{names}` | {} |{tools}", entry.text).expect("memory");
    }
    table
}

/// Returns the text of docs/json.md. An entry that several tools have in the same words is listed once.
fn document(pages: &BTreeMap<String, String>) -> String {
    let mut by_tool = BTreeMap::new();
    let mut tools_of: BTreeMap<Entry, Vec<&str>> = BTreeMap::new();
    for (tool, page) in pages {
        let entries = entries(tool, page);
        for entry in &entries {
            tools_of.entry(entry.clone()).or_default().push(tool);
        }
        by_tool.insert(tool, entries);
    }
    let mut text = HEAD.to_owned();
    for (tool, entries) in by_tool {
        let own = entries
            .into_iter()
            .filter(|entry| tools_of[entry].len() == 1);
        text += &table(tool, &own.map(|entry| (entry, None)).collect::<Vec<_>>());
    }
    let shared = tools_of.into_iter().filter(|(_, tools)| tools.len() > 1);
    let all = pages.len();
    let shared = shared.map(|(entry, tools)| {
        let tools = if tools.len() == all {
            "all".to_owned()
        } else {
            tools.join(", ")
        };
        (entry, Some(tools))
    });
    text + &table("Several tools", &shared.collect::<Vec<_>>())
}

/// Returns the JSON Schema of the lines of all tools: the types of each tool, and the fields that many have.
fn json_schema(pages: &BTreeMap<String, String>) -> String {
    let tools: Vec<_> = pages.keys().collect();
    let of_tools = pages.iter().map(|(tool, page)| {
        let entries = entries(tool, page);
        let of_types = entries
            .iter()
            .filter(|entry| !FIELDS.contains(&&*entry.names.join(" ")));
        let types: BTreeSet<_> = of_types.flat_map(|entry| &entry.names).collect();
        json!({
            "if": { "properties": { "tool": { "const": tool } } },
            "then": { "properties": { "type": { "enum": types } } },
        })
    });
    let frames = json!({ "type": "array", "items": { "$ref": "#/$defs/frame" } });
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Line of JSON of a tool of bpf-memtools",
        "$comment": "Made of the man pages: MEMTOOLS_DOCS=docs cargo test --test schema. json.md describes all fields.",
        "type": "object",
        "required": ["type", "tool", "host", "boot_id", "schema"],
        "properties": {
            "type": { "type": "string" },
            "tool": { "enum": tools },
            "host": { "type": "string", "minLength": 1 },
            "boot_id": { "type": "string", "pattern": "^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$" },
            "schema": { "const": 1 },
            "time": { "type": "string", "pattern": "^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\\.[0-9]+)?(Z|[+-][0-9]{2}:[0-9]{2})$" },
            "pid": { "type": ["integer", "null"], "minimum": 0 },
            "tid": { "type": ["integer", "null"], "minimum": 0 },
            "comm": { "type": ["string", "null"] },
            "cgroup": { "type": ["string", "null"] },
            "container_id": { "type": ["string", "null"], "pattern": "^[0-9a-f]{64}$" },
            "address": { "type": ["string", "null"], "pattern": "^0x[0-9a-f]+$" },
            "stack_id": { "type": ["string", "null"], "pattern": "^0x[0-9a-f]+$" },
            "kernel_frames": frames,
            "user_frames": frames,
            "truncated": { "type": ["string", "null"] },
        },
        "patternProperties": {
            "_(ns|us|ms|kb|percent|pages)$": { "type": ["number", "null", "array"] },
        },
        "allOf": of_tools.collect::<Vec<_>>(),
        "$defs": { "frame": frame_schema() },
    });
    format!("{schema:#}\n")
}

/// Entries of the man pages that are fields of several types, not types: the names of each. A field can have the name
/// of a type (`cgroup` of vmscan).
const FIELDS: [&str; 3] = [
    "cgroup container_id",
    "kernel_frames user_frames",
    "truncated",
];

fn frame_schema() -> Value {
    let [text, number] = ["string", "integer"].map(|kind| json!({ "type": [kind, "null"] }));
    json!({
        "type": "object",
        "required": ["kind", "address", "symbol", "offset", "module", "module_offset"],
        "properties": {
            "kind": { "enum": ["native", "kernel", "python", "java"] },
            "address": { "type": "string", "pattern": "^0x[0-9a-f]+$" },
            "symbol": text,
            "offset": number,
            "module": text,
            "module_offset": number,
            "file": text,
            "line": number,
            "inlined": {
                "type": "array",
                "items": { "type": "object", "properties": { "symbol": text, "file": text, "line": number } },
            },
        },
        "additionalProperties": false,
    })
}

#[test]
fn the_published_schema_is_that_of_the_man_pages() {
    let pages = man_pages();
    agrees("json.md", &document(&pages));
    agrees("json-schema.json", &json_schema(&pages));
}

/// Fails unless a file of docs/ is as it is made; with `MEMTOOLS_DOCS`, writes it.
fn agrees(name: &str, document: &str) {
    if let Some(folder) = env::var_os("MEMTOOLS_DOCS") {
        let path = Path::new(ROOT).join(PathBuf::from(folder)).join(name);
        fs::write(&path, document).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        return;
    }
    let path = Path::new(ROOT).join("docs").join(name);
    let published = fs::read_to_string(&path).unwrap_or_default();
    let differing = document
        .lines()
        .zip(published.lines().chain(std::iter::repeat("")));
    let differing = differing
        .filter(|(made, published)| made != published)
        .map(|(made, _)| made);
    assert!(
        document == published,
        "docs/{name} is not what the man pages say; run: MEMTOOLS_DOCS=docs cargo test --test schema\nthe first other line: {:?}",
        differing.take(1).collect::<String>()
    );
}

#[test]
fn entries_are_read_as_they_are_written() {
    let page = ".SH JSON\nWith \\-\\-json\n.B type\nis there.\n.TP\n.B call\ntime, pid,\nor a|b with \\-\\-x.\n\
                .TP\n.BR kernel_frames \", \" user_frames\nArrays.\n.SH NEXT\n";
    let entry = |names: &[&str], text: &str| Entry {
        names: names.iter().map(|&name| name.to_owned()).collect(),
        text: text.to_owned(),
    };
    assert_eq!(
        entries("x", page),
        [
            entry(&["call"], "time, pid, or a\\|b with --x."),
            entry(&["kernel_frames", "user_frames"], "Arrays."),
        ]
    );
    let pages = BTreeMap::from([("x", page), ("y", page)]);
    let pages = pages
        .into_iter()
        .map(|(tool, page)| (tool.to_owned(), page.to_owned()));
    let document = document(&pages.collect());
    let all = "\n## Several tools\n| type or field | what it has | of |\n|---|---|---|\n| `call` | time, pid, or a\\|b with --x. | all |\n";
    assert!(document.contains(all), "{document}");
}
