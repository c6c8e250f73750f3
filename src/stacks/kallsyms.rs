//! Names of the kernel's functions and their modules, from /proc/kallsyms.

use std::fs::{self, File};
use std::io::{self, BufRead, BufReader};

use crate::host::capabilities::{self, Capability};

/// Name of the kernel itself in frames, instead of a module's name.
const KERNEL: &str = "kernel";

/// The kernel's functions by address.
#[derive(Debug, Default)]
pub struct Kallsyms {
    /// Functions sorted by address, each address once.
    functions: Vec<Function>,
    names: String,
    modules: Vec<String>,
    hidden: bool,
}

#[derive(Debug)]
struct Function {
    address: u64,
    /// First byte of the name in `names`; `length` is its number of bytes.
    name: u32,
    length: u16,
    module: u16,
}

impl Kallsyms {
    /// Reads the running kernel's function names. Reports on stderr if they cannot be read or are hidden; then none are
    /// found.
    pub(crate) fn read_or_warn() -> Self {
        let symbols = Self::read().unwrap_or_else(|error| {
            crate::note!("no names for kernel frames: failed to read /proc/kallsyms: {error}");
            Self::default()
        });
        if symbols.hidden() {
            let restrict = fs::read_to_string("/proc/sys/kernel/kptr_restrict");
            let from_all = restrict.is_ok_and(|value| value.trim() == "2");
            let remedy = if from_all {
                "; to see them: sysctl kernel.kptr_restrict=1".to_owned()
            } else {
                capabilities::remedy(Capability::CAP_SYSLOG)
            };
            crate::note!("no names for kernel frames: the kernel hides its addresses{remedy}");
        }
        symbols
    }

    /// Reads the running kernel's function names.
    ///
    /// # Errors
    /// If /proc/kallsyms cannot be read.
    pub fn read() -> io::Result<Self> {
        Self::parse(BufReader::with_capacity(
            64 << 10,
            File::open("/proc/kallsyms")?,
        ))
    }

    fn parse(mut lines: impl BufRead) -> io::Result<Self> {
        let mut symbols = Self {
            modules: vec![KERNEL.to_owned()],
            ..Self::default()
        };
        let mut line = String::new();
        while lines.read_line(&mut line)? > 0 {
            symbols.add(&line);
            line.clear();
        }
        // The first of several names of one address is the one that the kernel itself uses.
        symbols
            .functions
            .sort_by_key(|function| (function.address, function.name));
        symbols.functions.dedup_by_key(|function| function.address);
        symbols.names.shrink_to_fit();
        Ok(symbols)
    }

    /// Adds a line such as `ffffffff81000000 T _text` or `ffffffffc0001000 t nft_do_chain\t[nf_tables]`, if it is a
    /// function's.
    fn add(&mut self, line: &str) {
        let mut words = line.split_ascii_whitespace();
        let (Some(address), Some("t" | "T" | "w" | "W"), Some(name)) =
            (words.next(), words.next(), words.next())
        else {
            return;
        };
        let Ok(address) = u64::from_str_radix(address, 16) else {
            return;
        };
        if address == 0 {
            self.hidden = true;
            return;
        }
        let module = words
            .next()
            .map_or(KERNEL, |module| module.trim_matches(['[', ']']));
        // The lines of a module are contiguous.
        if self.modules.last().is_none_or(|last| last != module) {
            self.modules.push(module.to_owned());
        }
        self.functions.push(Function {
            address,
            name: self.names.len() as u32,
            length: name.len() as u16,
            module: (self.modules.len() - 1) as u16,
        });
        self.names.push_str(name);
    }

    /// Whether the kernel hides the addresses of its functions.
    pub fn hidden(&self) -> bool {
        self.functions.is_empty() && self.hidden
    }

    /// Returns the function at an address, the offset from the function's start, and its module, or `kernel`.
    pub fn find(&self, address: u64) -> Option<(&str, u64, &str)> {
        let after = self
            .functions
            .partition_point(|function| function.address <= address);
        let function = self.functions.get(after.checked_sub(1)?)?;
        let start = function.name as usize;
        Some((
            self.names
                .get(start..start + usize::from(function.length))?,
            address - function.address,
            self.modules.get(usize::from(function.module))?,
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_are_found_with_their_module() {
        let symbols = Kallsyms::parse(
            "ffffffff81000000 T _text\n\
             ffffffff81000000 T alias\n\
             ffffffff82000000 D a_variable\n\
             ffffffff81000100 t do_brk_flags\n\
             ffffffffc0001000 t nft_do_chain\t[nf_tables]\n\
             garbage\n"
                .as_bytes(),
        )
        .expect("memory");
        assert!(!symbols.hidden());
        assert_eq!(
            symbols.find(0xffff_ffff_8100_0004),
            Some(("_text", 4, "kernel"))
        );
        assert_eq!(
            symbols.find(0xffff_ffff_8100_0100),
            Some(("do_brk_flags", 0, "kernel"))
        );
        assert_eq!(
            symbols.find(0xffff_ffff_c000_1010),
            Some(("nft_do_chain", 0x10, "nf_tables"))
        );
        assert_eq!(symbols.find(0xffff), None);
    }

    #[test]
    fn hidden_addresses_are_noticed() {
        let symbols =
            Kallsyms::parse("0000000000000000 T _text\n0000000000000000 t f\n".as_bytes())
                .expect("memory");
        assert!(symbols.hidden());
        assert_eq!(symbols.find(0xffff_ffff_8100_0004), None);
    }
}
