//! File with functions to probe: which functions these are, and where each is probed.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::path::Path;

use anyhow::{Context, Result, ensure};
use memtools::code::elf;
use memtools::code::instruction::{self, Code};
use memtools::code::probe_point::{self, Preference, ProbePoint};
use memtools::code::pymalloc::SlotProbe;
use memtools::code::wrappers::{CallArguments, Callee, Calls, Forwarded, Forwarding};
use memtools::print::text;
use memtools::process::mapped_file::MappedFile;

use super::allocators;
use super::pool::FunctionSpec;
use super::python_objects;
use super::signature::Signature;
use crate::plan::FunctionSettings;

/// A file of the target with functions to probe.
#[derive(Debug, Clone)]
pub(crate) struct Object {
    /// Held open: probes are attached through its descriptor.
    pub(crate) file: MappedFile,
    /// The file's name for messages.
    pub(crate) module: String,
    /// Name of the allocator in the file.
    allocator: &'static str,
    /// Whether the file is the program itself, not a library.
    is_program: bool,
    /// Functions to probe. Of names that share an address, as aligned_alloc and memalign do in glibc, one is included.
    pub(crate) functions: Vec<Function>,
}

/// File in which functions are probed, which is not held open here.
#[derive(Debug)]
pub(crate) struct ProbedFile {
    pub(crate) inode: u64,
    /// The file's name for messages.
    pub(crate) module: String,
}

/// Name in place of the allocator's where only --alloc and --free name functions.
const NAMED: &str = "named functions";

/// Function to probe, or copy of CPython's allocator in a function.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) signature: Signature,
    /// Offset in the file of the instruction to probe.
    pub(crate) offset: usize,
    /// The instruction, and what follows it.
    code: Code,
}

/// Symbol of a function in the file, with the function's signature.
type Symbol<'a> = (&'a elf::Function, Signature);

impl Object {
    /// Searches a file for functions to probe. Returns None if there are none.
    pub(crate) fn new(
        file: &MappedFile,
        is_program: bool,
        settings: &FunctionSettings,
    ) -> Result<Option<Self>> {
        let wish = match settings.at_entries {
            true => Preference::Entry,
            false => Preference::Cheap,
        };
        Self::with_probes(file, is_program, wish, settings)
    }

    /// Places the probes of this file at the functions' entries, or as close behind these as is safe.
    pub(crate) fn at_entries(&self, settings: &FunctionSettings) -> Result<Self> {
        let object = Self::with_probes(&self.file, self.is_program, Preference::Entry, settings)?;
        object.with_context(|| format!("{} was changed while it was searched", self.module))
    }

    fn with_probes(
        file: &MappedFile,
        is_program: bool,
        wish: Preference,
        settings: &FunctionSettings,
    ) -> Result<Option<Self>> {
        let wanted = FunctionFilter::new(file, is_program, settings)?;
        let found = elf::functions(file.file(), |name, local| wanted.has(name, local))
            .context("failed to read its symbols")?;
        let found = with_code(file, found);
        let python = match wanted.python {
            true => python_objects::places(file, &found)?,
            false => None,
        };
        let names: Vec<&str> = found.iter().map(|symbol| symbol.name.as_str()).collect();
        let by_user = wanted.by_user_in(file, &found);
        let mut symbols = wanted.of_allocator_in(file, &found, &names, &by_user)?;
        let allocator = match symbols.is_empty() {
            _ if python.is_some() => "pymalloc",
            true => NAMED,
            false => allocators::name(&names, &file.module()),
        };
        symbols.extend(by_user);
        if let Some(python) = &python {
            symbols.push((&python.new_pool, Signature::new_pool()));
        }
        if symbols.is_empty() {
            return Ok(None);
        }
        let mut functions = place(file, &symbols, wish, settings)?;
        if let Some(python) = &python {
            add_slots(file, &python.slots, &mut functions)?;
        }
        if settings.only_allocations {
            functions.retain(|function| !function.signature.only_ends());
        }
        Ok(Some(Self {
            file: file.clone(),
            module: file.module(),
            allocator,
            is_program,
            functions,
        }))
    }

