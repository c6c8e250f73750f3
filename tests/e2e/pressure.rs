//! Helpers that make memory scarce, and read what the kernel itself records of that.

use std::env;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::harness::{NotHere, cannot_make_cgroup};

const CGROUP2: &str = "/sys/fs/cgroup";
const CGROUP1: &str = "/sys/fs/cgroup/memory";
const TRACEFS: &str = "/sys/kernel/tracing";

/// Time to wait while another test's cgroup has the name of one that is to be made.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Memory cgroup with a limit. Dropping it removes the cgroup.
pub(crate) struct Group {
    path: PathBuf,
}

impl Group {
    /// Makes a cgroup: of version 2 if that has the memory controller, else of version 1.
    pub(crate) fn new(name: &str, limit_bytes: u64) -> Result<Self> {
        let controllers =
            fs::read_to_string(format!("{CGROUP2}/cgroup.controllers")).unwrap_or_default();
        let root = if controllers.split_whitespace().any(|name| name == "memory") {
            CGROUP2
        } else {
            CGROUP1
        };
        if !Path::new(root).join("cgroup.procs").exists() {
            return Err(NotHere("no cgroups with a memory controller").into());
        }
        let path = Path::new(root).join(name);
        make_alone(&path).map_err(cannot_make_cgroup)?;
        let group = Self { path };
        group.set_limit(limit_bytes)?;
        Ok(group)
    }

    /// Makes a cgroup below this one, with the memory controller and without a limit. Only with version 2.
    pub(crate) fn child(&self, name: &str) -> Result<Self> {
        self.set("cgroup.subtree_control", "+memory")?;
        let path = self.path.join(name);
        fs::create_dir_all(&path).with_context(|| format!("failed to make {}", path.display()))?;
        Ok(Self { path })
    }

    /// Returns how often the cgroup's own limit was hit, so that its tasks reclaimed. Only with version 2.
    pub(crate) fn limit_hits(&self) -> Result<u64> {
        let events = fs::read_to_string(self.path.join("memory.events")).context("no events")?;
        let hits = events.lines().find_map(|line| line.strip_prefix("max "));
        Ok(hits.context("no max")?.parse()?)
    }

    /// Returns the bytes of kernel memory that the cgroup is charged for. Only with version 2, from 5.18 on.
    pub(crate) fn kernel_bytes(&self) -> Result<u64> {
        let stat = fs::read_to_string(self.path.join("memory.stat")).context("no statistics")?;
        let bytes = stat.lines().find_map(|line| line.strip_prefix("kernel "));
        Ok(bytes.context("no bytes of the kernel")?.parse()?)
    }

    /// Writes one of the cgroup's files.
    pub(crate) fn set(&self, file: &str, value: &str) -> Result<()> {
        fs::write(self.path.join(file), value).with_context(|| format!("failed to set {file}"))
    }

    /// Changes the limit.
    pub(crate) fn set_limit(&self, bytes: u64) -> Result<()> {
        let files = ["memory.max", "memory.limit_in_bytes"];
        let file = files.into_iter().find(|file| self.path.join(file).exists());
        self.set(file.context("no limit")?, &bytes.to_string())
    }

    /// Permits no swap, where that can be set. (Version 1 counts swap only if the kernel was booted with that option.)
    pub(crate) fn forbid_swap(&self) -> Result<()> {
        if self.path.join("memory.swap.max").exists() {
            self.set("memory.swap.max", "0")?;
        }
        Ok(())
    }

    /// Returns the cgroup's path in the file system.
    pub(crate) fn path(&self) -> String {
        self.path.display().to_string()
    }

    /// Returns a command that runs a program in the cgroup.
    pub(crate) fn command(&self, program: &Path, args: &[&str]) -> Command {
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"echo $$ >"$0/cgroup.procs" && exec "$@""#])
            .arg(&self.path)
            .arg(program)
            .args(args);
        command
    }
}

