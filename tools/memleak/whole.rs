//! Summary at the end of a text report: the sums over all groups, of which the report shows a part.

use std::io::{self, Write};

use memtools::print::text;
use memtools::stacks::table::Stack;

use crate::rows::Amount;

/// Sums over all groups of a report.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ReportSummary {
    pub(crate) amount: Amount,
    /// Number of groups with allocations, and of those that were shown.
    pub(crate) groups: usize,
    pub(crate) shown: usize,
    /// Bytes in groups whose stack was lost.
    pub(crate) lost_bytes: u64,
    /// Bytes in groups whose stack is truncated.
    pub(crate) truncated_bytes: u64,
    /// Resident memory of the process now, if the target is a single process.
    pub(crate) resident_bytes: Option<u64>,
}

impl ReportSummary {
    /// Counts these bytes as lost or truncated, if their stack is. `stack` is None if the stack was lost.
    pub(crate) fn note_stack(&mut self, stack: Option<&Stack>, bytes: u64) {
        match stack {
            None => self.lost_bytes += bytes,
            Some(stack) if stack.end.truncated(None).is_some() => self.truncated_bytes += bytes,
            Some(_) => {}
        }
    }

    /// Writes the summary. `group` is the name of a group, such as `stack`.
    pub(crate) fn write(&self, group: &str, out: &mut dyn Write) -> io::Result<()> {
        write!(out, "\ttotal {}", text::bytes(self.amount.bytes))?;
        if let Some(error) = self.amount.error() {
            write!(out, " (estimated, within {})", text::bytes(error))?;
        }
        let blocks = text::count_with_noun(self.amount.allocations, "block");
        let groups = text::count_with_noun(self.groups as u64, group);
        let shown = text::grouped(self.shown as u64);
        write!(out, " in {blocks} of {groups}, shown {shown}")?;
        if let Some(resident) = self.resident_bytes {
            write!(out, "; resident {}", text::bytes(resident))?;
        }
        writeln!(out)?;
        let missing = [
            (self.lost_bytes, "no stack: it was lost"),
            (self.truncated_bytes, "a truncated stack"),
        ];
        for (bytes, what) in missing.into_iter().filter(|(bytes, _)| *bytes > 0) {
            writeln!(out, "\tof these {} with {what}", text::bytes(bytes))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(whole: &ReportSummary) -> String {
        let mut lines = Vec::new();
        whole.write("stack", &mut lines).expect("memory");
        String::from_utf8(lines).expect("UTF-8")
    }

    #[test]
    fn the_line_has_what_there_is() {
        let mut whole = ReportSummary {
            amount: Amount {
                bytes: 5_242_880,
                allocations: 1286,
                ..Amount::default()
            },
            groups: 14,
            shown: 10,
            ..ReportSummary::default()
        };
        assert_eq!(
            lines(&whole),
            "\ttotal 5.2 MB in 1,286 blocks of 14 stacks, shown 10\n"
        );
        whole.resident_bytes = Some(12_300_000);
        whole.amount.error_bytes = Some(1200);
        (whole.lost_bytes, whole.truncated_bytes) = (999, 4_000_000);
        assert_eq!(
            lines(&whole),
            "\ttotal 5.2 MB (estimated, within 1.2 kB) in 1,286 blocks of 14 stacks, shown 10; \
             resident 12.3 MB\n\tof these 999 bytes with no stack: it was lost\n\tof these 4.0 MB \
             with a truncated stack\n"
        );
        whole.amount.error_bytes = Some(0);
        assert!(!lines(&whole).contains("estimated"));
        let one = ReportSummary {
            amount: Amount {
                bytes: 1,
                allocations: 1,
                ..Amount::default()
            },
            groups: 1,
            shown: 1,
            ..ReportSummary::default()
        };
        assert_eq!(
            lines(&one),
            "\ttotal 1 byte in 1 block of 1 stack, shown 1\n"
        );
    }
}