    /// Iterates over the functions whose calls are probed.
    pub(crate) fn calls(&self) -> impl Iterator<Item = &Function> {
        let functions = self.functions.iter();
        functions.filter(|function| !function.signature.is_of_slot())
    }

    /// Iterates over the copies of CPython's allocator.
    pub(crate) fn slots(&self) -> impl Iterator<Item = &Function> {
        let functions = self.functions.iter();
        functions.filter(|function| function.signature.is_of_slot())
    }

    /// Iterates over the instructions that are probed, each with what follows it.
    pub(crate) fn code(&self) -> impl Iterator<Item = Code> {
        self.functions.iter().map(|function| function.code)
    }

    /// Fails if the file has other instructions now than when it was searched: a breakpoint in the middle of an
    /// instruction changes what the program does.
    pub(crate) fn expect_unchanged(&self) -> Result<()> {
        for function in &self.functions {
            let now = instruction::code_at(self.file.file(), function.offset as u64)?;
            ensure!(
                now == function.code,
                "its code was changed while it was searched; try again"
            );
        }
        Ok(())
    }

    /// Returns the file's inode and name. Returns None if the inode cannot be read.
    pub(crate) fn probed_file(&self) -> Option<ProbedFile> {
        let (_, inode) = self.file.identity().ok()?;
        Some(ProbedFile {
            inode,
            module: self.module.clone(),
        })
    }

    /// Describes what was found in a few words.
    pub(crate) fn found(&self) -> String {
        let probes = |function: &Function| 1 + usize::from(function.signature.needs_return_probe());
        let probes: usize = self.functions.iter().map(probes).sum();
        let how = match self.is_program && self.allocator != NAMED {
            true => " (static)",
            false => "",
        };
        format!(
            "allocator: {}{how}, {probes} probes in {}",
            self.allocator, self.module
        )
    }
}

/// Functions of a file that are looked for.
struct FunctionFilter<'a> {
    settings: &'a FunctionSettings,
    /// The functions of this file that --alloc and --free name.
    named: Vec<&'a FunctionSpec>,
    /// Whether the file's allocator is looked for. With -O, only the allocator of the file that it names is.
    searched: bool,
    /// Whether copies of CPython's allocator are looked for, too.
    python: bool,
    /// Whether the file is a static program: there the linker can make the functions local, as it does for Rust.
    is_static: bool,
}

impl<'a> FunctionFilter<'a> {
    fn new(file: &MappedFile, is_program: bool, settings: &'a FunctionSettings) -> Result<Self> {
        let named = settings
            .named
            .iter()
            .filter(|named| is_named(file, &named.object));
        let object = settings.object.as_deref();
        let searched = object.is_none_or(|object| is_named(file, object));
        Ok(Self {
            settings,
            named: named.collect(),
            searched,
            python: settings.python_objects && searched,
            is_static: is_program && elf::interpreter(file.file())?.is_none(),
        })
    }

    fn by_user(&self, name: &str) -> Option<Signature> {
        let named = self.named.iter().find(|named| named.symbol == name);
        named.map(|named| named.signature)
    }

    fn by_name(&self, name: &str) -> Option<Signature> {
        let known = || allocators::signature(name, &self.settings.prefix);
        self.searched.then(known).flatten()
    }

    fn has(&self, name: &str, local: bool) -> bool {
        let usable = !local || self.is_static || !allocators::is_common_name(name);
        let is_marker =
            allocators::is_marker(name) || self.python && python_objects::is_caller(name);
        let known = self.by_name(name).is_some() || is_marker;
        self.by_user(name).is_some() || usable && known
    }

