//! One screen about a process: findings, where its memory is, and what holds most of its blocks.

use std::cmp::Reverse;
use std::io::{self, Write};

use anyhow::{Error, Result};
use memtools::heap::blocks::{Coverage, Heap};
use memtools::heap::capture::{self, Request};
use memtools::heap::image::Image;
use memtools::heap::runtimes::Runtime;
use memtools::heap::walk::Walked;
use memtools::print::output::{Output, Row};
use memtools::print::text;
use memtools::process::container::CgroupInfo;
use memtools::process::proc;
use memtools::run::cli;
use memtools::verdict::{
    self, HeapAnalysis, Lost, Reachable, Report, Settings, Suppressions, Untraced, What,
};

use crate::args::ScreenSettings;
use crate::findings::{self, Finding, Level};
use crate::layout::HeapRow;
use crate::sections;

/// Width of the screen, in characters.
pub(crate) const WIDTH: usize = 80;
/// Widths of the names of types, and of what holds them.
const TYPE: usize = 22;
const HOLDER: usize = WIDTH - TYPE - 24;
/// Scope that says nothing to a reader.
const ANONYMOUS: &str = "(anonymous namespace)::";
/// Longest reason why something is not known, in bytes.
const REASON: usize = 300;

/// Prints the screen, from one copy, or from two if blocks are unreachable in the first. Returns the number of leaks.
///
/// # Errors
/// If no copy of the process can be taken: then only the memory that the kernel counts is printed. Also if the heap
/// cannot be judged, and options need the verdict.
pub(crate) fn print(
    settings: ScreenSettings<'_>,
    request: &Request<'_>,
    output: &mut Output,
) -> Result<u64> {
    let Settings { top, container, .. } = settings.report;
    let pid = request.process.pid();
    let cgroup_info = CgroupInfo::of_process(pid);
    let mut layout = None;
    let judged = HeapAnalysis::take_confirmed(request, &mut |walked| {
        let named = sections::name(walked, cgroup_info.clone(), container);
        layout = Some(sections::layout(walked, named, top)?);
        Ok(())
    });
    let mut has_pools = false;
    let judged = judged.and_then(|case| {
        has_pools = case.pools().pools > 0;
        case.report(&settings.report, &mut Untraced, &Suppressions::default())
    });
    let is_copied = layout.is_some();
    let layout = layout.or_else(|| uncopied(pid, cgroup_info, container));
    let why = judged.as_ref().err().map(reason).unwrap_or_default();
    if let Some(layout) = &layout {
        let screen = Screen {
            layout,
            report: judged.as_ref().map_err(|_| why.as_str()),
            has_pools,
            top,
        };
        if settings.is_json {
            screen.json(output)?;
        } else {
            output.raw(|out| screen.text(out))?;
            print_answers(&judged, output)?;
        }
        output.flush()?;
    }
    match judged {
        Err(error) if !is_copied || settings.needs_verdict => Err(error),
        judged => Ok(judged.map_or(0, |report| report.leaks())),
    }
}

/// Prints the answers to --why, and the groups of idle blocks.
fn print_answers(judged: &Result<Report>, output: &mut Output) -> Result<()> {
    let Ok(report) = judged else {
        return Ok(());
    };
    if let Some(idle) = &report.idle {
        output.raw(|out| writeln!(out))?;
        output.row(idle)?;
        let mut idle = report.reachable.iter().filter(|group| group.is_idle());
        idle.try_for_each(|group| output.row(group))?;
    }
    if !report.whys.is_empty() {
        output.raw(|out| writeln!(out))?;
    }
    report.whys.iter().try_for_each(|row| output.row(row))
}

/// Returns the memory of a process that could not be copied, as the kernel counts it. Returns None if that cannot be
/// read either.
fn uncopied(pid: u32, cgroup_info: CgroupInfo, container: bool) -> Option<HeapRow> {
    let comm = std::fs::read(proc::file(pid, "comm")).ok()?;
    let mut image = Image::default();
    image.pid = pid;
    image.comm = comm.strip_suffix(b"\n").unwrap_or(&comm).to_vec();
    image.areas = capture::areas(pid).ok()?;
    let why = "not copied".to_owned();
    let walked = Walked {
        image,
        heap: Heap::new(Vec::new(), Coverage::Unknown { why }),
        glibc: None,
        jemalloc: None,
        images: 0,
    };
    let named = sections::name(&walked, cgroup_info, container);
    sections::layout(&walked, named, 0).ok()
}

/// Returns a reason that has a place on the screen. The whole is on stderr, or in JSON, where it matters.
fn reason(error: &Error) -> String {
    let whole = cli::in_plain_words(&format!("{error:#}"));
    let part = text::truncate(&whole, REASON);
    if part.len() < whole.len() {
        format!("{part}...")
    } else {
        whole
    }
}

