//! heapscan's screens of programs that do not know of it, compared in shape with those of the example file.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::harness::{self, Workload};

/// Returns the tests of this module.
pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "heapscan::screens":
        the_example_s_screens_are_made_here [Once],
        servers_have_the_same_shape [Once],
    }
}

const EXAMPLE: &str = include_str!("../../tools/heapscan_example.txt");
/// User that is not root, as all systems have it.
const NOBODY: u32 = 65534;
/// Title lines of the tables.
const MEMORY: &str =
    "MEMORY                      RESIDENT     SHARE                  [more: --layout]";
const BLOCKS: &str =
    "BLOCKS                     BYTES      COUNT  REFERENCED BY      [more: --roots]";

/// What of a screen does not depend on addresses, sizes and times.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    /// Name of the process, and what its heap is of.
    head: String,
    /// Level and subject of each finding, and its next command with PID for the number.
    findings: Vec<String>,
    /// Names of the rows of MEMORY.
    memory: BTreeSet<String>,
    /// Names of the rows of BLOCKS. A type that is one of many can give way to another.
    blocks: BTreeSet<String>,
}

impl Shape {
    /// Checks the form of each line of a screen.
    fn of(screen: &str, pid: &str) -> Result<Self> {
        let widest = screen.lines().map(|line| line.chars().count()).max();
        ensure!(screen.lines().count() <= 45 && widest <= Some(80));
        let parts: Vec<Vec<&str>> = screen
            .trim_end()
            .split("\n\n")
            .map(|part| part.lines().collect())
            .collect();
        let [head, findings, memory, rest @ ..] = &parts[..] else {
            anyhow::bail!("{} parts", parts.len());
        };
        for lines in [head, findings] {
            for pair in lines.windows(2) {
                let parted = pair[0].ends_with(|c: char| c.is_ascii_digit())
                    && ["bytes", "kB", "MB", "GB", "ms", "%"]
                        .iter()
                        .any(|unit| pair[1].trim_start().starts_with(unit));
                ensure!(!parted, "parted from its unit: {pair:?}");
            }
        }
        let head = head.join(" ");
        let (name, heap) = head
            .split_once(&format!(" (pid {pid}): "))
            .context("no pid")?;
        // A heap that cannot be examined has no blocks, and the first finding says why.
        let is_examined = !head.contains(": not examined; ");
        ensure!(
            head.contains(" blocks, ") == is_examined && head.ends_with(" ms"),
            "{head}"
        );
        let heap = heap.split([',', '(']).next().unwrap_or_default();
        ensure!(memory[0] == MEMORY, "{memory:?}");
        let blocks = rest.first().map_or(&[][..], |lines| &lines[..]);
        ensure!(
            blocks.first().is_some_and(|line| *line == BLOCKS) == is_examined,
            "{blocks:?}"
        );
        let total = memory.last().context("no rows")?;
        ensure!(
            total.starts_with("total  ") && total.ends_with("100.0 %"),
            "{total}"
        );
        Ok(Self {
            head: format!("{name}: {}", heap.trim_end()),
            findings: Self::findings(findings, pid)?,
            memory: rows(&memory[1..], 26)?,
            blocks: rows(blocks.get(1..).unwrap_or_default(), 22)?,
        })
    }

    fn findings(lines: &[&str], pid: &str) -> Result<Vec<String>> {
        let mut found: Vec<String> = Vec::new();
        for line in lines {
            let (level, text) = line.split_at_checked(6).context("a short line")?;
            match (level.trim_end(), found.last_mut()) {
                ("act" | "look" | "ok", _) => {
                    let (subject, _) = text.split_once(':').context("no subject")?;
                    found.push(format!("{level}{subject}"));
                }
                ("", Some(last)) => {
                    if let Some(command) = text.strip_prefix("next: ") {
                        ensure!(command.contains(pid), "{line}");
                        *last += &format!("; next: {}", command.replace(pid, "PID"));
                    }
                }
                _ => anyhow::bail!("no finding: {line}"),
            }
        }
        // What is not well comes with a command.
        for finding in &found {
            ensure!(
                finding.starts_with("ok") || finding.contains("; next: "),
                "{finding}"
            );
        }
        Ok(found)
    }
}

