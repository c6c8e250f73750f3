//! Every program of every tool passes this kernel's verifier, unless the kernel is known to lack what the program
//! is for. Every program reads fields at the offsets of this kernel.
//!
//! A tool's programs are loaded together, and each alone if one of them does not pass. They are loaded with the
//! options at their defaults and with all options on: to the verifier, options are constants, and it skips the
//! code that they switch off.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::{fmt, fs};

use anyhow::{Context, Result, anyhow, ensure};
use libbpf_rs::btf::Btf;
use libbpf_rs::btf::types::DataSec;
use libbpf_rs::{AsRawLibbpf, ObjectBuilder, OpenObject, PrintLevel, libbpf_sys};
use libtest_mimic::{Completion, Failed, Trial};
use memtools::bpf::btf_subset::{self, KernelTypes};
use memtools::bpf::kernel_support;

use crate::harness;

/// Each tool's object, as build.rs compiled it.
pub(crate) const OBJECTS: &[(&str, &[u8])] = include!(concat!(env!("OUT_DIR"), "/objects.rs"));

/// Programs that load only where the kernel's BTF has this name.
const ONLY_WITH: [(&str, &str); 9] = [
    ("ffaults/fault_event", "bpf_find_vma"),
    ("ffaults/major_fault_event", "bpf_find_vma"),
    ("hfaults/fault_event", "bpf_find_vma"),
    // BPF cookies came with 5.15, after the compare-and-exchange of 5.12.
    ("memleak/cookie_entry", "bpf_perf_link"),
    ("memleak/cookie_slot", "bpf_perf_link"),
    ("memleak/cookie_return", "bpf_perf_link"),
    ("memleak/session_call", "BPF_TRACE_UPROBE_SESSION"),
    ("shmsnoop/shmdt_enter", "bpf_find_vma"),
    ("shmsnoop/shmdt_enter_function", "bpf_find_vma"),
];

/// Name prefixes of programs that differ in one number only. The first program is tested in place of all.
const COPIES: [(&str, &str); 2] = [("memleak", "entry_"), ("vmscan", "count_")];

/// Maximum stack bytes for a program attached to a uprobe. With more, the program shares its stack with whatever
/// preempts it: x86's private BPF stacks, 6.13 and later, begin at 64 bytes, rounded up to 16.
const UPROBE_STACK_BYTES: u32 = 48;

/// Most instructions that the verifier may process for a program, a fraction of a second's work: tools are to
/// start in milliseconds. 5.10 processed 153,498 for mmapsnoop with all options. The kernel's own limit is a
/// million.
const MOST_INSTRUCTIONS: u64 = 200_000;

/// Log level that asks for the verifier's statistics.
const BPF_LOG_STATS: u32 = 4;

/// libbpf's messages about the current load. Messages about several objects cannot be distinguished.
static LOG: Mutex<String> = Mutex::new(String::new());
static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

/// libbpf's messages about a load, kept for later tests. None if the load failed.
type Messages = Option<Arc<str>>;

/// Lines about the programs that have passed, one each.
static VERDICTS: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// Prints the verifier's statistics of the programs once all tests are done, so that the harness is not
/// interrupted in the middle of its lines.
pub(crate) fn print_verdicts() {
    for verdict in VERDICTS.lock().iter().flat_map(|verdicts| verdicts.iter()) {
        println!("{verdict}");
    }
}

/// BPF program of a tool.
struct Program {
    tool: &'static str,
    object: &'static [u8],
    name: String,
    /// ELF section, which says what the program is attached to.
    section: String,
}

