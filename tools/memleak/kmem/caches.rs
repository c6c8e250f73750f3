//! Slab caches: what is outstanding in each, and what the kernel's own statistics say.

use std::collections::HashMap;
use std::fs;
use std::io::{self, Write};

use memtools::kernel;
use memtools::output::Row;
use memtools::text;
use serde::Serialize;

use crate::report::{Age, Growth};

/// /proc/slabinfo at one moment, by cache.
#[derive(Debug, Default)]
pub(super) struct Slabinfo(HashMap<String, Usage>);

/// What a cache holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(super) struct Usage {
    /// In use, or ready for use on some CPU.
    pub(super) objects: i64,
    /// Of the pages that hold them.
    pub(super) bytes: i64,
}

impl Slabinfo {
    /// As it is now; empty if it cannot be read.
    pub(super) fn read() -> Self {
        let page_bytes = kernel::page_bytes().unwrap_or_default();
        let text = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
        Self::parse(&text, page_bytes.cast_signed())
    }

    /// `filp 2176 2208 256 16 1 : tunables 0 0 0 : slabdata 138 138 0`, after two lines of headers.
    fn parse(text: &str, page_bytes: i64) -> Self {
        let usage = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| fields.get(at)?.parse::<i64>().ok();
            let usage = Usage {
                objects: number(1)?,
                bytes: number(14)? * number(5)? * page_bytes,
            };
            Some((text::escape(fields[0]).into_owned(), usage))
        };
        Self(text.lines().filter_map(usage).collect())
    }

    /// How the cache has changed until `now`; None if it is in neither. Of caches that are alike the
    /// kernel makes one, which has the first one's name here.
    pub(super) fn change(&self, now: &Self, cache: &str) -> Option<Usage> {
        let (before, now) = (self.0.get(cache), now.0.get(cache));
        before.or(now)?;
        let (before, now) = (
            before.copied().unwrap_or_default(),
            now.copied().unwrap_or_default(),
        );
        Some(Usage {
            objects: now.objects - before.objects,
            bytes: now.bytes - before.bytes,
        })
    }
}

/// What is outstanding in one cache.
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

    const BEFORE: &str = "\
slabinfo - version: 2.1
# name            <active_objs> <num_objs> <objsize> <objperslab> <pagesperslab> : tunables <limit>
filp                2176   2208    256   16    1 : tunables    0    0    0 : slabdata    138    138      0
gone                   8      8   1024    8    2 : tunables    0    0    0 : slabdata      1      1      0
";
    const AFTER: &str = "\
filp                2000   2000    256   16    1 : tunables    0    0    0 : slabdata    125    125      0
new                    9     16   1024    8    2 : tunables    0    0    0 : slabdata      2      2      0
";

    #[test]
    fn the_change_is_of_objects_and_of_their_pages() {
        let (before, after) = (Slabinfo::parse(BEFORE, 4096), Slabinfo::parse(AFTER, 4096));
        assert_eq!((before.0.len(), after.0.len()), (2, 2));
        let change = |cache| {
            let change = before.change(&after, cache)?;
            Some((change.objects, change.bytes))
        };
        assert_eq!(change("filp"), Some((-176, -13 * 4096)));
        assert_eq!(change("gone"), Some((-8, -8192)));
        assert_eq!(change("new"), Some((9, 16384)));
        assert_eq!(change("[pages]"), None);
    }

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
