//! memleak's verdict in Memcheck's terms, beside valgrind's own on the same program. Also valgrind's suppressions.

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use serde_json::Value;

use crate::harness::{self, ToolOutput};
use crate::verdict_traced::number;

/// Fields of the sums, with valgrind's names for them.
const SUMS: [(&str, &str); 5] = [
    ("definitely_lost", "definitely lost:"),
    ("indirectly_lost", "indirectly lost:"),
    ("possibly_lost", "possibly lost:"),
    ("still_reachable", "still reachable:"),
    ("suppressed", "suppressed:"),
];

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "memleak::verdict_memcheck":
        sums_are_memchecks [Host],
        losses_are_leak_sanitizers [Host],
        suppressions_are_valgrinds [Host],
        bad_suppressions_are_refused [Once],
        a_function_is_asked_for [Once],
    }
}

/// Runs a workload under memleak with these arguments.
fn at_exit(workload: &str, args: &[&str]) -> Result<ToolOutput> {
    let path = harness::workload(workload);
    let path = path.display().to_string();
    let options = ["-jT", "1000", "--verdict", "-c", &path];
    harness::run("memleak", &[&options[..], args].concat())
}

fn row(ended: &ToolOutput, kind: &str) -> Result<Value> {
    let mut rows = ended.objects_among_lines()?.into_iter();
    let row = rows.find(|row| row["type"] == kind);
    row.with_context(|| format!("no {kind}: {ended:?}"))
}

/// Runs a workload under valgrind. Returns bytes and blocks of each class.
fn valgrind(workload: &str, args: &[&str]) -> Result<Vec<(u64, u64)>> {
    let mut command = Command::new("valgrind");
    // memleak does not make the C library free what it keeps until the end, either.
    command.args(["--run-libc-freeres=no", "--run-cxx-freeres=no"]);
    command.args(["--leak-check=full", "--show-leak-kinds=all"]);
    let output = command
        .args(args)
        .arg(harness::workload(workload))
        .stdin(std::process::Stdio::null())
        .output()
        .context("failed to start valgrind; run: scripts/need valgrind")?;
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    let sum = |name: &str| {
        // Example: "==12==    definitely lost: 50,820 bytes in 107 blocks"
        let mut sums = text.lines().filter(|line| line.contains(" bytes in "));
        let (_, sum) = sums.find_map(|line| line.split_once(name))?;
        let digits = |part: &str| {
            let digits: String = part.chars().filter(char::is_ascii_digit).collect();
            digits.parse().ok()
        };
        let (bytes, blocks) = sum.split_once(" bytes in ")?;
        Some((digits(bytes)?, digits(blocks)?))
    };
    let sums = SUMS.map(|(_, name)| sum(name).with_context(|| format!("no {name} in {text}")));
    sums.into_iter().collect()
}

fn sums(ended: &ToolOutput) -> Result<Vec<(u64, u64)>> {
    let row = row(ended, "memcheck")?;
    let sum = |(field, _): &(&str, &str)| {
        let sum = &row[*field];
        (number(sum, "bytes"), number(sum, "blocks"))
    };
    Ok(SUMS.iter().map(sum).collect())
}

fn sums_are_memchecks() -> Result<()> {
    let ours = sums(&at_exit("forget", &[])?)?;
    ensure!(ours[0].1 == 101 + 1 + 5 + 7, "{ours:?}");
    ensure!(ours[2] == (700, 1), "{ours:?}");
    let theirs = valgrind("forget", &[])?;
    ensure!(ours == theirs, "memleak {ours:?}, valgrind {theirs:?}");
    Ok(())
}

/// LeakSanitizer is linked into a program, and judges it at its exit. The same source is built with it.
fn losses_are_leak_sanitizers() -> Result<()> {
    let ours = sums(&at_exit("forget", &[])?)?;
    let output = Command::new(harness::workload("forget-lsan"))
        .stdin(std::process::Stdio::null())
        .output()?;
    let text = String::from_utf8_lossy(&output.stderr);
    let sum = |kind: &str| {
        // Example: "Direct leak of 50500 byte(s) in 101 object(s) allocated from:"
        let leaks = text.lines().filter_map(|line| line.strip_prefix(kind));
        let numbers = leaks.map(|line| {
            let numbers = line.split(' ').filter_map(|word| word.parse().ok());
            numbers.collect::<Vec<u64>>()
        });
        numbers.fold((0, 0), |(bytes, blocks), leak| match leak[..] {
            [of_leak, in_leak] => (bytes + of_leak, blocks + in_leak),
            _ => (bytes, blocks),
        })
    };
    let theirs = [sum("Direct leak of "), sum("Indirect leak of ")];
    ensure!(
        ours[..2] == theirs && theirs[0].1 == 101 + 1 + 5 + 7,
        "memleak {ours:?}, LeakSanitizer {theirs:?}: {text}"
    );
    let (bytes, blocks) = (ours[0].0 + ours[1].0, ours[0].1 + ours[1].1);
    let summary =
        format!("SUMMARY: LeakSanitizer: {bytes} byte(s) leaked in {blocks} allocation(s).");
    ensure!(text.contains(&summary), "not {summary}: {text}");
    Ok(())
}

