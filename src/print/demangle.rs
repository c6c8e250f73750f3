//! Names of C++ and Rust functions as they are in the source.
//!
//! A mangled name can refer back to its parts, so that 600 bytes can expand to gigabytes (each parameter's type made of
//! two of the one before). So the demangled name is cut when it is long enough.

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
    if !name.starts_with("_Z") && !name.starts_with("___Z") && !name.starts_with("_GLOBAL_") {
        return name.into();
    }
    let Ok(symbol) = cpp_demangle::Symbol::new(name) else {
        return name.into();
    };
    let options = cpp_demangle::DemangleOptions::default();
    Cut::of(|cut| symbol.structured_demangle(cut, &options)).map_or(name.into(), Cow::Owned)
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
mod tests {
    use super::*;

    #[test]
    fn names_as_in_the_source() {
        assert_eq!(demangle("_ZN3foo3barEi"), "foo::bar(int)");
        assert_eq!(demangle("_RNvC6_123foo3bar"), "123foo::bar");
        assert_eq!(
            demangle("_ZN12_GLOBAL__N_15cacheE"),
            "(anonymous namespace)::cache"
        );
        assert_eq!(
            demangle("_ZN4core3fmt5Write9write_str17h0123456789abcdefE"),
            "core::fmt::Write::write_str"
        );
        for plain in ["malloc", "_Z", "_ZN", "_start", "", "größe"] {
            assert_eq!(demangle(plain), plain);
        }
    }

    /// Makes a mangled name in which each parameter's type is made of two of the one before it.
    fn bomb(parameters: usize) -> String {
        let reference = |number: usize| match number {
            0 => "S_".to_owned(),
            _ => {
                const DIGITS: &[u8; 36] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
                let (mut rest, mut digits) = (number - 1, Vec::new());
                loop {
                    digits.insert(0, char::from(DIGITS[rest % 36]));
                    rest /= 36;
                    if rest == 0 {
                        return format!("S{}_", digits.iter().collect::<String>());
                    }
                }
            }
        };
        let types = (0..parameters).map(|number| {
            let last = reference(number + 1);
            format!("S_I{last}{last}E")
        });
        format!("_Z1f1XIiiE{}", types.collect::<String>())
    }

    #[test]
    fn a_bomb_is_cut() {
        // The prefix shows that the name was parsed.
        assert_eq!(
            demangle(&bomb(1)),
            "f(X<int, int>, X<X<int, int>, X<int, int> >)"
        );
        let cut = demangle(&bomb(64)).into_owned();
        assert!(cut.starts_with("f(X<int, int>, X<X<int"), "{cut}");
        assert!(
            (MAX_NAME..=2 * MAX_NAME).contains(&cut.len()),
            "{}",
            cut.len()
        );
    }
}
