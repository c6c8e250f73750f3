//! Files of a process that are probed.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use memtools::code::elf;
use memtools::code::elf_file::NotElf;
use memtools::print::progress::Progress;
use memtools::process::command;
use memtools::process::mapped_file::MappedFile;
use memtools::process::proc::{CodeFiles, Process};
use memtools::process::translator;

use super::copies;
use super::object::{Object, is_named};
use crate::plan::FunctionSettings;

/// Result of searching a process.
#[derive(Clone)]
pub(crate) struct SearchedFiles {
    pub(crate) objects: Vec<Object>,
    /// Files that were searched, by device and inode.
    pub(crate) searched_files: HashSet<(u64, u64)>,
}

/// Files that have been searched, each once for all processes that map it: by device and inode, and by whether the file
/// is the program itself.
pub(crate) type KnownFiles = HashMap<((u64, u64), bool), Option<Object>>;

/// Finds the allocators of a running process, in every file that it executes code from.
pub(crate) fn of_process(
    process: &Process,
    known: &mut KnownFiles,
    functions: &FunctionSettings,
) -> Result<SearchedFiles> {
    let mappings = process.code_mappings()?;
    expect_no_translator(process, mappings.iter().map(|code| code.path.as_path()))?;
    copies::warn_if_copied(process);
    let CodeFiles { files, errors } = process.open_code(&mappings);
    for error in &errors {
        warn_once(&format!("{error:#}"));
    }
    match errors.into_iter().next() {
        Some(error) if files.is_empty() => Err(error),
        _ => choose(files, known, functions),
    }
}

/// Fails if a process is run by a translator. `files` are the files that the process executes code from.
pub(crate) fn expect_no_translator<'a>(
    process: &Process,
    files: impl IntoIterator<Item = &'a Path>,
) -> Result<()> {
    if let Some(translator) = translator::find_in(files) {
        bail!(
            "process {} ({}) runs under {translator}, which reads the program's code as data: \
             breakpoints in it would end it (SIGTRAP)",
            process.pid(),
            process.comm()
        );
    }
    Ok(())
}

/// Finds the allocators that a command will run with.
pub(crate) fn of_command(program: &Path, functions: &FunctionSettings) -> Result<SearchedFiles> {
    let open = |path: PathBuf| {
        let failed = || format!("failed to open {}", path.display());
        MappedFile::open_path(&path).with_context(failed)
    };
    let paths = command::code_files(program)?;
    // The program itself counts, too: Debian's valgrind is a script.
    let names = [program]
        .into_iter()
        .chain(paths.iter().map(PathBuf::as_path));
    if let Some(translator) = translator::find_in(names) {
        bail!(
            "{} is {translator}, which reads the code of what it runs as data: breakpoints in it \
             would end it (SIGTRAP)",
            program.display()
        );
    }
    let files = paths.into_iter().map(open);
    choose(
        files.collect::<Result<_>>()?,
        &mut KnownFiles::default(),
        functions,
    )
}

/// Searches a file that a process has loaded by itself for functions to probe.
pub(crate) fn of_loaded(
    file: &MappedFile,
    is_program: bool,
    functions: &FunctionSettings,
) -> Result<Option<Object>> {
    Object::new(file, is_program, functions)
}

/// Searches files for functions to probe. `files` begins with the program itself.
fn choose(
    mut files: Vec<MappedFile>,
    known: &mut KnownFiles,
    functions: &FunctionSettings,
) -> Result<SearchedFiles> {
    // A file can be listed twice: musl's dynamic linker is its libc as well.
    let mut searched_files = HashSet::new();
    files.retain(|file| {
        file.identity()
            .is_ok_and(|identity| searched_files.insert(identity))
    });
    let go = files.first().filter(|program| elf::is_go(program.file()));
    let objects = search(&files, known, functions);
    print_unloaded_functions(&files, functions);
    if objects.is_empty() {
        return Err(why_none(&files, go, functions));
    }
    if let Some(program) = go {
        warn_once(&format!(
            "{} is a Go program: what its C code allocates is traced, what its Go code does is \
             not; for that: go tool pprof http://HOST/debug/pprof/heap",
            program.module()
        ));
    }
    Ok(SearchedFiles {
        objects,
        searched_files,
    })
}

fn search(
    files: &[MappedFile],
    known: &mut KnownFiles,
    functions: &FunctionSettings,
) -> Vec<Object> {
    let mut objects = Vec::new();
    let mut progress = Progress::new("searching files for allocators", files.len());
    for file in files {
        progress.step();
        let is_program = file.name() == files[0].name();
        let Ok(identity) = file.identity() else {
            continue;
        };
        let object = known.entry((identity, is_program)).or_insert_with(|| {
            let object = Object::new(file, is_program, functions);
            object.unwrap_or_else(|error| {
                // Not all files are ELF files, such as the assemblies that .NET maps. Of others that cannot be
                // searched, the other files of the process have the allocator, as a rule.
                if !error.is::<NotElf>() {
                    progress.clear();
                    warn_once(&format!("{} is not searched: {error:#}", file.module()));
                }
                None
            })
        });
        objects.extend(object.clone());
    }
    objects
}

/// Prints which of the functions that the user has named are in none of these files.
fn print_unloaded_functions(files: &[MappedFile], functions: &FunctionSettings) {
    for named in &functions.named {
        let there = |file: &MappedFile| {
            is_named(file, &named.object)
                && elf::functions(file.file(), |name, _| name == named.symbol)
                    .is_ok_and(|found| !found.is_empty())
        };
        if !files.iter().any(there) {
            let (object, symbol) = (named.object.display(), &named.symbol);
            memtools::message!(
                "no {symbol} in any {object} that the process runs now; it is probed once \
                 that is loaded"
            );
        }
    }
}

/// Returns why there is nothing to probe in these files. `go` is the program, if it is a Go program.
fn why_none(
    files: &[MappedFile],
    go: Option<&MappedFile>,
    functions: &FunctionSettings,
) -> anyhow::Error {
    let names_of = |files: &[&MappedFile]| {
        let names: Vec<String> = files.iter().map(|file| file.module()).collect();
        names.join(", ")
    };
    let object = functions.object.as_deref();
    let wanted = |file: &&MappedFile| object.is_none_or(|object| is_named(file, object));
    let searched: Vec<&MappedFile> = files.iter().filter(wanted).collect();
    if let Some(object) = object.filter(|_| searched.is_empty()) {
        let all: Vec<&MappedFile> = files.iter().collect();
        return anyhow!(
            "{} is not among the files that the process runs: {}",
            object.display(),
            names_of(&all)
        );
    }
    if let Some(program) = go {
        return anyhow!(
            "{} is a Go program without an allocator of C; use Go's own heap profile: go tool pprof \
             http://HOST/debug/pprof/heap",
            program.module()
        );
    }
    anyhow!(
        "no allocator found: none of {} defines {prefix}malloc and {prefix}free. If its functions \
         have a prefix, name it (-S je_); a program stripped of its symbols and linked statically \
         cannot be traced",
        names_of(&searched),
        prefix = functions.prefix
    )
}

/// Prints why a file is omitted, once for all processes that have it mapped.
pub(crate) fn warn_once(reason: &str) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    let mut told = TOLD.lock().unwrap_or_else(PoisonError::into_inner);
    if told.insert(reason.to_owned()) {
        memtools::message!("{reason}");
    }
}
