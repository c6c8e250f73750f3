use super::*;
use crate::heap::growth::follow::Key;

/// Number of programs that are made up for each label.
const PROGRAMS: u64 = 400;
/// Number of these programs that may be judged wrong.
const WRONG: u64 = PROGRAMS / 20;
const MEGABYTE: f64 = 1e6;

/// Generator of numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// Returns a number from 0 to 1.
    fn part(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn between(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.part()
    }

    /// Returns a number that is about as often above 0 as below, and mostly within 1 of it.
    fn noise(&mut self) -> f64 {
        (0..6).map(|_| self.between(-1.0, 1.0)).sum::<f64>() / 1.4
    }
}

/// Memory of a made-up program, over the time from 0 to 1.
struct Program {
    live: Box<dyn Fn(f64) -> f64>,
    free: Box<dyn Fn(f64) -> f64>,
    /// Memory outside of the heap.
    other: Box<dyn Fn(f64) -> f64>,
    /// Part of the new memory that nothing refers to.
    lost: Option<f64>,
    /// Part of the new memory that only cycles hold.
    cycles: Option<f64>,
    forks: u64,
}

impl Program {
    fn level(bytes: f64) -> Self {
        Self {
            live: Box::new(move |_| bytes),
            free: Box::new(|_| MEGABYTE),
            other: Box::new(|_| 5.0 * MEGABYTE),
            lost: Some(0.0),
            cycles: None,
            forks: 0,
        }
    }

    fn live(self, live: impl Fn(f64) -> f64 + 'static) -> Self {
        let live = Box::new(live);
        Self { live, ..self }
    }
}

/// Makes a program of this label, of random sizes and rates, in a process that has 2 to 50 MB to begin with.
fn program(label: Verdict, numbers: &mut Numbers) -> Program {
    let base = numbers.between(2.0, 50.0) * MEGABYTE;
    let size = numbers.between(0.5, 1.5) * base;
    let start = numbers.between(0.1, 0.4);
    let level = Program::level(base);
    match label {
        Verdict::Leak => Program {
            lost: Some(numbers.between(0.3, 1.0)),
            ..level.live(move |at| base + size * at)
        },
        Verdict::Unbounded => Program {
            lost: Some(numbers.between(0.0, 0.02)),
            ..level.live(move |at| base + size * at.powf(0.7 + start))
        },
        Verdict::Cycles => Program {
            cycles: Some(numbers.between(0.6, 1.0)),
            ..level.live(move |at| base + size * at)
        },
        Verdict::Growing => Program {
            lost: None,
            ..level.live(move |at| base + size * at)
        },
        Verdict::WarmUp => level.live(move |at| base + size * (at / start).min(1.0)),
        Verdict::Burst => {
            let is_on = move |at: f64| at > start && at < start + 0.4;
            level.live(move |at| base + if is_on(at) { size } else { 0.0 })
        }
        Verdict::Fragmentation => Program {
            free: Box::new(move |at| MEGABYTE + size * at),
            ..level.live(move |at| base + 0.05 * size * at)
        },
        Verdict::Elsewhere => Program {
            other: Box::new(move |at| 5.0 * MEGABYTE + size * at),
            ..level
        },
        Verdict::ForkServer => Program { forks: 7, ..level },
        Verdict::Steady | Verdict::Undecided => level,
    }
}

/// Returns the points of a program in `count` images, with up to 1 % of noise in each number.
fn points(program: &Program, count: usize, numbers: &mut Numbers) -> Vec<Point> {
    let mut noisy = |number: f64| (number * (1.0 + 0.005 * numbers.noise())) as u64;
    let point = |number: usize| {
        let at = number as f64 / (count - 1) as f64;
        let live = noisy((program.live)(at));
        let free_resident = noisy((program.free)(at));
        Point {
            seconds: at * 60.0,
            blocks: live / 100,
            live,
            heap_resident: live + free_resident,
            free_resident,
            resident: live + free_resident + noisy((program.other)(at)),
            others: OtherParts::default(),
        }
    };
    (0..count).map(point).collect()
}

#[test]
fn made_up_programs_of_each_label_are_told_apart() {
    let mut numbers = Numbers(0x9e37_79b9_7f4a_7c15);
    for label in [
        Verdict::Leak,
        Verdict::Unbounded,
        Verdict::Cycles,
        Verdict::Growing,
        Verdict::WarmUp,
        Verdict::Burst,
        Verdict::Fragmentation,
        Verdict::Elsewhere,
        Verdict::ForkServer,
        Verdict::Steady,
    ] {
        let mut wrong = Vec::new();
        for _ in 0..PROGRAMS {
            let program = program(label, &mut numbers);
            let count = 8 + (numbers.next() % 5) as usize;
            let points = points(&program, count, &mut numbers);
            let growth = grown(&points, |point| point.live).max(0.0);
            let judged = judge(Evidence {
                points: &points,
                lost: program.lost.map(|part| (part * growth) as u64),
                cycles: program.cycles.map_or(0, |part| (part * growth) as u64),
                forks: program.forks,
            });
            if judged != label {
                wrong.push((judged, points));
            }
        }
        assert!(
            wrong.len() as u64 <= WRONG,
            "{label:?}: {} of {PROGRAMS}, such as {:?}",
            wrong.len(),
            wrong[0]
        );
    }
}

