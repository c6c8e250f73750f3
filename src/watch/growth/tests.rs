//! Simulated programs of one and two days, whose alarms are counted: what is normal alarms seldom or never, and a leak is
//! found in time.

use std::f64::consts::TAU;

use super::*;

const MIB: f64 = (1 << 20) as f64;
const LIMIT: u64 = 1 << 30;
const DAY: u64 = 86_400;

const THRESHOLDS: Thresholds = Thresholds {
    mark: 0.85,
    leave: 0.75,
    soon: Duration::from_secs(180),
    slow: Duration::from_secs(DAY),
};

/// Normally distributed numbers, the same in each run.
struct Noise(u64);

impl Noise {
    fn uniform(&mut self) -> f64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// The sum of twelve uniform numbers is about normal, with variance 1.
    fn next(&mut self) -> f64 {
        (0..12).map(|_| self.uniform()).sum::<f64>() - 6.0
    }
}

/// Program whose held memory, in MiB, is a function of the seconds since its start.
struct Program {
    held: fn(f64) -> f64,
    /// Standard deviation, in MiB.
    noise: f64,
    seconds: u64,
    /// Seconds between two looks.
    every: usize,
}

impl Program {
    /// Returns the seconds and the reasons of all alarms.
    fn alarms(&self) -> Vec<(u64, Reason)> {
        let mut noise = Noise(37);
        let mut growth = Growth::default();
        let mut alarms = Vec::new();
        for second in (0..self.seconds).step_by(self.every) {
            let held = (self.held)(second as f64) + self.noise * noise.next();
            let seen = Observed {
                at: Duration::from_secs(DAY + second),
                held: (held.max(0.0) * MIB) as u64,
                limit: LIMIT,
                is_pressed: false,
            };
            if let Some(Change::Entered(reason)) = growth.add(&seen, &THRESHOLDS) {
                alarms.push((second, reason));
            }
        }
        alarms
    }
}

/// Asserts the number of alarms of a program on its first and on its second day.
fn expect(held: fn(f64) -> f64, noise: f64, alarms: [usize; 2]) {
    let program = Program {
        held,
        noise,
        seconds: 2 * DAY,
        every: 5,
    };
    let found = program.alarms();
    let second = found.iter().filter(|(second, _)| *second >= DAY).count();
    assert_eq!([found.len() - second, second], alarms, "{found:?}");
}

/// Returns the position in a period, from 0 to 1.
fn phase(second: f64, period: f64) -> f64 {
    (second % period) / period
}

#[test]
fn what_is_steady_never_alarms() {
    expect(|_| 614.0, 20.0, [0, 0]);
    expect(|at| 500.0 * (1.0 - (-at / 600.0).exp()), 5.0, [0, 0]);
}

#[test]
fn short_bursts_never_alarm() {
    expect(
        |at| if at % 600.0 < 20.0 { 700.0 } else { 300.0 },
        3.0,
        [0, 0],
    );
}

#[test]
fn a_sawtooth_alarms_seldom() {
    expect(|at| 300.0 + 400.0 * phase(at, 90.0), 5.0, [1, 0]);
    expect(|at| 300.0 + 500.0 * phase(at, 2400.0), 5.0, [0, 0]);
    expect(|at| 300.0 + 500.0 * phase(at, 10_800.0), 5.0, [1, 1]);
}

#[test]
fn a_daily_wave_alarms_on_the_first_day_alone() {
    expect(
        |at| 500.0 - 200.0 * (TAU * at / DAY as f64).cos(),
        10.0,
        [2, 0],
    );
}

#[test]
fn a_batch_job_above_the_mark_alarms_each_time() {
    let held = |at: f64| if at % 7200.0 < 5400.0 { 300.0 } else { 875.0 };
    expect(held, 1.0, [12, 12]);
}