impl Program {
    /// Returns a tool's programs. Of programs that differ in one number only, returns the first.
    fn all_of(tool: &'static str, object: &'static [u8]) -> Vec<Self> {
        let open = ObjectBuilder::default()
            .open_memory(object)
            .expect("an object of ours");
        let prefix = COPIES.iter().find(|(of, _)| *of == tool);
        let is_copy = |name: &str| {
            let number = prefix.and_then(|(_, prefix)| name.strip_prefix(prefix));
            number.is_some_and(|number| !number.trim_matches('0').is_empty())
        };
        let programs = open.progs().map(|program| {
            let section = program.section().to_string_lossy();
            Self {
                tool,
                object,
                name: program.name().to_string_lossy().into_owned(),
                section: section.trim_start_matches('?').to_owned(),
            }
        });
        programs.filter(|program| !is_copy(&program.name)).collect()
    }

    fn kind(&self) -> &str {
        let parts = self.section.split_once('/');
        parts.map_or(&self.section, |(kind, _)| kind)
    }

    fn is_on_uprobe(&self) -> bool {
        self.section.starts_with('u')
    }

    /// Whether a kernel may refuse all programs of this kind, for lack of permission.
    fn may_be_refused(&self) -> bool {
        ["fentry", "fexit"].contains(&self.kind())
    }

    /// Whether the kernel has refused the program for lack of permission. If the verifier refuses a program, the
    /// error is EACCES or EINVAL.
    fn is_refused(&self, error: &anyhow::Error) -> bool {
        self.may_be_refused() && error.to_string().starts_with("Operation not permitted")
    }

    /// Returns why this kernel cannot have the program, or None if it can.
    fn missing(&self) -> Option<String> {
        let full_name = self.to_string();
        let only_with = ONLY_WITH.iter().find(|(program, _)| *program == full_name);
        let only_with = only_with.map(|(_, needed)| (*needed).to_owned());
        let target = self.section.split_once('/').map(|(_, target)| target);
        let target = match (self.kind(), target) {
            ("fentry" | "fexit", Some(target)) => Some(target.to_owned()),
            ("tp_btf", Some(target)) => Some(format!("btf_trace_{target}")),
            _ => None,
        };
        let mut needed = only_with.into_iter().chain(target);
        let missing = needed.find(|name| !kernel_support::btf_has_name(name))?;
        Some(format!("this kernel has no {missing}"))
    }
}

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.tool, self.name)
    }
}

/// Returns a test for each tool's object and for each program.
pub(crate) fn tests() -> Vec<Trial> {
    libbpf_rs::set_print(Some((PrintLevel::Debug, |_, message| {
        if let Ok(mut log) = LOG.lock() {
            log.push_str(&message);
        }
    })));
    let mut trials = Vec::new();
    for &(tool, object) in OBJECTS {
        trials.push(trial(format!("load::{tool}"), move || {
            fields_are_those_of_the_whole_btf(object)
        }));
        for program in Program::all_of(tool, object) {
            let name = format!("load::{tool}::{}", program.name);
            trials.push(trial(name, move || passes(&program)));
        }
    }
    trials
}

fn trial(name: String, test: impl FnOnce() -> Result<Completion> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || {
        if let Some(reason) = harness::bpf_not_permitted() {
            return Ok(Completion::ignored_with(reason));
        }
        let _guard = ONE_AT_A_TIME.lock();
        test().map_err(|error| Failed::from(format!("{error:?}")))
    })
}

/// Checks that programs read every field at the offset that libbpf finds with all of the kernel's types: after
/// relocation, their instructions must be the same.
fn fields_are_those_of_the_whole_btf(object: &[u8]) -> Result<Completion> {
    let whole = ObjectBuilder::default().open_memory(object)?;
    let whole = relocated(&whole).context("with the whole")?;
    let part = relocated(&open(object)?).context("with a part")?;
    for ((program, whole), (_, part)) in whole.iter().zip(&part) {
        let differs = whole
            .iter()
            .zip(part)
            .position(|(whole, part)| whole != part);
        ensure!(
            differs.is_none() && whole.len() == part.len(),
            "{program} differs from instruction {differs:?} on"
        );
    }
    ensure!(
        !whole.is_empty() && whole.len() == part.len(),
        "no programs"
    );
    Ok(Completion::Completed)
}

