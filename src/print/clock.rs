//! Kernel time stamps (CLOCK_MONOTONIC nanoseconds, as `bpf_ktime_get_ns` returns them) as wall time.

use std::env;
use std::fs;
use std::sync::OnceLock;
use std::time::Duration;

use jiff::tz::TimeZone;
use jiff::{Timestamp, Zoned};
use nix::time::{ClockId, clock_gettime};
use serde::Serializer;

/// Converter of CLOCK_MONOTONIC to wall time, by the offset between the two clocks when the first converter was made.
#[derive(Debug, Clone)]
pub struct Clock {
    /// Wall time minus monotonic time.
    offset: Duration,
}

impl Clock {
    /// Reads both clocks, unless that was done before: one run has one offset.
    pub fn new() -> Self {
        static OFFSET: OnceLock<Duration> = OnceLock::new();
        let offset = *OFFSET.get_or_init(|| {
            let wall = Duration::try_from(Timestamp::now().as_duration()).unwrap_or_default();
            wall.saturating_sub(Duration::from_nanos(monotonic_ns()))
        });
        Self { offset }
    }

    /// Returns the kernel time stamp of a wall time, the inverse of [`Clock::local`].
    pub fn monotonic_ns(&self, time: &Zoned) -> u64 {
        let since_epoch = Duration::try_from(time.timestamp().as_duration()).unwrap_or_default();
        let monotonic = since_epoch.saturating_sub(self.offset);
        u64::try_from(monotonic.as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the local wall time of a kernel time stamp.
    pub fn local(&self, monotonic_ns: u64) -> Zoned {
        let since_epoch = self.offset + Duration::from_nanos(monotonic_ns);
        Timestamp::UNIX_EPOCH
            .checked_add(since_epoch)
            .unwrap_or(Timestamp::MAX)
            .to_zoned(time_zone())
    }
}

impl Default for Clock {
    fn default() -> Self {
        Self::new()
    }
}

/// Returns the machine's time zone, or the one that the variable `TZ` names, as of the first call.
pub(crate) fn time_zone() -> TimeZone {
    static ZONE: OnceLock<TimeZone> = OnceLock::new();
    // To find the zone's name, the library lists all zones, which takes a twentieth of memleak's start.
    let nameless = || {
        let rules = fs::read("/etc/localtime").ok()?;
        TimeZone::tzif("local", &rules).ok()
    };
    let zone = || match env::var_os("TZ") {
        Some(_) => TimeZone::system(),
        None => nameless().unwrap_or_else(TimeZone::system),
    };
    ZONE.get_or_init(zone).clone()
}

/// Returns the local wall time now.
pub fn now() -> Zoned {
    Timestamp::now().to_zoned(time_zone())
}

/// Returns CLOCK_MONOTONIC now, in nanoseconds.
pub fn monotonic_ns() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC)
        .map(Duration::from)
        .unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

/// Formats a time as `HH:MM:SS`, the BCC tools' time of day.
pub fn time_of_day(time: &Zoned) -> String {
    time.strftime("%H:%M:%S").to_string()
}

/// Formats a time by RFC 3339 with microseconds and offset, for JSON.
pub fn rfc3339(time: &Zoned) -> String {
    time.strftime("%Y-%m-%dT%H:%M:%S.%6f%:z").to_string()
}

/// Serializes a time by [`rfc3339`], for the fields of a row.
///
/// # Errors
/// If the serializer fails.
pub fn serialize<S: Serializer>(time: &Zoned, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&rfc3339(time))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn now_is_now() {
        let now = Clock::new().local(monotonic_ns());
        let apart = now.timestamp().as_millisecond() - Timestamp::now().as_millisecond();
        assert!(apart.abs() < 1000, "{apart} ms apart");
    }

    #[test]
    fn the_time_zone_is_the_machine_s() {
        let system = TimeZone::system();
        for month in 1..=12 {
            let time = jiff::civil::date(2026, month, 1).at(12, 0, 0, 0);
            let time = time.to_zoned(TimeZone::UTC).expect("a time").timestamp();
            assert_eq!(time_zone().to_offset(time), system.to_offset(time));
        }
    }

    #[test]
    fn a_time_stamp_comes_back_exactly() {
        for ns in [0, 1, 999_999_999, 86_400_000_000_007] {
            let time = Clock::new().local(ns);
            assert_eq!(Clock::new().monotonic_ns(&time), ns);
        }
    }

    #[test]
    fn formats() {
        let time: Zoned = "2026-11-20T04:05:06.0000075+01:00[+01:00]"
            .parse()
            .expect("a time");
        assert_eq!(time_of_day(&time), "04:05:06");
        assert_eq!(rfc3339(&time), "2026-11-20T04:05:06.000007+01:00");
    }
}