#[test]
fn leaks_are_found_before_the_limit() {
    let leak = |held, noise, seconds, every| {
        Program {
            held,
            noise,
            seconds,
            every,
        }
        .alarms()
    };
    // 2 MiB/s: the limit is reached after 362 s.
    let (at, reason) = leak(|at| 300.0 + 2.0 * at, 2.0, 362, 1)[0];
    assert_eq!(reason, Reason::Now);
    assert!(362 - at >= 150, "{at}");
    // 20 MiB/s: the limit is reached after 36 s.
    let (at, reason) = leak(|at| 300.0 + 20.0 * at, 2.0, 36, 1)[0];
    assert_eq!(reason, Reason::Now);
    assert!(36 - at >= 20, "{at}");
    // 1 MiB a minute below a sawtooth of 200 MiB: the limit is reached after 10 hours.
    let held = |at: f64| 200.0 + at / 60.0 + 200.0 * phase(at, 60.0);
    let (at, reason) = leak(held, 5.0, 37_000, 5)[0];
    assert_eq!(reason, Reason::Floor);
    assert!(at <= 3 * 3600, "{at}");
    // 10 MiB an hour: the limit is reached after three days.
    let (at, reason) = leak(|at| 300.0 + at / 360.0, 5.0, 3 * DAY, 5)[0];
    assert_eq!(reason, Reason::Floor);
    assert!(at <= 49 * 3600, "{at}");
}

fn seen(second: u64, held: u64, is_pressed: bool) -> Observed {
    Observed {
        at: Duration::from_secs(second),
        held,
        limit: 1000 << 20,
        is_pressed,
    }
}

#[test]
fn a_suspicion_ends_when_memory_has_been_low_for_two_minutes() {
    let mut growth = Growth::default();
    let mut add = |second, mib: u64| growth.add(&seen(second, mib << 20, false), &THRESHOLDS);
    assert_eq!(add(0, 849), None);
    assert_eq!(add(1, 850), Some(Change::Entered(Reason::Mark)));
    // Between the two bars, nothing changes.
    for second in 2..400 {
        assert_eq!(add(second, if second % 2 == 0 { 751 } else { 860 }), None);
    }
    assert_eq!(add(400, 700), None);
    assert_eq!(add(519, 700), None);
    assert_eq!(add(519, 750), None, "calm begins anew");
    assert_eq!(add(520, 700), None);
    assert_eq!(add(639, 700), None);
    assert_eq!(add(640, 700), Some(Change::Left));
    assert_eq!(add(641, 860), Some(Change::Entered(Reason::Mark)));
}

#[test]
fn pressure_is_a_reason_and_a_suspicion_has_its_most_urgent_one() {
    let mut growth = Growth::default();
    let add = |growth: &mut Growth, second, mib: u64, is_pressed| {
        growth.add(&seen(second, mib << 20, is_pressed), &THRESHOLDS)
    };
    assert_eq!(
        add(&mut growth, 0, 100, true),
        Some(Change::Entered(Reason::Pressure))
    );
    assert_eq!(add(&mut growth, 1, 900, false), None);
    assert_eq!(add(&mut growth, 2, 100, true), None);
    assert_eq!(growth.suspicion(), Some(Reason::Mark));
}

#[test]
fn the_time_left_is_known_only_while_memory_grows() {
    let mut growth = Growth::default();
    let limit = 1000 << 20;
    for second in 0..=60 {
        growth.add(&seen(second, (200 + 2 * second) << 20, false), &THRESHOLDS);
    }
    let left = growth.time_left(320 << 20, limit).expect("it grows");
    assert!((330..=350).contains(&left.as_secs()), "{left:?}");
    for second in 61..=130 {
        growth.add(&seen(second, 320 << 20, false), &THRESHOLDS);
    }
    assert_eq!(growth.time_left(320 << 20, limit), None);
    // The machine was suspended: the values of before do not count.
    growth.add(&seen(10_000, 900 << 20, false), &THRESHOLDS);
    assert_eq!(growth.time_left(900 << 20, limit), None);
}