/// Returns the names of a table's rows, each of which has `width` columns. Numbers in names vary.
fn rows(lines: &[&str], width: usize) -> Result<BTreeSet<String>> {
    let name = |line: &&str| {
        let name: String = line.chars().take(width).collect();
        let rest: String = line.chars().skip(width).collect();
        let rest = rest.trim_start();
        ensure!(
            rest.starts_with(|c: char| c.is_ascii_digit()),
            "no number: {line:?}"
        );
        let name = name.trim_end().replace(|c: char| c.is_ascii_digit(), "");
        Ok(name.trim_start().trim_end_matches('s').to_owned())
    };
    lines.iter().map(name).collect()
}

/// Runs heapscan on a process, and returns its screen's shape. An error has the whole screen.
fn shape(pid: &str) -> Result<Shape> {
    let ended = harness::run("heapscan", &["-p", pid, "--max-pause", "60000"])?;
    ensure!(ended.status.success(), "{ended:?}");
    Shape::of(&ended.stdout, pid).with_context(|| ended.stdout.clone())
}

/// Returns the screens of the example file: for each its process, and what heapscan printed.
fn examples() -> impl Iterator<Item = (&'static str, &'static str)> {
    EXAMPLE
        .split("\n# heapscan -p ")
        .skip(1)
        .filter_map(|text| {
            let (pid, screen) = text.split_once('\n')?;
            // The screen ends where the next text begins: with a line that is longer than a screen's, or the second one
            // after the table.
            let (before, blocks) = screen.split_once(BLOCKS)?;
            let end = blocks.find("\n\n").unwrap_or(blocks.len());
            let length = before.len() + BLOCKS.len() + end;
            let is_screen = pid.bytes().all(|byte| byte.is_ascii_digit());
            is_screen.then(|| (pid, &screen[..length]))
        })
}

/// A service in Python that keeps each quote.
const QUOTES: &str = "
import os, sys
class Quote:
    def __init__(self, n):
        self.symbol, self.prices = 'SYM%d' % n, [n * 0.5, n * 0.25]
quotes = {n: Quote(n) for n in range(60013)}
print('ready', os.getpid(), flush=True)
sys.stdin.readline()
";

/// A leaking program, a fragmented one, and a service in Python, as the example file has them.
fn the_example_s_screens_are_made_here() -> Result<()> {
    // With this seed, the workload loses 59 requests in each round of 10 ms.
    let mut leak = Workload::start("growth", &["leak", "100", "4025"])?;
    let statm = format!("/proc/{}/statm", leak.pid());
    let resident = || -> Result<u64> {
        let pages = fs::read_to_string(&statm)?;
        let pages = pages.split(' ').nth(1).context("no resident pages")?;
        Ok(pages.parse::<u64>()? << 12)
    };
    let before = resident()?;
    leak.go()?;
    harness::eventually("4 MB leak", || Ok(resident()? > before + (4 << 20)))?;
    let fragmented = Workload::start("heap", &["0", "50021", "holes"])?;
    let python = Workload::spawn(Command::new("python3").args(["-c", QUOTES]))?;
    let examples: Vec<_> = examples().collect();
    ensure!(
        examples.len() == 3,
        "{} screens in the example",
        examples.len()
    );
    let mut wrong = Vec::new();
    for (workload, (pid, screen)) in [leak, python, fragmented].iter().zip(examples) {
        let shown =
            harness::run("heapscan", &["-p", &workload.pid(), "--max-pause", "60000"])?.stdout;
        let found = Shape::of(&shown, &workload.pid()).with_context(|| shown.clone())?;
        let expected = Shape::of(screen, pid).with_context(|| screen.to_owned())?;
        let same = found.head == expected.head
            && found.findings == expected.findings
            && found.memory.intersection(&expected.memory).count() + 1 >= expected.memory.len()
            && found.blocks.intersection(&expected.blocks).count() + 1 >= expected.blocks.len();
        if !same {
            wrong.push(format!(
                "{shown}\n{found:#?}\nin the example: {expected:#?}"
            ));
        }
    }
    ensure!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    Ok(())
}

