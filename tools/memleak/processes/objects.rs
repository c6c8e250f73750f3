//! Which functions of which files are probed.

use std::cell::Cell;
use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, bail, ensure};
use memtools::code::elf;
use memtools::code::instruction::{self, Code};
use memtools::code::probe_place::{self, Place, Wish};
use memtools::code::wrappers::{Callee, Calls, Given, Passes, Passing};
use memtools::print::progress::Progress;
use memtools::print::text;
use memtools::process::command;
use memtools::process::mapped_file::MappedFile;
use memtools::process::proc::{CodeFiles, Process};
use memtools::process::translator;

use super::allocators;
use super::pool::Named;
use super::signature::Signature;
use crate::args::{Args, Mode};

/// A file of the target with functions to probe.
#[derive(Debug)]
pub(crate) struct Object {
    /// Held open: probes are attached through its descriptor.
    pub(crate) file: MappedFile,
    /// The file's name for messages.
    pub(crate) module: String,
    /// What the allocator in it is called.
    allocator: &'static str,
    /// Whether it is the program itself, and no library.
    is_program: bool,
    /// Where names share an address, as aligned_alloc and memalign do in glibc, one is here.
    pub(crate) functions: Vec<Function>,
}

/// A file in which functions are probed, which it does not hold open.
#[derive(Debug)]
pub(crate) struct ProbedFile {
    pub(crate) inode: u64,
    /// The file's name for messages.
    pub(crate) module: String,
}

/// What it is called where only --alloc and --free name functions.
const NAMED: &str = "named functions";

/// A function to probe.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) signature: Signature,
    /// Offset in the file of the instruction to probe.
    pub(crate) offset: usize,
    /// The instruction, and what follows it.
    code: Code,
}

/// A function as the file has it.
type Symbol<'a> = (&'a elf::Function, Signature);

impl Object {
    fn new(file: &MappedFile, is_program: bool, args: &Args) -> Result<Option<Self>> {
        let wish = match args.no_placement {
            true => Wish::Entry,
            false => Wish::Cheap,
        };
        Self::with_probes(file, is_program, wish, args)
    }

    /// This file with its functions probed at their entries or as near behind them as is safe.
    pub(crate) fn at_entries(&self, args: &Args) -> Result<Self> {
        let object = Self::with_probes(&self.file, self.is_program, Wish::Entry, args)?;
        object.with_context(|| format!("{} was changed while it was searched", self.module))
    }

