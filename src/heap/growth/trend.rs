//! Course of a number over time: a line through it with an interval, and whether the number grows, has grown, or
//! comes back.

/// Line through points, by least squares.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Line {
    /// Growth of the number per second.
    pub slope: f64,
    /// Lower end of the interval that contains the true slope in 95 % of all cases.
    pub low: f64,
    /// Upper end of this interval.
    pub high: f64,
}

/// The 97.5 % quantiles of Student's t distribution, from one degree of freedom on.
const STUDENT: [f64; 12] = [
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179,
];
/// Quantile of the normal distribution, which Student's quantiles approach from above.
const NORMAL: f64 = 1.96;

impl Line {
    /// Fits a line to points of seconds and numbers. Returns None if there are fewer than three points, or if all are
    /// of one moment.
    ///
    /// The interval assumes that deviations from the line are independent. Where they are not, as those of a number
    /// that wanders, the interval is too narrow: so [`course`] asks for more than a slope.
    pub fn through(points: &[(f64, f64)]) -> Option<Self> {
        let freedom = points.len().checked_sub(2).filter(|&freedom| freedom > 0)?;
        let count = points.len() as f64;
        let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
        let (middle, level) = (mean(|point| point.0), mean(|point| point.1));
        let spread: f64 = points.iter().map(|(at, _)| (at - middle).powi(2)).sum();
        if spread <= 0.0 {
            return None;
        }
        let together = points
            .iter()
            .map(|(at, value)| (at - middle) * (value - level));
        let slope = together.sum::<f64>() / spread;
        let rest = points
            .iter()
            .map(|(at, value)| (value - level - slope * (at - middle)).powi(2));
        let error = (rest.sum::<f64>() / freedom as f64 / spread).sqrt();
        let half = error * STUDENT.get(freedom - 1).copied().unwrap_or(NORMAL);
        Some(Self {
            slope,
            low: slope - half,
            high: slope + half,
        })
    }
}

/// Course of a number over time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Course {
    /// Growth that goes on.
    Growing,
    /// Growth that has ended.
    Stopped,
    /// Growth at the end. Nobody knows yet whether it goes on.
    Late,
    /// A rise, and the way back.
    Burst,
    /// A fall.
    Falling,
    /// No change that matters, or none that has a direction.
    Level,
}

/// Limits below which a change of a number does not matter.
#[derive(Debug, Clone, Copy)]
pub struct Thresholds {
    /// Limits of growth that goes on: as a number, and as a part of the highest number.
    pub growth: (f64, f64),
    /// Limits of any other change: as a number, and as a part of the lowest number.
    pub change: (f64, f64),
}

/// Parts of the way from the lowest to the highest number: from `UP` on a number is up, and below `DOWN` it is down.
const UP: f64 = 0.7;
const DOWN: f64 = 0.3;
/// Part of the time after which the last part begins, in which growth must go on, and part of the average growth that
/// it must have there.
const LAST_PART: f64 = 0.6;
const GROWS_ON: f64 = 1.0 / 3.0;
/// Part of all growth from which on a single step counts as all of it.
const ONE_STEP: f64 = 0.8;

/// Judges the course of a number by points of seconds and numbers, in order of time. Fewer than three points tell
/// nothing.
///
/// A number is growing if the interval of its line's slope is above 0, and if every point of its last third is above
/// all points of its first third. The growth must not be in one step, and in the last part it must be at least a
/// third of the average.
pub fn course(points: &[(f64, f64)], least: Thresholds) -> Course {
    let values = || points.iter().map(|point| point.1);
    let (Some(first), Some(last), Some(line)) =
        (points.first(), points.last(), Line::through(points))
    else {
        return Course::Level;
    };
    let lowest = values().fold(f64::INFINITY, f64::min);
    let highest = values().fold(f64::NEG_INFINITY, f64::max);
    let growth = last.1 - first.1;
    let third = (points.len() / 3).max(1);
    let rises = values().rev().take(third).fold(f64::INFINITY, f64::min)
        > values().take(third).fold(f64::NEG_INFINITY, f64::max);
    let least_growth = least.growth.0.max(least.growth.1 * highest);
    if growth >= least_growth && line.low > 0.0 && rises && goes_on(points, growth) {
        return Course::Growing;
    }
    let least_change = least.change.0.max(least.change.1 * lowest);
    let range = highest - lowest;
    if range < least_change {
        return Course::Level;
    }
    let is_up = |value: f64| value >= lowest + UP * range;
    let is_down = |value: f64| value <= lowest + DOWN * range;
    let rose = values().skip_while(|&value| !is_down(value));
    let mut after = rose.skip_while(|&value| !is_up(value));
    if after.any(is_down) {
        Course::Burst
    } else if growth >= least_change && is_up(last.1) {
        let before = points.len().checked_sub(2).map(|at| points[at].1);
        if before.is_some_and(is_down) {
            Course::Late
        } else {
            Course::Stopped
        }
    } else if growth <= -least_change {
        Course::Falling
    } else {
        Course::Level
    }
}

/// Whether growth is not one step, and goes on in the last part.
fn goes_on(points: &[(f64, f64)], growth: f64) -> bool {
    let steps = points.windows(2).map(|pair| pair[1].1 - pair[0].1);
    let largest = steps.fold(f64::NEG_INFINITY, f64::max);
    if points.len() > 3 && largest >= ONE_STEP * growth {
        return false;
    }
    let (first, last) = (points[0], points[points.len() - 1]);
    let from = first.0 + LAST_PART * (last.0 - first.0);
    let late = last.1 - value_at(points, from);
    late >= GROWS_ON * (1.0 - LAST_PART) * growth
}

