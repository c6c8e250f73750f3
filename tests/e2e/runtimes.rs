//! Functions of runtimes that compile them at run time, Node.js and .NET, by the names in their perf maps.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;
use tempfile::TempDir;

use crate::harness::{self, Tool, ToolOutput, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "runtimes":
        functions_of_node_are_named [Host],
        functions_of_node_are_named_in_a_container [Host],
        functions_of_dotnet_are_named [Host],
        what_would_name_functions_is_told [Host],
    }
}

/// Number of blocks that a workload allocates. Their size in bytes is one that the runtime itself does not allocate.
const COUNT: usize = 10007;
const BYTES: &str = "100003";
/// Options by which Node.js writes the names of all functions into its perf map.
const NAMED: &[&str] = &["--perf-basic-prof", "--interpreted-frames-native-stack"];
/// Environment variable that makes .NET Core 3.1 name its functions.
const DOTNET_NAMED: (&str, &str) = ("COMPlus_PerfMapEnabled", "1");
/// Functions of the workloads, innermost first.
const NODE_FUNCTIONS: [&str; 3] = ["keep", "order", "serve"];
const DOTNET_FUNCTIONS: [&str; 4] = ["Shop::Keep", "Shop::Order", "Shop::Serve", "Shop::Main"];

/// Workload of a runtime, in a directory of its own.
struct Runtime {
    folder: TempDir,
    command: Vec<PathBuf>,
}

impl Runtime {
    fn node(options: &[&str]) -> Result<Self> {
        let folder = harness::scratch()?;
        let script = folder.path().join("runtime.js");
        harness::copy(&harness::sources().join("runtime.js"), &script)?;
        let command = [&["node"], options].concat();
        let command = command.into_iter().map(PathBuf::from).chain([script]);
        Ok(Self {
            folder,
            command: command.collect(),
        })
    }

    fn dotnet() -> Result<Self> {
        let folder = harness::scratch()?;
        let assembly = folder.path().join("runtime.dll");
        let compiled = Command::new("mcs")
            .arg("-optimize")
            .arg(format!("-out:{}", assembly.display()))
            .arg(harness::sources().join("runtime.cs"))
            .output()
            .context("no compiler of C#")?;
        ensure!(compiled.status.success(), "{compiled:?}");
        let config = r#"{"runtimeOptions": {"framework": {"name": "Microsoft.NETCore.App", "version": "3.1.0"},
            "configProperties": {"System.Globalization.Invariant": true}}}"#;
        fs::write(assembly.with_extension("runtimeconfig.json"), config)?;
        let dotnet = Path::new(env!("CARGO_MANIFEST_DIR")).join("target/dotnet/dotnet");
        Ok(Self {
            folder,
            command: vec![dotnet, "exec".into(), assembly],
        })
    }

    /// Returns the command that starts the workload. If `by` is a command, it is to execute the workload.
    fn command(&self, by: Option<Command>) -> Command {
        let (program, arguments) = self.command.split_at(1);
        let mut command = by.unwrap_or_else(|| Command::new("env"));
        // Node.js leaves a file in its current directory.
        command.current_dir(self.folder.path());
        command.args(program).args(arguments);
        command.args([&COUNT.to_string(), BYTES]);
        command
    }
}

/// Traces the blocks of a workload, and removes its perf map, if there is one.
fn trace(mut workload: Workload, pid: &str) -> Result<ToolOutput> {
    let options = [&harness::each_block(BYTES)[..], &["-p", pid]].concat();
    let mut tool = Tool::start("memleak", &options)?;
    tool.wait_for_stderr("allocator: glibc")?;
    workload.work()?;
    let ended = tool.interrupt()?;
    ensure!(
        !ended.stderr.contains("is not searched"),
        "{}",
        ended.stderr
    );
    workload.go()?;
    ensure!(workload.finish()?.success());
    for file in [
        format!("/tmp/perf-{pid}.map"),
        format!("/tmp/perfinfo-{pid}.map"),
    ] {
        if Path::new(&file).exists() {
            fs::remove_file(file)?;
        }
    }
    Ok(ended)
}