    /// Returns the functions that the user has named.
    fn by_user_in<'f>(&self, file: &MappedFile, found: &'f [elf::Function]) -> Vec<Symbol<'f>> {
        let mut by_user: Vec<Symbol<'_>> = found
            .iter()
            .filter_map(|symbol| Some((symbol, self.by_user(&symbol.name)?)))
            .collect();
        if elf::is_go(file.file()) {
            without_returns_to_go(file, &mut by_user);
        }
        by_user
    }

    /// Returns the functions of the file's allocator, except those that the user has named. Returns none without an
    /// allocator, which has functions that allocate and functions that free.
    fn of_allocator_in<'f>(
        &self,
        file: &MappedFile,
        found: &'f [elf::Function],
        names: &[&str],
        by_user: &[Symbol<'_>],
    ) -> Result<Vec<Symbol<'f>>> {
        let rust_has_none = allocators::is_rusts_default(names);
        let offsets = by_user.iter().map(|(symbol, _)| symbol.file_offset);
        let mut seen: HashSet<u64> = offsets.collect();
        let mut symbols: Vec<Symbol<'_>> = Vec::new();
        for symbol in found {
            if let Some(signature) = self.by_name(&symbol.name)
                && !(rust_has_none && allocators::is_of_rust(&symbol.name))
                && seen.insert(symbol.file_offset)
            {
                symbols.push((symbol, signature));
            }
        }
        let any = |symbols: &[Symbol<'_>], is: fn(Signature) -> bool| {
            symbols.iter().any(|(_, signature)| is(*signature))
        };
        if !any(&symbols, Signature::allocates) || !any(&symbols, Signature::frees) {
            symbols.clear();
        }
        if self.settings.object.is_none() && self.settings.prefix.is_empty() {
            symbols = without_wrappers(file, symbols, self.settings)?;
        }
        if !any(&symbols, Signature::allocates) {
            symbols.clear();
        }
        Ok(symbols)
    }
}

/// Leaves out symbols that are not at an instruction, and prints one of them. A symbol at an impossible place, or in
/// data, must keep neither the file's other functions nor the process's other files from being probed.
fn with_code(file: &MappedFile, found: Vec<elf::Function>) -> Vec<elf::Function> {
    let has_code = |symbol: &elf::Function| {
        let code = instruction::code_at(file.file(), symbol.file_offset);
        code.is_ok_and(|code| instruction::is_valid(&code))
    };
    let (usable, unusable): (Vec<_>, Vec<_>) = found.into_iter().partition(has_code);
    if let Some(first) = unusable.first() {
        memtools::message!(
            "{} is not probed at {} (1 of {} such symbols): no instruction is there",
            file.module(),
            text::escape(&first.name),
            unusable.len()
        );
    }
    usable
}

/// Leaves out functions that the user has named in a Go program and that need a return probe, and prints each. The
/// return address is on the stack, and Go's runtime moves the stacks of goroutines. C functions, of cgo, are on a
/// thread's own stack, which stays in its place.
fn without_returns_to_go(file: &MappedFile, by_user: &mut Vec<Symbol<'_>>) {
    by_user.retain(|(symbol, signature)| {
        if signature.needs_return_probe() {
            memtools::message!(
                "{} is not probed at {}, as it is Go's: its runtime moves stacks, which \
                 return probes corrupt",
                file.module(),
                text::escape(&symbol.name)
            );
        }
        !signature.needs_return_probe()
    });
}

/// Leaves out wrappers: functions that only pass their calls on to another probed function, here or in another file.
/// Other functions that free are marked if they may call one that frees.
fn without_wrappers<'a>(
    file: &MappedFile,
    symbols: Vec<Symbol<'a>>,
    settings: &FunctionSettings,
) -> Result<Vec<Symbol<'a>>> {
    let calls = Calls::of(file.file())?;
    let known: HashMap<u64, Signature> = symbols
        .iter()
        .map(|(symbol, signature)| (symbol.file_offset, *signature))
        .collect();
    let mut kept = Vec::new();
    for (symbol, signature) in symbols {
        let frees_by_call = Cell::new(false);
        let same = |callee: Callee<'_>, given: CallArguments| {
            let other = match callee {
                Callee::Own(offset) if offset == symbol.file_offset => None,
                Callee::Own(offset) => known.get(&offset).copied(),
                Callee::Import(name) => allocators::signature(name, ""),
            };
            frees_by_call.set(frees_by_call.get() || other.is_some_and(Signature::frees));
            let passed_on = |other: Signature| {
                other.with_arguments_from(|argument| given.as_argument(argument)) == Some(signature)
            };
            // operator new(0) asks for one byte, which is not followed.
            let may_ask_for_more = |other| {
                signature.allocates() && other == signature && !allocators::rounds_up(&symbol.name)
            };
            other.is_some_and(|other| passed_on(other) || may_ask_for_more(other))
        };
        let passes = match (signature.allocates(), signature.frees()) {
            (true, _) => Forwarded::Result,
            (_, true) => Forwarded::Arguments,
            _ => {
                kept.push((symbol, signature));
                continue;
            }
        };
        match calls.forwarding(symbol, passes, same) {
            Forwarding::Always if settings.verbose => memtools::message!(
                "{} is not probed at {}, which only calls another of these functions",
                file.module(),
                symbol.name
            ),
            Forwarding::Always => {}
            _ if signature.frees() && (frees_by_call.get() || calls.leaves_the_file(symbol)) => {
                if settings.verbose {
                    let (module, name) = (file.module(), &symbol.name);
                    memtools::message!("{module}'s {name} may call another function that frees");
                }
                kept.push((symbol, signature.as_wrapper()));
            }
            _ => kept.push((symbol, signature)),
        }
    }
    Ok(kept)
}

