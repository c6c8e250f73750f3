//! Slab caches, from `/proc/slabinfo`, which only root may read.

use std::collections::HashMap;
use std::fs;

use serde::Serialize;

use crate::host::page_size;
use crate::print::text;

/// `/proc/slabinfo` at one moment, by cache. The kernel merges similar caches into one, which has the name of the
/// first.
#[derive(Debug, Default, Clone)]
pub struct Slabinfo(HashMap<String, Usage>);

/// Objects and bytes of a cache, or their change.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct Usage {
    /// Objects in use, or cached for use on some CPU.
    pub objects: i64,
    /// Bytes of the pages that hold the objects.
    pub bytes: i64,
}

impl Slabinfo {
    /// Reads the present caches; empty if the file cannot be read.
    pub fn read() -> Self {
        let page_bytes = page_size::page_bytes().unwrap_or_default();
        let text = fs::read_to_string("/proc/slabinfo").unwrap_or_default();
        Self::parse(&text, page_bytes.cast_signed())
    }

    /// Parses lines such as `filp 2176 2208 256 16 1 : tunables 0 0 0 : slabdata 138 138 0`, after two lines of
    /// headers.
    pub fn parse(text: &str, page_bytes: i64) -> Self {
        let usage = |line: &str| {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let number = |at: usize| fields.get(at)?.parse::<i64>().ok();
            let bytes = number(14)?
                .checked_mul(number(5)?)?
                .checked_mul(page_bytes)?;
            let usage = Usage {
                objects: number(1)?,
                bytes,
            };
            Some((text::escape(fields[0]).into_owned(), usage))
        };
        Self(text.lines().filter_map(usage).collect())
    }

    /// Returns the number of caches.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether there are no caches, or they could not be read.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns whether a cache with this name exists.
    pub fn has(&self, cache: &str) -> bool {
        self.0.contains_key(cache)
    }

    /// Iterates over the caches with their names, in no particular order.
    pub fn caches(&self) -> impl Iterator<Item = (&str, Usage)> {
        self.0.iter().map(|(name, usage)| (name.as_str(), *usage))
    }

    /// Returns the cache with the most bytes of pages, and its name.
    pub fn largest(&self) -> Option<(&str, Usage)> {
        self.caches().max_by_key(|(_, usage)| usage.bytes)
    }

    /// Returns the change of a cache from this moment to `now`. None if the cache exists at neither moment.
    pub fn change(&self, now: &Self, cache: &str) -> Option<Usage> {
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

    /// Returns the cache whose pages have grown most from this moment to `now`. None if no cache has grown.
    pub fn fastest(&self, now: &Self) -> Option<(String, Usage)> {
        let changes = now.0.keys().filter_map(|name| {
            let change = self.change(now, name)?;
            (change.bytes > 0).then(|| (name.clone(), change))
        });
        changes.max_by_key(|(_, change)| change.bytes)
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
        assert_eq!((before.len(), after.len()), (2, 2));
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
    fn the_largest_and_the_fastest_are_by_bytes() {
        let (before, after) = (Slabinfo::parse(BEFORE, 4096), Slabinfo::parse(AFTER, 4096));
        assert_eq!(after.largest().map(|(name, _)| name), Some("filp"));
        let fastest = before.fastest(&after).expect("one has grown");
        assert_eq!((fastest.0.as_str(), fastest.1.bytes), ("new", 16384));
        assert_eq!(after.fastest(&after), None);
        assert!(Slabinfo::default().largest().is_none());
    }
}
