//! Slab caches: outstanding objects of each, and the kernel's own statistics.

use std::io::{self, Write};

pub(super) use memtools::host::slabinfo::Slabinfo;
use memtools::host::slabinfo::Usage;
use memtools::print::output::Row;
use serde::Serialize;

use crate::sums::{Age, Growth};

/// Outstanding objects of one slab cache.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "cache")]
pub(super) struct CacheRow {
    pub(super) cache: String,
    pub(super) allocations: u64,
    pub(super) bytes: u64,
    pub(super) requested_bytes: u64,
    /// The change of /proc/slabinfo since the trace began, whoever made it.
    pub(super) slabinfo: Option<Usage>,
    #[serde(flatten)]
    pub(super) age: Option<Age>,
    #[serde(flatten)]
    pub(super) growth: Option<Growth>,
}

impl CacheRow {
    pub(super) const HEADER: &'static str = concat!(
        "\tCACHE                               OBJECTS        BYTES    REQUESTED",
        " SLABINFO OBJECTS        BYTES"
    );
}

impl Row for CacheRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        let change = |number: Option<i64>| match number {
            Some(number) => format!("{number:+}"),
            None => "-".into(),
        };
        writeln!(
            out,
            "\t{:<31} {:>11} {:>12} {:>12} {:>16} {:>12}",
            self.cache,
            self.allocations,
            self.bytes,
            self.requested_bytes,
            change(self.slabinfo.map(|change| change.objects)),
            change(self.slabinfo.map(|change| change.bytes))
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_stand_below_their_header() {
        let mut row = CacheRow {
            cache: "filp".into(),
            allocations: 202,
            bytes: 51712,
            requested_bytes: 46864,
            age: None,
            growth: None,
            slabinfo: Some(Usage {
                objects: 208,
                bytes: -4096,
            }),
        };
        let mut text = format!("{}\n", CacheRow::HEADER).into_bytes();
        row.text(&mut text).expect("memory");
        row.slabinfo = None;
        row.text(&mut text).expect("memory");
        assert_eq!(
            String::from_utf8_lossy(&text),
            "\tCACHE                               OBJECTS        BYTES    REQUESTED SLABINFO OBJECTS        BYTES\n\
             \tfilp                                    202        51712        46864             +208        -4096\n\
             \tfilp                                    202        51712        46864                -            -\n"
        );
    }
}
