//! What every tool must come with. A sentence names each thing that a tool lacks, so that the list need not be known.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Tools that trace nothing.
const WITHOUT_BPF: [&str; 3] = ["heapscan", "memagent", "memtriage"];

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

#[test]
fn every_tool_is_complete() {
    let lacks: Vec<String> = tools()
        .iter()
        .flat_map(|tool| lacks(Path::new(ROOT), tool))
        .collect();
    assert!(lacks.is_empty(), "\n{}", lacks.join("\n"));
}

/// Returns what a tool's --help prints, and its man page, which is empty if there is none.
fn help_and_page(tool: &str) -> (String, String) {
    let help = Command::new(program(tool))
        .arg("--help")
        .output()
        .expect("the tool starts");
    let help = String::from_utf8_lossy(&help.stdout).into_owned();
    let page = fs::read_to_string(format!("{ROOT}/tools/{tool}.8")).unwrap_or_default();
    (help, page)
}

#[test]
fn the_man_pages_describe_the_options() {
    let mut wrong = Vec::new();
    for tool in tools() {
        let (help, page) = help_and_page(&tool);
        wrong.extend(disagreements(&tool, &help, &page));
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

#[test]
fn the_man_pages_have_their_sections_and_the_help_s_examples() {
    let mut wrong = Vec::new();
    for tool in tools() {
        let (help, page) = help_and_page(&tool);
        for section in [
            "NAME",
            "SYNOPSIS",
            "DESCRIPTION",
            "OPTIONS",
            "WHAT CAN BE LOST",
            "SIGNALS",
            "EXIT STATUS",
            "REQUIREMENTS",
            "EXAMPLES",
            "SEE ALSO",
        ] {
            // A tool without a BPF program only reads, and loses nothing.
            let looks_only = !Path::new(&format!("{ROOT}/bpf/{tool}.bpf.c")).exists();
            if looks_only && section == "WHAT CAN BE LOST" {
                continue;
            }
            if !page.contains(&format!(".SH {section}\n")) {
                wrong.push(format!("{tool}'s man page lacks the section {section}"));
            }
        }
        let page = page.replace("\\-", "-").replace("\\(aq", "'");
        let (_, examples) = help.split_once("examples:\n").unwrap_or_default();
        if examples.is_empty() || !page.contains(examples.trim_end()) {
            wrong.push(format!("{tool}'s man page lacks the examples of --help"));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Folder with the Makefile and what it installs, and with a cargo that writes down its environment. The programs
/// that this cargo builds are copies of cat, which prints nothing if it reads nothing.
struct Made(tempfile::TempDir);

impl Made {
    fn new() -> Self {
        let made = Self(tempfile::tempdir().expect("a folder"));
        for file in ["Makefile", "Cargo.toml", "README.md", "LICENSE"] {
            fs::copy(format!("{ROOT}/{file}"), made.path(file)).expect("a copy");
        }
        for folder in ["scripts", "tools"] {
            fs::create_dir(made.path(folder)).expect("a folder");
        }
        for file in [
            "prometheus/memtools.rules.yml",
            "grafana/memtools.json",
            "memagent.service",
            "memagent-trace.service",
        ] {
            let file = format!("packaging/{file}");
            let copy = made.path(&file);
            fs::create_dir_all(copy.parent().expect("a folder")).expect("a folder");
            fs::copy(format!("{ROOT}/{file}"), copy).expect("a copy");
        }
        for tool in bins(Path::new(ROOT)) {
            for file in [
                format!("tools/{tool}.8"),
                format!("tools/{tool}_example.txt"),
            ] {
                fs::copy(format!("{ROOT}/{file}"), made.path(&file)).expect("a copy");
            }
        }
        for script in ["scripts/need", "scripts/libelf"] {
            made.script(script, "#!/bin/sh\n");
        }
        made.script(
            "cargo",
            "#!/bin/sh -e
            env >environment
            out=$(echo target/*-*/release)
            for tool in $(sed -n '/^\\[\\[bin\\]\\]/{n;s/^name = \"\\(.*\\)\"/\\1/p}' Cargo.toml); do
                cp \"$(command -v cat)\" \"$out/$tool\"
            done
            ",
        );
        let rustc = Command::new("rustc")
            .arg("-vV")
            .output()
            .expect("rustc runs");
        let rustc = String::from_utf8_lossy(&rustc.stdout).into_owned();
        let host = rustc.lines().find_map(|line| line.strip_prefix("host: "));
        let out = format!("target/{}/release", host.expect("a host"));
        fs::create_dir_all(made.path(&out)).expect("a folder");
        made
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn script(&self, name: &str, text: &str) {
        fs::write(self.path(name), text).expect("a script");
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(self.path(name), mode).expect("it can be run");
    }

    fn make(&self, args: &[&str]) {
        let output = Command::new("make")
            .args(args)
            .arg("CARGO=./cargo")
            .env("SUFFIX", "nowhere")
            .env_remove("MAKEFLAGS")
            .stdin(Stdio::null())
            .current_dir(self.0.path())
            .output()
            .expect("make runs");
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
fn rooms_import_only_from_the_floors_below() {
    let head = fs::read_to_string(format!("{ROOT}/src/lib.rs")).expect("lib.rs");
    let floors = floors(&head);
    let mut climbs = Vec::new();
    for path in rust_files() {
        let name = path.strip_prefix(ROOT).expect("below the root");
        if !name.starts_with("src") {
            continue;
        }
        let text = fs::read_to_string(&path).expect("a source");
        climbs.extend(climbing_imports(&floors, name, &text));
    }
    assert!(climbs.is_empty(), "\n{}", climbs.join("\n"));
    let rooms: BTreeSet<&str> = declared_modules(&head).collect();
    assert_eq!(rooms, floors.iter().map(String::as_str).collect());
}

#[test]
fn an_import_that_climbs_is_named_by_its_line() {
    let floors = ["print", "bpf", "run"].map(str::to_owned);
    let source = "//! crate::run\nuse crate::print::text;\nuse crate::run::cli;\nfn f() { crate::bpf::g() }\n";
    let climbs = |file| climbing_imports(&floors, Path::new(file), source);
    assert_eq!(
        climbs("src/bpf/ring.rs"),
        ["src/bpf/ring.rs:3: bpf imports from run, which is above it: use crate::run::cli;"]
    );
    assert_eq!(climbs("src/print/text.rs").len(), 2);
    assert!(climbs("src/run/cli.rs").is_empty());
    let grouped = "use crate::{\n    print::text,\n};\n";
    assert_eq!(
        climbing_imports(&floors, Path::new("src/bpf.rs"), grouped).len(),
        1
    );
}

/// Returns the rooms of src/lib.rs in the order of its table, from the ground up.
fn floors(head: &str) -> Vec<String> {
    let rows = head.lines().filter_map(|line| {
        let name = line.strip_prefix("//! | [`")?.split_once("`]")?.0;
        Some(name.strip_prefix("mod@").unwrap_or(name).to_owned())
    });
    rows.collect()
}

fn declared_modules(text: &str) -> impl Iterator<Item = &str> {
    text.lines()
        .filter_map(|line| line.strip_prefix("pub mod ")?.strip_suffix(';'))
}

/// Names each line of a file that imports from a room above the file's own, or whose rooms cannot be read.
fn climbing_imports(floors: &[String], file: &Path, text: &str) -> Vec<String> {
    let floor_of = |room: &str| floors.iter().position(|floor| floor == room);
    let room = file.components().nth(1).expect("a file in src");
    let room = Path::new(room.as_os_str()).file_stem().expect("a name");
    let room = room.to_string_lossy();
    let Some(own) = floor_of(&room) else {
        // lib.rs itself, which declares the rooms.
        return Vec::new();
    };
    let mut climbs = Vec::new();
    for (number, line) in (1..).zip(text.lines()) {
        let code = line.split("//").next().unwrap_or_default();
        for after in code.split("crate::").skip(1) {
            let is_of_name = |c: char| c.is_alphanumeric() || c == '_';
            let name = after.split(|c| !is_of_name(c)).next().unwrap_or_default();
            let place = format!("{}:{number}", file.display());
            if name.is_empty() {
                climbs.push(format!("{place}: name the room in each import: {line}"));
            } else if floor_of(name).is_some_and(|floor| floor > own) {
                climbs.push(format!(
                    "{place}: {room} imports from {name}, which is above it: {}",
                    line.trim()
                ));
            }
        }
    }
    climbs
}

#[test]
fn make_builds_while_a_tool_runs_and_keeps_install_s_variables_from_cargo() {
    let made = Made::new();
    let build = || made.make(&["build", "DESTDIR=/nowhere", "PREFIX=/nowhere"]);
    build();
    let environment = fs::read_to_string(made.path("environment")).expect("cargo ran");
    assert!(!environment.contains("nowhere"), "{environment}");

    let mut running = Command::new(made.path("target/release/memleak"))
        .stdin(Stdio::piped())
        .spawn()
        .expect("it runs");
    build();
    running.kill().expect("it ran");
    running.wait().expect("it has ended");
}

/// Returns the files in a folder and below it.
fn files_below(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let below = entries.flat_map(|entry| {
        let path = entry.path();
        if path.is_dir() {
            files_below(&path)
        } else {
            vec![path]
        }
    });
    below.collect()
}

#[test]
fn make_uninstalls_all_that_it_has_installed() {
    let made = Made::new();
    let root = made.path("root");
    let destination = format!("DESTDIR={}", root.display());
    let others = root.join("usr/share/man/man8/memleak.8");
    fs::create_dir_all(others.parent().expect("a folder")).expect("folders");
    fs::write(&others, "of another package").expect("a file");
    let with = |target| made.make(&[target, &destination, "PREFIX=/usr", "SUFFIX=-mt"]);
    with("install");
    let tools = bins(Path::new(ROOT)).len();
    // Each tool has its program, a man page, three completions and an example. Six files are installed beside these.
    assert_eq!(files_below(&root).len(), 1 + tools * 6 + 6);
    with("uninstall");
    assert_eq!(files_below(&root), [others]);
}

#[test]
fn units_of_memagent_differ_only_in_what_traces_take() {
    let lines = |unit: &str| -> BTreeSet<String> {
        let text = fs::read_to_string(format!("{ROOT}/packaging/{unit}")).expect("a unit");
        let lines = text
            .lines()
            .filter(|line| line.contains('=') && !line.starts_with('#'));
        lines.map(str::to_owned).collect()
    };
    let (watching, tracing) = (lines("memagent.service"), lines("memagent-trace.service"));
    let different = watching.symmetric_difference(&tracing);
    let keys: BTreeSet<&str> = different
        .filter_map(|line| line.split('=').next())
        .collect();
    let expected = [
        "AmbientCapabilities",
        "CPUQuota",
        "CapabilityBoundingSet",
        "Conflicts",
        "Description",
        "DynamicUser",
        "LimitMEMLOCK",
        "MemoryMax",
        "OOMPolicy",
        "SystemCallFilter",
        "TasksMax",
    ];
    assert_eq!(keys, BTreeSet::from(expected));
}

/// Returns every name that a BPF source or a `[[bin]]` stanza announces.
fn tools() -> BTreeSet<String> {
    let sources = fs::read_dir(format!("{ROOT}/bpf"))
        .expect("bpf/")
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let name = name.strip_suffix(".bpf.c")?;
            // The source may be a tool's second object, such as memleak_kernel.
            Some(name.split('_').next().unwrap_or(name).to_owned())
        });
    sources.chain(bins(Path::new(ROOT))).collect()
}

fn bins(root: &Path) -> Vec<String> {
    let manifest = fs::read_to_string(root.join("Cargo.toml")).unwrap_or_default();
    let stanzas = manifest.split("[[bin]]").skip(1);
    let name = |stanza: &str| {
        Some(
            stanza
                .split("name = \"")
                .nth(1)?
                .split('"')
                .next()?
                .to_owned(),
        )
    };
    stanzas.filter_map(name).collect()
}

/// Returns the path of a tool's built program.
fn program(tool: &str) -> PathBuf {
    Path::new(env!("CARGO_BIN_EXE_memleak")).with_file_name(tool)
}

/// Returns one sentence for everything that the tool lacks.
fn lacks(root: &Path, tool: &str) -> Vec<String> {
    let mut lacks = Vec::new();
    let mut need = |there: bool, sentence: String| {
        if !there {
            lacks.push(sentence);
        }
    };
    let exists = |path: &str| root.join(path).exists();
    let contains = |path: &str, text: &str| {
        fs::read_to_string(root.join(path)).is_ok_and(|content| content.contains(text))
    };
    need(
        WITHOUT_BPF.contains(&tool) || exists(&format!("bpf/{tool}.bpf.c")),
        format!("{tool} lacks its BPF program: write bpf/{tool}.bpf.c"),
    );
    need(
        bins(root).iter().any(|bin| bin == tool),
        format!("{tool} lacks its [[bin]] stanza in Cargo.toml"),
    );
    need(
        exists(&format!("tools/{tool}.rs")) || exists(&format!("tools/{tool}/main.rs")),
        format!("{tool} lacks its program: write tools/{tool}.rs"),
    );
    need(
        exists(&format!("tools/{tool}.8")),
        format!("{tool} lacks its man page: write tools/{tool}.8"),
    );
    need(
        contains(&format!("tools/{tool}_example.txt"), &format!("# {tool} ")),
        format!(
            "{tool} lacks a worked example: put real output of it into tools/{tool}_example.txt"
        ),
    );
    need(
        contains(
            "README.md",
            &format!("| [{tool}](tools/{tool}_example.txt) |"),
        ),
        format!("{tool} lacks its row in the table of README.md, linked to its example"),
    );
    need(
        contains(&format!("tests/e2e/{tool}.rs"), "fn tests()")
            && contains("tests/e2e/main.rs", &format!("{tool}::tests()")),
        format!(
            "{tool} lacks an end-to-end test: write tests/e2e/{tool}.rs and list it in main.rs"
        ),
    );
    need(
        contains("tests/cli.rs", &format!("(\"{tool}\", ")),
        format!("{tool} lacks its row in TOOLS of tests/cli.rs"),
    );
    lacks
}

/// Returns a sentence for each option that only one of `--help` and the man page has.
fn disagreements(tool: &str, help: &str, page: &str) -> Vec<String> {
    let in_help: BTreeSet<String> = help.lines().flat_map(help_options).collect();
    let in_page: BTreeSet<String> = page.lines().flat_map(page_options).collect();
    let undescribed = in_help
        .difference(&in_page)
        .map(|option| format!("{tool}'s man page does not describe {option}"));
    let unknown = in_page.difference(&in_help).map(|option| {
        format!("{tool}'s man page describes {option}, which the tool does not have")
    });
    undescribed.chain(unknown).collect()
}

/// Returns the options in a line of clap's help, such as `  -p, --pid <PID>`.
fn help_options(line: &str) -> Vec<String> {
    let text = line.trim_start();
    // Two spaces separate the names from the description.
    let names = text.split("  ").next().unwrap_or(text);
    if line.starts_with("  ") && text.starts_with('-') {
        options(names)
    } else {
        Vec::new()
    }
}

/// Returns the options in a line of a man page that names them, such as `.BR \-p ", " \-\-pid " " \fIPID\fR`.
fn page_options(line: &str) -> Vec<String> {
    let names_options = [".B \\-", ".BR \\-", ".BI \\-"]
        .iter()
        .any(|start| line.starts_with(start));
    if names_options {
        options(&line.replace("\\-", "-"))
    } else {
        Vec::new()
    }
}

fn options(text: &str) -> Vec<String> {
    text.split(|c: char| !(c.is_ascii_alphanumeric() || c == '-'))
        .filter(|word| {
            let name = word.trim_start_matches('-');
            matches!(word.len() - name.len(), 1 | 2) && !name.is_empty()
        })
        .map(str::to_owned)
        .collect()
}

#[test]
fn a_tool_that_lacks_everything_is_told_so() {
    let lacks = lacks(Path::new("/nonexistent"), "newtool");
    assert_eq!(lacks.len(), 8, "{lacks:#?}");
    assert!(
        lacks
            .iter()
            .all(|sentence| sentence.starts_with("newtool lacks ")),
        "{lacks:#?}"
    );
}

#[test]
fn options_are_compared_both_ways() {
    let help = "Options:\n  -p, --pid <PID>  Trace -x\n  -h, --help  Print help\n";
    let page = ".TP\n.BR \\-p \", \" \\-\\-pid \" \" \\fIPID\\fR\nSee \\-q.\n.TP\n.B \\-z\n";
    assert_eq!(
        disagreements("t", help, page),
        [
            "t's man page does not describe --help",
            "t's man page does not describe -h",
            "t's man page describes -z, which the tool does not have",
        ]
    );
}

/// Rustdoc shows each doc comment alone. The first word must not refer to a text above it.
#[test]
fn doc_comments_stand_alone() {
    let leaning = [
        "It ", "Its ", "Those ", "That of ", "Of ", "They ", "Their ",
    ];
    let mut wrong = Vec::new();
    for file in rust_files() {
        let text = fs::read_to_string(&file).expect("a source file");
        let mut before = "";
        for (number, line) in (1..).zip(text.lines().map(str::trim_start)) {
            let first = !before.starts_with("//");
            before = line;
            let sentence = ["/// ", "//! "]
                .iter()
                .find_map(|mark| line.strip_prefix(mark));
            let leans = |sentence: &str| leaning.iter().any(|word| sentence.starts_with(word));
            if first && sentence.is_some_and(leans) {
                wrong.push(format!("{}:{number}: {line}", file.display()));
            }
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Returns all Rust sources that git tracks.
fn rust_files() -> Vec<PathBuf> {
    let list = Command::new("git")
        .args(["ls-files", "*.rs"])
        .current_dir(ROOT)
        .output()
        .expect("git");
    assert!(list.status.success(), "{list:?}");
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let files: Vec<PathBuf> = list
        .lines()
        .map(|path| Path::new(ROOT).join(path))
        .collect();
    assert!(files.len() > 50, "{files:?}");
    files
}

/// Returns the targets of a page's links, without those to other servers and to headings.
fn links(page: &str) -> impl Iterator<Item = &str> {
    page.split("](")
        .skip(1)
        .filter_map(|rest| rest.split([')', '#']).next())
        .filter(|target| !target.is_empty() && !target.contains("://"))
}

#[test]
fn pages_link_to_files_that_exist() {
    let docs = fs::read_dir(format!("{ROOT}/docs")).expect("docs/");
    let mut pages: Vec<PathBuf> = docs.map(|entry| entry.expect("a file").path()).collect();
    pages.retain(|path| path.extension().is_some_and(|extension| extension == "md"));
    assert!(pages.len() > 5, "{pages:?}");
    for page in ["README.md", "CONTRIBUTING.md", "SECURITY.md"] {
        pages.push(Path::new(ROOT).join(page));
    }
    let mut wrong = Vec::new();
    for page in &pages {
        let text = fs::read_to_string(page).expect("a page");
        let folder = page.parent().expect("a folder");
        for target in links(&text).filter(|target| !folder.join(target).exists()) {
            wrong.push(format!("{} links to {target}", page.display()));
        }
    }
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// Phrases that a reader of kernel documentation would stumble over. Each has a standard term.
const NOT_STANDARD: [&str; 72] = [
    "a folder",
    "answered with a",
    "are told",
    "as far as",
    "as they come",
    "asked for",
    "at most so",
    "brings in",
    "by which heaps",
    "by which processes",
    "cannot be told",
    "does not tell",
    "draw them",
    "emptied first",
    "ever fewer",
    "ever more",
    "for the chosen",
    "for want of",
    "from now on",
    "function of Java",
    "function of Python",
    "functions of Java",
    "functions of Python",
    "get at ",
    "gets at ",
    "give up its",
    "gives up its",
    "goes by its",
    "got at ",
    "growth that is held",
    "had lived for",
    "had to reclaim",
    "has run out",
    "held by ",
    "held up",
    "in no block",
    "in the place of",
    "is told",
    "it wants",
    "kept apart",
    "leave out",
    "leaves out",
    "left out",
    "look again",
    "look through",
    "looked through",
    "lost the mark",
    "made room",
    "makes no sense",
    "nobody",
    "object a line",
    "of the moment",
    "program's own pool",
    "read back from swap",
    "reclaim memory themselves",
    "room for",
    "set aside",
    "so many",
    "somebody",
    "stand still",
    "stands still",
    "stood still",
    "takes a block back",
    "tell apart",
    "tells on",
    "the folder",
    "those of process",
    "through a middle",
    "times a second",
    "told apart",
    "unreachable via these",
    "wanted memory",
];

/// Returns the phrases of a text that are not standard terms, with what precedes and follows each.
fn not_standard(text: &str) -> Vec<String> {
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let words = |side: &str| side.split(' ').map(str::to_owned).collect::<Vec<_>>();
    let context = |phrase: &str| {
        let (before, after) = text.split_once(phrase)?;
        let (before, after) = (words(before), words(after));
        let before = before[before.len().saturating_sub(5)..].join(" ");
        Some(format!(
            "{before}{phrase}{}",
            after[..after.len().min(5)].join(" ")
        ))
    };
    NOT_STANDARD.into_iter().filter_map(context).collect()
}

/// Returns the code of a source file: without comments and unit tests, and with continued literals in one line.
fn code(text: &str) -> String {
    let code = text.split("#[cfg(test)]").next().unwrap_or_default();
    let lines = code.lines().map(str::trim);
    let lines = lines.filter(|line| !line.starts_with("//"));
    lines.fold(String::new(), |code, line| match line.strip_suffix('\\') {
        Some(continued) => code + continued,
        None => code + line + "\n",
    })
}

/// What users read: help (the doc comments of options), messages, man pages, examples and docs.
#[test]
fn what_users_read_has_standard_terms() {
    let mut pages: Vec<_> = ["tools", "docs"]
        .iter()
        .flat_map(|folder| {
            let files = fs::read_dir(Path::new(ROOT).join(folder)).expect("a folder");
            files
                .map(|file| file.expect("a file").path())
                .filter(|path| path.is_file())
        })
        .collect();
    pages.extend(["README.md", "SECURITY.md"].map(|page| Path::new(ROOT).join(page)));
    let is_rust = |path: &PathBuf| path.extension().is_some_and(|extension| extension == "rs");
    pages.retain(|path| !is_rust(path));
    let mut texts: Vec<(String, String)> = Vec::new();
    for page in pages {
        let text = fs::read(&page).expect("a page");
        texts.push((
            page.display().to_string(),
            String::from_utf8_lossy(&text).into_owned(),
        ));
    }
    for file in rust_files() {
        let path = file.display().to_string();
        if path.contains("/tests/") || path.ends_with("tests.rs") || path.ends_with("build.rs") {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source file");
        texts.push((path, code(&text)));
    }
    for tool in tools() {
        texts.push((tool.clone(), help_and_page(&tool).0));
    }
    let wrong: Vec<String> = texts
        .iter()
        .flat_map(|(path, text)| {
            not_standard(text)
                .into_iter()
                .map(move |found| format!("{path}: {found}"))
        })
        .collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
}

/// `message!` names the tool, and a closed stderr ends no run.
#[test]
fn messages_are_printed_in_one_place() {
    let mut wrong = Vec::new();
    for file in rust_files() {
        let path = file.strip_prefix(ROOT).expect("a path below the root");
        let of_a_tool = path.starts_with("src") || path.starts_with("tools");
        if !of_a_tool || path.ends_with("tests.rs") {
            continue;
        }
        let text = fs::read_to_string(&file).expect("a source file");
        if code(&text).contains("eprint") {
            wrong.push(path.display().to_string());
        }
    }
    assert!(
        wrong.is_empty(),
        "{wrong:?} print without `message!` or `note!`"
    );
}

#[test]
fn phrases_are_found_across_lines() {
    assert_eq!(
        not_standard("the process\n  stood\nstill for 3 ms"),
        ["the process stood still for 3 ms"]
    );
    assert_eq!(
        code("a(\"x \\\n   y\");\n// nobody\n#[cfg(test)]\nnobody"),
        "a(\"x y\");\n"
    );
}

/// A reader takes in a README of this length; everything else is in docs/.
#[test]
fn the_readme_is_short() {
    let readme = fs::read_to_string(format!("{ROOT}/README.md")).expect("README.md");
    let lines = readme.lines().count();
    assert!(lines <= 150, "README.md has {lines} lines");
}

/// What is beyond the needs of a tool's user is in docs/.
#[test]
fn man_pages_are_short() {
    const LINES: usize = 500;
    for tool in tools() {
        let page = fs::read_to_string(format!("{ROOT}/tools/{tool}.8")).expect("a man page");
        let lines = page.lines().count();
        assert!(lines <= LINES, "tools/{tool}.8 has {lines} lines");
    }
}

#[test]
fn alert_rules_are_of_metrics_that_the_man_pages_name() {
    let rules = format!("{ROOT}/packaging/prometheus/memtools.rules.yml");
    let rules = fs::read_to_string(rules).expect("the rules");
    let pages: String = tools()
        .iter()
        .map(|tool| fs::read_to_string(format!("{ROOT}/tools/{tool}.8")).expect("a man page"))
        .collect();
    let mut words = rules.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let is_named = |name: &str| pages.contains(name) || name.starts_with("memtools_memleak_");
    let unknown = words.find(|word| word.starts_with("memtools_") && !is_named(word));
    assert_eq!(unknown, None);
}

/// In the locale C and 80 columns, as on a console of a rescue system.
#[test]
fn man_shows_the_man_pages_without_warnings() {
    for tool in tools() {
        let mut man = Command::new("man");
        man.args(["--warnings", "-l", &format!("{ROOT}/tools/{tool}.8")])
            .envs([("LC_ALL", "C"), ("MANWIDTH", "80")])
            .stdout(Stdio::null());
        let Ok(shown) = man.output() else {
            eprintln!("not run: there is no man");
            return;
        };
        let warnings = String::from_utf8_lossy(&shown.stderr);
        assert!(warnings.is_empty(), "{tool}: {warnings}");
    }
}

/// Sources that name architectures outside of their own folders.
const NAMES_ARCHITECTURES: [&str; 3] = [
    // Refuses the architectures that lack code.
    "src/lib.rs",
    // Has the architectures' names in libbpf's headers.
    "build.rs",
    // Has the names of emulators.
    "src/process/translator.rs",
];

#[test]
fn what_depends_on_the_architecture_is_in_folders_of_its_name() {
    let mut mentions = Vec::new();
    for path in sources() {
        if own_part(&path).is_none() && !NAMES_ARCHITECTURES.contains(&path.as_str()) {
            let text = fs::read_to_string(format!("{ROOT}/{path}")).expect("a source");
            mentions.extend(mentions_of_architectures(&path, &text));
        }
    }
    assert!(mentions.is_empty(), "\n{}", mentions.join("\n"));
}

#[test]
fn a_mention_of_an_architecture_is_named_by_its_line() {
    for mention in [
        "if cfg!(target_arch = \"riscv64\") {",
        "// as on arm64",
        "SEC(\"kprobe/__x64_sys_brk\")",
        "const NAME: &str = \"AMD64\";",
        "#ifdef __TARGET_ARCH_x86",
        "pc = regs->ip;",
        "number = BPF_CORE_READ(regs, orig_ax);",
        "long ip = ctx->regs.ip;",
        "/* push %rbp */",
        "// mov rax, rdi",
        "#[cfg_attr(target_arch = \"x86_64\", path = \"arch.rs\")]",
    ] {
        let found = mentions_of_architectures("src/a.rs", &format!("\n{mention}\n"));
        assert_eq!(found, [format!("src/a.rs:2: {mention}")]);
    }
    for other in [
        "const AT: u64 = 0x860 + 0x64;",
        "#[cfg_attr(target_arch = \"x86_64\", path = \"x86_64/mod.rs\")]",
        "registers->sp = sp;",
        "a warm64 orbit",
    ] {
        assert!(
            mentions_of_architectures("src/a.rs", other).is_empty(),
            "{other}"
        );
    }
}

#[test]
fn the_list_of_what_a_port_adds_is_true() {
    let page = fs::read_to_string(format!("{ROOT}/CONTRIBUTING.md")).expect("CONTRIBUTING.md");
    let (_, section) = page
        .split_once("## Add an architecture\n")
        .expect("a section");
    let (section, _) = section.split_once("\n## ").expect("a next section");
    let listed: BTreeSet<String> = section
        .lines()
        .filter_map(|line| Some(line.strip_prefix("| `")?.split_once('`')?.0.to_owned()))
        .collect();
    let head = fs::read_to_string(format!("{ROOT}/src/lib.rs")).expect("lib.rs");
    let refused = regex_lite::Regex::new("(?s)#\\[cfg\\(not\\((.*?)\\]\ncompile_error!")
        .expect("a pattern")
        .captures(&head)
        .expect("a refusal")[1]
        .to_owned();
    let accepted: Vec<&str> = refused.split('"').skip(1).step_by(2).collect();
    assert!(accepted.contains(&"x86_64"), "{accepted:?}");
    let sources = sources();
    for &architecture in &accepted {
        let parts: BTreeSet<String> = sources
            .iter()
            .filter_map(|path| own_part(path))
            .filter(|part| part.contains(architecture))
            .map(|part| part.replace(architecture, "x86_64"))
            .collect();
        assert_eq!(parts, listed, "{architecture}");
        // A file's own submodules are no part of what the others use.
        let files = |architecture: &str| -> BTreeSet<String> {
            let own = sources.iter().filter(|path| {
                own_part(path).is_some_and(|part| {
                    part.contains(architecture) && !path[part.len()..].contains('/')
                })
            });
            own.map(|path| path.replace(architecture, "x86_64"))
                .collect()
        };
        assert_eq!(files(architecture), files("x86_64"), "{architecture}");
    }
    for path in sources.iter().filter(|path| path.ends_with(".rs")) {
        let text = fs::read_to_string(format!("{ROOT}/{path}")).expect("a source");
        if let Some((before, _)) = text.split_once("\nmod arch;") {
            for architecture in &accepted {
                let own = format!("target_arch = \"{architecture}\", path = \"{architecture}");
                assert!(before.contains(&own), "{path}: {architecture}");
            }
        }
    }
}

/// Returns the paths of the sources of the tools and of the library, from the root.
fn sources() -> Vec<String> {
    let list = Command::new("git")
        .args(["ls-files", "build.rs", "bpf", "src", "tools"])
        .current_dir(ROOT)
        .output()
        .expect("git");
    let list = String::from_utf8_lossy(&list.stdout).into_owned();
    let is_source = |path: &&str| [".rs", ".c", ".h"].iter().any(|end| path.ends_with(end));
    let sources: Vec<String> = list.lines().filter(is_source).map(str::to_owned).collect();
    assert!(sources.len() > 300, "{sources:?}");
    sources
}

/// Returns a path up to the part that is an architecture's name: a folder, with a slash behind it, or a file. None for
/// a path without such a part.
fn own_part(path: &str) -> Option<String> {
    let pattern = "^(.*/)?(x86_64|aarch64)(\\.rs$|/)";
    let found = regex_lite::Regex::new(pattern)
        .expect("a pattern")
        .find(path)?;
    Some(found.as_str().to_owned())
}

/// Returns the lines that mention an architecture, or a register of one. A line may choose the file of an architecture.
fn mentions_of_architectures(path: &str, text: &str) -> Vec<String> {
    let pattern = |pattern: &str| regex_lite::Regex::new(pattern).expect("a pattern");
    let name = pattern(
        "(?i)(\\b|_)(x86|x64|i386|amd64|aarch64|arm64|TARGET_ARCH)|\
         \\b(orig_ax|fs_?base|r[abcd]x|r[sd]i|r[sbi]p)\\b|\
         \\bregs(->|\\.|, )(ip|sp|bp|[abcd]x|[sd]i|r[0-9]+|pc|regs)\\b",
    );
    let choice = pattern(
        "^#\\[cfg_attr\\(target_arch = \"(x86_64|aarch64)\", path = \"(x86_64|aarch64)(/mod)?\\.rs\"\\)\\]$",
    );
    let lines = (1..).zip(text.lines());
    let mentions = lines.filter(|(_, line)| name.is_match(line) && !choice.is_match(line));
    mentions
        .map(|(number, line)| format!("{path}:{number}: {}", line.trim()))
        .collect()
}
