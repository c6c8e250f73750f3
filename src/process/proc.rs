//! Process to be traced: whether it runs, its kind, and its mappings.

use std::collections::HashSet;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, ErrorKind};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use anyhow::{Context, Result, anyhow, bail};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use crate::code::elf;
use crate::code::registers;
use crate::host::capabilities::{self, Capability};
use crate::host::page_size;
use crate::parse;
use crate::print::text;
use crate::process::mapped_file::{self, MappedFile};
use crate::process::reader;

/// Reads a field of a file such as `/proc/PID/status`; the field's name includes the colon. The file need not be
/// UTF-8: it contains the process's name, which can be any bytes.
pub(crate) fn field(path: impl AsRef<Path>, name: &str) -> Option<String> {
    let text = fs::read(path).ok()?;
    let mut lines = text.split(|&byte| byte == b'\n');
    let value = lines.find_map(|line| line.strip_prefix(name.as_bytes()))?;
    Some(str::from_utf8(value).ok()?.trim().to_owned())
}

/// Fields of `/proc/PID/stat` behind the name of the process or thread. They have the numbers of proc_pid_stat(5).
#[derive(Debug)]
pub struct Stat(String);

impl Stat {
    /// Number of the state, a letter, which is the first field behind the name.
    pub const STATE: usize = 3;
    /// Number of the kernel's flags of the task (`PF_`).
    const FLAGS: usize = 9;

    /// Reads a file such as `/proc/PID/stat`.
    ///
    /// # Errors
    /// If the process or thread does not exist any more.
    pub fn read(path: impl AsRef<Path>) -> io::Result<Self> {
        Ok(Self::parse(&fs::read(path)?))
    }

    fn parse(stat: &[u8]) -> Self {
        // The name is in parentheses and can contain any bytes, including parentheses.
        let name_ends = stat.iter().rposition(|&byte| byte == b')');
        let fields = name_ends.map_or(&[][..], |end| &stat[end + 1..]);
        Self(String::from_utf8_lossy(fields).into_owned())
    }

    /// Returns the field with this number, from [`Stat::STATE`] on. None if there is no such field, or it is of another
    /// type.
    pub fn field<T: FromStr>(&self, number: usize) -> Option<T> {
        let mut fields = self.0.split_ascii_whitespace();
        fields.nth(number.checked_sub(Self::STATE)?)?.parse().ok()
    }
}

/// Returns the PIDs of all processes that run now in our PID namespace.
///
/// # Errors
/// If /proc cannot be listed.
pub fn all() -> Result<Vec<u32>> {
    let entries = fs::read_dir("/proc").context("failed to list /proc")?;
    let numbers = entries.flatten().map(|entry| entry.file_name());
    Ok(numbers
        .filter_map(|name| name.to_str()?.parse().ok())
        .collect())
}

/// Parses the PID of a process, or the TID of any of its threads, which names the process. Returns the PID.
///
/// # Errors
/// If the text is no such number. The error is the text for the user. Whether the process exists is not checked.
pub fn parse_pid(text: &str) -> Result<u32, String> {
    let number = parse::pid(text)?;
    let process = field(format!("/proc/{number}/status"), "Tgid:");
    Ok(process.and_then(|pid| pid.parse().ok()).unwrap_or(number))
}

/// Returns the TID of a thread of a process that still runs: of the main thread, whose TID is the PID, as long as that
/// runs; then of any other. Of a process that has exited, returns the PID.
///
/// Daemons, JVM launchers and programs in Go and Rust can end their main thread, by pthread_exit(3), while other
/// threads go on. The main thread is then a zombie without memory, files and root, as its files in /proc show. The
/// kernel finds the memory of a process by a thread, also in system calls that take a PID, such as
/// process_vm_readv(2).
pub fn living_thread(pid: u32) -> u32 {
    let main = [pid].into_iter();
    let others = tids(pid).into_iter().flatten();
    main.chain(others)
        .find(|&tid| runs(pid, tid))
        .unwrap_or(pid)
}

/// Whether the main thread of a process has ended while other threads run.
pub fn has_lost_main_thread(pid: u32) -> bool {
    living_thread(pid) != pid
}