struct Screen<'a> {
    layout: &'a HeapRow,
    /// Verdict on the heap, or why there is none.
    report: Result<&'a Report, &'a str>,
    /// Whether the process has pools of CPython.
    has_pools: bool,
    /// Number of rows of the table of blocks.
    top: usize,
}

impl Screen<'_> {
    fn findings(&self) -> Vec<Finding> {
        findings::find(self.layout, self.report)
    }

    /// Prints the rows that the screen is made of.
    fn json(&self, output: &mut Output) -> Result<()> {
        output.row(self.layout)?;
        for finding in self.findings() {
            output.row(&finding)?;
        }
        match self.report {
            Ok(report) => report.print(verdict::Sections::ALL, output),
            Err(_) => Ok(()),
        }
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        self.head(out)?;
        writeln!(out)?;
        let findings = self.findings();
        for finding in &findings {
            Row::text(finding, out)?;
        }
        self.memory(out)?;
        let Ok(report) = self.report else {
            return Ok(());
        };
        blocks(report, self.top, out)?;
        let is_well = findings.iter().all(|finding| finding.level == Level::Ok);
        if let Some(next) = report.next.as_ref().filter(|_| is_well) {
            writeln!(out)?;
            Row::text(next, out)?;
        }
        Ok(())
    }

    fn head(&self, out: &mut dyn Write) -> io::Result<()> {
        let process = self.layout.process();
        let mut head = format!(
            "{} (pid {}){}: ",
            process.comm,
            process.pid,
            process.inside()
        );
        if self.has_pools {
            head += "CPython, ";
        }
        match self.report {
            Ok(report) => {
                let all = findings::all(report);
                let allocator = match report.verdict.allocator.as_str() {
                    "" => "no heap",
                    allocator => allocator,
                };
                let pauses = report.verdict.pauses_us.iter();
                let pauses: Vec<_> = pauses
                    .map(|&us| format!("{:.1}", us as f64 / 1000.0))
                    .collect();
                head += &format!(
                    "{allocator}, {}, {}; paused {} ms",
                    text::count_with_noun(all.blocks, "block"),
                    text::bytes(all.bytes),
                    pauses.join(" and ")
                );
            }
            Err(_) if self.layout.is_copied() => {
                head += &format!(
                    "not examined; paused {:.1} ms",
                    self.layout.paused_us() as f64 / 1000.0
                );
            }
            Err(_) => head += "not copied",
        }
        let lines = text::wrapped(&head, WIDTH);
        lines.iter().try_for_each(|line| writeln!(out, "{line}"))
    }

    fn memory(&self, out: &mut dyn Write) -> io::Result<()> {
        let resident = self.layout.resident();
        let runtime = self.layout.runtime().map_or("", Runtime::heap);
        let other = match (self.layout.is_copied(), self.has_pools) {
            (false, _) => "anonymous, with heaps",
            (true, true) => "CPython pools, anonymous",
            (true, false) => "other anonymous",
        };
        let mut rows = vec![
            ("malloc heap, in use", resident.heap - resident.heap_free),
            ("malloc heap, free", resident.heap_free),
            (runtime, resident.runtime),
            (other, resident.other_private),
            ("stacks", resident.stacks),
            ("shared memory", resident.shared),
            ("files", resident.files),
        ];
        rows.retain(|&(_, bytes)| bytes > 0);
        rows.sort_by_key(|&(_, bytes)| Reverse(bytes));
        rows.push(("total", resident.all));
        writeln!(
            out,
            "\n{:<26} {:>9} {:>9} {:>33}",
            "MEMORY", "RESIDENT", "SHARE", "[more: --layout]"
        )?;
        for (what, bytes) in rows {
            let share = bytes as f64 / resident.all.max(1) as f64 * 100.0;
            let bytes = text::bytes(bytes);
            writeln!(out, "{what:<26} {bytes:>9} {share:>7.1} %")?;
        }
        Ok(())
    }
}

/// Row of the table of blocks.
struct BlocksRow {
    name: String,
    blocks: u64,
    bytes: u64,
    holder: String,
    is_lost: bool,
}

impl BlocksRow {
    fn of_lost(lost: &Lost) -> Self {
        Self {
            name: name(&lost.what),
            blocks: lost.blocks + lost.via_blocks,
            bytes: lost.bytes + lost.via_bytes,
            holder: if lost.via_blocks > 0 {
                "nothing, with what it references".into()
            } else {
                "nothing: unreachable".into()
            },
            is_lost: true,
        }
    }

    fn of_reachable(group: &Reachable) -> Self {
        let percent = group.holder.path_percent;
        let share = if percent < 99.5 {
            format!("{percent:.0} %: ")
        } else {
            String::new()
        };
        let width = HOLDER - share.len();
        Self {
            name: name(&group.what),
            blocks: group.blocks,
            bytes: group.bytes,
            holder: share + &path(&group.holder.chain, &group.holder.root, width),
            is_lost: false,
        }
    }
}