/// Opens an object as the tools do.
fn open(object: &[u8]) -> Result<OpenObject> {
    let mut builder = ObjectBuilder::default();
    let types = KernelTypes::for_object(&mut builder)?;
    let open = builder.open_memory(object)?;
    types.write(&btf_subset::types_for(&open)?)?;
    Ok(open)
}

/// Returns the programs' instructions as libbpf passes them to the kernel, without the descriptors of maps.
fn relocated(open: &OpenObject) -> Result<Vec<(String, Vec<u64>)>> {
    const LOAD_64_BITS: u8 = 0x18;
    // SAFETY: the object is alive, and has been neither prepared nor loaded.
    let result = unsafe { libbpf_sys::bpf_object__prepare(open.as_libbpf_object().as_ptr()) };
    ensure!(result == 0, "failed to prepare: {result}");
    let programs = open.progs().map(|program| {
        let instructions = program.insns().iter().map(|instruction| {
            let registers = instruction.dst_reg() << 4 | instruction.src_reg();
            let of_map = instruction.code == LOAD_64_BITS && instruction.src_reg() != 0;
            let immediate = if of_map { 0 } else { instruction.imm };
            u64::from(instruction.code) << 56
                | u64::from(registers) << 48
                | u64::from(instruction.off.cast_unsigned()) << 32
                | u64::from(immediate.cast_unsigned())
        });
        let name = program.name().to_string_lossy().into_owned();
        (name, instructions.collect())
    });
    Ok(programs.collect())
}

fn passes(program: &Program) -> Result<Completion> {
    if let Some(reason) = program.missing() {
        return Ok(Completion::ignored_with(reason));
    }
    if program.is_on_uprobe() {
        let per_cpu = per_cpu_maps(program.object)?;
        ensure!(
            per_cpu.is_empty(),
            "a program on a uprobe has per-CPU maps beside it, which it would share with whatever \
             preempts it: {per_cpu:?}"
        );
    }
    for options in [Options::Defaults, Options::AllOn] {
        let log = match log_of(program, options) {
            Err(error) if program.is_refused(&error) => {
                return Ok(Completion::ignored_with("this kernel refuses fentry"));
            }
            log => log?,
        };
        let verdict = Verdict::parse(&log).with_context(|| format!("no statistics in:\n{log}"))?;
        if let Ok(mut verdicts) = VERDICTS.lock() {
            verdicts.push(format!("{program} ({options:?}): {verdict}"));
        }
        ensure!(
            verdict.instructions <= MOST_INSTRUCTIONS,
            "the verifier had to follow {} instructions",
            verdict.instructions
        );
        let fits = verdict
            .stacks
            .iter()
            .all(|&bytes| bytes <= UPROBE_STACK_BYTES);
        ensure!(
            !program.is_on_uprobe() || fits,
            "a program on a uprobe uses more than {UPROBE_STACK_BYTES} bytes of stack: {verdict}"
        );
    }
    Ok(Completion::Completed)
}

