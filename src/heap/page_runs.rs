//! Ranges of whole pages, in order, which neither overlap nor touch.

use std::ops::Range;

/// Ranges of whole pages, in order. Ranges that touch each other are merged into one.
pub(super) type PageRuns = Vec<Range<u64>>;

/// Adds a range that begins no earlier than the last one. Merges the two if they touch or overlap.
pub(super) fn add(runs: &mut PageRuns, range: Range<u64>) {
    match runs.last_mut().filter(|last| last.end >= range.start) {
        Some(last) => last.end = last.end.max(range.end),
        None => runs.push(range),
    }
}

/// Returns the pages that are in `one`, in `other`, or in both.
pub(super) fn union(one: &[Range<u64>], other: &[Range<u64>]) -> PageRuns {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut both = PageRuns::new();
    loop {
        let next = match (one.peek(), other.peek()) {
            (Some(first), Some(second)) if second.start < first.start => other.next(),
            (Some(_), _) => one.next(),
            (None, _) => other.next(),
        };
        match next {
            Some(range) => add(&mut both, range.clone()),
            None => return both,
        }
    }
}

/// Returns the pages that are both in `one` and in `other`.
pub(super) fn intersection(one: &[Range<u64>], other: &[Range<u64>]) -> PageRuns {
    let (mut one, mut other) = (one.iter().peekable(), other.iter().peekable());
    let mut both = PageRuns::new();
    while let (Some(first), Some(second)) = (one.peek(), other.peek()) {
        let range = first.start.max(second.start)..first.end.min(second.end);
        if !range.is_empty() {
            add(&mut both, range);
        }
        if first.end <= second.end {
            one.next();
        } else {
            other.next();
        }
    }
    both
}

/// Returns the pages of `one` that are not in `other`.
pub(super) fn difference(one: &[Range<u64>], other: &[Range<u64>]) -> PageRuns {
    let mut rest = PageRuns::new();
    for range in one {
        let mut start = range.start;
        for taken in within(other, range) {
            if taken.start > start {
                add(&mut rest, start..taken.start);
            }
            start = taken.end.min(range.end);
        }
        if start < range.end {
            add(&mut rest, start..range.end);
        }
    }
    rest
}

/// Returns the number of bytes of the runs.
pub(super) fn bytes(runs: &[Range<u64>]) -> u64 {
    runs.iter().map(|run| run.end - run.start).sum()
}

/// Returns the runs that have a page within a range, in order.
pub(super) fn within<'a>(runs: &'a [Range<u64>], range: &Range<u64>) -> &'a [Range<u64>] {
    let first = runs.partition_point(|run| run.end <= range.start);
    let behind = runs.partition_point(|run| run.start < range.end);
    &runs[first..behind.max(first)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_touches_is_one() {
        let both = union(&[1..2, 4..8, 20..30], &[2..3, 5..6, 8..9, 29..40, 50..51]);
        assert_eq!(both, [1..3, 4..9, 20..40, 50..51]);
        let some = [1..2, 4..8];
        assert_eq!(
            (union(&[], &some), union(&some, &[])),
            (some.to_vec(), some.to_vec())
        );
    }

    #[test]
    fn what_is_taken_away_and_what_is_left_are_the_whole() {
        let some = [1..9, 10..20, 30..40, 50..51];
        let other = [0..2, 4..6, 8..12, 15..35, 36..37, 60..70];
        let (both, rest) = (intersection(&some, &other), difference(&some, &other));
        assert_eq!(both, [1..2, 4..6, 8..9, 10..12, 15..20, 30..35, 36..37]);
        assert_eq!(rest, [2..4, 6..8, 12..15, 35..36, 37..40, 50..51]);
        assert_eq!(intersection(&other, &some), both);
        assert_eq!(bytes(&both) + bytes(&rest), bytes(&some));
        assert_eq!(difference(&some, &[]), some);
        assert!(
            difference(&some, &[0..30, 30..90]).is_empty() && intersection(&some, &[]).is_empty()
        );
    }

    #[test]
    fn runs_are_within_by_one_page() {
        let runs = [1..2, 4..8, 20..30];
        assert_eq!(within(&runs, &(2..4)), &runs[..0]);
        assert_eq!(within(&runs, &(7..21)), &runs[1..]);
        assert_eq!(within(&runs, &(0..u64::MAX)), &runs[..]);
        assert!(within(&runs, &(30..31)).is_empty() && within(&runs, &(9..9)).is_empty());
    }
}
