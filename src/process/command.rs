//! Command to be traced: it is started, but held before exec until the probes are live.

use std::convert::Infallible;
use std::env;
use std::ffi::{CString, OsStr, OsString, c_char};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::ptr;

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, pipe2, read, write};

use crate::code::elf;
use crate::code::registers;
use crate::print::text;
use crate::process::inherited;
use crate::process::proc::Process;

/// Maximum time to wait for the command to end after SIGTERM, in milliseconds.
const TIME_TO_END: u16 = 3000;

/// Command line whose program was found.
#[derive(Debug)]
pub struct CommandLine {
    line: String,
    words: Vec<String>,
    program: PathBuf,
}

impl CommandLine {
    /// Splits the command line into words as a shell does, and finds the program.
    ///
    /// # Errors
    /// If a quote is not closed, or the program does not exist.
    pub fn parse(line: &str) -> Result<Self> {
        let words = split(line)?;
        let program = find_program(&words[0])?;
        let line = line.to_owned();
        Ok(Self {
            line,
            words,
            program,
        })
    }

    /// Returns the file to run.
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Starts the command, held before exec, and prints a message about it on stderr, as BCC does.
    ///
    /// # Errors
    /// If the command contains a NUL byte, or a pipe or a process cannot be created.
    pub fn start(&self) -> Result<HeldCommand> {
        crate::note!(
            "Executing '{}' and tracing the resulting process.",
            text::escape(&self.line)
        );
        HeldCommand::start(&self.program, &self.words)
    }
}

fn split(line: &str) -> Result<Vec<String>> {
    let words = shell_words::split(line).context("unbalanced quotes in the command")?;
    if words.is_empty() {
        bail!("the command is empty");
    }
    Ok(words)
}

/// Finds the file that the first word of a command names; searches PATH if the word contains no slash.
fn find_program(name: &str) -> Result<PathBuf> {
    let runnable = |path: &Path| {
        path.metadata()
            .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    if name.contains('/') {
        let path = PathBuf::from(name);
        if !path.exists() {
            bail!("{name}: no such file");
        }
        if !runnable(&path) {
            bail!("{name} is not a program that may be run; see: ls -l {name}");
        }
        return Ok(path);
    }
    let path = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    env::split_paths(&path)
        .map(|folder| folder.join(name))
        .find(|path| runnable(path))
        .with_context(|| format!("{name}: command not found in PATH"))
}

/// Returns the files from which a run of `program` will execute code: the program itself or the interpreter of its
/// `#!` line, and the libraries that its dynamic linker lists. No code of the program itself is run for this.
///
/// # Errors
/// If the program cannot be read, is of another architecture, or its dynamic linker does not list
/// its libraries.
pub fn code_files(program: &Path) -> Result<Vec<PathBuf>> {
    let program = script_interpreter(program)?.unwrap_or_else(|| program.to_owned());
    let file =
        File::open(&program).with_context(|| format!("failed to open {}", program.display()))?;
    if !elf::is_native(&file)? {
        bail!(
            "{} is not an {} program: only 64-bit programs of this machine's architecture can be \
             traced",
            program.display(),
            registers::NAME
        );
    }
    let mut files = vec![program.clone()];
    if let Some(linker) = elf::interpreter(&file)? {
        let linker = PathBuf::from(OsString::from_vec(linker));
        files.extend(libraries(&linker, &program)?);
        files.push(linker);
    }
    Ok(files)
}

/// Returns the program that the first line of a script runs. None if the file is no script.
fn script_interpreter(program: &Path) -> Result<Option<PathBuf>> {
    let mut head = Vec::new();
    File::open(program)
        .and_then(|file| file.take(256).read_to_end(&mut head))
        .with_context(|| format!("failed to read {}", program.display()))?;
    let Some(line) = head.strip_prefix(b"#!") else {
        return Ok(None);
    };
    let line = line
        .split(|&byte| byte == b'\n')
        .next()
        .unwrap_or_default()
        .trim_ascii();
    // The kernel passes everything behind the interpreter as one argument.
    let end = line.iter().position(u8::is_ascii_whitespace);
    let (interpreter, argument) = line.split_at(end.unwrap_or(line.len()));
    let run = if interpreter.ends_with(b"/env") {
        run_by_env(&String::from_utf8_lossy(argument))?
    } else {
        None
    };
    match run {
        Some(name) => find_program(&name).map(Some),
        None => Ok(Some(PathBuf::from(OsStr::from_bytes(interpreter)))),
    }
}

/// Returns the name of the program by which `env` replaces itself with this argument of a `#!` line: `NAME`, or
/// `-S [OPTION...] [VARIABLE=VALUE...] NAME ...`. None if the argument names no program.
fn run_by_env(argument: &str) -> Result<Option<String>> {
    const WITH_VALUE: [&str; 4] = ["-u", "--unset", "-C", "--chdir"];
    let argument = argument.trim_ascii();
    let split = ["--split-string=", "-S"];
    let split = split
        .iter()
        .find_map(|option| argument.strip_prefix(option));
    let words = shell_words::split(split.unwrap_or(argument))
        .context("unbalanced quotes in the first line of the script")?;
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if WITH_VALUE.contains(&&*word) {
            words.next();
        } else if !word.starts_with('-') && !word.contains('=') {
            return Ok(Some(word));
        }
    }
    Ok(None)
}