/// Makes the directory of a cgroup. Waits while another test has a cgroup of this name, which that test will remove.
/// Takes over a cgroup that a killed test has left.
fn make_alone(path: &Path) -> io::Result<()> {
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent)?;
    }
    let begun = Instant::now();
    loop {
        match fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                if begun.elapsed() >= TIMEOUT {
                    return Ok(());
                }
                thread::sleep(Duration::from_millis(10));
            }
            made => return made,
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        crate::harness::remove_cgroup(&self.path);
    }
}

/// Swap on compressed memory. Only in a guest.
pub(crate) struct Swap;

impl Swap {
    pub(crate) fn on(size: &str) -> Result<Self> {
        shell(&format!(". /vmrun/lib.sh && zram_swap {size}"))?;
        Ok(Self)
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        let _ = shell("swapoff /dev/zram0");
    }
}

/// Little free memory, and a kswapd that is too slow, so that a process that needs more memory has to reclaim,
/// and to swap out its own. Only in a guest, and with swap for all of the process, so that no process is killed.
pub(crate) struct Scarcity {
    watermark: String,
    kswapd: String,
    _balloon: Option<Balloon>,
}

/// Memory that a file of a ramfs uses until this is dropped, and that cannot be reclaimed. Only in a guest.
pub(crate) struct Balloon(tempfile::TempDir);

impl Balloon {
    /// Makes a balloon that leaves `kb` kB of available memory.
    pub(crate) fn leaving(kb: u64) -> Result<Self> {
        let available = meminfo_kb("MemAvailable")?;
        Self::of(available.checked_sub(kb).context("there is less already")?)
    }

    /// Makes a balloon of `kb` kB.
    pub(crate) fn of(kb: u64) -> Result<Self> {
        let balloon = Self(tempfile::tempdir()?);
        let folder = balloon.0.path().display();
        shell(&format!(
            "mount -t ramfs none {folder} &&
             dd if=/dev/zero of={folder}/balloon bs=1024 count={kb} 2>/dev/null"
        ))?;
        Ok(balloon)
    }
}

impl Drop for Balloon {
    fn drop(&mut self) {
        let _ = shell(&format!("umount {}", self.0.path().display()));
    }
}

/// Setting of the kernel that is changed until this is dropped.
pub(crate) struct Setting {
    path: &'static str,
    before: String,
}

impl Setting {
    pub(crate) fn change(path: &'static str, value: &str) -> Result<Self> {
        let before = fs::read_to_string(path).with_context(|| format!("no {path}"))?;
        fs::write(path, value).with_context(|| format!("failed to set {path}"))?;
        // A file that lists several values has the current one in brackets.
        let chosen = before.split(['[', ']']).nth(1).map(str::to_owned);
        let before = chosen.unwrap_or(before);
        Ok(Self { path, before })
    }

    /// Switches zswap on, where the kernel has it.
    pub(crate) fn zswap() -> Result<Self> {
        const ENABLED: &str = "/sys/module/zswap/parameters/enabled";
        let setting = Self::change(ENABLED, "Y")?;
        let is_on = fs::read_to_string(ENABLED)?.trim() == "Y";
        ensure!(is_on, "zswap stays off");
        Ok(setting)
    }

    /// Raises the watermark to the memory that is free now, so that kswapd has to free half as much again.
    pub(crate) fn high_watermark() -> Result<Self> {
        Self::change(WATERMARK, &free_kb()?.to_string())
    }
}

impl Drop for Setting {
    fn drop(&mut self) {
        let _ = fs::write(self.path, &self.before);
    }
}

const WATERMARK: &str = "/proc/sys/vm/min_free_kbytes";
const HUGE_PAGES: &str = "/proc/sys/vm/nr_hugepages";
const HUGE_PAGE_KB: u64 = 2048;

impl Scarcity {
    const FREE_KB: u64 = 48 << 10;
    const WATERMARK_KB: u64 = 16 << 10;