/// Whether a thread of a process still runs. A process that has exited and whose parent has not waited for it has
/// none.
pub fn has_living_thread(pid: u32) -> bool {
    runs(pid, living_thread(pid))
}

/// Whether a thread has not begun to exit: a thread has no memory any more some time before it becomes a zombie.
fn runs(pid: u32, tid: u32) -> bool {
    const PF_EXITING: u64 = 0x4;
    let stat = Stat::read(format!("/proc/{pid}/task/{tid}/stat"));
    let flags = stat.ok().and_then(|stat| stat.field::<u64>(Stat::FLAGS));
    flags.is_some_and(|flags| flags & PF_EXITING == 0)
}

/// Returns the path of a file in /proc that shows a process's memory, files, namespaces or cgroup: `maps`, `exe`,
/// `root`, `map_files/...`. The file is that of a living thread ([`living_thread`]).
pub fn file(pid: u32, name: &str) -> PathBuf {
    PathBuf::from(format!("/proc/{}/{name}", living_thread(pid)))
}

/// Returns the TIDs of a process's threads, including those that are about to end.
///
/// # Errors
/// If the process has exited.
pub fn tids(pid: u32) -> io::Result<Vec<u32>> {
    let names = fs::read_dir(format!("/proc/{pid}/task"))?.flatten();
    Ok(names
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect())
}

/// Iterates over the open files of a process: the file descriptor, and the target of its link in `/proc/PID/fd`. There
/// are none if the process has exited, or may not be looked at.
pub fn open_files(pid: u32) -> impl Iterator<Item = (u32, PathBuf)> {
    let entries = fs::read_dir(file(pid, "fd"));
    entries.into_iter().flatten().flatten().filter_map(|entry| {
        let number = entry.file_name().to_str()?.parse().ok()?;
        Some((number, fs::read_link(entry.path()).ok()?))
    })
}

/// Running process, held by a pidfd so that its PID cannot come to mean another process.
#[derive(Debug)]
pub struct Process {
    pid: u32,
    pidfd: OwnedFd,
}

