//! The page for people: no script, nothing from elsewhere, every name escaped.

use std::fmt::Write as _;

use crate::print::text;
use crate::serve::report::{Page, Row};
use crate::serve::trend::Trend;

/// Frames that are shown of a stack while it is folded.
const INNERMOST: usize = 4;
/// Width and height of a sparkline, in pixels.
const WIDTH: f64 = 160.0;
const HEIGHT: f64 = 28.0;

const STYLE: &str = "\
:root { color-scheme: light dark }
body { font: 14px/1.4 system-ui, sans-serif; margin: 1rem auto; max-width: 76rem; padding: 0 1rem }
h1 { font-size: 1.2rem; margin-bottom: 0 }
h2 { font-size: 1rem; margin-top: 2rem }
iframe { border: 1px solid #8888; resize: vertical; width: 100% }
table { border-collapse: collapse; width: 100% }
th, td { border-bottom: 1px solid #8884; padding: .2rem .6rem .2rem 0; text-align: left; vertical-align: top }
th.n, td.n { font-variant-numeric: tabular-nums; text-align: right; white-space: nowrap }
td.s { font-family: ui-monospace, monospace; font-size: 12px; overflow-wrap: anywhere; width: 100% }
summary { cursor: pointer }
ol { margin: .3rem 0 .5rem; padding-left: 2rem }
svg { color: #2a7; display: block }
@media (max-width: 40rem) {
  body { font-size: 12px; margin: .5rem auto; padding: 0 .5rem }
  tr { border-bottom: 1px solid #8884; display: block; padding: .3rem 0 }
  th, td { border: 0; display: inline-block; padding: 0 .8rem 0 0 }
  td.s { display: block; padding: 0; width: auto }
  .t { display: none }
}
";

/// Formats the page of a report.
pub(super) fn page(page: &Page) -> String {
    let mut html = head(&page.title);
    // Writing to a String does not fail.
    let _ = write!(
        html,
        "<h1>{}</h1>\n<p>{} (<a href=\"\">reload</a>)</p>\n",
        escape(&page.title),
        escape(&page.facts.join("; ")),
    );
    let _ = writeln!(
        html,
        "<iframe src=\"flame.svg\" sandbox=\"allow-scripts\" title=\"flame graph\" height=\"{}\"></iframe>",
        page.flame_height
    );
    table(&mut html, "Largest", page, &page.largest, "nothing");
    table(
        &mut html,
        "Fastest growing",
        page,
        &page.growing,
        "none grows",
    );
    html += "<p><a href=\"flame.svg\">flame graph</a>, <a href=\"debug/pprof/heap\">profile</a> for \
             <code>go tool pprof</code>, <a href=\"metrics\">metrics</a></p>\n</body>\n</html>\n";
    html
}

/// Formats the list of profiles, at the path where Go programs have it.
pub(super) fn index() -> String {
    let mut html = head("/debug/pprof/");
    html += "<h1>/debug/pprof/</h1>\n<ul>\n";
    for name in ["allocs", "heap"] {
        let _ = writeln!(html, "<li><a href=\"{name}\">{name}</a></li>");
    }
    html += "</ul>\n<p>Both have all values that are known. <code>?seconds=N</code>: what came within N \
             seconds.</p>\n</body>\n</html>\n";
    html
}

fn head(title: &str) -> String {
    let title = escape(title);
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width\">\n<title>{title}</title>\n\
         <style>\n{STYLE}</style>\n</head>\n<body>\n"
    )
}

fn table(html: &mut String, heading: &str, page: &Page, rows: &[Row], nothing: &str) {
    let _ = writeln!(html, "<h2>{heading}</h2>");
    if rows.is_empty() {
        let _ = writeln!(html, "<p>{nothing}</p>");
        return;
    }
    html.push_str("<table>\n<tr>");
    for column in &page.columns {
        let _ = write!(html, "<th class=\"n\">{}</th>", escape(column));
    }
    html.push_str("<th class=\"n\">a second</th><th class=\"t\"></th><th>stack</th></tr>\n");
    for row in rows {
        html.push_str("<tr>");
        for number in &row.numbers {
            let _ = write!(html, "<td class=\"n\">{}</td>", escape(number));
        }
        let growth = row.per_second.map_or_else(String::new, signed);
        let _ = write!(html, "<td class=\"n\">{growth}</td><td class=\"t\">");
        html.push_str(&sparkline(&row.trend));
        html.push_str("</td><td class=\"s\">");
        stack(html, row);
        html.push_str("</td></tr>\n");
    }
    html.push_str("</table>\n");
}

fn signed(per_second: f64) -> String {
    let sign = if per_second < 0.0 { '\u{2212}' } else { '+' };
    // Only the whole part is shown.
    match per_second.abs() as u64 {
        0 => "0".to_owned(),
        number => format!("{sign}{}", text::bytes(number)),
    }
}

/// Writes the innermost functions of a stack, which unfold to all.
fn stack(html: &mut String, row: &Row) {
    let innermost = row.frames.iter().take(INNERMOST);
    let innermost: Vec<String> = innermost.map(|frame| escape(frame)).collect();
    let _ = write!(html, "<details><summary>{}", innermost.join(" &larr; "));
    if row.frames.len() > INNERMOST {
        html.push_str(" &larr; &hellip;");
    }
    let _ = write!(html, "</summary>{}<ol>", escape(&row.process));
    for frame in &row.frames {
        let _ = write!(html, "<li>{}</li>", escape(frame));
    }
    html.push_str("</ol></details>");
}

/// Draws a line from the first look to now, above a base line of 0.
fn sparkline(Trend(points): &Trend) -> String {
    let Some(&(last, _)) = points.last().filter(|(last, _)| *last > 0.0) else {
        return String::new();
    };
    let most = points.iter().map(|&(_, number)| number).max();
    let most = most.unwrap_or_default().max(1) as f64;
    let mut line = String::new();
    for &(seconds, number) in points {
        let x = 1.0 + seconds / last * (WIDTH - 2.0);
        let y = HEIGHT - 1.0 - number as f64 / most * (HEIGHT - 2.0);
        let _ = write!(line, "{x:.1},{y:.1} ");
    }
    format!(
        "<svg width=\"{WIDTH}\" height=\"{HEIGHT}\" role=\"img\" aria-label=\"over the last {last:.0} \
         seconds\"><polyline fill=\"none\" stroke=\"currentColor\" stroke-width=\"1.5\" \
         points=\"{}\"/></svg>",
        line.trim_end()
    )
}

/// Escapes text for HTML, also for the value of an attribute.
fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVIL: &str = "<script>alert('x')</script>&\"";

    fn row(points: &[(f64, u64)]) -> Row {
        Row {
            numbers: vec!["7".into(), "4.1 kB".into()],
            per_second: Some(-2048.0),
            trend: Trend(points.to_vec()),
            process: EVIL.into(),
            frames: vec![EVIL.into(); 7],
        }
    }

    #[test]
    fn no_name_becomes_markup() {
        let page = page(&Page {
            title: EVIL.into(),
            facts: vec![EVIL.into()],
            columns: vec!["allocations", "bytes"],
            largest: vec![row(&[])],
            growing: vec![row(&[])],
            flame_height: 7,
        });
        assert!(!page.contains("<script"), "{page}");
        assert!(!page.contains("alert('"), "{page}");
        let safe = "&lt;script&gt;alert(&#39;x&#39;)&lt;/script&gt;&amp;&quot;";
        // The title is there twice, the facts once; for both rows the process, seven frames, and four of these folded.
        assert_eq!(page.matches(safe).count(), 3 + 2 * (1 + 7 + 4));
        assert!(page.contains("\u{2212}2.0 kB"), "{page}");
    }

    #[test]
    fn a_sparkline_is_from_corner_to_corner() {
        let line = sparkline(&Trend(vec![(0.0, 0), (5.0, 50), (10.0, 100)]));
        assert!(
            line.contains("points=\"1.0,27.0 80.0,14.0 159.0,1.0\""),
            "{line}"
        );
        assert_eq!(sparkline(&Trend(vec![(0.0, 7)])), "");
        assert_eq!(sparkline(&Trend::default()), "");
        let nothing = sparkline(&Trend(vec![(0.0, 0), (5.0, 0)]));
        assert!(nothing.contains("1.0,27.0 159.0,27.0"), "{nothing}");
    }

    #[test]
    fn what_is_not_there_is_said() {
        let page = page(&Page::default());
        assert!(page.contains("<p>none grows</p>"), "{page}");
        // A reload would close what the reader has unfolded.
        assert!(!page.contains("refresh"), "{page}");
    }
}
