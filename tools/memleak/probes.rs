//! The allocator's functions in the target, and the probes on them.

use std::collections::HashSet;
use std::fs::File;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use libbpf_rs::skel::{OpenSkel, SkelBuilder};
use libbpf_rs::{Link, ProgramImpl, UprobeMultiOpts, UprobeOpts};
use memtools::attach::{self, Variant};
use memtools::process::{MappedFile, Process};
use memtools::{command, elf, kernel, placement};

use crate::args::Args;
use crate::bpf::types::function as Function;
use crate::bpf::{MemleakSkel, MemleakSkelBuilder, OpenMemleakSkel};

/// Functions of an allocator, which can have a prefix.
const ALLOCATOR: [(&str, Function); 10] = [
    ("malloc", Function::FUNCTION_MALLOC),
    ("calloc", Function::FUNCTION_CALLOC),
    ("realloc", Function::FUNCTION_REALLOC),
    ("reallocarray", Function::FUNCTION_REALLOCARRAY),
    ("posix_memalign", Function::FUNCTION_POSIX_MEMALIGN),
    ("aligned_alloc", Function::FUNCTION_ALIGNED_ALLOC),
    ("memalign", Function::FUNCTION_MEMALIGN),
    ("valloc", Function::FUNCTION_VALLOC),
    ("pvalloc", Function::FUNCTION_PVALLOC),
    ("free", Function::FUNCTION_FREE),
];

/// Functions of the C library, which have none.
const MAPPING: [(&str, Function); 3] = [
    ("mmap", Function::FUNCTION_MMAP),
    ("munmap", Function::FUNCTION_MUNMAP),
    ("mremap", Function::FUNCTION_MREMAP),
];

/// A file of the target with functions to probe.
#[derive(Debug)]
pub(crate) struct Object {
    /// Where the kernel finds it.
    path: PathBuf,
    /// Its name for messages.
    pub(crate) module: String,
    /// Each with the offset in the file of the instruction to probe. Where names share an address,
    /// as aligned_alloc and memalign do in glibc, one is here.
    functions: Vec<(Function, usize)>,
}

impl Object {
    fn new(file: &MappedFile, args: &Args) -> Result<Option<Self>> {
        let by_name = |name: &str| {
            let allocator = name
                .strip_prefix(&args.symbols_prefix)
                .and_then(|name| find(&ALLOCATOR, name));
            allocator.or_else(|| find(&MAPPING, name))
        };
        let found = elf::functions(&file.file, |name| by_name(name).is_some())
            .with_context(|| format!("failed to read the symbols of {}", file.path.display()))?;
        let mut seen = HashSet::new();
        let mut functions = Vec::new();
        for symbol in &found {
            if let Some(function) = by_name(&symbol.name)
                && seen.insert(symbol.file_offset)
            {
                functions.push((function, place(file, symbol, args)?));
            }
        }
        let allocates = functions
            .iter()
            .any(|(function, _)| *function == Function::FUNCTION_MALLOC);
        let frees = functions
            .iter()
            .any(|(function, _)| *function == Function::FUNCTION_FREE);
        Ok((allocates && frees).then(|| Self {
            path: file.path.clone(),
            module: file.module(),
            functions,
        }))
    }

    /// Functions that have a return worth seeing: all but free.
    fn allocating(&self) -> impl Iterator<Item = &(Function, usize)> {
        self.functions
            .iter()
            .filter(|(function, _)| *function != Function::FUNCTION_FREE)
    }

    fn freeing(&self) -> impl Iterator<Item = &(Function, usize)> {
        self.functions
            .iter()
            .filter(|(function, _)| *function == Function::FUNCTION_FREE)
    }

    /// How many probes it gets.
    pub(crate) fn probes(&self) -> usize {
        2 * self.allocating().count() + self.freeing().count()
    }
}

/// The offset in the file of the instruction to probe.
fn place(file: &MappedFile, symbol: &elf::Function, args: &Args) -> Result<usize> {
    let beyond = if args.no_placement || cfg!(not(target_arch = "x86_64")) {
        0
    } else {
        placement::offset(&symbol.code(&file.file)?)
    };
    if args.verbose {
        eprintln!(
            "memleak: {} is probed at {}+{beyond:#x}",
            file.module(),
            symbol.name
        );
    }
    Ok((symbol.file_offset + beyond) as usize)
}

fn find(table: &[(&str, Function)], name: &str) -> Option<Function> {
    table
        .iter()
        .find(|(known, _)| *known == name)
        .map(|(_, function)| *function)
}

/// The allocators of a running process: every file that it executes code from and that defines
/// malloc and free.
pub(crate) fn objects_of_process(process: &Process, args: &Args) -> Result<Vec<Object>> {
    choose(process.code_files()?, args)
}

/// The allocators that a command will run with.
pub(crate) fn objects_of_command(program: &Path, args: &Args) -> Result<Vec<Object>> {
    let mut files = Vec::new();
    for path in command::code_files(program)? {
        let file =
            File::open(&path).with_context(|| format!("failed to open {}", path.display()))?;
        files.push(MappedFile {
            file,
            path: path.clone(),
            name: path,
        });
    }
    choose(files, args)
}

