//! Java programs for the tests, and the JDKs ("kits") that run them.

use std::collections::HashMap;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;

use crate::harness::{self, Tool, ToolOutput, Workload};

/// Size of each block of the workload, in bytes. Java itself allocates no blocks of this size.
pub(crate) const BYTES: &str = "1016";
/// Number of blocks that each of the workload's three threads allocates.
pub(crate) const COUNT: usize = 1009;

/// Returns the directories of the machine's Javas, and of those that scripts/java has unpacked where the machine
/// lacks them, each once.
pub(crate) fn kits() -> Result<Vec<PathBuf>> {
    let unpacked = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/java");
    let folders = [Path::new("/usr/lib/jvm"), &unpacked];
    let entries = folders
        .iter()
        .filter_map(|folder| fs::read_dir(folder).ok());
    let mut kits: Vec<PathBuf> = entries
        .flatten()
        .filter_map(|entry| fs::canonicalize(entry.ok()?.path()).ok())
        .filter(|kit| kit.join("lib/server/libjvm.so").exists())
        .collect();
    kits.sort();
    kits.dedup();
    ensure!(!kits.is_empty(), "no Java in {folders:?}");
    Ok(kits)
}

/// Returns the compiler of a kit or, if the kit has none, of the first kit that has one.
fn compiler(kit: &Path) -> Result<PathBuf> {
    let mut compilers = [kit.to_owned()].into_iter().chain(kits()?);
    let compiler = compilers.find_map(|kit| {
        let compiler = kit.join("bin/javac");
        compiler.exists().then_some(compiler)
    });
    compiler.context("no compiler of Java in /usr/lib/jvm")
}

/// Workload that was compiled for a kit, and the directory that it writes its record to.
pub(crate) struct Java {
    kit: PathBuf,
    folder: TempDir,
    class: &'static str,
}

impl Java {
    pub(crate) fn compile(kit: &Path) -> Result<Self> {
        Self::compile_class(kit, "Frames")
    }

    /// Compiles a workload that uses the workload of [`Java::compile`].
    pub(crate) fn compile_class(kit: &Path, class: &'static str) -> Result<Self> {
        let folder = harness::scratch()?;
        let sources = harness::sources();
        let compiled = Command::new(compiler(kit)?)
            .args(["-nowarn", "-d"])
            .arg(folder.path())
            .arg("-sourcepath")
            .args([&sources, &sources.join(class).with_extension("java")])
            .output()?;
        ensure!(compiled.status.success(), "{compiled:?}");
        Ok(Self {
            kit: kit.to_owned(),
            folder,
            class,
        })
    }

    fn truth_file(&self) -> PathBuf {
        self.folder.path().join("truth")
    }

    /// Returns the directory of the classes, and of the files that the workload writes.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(crate) fn start(&self, options: &[&str], arguments: &[&str]) -> Result<Workload> {
        Workload::spawn(&mut self.command(options, arguments))
    }

    /// Starts the workload as another user and group.
    pub(crate) fn start_as(
        &self,
        (user, group): (u32, u32),
        options: &[&str],
        arguments: &[&str],
    ) -> Result<Workload> {
        let mut command = self.command(options, arguments);
        Workload::spawn(command.uid(user).gid(group))
    }

    /// Starts the workload by a command that executes its further arguments.
    pub(crate) fn start_by(
        &self,
        mut by: Command,
        options: &[&str],
        arguments: &[&str],
    ) -> Result<Workload> {
        let command = self.command(options, arguments);
        by.arg(command.get_program()).args(command.get_args());
        Workload::spawn(by.stderr(Stdio::null()))
    }

    fn command(&self, options: &[&str], arguments: &[&str]) -> Command {
        let mut command = Command::new(self.kit.join("bin/java"));
        command.args(options).arg("-cp").arg(self.folder.path());
        command
            .arg(self.class)
            .arg(self.truth_file())
            .args(arguments);
        // Java warns of functions that the workload uses.
        command.stderr(Stdio::null());
        command
    }

    /// Traces the workload by memleak.
    pub(crate) fn trace(&self, options: &[&str]) -> Result<ToolOutput> {
        let mut workload = self.start(options, &[&COUNT.to_string()])?;
        let pid = workload.pid();
        let options = [&harness::each_block(BYTES)[..], &["-p", &pid]].concat();
        let mut tool = Tool::start("memleak", &options)?;
        tool.wait_for_stderr("allocator: ")?;
        workload.work()?;
        Self::end(tool, workload)
    }

    /// Ends the tool before the workload, because the tool reads names from the workload's memory.
    pub(crate) fn end(tool: Tool, workload: Workload) -> Result<ToolOutput> {
        let ended = tool.interrupt()?;
        workload.finish()?;
        Ok(ended)
    }

    /// Returns the frames of each block, by the block's address, as the workload has recorded them, such as
    /// `Frames.take (Frames.java:46)`. The innermost frames are those of the allocation functions that the workload
    /// calls, whose lines it does not know. A kit may have been made without the lines of its own classes
    /// (jlink --strip-java-debug-attributes).
    pub(crate) fn truth(&self) -> Result<HashMap<u64, Vec<String>>> {
        let text = fs::read_to_string(self.truth_file())?;
        let place = match text.contains("(Thread.java:") {
            true => " (Unsafe.java:*)",
            false => "",
        };
        let allocate = [
            "jdk.internal.misc.Unsafe.allocateMemory0".to_owned(),
            format!("jdk.internal.misc.Unsafe.allocateMemory{place}"),
            format!("sun.misc.Unsafe.allocateMemory{place}"),
        ];
        let truth: HashMap<u64, Vec<String>> = text
            .lines()
            .map(|line| {
                let mut fields = line.split('\t');
                let address = fields.next().context("an empty line")?.parse()?;
                let methods = fields.map(str::to_owned);
                Ok((address, allocate.iter().cloned().chain(methods).collect()))
            })
            .collect::<Result<_>>()?;
        ensure!(truth.len() == 3 * COUNT, "{}", truth.len());
        Ok(truth)
    }
}