/// Process that ends with the value.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn postgres(folder: &Path) -> Result<Option<Server>> {
    let versions = fs::read_dir("/usr/lib/postgresql")
        .into_iter()
        .flatten()
        .flatten();
    let Some(bin) = versions
        .map(|version| version.path().join("bin"))
        .find(|bin| bin.join("initdb").exists())
    else {
        return Ok(None);
    };
    let data = folder.join("data");
    fs::create_dir(&data)?;
    std::os::unix::fs::chown(&data, Some(NOBODY), Some(NOBODY))?;
    std::os::unix::fs::chown(folder, Some(NOBODY), Some(NOBODY))?;
    let as_nobody = |program: &str| {
        let mut command = Command::new(bin.join(program));
        command
            .uid(NOBODY)
            .gid(NOBODY)
            .current_dir(folder)
            .arg("-D")
            .arg(&data);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command
    };
    let made = as_nobody("initdb")
        .args(["-U", "postgres", "--no-sync"])
        .status()?;
    ensure!(made.success(), "initdb has failed");
    let server = as_nobody("postgres")
        .args(["-h", "", "-k"])
        .arg(folder)
        .spawn()?;
    let server = Server(server);
    harness::eventually("postgres listens", || {
        Ok(folder.join(".s.PGSQL.5432").exists())
    })?;
    Ok(Some(server))
}

fn redis(folder: &Path) -> Result<Option<Server>> {
    let socket = folder.join("redis");
    let Ok(server) = harness::start_redis(&socket, Path::new("/dev/null"), None) else {
        return Ok(None);
    };
    let server = Server(server);
    harness::eventually("redis listens", || Ok(socket.exists()))?;
    Ok(Some(server))
}

fn nginx(folder: &Path) -> Result<Option<Server>> {
    let socket = folder.join("nginx");
    let config = folder.join("nginx.conf");
    let text = format!(
        "daemon off; master_process off; pid {0}/pid; error_log /dev/null; events {{}}\nhttp {{ access_log off; client_body_temp_path {0}/body; proxy_temp_path {0}/proxy; fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi; server {{ listen unix:{1}; }} }}\n",
        folder.display(),
        socket.display()
    );
    fs::write(&config, text)?;
    let started = Command::new("nginx")
        .arg("-c")
        .arg(&config)
        .stderr(Stdio::null())
        .spawn();
    let Ok(server) = started else {
        return Ok(None);
    };
    let server = Server(server);
    harness::eventually("nginx listens", || Ok(socket.exists()))?;
    Ok(Some(server))
}

const NODE: &str = "const kept = []; for (let i = 0; i < 10007; i++) kept.push({i});
console.log('ready', process.pid); process.stdin.on('data', () => process.exit(kept.length > 0 ? 0 : 1))";
const JAVA: &str = "public class Shop { public static void main(String[] args) throws Exception {
var kept = new java.util.ArrayList<Object>(); for (int i = 0; i < 10007; i++) kept.add(new int[7]);
System.out.println(\"ready \" + ProcessHandle.current().pid()); System.in.read(); System.exit(kept.size() > 0 ? 0 : 1); } }";

/// Servers that this machine has. Those that it lacks are named.
fn servers_have_the_same_shape() -> Result<()> {
    type Start = fn(&Path) -> Result<Option<Server>>;
    let starts: [(&str, Start); 3] = [("postgres", postgres), ("redis", redis), ("nginx", nginx)];
    let mut shapes = Vec::new();
    for (name, start) in starts {
        let folder = harness::scratch()?;
        match start(folder.path())? {
            Some(server) => shapes.push((name, shape(&server.0.id().to_string())?)),
            None => eprintln!("heapscan::screens: not run: no {name} is installed"),
        }
    }
    let folder = harness::scratch()?;
    let source = folder.path().join("Shop.java");
    fs::write(&source, JAVA)?;
    let mut java = Command::new("java");
    java.arg(&source);
    let mut node = Command::new("node");
    node.args(["-e", NODE]);
    for (name, command) in [("java", &mut java), ("node", &mut node)] {
        match Workload::spawn(command) {
            Ok(workload) => shapes.push((name, shape(&workload.pid())?)),
            Err(error) => eprintln!("heapscan::screens: not run: {name}: {error:#}"),
        }
    }
    for (name, shape) in &shapes {
        // A server at rest has no leak to act on.
        let acts = shape
            .findings
            .iter()
            .any(|finding| finding.starts_with("act   leak"));
        ensure!(!acts, "{name}: {shape:?}");
        ensure!(
            shape.memory.contains("total") && shape.memory.contains("file"),
            "{name}: {shape:?}"
        );
    }
    ensure!(!shapes.is_empty(), "none of these programs is installed");
    Ok(())
}