    pub(crate) fn for_process(pid: &str) -> Result<Self> {
        shell("sync && echo 3 >/proc/sys/vm/drop_caches")?;
        let watermark = fs::read_to_string(WATERMARK).context("no watermark")?;
        fs::write(WATERMARK, Self::WATERMARK_KB.to_string()).context("failed to set it")?;
        // Memory is reserved in huge pages. With a watermark near all memory, kswapd would swap out everything,
        // because it works towards one and a half times the watermark. Twice, because CPUs keep some of what was
        // freed, and return it within a second.
        let mut taken = 0;
        for _ in 0..2 {
            taken += free_kb()?.saturating_sub(Self::FREE_KB) / HUGE_PAGE_KB;
            fs::write(HUGE_PAGES, taken.to_string()).context("failed to set memory aside")?;
            thread::sleep(Duration::from_millis(1100));
        }
        // A balloon takes the memory that is free in pieces smaller than a huge page.
        let rest = free_kb()?.saturating_sub(Self::FREE_KB);
        let balloon = (rest >= HUGE_PAGE_KB).then(|| Balloon::of(rest));
        let balloon = balloon.transpose()?;
        // On kswapd's CPU, the process gets nearly all of the CPU's time.
        let kswapd = shell("pidof kswapd0")?.trim_end().to_owned();
        shell(&format!(
            "renice -n 19 -p {kswapd} && renice -n -20 -p {pid} &&
             taskset -p 1 {kswapd} && taskset -p 1 {pid}"
        ))?;
        Ok(Self {
            watermark,
            kswapd,
            _balloon: balloon,
        })
    }
}

impl Drop for Scarcity {
    fn drop(&mut self) {
        let kswapd = &self.kswapd;
        let _ = shell(&format!("renice -n 0 -p {kswapd}; taskset -p ff {kswapd}"));
        let _ = fs::write(WATERMARK, &self.watermark);
        let _ = fs::write(HUGE_PAGES, "0");
    }
}

fn free_kb() -> Result<u64> {
    meminfo_kb("MemFree")
}

pub(crate) fn meminfo_kb(key: &str) -> Result<u64> {
    let meminfo = fs::read_to_string("/proc/meminfo").context("no meminfo")?;
    let value = meminfo.lines().find_map(|line| {
        let rest = line.strip_prefix(key)?.strip_prefix(':')?;
        rest.split_whitespace().next()
    });
    Ok(value.with_context(|| format!("no {key}"))?.parse()?)
}

/// Program that is held until it may write 96 MB to a disk, in a memory cgroup of 32 MB. It then has to reclaim,
/// without swap, and without using up this machine's memory. Each megabyte is on the disk before the next is
/// written: else a slow disk cleans no pages in time, and the writer is killed.
pub(crate) struct Writer {
    child: Child,
    pub(crate) group: Group,
    _folder: tempfile::TempDir,
}

impl Writer {
    pub(crate) fn start(group: &str) -> Result<Self> {
        let folder = folder_on_disk()?;
        let file = File::options()
            .create(true)
            .write(true)
            .truncate(true)
            .custom_flags(libc::O_DSYNC)
            .open(folder.path().join("written"))?;
        let group = Group::new(group, 32 << 20)?;
        let script = "read go && exec dd if=/dev/zero bs=1048576 count=96 2>/dev/null";
        let child = group
            .command("sh".as_ref(), &["-c", script])
            .stdin(Stdio::piped())
            .stdout(file)
            .spawn()
            .context("failed to start a writer")?;
        Ok(Self {
            child,
            group,
            _folder: folder,
        })
    }

    pub(crate) fn pid(&self) -> String {
        self.child.id().to_string()
    }

