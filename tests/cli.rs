//! The command lines of all tools, tested without root and without BPF.

use std::process::{Command, Output};

/// The tools, with their paths.
const TOOLS: &[(&str, &str)] = &[
    ("hfaults", env!("CARGO_BIN_EXE_hfaults")),
    ("heapscan", env!("CARGO_BIN_EXE_heapscan")),
    ("drsnoop", env!("CARGO_BIN_EXE_drsnoop")),
    ("memagent", env!("CARGO_BIN_EXE_memagent")),
    ("memleak", env!("CARGO_BIN_EXE_memleak")),
    ("brkstack", env!("CARGO_BIN_EXE_brkstack")),
    ("faults", env!("CARGO_BIN_EXE_faults")),
    ("ffaults", env!("CARGO_BIN_EXE_ffaults")),
    ("mmapsnoop", env!("CARGO_BIN_EXE_mmapsnoop")),
    ("memtriage", env!("CARGO_BIN_EXE_memtriage")),
    ("oomkill", env!("CARGO_BIN_EXE_oomkill")),
    ("shmsnoop", env!("CARGO_BIN_EXE_shmsnoop")),
    ("swapin", env!("CARGO_BIN_EXE_swapin")),
    ("vmscan", env!("CARGO_BIN_EXE_vmscan")),
];

fn run(path: &str, args: &[&str]) -> Output {
    Command::new(path)
        .args(args)
        .output()
        .expect("the tool starts")
}

#[test]
fn help_and_version_succeed_on_stdout() {
    for &(tool, path) in TOOLS {
        for arg in ["--help", "-h", "--version"] {
            let output = run(path, &[arg]);
            assert!(output.status.success(), "{tool} {arg}: {output:?}");
            assert!(output.stderr.is_empty(), "{tool} {arg}: {output:?}");
            assert!(
                String::from_utf8_lossy(&output.stdout).contains(tool),
                "{tool} {arg}"
            );
        }
    }
}