    fn with_probes(
        file: &MappedFile,
        is_program: bool,
        wish: Wish,
        args: &Args,
    ) -> Result<Option<Self>> {
        let named: Vec<&Named> = args
            .named()
            .filter(|named| is_named(file, &named.object))
            .collect();
        let by_user = |name: &str| {
            let named = named.iter().find(|named| named.symbol == name);
            named.map(|named| named.signature)
        };
        // With -O, of that file's allocator only.
        let searched = args
            .obj
            .as_deref()
            .is_none_or(|object| is_named(file, object));
        let by_name = |name: &str| {
            let known = || allocators::signature(name, &args.symbols_prefix);
            searched.then(known).flatten()
        };
        // In a static program the linker can make them local, as it does for Rust.
        let is_static = is_program && elf::interpreter(file.file())?.is_none();
        let wanted = |name: &str, local: bool| {
            let usable = !local || is_static || !allocators::is_common_name(name);
            let known = by_name(name).is_some() || allocators::is_marker(name);
            by_user(name).is_some() || usable && known
        };
        let found = elf::functions(file.file(), wanted).context("failed to read its symbols")?;
        let found = with_code(file, found);
        let names: Vec<&str> = found.iter().map(|symbol| symbol.name.as_str()).collect();
        let rust_has_none = allocators::is_rusts_default(&names);
        let mut by_user: Vec<Symbol<'_>> = found
            .iter()
            .filter_map(|symbol| Some((symbol, by_user(&symbol.name)?)))
            .collect();
        if elf::is_go(file.file()) {
            without_returns_to_go(file, &mut by_user);
        }
        let mut seen: HashSet<u64> = by_user
            .iter()
            .map(|(symbol, _)| symbol.file_offset)
            .collect();
        let mut symbols: Vec<Symbol<'_>> = Vec::new();
        for symbol in &found {
            if let Some(signature) = by_name(&symbol.name)
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
        if args.obj.is_none() && args.symbols_prefix.is_empty() {
            symbols = without_wrappers(file, symbols, args)?;
        }
        if !any(&symbols, Signature::allocates) {
            symbols.clear();
        }
        let allocator = match symbols.is_empty() {
            true => NAMED,
            false => allocators::name(&names, &file.module()),
        };
        symbols.extend(by_user);
        if symbols.is_empty() {
            return Ok(None);
        }
        if args.mode == Mode::Alloc {
            symbols.retain(|(_, signature)| !signature.only_ends());
        }
        Ok(Some(Self {
            file: file.clone(),
            module: file.module(),
            allocator,
            is_program,
            functions: place(file, &symbols, wish, args)?,
        }))
    }

    /// Fails if the file has other instructions now than when it was searched: a breakpoint in the
    /// middle of one changes what the program does.
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

    /// The file by its inode; None if that cannot be known.
    pub(crate) fn probed_file(&self) -> Option<ProbedFile> {
        let (_, inode) = self.file.identity().ok()?;
        Some(ProbedFile {
            inode,
            module: self.module.clone(),
        })
    }

    /// What was found, in a few words.
    pub(crate) fn found(&self) -> String {
        let probes = |function: &Function| 1 + usize::from(function.signature.returns());
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

/// Leaves out symbols at which there is no instruction, and names one: a symbol at an impossible place,
/// or in data, must keep neither the file's other functions nor the process's other files from being
/// probed.
fn with_code(file: &MappedFile, found: Vec<elf::Function>) -> Vec<elf::Function> {
    let has_code = |symbol: &elf::Function| {
        let code = instruction::code_at(file.file(), symbol.file_offset);
        code.is_ok_and(|code| instruction::begins(&code))
    };
    let (usable, unusable): (Vec<_>, Vec<_>) = found.into_iter().partition(has_code);
    if let Some(first) = unusable.first() {
        eprintln!(
            "memleak: {} is not probed at {} (1 of {} such symbols): no instruction is there",
            file.module(),
            text::escape(&first.name),
            unusable.len()
        );
    }
    usable
}

/// Leaves out, by name, functions that the user has named in a Go program and that need a return
/// probe: goroutines move their stacks, where the return address is. C functions, of cgo, are on a
/// thread's own stack, which stays where it is.
fn without_returns_to_go(file: &MappedFile, by_user: &mut Vec<Symbol<'_>>) {
    by_user.retain(|(symbol, signature)| {
        if signature.returns() {
            eprintln!(
                "memleak: {} is not probed at {}, as it is Go's: its runtime moves stacks, which \
                 return probes corrupt",
                file.module(),
                text::escape(&symbol.name)
            );
        }
        !signature.returns()
    });
}

/// Leaves out what only passes its calls on to another function that is probed, here or in another
/// file. The rest that may call one that frees is marked.
fn without_wrappers<'a>(
    file: &MappedFile,
    symbols: Vec<Symbol<'a>>,
    args: &Args,
) -> Result<Vec<Symbol<'a>>> {
    let calls = Calls::of(file.file())?;
    let known: HashMap<u64, Signature> = symbols
        .iter()
        .map(|(symbol, signature)| (symbol.file_offset, *signature))
        .collect();
    let mut kept = Vec::new();
    for (symbol, signature) in symbols {
        let frees_by_call = Cell::new(false);
        let same = |callee: Callee<'_>, given: Given| {
            let other = match callee {
                Callee::Own(offset) if offset == symbol.file_offset => None,
                Callee::Own(offset) => known.get(&offset).copied(),
                Callee::Import(name) => allocators::signature(name, ""),
            };
            frees_by_call.set(frees_by_call.get() || other.is_some_and(Signature::frees));
            let passed_on = |other: Signature| {
                other.given(|argument| given.as_argument(argument)) == Some(signature)
            };
            // operator new asks for one byte where it is asked for none, which is not followed.
            let may_ask_for_more = |other| {
                signature.allocates() && other == signature && !allocators::rounds_up(&symbol.name)
            };
            other.is_some_and(|other| passed_on(other) || may_ask_for_more(other))
        };
        let passes = match (signature.allocates(), signature.frees()) {
            (true, _) => Passes::Result,
            (_, true) => Passes::Arguments,
            _ => {
                kept.push((symbol, signature));
                continue;
            }
        };
        match calls.passing(symbol, passes, same) {
            Passing::Always if args.verbose => eprintln!(
                "memleak: {} is not probed at {}, which only calls another of these functions",
                file.module(),
                symbol.name
            ),
            Passing::Always => {}
            _ if signature.frees() && (frees_by_call.get() || calls.leaves_the_file(symbol)) => {
                if args.verbose {
                    let (module, name) = (file.module(), &symbol.name);
                    eprintln!("memleak: {module}'s {name} may call another function that frees");
                }
                kept.push((symbol, signature.wrapping()));
            }
            _ => kept.push((symbol, signature)),
        }
    }
    Ok(kept)
}

