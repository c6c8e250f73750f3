//! Names of C++ and Rust functions as they are in the source. C++ names are written as c++filt writes them.
//!
//! A mangled name can refer back to its parts, so that 600 bytes can expand to gigabytes (each parameter's type made of
//! two of the one before). So the demangled name is cut when it is long enough.

mod parse;
mod tree;
mod write;

use std::borrow::Cow;
use std::fmt::{self, Write};

use crate::print::text::{self, MAX_NAME};

/// Demangles a name, as far as it is shown. Returns the name itself if it is not mangled.
pub fn demangle(name: &str) -> Cow<'_, str> {
    // Rust's older mangling is that of a C++ variable, except for the hash at the end.
    let may_be_rust = name.starts_with("_R") || name.contains("17h");
    if let Some(rust) = may_be_rust
        .then(|| rustc_demangle::try_demangle(name).ok())
        .flatten()
    {
        return Cut::of(|cut| write!(cut, "{rust:#}")).map_or(name.into(), Cow::Owned);
    }
    if !name.starts_with("_Z") && !name.starts_with("_GLOBAL_") {
        return name.into();
    }
    cpp(name).map_or(name.into(), Cow::Owned)
}

/// Demangles a name of C++. Returns None if the name is not mangled.
fn cpp(name: &str) -> Option<String> {
    let (tree, root) = parse::parse(name)?;
    let mut demangled = write::write(&tree, root, MAX_NAME + 1)?;
    demangled.truncate(text::truncate(&demangled, 2 * MAX_NAME).len());
    Some(demangled)
}

/// Buffer for a demangled name, which is full a little after the part that is shown.
#[derive(Default)]
struct Cut(String);

impl Cut {
    /// Returns the text that `write` writes, or None if writing fails for another reason than the length.
    fn of(write: impl FnOnce(&mut Self) -> fmt::Result) -> Option<String> {
        let mut cut = Self::default();
        let written = write(&mut cut);
        (written.is_ok() || cut.is_full()).then_some(cut.0)
    }

    fn is_full(&self) -> bool {
        self.0.len() > MAX_NAME
    }
}

impl Write for Cut {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let room = (2 * MAX_NAME).saturating_sub(self.0.len());
        self.0.push_str(text::truncate(text, room));
        if self.is_full() {
            Err(fmt::Error)
        } else {
            Ok(())
        }
    }
}

#[cfg(test)]
mod tests;
