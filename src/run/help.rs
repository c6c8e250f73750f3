//! The help of the tools: `-h` prints the common options on one screen, `--help` all options.
//!
//! Options are under the same headings in every tool, and in the same order: [`HEADINGS`]. An option without a
//! heading belongs to the report. The order follows from the order in which options are defined.

use clap::{Arg, ArgAction, Command, CommandFactory};

/// Headings, in their order. A heading can be longer, such as `Target (default: the kernel)`.
const HEADINGS: [&str; 10] = [
    "Target",
    "Events",
    "Report",
    "Questions",
    "Actions",
    "Leak check",
    "Kernel mode",
    "Output",
    "Stacks",
    "General",
];
/// Columns of the help at most.
const WIDTH: usize = 80;
/// Number of the examples in `-h`.
const EXAMPLES: usize = 3;

/// Returns a tool's command with its help.
pub(crate) fn command<A: CommandFactory>() -> Command {
    let command = A::command();
    let examples = command.get_after_help().map(ToString::to_string);
    let examples = examples.unwrap_or_default();
    let flag = |name: &'static str, short, action, help: &'static str| {
        let flag = Arg::new(name).long(name).short(short).action(action);
        flag.help(help).help_heading("General")
    };
    let (help, version) = (ArgAction::Help, ArgAction::Version);
    command
        .max_term_width(WIDTH)
        .mut_args(|arg| {
            if arg.is_positional() || arg.get_help_heading().is_some() {
                arg
            } else {
                arg.help_heading("Report")
            }
        })
        .disable_help_flag(true)
        .disable_version_flag(true)
        .arg(flag(
            "help",
            'h',
            help,
            "Print this summary; --help prints all options",
        ))
        .arg(flag("version", 'V', version, "Print the version"))
        .after_help(first_examples(&examples))
        .after_long_help(examples)
}

/// Returns the first examples. An example begins two columns from the left; its explanation can be on a line of its own,
/// further right.
fn first_examples(text: &str) -> String {
    let examples = text
        .split_once("examples:\n")
        .map_or(text, |(_, examples)| examples);
    let begins = |line: &str| line.starts_with("  ") && !line.starts_with("   ");
    let mut begun = 0;
    let lines = examples.lines().take_while(|line| {
        begun += usize::from(begins(line));
        begun <= EXAMPLES
    });
    lines.fold("examples:".to_owned(), |text, line| text + "\n" + line)
}

/// Checks that the summary fits on a screen, and the order of the headings. For the tests of the tools.
///
/// # Panics
/// If they do not.
pub(crate) fn assert_fits<A: CommandFactory>() {
    const LINES: std::ops::RangeInclusive<usize> = 18..=50;
    let summary = command::<A>().render_help().to_string();
    let lines = summary.lines().count();
    assert!(LINES.contains(&lines), "{lines} lines:\n{summary}");
    let all = command::<A>().render_long_help().to_string();
    for line in summary.lines() {
        assert!(line.chars().count() <= WIDTH, "{line}");
    }
    let place = |heading: &str| HEADINGS.iter().position(|known| heading.starts_with(known));
    for text in [&summary, &all] {
        let headings = text.lines().filter_map(|line| line.strip_suffix(':'));
        let headings = headings.filter(|line| !line.starts_with(' '));
        let headings: Vec<_> = headings
            .filter(|heading| !["Arguments", "examples"].contains(heading))
            .map(|heading| place(heading).ok_or(heading))
            .collect();
        assert!(
            headings.is_sorted() && headings.iter().all(Result::is_ok),
            "{headings:?}"
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_three_examples_with_their_explanations() {
        let text =
            "exit status: 0\n\nexamples:\n  a   one\n  b\n       two\n  c   three\n  d   four";
        assert_eq!(
            first_examples(text),
            "examples:\n  a   one\n  b\n       two\n  c   three"
        );
        assert_eq!(
            first_examples("examples:\n  a   one"),
            "examples:\n  a   one"
        );
    }
}