/// Where to probe each of these functions of a file. Those that cannot be probed without harm to
/// the target are left out by name.
fn place(
    file: &MappedFile,
    symbols: &[(&elf::Function, Signature)],
    wish: Wish,
    args: &Args,
) -> Result<Vec<Function>> {
    let places = if cfg!(not(target_arch = "x86_64")) {
        vec![Some(Place::ENTRY); symbols.len()]
    } else {
        let asked: Vec<_> = symbols
            .iter()
            .map(|(symbol, signature)| (*symbol, signature.arguments()))
            .collect();
        let mut places = probe_place::places(file.file(), &asked, wish)?;
        let moved = |(place, (_, signature)): (&Option<Place>, &(_, Signature))| {
            place.is_some_and(|place| signature.at(place).is_none())
        };
        if places.iter().zip(symbols).any(moved) {
            let entries = probe_place::places(file.file(), &asked, Wish::Entry)?;
            for ((place, at_entry), symbol) in places.iter_mut().zip(entries).zip(symbols) {
                if moved((place, symbol)) {
                    *place = at_entry;
                }
            }
        }
        places
    };
    let mut functions = Vec::new();
    for ((symbol, signature), place) in symbols.iter().zip(places) {
        let (module, name) = (file.module(), &symbol.name);
        let moved = place.and_then(|place| Some((place, signature.at(place)?)));
        let Some((place, signature)) = moved else {
            eprintln!(
                "memleak: {module}'s {name} is not probed: forked children of the target would \
                 die of it on this kernel"
            );
            continue;
        };
        if args.verbose {
            eprintln!("memleak: {module} is probed at {name}+{:#x}", place.offset);
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

/// What there is to probe in a process.
pub(crate) struct Found {
    pub(crate) objects: Vec<Object>,
    /// The files that were looked through.
    pub(crate) looked_through: HashSet<(u64, u64)>,
}

/// The allocators of a running process: in every file that it executes code from.
pub(crate) fn of_process(process: &Process, args: &Args) -> Result<Found> {
    let CodeFiles { files, refused } = process.code_files()?;
    expect_no_translator(process, files.iter().map(MappedFile::name))?;
    for error in &refused {
        tell_once(&format!("{error:#}"));
    }
    match refused.into_iter().next() {
        Some(error) if files.is_empty() => Err(error),
        _ => choose(files, args),
    }
}

/// Fails if a process, which executes code from these files, is run by a translator.
pub(crate) fn expect_no_translator<'a>(
    process: &Process,
    files: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    if let Some(translator) = translator::among(files) {
        bail!(
            "process {} ({}) runs under {translator}, which reads the program's code as data: \
             breakpoints in it would end it (SIGTRAP)",
            process.pid(),
            process.comm()
        );
    }
    Ok(())
}

/// The allocators that a command will run with.
pub(crate) fn of_command(program: &Path, args: &Args) -> Result<Found> {
    let open = |path: PathBuf| {
        let failed = || format!("failed to open {}", path.display());
        MappedFile::open_path(&path).with_context(failed)
    };
    let paths = command::code_files(program)?;
    // Debian's valgrind is a script.
    let names = [program]
        .into_iter()
        .chain(paths.iter().map(PathBuf::as_path));
    if let Some(translator) = translator::among(names) {
        bail!(
            "{} is {translator}, which reads the code of what it runs as data: breakpoints in it \
             would end it (SIGTRAP)",
            program.display()
        );
    }
    let files = paths.into_iter().map(open);
    choose(files.collect::<Result<_>>()?, args)
}

/// What there is to probe in a file that a process has loaded by itself.
pub(crate) fn of_loaded(
    file: &MappedFile,
    is_program: bool,
    args: &Args,
) -> Result<Option<Object>> {
    Object::new(file, is_program, args)
}

/// `files` begins with the program itself.
fn choose(mut files: Vec<MappedFile>, args: &Args) -> Result<Found> {
    // musl's dynamic linker is its libc as well.
    let mut looked_through = HashSet::new();
    files.retain(|file| {
        file.identity()
            .is_ok_and(|identity| looked_through.insert(identity))
    });
    let go = files.first().filter(|program| elf::is_go(program.file()));
    let wanted = |file: &MappedFile| {
        let object = args.obj.as_deref();
        object.is_none_or(|object| is_named(file, object))
    };
    let mut objects = Vec::new();
    let mut progress = Progress::new("searching files for allocators", files.len());
    for file in &files {
        progress.step();
        let is_program = file.name() == files[0].name();
        match Object::new(file, is_program, args) {
            Ok(object) => objects.extend(object),
            // Its other files have the allocator, as a rule.
            Err(error) => {
                progress.clear();
                tell_once(&format!("{} is not searched: {error:#}", file.module()));
            }
        }
    }
    drop(progress);
    for named in args.named() {
        let there = |file: &MappedFile| {
            is_named(file, &named.object)
                && elf::functions(file.file(), |name, _| name == named.symbol)
                    .is_ok_and(|found| !found.is_empty())
        };
        if !files.iter().any(there) {
            let (object, symbol) = (named.object.display(), &named.symbol);
            eprintln!(
                "memleak: no {symbol} in any {object} that the process runs now; it is probed once \
                 that is loaded"
            );
        }
    }
    let searched: Vec<&MappedFile> = files.iter().filter(|file| wanted(file)).collect();
    if !objects.is_empty() {
        if let Some(program) = go {
            tell_once(&format!(
                "{} is a Go program: what its C code allocates is traced, what its Go code does is \
                 not; for that: go tool pprof http://HOST/debug/pprof/heap",
                program.module()
            ));
        }
        return Ok(Found {
            objects,
            looked_through,
        });
    }
    if searched.is_empty()
        && let Some(object) = &args.obj
    {
        let names: Vec<String> = files.iter().map(MappedFile::module).collect();
        bail!(
            "{} is not among the files that the process runs: {}",
            object.display(),
            names.join(", ")
        );
    }
    if let Some(program) = go {
        bail!(
            "{} is a Go program without an allocator of C; use Go's own heap profile: go tool pprof \
             http://HOST/debug/pprof/heap",
            program.module()
        );
    }
    let names: Vec<String> = searched.iter().map(|file| file.module()).collect();
    bail!(
        "no allocator found: none of {} defines {prefix}malloc and {prefix}free. If its functions \
         have a prefix, name it (-S je_); a program stripped of its symbols and linked statically \
         cannot be traced",
        names.join(", "),
        prefix = args.symbols_prefix
    );
}

/// Tells why a file is left out, once for all processes that have it mapped.
pub(crate) fn tell_once(reason: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.insert(reason.to_owned()) {
        eprintln!("memleak: {reason}");
    }
}

/// Whether the user means this file: by its path, its name, or as `c` means libc.so.6.
fn is_named(file: &MappedFile, object: &Path) -> bool {
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
