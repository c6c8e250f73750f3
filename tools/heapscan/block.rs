//! Row that `--blocks` prints for each block.

use std::io::{self, Write};

use memtools::heap::blocks::Block;
use memtools::print::output::Row;
use serde::Serialize;

/// A block that the program has.
#[derive(Debug, Serialize)]
pub(crate) struct BlockRow {
    r#type: &'static str,
    address: String,
    size_bytes: u64,
}

impl BlockRow {
    pub(crate) fn of(block: &Block) -> Self {
        Self {
            r#type: "block",
            address: format!("{:#x}", block.address),
            size_bytes: block.size,
        }
    }
}

impl Row for BlockRow {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        writeln!(out, "\taddr = {} size = {}", self.address, self.size_bytes)
    }
}