/// `files` begins with the program itself.
fn choose(files: Vec<MappedFile>, args: &Args) -> Result<Vec<Object>> {
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
        args.obj
            .as_deref()
            .is_none_or(|object| is_named(file, object))
    };
    let searched: Vec<&MappedFile> = files.iter().filter(|file| wanted(file)).collect();
    let mut objects = Vec::new();
    for file in &searched {
        objects.extend(Object::new(file, args)?);
    }
    if !objects.is_empty() {
        return Ok(objects);
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

/// Everything that is live once the probes are.
pub(crate) struct Attached {
    pub(crate) skel: MemleakSkel<'static>,
    pub(crate) links: Vec<Link>,
}

/// Loads the program and places the probes, in the best way that this kernel has.
pub(crate) fn attach(
    pid: u32,
    objects: &[Object],
    args: &Args,
) -> Result<(&'static str, Attached)> {
    let multi = Variant::new("uprobe multi", || {
        // The multi link of some kernels from 6.6 to 6.9 sees only one thread of the process. The
        // session link came after the fix (6.13), and its name tells which kernel this is.
        if !kernel::btf_has_name("BPF_TRACE_UPROBE_SESSION") {
            bail!("not on this kernel (6.13 and later)");
        }
        attach_multi(pid, objects, args)
    });
    let perf = Variant::new("perf uprobes", || attach_perf(pid, objects, args));
    attach::first_that_works(args.verbose, [multi, perf])
}

/// One link for each role and file, the function in the cookie.
fn attach_multi(pid: u32, objects: &[Object], args: &Args) -> Result<Attached> {
    let Attached { skel, mut links } = load(args, |program| program.starts_with("multi_"))?;
    for object in objects {
        let attach =
            |program: &ProgramImpl<'_, _>, functions: Vec<&(Function, usize)>, retprobe| {
                let opts = UprobeMultiOpts {
                    offsets: functions.iter().map(|(_, offset)| *offset).collect(),
                    cookies: functions
                        .iter()
                        .map(|(function, _)| u64::from(function.0))
                        .collect(),
                    retprobe,
                    ..UprobeMultiOpts::default()
                };
                program
                    .attach_uprobe_multi_with_opts(pid.cast_signed(), &object.path, "", opts)
                    .with_context(|| format!("failed to probe {}", object.module))
            };
        links.push(attach(
            &skel.progs.multi_return,
            object.allocating().collect(),
            true,
        )?);
        links.push(attach(
            &skel.progs.multi_entry,
            object.allocating().collect(),
            false,
        )?);
        links.push(attach(
            &skel.progs.multi_free,
            object.freeing().collect(),
            false,
        )?);
    }
    Ok(Attached { skel, links })
}

/// One link for each function's entry and return.
fn attach_perf(pid: u32, objects: &[Object], args: &Args) -> Result<Attached> {
    let Attached { skel, mut links } = load(args, |program| !program.starts_with("multi_"))?;
    for object in objects {
        for &(function, offset) in &object.functions {
            let programs = &skel.progs;
            let entry = match function {
                Function::FUNCTION_MALLOC => &programs.malloc_entry,
                Function::FUNCTION_CALLOC => &programs.calloc_entry,
                Function::FUNCTION_REALLOC => &programs.realloc_entry,
                Function::FUNCTION_REALLOCARRAY => &programs.reallocarray_entry,
                Function::FUNCTION_POSIX_MEMALIGN => &programs.posix_memalign_entry,
                Function::FUNCTION_ALIGNED_ALLOC => &programs.aligned_alloc_entry,
                Function::FUNCTION_MEMALIGN => &programs.memalign_entry,
                Function::FUNCTION_VALLOC => &programs.valloc_entry,
                Function::FUNCTION_PVALLOC => &programs.pvalloc_entry,
                Function::FUNCTION_MMAP => &programs.mmap_entry,
                Function::FUNCTION_MUNMAP => &programs.munmap_entry,
                Function::FUNCTION_MREMAP => &programs.mremap_entry,
                _ => &programs.free_entry,
            };
            let returns = (function != Function::FUNCTION_FREE).then_some(&programs.any_return);
            // The return probe first: a call seen at entry must be seen at its return.
            for (program, retprobe) in returns
                .map(|program| (program, true))
                .into_iter()
                .chain([(entry, false)])
            {
                let opts = UprobeOpts {
                    retprobe,
                    ..UprobeOpts::default()
                };
                links.push(
                    program
                        .attach_uprobe_with_opts(pid.cast_signed(), &object.path, offset, opts)
                        .with_context(|| format!("failed to probe {}", object.module))?,
                );
            }
        }
    }
    Ok(Attached { skel, links })
}

/// Loads the programs that are wanted, and attaches what every variant needs.
fn load(args: &Args, wanted: impl Fn(&str) -> bool) -> Result<Attached> {
    let mut open = open(args)?;
    for mut program in open.open_object_mut().progs_mut() {
        let load = wanted(&program.name().to_string_lossy());
        program.set_autoload(load);
    }
    open.progs.thread_exit.set_autoload(true);
    let skel = open.load().context("failed to load")?;
    let exits = skel.progs.thread_exit.attach();
    let links = vec![exits.context("failed to watch exits")?];
    Ok(Attached { skel, links })
}

/// The skeleton with the options in it, before load.
fn open(args: &Args) -> Result<OpenMemleakSkel<'static>> {
    let mut open = MemleakSkelBuilder::default()
        .open(attach::object_storage())
        .context("failed to open the BPF object")?;
    let options = open
        .maps
        .rodata_data
        .as_deref_mut()
        .context("the BPF object has no options")?;
    options.min_size = args.min_size;
    options.max_size = args.max_size;
    options.sample_rate = args.sample_rate;
    options.trace_calls = args.trace.into();
    options.keep_totals = args.combined_only.into();
    options.stack_depth = args.perf_max_stack_depth;
    let stacks = args.stack_storage_size;
    open.maps
        .stacks
        .set_max_entries(stacks)
        .context("failed to size the table of stacks")?;
    open.maps
        .blocks
        .set_max_entries(args.max_allocs)
        .context("failed to size the table of blocks")?;
    let totals = if args.combined_only { stacks } else { 1 };
    open.maps
        .totals
        .set_max_entries(totals)
        .context("failed to size the table of totals")?;
    Ok(open)
}