impl Process {
    /// Opens the process with this PID in our PID namespace.
    ///
    /// # Errors
    /// If no process has this PID, or it is the TID of a thread.
    pub fn open(pid: u32) -> Result<Self> {
        match pidfd_open(pid) {
            Ok(pidfd) => Ok(Self { pid, pidfd }),
            Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                bail!("no process has PID {pid}; list the running ones with: ps -e")
            }
            Err(error)
                if error.raw_os_error() == Some(libc::EINVAL)
                    || error.raw_os_error() == Some(libc::ENOENT) =>
            {
                bail!(
                    "{pid} is not a process but one of its threads; its process: grep Tgid /proc/{pid}/status"
                )
            }
            Err(error) => Err(error).with_context(|| format!("failed to open process {pid}")),
        }
    }

    /// Opens the process of this thread.
    ///
    /// # Errors
    /// If the thread does not exist.
    pub fn of_thread(tid: u32) -> Result<Self> {
        let process = field(format!("/proc/{tid}/status"), "Tgid:");
        match process.and_then(|pid| pid.parse().ok()) {
            Some(pid) => Self::open(pid),
            None => {
                bail!("no thread has TID {tid}; list the threads of a process with: ps -L -p PID")
            }
        }
    }

    /// Returns the PID in our PID namespace.
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Fails if the process has exited, even if its parent has not reaped it yet.
    ///
    /// # Errors
    /// If the process has exited: the message names it.
    pub fn expect_running(&self) -> Result<()> {
        if self.exited() {
            return Err(self.has_exited());
        }
        Ok(())
    }

    fn has_exited(&self) -> anyhow::Error {
        anyhow!("process {} ({}) has exited", self.pid, self.comm())
    }

    /// Fails unless the process runs a program; the message says what it is instead.
    ///
    /// # Errors
    /// If the process has exited or is a kernel thread: the message names it.
    pub(crate) fn check_user_process(&self) -> Result<()> {
        self.expect_running()?;
        if self.is_kernel_thread()? {
            bail!(
                "{} ({}) is a kernel thread: it has no user memory; give the PID of a program",
                self.pid,
                self.comm()
            );
        }
        Ok(())
    }

    /// Fails unless the process runs a 64-bit user program; the message says what it is instead.
    ///
    /// # Errors
    /// If the process has exited, is a kernel thread or runs a 32-bit program, or its program cannot be opened.
    pub fn expect_native_program(&self) -> Result<()> {
        let pid = self.pid;
        self.check_user_process()?;
        let exe = match mapped_file::open_regular(&self.file("exe")) {
            // An exiting process loses its memory, and with it the program, some time before its pidfd is readable.
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(self.has_exited()),
            exe => exe.with_context(|| {
                let remedy = capabilities::remedy(Capability::CAP_SYS_PTRACE);
                format!("failed to open the program of process {pid}{remedy}")
            })?,
        };
        if !elf::is_native(&exe)? {
            bail!(
                "process {pid} ({}) is not an {} program: only 64-bit programs of this machine's \
                 architecture can be traced",
                self.comm(),
                registers::NAME
            );
        }
        Ok(())
    }

    /// Returns the process's name as the kernel keeps it, escaped: up to 15 bytes.
    pub fn comm(&self) -> String {
        // The main thread's name is the process's, even when the thread has ended.
        let comm = fs::read(format!("/proc/{}/comm", self.pid)).unwrap_or_default();
        text::escape_bytes(comm.strip_suffix(b"\n").unwrap_or(&comm))
    }

    /// Returns the resident memory of the process, in bytes. None after its exit.
    pub fn resident_bytes(&self) -> Option<u64> {
        let sizes = fs::read_to_string(self.file("statm")).ok()?;
        let pages: u64 = sizes.split(' ').nth(1)?.parse().ok()?;
        let bytes = pages * page_size::page_bytes().ok()?;
        (bytes > 0).then_some(bytes)
    }

    /// Returns whether the process has exited, reaped or not.
    pub fn exited(&self) -> bool {
        let mut fds = [PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1..))
    }

    /// Returns whether the process is stopped by a signal.
    pub fn is_stopped(&self) -> bool {
        Stat::read(self.file("stat")).is_ok_and(|stat| stat.field(Stat::STATE) == Some('T'))
    }

    /// Returns the present mappings of the process; empty after its exit.
    ///
    /// # Errors
    /// If /proc/PID/maps cannot be read.
    pub fn mappings(&self) -> Result<Vec<Mapping>> {
        let maps = if self.pid == std::process::id() {
            fs::read(self.file("maps"))
        } else {
            reader::read_file(self.pid, "maps", usize::MAX)
        };
        let maps = match maps {
            Err(error) if error.kind() == ErrorKind::NotFound => return Err(self.has_exited()),
            maps => maps
                .with_context(|| format!("failed to read the mappings of process {}", self.pid))?,
        };
        Ok(Mapping::parse_list(&maps).collect())
    }

    /// Returns a mapping of each file from which the process executes code, in the order of addresses.
    ///
    /// # Errors
    /// If /proc/PID/maps cannot be read.
    pub fn code_mappings(&self) -> Result<Vec<Mapping>> {
        let mut seen = HashSet::new();
        let mut mappings = self.mappings()?;
        mappings.retain(|mapping| {
            mapping.executable && mapping.inode != 0 && seen.insert(mapping.file_id())
        });
        Ok(mappings)
    }

    /// Opens the files of these mappings of the process. Devices, and files that cannot be found any more, are
    /// omitted. Other errors are in `errors`.
    pub fn open_code(&self, mappings: &[Mapping]) -> CodeFiles {
        let mut found = CodeFiles::default();
        for mapping in mappings {
            match MappedFile::open(self.pid, mapping) {
                Ok(file) => found.files.push(file),
                Err(error)
                    if [ErrorKind::NotFound, ErrorKind::InvalidInput].contains(&error.kind()) => {}
                Err(error) => {
                    let name = text::escape_bytes(mapping.path.as_os_str().as_bytes());
                    let error = anyhow::Error::new(error).context(format!(
                        "failed to open {name}, which process {} has mapped",
                        self.pid
                    ));
                    found.errors.push(error);
                }
            }
        }
        found
    }

    /// Returns the PID in the process's own PID namespace, after which the process names its files.
    pub fn pid_in_its_namespace(&self) -> u32 {
        let ids = field(self.file("status"), "NStgid:");
        ids.and_then(|ids| ids.split_whitespace().next_back()?.parse().ok())
            .unwrap_or(self.pid)
    }

    /// Returns the effective user ID. None after the process's exit.
    pub fn user(&self) -> Option<u32> {
        let ids = field(self.file("status"), "Uid:")?;
        ids.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns the effective group ID. None after the process's exit.
    pub fn group(&self) -> Option<u32> {
        let ids = field(self.file("status"), "Gid:")?;
        ids.split_whitespace().nth(1)?.parse().ok()
    }

    /// Returns PF_KTHREAD of the flags in /proc/PID/stat.
    fn is_kernel_thread(&self) -> Result<bool> {
        const PF_KTHREAD: u64 = 0x0020_0000;
        let stat = Stat::read(self.file("stat"))
            .with_context(|| format!("process {} has exited", self.pid))?;
        let flags: Option<u64> = stat.field(Stat::FLAGS);
        let flags = flags.context("failed to read the flags of the process")?;
        Ok(flags & PF_KTHREAD != 0)
    }

    fn file(&self, name: &str) -> PathBuf {
        file(self.pid, name)
    }
}