/// Returns the workload's own functions in each block's stack, innermost first.
fn functions_of_blocks(
    ended: &ToolOutput,
    name: impl Fn(&str) -> Option<&str>,
) -> Result<Vec<Vec<String>>> {
    let objects = ended.objects()?;
    let stacks = harness::stacks_of_blocks(&objects);
    ensure!(
        stacks.len() == COUNT,
        "{} blocks: {}",
        stacks.len(),
        ended.stderr
    );
    let functions = stacks.values().map(|stack| {
        ensure!(stack["truncated"].is_null(), "{stack}");
        let frames = stack["user_frames"].as_array().context("no frames")?;
        let symbols = frames.iter().filter_map(|frame| frame["symbol"].as_str());
        Ok(symbols.filter_map(&name).map(str::to_owned).collect())
    });
    functions.collect()
}

/// Returns `keep` of `JS:^keep /tmp/runtime.js:9:14`, whichever compiler has made the code.
fn node_function(symbol: &str) -> Option<&str> {
    let (function, place) = symbol.strip_prefix("JS:")?.split_once(' ')?;
    let function = function.trim_start_matches(['~', '^', '+', '*']);
    (place.contains("runtime.js") && !function.is_empty()).then_some(function)
}

/// Returns `Shop::Keep` of `void [runtime] Shop::Keep(uint32)[QuickJitted]`.
fn dotnet_function(symbol: &str) -> Option<&str> {
    let function = &symbol[symbol.find("Shop::")?..];
    function.split('(').next()
}

/// Checks that the stacks have all functions, except those that V8 has inlined into their callers.
fn expect_node_functions(ended: &ToolOutput) -> Result<()> {
    let stacks = functions_of_blocks(ended, node_function)?;
    let kinds: BTreeSet<&[String]> = stacks.iter().map(|stack| &stack[..]).collect();
    for stack in &kinds {
        let mut functions = NODE_FUNCTIONS.iter();
        let in_order = stack
            .iter()
            .all(|found| functions.any(|function| function == found));
        let outermost = stack.last().is_some_and(|function| function == "serve");
        ensure!(in_order && outermost, "{kinds:?}");
    }
    ensure!(
        kinds.iter().any(|stack| *stack == NODE_FUNCTIONS),
        "{kinds:?}"
    );
    ensure!(
        !ended.stderr.contains("without a perf map"),
        "{}",
        ended.stderr
    );
    Ok(())
}

fn functions_of_node_are_named() -> Result<()> {
    let node = Runtime::node(NAMED)?;
    let workload = Workload::spawn(&mut node.command(None))?;
    let pid = workload.pid();
    expect_node_functions(&trace(workload, &pid)?)
}

/// The perf map is named by the PID in the process's PID namespace, and is in the process's own /tmp.
fn functions_of_node_are_named_in_a_container() -> Result<()> {
    let node = Runtime::node(NAMED)?;
    let container = harness::container(node.folder.path());
    let workload = Workload::spawn(&mut node.command(Some(container)))?;
    let pid = workload.pid_in_container()?;
    expect_node_functions(&trace(workload, &pid)?)
}

fn functions_of_dotnet_are_named() -> Result<()> {
    let dotnet = Runtime::dotnet()?;
    let (variable, value) = DOTNET_NAMED;
    let workload = Workload::spawn(dotnet.command(None).env(variable, value))?;
    let pid = workload.pid();
    let ended = trace(workload, &pid)?;
    for stack in functions_of_blocks(&ended, dotnet_function)? {
        ensure!(stack == DOTNET_FUNCTIONS, "{stack:?}");
    }
    ensure!(
        !ended.stderr.contains("without a perf map"),
        "{}",
        ended.stderr
    );
    Ok(())
}

fn what_would_name_functions_is_told() -> Result<()> {
    for (runtime, hint) in [
        (
            Runtime::node(&[])?,
            "with --perf-basic-prof --interpreted-frames-native-stack",
        ),
        (
            Runtime::dotnet()?,
            "with DOTNET_PerfMapEnabled=1 in its environment",
        ),
    ] {
        let workload = Workload::spawn(&mut runtime.command(None))?;
        let pid = workload.pid();
        let ended = trace(workload, &pid)?;
        let nameless = functions_of_blocks(&ended, |_| None)?;
        ensure!(nameless.iter().all(Vec::is_empty));
        let told = format!("without a perf map; for names start it {hint}");
        let times = ended.stderr.matches(&told).count();
        ensure!(times == 1, "{}", ended.stderr);
    }
    Ok(())
}