#[test]
fn three_images_of_what_grows_in_a_line_are_enough() {
    let program = Program::level(0.0).live(|at| (3.0 + 4.0 * at) * MEGABYTE);
    let mut points = points(&program, 3, &mut Numbers(7));
    for (point, live) in points.iter_mut().zip([3_000_000, 5_000_000, 7_010_000]) {
        point.live = live;
        point.resident = 20_000_000;
    }
    let judged = |lost, points: &[Point]| {
        judge(Evidence {
            points,
            lost,
            cycles: 0,
            forks: 0,
        })
    };
    assert_eq!(judged(Some(3_900_000), &points), Verdict::Leak);
    assert_eq!(judged(Some(390_000), &points), Verdict::Unbounded);
    assert_eq!(judged(None, &points), Verdict::Growing);
    assert_eq!(judged(Some(3_900_000), &points[..2]), Verdict::Steady);
    points[2].live = 3_000_100;
    points[1].live = 3_000_000;
    assert_eq!(judged(Some(0), &points), Verdict::Steady);
    points[2].live = 6_000_000;
    assert_eq!(judged(Some(0), &points), Verdict::Undecided);
}

#[test]
fn the_largest_part_is_the_cause() {
    let at = |part: Part, grown: u64, seconds: u64| {
        let (mut others, base) = (OtherParts::default(), 1_000_000);
        let bytes = base + grown * seconds;
        let (mut in_use, mut free, mut resident) = (base, base, 3 * base);
        match part {
            Part::InUse => in_use = bytes,
            Part::Free => free = bytes,
            Part::Arenas => (others.arenas, free) = (bytes - base, bytes),
            Part::Stacks => others.stacks = bytes - base,
            Part::Runtime => others.runtime = bytes - base,
            Part::Shared => others.shared = bytes - base,
            Part::Files => others.files = bytes - base,
            Part::Mapped => {}
        }
        resident += bytes - base;
        Point {
            seconds: seconds as f64,
            blocks: 1000,
            live: base,
            heap_resident: in_use + free,
            free_resident: free,
            resident,
            others,
        }
    };
    for part in Part::ALL {
        // Small growth, too, is that of its part.
        for grown in [20_000, 20_000_000] {
            let points: Vec<_> = (0..10).map(|seconds| at(part, grown, seconds)).collect();
            assert_eq!(cause(&points), Some(part));
            for point in &points {
                let parts = Part::ALL.map(|part| point.of(part));
                assert_eq!(parts.iter().sum::<u64>(), point.resident, "{part:?}");
            }
            let expected = match part {
                Part::Free | Part::Arenas => Verdict::Fragmentation,
                _ => Verdict::Elsewhere,
            };
            let evidence = Evidence {
                points: &points,
                lost: Some(0),
                cycles: 0,
                forks: 0,
            };
            assert_eq!(judge(evidence), expected, "{part:?}");
        }
        let points: Vec<_> = (0..10).map(|seconds| at(part, 1000, seconds)).collect();
        assert_eq!(cause(&points), None);
    }
    // Two parts that grow by less than 64 KiB each, and by more together.
    let points = (0..10).map(|seconds| {
        let (one, other) = (
            at(Part::Free, 6000, seconds),
            at(Part::Stacks, 5000, seconds),
        );
        let resident = one.resident + other.resident - at(Part::Free, 0, 0).resident;
        Point {
            resident,
            others: other.others,
            ..one
        }
    });
    assert_eq!(cause(&points.collect::<Vec<_>>()), Some(Part::Free));
}

/// Makes a group of blocks of 100 bytes. Each point is given as the number of blocks, how many of them existed at the
/// point before, and how many at the first.
fn group(samples: &[(u64, u64, u64)]) -> Group {
    let sample = |&(blocks, kept, original): &(u64, u64, u64)| Sample {
        blocks,
        bytes: blocks * 100,
        kept,
        original,
    };
    Group {
        key: Key::Size(100),
        samples: samples.iter().map(sample).collect(),
    }
}

fn of(samples: &[(u64, u64, u64)]) -> Judged {
    let seconds = [0.0, 10.0, 20.0, 30.0, 40.0];
    judge_type(&seconds[..samples.len()], &group(samples)).expect("points enough")
}

#[test]
fn a_type_is_judged_by_its_bytes_and_by_which_blocks_stay() {
    let growing = of(&[
        (100, 0, 100),
        (200, 100, 100),
        (300, 200, 100),
        (400, 300, 100),
    ]);
    assert_eq!(growing.trend, Trend::Growing);
    assert!((growing.line.slope - 1000.0).abs() < 1e-6, "{growing:?}");
    assert_eq!(growing.survival, Some(1.0));
    let steady = of(&[(100, 0, 100), (101, 99, 99), (100, 99, 98), (100, 98, 97)]);
    assert_eq!(steady.trend, Trend::Steady);
    let churn = of(&[(100, 0, 100), (101, 60, 60), (100, 60, 36), (100, 60, 20)]);
    assert_eq!(churn.trend, Trend::Churn);
    assert!(
        (churn.survival.expect("blocks") - 180.0 / 301.0).abs() < 1e-9,
        "{churn:?}"
    );
    let once = of(&[
        (0, 0, 0),
        (900, 0, 0),
        (900, 900, 0),
        (900, 900, 0),
        (900, 900, 0),
    ]);
    assert_eq!(once.trend, Trend::OneOff);
    let came_and_went = of(&[(0, 0, 0), (900, 0, 0), (0, 0, 0), (0, 0, 0)]);
    assert_eq!(came_and_went.trend, Trend::OneOff);
    let shrinking = of(&[(900, 0, 900), (600, 600, 600), (300, 300, 300), (0, 0, 0)]);
    assert_eq!(shrinking.trend, Trend::Shrinking);
    // Blocks that live for less than the time between two images.
    let short = of(&[(0, 0, 0), (7, 0, 0), (3, 0, 0), (7, 0, 0)]);
    assert_eq!((short.trend, short.survival), (Trend::Churn, Some(0.0)));
    assert_eq!(
        judge_type(&[0.0, 1.0], &group(&[(1, 0, 1), (2, 1, 1)])),
        None
    );
}