impl AsFd for Process {
    /// Returns the pidfd, which becomes readable when the process exits.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn pidfd_open(pid: u32) -> io::Result<OwnedFd> {
    // SAFETY: takes two integers; returns a new descriptor or -1.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor has just been created, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}

/// Mapping, from a line of /proc/PID/maps or from a mapping event of the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mapping {
    /// The addresses of the mapping, in bytes.
    pub range: Range<u64>,
    /// Whether the mapping is executable.
    pub executable: bool,
    /// The offset in the file of the byte at `range.start`.
    pub file_offset: u64,
    /// Major and minor number of the file's device.
    pub device: (u32, u32),
    /// The file's inode; 0 if the mapping has no file.
    pub inode: u64,
    /// The path in the process's own mount namespace, or a name such as `[heap]`, or empty.
    pub path: PathBuf,
}

impl Mapping {
    /// Parses the mappings in the text of a `maps` file.
    pub(crate) fn parse_list(maps: &[u8]) -> impl Iterator<Item = Self> {
        let lines = maps.split(|&byte| byte == b'\n');
        lines.filter_map(Self::parse)
    }

    pub(crate) fn parse(line: &[u8]) -> Option<Self> {
        // 55d0c8a00000-55d0c8a21000 r-xp 00002000 fe:00 1234    /usr/bin/cat
        let mut rest = line;
        let mut field = || {
            let start = rest.iter().position(|&byte| byte != b' ')?;
            let end = rest[start..]
                .iter()
                .position(|&byte| byte == b' ')
                .map_or(rest.len(), |n| start + n);
            let field = str::from_utf8(&rest[start..end]).ok()?;
            rest = &rest[end..];
            Some(field)
        };
        let hex = |digits: &str| u64::from_str_radix(digits, 16).ok();
        let (start, end) = field()?.split_once('-')?;
        let permissions = field()?;
        let file_offset = hex(field()?)?;
        let (major, minor) = field()?.split_once(':')?;
        let inode = field()?.parse().ok()?;
        Some(Self {
            range: hex(start)?..hex(end)?,
            executable: permissions.as_bytes().get(2) == Some(&b'x'),
            file_offset,
            device: (hex(major)? as u32, hex(minor)? as u32),
            inode,
            path: PathBuf::from(OsStr::from_bytes(rest.trim_ascii_start())),
        })
    }

    /// Returns whether the mapping is of no file on a disk: it is anonymous, or a file in memory (memfd, huge pages). The
    /// kernel's own mappings, the heap and stacks, whose names are in brackets, do not count.
    pub fn is_of_no_file(&self) -> bool {
        let path = self.path.as_os_str().as_bytes();
        let in_memory = [&b"/memfd:"[..], b"/anon_hugepage"];
        (self.inode == 0 && !path.starts_with(b"["))
            || in_memory.iter().any(|start| path.starts_with(start))
    }

