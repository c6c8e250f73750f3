//! Fuzz target of the parser that this program is named after.

#![no_main]

#[path = "../hostile/parsers.rs"]
mod parsers;

use std::env;
use std::sync::LazyLock;

use libfuzzer_sys::fuzz_target;
use parsers::{PARSERS, Parser};

static PARSER: LazyLock<Parser> = LazyLock::new(|| {
    let program = env::current_exe().expect("our program");
    let (_, parser) = PARSERS
        .into_iter()
        .find(|(name, _)| program.ends_with(name))
        .expect("a parser of this name");
    parser
});

fuzz_target!(|bytes: &[u8]| PARSER(bytes));