/// Returns the per-CPU maps of an object, except for the map whose values name their owner, and are written and
/// read as a whole.
fn per_cpu_maps(object: &[u8]) -> Result<Vec<String>> {
    const TELLS_WHOSE: &str = "plain_calls";
    let open = ObjectBuilder::default().open_memory(object)?;
    let per_cpu = open.maps().filter(|map| map.map_type().is_percpu());
    Ok(per_cpu
        .map(|map| map.name().to_string_lossy().into_owned())
        .filter(|map| map != TELLS_WHOSE)
        .collect())
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Options {
    Defaults,
    AllOn,
}

/// Returns the verifier's log of a program, which is loaded with all of the tool's programs, or alone if one of
/// them does not pass.
fn log_of(program: &Program, options: Options) -> Result<String> {
    let (tool, object) = (program.tool, program.object);
    let log = match logs_together(tool, object, options) {
        Some(log) if !program.may_be_refused() => log,
        _ => load(object, &[&program.name], options)?.into(),
    };
    let begin = format!("prog '{}': -- BEGIN PROG LOAD LOG --", program.name);
    let own = log.split_once(&begin).map(|(_, own)| own);
    let own = own.with_context(|| format!("nothing is said of {program}:\n{log}"))?;
    let end = own.split_once("-- END PROG LOAD LOG --");
    Ok(end.map_or(own, |(own, _)| own).to_owned())
}

/// Returns the log of those of a tool's programs that this kernel can have and does not refuse, loaded together
/// once for all tests. None if a program did not pass.
fn logs_together(tool: &'static str, object: &'static [u8], options: Options) -> Messages {
    static LOGS: Mutex<BTreeMap<(&str, Options), Messages>> = Mutex::new(BTreeMap::new());
    let mut logs = LOGS.lock().ok()?;
    let log = logs.entry((tool, options)).or_insert_with(|| {
        let programs = Program::all_of(tool, object).into_iter();
        let programs: Vec<Program> = programs
            .filter(|program| !program.may_be_refused() && program.missing().is_none())
            .collect();
        let names: Vec<&str> = programs
            .iter()
            .map(|program| program.name.as_str())
            .collect();
        Some(load(object, &names, options).ok()?.into())
    });
    log.clone()
}

/// Loads these programs. Returns libbpf's messages, with the verifier's statistics.
fn load(object: &[u8], programs: &[&str], options: Options) -> Result<String> {
    let mut open = open(object)?;
    for mut candidate in open.progs_mut() {
        let name = candidate.name().to_string_lossy().into_owned();
        candidate.set_autoload(programs.contains(&name.as_str()));
        candidate.set_log_level(BPF_LOG_STATS);
    }
    if options == Options::AllOn {
        switch_on(&mut open, object)?;
    }
    if let Ok(mut log) = LOG.lock() {
        log.clear();
    }
    let loaded = open.load();
    let log = LOG.lock().map(|log| log.clone()).unwrap_or_default();
    loaded.map_err(|error| anyhow!("{error} with the options {options:?}:\n{log}"))?;
    Ok(log)
}

/// Sets every option that has one byte: flags have this size.
fn switch_on(open: &mut OpenObject, object: &[u8]) -> Result<()> {
    let file = tempfile::NamedTempFile::new()?;
    fs::write(file.path(), object)?;
    let btf = Btf::from_path(file.path())?;
    let flags: Vec<usize> = (1..btf.len() as u32)
        .filter_map(|id| btf.type_by_id::<DataSec<'_>>(id.into()))
        .filter(|section| section.name().is_some_and(|name| name == ".rodata"))
        .flat_map(|section| {
            let flags = section.iter().filter(|variable| variable.size == 1);
            flags
                .map(|variable| variable.offset as usize)
                .collect::<Vec<_>>()
        })
        .collect();
    for mut map in open.maps_mut() {
        if map.name().to_string_lossy().ends_with(".rodata")
            && let Some(value) = map.initial_value_mut()
        {
            for &offset in &flags {
                value[offset] = 1;
            }
        }
    }
    Ok(())
}

/// The verifier's statistics of a program.
struct Verdict {
    instructions: u64,
    /// Size of each function's stack frame, in bytes.
    stacks: Vec<u32>,
}

impl Verdict {
    /// Parses `stack depth 8+48` and `processed 1234 insns`.
    fn parse(log: &str) -> Option<Self> {
        let after = |text: &str| {
            let start = log.rfind(text)? + text.len();
            log[start..].split_whitespace().next()
        };
        Some(Self {
            instructions: after("processed ")?.parse().ok()?,
            stacks: after("stack depth ")?
                .split('+')
                .map(|bytes| bytes.parse().ok())
                .collect::<Option<_>>()?,
        })
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} instructions processed, stack depth {:?}",
            self.instructions, self.stacks
        )
    }
}
