//! Flame graphs: each is one SVG that any browser shows, zooms and searches, without a network.

use std::io::{self, Write};
use std::iter;

use anyhow::{Context, Result};
use inferno::flamegraph::color::{BasicPalette, Color, Palette, PaletteMap};
use inferno::flamegraph::{self, Options, TextTruncateDirection};
use memchr::memmem;

use crate::export::folded::{self, Folded};
use crate::export::profile::Profile;
use crate::export::saved_profile::SavedProfile;
use crate::print::{clock, identity, text};
use crate::stacks::named::NamedStack;

/// Colour of kernel frames. Frames of the program are green.
const KERNEL: Color = Color {
    r: 240,
    g: 170,
    b: 80,
};
/// Colour of calls that the compiler has inlined.
const INLINED: Color = Color {
    r: 200,
    g: 170,
    b: 240,
};
/// Colour of the placeholders for missing frames.
const MISSING: Color = Color {
    r: 170,
    g: 170,
    b: 170,
};

/// Writes the flame graph of the profile's main value.
///
/// # Errors
/// If `out` cannot be written to.
pub fn write(profile: &Profile, out: &mut dyn Write) -> Result<()> {
    Graph::of(profile).draw(out)
}

/// Writes the flame graph of the profile's main value, coloured by its difference from an earlier profile's.
///
/// # Errors
/// If the profiles cannot be compared, or `out` cannot be written to.
pub(crate) fn write_difference(
    base: &SavedProfile,
    profile: &Profile,
    out: &mut dyn Write,
) -> Result<()> {
    Graph::of_difference(base, profile)?.draw(out)
}

/// Content of a flame graph: text alone, so that another thread can draw it.
#[derive(Debug, Clone)]
pub struct Graph {
    /// Folded stacks, each with its weight.
    lines: Vec<String>,
    /// Colours of the frames that are not the program's own code, by name.
    colors: Vec<(String, Color)>,
    title: String,
    subtitle: String,
    counted: &'static str,
}

impl Graph {
    /// Makes the graph of the profile's main value.
    pub fn of(profile: &Profile) -> Self {
        let mut colors = Vec::new();
        let mut lines = Vec::new();
        for sample in &profile.samples {
            let weight = sample
                .values
                .get(profile.main_value)
                .copied()
                .unwrap_or_default();
            if weight > 0 {
                color(&sample.stack, &mut colors);
                let line = Folded {
                    annotate: true,
                    inlined: true,
                    ..Folded::new(&sample.stack)
                };
                lines.push(valid_xml(format!("{line} {weight}")));
            }
        }
        Self {
            lines,
            colors,
            title: valid_xml(profile.title()),
            subtitle: valid_xml(subtitle(profile)),
            counted: counted(profile),
        }
    }

    /// Makes the graph of the profile's main value, with two weights on each line: before, and now.
    fn of_difference(base: &SavedProfile, profile: &Profile) -> Result<Self> {
        let mut lines = Vec::new();
        for change in base.changes(profile)? {
            let [before, now] = [&change.before, &change.now].map(|values| {
                values
                    .get(profile.main_value)
                    .map_or(0, |value| (*value).max(0))
            });
            // A stack without a value now would have no width.
            if now > 0 {
                let functions = change.names.frames.iter().rev();
                let frames = iter::once(&change.names.comm).chain(functions);
                let frames: Vec<_> = frames.map(|frame| folded::escape(&**frame)).collect();
                lines.push(valid_xml(format!("{} {before} {now}", frames.join(";"))));
            }
        }
        let subtitle = format!(
            "{}; compared with {}: red has grown, blue has shrunk",
            subtitle(profile),
            base.name()
        );
        Ok(Self {
            lines,
            colors: Vec::new(),
            title: valid_xml(profile.title()),
            subtitle: valid_xml(subtitle),
            counted: counted(profile),
        })
    }

    /// Returns an upper bound of the picture's height in pixels.
    pub(crate) fn height(&self) -> usize {
        /// Lines above and below the frames, and the frame that all stacks share.
        const REST: usize = 8;
        const FRAME: usize = 16;
        let depths = self.lines.iter().map(|line| line.matches(';').count() + 1);
        (depths.max().unwrap_or(0) + REST) * FRAME
    }