/// Returns a short name of a kind of blocks.
fn name(what: &What) -> String {
    let text = what.text();
    let text = text.strip_suffix(" each").unwrap_or(&text);
    text::display_name(text).replace(ANONYMOUS, "")
}

/// Writes the types with most bytes. Unreachable types are always among them.
fn blocks(report: &Report, top: usize, out: &mut dyn Write) -> io::Result<()> {
    let mut rows: Vec<_> = report.lost.iter().map(BlocksRow::of_lost).collect();
    rows.extend(report.reachable.iter().map(BlocksRow::of_reachable));
    rows.sort_by_key(|row| (Reverse(row.bytes), !row.is_lost));
    let has_lost = rows.iter().take(top).any(|row| row.is_lost);
    let first_lost = rows.iter().position(|row| row.is_lost);
    if let Some(first) = first_lost.filter(|_| !has_lost) {
        let lost = rows.remove(first);
        rows.insert(top - 1, lost);
    }
    rows.truncate(top);
    writeln!(
        out,
        "\n{:<TYPE$} {:>9} {:>10}  {:<14} {:>19}",
        "BLOCKS", "BYTES", "COUNT", "REFERENCED BY", "[more: --roots]"
    )?;
    for row in &rows {
        writeln!(
            out,
            "{:<TYPE$} {:>9} {:>10}  {}",
            cut(&row.name, TYPE),
            text::bytes(row.bytes),
            text::grouped(row.blocks),
            cut(&row.holder, HOLDER)
        )?;
    }
    let all = findings::all(report);
    let (blocks, bytes) = rows
        .iter()
        .fold((0, 0), |sum, row| (sum.0 + row.blocks, sum.1 + row.bytes));
    let more = report.groups.saturating_sub(rows.len());
    if all.blocks > blocks {
        writeln!(
            out,
            "{:<TYPE$} {:>9} {:>10}  {:>33}",
            rest(more),
            text::bytes(all.bytes.saturating_sub(bytes)),
            text::grouped(all.blocks - blocks),
            "[more: --types]"
        )?;
    }
    Ok(())
}

/// Describes a reference path within a width: the nearest blocks with a type, and the root.
fn path(chain: &[String], root: &str, width: usize) -> String {
    let root = root.strip_prefix("global ").unwrap_or(root);
    let root = &root.replace(ANONYMOUS, "");
    let mut names: Vec<&str> = chain
        .iter()
        .filter(|label| !label.starts_with('['))
        .map(|label| {
            label
                .rsplit_once(" [")
                .map_or(label.as_str(), |(name, _)| name)
        })
        .collect();
    names.dedup();
    let joined = |names: &[&str], dots: &str| {
        let mut parts = names.to_vec();
        if !dots.is_empty() {
            parts.push(dots);
        }
        parts.push(root);
        parts.join(" <- ")
    };
    let whole = joined(&names, "");
    if whole.chars().count() <= width {
        return whole;
    }
    let shorter = (0..names.len())
        .rev()
        .map(|count| joined(&names[..count], "..."));
    let mut fitting = shorter.filter(|text| text.chars().count() <= width);
    fitting.next().unwrap_or_else(|| cut(root, width))
}

/// Cuts the middle out of a text that is wider than `width` characters.
fn cut(text: &str, width: usize) -> String {
    let length = text.chars().count();
    if length <= width {
        return text.to_owned();
    }
    let kept = width - 3;
    let head = kept / 2;
    let first: String = text.chars().take(head).collect();
    let last: String = text.chars().skip(length - (kept - head)).collect();
    format!("{first}...{last}")
}

/// Names the row of the blocks without a row. Blocks that are unreachable in one copy only, and others that were not
/// judged, are in the sums, but of no type.
fn rest(more_types: usize) -> String {
    match more_types {
        0 => "other blocks".to_owned(),
        more => text::count_with_noun(more as u64, "more type"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_of_no_type_have_a_row() {
        assert_eq!(rest(0), "other blocks");
        assert_eq!(rest(1), "1 more type");
        assert_eq!(rest(20), "20 more types");
    }

    #[test]
    fn a_path_fits_its_width_and_keeps_its_root() {
        let chain = ["Node [48]", "[4096]", "Node [48]", "std::vector [24]"].map(str::to_owned);
        let of = |width| path(&chain, "global server`sessions", width);
        assert_eq!(of(60), "Node <- std::vector <- server`sessions");
        assert_eq!(of(34), "Node <- ... <- server`sessions");
        assert_eq!(of(27), "... <- server`sessions");
        assert_eq!(of(12), "serv...sions");
        assert_eq!(
            path(&[], "stack of thread 7, sp+16", 40),
            "stack of thread 7, sp+16"
        );
    }

    #[test]
    fn what_is_cut_has_its_width() {
        assert_eq!(cut("abcdefgh", 8), "abcdefgh");
        assert_eq!(cut("abcdefghi", 8), "ab...ghi");
        assert_eq!(cut("äöüäöüäöü", 8).chars().count(), 8);
    }
}
