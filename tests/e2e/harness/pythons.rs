//! The Pythons of the machine, and those that scripts/pythons has unpacked.

use std::env;
use std::fmt;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// The folder to chroot into that scripts/pythons makes.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("target/pythons")
}

/// A Python.
#[derive(Debug)]
pub(crate) struct Python {
    /// The program, as it is called within its root.
    program: PathBuf,
    /// What it has as its root, with a C library of its own, if it has one.
    root: Option<PathBuf>,
}

impl Python {
    /// The Python that is first in PATH, those of pyenv from 3.10 on, and those that were unpacked.
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

    /// The Pythons that were unpacked.
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

    /// This Python with other bytes in its program, which is put into the folder that it will run in.
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

    /// What runs one of the scripts of tests/workload in this folder.
    pub(crate) fn command(&self, script: &str, folder: &Path) -> Result<Command> {
        let scripts = crate::harness::sources();
        fs::copy(scripts.join(script), folder.join(script)).context("no such script")?;
        let mut command = self.in_folder(folder);
        command.arg(script);
        Ok(command)
    }

    /// What runs this Python in this folder.
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

/// The names in a folder that begin so.
fn names(folder: &Path, begin: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let names = entries.filter_map(|entry| entry.file_name().into_string().ok());
    names.filter(|name| name.starts_with(begin)).collect()
}