/// Chooses where to probe each of these functions of a file. Functions that cannot be probed without harm to the target
/// are omitted, and printed.
fn place(
    file: &MappedFile,
    symbols: &[(&elf::Function, Signature)],
    wish: Preference,
    settings: &FunctionSettings,
) -> Result<Vec<Function>> {
    let asked: Vec<_> = symbols
        .iter()
        .map(|(symbol, signature)| (*symbol, signature.arguments()))
        .collect();
    let mut places = probe_point::places(file.file(), &asked, wish)?;
    let moved = |(place, (_, signature)): (&Option<ProbePoint>, &(_, Signature))| {
        place.is_some_and(|place| signature.at(place).is_none())
    };
    if places.iter().zip(symbols).any(moved) {
        let entries = probe_point::places(file.file(), &asked, Preference::Entry)?;
        for ((place, at_entry), symbol) in places.iter_mut().zip(entries).zip(symbols) {
            if moved((place, symbol)) {
                *place = at_entry;
            }
        }
    }
    let mut functions = Vec::new();
    for ((symbol, signature), place) in symbols.iter().zip(places) {
        let (module, name) = (file.module(), &symbol.name);
        let moved = place.and_then(|place| Some((place, signature.at(place)?)));
        let Some((place, signature)) = moved else {
            memtools::message!(
                "{module}'s {name} is not probed: forked children of the target would crash on this \
                 kernel"
            );
            continue;
        };
        if settings.verbose {
            memtools::message!("{module} is probed at {name}+{:#x}", place.offset);
        }
        let offset = symbol.file_offset + place.offset;
        functions.push(Function {
            signature,
            offset: offset as usize,
            code: instruction::code_at(file.file(), offset)?,
        });
    }
    Ok(functions)
}

/// Adds the copies of CPython's allocator, unless the function that makes its pools cannot be probed.
fn add_slots(file: &MappedFile, slots: &[SlotProbe], functions: &mut Vec<Function>) -> Result<()> {
    let new_pool = Signature::new_pool();
    if !functions
        .iter()
        .any(|function| function.signature == new_pool)
    {
        let why = "the function that makes the pools of its allocator cannot be probed";
        python_objects::warn_of_unseen_objects(&file.module(), why);
        return Ok(());
    }
    for slot in slots {
        functions.push(Function {
            signature: Signature::of_slot(slot),
            offset: slot.file_offset as usize,
            code: instruction::code_at(file.file(), slot.file_offset)?,
        });
    }
    Ok(())
}

/// Whether the user means this file by `object`: by its path, by its name, or as `c` means libc.so.6.
pub(super) fn is_named(file: &MappedFile, object: &Path) -> bool {
    if object.components().count() > 1 {
        return file.name() == object
            || object.canonicalize().is_ok_and(|path| path == file.name());
    }
    let (module, object) = (file.module(), object.to_string_lossy());
    let library = module
        .strip_prefix("lib")
        .and_then(|rest| rest.strip_prefix(&*object));
    module == *object || library.is_some_and(|rest| rest.starts_with(['.', '-', '_']))
}