/// Both tools read the same file, and suppress the same leaks.
fn suppressions_are_valgrinds() -> Result<()> {
    const FILE: &str = "\
# names as valgrind has them, and as the source has
{
   <forgotten>
   Memcheck:Leak
   match-leak-kinds: definite
   fun:calloc
   fun:*forget*
   fun:*work*
   fun:main
}
{
   the list, of which only the head is definite
   Memcheck:Leak
   match-leak-kinds: indirect,possible
   ...
   fun:_ZN12_GLOBAL__N_1*lose_list*
   ...
   fun:main
}
{
   what is kept
   Memcheck:Leak
   fun:calloc
   obj:*/forget
   obj:*/forget
   fun:main
}
{
   not a leak
   Memcheck:Cond
   fun:main
}
{
   by another caller
   Memcheck:Leak
   fun:malloc
   fun:main
}
";
    let folder = harness::scratch()?;
    let file = folder.path().join("suppressions");
    fs::write(&file, FILE)?;
    let file = file.to_str().context("no name")?;
    let ended = at_exit("forget", &["--suppressions", file])?;
    let ours = sums(&ended)?;
    let theirs = valgrind("forget", &[&format!("--suppressions={file}")])?;
    ensure!(ours == theirs, "memleak {ours:?}, valgrind {theirs:?}");
    ensure!(
        number(&row(&ended, "verdict")?, "ignored_suppressions") == 1,
        "{ended:?}"
    );
    let suppressed = row(&ended, "suppressed")?;
    ensure!(suppressed["name"] == "<forgotten>", "{suppressed}");
    ensure!(number(&suppressed, "blocks") == 101, "{suppressed}");
    // For CI, too, a suppressed leak does not count.
    let all = "{\nall\nMemcheck:Leak\n...\nfun:main\n}\n";
    fs::write(Path::new(file), all)?;
    let args = ["--suppressions", file, "--fail-on", "unreachable"];
    let ended = at_exit("forget", &args)?;
    ensure!(ended.status.code() == Some(0), "{ended:?}");
    ensure!(sums(&ended)?[0] == (0, 0), "{ended:?}");
    Ok(())
}

fn bad_suppressions_are_refused() -> Result<()> {
    let folder = harness::scratch()?;
    let file = folder.path().join("suppressions");
    let path = file.to_str().context("no name")?;
    for (text, says) in [
        (
            "{\nname\nMemcheck:Leak\nfun:f\n",
            "line 1: this entry has no end",
        ),
        (
            "{\nname\nMemcheck:Leak\nfn:f\n}\n",
            "line 4: not understood: fn:f",
        ),
    ] {
        fs::write(&file, text)?;
        let ended = at_exit("forget", &["--suppressions", path])?;
        ensure!(ended.status.code() == Some(1), "{ended:?}");
        ensure!(ended.stderr.contains(says), "{ended:?}");
        ensure!(
            !ended.stdout.contains("ready"),
            "the command was run: {ended:?}"
        );
    }
    Ok(())
}

fn a_function_is_asked_for() -> Result<()> {
    let ended = at_exit("forget", &["--why", "remember", "--why", "lose_list"])?;
    let rows = ended.objects_among_lines()?;
    let whys: Vec<_> = rows.iter().filter(|row| row["type"] == "why").collect();
    ensure!(whys.len() == 2, "{rows:?}");
    ensure!(
        number(whys[0], "blocks") == 53 && number(whys[0], "bytes") == 15_900,
        "{whys:?}"
    );
    let holder = &whys[0]["tree"][0]["holder"];
    ensure!(
        *holder == "global forget`(anonymous namespace)::kept",
        "{whys:?}"
    );
    ensure!(number(whys[1], "blocks") == 19, "{whys:?}");
    // All elements of an array are shown as one.
    ensure!(number(&whys[0]["tree"][0], "blocks") == 53, "{whys:?}");
    let holder = &whys[1]["tree"][0]["holder"];
    ensure!(*holder == "nothing: unreachable", "{whys:?}");
    Ok(())
}
