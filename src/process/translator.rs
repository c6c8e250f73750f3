//! Programs that read the code of other programs as data and run a translation of it.
//!
//! A uprobe is a breakpoint in the code of a file, for all processes that map the file. A translator does not execute
//! this breakpoint. It reads the breakpoint as an instruction of the translated program, which SIGTRAP then kills.

use std::collections::BTreeSet;
use std::path::Path;

use crate::process::mapping_log::Change;

/// Prefixes of the names of processors for which QEMU has a user mode. The names after `qemu-` also include tools
/// (qemu-img) and emulators of whole machines (qemu-system-x86_64).
const QEMU_USER: [&str; 22] = [
    "aarch64",
    "alpha",
    "arm",
    "cris",
    "hexagon",
    "hppa",
    "i386",
    "loongarch64",
    "m68k",
    "microblaze",
    "mips",
    "nios2",
    "or1k",
    "ppc",
    "riscv",
    "s390x",
    "sh4",
    "sparc",
    "tilegx",
    "x86_64",
    "xtensa",
    "sparc64",
];

/// File names of other translators, or of libraries that they load, each with the translator's name.
const NAMES: [(&str, &str); 9] = [
    ("box64", "box64"),
    ("box86", "box86"),
    ("FEXInterpreter", "FEX"),
    ("FEXLoader", "FEX"),
    ("FEX", "FEX"),
    ("libdynamorio.so", "DynamoRIO"),
    ("drrun", "DynamoRIO"),
    ("pinbin", "Pin"),
    ("librrpreload.so", "rr"),
];

/// Finds a translator among the files from which a process executes code.
pub fn find_in<'a>(files: impl IntoIterator<Item = &'a Path>) -> Option<&'static str> {
    files.into_iter().find_map(of_file)
}

/// Translators that have started since the kernel's log of mappings was opened, and that still run.
#[derive(Debug, Default)]
pub struct RunningTranslators(BTreeSet<u32>);

impl RunningTranslators {
    /// Updates the set by a change of a process.
    pub fn note(&mut self, change: &Change) {
        match change {
            Change::Mapped(pid, mapping) if of_file(&mapping.path).is_some() => {
                self.0.insert(*pid);
            }
            Change::Forked(parent, child) if self.0.contains(parent) => {
                self.0.insert(*child);
            }
            Change::Exec(pid) | Change::Exited(pid) => {
                self.0.remove(pid);
            }
            _ => {}
        }
    }

    /// Returns the PIDs of these translators.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.0.iter().copied()
    }
}

fn of_file(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    if let Some(machine) = name.strip_prefix("qemu-") {
        let known = |name: &&str| machine.starts_with(*name);
        return QEMU_USER.iter().any(known).then_some("QEMU");
    }
    // /usr/bin/valgrind, /usr/libexec/valgrind/memcheck-amd64-linux
    let in_valgrind = path
        .parent()
        .is_some_and(|folder| folder.ends_with("valgrind"));
    if in_valgrind || name == "valgrind" || name == "valgrind.bin" {
        return Some("valgrind");
    }
    let known = NAMES.iter().find(|(known, _)| *known == name);
    known.map(|(_, translator)| *translator)
}

#[cfg(test)]
mod tests {
    use crate::process::proc::Mapping;

    use super::*;

    #[test]
    fn translators_that_start_are_known_until_they_end() {
        let mapped = |pid, path: &str| {
            let mapping = Mapping {
                range: 0x1000..0x2000,
                executable: true,
                file_offset: 0,
                device: (8, 1),
                inode: 1,
                path: path.into(),
            };
            Change::Mapped(pid, mapping)
        };
        let mut started = RunningTranslators::default();
        let changes = [
            mapped(1, "/usr/bin/valgrind.bin"),
            mapped(2, "/usr/bin/python3"),
            Change::Forked(1, 3),
            mapped(4, "/usr/bin/qemu-arm"),
            Change::Exec(1),
            Change::Exited(4),
        ];
        for change in &changes {
            started.note(change);
        }
        assert_eq!(started.pids().collect::<Vec<_>>(), [3]);
    }

    #[test]
    fn translators_are_known_by_what_they_map() {
        for (file, translator) in [
            ("/usr/bin/qemu-aarch64-static", Some("QEMU")),
            ("/usr/bin/qemu-x86_64", Some("QEMU")),
            ("/usr/bin/qemu-system-x86_64", None),
            ("/usr/bin/qemu-img", None),
            (
                "/usr/libexec/valgrind/memcheck-amd64-linux",
                Some("valgrind"),
            ),
            ("/usr/bin/valgrind.bin", Some("valgrind")),
            ("/usr/lib/rr/librrpreload.so", Some("rr")),
            ("/usr/local/bin/box64", Some("box64")),
            ("/usr/bin/python3", None),
            ("/", None),
        ] {
            let files = ["/lib/libc.so.6", file].map(Path::new);
            assert_eq!(find_in(files), translator, "{file}");
        }
    }
}
