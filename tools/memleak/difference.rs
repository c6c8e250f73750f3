//! Comparison of reports with the profile of an earlier run (--diff), and the exit status that follows (--fail-on).

use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Result;
use jiff::Zoned;
use memtools::export::profile::{Profile, ValueType};
use memtools::export::saved_profile::{Change, SavedProfile};
use memtools::parse;
use memtools::print::clock;
use memtools::print::output::{Output, Row};
use serde::Serialize;

/// The exit status when there is what --fail-on forbids.
const FORBIDDEN: u8 = 3;

/// Options of the comparison.
#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct DifferenceArgs {
    /// Also show the difference of each stack from this profile
    ///
    /// OLD.pb.gz is a file that an earlier run wrote with --export, of this or another build: stacks are compared by
    /// the names of functions. An exported flame graph has the colors of the change: red stacks have grown, blue stacks
    /// have shrunk.
    #[arg(hide_short_help = true, long, value_name = "OLD.pb.gz", conflicts_with_all = ["folded", "by_cache", "trace"])]
    pub(crate) diff: Option<PathBuf>,

    /// Exit with status 3 on this condition
    ///
    /// growth>BYTES, such as growth>1M: the last report exceeds the profile of --diff by more than BYTES. unreachable:
    /// the last --verdict finds a leak.
    #[arg(long, help_heading = "Leak check", value_name = "CONDITION", value_parser = fail_on)]
    pub(crate) fail_on: Option<FailOn>,
}

/// Condition on which a test in CI fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FailOn {
    /// More growth in bytes than this.
    Growth(u64),
    /// A block that nothing refers to.
    Unreachable,
}

fn fail_on(text: &str) -> Result<FailOn, String> {
    if text == "unreachable" {
        return Ok(FailOn::Unreachable);
    }
    let bytes = text.strip_prefix("growth>").map(str::trim_start);
    let bytes = bytes.and_then(|bytes| parse::bytes(bytes).ok());
    bytes.map(FailOn::Growth).ok_or_else(|| {
        "must be unreachable, or growth>BYTES, such as 'growth>0' or 'growth>1M', in quotes".into()
    })
}

/// The profile that reports are compared with.
pub(crate) struct Difference {
    earlier: SavedProfile,
    /// Bytes of growth that are permitted.
    permitted: Option<u64>,
    /// Bytes that the last report has more than the earlier profile.
    grown: i64,
}

impl Difference {
    /// Reads the earlier profile, whose values have to be these. Growth of more than `permitted` bytes is a failure.
    ///
    /// # Errors
    /// If the profile cannot be read, or has other values.
    pub(crate) fn read(path: &Path, values: &[ValueType], permitted: Option<u64>) -> Result<Self> {
        let earlier = SavedProfile::read(path)?;
        earlier.expect(values)?;
        Ok(Self {
            earlier,
            permitted,
            grown: 0,
        })
    }

    /// Prints the sum of all changes, and the stacks that have changed most, the one with the largest growth last.
    pub(crate) fn print(
        &mut self,
        report: &Profile,
        top: usize,
        output: &mut Output,
    ) -> Result<()> {
        let changes = self.earlier.changes(report)?;
        let changes = changes
            .iter()
            .map(|change| Changed::of(change, report.main_value));
        let (changed, same): (Vec<_>, Vec<_>) = changes.partition(Changed::is_any);
        let all = changed.iter().chain(&same);
        let sums = all.fold(Numbers::default(), |sums, change| sums.plus(change.numbers));
        self.grown = sums.growth_bytes;
        output.row(&Sum {
            time: report.until.clone(),
            profile: self.earlier.name(),
            file: self.earlier.file().to_owned(),
            numbers: sums,
            changed: changed.len(),
        })?;
        for change in most_changed(changed, top) {
            output.row(&change)?;
        }
        Ok(())
    }

    /// Whether the last report had more growth than is permitted. If so, prints that.
    pub(crate) fn is_too_much(&self) -> bool {
        let permitted = self.permitted.and_then(|bytes| i64::try_from(bytes).ok());
        let Some(permitted) = permitted.filter(|permitted| self.grown > *permitted) else {
            return false;
        };
        memtools::message!(
            "{} bytes more than in {}; --fail-on permits {permitted}",
            self.grown,
            self.earlier.name()
        );
        true
    }
}

/// Returns the exit status of a run: the command's if the command has failed, else [`FORBIDDEN`] if the run has found
/// what --fail-on forbids.
pub(crate) fn status_if(is_forbidden: bool, command: Option<u8>) -> ExitCode {
    match command {
        None | Some(0) if is_forbidden => ExitCode::from(FORBIDDEN),
        command => command.map_or(ExitCode::SUCCESS, ExitCode::from),
    }
}

