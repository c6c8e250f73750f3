//! Row of `--idle`: reachable blocks on pages that were not accessed for a while.

use std::io::{self, Write};

use serde::Serialize;

use super::judge::Sum;
use crate::heap::idle::IdlePages;
use crate::print::message;
use crate::print::output::Row;
use crate::print::text;

/// Idle part of the reachable memory, and figures on its uncertainty.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "idle")]
pub struct Idle {
    watched_ms: u64,
    #[serde(flatten)]
    sum: Sum,
    reclaim_scanned: u64,
    own_pages: u64,
    own_pages_lost: u64,
    huge_pages_judged: bool,
    cpus_not_reached: usize,
}

impl Idle {
    pub(super) fn of(pages: &IdlePages, sum: Sum) -> Self {
        Self {
            watched_ms: pages.watched.as_millis() as u64,
            sum,
            reclaim_scanned: pages.reclaim_scanned,
            own_pages: pages.own.pages,
            own_pages_lost: pages.own.lost,
            huge_pages_judged: pages.huge_judged,
            cpus_not_reached: pages.cpus_not_reached,
        }
    }
}

impl Row for Idle {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(
            out,
            "{:>26} {:>18} {:>12}  of what is reachable: not used for {:.1} s, page by page",
            "idle",
            text::count_with_noun(self.sum.blocks, "block"),
            text::bytes(self.sum.bytes),
            self.watched_ms as f64 / 1000.0
        )?;
        if self.reclaim_scanned > 0 {
            writeln!(
                out,
                "[uncertain] reclaim scanned {} of all processes during this time, and cleared their Accessed bits: up to as many pages may be shown as idle, and are \
                 not",
                text::count_with_noun(self.reclaim_scanned, "page")
            )?;
        }
        if self.own_pages_lost > 0 {
            writeln!(
                out,
                "[uncertain] {} of {} that {} accessed itself had their Accessed bits cleared (by reclaim, DAMON or others): \
                 about so large a part of what was used may be called idle; with more than a tenth, nothing is",
                text::grouped(self.own_pages_lost),
                text::count_with_noun(self.own_pages, "page"),
                message::tool()
            )?;
        }
        if !self.huge_pages_judged {
            writeln!(
                out,
                "[uncertain] huge pages count as used: huge pages that this tool accessed had their Accessed bits cleared"
            )?;
        }
        if self.cpus_not_reached > 0 {
            writeln!(
                out,
                "[uncertain] {} could not be made to forget page tables: what was used only there may be called idle",
                text::count_with_noun(self.cpus_not_reached as u64, "CPU")
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_uncertain_is_told_beside_what_is_idle() {
        let idle = |reclaim_scanned, cpus_not_reached, own_pages_lost| Idle {
            watched_ms: 60_040,
            sum: Sum {
                blocks: 1009,
                bytes: 4_132_864,
            },
            reclaim_scanned,
            own_pages: 1170,
            own_pages_lost,
            huge_pages_judged: own_pages_lost == 0,
            cpus_not_reached,
        };
        let text = |idle: Idle| {
            let mut text = Vec::new();
            idle.text(&mut text).expect("memory");
            String::from_utf8(text).expect("UTF-8")
        };
        let sure = text(idle(0, 0, 0));
        assert!(
            sure.contains(" 1,009 blocks ") && sure.contains(" 60.0 s"),
            "{sure}"
        );
        assert!(!sure.contains("uncertain"), "{sure}");
        let unsure = text(idle(4211, 1, 3));
        assert_eq!(unsure.matches("\n[uncertain] ").count(), 4, "{unsure}");
        assert!(unsure.contains("] 3 of 1,170 pages "), "{unsure}");
        assert!(
            unsure.contains(" 4,211 pages ") && unsure.contains(" 1 CPU "),
            "{unsure}"
        );
    }
}