#[test]
fn wrong_usage_is_status_2_and_names_the_argument() {
    for &(tool, path) in TOOLS {
        let output = run(path, &["--no-such-option"]);
        assert_eq!(output.status.code(), Some(2), "{tool}: {output:?}");
        assert!(output.stdout.is_empty(), "{tool}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains("--no-such-option"), "{tool}: {stderr}");
        assert!(stderr.contains("Usage:"), "{tool}: {stderr}");
    }
}

#[test]
fn options_that_export_has_replaced_name_it() {
    let exporting = TOOLS
        .iter()
        .filter(|(tool, _)| !["memagent", "memtriage", "heapscan"].contains(tool));
    for &(tool, path) in exporting {
        for (old, new) in [
            ("--flame", "--export FILE.svg"),
            ("--flame-base", "--diff OLD.pb.gz"),
            ("--pprof=a.pb.gz", "--export FILE.pb.gz"),
            ("--perfetto", "--export FILE.pftrace"),
            ("--metrics", "--export FILE.prom"),
        ] {
            let output = run(path, &[old, "x"]);
            assert_eq!(output.status.code(), Some(2), "{tool} {old}: {output:?}");
            let stderr = String::from_utf8_lossy(&output.stderr);
            let (old, _) = old.split_once('=').unwrap_or((old, ""));
            assert_eq!(stderr, format!("{tool}: {old} is now: {new}\n"));
        }
    }
}

/// The help and the error of an unknown extension list the same formats, and only these are written.
#[test]
fn export_takes_the_formats_of_its_help() {
    for &(tool, path) in TOOLS {
        let help = run(path, &["-h"]);
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        let Some((_, formats)) = help.split_once("Also write FILE: ") else {
            assert!(
                ["memagent", "memtriage", "heapscan"].contains(&tool),
                "{help}"
            );
            continue;
        };
        let formats: Vec<&str> = formats.lines().next().unwrap_or("").split(' ').collect();
        let output = run(path, &["--export", "x.txt"]);
        assert_eq!(output.status.code(), Some(2), "{tool}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        let (_, listed) = stderr
            .split_once("unknown format; use ")
            .unwrap_or_else(|| panic!("{tool}: {stderr}"));
        let listed = listed.lines().next().unwrap_or("").replace(" or ", ", ");
        assert_eq!(listed.split(", ").collect::<Vec<_>>(), formats, "{tool}");
        for format in [".svg", ".pb.gz", ".pftrace", ".folded", ".prom"] {
            let output = run(path, &["--export", &format!("x{format}"), "-p", "0"]);
            let stderr = String::from_utf8_lossy(&output.stderr);
            let refused = stderr.contains("format not supported");
            assert_eq!(
                refused,
                !formats.contains(&format),
                "{tool} {format}: {stderr}"
            );
        }
    }
}

/// Every option is given values that are wrong for some options.
#[test]
fn wrong_usage_is_told_in_plain_words() {
    for &(tool, path) in TOOLS {
        let help = run(path, &["--help"]);
        let help = String::from_utf8_lossy(&help.stdout).into_owned();
        let options = help
            .lines()
            .filter_map(|line| line.trim_start().strip_prefix('-'));
        let with_value = options.filter_map(|line| line.split_once(" <"));
        let mut options: Vec<&str> = with_value
            .filter_map(|(names, _)| names.split("--").nth(1))
            .collect();
        assert!(!options.is_empty(), "{tool}: {options:?}");
        // The interval has no option's name.
        options.push("");
        for option in options {
            for value in ["x", "0", "-1", "1e99", "", "4294967296", "inf", "é"] {
                let given = if option.is_empty() {
                    value.to_owned()
                } else {
                    format!("--{option}={value}")
                };
                let output = run(path, &[&given, "--no-such-option"]);
                let stderr = String::from_utf8_lossy(&output.stderr);
                assert_eq!(output.status.code(), Some(2), "{tool} {given}: {stderr}");
                assert!(
                    stderr.starts_with(&format!("{tool}: ")),
                    "{tool} {given}: {stderr}"
                );
                for rust in [
                    "..=",
                    "not in",
                    "invalid digit",
                    "parse",
                    "Err",
                    "os error",
                    "whole buffer",
                ] {
                    assert!(!stderr.contains(rust), "{tool} {given}: {stderr}");
                }
            }
        }
    }
}

#[test]
fn memleak_names_what_is_missing() {
    let (_, memleak) = TOOLS
        .iter()
        .find(|(tool, _)| *tool == "memleak")
        .expect("a tool");
    let cases: [(&[&str], &str); 6] = [
        (&["-p", "1", "--by-cache"], "add --kernel (-k)"),
        (&["-p", "1", "-s", "0"], "must be a whole number above 0"),
        (
            &["-p", "1", "-z", "9", "-Z", "8"],
            "--min-size (-z) 9 is larger than --max-size (-Z) 8",
        ),
        (&["-p", "1", "5", "1", "7"], "unexpected argument '7'"),
        (
            &["-p", "12", "--growth", "60"],
            "--growth is now: heapscan -p 12 --growth 60",
        ),
        (
            &["-p", "12", "--verdict"],
            "without a trace: heapscan -p 12",
        ),
    ];
    for (args, message) in cases {
        let output = run(memleak, args);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {output:?}");
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(stderr.contains(message), "{args:?}: {stderr}");
    }
}

#[test]
fn names_of_java_are_not_asked_for_where_none_are_shown() {
    let tools = [
        "brkstack",
        "drsnoop",
        "faults",
        "memleak",
        "mmapsnoop",
        "oomkill",
    ];
    for (tool, path) in TOOLS.iter().filter(|(tool, _)| tools.contains(tool)) {
        for cause in [["--interpreters", "off"], ["--unwind", "fp"]] {
            let output = run(path, &["--java-names", cause[0], cause[1]]);
            let stderr = String::from_utf8_lossy(&output.stderr);
            assert_eq!(output.status.code(), Some(2), "{tool} {cause:?}: {stderr}");
            let reason = format!("which {} does not show", cause.join(" "));
            assert!(stderr.contains(&reason), "{tool} {cause:?}: {stderr}");
        }
    }
}

/// Returns bash's completions of the last word of a tool's command line, by the script that the tool prints.
fn completed(tool: &str, path: &str, words: &[&str]) -> Vec<String> {
    const COMPLETE: &str = r#"
        tool=$1 PATH=${2%/*}:$PATH; shift 2
        source <(MEMTOOLS_COMPLETE=bash "$tool")
        COMP_WORDS=("$tool" "$@") COMP_CWORD=$# COMP_TYPE=9
        "_clap_complete_$tool" "$tool" "${@: -1}"
        printf '%s\n' "${COMPREPLY[@]}""#;
    let output = Command::new("bash")
        .args(["-c", COMPLETE, "bash", tool, path])
        .args(words)
        .output()
        .expect("bash starts");
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout.lines().map(str::to_owned).collect()
}

#[test]
fn shells_complete_options_and_processes() {
    let pid = std::process::id().to_string();
    let name = std::fs::read_to_string("/proc/self/comm").expect("a name");
    for &(tool, path) in TOOLS {
        assert_eq!(completed(tool, path, &["--vers"]), ["--version"], "{tool}");
        if ["memagent", "memtriage"].contains(&tool) {
            continue;
        }
        let list = format!("1,{pid}");
        for (words, expected) in [
            (["-p", &pid], &pid),
            (["-p", &list], &list),
            (["-n", name.trim()], &name.trim().to_owned()),
        ] {
            // heapscan examines one process, by its number.
            if tool == "heapscan" && (words[0] == "-n" || words[1].contains(',')) {
                continue;
            }
            let found = completed(tool, path, &words);
            assert!(found.contains(expected), "{tool} {words:?}: {found:?}");
        }
    }
}

#[test]
fn shells_complete_cgroups_and_values() {
    let mounts = std::fs::read_to_string("/proc/self/mounts").expect("mounts");
    let has_cgroups = mounts
        .lines()
        .any(|line| line.split(' ').nth(2) == Some("cgroup2"));
    let of_cgroups = TOOLS
        .iter()
        .filter(|(tool, _)| !["heapscan", "memagent"].contains(tool));
    for &(tool, path) in of_cgroups {
        let found = completed(tool, path, &["--cgroup", "/"]);
        assert_eq!(
            found.iter().any(|found| found == "/"),
            has_cgroups,
            "{tool}: {found:?}"
        );
    }
    for (tool, words, expected) in [
        ("memleak", ["--mode", "ch"], "churn"),
        ("memleak", ["--sort", "r"], "rate"),
        ("memtriage", ["--by", "sl"], "slab"),
    ] {
        let (_, path) = TOOLS
            .iter()
            .find(|(name, _)| *name == tool)
            .expect("a tool");
        assert_eq!(
            completed(tool, path, &words),
            [expected],
            "{tool} {words:?}"
        );
    }
}