/// Lists the libraries that the dynamic linker of glibc or musl would load.
fn libraries(linker: &Path, program: &Path) -> Result<Vec<PathBuf>> {
    let listing = Command::new(linker)
        .arg("--list")
        .arg(program)
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("failed to run the dynamic linker {}", linker.display()))?;
    if !listing.status.success() {
        bail!(
            "{} cannot be run: {}",
            program.display(),
            String::from_utf8_lossy(&listing.stderr).trim()
        );
    }
    // "\tlibc.so.6 => /lib/libc.so.6 (0x00007f...)"
    Ok(listing
        .stdout
        .split(|&byte| byte == b'\n')
        .filter_map(|line| {
            let line = line.trim_ascii();
            let end = line.windows(4).rposition(|window| window == b" (0x")?;
            let start = line[..end]
                .windows(4)
                .position(|window| window == b" => ")
                .map_or(0, |at| at + 4);
            line[start..end]
                .starts_with(b"/")
                .then(|| PathBuf::from(OsStr::from_bytes(&line[start..end])))
        })
        .collect())
}

/// Child process that waits to become the command.
///
/// Dropping the value before [`HeldCommand::release`] ends the child without running the command.
pub struct HeldCommand {
    pid: Pid,
    release: Option<OwnedFd>,
    exec_error: OwnedFd,
    reaped: bool,
}

impl HeldCommand {
    /// Forks the child, which inherits our stdin, stdout, stderr and environment.
    fn start(program: &Path, words: &[String]) -> Result<Self> {
        let to_c = |word: &OsStr| {
            CString::new(word.as_bytes()).map_err(|_| anyhow!("the command has a NUL byte in it"))
        };
        let path = to_c(program.as_os_str())?;
        let args = words
            .iter()
            .map(|word| to_c(OsStr::new(word)))
            .collect::<Result<Vec<_>>>()?;
        let mut argv: Vec<*const c_char> = args.iter().map(|arg| arg.as_ptr()).collect();
        argv.push(ptr::null());
        let (wait_for_release, release) =
            pipe2(OFlag::O_CLOEXEC).context("failed to open a pipe")?;
        let (exec_error, report_error) =
            pipe2(OFlag::O_CLOEXEC).context("failed to open a pipe")?;

        // SAFETY: the child makes system calls only, and allocates nothing before exec.
        match unsafe { fork() }.context("failed to fork")? {
            ForkResult::Parent { child } => Ok(Self {
                pid: child,
                release: Some(release),
                exec_error,
                reaped: false,
            }),
            ForkResult::Child => {
                drop(release);
                let Err(errno) = become_command(&wait_for_release, &path, &argv);
                let _ = write(&report_error, &(errno as i32).to_ne_bytes());
                // SAFETY: ends the child at once, without running the parent's exit handlers.
                unsafe { libc::_exit(127) }
            }
        }
    }

    /// Returns the PID of the child, which stays the same when the child becomes the command.
    pub fn pid(&self) -> u32 {
        self.pid.as_raw().cast_unsigned()
    }

    /// Lets the child become the command, and waits until exec has succeeded or failed.
    ///
    /// # Errors
    /// If the child has exited, or exec fails: with the error of exec.
    pub fn release(&mut self) -> Result<()> {
        if let Some(release) = self.release.take() {
            write(&release, b"g").context("the stopped command has exited")?;
        }
        let mut errno = [0; 4];
        match read(&self.exec_error, &mut errno) {
            Ok(0) => Ok(()),
            Ok(_) => Err(io::Error::from_raw_os_error(i32::from_ne_bytes(errno)))
                .context("failed to run the command"),
            Err(error) => Err(error).context("failed to start the command"),
        }
    }

    /// Terminates the command if it still runs, because processes that the tool has started end with it, and reaps
    /// the command. A command that does not end on SIGTERM is left running, and a message names it.
    ///
    /// Returns the command's own exit status, as a shell reports it. None if we terminated the command.
    ///
    /// # Errors
    /// If the kernel does not let us wait for the command.
    pub fn finish(&mut self) -> Result<Option<u8>> {
        let now = || waitpid(self.pid, Some(WaitPidFlag::WNOHANG)).context("failed to wait");
        let status = now()?;
        self.reaped = true;
        if status != WaitStatus::StillAlive {
            return Ok(Some(match status {
                WaitStatus::Exited(_, code) => code as u8,
                WaitStatus::Signaled(_, signal, _) => 128 + signal as u8,
                _ => 0,
            }));
        }
        let process = Process::open(self.pid())?;
        let _ = kill(self.pid, Signal::SIGTERM);
        // A stopped command handles SIGTERM only after SIGCONT.
        let _ = kill(self.pid, Signal::SIGCONT);
        let mut ended = [PollFd::new(process.as_fd(), PollFlags::POLLIN)];
        while poll(&mut ended, PollTimeout::from(TIME_TO_END)) == Err(Errno::EINTR) {}
        if now()? == WaitStatus::StillAlive {
            crate::note!(
                "the command, process {0}, has not ended on SIGTERM and is left to run; to end it: \
                 kill -KILL {0}",
                self.pid()
            );
        }
        Ok(None)
    }
}

