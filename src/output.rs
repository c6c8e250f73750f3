//! Rows on stdout, as text or as JSON, one object a line.

use std::fmt;
use std::io::{self, BufWriter, Stdout, Write};

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};

/// Something that a tool prints. Its fields are its JSON; `text` writes the line or lines of the
/// default format, each with its newline.
pub trait Row: Serialize {
    /// Writes the text form.
    fn text(&self, out: &mut dyn Write) -> io::Result<()>;
}

/// How rows are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// The BCC tools' columns.
    Text,
    /// One JSON object a line.
    Json,
}

/// Buffered stdout. Nothing reaches the reader before [`Output::flush`], so that a burst of rows
/// is one write.
pub struct Output {
    format: Format,
    out: BufWriter<Stdout>,
}

impl Output {
    /// Prints in this format.
    pub fn new(format: Format) -> Self {
        Self {
            format,
            out: BufWriter::with_capacity(64 << 10, io::stdout()),
        }
    }

    /// Prints one row.
    pub fn row(&mut self, row: &impl Row) -> Result<()> {
        match self.format {
            Format::Text => row.text(&mut self.out),
            Format::Json => serde_json::to_writer(&mut self.out, row)
                .map_err(io::Error::from)
                .and_then(|()| self.out.write_all(b"\n")),
        }
        .context("failed to print")
    }

    /// Prints the line of column names, which JSON has not.
    pub fn header(&mut self, line: &str) -> Result<()> {
        if self.format == Format::Text {
            writeln!(self.out, "{line}").context("failed to print")?;
        }
        Ok(())
    }

    /// Prints what is no row, such as a folded stack.
    pub fn raw(&mut self, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        write(&mut self.out).context("failed to print")
    }

    /// Hands what was printed to the reader; once per wake-up.
    pub fn flush(&mut self) -> Result<()> {
        self.out.flush().context("failed to print")
    }
}

/// A number that is written in hexadecimal, such as an address: `0x7f12`, in JSON as a string.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hex(pub u64);

impl fmt::Display for Hex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{:#x}", self.0))
    }
}

impl Serialize for Hex {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}