    /// Draws the graph as an SVG.
    ///
    /// # Errors
    /// If `out` cannot be written to.
    pub fn draw(&self, out: &mut dyn Write) -> Result<()> {
        if self.lines.is_empty() {
            return self.draw_empty(out);
        }
        let mut colors = PaletteMap::default();
        for (name, color) in &self.colors {
            colors.insert(name.clone(), *color);
        }
        let mut options = Options::default();
        options.colors = Palette::Basic(BasicPalette::Mem);
        // A function has the same colour in every graph.
        options.deterministic = true;
        options.palette_map = Some(&mut colors);
        options.title.clone_from(&self.title);
        options.subtitle = Some(self.subtitle.clone());
        options.count_name = self.counted.to_owned();
        options.text_truncate_direction = TextTruncateDirection::Right;
        let mut out = WithStyle {
            out,
            style: fitting(&self.title, &self.subtitle),
            head: Some(Vec::new()),
        };
        flamegraph::from_lines(
            &mut options,
            self.lines.iter().map(String::as_str),
            &mut out,
        )
        .context("failed to write the flame graph")
    }

    /// Draws the title and the subtitle alone, as a flame graph needs at least one stack.
    fn draw_empty(&self, out: &mut dyn Write) -> Result<()> {
        let xml = |line: &str| {
            let line = line.replace('&', "&amp;").replace('<', "&lt;");
            line.replace('>', "&gt;")
        };
        write!(
            out,
            "<?xml version=\"1.0\" standalone=\"no\"?>\n\
             <svg version=\"1.1\" width=\"1200\" height=\"80\" xmlns=\"http://www.w3.org/2000/svg\" \
             font-family=\"monospace\" font-size=\"12\">\n\
             <text x=\"10\" y=\"24\">{}</text>\n<text x=\"10\" y=\"48\">{}</text>\n</svg>\n",
            xml(&self.title),
            xml(&self.subtitle),
        )
        .context("failed to write")
    }
}

fn counted(profile: &Profile) -> &'static str {
    let main = profile.values.get(profile.main_value);
    main.map_or("", |value| value.count_name)
}

/// Returns the subtitle: host, time and sum, and the remarks of the profile.
fn subtitle(profile: &Profile) -> String {
    let host = identity::host_name();
    let mut line = format!(
        "{host}, {} {} to {}, {} {}",
        profile.until.date(),
        clock::time_of_day(&profile.since),
        clock::time_of_day(&profile.until),
        text::grouped(profile.total(profile.main_value)),
        counted(profile),
    );
    for remark in profile.incomplete().iter().chain(&profile.remarks) {
        line += "; ";
        line += remark;
    }
    line
}

/// Writer that adds rules to the end of the style sheet of a flame graph.
struct WithStyle<'a> {
    out: &'a mut dyn Write,
    style: String,
    /// Text up to the end of the style sheet. None after it.
    head: Option<Vec<u8>>,
}

impl WithStyle<'_> {
    const END: &'static [u8] = b"</style>";
}