    /// Returns the device and the inode, which identify the mapped file.
    pub fn file_id(&self) -> FileId {
        (self.device, self.inode)
    }

    /// Returns the file's name without directories, escaped; a name such as `[vdso]` stays as it is.
    pub fn module(&self) -> String {
        let path = self.path.as_os_str().as_bytes();
        let path = path.strip_suffix(b" (deleted)").unwrap_or(path);
        text::escape_bytes(path.rsplit(|&byte| byte == b'/').next().unwrap_or(path))
    }
}

/// Files from which a process executes code.
#[derive(Debug, Default)]
pub struct CodeFiles {
    /// The open files, in the order of their mappings.
    pub files: Vec<MappedFile>,
    /// Why other files could not be opened.
    pub errors: Vec<anyhow::Error>,
}

/// Device (major and minor number) and inode.
pub type FileId = ((u32, u32), u64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_lines() {
        let line =
            b"7f00-8000 r-xp 00002000 fe:1a 1234                    /usr/lib/my lib.so (deleted)";
        let mapping = Mapping::parse(line).expect("a mapping");
        assert_eq!(mapping.range, 0x7f00..0x8000);
        assert!(mapping.executable);
        assert_eq!(mapping.file_offset, 0x2000);
        assert_eq!(mapping.device, (0xfe, 0x1a));
        assert_eq!(mapping.inode, 1234);
        assert_eq!(mapping.module(), "my lib.so");

        let anonymous = Mapping::parse(b"1000-2000 rw-p 00000000 00:00 0 ").expect("a mapping");
        assert_eq!(
            (anonymous.executable, anonymous.path.as_os_str().is_empty()),
            (false, true)
        );
        assert_eq!(Mapping::parse(b""), None);
        assert_eq!(Mapping::parse(b"garbage"), None);
    }

    #[test]
    fn fields_are_counted_behind_any_name() {
        let stat = Stat::parse(b"7 (a) R \xff) T 1 2 -3\n");
        assert_eq!(stat.field(Stat::STATE), Some('T'));
        assert_eq!((stat.field(4), stat.field(6)), (Some(1), Some(-3)));
        assert_eq!(stat.field::<u64>(6), None, "it is below 0");
        assert_eq!((stat.field::<u64>(7), stat.field::<u64>(2)), (None, None));
        assert_eq!(Stat::parse(b"").field::<char>(Stat::STATE), None);
    }

    #[test]
    fn damaged_lists_are_read_as_far_as_they_make_sense() {
        let list = include_bytes!("../../tests/hostile/corpus/maps");
        assert_eq!(Mapping::parse_list(list).count(), 6);
        for end in 0..list.len() {
            Mapping::parse_list(&list[..end]).for_each(drop);
            let mut damaged = list.to_vec();
            for byte in [0, b' ', b'-', b'\n', 0xff] {
                damaged[end] = byte;
                Mapping::parse_list(&damaged).for_each(drop);
            }
        }
    }

    #[test]
    fn our_own_process_is_a_native_program() {
        let process = Process::open(std::process::id()).expect("we run");
        process.expect_native_program().expect("we are native");
        assert!(!process.exited());
        let mappings = process.code_mappings().expect("our mappings");
        let CodeFiles { files, .. } = process.open_code(&mappings);
        let exe = std::env::current_exe().expect("our program");
        assert!(files.iter().any(|file| file.name() == exe), "{files:?}");
    }

    #[test]
    fn a_field_is_read_behind_a_name_that_is_not_utf_8() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        fs::write(&file, b"Name:\tt\xe9st\nTgid:\t4242\nVmSwap:\t  12 kB\n").expect("written");
        let value = |name: &str| field(file.path(), name);
        assert_eq!(value("Tgid:").as_deref(), Some("4242"));
        assert_eq!(value("VmSwap:").as_deref(), Some("12 kB"));
        assert_eq!((value("Name:"), value("Pid:")), (None, None));
    }

    #[test]
    fn a_number_that_no_process_has() {
        let error = Process::open(i32::MAX as u32).unwrap_err().to_string();
        assert!(error.contains("no process has PID"), "{error}");
    }
}