    /// Lets the program write, and waits for its end.
    pub(crate) fn write(&mut self) -> Result<()> {
        let mut stdin = self.child.stdin.take().context("already released")?;
        stdin.write_all(b"\n").context("the writer has gone")?;
        let status = self.child.wait()?;
        ensure!(status.success(), "the writer failed: {status}");
        Ok(())
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Makes a directory whose files can be written to a disk: a guest's /tmp is not on one.
pub(crate) fn folder_on_disk() -> Result<tempfile::TempDir> {
    let parent = env::var_os("MEMTOOLS_DISK").map_or_else(env::temp_dir, PathBuf::from);
    tempfile::tempdir_in(parent).context("failed to make a folder")
}

/// Runs shell commands, which must succeed. Returns their output.
pub(crate) fn shell(commands: &str) -> Result<String> {
    let output = Command::new("sh").args(["-c", commands]).output()?;
    ensure!(output.status.success(), "{commands}: {output:?}");
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns a counter of /proc/vmstat. If `name` ends in `_`, returns the sum of the counters that begin with it.
pub(crate) fn vmstat(name: &str) -> Result<u64> {
    let vmstat = fs::read_to_string("/proc/vmstat").context("no vmstat")?;
    let mut found = false;
    let mut sum = 0;
    for line in vmstat.lines() {
        let (key, value) = line.split_once(' ').context("no value")?;
        if key == name || name.ends_with('_') && key.starts_with(name) {
            found = true;
            sum += value.parse::<u64>()?;
        }
    }
    ensure!(found, "/proc/vmstat has no {name}");
    Ok(sum)
}

/// Tracepoints as the kernel itself records them, for one process, in a tracefs instance of its own.
pub(crate) struct Recording {
    instance: PathBuf,
}

/// Line of a trace.
#[derive(Debug)]
pub(crate) struct Traced {
    /// Task, such as `hog-194`.
    pub(crate) task: String,
    /// Name of the tracepoint.
    pub(crate) name: String,
    pub(crate) time_ns: u64,
    /// Rest of the line.
    pub(crate) text: String,
}

impl Traced {
    /// Returns what follows `key=` or `key ` in the text, up to the next space.
    pub(crate) fn field(&self, key: &str) -> Result<&str> {
        let (_, rest) = self
            .text
            .split_once(key)
            .with_context(|| format!("no {key} in {:?}", self.text))?;
        let rest = rest.trim_start_matches(['=', ' ', ':']);
        Ok(rest.split([' ', ',']).next().unwrap_or(rest))
    }
}

impl Recording {
    /// Records these events, `group/name` or `group` for all of a group, of this process (0: of all processes).
    pub(crate) fn start(name: &str, events: &[&str], pid: u32) -> Result<Self> {
        let instance = Path::new(TRACEFS).join("instances").join(name);
        fs::create_dir(&instance).context("failed to make a tracefs instance")?;
        let recording = Self { instance };
        recording.set("buffer_size_kb", "8192")?;
        if pid != 0 {
            recording.set("set_event_pid", &pid.to_string())?;
        }
        for event in events {
            recording.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(recording)
    }

    /// Returns all events that were recorded so far. Fails if some were lost.
    pub(crate) fn read(&self) -> Result<Vec<Traced>> {
        for cpu in fs::read_dir(self.instance.join("per_cpu"))? {
            let stats = fs::read_to_string(cpu?.path().join("stats"))?;
            if let Some(lost) = stats.lines().find(|line| line.starts_with("overrun:")) {
                ensure!(lost == "overrun: 0", "the trace lost events: {lost}");
            }
        }
        let trace = fs::read_to_string(self.instance.join("trace")).context("no trace")?;
        trace
            .lines()
            .filter(|line| !line.starts_with('#'))
            .map(|line| parse(line).with_context(|| format!("cannot read {line:?}")))
            .collect()
    }

    fn set(&self, file: &str, value: &str) -> Result<()> {
        fs::write(self.instance.join(file), value).with_context(|| format!("failed to set {file}"))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.instance);
    }
}

/// Parses `  hog-194  [001] .....  12.345678: mm_vmscan_direct_reclaim_end: nr_reclaimed=32`.
fn parse(line: &str) -> Result<Traced> {
    // A task's name may have spaces, but not this text.
    let Some((task, rest)) = line.split_once(" [0") else {
        bail!("no CPU");
    };
    let mut words = rest.split_ascii_whitespace().skip(1);
    let _flags = words.next().context("no flags")?;
    let rest = words.collect::<Vec<_>>().join(" ");
    let (time, rest) = rest.split_once(':').context("no time")?;
    let (seconds, micros) = time.trim().split_once('.').context("no time")?;
    let (name, text) = rest.trim_start().split_once(':').context("no name")?;
    Ok(Traced {
        task: task.trim().to_owned(),
        name: name.to_owned(),
        time_ns: seconds.parse::<u64>()? * 1_000_000_000 + micros.parse::<u64>()? * 1000,
        text: text.trim().to_owned(),
    })
}