impl Drop for HeldCommand {
    fn drop(&mut self) {
        // When the pipe is closed without a byte, the child reads its end and exits.
        self.release = None;
        if !self.reaped {
            let _ = self.finish();
        }
    }
}

/// Turns the child into the command: restores signals as the caller had them, waits for a byte from the parent, and
/// calls exec.
fn become_command(
    wait_for_release: &OwnedFd,
    path: &CString,
    argv: &[*const c_char],
) -> Result<Infallible, Errno> {
    inherited::restore()?;
    // The following calls are first made without effect, so that the pages of their code are mapped. Otherwise page
    // faults of ours would be counted as the command's: after a fork they occur again on each file page.
    let mut word = [0; 1];
    let _ = read(wait_for_release, &mut word[..0]);
    // SAFETY: as below; an empty path names no file.
    unsafe { libc::execv(c"".as_ptr(), argv.as_ptr()) };
    let _ = Errno::last();
    if read(wait_for_release, &mut word)? == 0 {
        return Err(Errno::ECANCELED);
    }
    // SAFETY: `argv` points to C strings that outlive the call, and ends with a null pointer.
    unsafe { libc::execv(path.as_ptr(), argv.as_ptr()) };
    Err(Errno::last())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_lines_are_split_as_a_shell_would() {
        assert_eq!(
            split("prog 'two words' \"a b\" c\\ d").expect("words"),
            ["prog", "two words", "a b", "c d"]
        );
        assert!(split("prog 'open").is_err());
        assert!(split("  ").is_err());
    }

    #[test]
    fn a_missing_command_is_named() {
        let error = find_program("no-such-command-here")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("no-such-command-here: command not found"),
            "{error}"
        );
        assert!(find_program("/no/such/file").is_err());
        assert!(find_program(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml")).is_err());
    }

    #[test]
    fn a_dynamic_program_lists_its_libc() {
        let shell = find_program("sh").expect("a shell");
        let files = code_files(&shell).expect("its files");
        assert!(
            files
                .iter()
                .any(|file| file.to_string_lossy().contains("libc.so")),
            "{files:?}"
        );
    }

    #[test]
    fn a_script_is_traced_as_its_interpreter() {
        let folder = tempfile::tempdir().expect("a directory");
        let script = folder.path().join("script");
        let shell = find_program("sh").expect("sh");
        for line in [
            "/usr/bin/env sh".to_owned(),
            "/usr/bin/env  sh ".to_owned(),
            "/usr/bin/env -S sh -e".to_owned(),
            format!("{} -e", shell.display()),
        ] {
            std::fs::write(&script, format!("#!{line}\necho\n")).expect("a script");
            assert_eq!(code_files(&script).expect("its files")[0], shell, "{line}");
        }
    }

    #[test]
    fn env_runs_what_follows_its_options() {
        let run = |argument| run_by_env(argument).expect("balanced quotes");
        for argument in [
            " prog",
            "  prog -x",
            "-S prog -x",
            "-Sprog -x",
            "-S  -i -u HOME A=b prog -x",
            "--split-string=prog -x",
            "-vS 'prog' -x",
        ] {
            assert_eq!(run(argument).as_deref(), Some("prog"), "{argument}");
        }
        assert_eq!((run(""), run("-S A=b")), (None, None));
        assert!(run_by_env("-S 'prog").is_err());
    }

    #[test]
    fn the_command_runs_only_when_released_and_its_status_is_passed_on() {
        let folder = tempfile::tempdir().expect("a directory");
        let trace = folder.path().join("ran");
        let words = split(&format!("sh -c 'echo > {}; exit 7'", trace.display())).expect("words");
        let program = find_program(&words[0]).expect("sh");

        let held = HeldCommand::start(&program, &words).expect("a child");
        drop(held);
        assert!(!trace.exists(), "it ran without having been released");

        let mut command = HeldCommand::start(&program, &words).expect("a child");
        let process = crate::process::proc::Process::open(command.pid()).expect("it is there");
        command.release().expect("it runs");
        while !process.exited() {
            std::thread::yield_now();
        }
        assert_eq!(command.finish().expect("it has ended"), Some(7));
        assert!(trace.exists());
    }
}