impl Write for WithStyle<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let Some(head) = &mut self.head else {
            return self.out.write(bytes);
        };
        head.extend(bytes);
        if let Some(at) = memmem::find(head, Self::END) {
            self.out.write_all(&head[..at])?;
            self.out.write_all(self.style.as_bytes())?;
            self.out.write_all(&head[at..])?;
            self.head = None;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// Returns rules by which the lines above the graph are as wide as the window at most. A character of a monospace font
/// is 0.6 times as wide as its font's size.
fn fitting(title: &str, subtitle: &str) -> String {
    let rule = |id: &str, text: &str, pixels: u32| {
        let ems = 0.6 * (text.chars().count() + 2) as f64;
        format!("#{id} {{ font-size:min({pixels}px, calc(100vw / {ems:.1})); }}\n")
    };
    rule("title", title, 17) + &rule("subtitle", subtitle, 12)
}

/// Chooses colours for the frames that are not the program's own code, under the names that
/// [`Folded`] gives them.
fn color(stack: &NamedStack, colors: &mut Vec<(String, Color)>) {
    for part in [&stack.user, &stack.kernel].into_iter().flatten() {
        if let Some(missing) = part.missing() {
            colors.push((folded::escape(missing).into(), MISSING));
        }
        for frame in part.frames.iter().filter(|frame| frame.is_kernel()) {
            let name = folded::name(frame) + folded::KERNEL_MARK;
            colors.push((name.into(), KERNEL));
        }
        for call in part.frames.iter().flat_map(|frame| frame.source.inlined()) {
            let name = folded::inlined_name(call) + folded::INLINED_MARK;
            colors.push((name.into(), INLINED));
        }
    }
}

/// Replaces the two characters that UTF-8 permits and XML does not. Control characters were escaped before.
fn valid_xml(line: String) -> String {
    if line.contains(['\u{fffe}', '\u{ffff}']) {
        line.replace(['\u{fffe}', '\u{ffff}'], "\u{fffd}")
    } else {
        line
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::export::profile::{Sample, ValueType};
    use crate::stacks::named::{Frame, FrameKind, Part};

    fn profile(samples: Vec<Sample>) -> Profile {
        let time = "2026-11-22T12:55:15+00:00[+00:00]";
        Profile {
            tool: "brkstack",
            target: "command ./a <b> & 'c' \u{ffff}".into(),
            subject: "calls of brk(2)".into(),
            since: time.parse().expect("a time"),
            until: time.parse().expect("a time"),
            values: vec![
                ValueType::count("brk_calls", "calls"),
                ValueType::bytes("growth"),
            ],
            main_value: 0,
            by_thread: false,
            samples,
            remarks: vec!["estimated".into()],
        }
    }

    fn sample(user: Part, kernel: Option<Part>, values: [u64; 2]) -> Sample {
        Sample {
            stack: NamedStack {
                comm: "p".into(),
                user: Some(user),
                kernel,
                ..NamedStack::default()
            },
            values: values.to_vec(),
        }
    }

    fn part(names: &[&str], kernel: bool, truncated: Option<&str>) -> Part {
        let frame = |name: &&str| Frame {
            symbol: Some(((*name).into(), 0)),
            kind: if kernel {
                FrameKind::Kernel
            } else {
                FrameKind::Native
            },
            ..Frame::default()
        };
        Part {
            frames: names.iter().map(frame).collect(),
            truncated: truncated.map(str::to_owned),
        }
    }

    fn draw(profile: &Profile) -> String {
        let mut image = Vec::new();
        write(profile, &mut image).expect("memory");
        String::from_utf8(image).expect("UTF-8")
    }

    /// Returns the colour of the box with this title.
    fn color(image: &str, title: &str) -> String {
        let at = image.find(title).unwrap_or_else(|| panic!("no {title}"));
        let fill = image[at..].split("fill=\"").nth(1).expect("a colour");
        fill.split('"').next().expect("an end").to_owned()
    }

    #[test]
    fn what_is_missing_and_what_is_the_kernels_is_told_apart() {
        let kernel = part(&["do_brk_flags"], true, None);
        let image = draw(&profile(vec![
            sample(part(&["grow", "main"], false, None), Some(kernel), [23, 92]),
            sample(part(&["do_brk_flags"], false, Some("deep")), None, [7, 28]),
            sample(Part::default(), None, [5, 20]),
            sample(part(&["never"], false, None), None, [0, 4]),
        ]));
        for title in [
            "main (23 calls, 65.71%)",
            "do_brk_flags (23 calls, 65.71%)",
            "[truncated: deep] (7 calls, 20.00%)",
            "[lost] (5 calls, 14.29%)",
            "all (35 calls, 100%)",
        ] {
            assert!(image.contains(title), "no {title} in {image}");
        }
        assert!(!image.contains("never"));
        assert_eq!(color(&image, "do_brk_flags (23"), "rgb(240,170,80)");
        assert_ne!(color(&image, "do_brk_flags (7"), "rgb(240,170,80)");
        for missing in ["[lost] (", "[truncated: deep] ("] {
            assert_eq!(color(&image, missing), "rgb(170,170,170)");
        }
        assert!(image.contains("brkstack: calls of brk(2) of command ./a &lt;b&gt; &amp; "));
        let (title, rest) = ("12:55:15, 35 calls", "2 of 3 stacks incomplete (34.3 %)");
        assert!(image.contains(&format!("{title}; {rest}; estimated")));
        // Characters of both lines, and a margin.
        let (sizes, _) = image.split_once("</style>").expect("a style sheet");
        assert!(
            sizes.contains("#title { font-size:min(17px, calc(100vw / "),
            "{sizes}"
        );
        assert!(sizes.trim_end().ends_with("); }"), "{sizes}");
        assert!(!image.contains('\u{ffff}'));
    }

    #[test]
    fn the_same_stacks_are_drawn_in_the_same_colours() {
        let profile = profile(vec![sample(part(&["a", "b"], false, None), None, [1, 1])]);
        assert_eq!(draw(&profile), draw(&profile));
    }

    #[test]
    fn the_height_is_known_before_it_is_drawn() {
        for depth in [1, 7, 101] {
            let profile = profile(vec![sample(
                part(&vec!["a"; depth], false, None),
                None,
                [1, 1],
            )]);
            let graph = Graph::of(&profile);
            let image = draw(&profile);
            let drawn = image.split(" height=\"").nth(1).expect("a height");
            let drawn: usize = drawn
                .split('"')
                .next()
                .expect("an end")
                .parse()
                .expect("a number");
            assert!((drawn..drawn + 64).contains(&graph.height()), "{drawn}");
        }
    }

    #[test]
    fn nothing_is_drawn_as_nothing() {
        let image = draw(&profile(Vec::new()));
        assert!(image.contains(", 0 calls; estimated</text>"), "{image}");
        assert!(image.contains("./a &lt;b&gt; &amp; 'c'"), "{image}");
    }
}