/// Returns the number at a moment between two points, on the straight line between them.
fn value_at(points: &[(f64, f64)], at: f64) -> f64 {
    let after = points.partition_point(|point| point.0 < at);
    let (Some(before), Some(after)) = (
        after.checked_sub(1).and_then(|before| points.get(before)),
        points.get(after),
    ) else {
        return points.first().map_or(0.0, |point| point.1);
    };
    let part = (at - before.0) / (after.0 - before.0).max(f64::MIN_POSITIVE);
    before.1 + part * (after.1 - before.1)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: Thresholds = Thresholds {
        growth: (10.0, 0.001),
        change: (100.0, 0.1),
    };

    fn of(values: &[f64]) -> Course {
        let points: Vec<_> = (0..).map(f64::from).zip(values.iter().copied()).collect();
        course(&points, LEAST)
    }

    #[test]
    fn a_line_has_the_slope_and_the_interval_of_a_textbook() {
        // Heights and weights of 15 women, for which textbooks have 61.272 and a standard error of 1.7759.
        let heights = [
            1.47, 1.50, 1.52, 1.55, 1.57, 1.60, 1.63, 1.65, 1.68, 1.70, 1.73, 1.75, 1.78, 1.80,
            1.83,
        ];
        let weights = [
            52.21, 53.12, 54.48, 55.84, 57.20, 58.57, 59.93, 61.29, 63.11, 64.47, 66.28, 68.10,
            69.92, 72.19, 74.46,
        ];
        let points: Vec<_> = heights.into_iter().zip(weights).collect();
        let line = Line::through(&points).expect("a line");
        assert!((line.slope - 61.272).abs() < 0.001, "{line:?}");
        // With 13 degrees of freedom the quantile is 2.160; here it is the normal distribution's.
        assert!(
            (line.high - line.slope - 1.96 * 1.7759).abs() < 0.01,
            "{line:?}"
        );
        let three = [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0)];
        let line = Line::through(&three).expect("a line");
        // The standard error is 0.28868.
        assert!((line.slope - 1.5).abs() < 1e-9, "{line:?}");
        assert!(
            (line.slope - line.low - 12.706 * 0.28868).abs() < 1e-3,
            "{line:?}"
        );
        assert_eq!(Line::through(&three[..2]), None);
        assert_eq!(Line::through(&[(1.0, 1.0); 4]), None);
    }

    #[test]
    fn what_goes_on_grows() {
        assert_eq!(of(&[0.0, 100.0, 200.0]), Course::Growing);
        assert_eq!(
            of(&[5e6, 5e6 + 4e3, 5e6 + 8e3, 5e6 + 1.2e4]),
            Course::Growing
        );
        // Growth by steps, and growth that slows down.
        assert_eq!(
            of(&[0.0, 0.0, 90.0, 90.0, 90.0, 180.0, 180.0, 270.0, 270.0]),
            Course::Growing
        );
        assert_eq!(
            of(&[0.0, 100.0, 190.0, 270.0, 340.0, 400.0, 450.0]),
            Course::Growing
        );
        // Three points of which the middle one is off the line tell no slope.
        assert_ne!(of(&[0.0, 500.0, 600.0]), Course::Growing);
    }

    #[test]
    fn what_was_there_before_is_no_growth() {
        let wanders = [0.0, 390.0, 100.0, 200.0, 300.0, 250.0, 400.0, 350.0, 500.0];
        let points: Vec<_> = (0..).map(f64::from).zip(wanders).collect();
        assert!(Line::through(&points).is_some_and(|line| line.low > 0.0));
        assert_ne!(of(&wanders), Course::Growing);
    }

    #[test]
    fn what_does_not_go_on_has_stopped_or_come_back() {
        assert_eq!(
            of(&[0.0, 400.0, 650.0, 800.0, 800.0, 800.0, 800.0, 805.0]),
            Course::Stopped
        );
        assert_eq!(
            of(&[0.0, 0.0, 0.0, 0.0, 800.0, 800.0, 800.0]),
            Course::Stopped
        );
        assert_eq!(of(&[0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 800.0]), Course::Late);
        assert_eq!(of(&[0.0, 0.0, 800.0, 800.0, 0.0, 0.0]), Course::Burst);
        assert_eq!(of(&[0.0, 800.0, 0.0, 0.0, 0.0, 800.0]), Course::Burst);
        assert_eq!(of(&[800.0, 600.0, 400.0, 200.0]), Course::Falling);
        assert_eq!(of(&[900.0, 0.0, 0.0, 0.0]), Course::Falling);
    }

    #[test]
    fn what_is_too_little_stays_where_it_is() {
        assert_eq!(of(&[0.0, 3.0, 6.0, 9.0]), Course::Level);
        assert_eq!(of(&[1e6, 1e6 + 9e4, 1e6, 1e6 + 9e4, 1e6]), Course::Level);
        assert_eq!(
            of(&[1e6, 1e6 + 300.0, 1e6 + 600.0, 1e6 + 900.0]),
            Course::Level
        );
        assert_eq!(of(&[1.0, 2.0]), Course::Level);
        assert_eq!(of(&[]), Course::Level);
    }

    #[test]
    fn a_number_between_points_is_on_the_line_between_them() {
        let points = [(0.0, 0.0), (1.0, 10.0), (3.0, 50.0)];
        for (at, value) in [
            (0.0, 0.0),
            (0.5, 5.0),
            (1.0, 10.0),
            (2.0, 30.0),
            (3.0, 50.0),
        ] {
            assert_eq!(value_at(&points, at), value, "{at}");
        }
    }
}
