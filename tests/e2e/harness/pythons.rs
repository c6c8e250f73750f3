//! The Pythons of the machine, and the Pythons that scripts/pythons has unpacked.

use std::env;
use std::fmt;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Returns the directory that scripts/pythons makes; its Pythons run with this directory as their root.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/pythons")
}

/// Installed Python interpreter.
#[derive(Debug)]
pub(crate) struct Python {
    /// Path of the program within its root.
    program: PathBuf,
    /// Folder that the program runs in as its root, with a C library of its own. None for a Python of the host.
    root: Option<PathBuf>,
}

impl Python {
    /// Returns the Python that is first in PATH, pyenv's Pythons from 3.10 on, and the unpacked Pythons.
    pub(crate) fn all() -> Result<Vec<Self>> {
        let home = env::var_os("HOME").unwrap_or_default();
        let versions = Path::new(&home).join(".pyenv/versions");
        let of_pyenv = names(&versions, "3.1").into_iter().map(|name| Self {
            program: versions.join(name).join("bin/python3"),
            root: None,
        });
        let first = Self {
            program: "python3".into(),
            root: None,
        };
        let installed = [first].into_iter().chain(of_pyenv);
        Ok(installed.chain(Self::unpacked()?).collect())
    }

    /// Returns the Pythons that scripts/pythons has unpacked.
    pub(crate) fn unpacked() -> Result<Vec<Self>> {
        let root = root();
        let names = names(&root.join("usr/bin"), "python3.");
        ensure!(!names.is_empty(), "no Python in {}", root.display());
        let unpacked = names.into_iter().map(|name| Self {
            program: Path::new("/usr/bin").join(name),
            root: Some(root.clone()),
        });
        Ok(unpacked.collect())
    }

    /// Writes this Python's program, changed by `change`, into `folder`, in which it will run. Returns the
    /// changed Python.
    pub(crate) fn changed(&self, folder: &Path, change: impl FnOnce(&mut [u8])) -> Result<Self> {
        const NAME: &str = "changed";
        let root = self.root.as_deref().context("it has no root")?;
        let mut program = fs::read(root.join(self.program.strip_prefix("/")?))?;
        change(&mut program);
        let path = folder.join(NAME);
        fs::write(&path, program)?;
        fs::set_permissions(path, Permissions::from_mode(0o755))?;
        Ok(Self {
            program: Path::new("/mnt").join(NAME),
            root: self.root.clone(),
        })
    }

    /// Copies a script of tests/workload into `folder`, and returns the command that runs it there.
    pub(crate) fn command(&self, script: &str, folder: &Path) -> Result<Command> {
        let scripts = crate::harness::sources();
        fs::copy(scripts.join(script), folder.join(script)).context("no such script")?;
        let mut command = self.in_folder(folder);
        command.arg(script);
        Ok(command)
    }

    /// Returns a command that runs this Python in `folder`.
    pub(crate) fn in_folder(&self, folder: &Path) -> Command {
        const IN_ROOT: &str = "mount -t proc proc \"$1/proc\" && mount --bind \"$2\" \"$1/mnt\" && \
                               root=$1 && shift 2 && exec unshare --root=\"$root\" --wd=/mnt \"$@\"";
        let Some(root) = &self.root else {
            let mut command = Command::new(&self.program);
            command.current_dir(folder);
            return command;
        };
        let mut command = Command::new("unshare");
        command.args(["--mount", "sh", "-c", IN_ROOT, "sh"]);
        command.args([root, folder, &self.program]);
        command
    }
}

impl fmt::Display for Python {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let root = self.root.as_deref().unwrap_or(Path::new(""));
        write!(f, "{}{}", root.display(), self.program.display())
    }
}

/// Returns the names in a directory that begin with `begin`.
fn names(folder: &Path, begin: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(begin)).collect()
}
