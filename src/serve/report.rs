//! Contents of a report that is served: text and numbers, which every thread can format.

use std::cmp::Reverse;
use std::fmt;
use std::io::Write;
use std::time::Instant;

use anyhow::Result;

use crate::export::exposition::Exposed;
use crate::export::flame::Graph;
use crate::export::pprof::Encoded;
use crate::export::profile::{Profile, Sample};
use crate::print::{clock, text};
use crate::serve::body::CachedBody;
use crate::serve::trend::{Key, Trend, Trends};
use crate::stacks::named::{Frame, NamedStack};

/// Number of stacks in each table of the page.
const TOP: usize = 10;

/// A report, and its formats as they were first requested.
#[derive(Default)]
pub struct ServedReport {
    pub(super) families: Vec<Exposed>,
    /// Profile of the report. None if there are only numbers.
    pub(super) content: Option<Content>,
    pub(super) html: CachedBody,
    pub(super) openmetrics: CachedBody,
    pub(super) prometheus: CachedBody,
    pub(super) pprof: CachedBody,
    pub(super) text: CachedBody,
    pub(super) flame: CachedBody,
}

impl fmt::Debug for ServedReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Report").finish_non_exhaustive()
    }
}

/// Contents of a report.
pub(super) struct Content {
    pub(super) encoded: Encoded,
    graph: Graph,
    pub(super) page: Page,
}

/// Contents of the page.
#[derive(Debug, Clone, Default)]
pub(super) struct Page {
    /// The title of the report, such as `memleak: outstanding allocations of pid 7 (demo)`.
    pub(super) title: String,
    /// Time, sum, and what a reader has to know.
    pub(super) facts: Vec<String>,
    /// Headings of the columns of numbers.
    pub(super) columns: Vec<&'static str>,
    pub(super) largest: Vec<Row>,
    pub(super) growing: Vec<Row>,
    /// Height of the flame graph, in pixels.
    pub(super) flame_height: usize,
}

/// A stack on the page.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Row {
    pub(super) numbers: Vec<String>,
    /// Growth per second, if it is known.
    pub(super) per_second: Option<f64>,
    pub(super) trend: Trend,
    pub(super) process: String,
    /// Frames, innermost first, with notes about missing ones.
    pub(super) frames: Vec<String>,
}

impl ServedReport {
    /// Creates the report of a profile. `keys` identify the profile's samples, in their order.
    pub fn new(
        profile: &Profile,
        keys: &[Key],
        trends: &Trends,
        families: Vec<Exposed>,
        lost: Option<String>,
    ) -> Self {
        let graph = Graph::of(profile);
        let page = Page {
            flame_height: graph.height(),
            ..Page::of(profile, keys, trends, lost)
        };
        Self {
            families,
            content: Some(Content {
                encoded: Encoded::of(profile),
                graph,
                page,
            }),
            ..Self::default()
        }
    }

    /// Creates a report of numbers, without a profile.
    pub fn of_numbers(families: Vec<Exposed>) -> Self {
        Self {
            families,
            ..Self::default()
        }
    }
}

impl Content {
    /// Draws the flame graph.
    pub(super) fn draw_flame_graph(&self, out: &mut dyn Write) -> Result<()> {
        self.graph.draw(out)
    }
}

/// A sample, while the rows of the page are chosen.
struct Stack<'a> {
    key: Key,
    sample: &'a Sample,
    per_second: Option<f64>,
}

impl Page {
    fn of(profile: &Profile, keys: &[Key], trends: &Trends, lost: Option<String>) -> Self {
        let Profile {
            values, main_value, ..
        } = profile;
        let sums = values.iter().enumerate();
        let sums: Vec<String> = sums
            .map(|(at, value)| number(profile.total(at), value.unit, value.count_name))
            .collect();
        let time = clock::time_of_day(&profile.until);
        let mut facts = vec![
            format!("{} {time}", profile.until.date()),
            format!("since {}", clock::time_of_day(&profile.since)),
            sums.join(", "),
            text::count_with_noun(profile.samples.len() as u64, "stack"),
        ];
        facts.extend(profile.remarks.iter().cloned());
        facts.extend(profile.incomplete());
        facts.push(lost.unwrap_or_else(|| "nothing lost".to_owned()));

        let now = Instant::now();
        let has = |sample: &Sample| sample.values.get(*main_value).copied().unwrap_or_default();
        let stacks = keys.iter().zip(&profile.samples);
        let stacks = stacks.map(|(&key, sample)| Stack {
            key,
            sample,
            per_second: trends.per_second(key, now, has(sample)),
        });
        let mut stacks: Vec<Stack<'_>> = stacks.collect();
        let row = |stack: &Stack<'_>| Row {
            numbers: numbers(profile, stack.sample),
            per_second: stack.per_second,
            trend: trends.of(stack.key, now, has(stack.sample)),
            process: process(&stack.sample.stack),
            frames: frames(&stack.sample.stack),
        };
        stacks.sort_by_key(|stack| (Reverse(has(stack.sample)), stack.key));
        let largest = stacks.iter().take(TOP).map(row).collect();
        let growth = |stack: &Stack<'_>| stack.per_second.unwrap_or_default();
        stacks.retain(|stack| growth(stack) > 0.0);
        stacks.sort_by(|one, other| growth(other).total_cmp(&growth(one)));
        let growing = stacks.iter().take(TOP).map(row).collect();
        Self {
            title: profile.title(),
            facts,
            columns: values.iter().map(|value| value.count_name).collect(),
            largest,
            growing,
            flame_height: 0,
        }
    }
}

fn numbers(profile: &Profile, sample: &Sample) -> Vec<String> {
    let values = profile.values.iter().zip(&sample.values);
    values
        .map(|(value, &number)| match value.unit {
            "bytes" => text::bytes(number),
            _ => text::grouped(number),
        })
        .collect()
}

fn number(number: u64, unit: &str, counted: &str) -> String {
    match unit {
        // The exact number follows the one that is easily read.
        "bytes" if number >= 1000 => {
            format!("{} ({} bytes)", text::bytes(number), text::grouped(number))
        }
        "bytes" => text::bytes(number),
        _ => format!("{} {counted}", text::grouped(number)),
    }
}

fn process(stack: &NamedStack) -> String {
    match stack.pid {
        0 => stack.comm.clone(),
        pid => format!("{} ({pid})", stack.comm),
    }
}

fn frames(stack: &NamedStack) -> Vec<String> {
    let mut frames = Vec::new();
    for part in [&stack.kernel, &stack.user].into_iter().flatten() {
        frames.extend(part.frames.iter().flat_map(Frame::rows));
        frames.extend(part.missing());
    }
    frames
}
