//! Runtimes that write a perf map of the functions that they compile or interpret only if started with an option for
//! it.
//!
//! HotSpot is not among these runtimes: its memory is read, and it can be requested a perf map while it runs.

use std::collections::{BTreeMap, HashMap, HashSet};

use crate::print::text;
use crate::process::address_space::Image;

/// A runtime that writes `/tmp/perf-PID.map` only if it is started with an option for that.
#[derive(Debug)]
struct Runtime {
    name: &'static str,
    /// Names of the program and library files that it runs from, without versions.
    files: &'static [&'static str],
    /// How to start the runtime so that it writes a perf map.
    started: &'static str,
}

const RUNTIMES: [Runtime; 6] = [
    Runtime {
        name: "Node.js",
        files: &["node", "nodejs", "libnode"],
        started: "with --perf-basic-prof --interpreted-frames-native-stack",
    },
    Runtime {
        name: "Deno",
        files: &["deno"],
        started: "with --v8-flags=--perf-basic-prof,--interpreted-frames-native-stack",
    },
    Runtime {
        name: ".NET",
        files: &["libcoreclr"],
        started: "with DOTNET_PerfMapEnabled=1 in its environment (before .NET 6 COMPlus_PerfMapEnabled=1)",
    },
    Runtime {
        name: "Erlang",
        files: &["beam.smp"],
        started: "with +JPperf map",
    },
    Runtime {
        name: "PHP",
        files: &["php", "php-fpm", "libphp"],
        started: "with opcache.jit_debug=0x10 in its configuration",
    },
    Runtime {
        name: "Ruby",
        files: &["ruby", "libruby"],
        started: "with --yjit --yjit-perf",
    },
];

/// V8's function that interprets others. With `--interpreted-frames-native-stack`, each interpreted function has a
/// named copy of it.
const V8_INTERPRETER: &str = "Builtins_InterpreterEntryTrampoline";

/// Maximum number of processes that are recorded, and of places of each.
const MAX_PROCESSES: usize = 1024;
const MAX_PLACES: usize = 1024;

impl Runtime {
    /// Returns the runtime that a process runs, if it is one of [`RUNTIMES`].
    fn of(image: &Image) -> Option<&'static Self> {
        image.files().find_map(|file| Self::in_file(file.module()))
    }

    fn in_file(module: &str) -> Option<&'static Self> {
        let is_version = |rest: &str| {
            rest.is_empty()
                || rest.starts_with(|first: char| first.is_ascii_digit() || ".-".contains(first))
        };
        let has = |name: &&str| module.strip_prefix(*name).is_some_and(is_version);
        RUNTIMES
            .iter()
            .find(|runtime| runtime.files.iter().any(has))
    }
}

/// Whether a native function is executed in place of the functions that it interprets.
pub(super) fn interprets(function: &str) -> bool {
    function == V8_INTERPRETER
}

/// Places without a name in functions of runtimes, for lack of a perf map.
#[derive(Debug, Default)]
pub(super) struct UnnamedPlaces {
    by_process: HashMap<u32, OfProcess>,
}

#[derive(Debug)]
struct OfProcess {
    /// The process's runtime; None if it is not known.
    runtime: Option<&'static Runtime>,
    instructions: HashSet<u64>,
}

impl UnnamedPlaces {
    /// Records a place of a process that has no perf map.
    pub(super) fn note(&mut self, pid: u32, image: &Image, instruction: u64) {
        if self.by_process.len() == MAX_PROCESSES && !self.by_process.contains_key(&pid) {
            return;
        }
        let process = self.by_process.entry(pid).or_insert_with(|| OfProcess {
            runtime: Runtime::of(image),
            instructions: HashSet::new(),
        });
        if process.runtime.is_some() && process.instructions.len() < MAX_PLACES {
            process.instructions.insert(instruction);
        }
    }

    /// Reports on stderr how each runtime must be started for its functions to have names.
    pub(super) fn tell(&self) {
        for line in self.lines() {
            crate::message!("{line}");
        }
    }

    fn lines(&self) -> impl Iterator<Item = String> {
        let mut by_runtime = BTreeMap::new();
        for process in self.by_process.values() {
            if let Some(Runtime { name, started, .. }) = process.runtime {
                *by_runtime.entry((name, started)).or_default() +=
                    process.instructions.len() as u64;
            }
        }
        by_runtime.into_iter().map(|((name, started), places)| {
            let places = text::count_with_noun(places, "place");
            format!(
                "{places} in functions that {name} compiles or interprets, without a perf map; \
                 for names start it {started}"
            )
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_runtime_is_told_by_its_file() {
        let runtime = |module| Runtime::in_file(module).map(|runtime| runtime.name);
        for (module, name) in [
            ("node", "Node.js"),
            ("nodejs", "Node.js"),
            ("node-22", "Node.js"),
            ("libnode.so.108", "Node.js"),
            ("libcoreclr.so", ".NET"),
            ("beam.smp", "Erlang"),
            ("php8.2", "PHP"),
            ("php-fpm8.2", "PHP"),
            ("libphp8.2.so", "PHP"),
            ("libruby-3.1.so.3.1", "Ruby"),
        ] {
            assert_eq!(runtime(module), Some(name), "{module}");
        }
        for module in [
            "node_exporter",
            "nodes",
            "libc.so.6",
            "rubyfmt",
            "",
            "denote",
        ] {
            assert_eq!(runtime(module), None, "{module}");
        }
    }
}
