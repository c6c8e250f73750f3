//! Which functions of which files are probed.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use memtools::placement::{self, Place};
use memtools::process::{MappedFile, Process};
use memtools::wrappers::{Callee, Calls, Given, Passes, Passing};
use memtools::{command, elf};

use crate::allocators;
use crate::args::{Args, Mode};
use crate::pool::Named;
use crate::signature::Signature;

/// A file of the target with functions to probe.
#[derive(Debug)]
pub(crate) struct Object {
    /// Where the kernel finds it.
    pub(crate) path: PathBuf,
    /// Its name for messages.
    pub(crate) module: String,
    /// What the allocator in it is called.
    allocator: &'static str,
    /// Whether it is the program itself, and no library.
    is_program: bool,
    /// Where names share an address, as aligned_alloc and memalign do in glibc, one is here.
    pub(crate) functions: Vec<Function>,
}

/// What it is called where only --alloc and --free name functions.
const NAMED: &str = "named functions";

/// A function to probe.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function {
    pub(crate) signature: Signature,
    /// Offset in the file of the instruction to probe.
    pub(crate) offset: usize,
}

/// A function as the file has it.
type Symbol<'a> = (&'a elf::Function, Signature);

impl Object {
    fn new(file: &MappedFile, is_program: bool, args: &Args) -> Result<Option<Self>> {
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
        let is_static = is_program && elf::interpreter(&file.file)?.is_none();
        let wanted = |name: &str, local: bool| {
            let usable = !local || is_static || !allocators::is_common_name(name);
            let known = by_name(name).is_some() || allocators::is_marker(name);
            by_user(name).is_some() || usable && known
        };
        let found = elf::functions(&file.file, wanted)
            .with_context(|| format!("failed to read the symbols of {}", file.path.display()))?;
        let names: Vec<&str> = found.iter().map(|symbol| symbol.name.as_str()).collect();
        let rust_has_none = allocators::is_rusts_default(&names);
        let by_user: Vec<Symbol<'_>> = found
            .iter()
            .filter_map(|symbol| Some((symbol, by_user(&symbol.name)?)))
            .collect();
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
            path: file.path.clone(),
            module: file.module(),
            allocator,
            is_program,
            functions: place(file, &symbols, args)?,
        }))
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

/// Leaves out what only passes its calls on to another function that is probed, here or in another
/// file. The rest that may call one that frees is marked.
fn without_wrappers<'a>(
    file: &MappedFile,
    symbols: Vec<Symbol<'a>>,
    args: &Args,
) -> Result<Vec<Symbol<'a>>> {
    let calls = Calls::of(&file.file)?;
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
            _ if signature.frees() && frees_by_call.get() => {
                kept.push((symbol, signature.wrapping()));
            }
            _ => kept.push((symbol, signature)),
        }
    }
    Ok(kept)
}

/// Where to probe each of these functions of a file.
fn place(
    file: &MappedFile,
    symbols: &[(&elf::Function, Signature)],
    args: &Args,
) -> Result<Vec<Function>> {
    let places = if args.no_placement || cfg!(not(target_arch = "x86_64")) {
        vec![Place::ENTRY; symbols.len()]
    } else {
        let asked: Vec<_> = symbols
            .iter()
            .map(|(symbol, signature)| (*symbol, signature.arguments()))
            .collect();
        placement::places(&file.file, &asked)?
    };
    let functions = symbols
        .iter()
        .zip(places)
        .map(|((symbol, signature), place)| {
            let (signature, place) = match signature.at(place) {
                Some(moved) => (moved, place),
                None => (*signature, Place::ENTRY),
            };
            if args.verbose {
                let (module, name) = (file.module(), &symbol.name);
                eprintln!("memleak: {module} is probed at {name}+{:#x}", place.offset);
            }
            Function {
                signature,
                offset: (symbol.file_offset + place.offset) as usize,
            }
        });
    Ok(functions.collect())
}

/// What there is to probe in a process.
pub(crate) struct Found {
    pub(crate) objects: Vec<Object>,
    /// The files that were looked through.
    pub(crate) looked_through: HashSet<(u64, u64)>,
}

/// The allocators of a running process: in every file that it executes code from.
pub(crate) fn of_process(process: &Process, args: &Args) -> Result<Found> {
    choose(process.code_files()?, args)
}

/// The allocators that a command will run with.
pub(crate) fn of_command(program: &Path, args: &Args) -> Result<Found> {
    let open = |path: PathBuf| {
        let file = File::open(&path);
        Ok(MappedFile {
            file: file.with_context(|| format!("failed to open {}", path.display()))?,
            path: path.clone(),
            name: path,
        })
    };
    let files = command::code_files(program)?.into_iter().map(open);
    choose(files.collect::<Result<_>>()?, args)
}

/// What there is to probe in a file that a process has loaded by itself.
pub(crate) fn of_loaded(file: &MappedFile, args: &Args) -> Result<Option<Object>> {
    Object::new(file, false, args)
}

/// `files` begins with the program itself.
fn choose(mut files: Vec<MappedFile>, args: &Args) -> Result<Found> {
    // musl's dynamic linker is its libc as well.
    let mut looked_through = HashSet::new();
    files.retain(|file| {
        file.identity()
            .is_ok_and(|identity| looked_through.insert(identity))
    });
    if let Some(program) = files.first()
        && elf::is_go(&program.file)
    {
        bail!(
            "{} is a Go program: its runtime moves stacks, which return probes corrupt; use Go's own \
             heap profile: go tool pprof http://HOST/debug/pprof/heap",
            program.module()
        );
    }
    let wanted = |file: &MappedFile| {
        let object = args.obj.as_deref();
        object.is_none_or(|object| is_named(file, object))
    };
    let mut objects = Vec::new();
    for file in &files {
        let is_program = file.name == files[0].name;
        objects.extend(Object::new(file, is_program, args)?);
    }
    for named in args.named() {
        let there = |file: &MappedFile| {
            is_named(file, &named.object)
                && elf::functions(&file.file, |name, _| name == named.symbol)
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
    let names: Vec<String> = searched.iter().map(|file| file.module()).collect();
    bail!(
        "no allocator found: none of {} defines {prefix}malloc and {prefix}free. If its functions \
         have a prefix, name it (-S je_); a program stripped of its symbols and linked statically \
         cannot be traced",
        names.join(", "),
        prefix = args.symbols_prefix
    );
}

/// Whether the user means this file: by its path, its name, or as `c` means libc.so.6.
fn is_named(file: &MappedFile, object: &Path) -> bool {
    if object.components().count() > 1 {
        return file.name == object || object.canonicalize().is_ok_and(|path| path == file.name);
    }
    let (module, object) = (file.module(), object.to_string_lossy());
    let library = module
        .strip_prefix("lib")
        .and_then(|rest| rest.strip_prefix(&*object));
    module == *object || library.is_some_and(|rest| rest.starts_with(['.', '-', '_']))
}
