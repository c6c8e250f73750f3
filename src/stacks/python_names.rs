//! Names for the frames of Python in a user stack.

use crate::interpreters::Interpreters;
use crate::interpreters::python::codes::{CodeLookup, Codes};
use crate::interpreters::python::lines::Instruction;
use crate::interpreters::raw_frame::RawFrame;
use crate::stacks::named::Frame;

/// Symbolizer for frames of Python, by the options of the command line.
#[derive(Debug, Clone)]
pub struct PythonNames {
    codes: Codes,
    lines: bool,
    /// Whether the frames of the interpreter's loop are shown, too.
    native_frames: bool,
}

/// Outcome of looking up a place of a stack as a frame of Python.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Found {
    /// A frame to show: of a Python function, or a mark.
    Frame(Frame),
    /// A frame that is not shown, as it is not of the program.
    Hidden,
    /// A place that is not of Python.
    Native,
}

impl PythonNames {
    /// Creates the names from the code objects that the BPF programs send.
    pub fn new(codes: Codes, shown: Interpreters) -> Self {
        Self {
            codes,
            lines: shown != Interpreters::Merged,
            native_frames: shown == Interpreters::All,
        }
    }

    /// Allows a new lookup of code objects that were not found.
    pub(super) fn refresh(&self) {
        self.codes.refresh();
    }

    /// Returns how many code objects were dropped for lack of memory.
    pub(super) fn dropped(&self) -> u64 {
        self.codes.dropped()
    }

    /// Whether a native frame is hidden if `next` follows it: a frame that Python frames follow is the interpreter's
    /// loop.
    pub(super) fn hides_before(&self, next: Option<&RawFrame>) -> bool {
        !self.native_frames && matches!(next, Some(RawFrame::Python(_)))
    }

    /// Marks the calls of the interpreter's loop that remain among the frames of a stack, unless native frames are
    /// shown.
    pub(super) fn mark_loops(&self, frames: &mut Vec<Frame>) {
        if !self.native_frames {
            mark_loops(frames);
        }
    }

    /// Looks up a place of a stack as a frame of Python.
    pub(super) fn find(&self, place: RawFrame) -> Found {
        match place {
            RawFrame::Return(_) | RawFrame::Interrupted(_) | RawFrame::Java { .. } => Found::Native,
            RawFrame::PythonUnpaired => Found::Frame(Frame::of_python(0, UNPAIRED, None)),
            RawFrame::PythonCut => Found::Frame(Frame::of_python(0, CUT, None)),
            RawFrame::Python(word) => frame(word, &self.codes.get(word), self.lines),
        }
    }
}

/// Symbol of the interpreter's loop, and prefix of the symbols of parts that the compiler splits off it.
const LOOP: &str = "_PyEval_EvalFrameDefault";
/// Names of frames that are marks.
const UNPAIRED: &str = "[called by frames that are missing]";
const CUT: &str = "[further functions]";
/// Names of functions that are not known.
const UNKNOWN: &str = "[unknown]";
const AMBIGUOUS: &str = "[ambiguous]";

/// Creates the frame of a word.
fn frame(word: u64, known: &CodeLookup, lines: bool) -> Found {
    let code = match known {
        CodeLookup::Code(code) => code,
        CodeLookup::Ambiguous => return Found::Frame(Frame::of_python(word, AMBIGUOUS, None)),
        CodeLookup::Unknown => return Found::Frame(Frame::of_python(word, UNKNOWN, None)),
    };
    if code.is_shim() {
        return Found::Hidden;
    }
    let line = lines
        .then(|| code.line(Instruction::of_word(word)))
        .flatten();
    Found::Frame(Frame::of_python(word, &code.name, Some((&code.file, line))))
}

/// Marks the calls of the interpreter's loop in a stack with frames of Python: the functions that these calls execute
/// are not known. Such a call is of an interpreter that has called another one, or of a greenlet that has switched to
/// another. Only a loop with a symbol is found.
fn mark_loops(frames: &mut Vec<Frame>) {
    let is_loop = |frame: &Frame| {
        let symbol = frame.symbol.as_ref();
        symbol.is_some_and(|(name, _)| name.starts_with(LOOP))
    };
    if !frames.iter().any(Frame::is_python) {
        return;
    }
    for at in (0..frames.len()).rev() {
        if is_loop(&frames[at]) {
            frames.insert(at + 1, Frame::of_python(0, CUT, None));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::interpreters::python::code::Code;

    const WORD: u64 = 1 << 63 | 5 << 20;

    fn known(name: &str, file: &str) -> CodeLookup {
        CodeLookup::Code(Arc::new(Code {
            file: file.into(),
            name: name.into(),
            first_line: 41,
            minor: 12,
            // Two code units of line 41, one of line 43.
            lines: Some([0x81, 0, 0x80 | 13 << 3, 4].into()),
        }))
    }

    fn text(word: u64, known: &CodeLookup, lines: bool) -> Option<String> {
        match frame(word, known, lines) {
            Found::Frame(frame) => Some(frame.to_string()),
            Found::Hidden => None,
            Found::Native => panic!("a word is no native frame"),
        }
    }

    #[test]
    fn a_frame_has_its_function_file_and_line() {
        let of = known("load_orders", "/srv/orders.py");
        let text = |word, lines| text(word, &of, lines).expect("a frame");
        assert_eq!(text(WORD, true), "load_orders (orders.py:41) [python]");
        assert_eq!(text(WORD | 2, true), "load_orders (orders.py:43) [python]");
        // An instruction that is in no line.
        assert_eq!(text(WORD | 9, true), "load_orders (orders.py) [python]");
        assert_eq!(text(WORD | 2, false), "load_orders (orders.py) [python]");
        let begun = WORD | 0xfffff;
        assert_eq!(text(begun, true), "load_orders (orders.py:41) [python]");
    }

    #[test]
    fn what_is_not_known_has_no_name_and_the_shim_is_no_frame() {
        let found = |known: &CodeLookup| text(WORD, known, true);
        assert_eq!(
            found(&CodeLookup::Unknown).as_deref(),
            Some("[unknown] [python]")
        );
        assert_eq!(
            found(&CodeLookup::Ambiguous).as_deref(),
            Some("[ambiguous] [python]")
        );
        assert_eq!(found(&known("__init__", "__init__")), None);
    }

    #[test]
    fn a_loop_that_is_left_among_frames_of_python_is_marked() {
        let native = |name: &str| Frame {
            symbol: Some((name.into(), 0)),
            ..Frame::default()
        };
        let python = || Frame::of_python(WORD, "keep", None);
        let marked = |mut frames: Vec<Frame>| {
            mark_loops(&mut frames);
            let symbols = frames.into_iter().map(|frame| frame.symbol);
            symbols
                .map(|symbol| symbol.expect("a name").0.to_string())
                .collect::<Vec<_>>()
        };
        let left = vec![native("malloc"), python(), native(LOOP), native("main")];
        assert_eq!(marked(left), ["malloc", "keep", LOOP, CUT, "main"]);
        let without = vec![native(LOOP), native("main")];
        assert_eq!(marked(without), [LOOP, "main"]);
    }
}