/// Returns the stacks that differ by the most bytes, in either direction, with the largest growth last.
fn most_changed(mut changed: Vec<Changed>, top: usize) -> Vec<Changed> {
    let size = |change: &Changed| {
        let Numbers {
            growth_bytes,
            growth_allocations,
            ..
        } = change.numbers;
        (
            growth_bytes.unsigned_abs(),
            growth_allocations.unsigned_abs(),
        )
    };
    // Names come last, so that stacks with equal changes have an order, too.
    changed.sort_by(|one, other| {
        let order = size(other).cmp(&size(one));
        order.then_with(|| (&one.comm, &one.functions).cmp(&(&other.comm, &other.functions)))
    });
    changed.truncate(top);
    changed.sort_by_key(|change| change.numbers.growth_bytes);
    changed
}

/// Numbers of a stack in the report and in the earlier profile.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize)]
struct Numbers {
    bytes: i64,
    earlier_bytes: i64,
    growth_bytes: i64,
    allocations: i64,
    earlier_allocations: i64,
    growth_allocations: i64,
}

impl Numbers {
    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes + other.bytes,
            earlier_bytes: self.earlier_bytes + other.earlier_bytes,
            growth_bytes: self.growth_bytes + other.growth_bytes,
            allocations: self.allocations + other.allocations,
            earlier_allocations: self.earlier_allocations + other.earlier_allocations,
            growth_allocations: self.growth_allocations + other.growth_allocations,
        }
    }

    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(
            out,
            "{:+} bytes ({} before, {} now) in {:+} allocations",
            self.growth_bytes, self.earlier_bytes, self.bytes, self.growth_allocations
        )
    }
}

/// One stack that has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "type", rename = "change")]
struct Changed {
    #[serde(flatten)]
    numbers: Numbers,
    comm: String,
    /// Names, innermost first.
    functions: Vec<String>,
}

impl Changed {
    /// Converts a change. `main` is the index of the bytes among its values, and the other value is the allocations.
    fn of(change: &Change, main: usize) -> Self {
        let value = |values: &[i64], at: usize| values.get(at).copied().unwrap_or_default();
        let [bytes, earlier_bytes] = [&change.now, &change.before].map(|of| value(of, main));
        let count = 1 - main.min(1);
        let [allocations, earlier_allocations] =
            [&change.now, &change.before].map(|of| value(of, count));
        Self {
            numbers: Numbers {
                bytes,
                earlier_bytes,
                growth_bytes: bytes.saturating_sub(earlier_bytes),
                allocations,
                earlier_allocations,
                growth_allocations: allocations.saturating_sub(earlier_allocations),
            },
            comm: change.names.comm.clone(),
            functions: change.names.frames.clone(),
        }
    }

    fn is_any(&self) -> bool {
        self.numbers.growth_bytes != 0 || self.numbers.growth_allocations != 0
    }
}

impl Row for Changed {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "\t")?;
        self.numbers.text(out)?;
        writeln!(out, " from stack of {}", self.comm)?;
        for function in &self.functions {
            writeln!(out, "\t\t{function}")?;
        }
        Ok(())
    }
}

/// Sum of the changes of all stacks.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "difference")]
struct Sum {
    #[serde(serialize_with = "clock::serialize")]
    time: Zoned,
    /// The earlier profile's file.
    file: String,
    #[serde(flatten)]
    numbers: Numbers,
    /// Number of stacks that have changed. Those that have changed most follow.
    changed: usize,
    /// The earlier profile, with its time.
    #[serde(skip)]
    profile: String,
}

impl Row for Sum {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let Self {
            time,
            profile,
            changed,
            ..
        } = self;
        let time = clock::time_of_day(time);
        writeln!(
            out,
            "[{time}] Compared with {profile}, {changed} stacks have changed:"
        )?;
        write!(out, "\tin all ")?;
        self.numbers.text(out)?;
        writeln!(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_a_number_of_bytes() {
        assert_eq!(fail_on("unreachable"), Ok(FailOn::Unreachable));
        assert_eq!(fail_on("growth>0"), Ok(FailOn::Growth(0)));
        assert_eq!(fail_on("growth>1M"), Ok(FailOn::Growth(1 << 20)));
        assert_eq!(fail_on("growth> 512"), Ok(FailOn::Growth(512)));
        for wrong in [
            "",
            "growth",
            "growth>",
            "growth<1",
            "growth>-1",
            "1M",
            "reachable",
        ] {
            assert!(fail_on(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_most_changed_come_by_growth() {
        let change = |name: &str, growth_bytes: i64| Changed {
            numbers: Numbers {
                growth_bytes,
                ..Numbers::default()
            },
            comm: "demo".into(),
            functions: vec![name.into()],
        };
        let all = vec![
            change("a", 5),
            change("b", -70),
            change("c", 60),
            change("d", -4),
        ];
        let names = |top| {
            let most = most_changed(all.clone(), top);
            let names = most.into_iter().map(|change| change.functions[0].clone());
            names.collect::<Vec<_>>()
        };
        assert_eq!(names(3), ["b", "a", "c"]);
        assert_eq!(names(1), ["b"]);
    }
}
