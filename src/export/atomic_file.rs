//! Files that are written whole or not at all: each is written beside the old file, which is then replaced.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Error, Result};
use nix::errno::Errno;
use nix::sys::stat::{FileStat, Mode, fchmod, fstat};
use nix::unistd::{Gid, Uid, fchown};
use xattr::FileExt;

use crate::print::file_name::{Draft, FileName, PRIVATE, PUBLIC};

/// Extended attributes that describe the content of a file. They do not hold for another content.
const OF_CONTENT: [&str; 3] = ["security.capability", "security.ima", "security.evm"];

/// File that is written whole or not at all: a draft takes its place. A file that is replaced keeps its mode, owner and
/// extended attributes; a new one can be read by its owner only.
#[derive(Debug)]
pub struct AtomicFile {
    place: FileName,
    /// Mode of a new file.
    mode: Mode,
}

impl AtomicFile {
    /// Checks that a file can be written at `path`, before anything is traced.
    ///
    /// # Errors
    /// If `path` exists and is not a regular file, such as a device, which would be lost; if another user could have
    /// the file written to another place; or if the directory cannot be written to.
    pub fn at(path: &Path) -> Result<Self> {
        Self::with_mode(path, PRIVATE)
    }

    /// [`AtomicFile::at`] for a file that a program of another user reads.
    ///
    /// # Errors
    /// See [`AtomicFile::at`].
    pub fn readable_at(path: &Path) -> Result<Self> {
        Self::with_mode(path, PUBLIC)
    }

    fn with_mode(path: &Path, mode: Mode) -> Result<Self> {
        let place = FileName::find(path)?;
        let file = Self { place, mode };
        file.draft()
            .and_then(|(draft, existing)| inherit(&draft.file, existing.as_ref()))
            .with_context(|| format!("failed to write {}", file.name()))?;
        Ok(file)
    }

    /// The file's path, escaped.
    pub fn name(&self) -> &str {
        self.place.shown()
    }

    /// Writes the whole file, and replaces the old one.
    ///
    /// # Errors
    /// If the file cannot be written. The old file is then unchanged.
    pub fn write(&self, content: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let (draft, existing) = self.draft()?;
        let mut out = BufWriter::new(&draft.file);
        content(&mut out)?;
        out.into_inner().map_err(io::IntoInnerError::into_error)?;
        inherit(&draft.file, existing.as_ref())?;
        draft.file.sync_all()?;
        Ok(draft.replace()?)
    }

    /// Creates the draft. Also returns the file that it is to replace, if there is one.
    fn draft(&self) -> Result<(Draft<'_>, Option<Existing>)> {
        let existing = self.place.replaceable()?;
        let existing = existing.map(|status| -> io::Result<_> {
            let file = self.place.open_existing()?;
            Ok(Existing { status, file })
        });
        let existing = existing.transpose()?;
        // Others read neither more nor earlier than the old file's mode lets them.
        let mode = if existing.is_some() {
            PRIVATE
        } else {
            self.mode
        };
        Ok((self.place.create_draft(mode)?, existing))
    }
}

/// A file that is to be replaced.
struct Existing {
    status: FileStat,
    /// The file, open for reading.
    file: File,
}

/// Gives a draft the extended attributes, the mode and the owner of the file that it replaces.
fn inherit(draft: &File, existing: Option<&Existing>) -> Result<()> {
    let Some(Existing { status, file }) = existing else {
        return Ok(());
    };
    inherit_attributes(draft, file)?;
    // Without the bits by which a program runs as the file's owner.
    let mode = Mode::from_bits_truncate(status.st_mode & 0o777);
    let own = fstat(draft).map_err(io::Error::from)?;
    if own.st_mode & 0o777 != mode.bits() {
        let changed = fchmod(draft.as_fd(), mode).map_err(io::Error::from);
        changed.context("failed to keep the file's mode")?;
    }
    let (owner, group) = (status.st_uid, status.st_gid);
    if (own.st_uid, own.st_gid) != (owner, group) {
        let changed = fchown(
            draft,
            Some(Uid::from_raw(owner)),
            Some(Gid::from_raw(group)),
        );
        changed.map_err(io::Error::from).with_context(|| {
            format!("failed to keep the file's owner, {owner}:{group}; remove the file, or name another one")
        })?;
    }
    Ok(())
}

fn inherit_attributes(draft: &File, file: &File) -> Result<()> {
    let names = match file.list_xattr() {
        Err(error) if is_unsupported(&error) => return Ok(()),
        names => names?,
    };
    for name in names {
        if OF_CONTENT.iter().any(|&other| name == other) {
            continue;
        }
        let Some(value) = file.get_xattr(&name)? else {
            continue;
        };
        // Security modules set some attributes of the draft themselves.
        if draft.get_xattr(&name).ok().flatten().as_ref() != Some(&value) {
            draft.set_xattr(&name, &value).with_context(|| {
                let name = name.display();
                format!("failed to keep the file's attribute {name}; remove the file, or name another one")
            })?;
        }
    }
    Ok(())
}

fn is_unsupported(error: &io::Error) -> bool {
    error.raw_os_error() == Some(Errno::EOPNOTSUPP as i32)
}

/// A file that a tool replaces again and again. After a failure the trace goes on.
#[derive(Debug)]
pub(super) struct Refreshed {
    file: AtomicFile,
    /// Reason why the file does not have the last content.
    failed: Option<Error>,
}

impl Refreshed {
    /// Checks that a file can be written at `path`.
    ///
    /// # Errors
    /// See [`AtomicFile::at`].
    pub(super) fn at(path: &Path) -> Result<Self> {
        Ok(Self::of(AtomicFile::at(path)?))
    }

    /// Makes the file one that is written again and again.
    pub(super) fn of(file: AtomicFile) -> Self {
        Self { file, failed: None }
    }

    /// Writes the whole file. The reason of a failure is printed at once and returned by [`Refreshed::finish`].
    pub(super) fn write(&mut self, content: impl FnOnce(&mut dyn Write) -> Result<()>) {
        let written = self.file.write(content);
        let written = written.with_context(|| format!("failed to write {}", self.file.name()));
        let failed = written.err();
        // A disk that stays full is reported once.
        if let Some(error) = &failed
            && self.failed.is_none()
        {
            crate::message!("{error:#}");
        }
        self.failed = failed;
    }

    /// Ends the run.
    ///
    /// # Errors
    /// If the last content could not be written.
    pub(super) fn finish(self) -> Result<()> {
        self.failed.map_or(Ok(()), Err)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

    use anyhow::bail;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a directory");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<String> = entries
            .map(|entry| name(entry).into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn it_is_there_whole_or_as_before() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.svg");
        let file = AtomicFile::at(&path).expect("writable");
        assert_eq!(
            names(folder.path()),
            [""; 0],
            "nothing is left of the check"
        );
        file.write(|out| Ok(out.write_all(b"one")?)).expect("room");
        let half = file.write(|out| {
            out.write_all(b"tw")?;
            bail!("no more")
        });
        assert_eq!(half.expect_err("it failed").to_string(), "no more");
        assert_eq!(fs::read(&path).expect("a file"), b"one");
        file.write(|out| Ok(out.write_all(b"two")?)).expect("room");
        assert_eq!(fs::read(&path).expect("a file"), b"two");
        assert_eq!(names(folder.path()), ["a.svg"]);
    }

    #[test]
    fn what_cannot_be_written_is_told_at_once() {
        let folder = tempfile::tempdir().expect("a directory");
        for wrong in ["/dev/null", "/", "/proc/x.svg", "/nonexistent/x.svg"] {
            let error = AtomicFile::at(Path::new(wrong)).expect_err(wrong);
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
        assert!(AtomicFile::at(folder.path()).is_err());
    }

    #[test]
    fn a_link_stays_and_its_file_is_replaced() {
        let folder = tempfile::tempdir().expect("a directory");
        let (file, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&file, "old").expect("room");
        symlink(&file, &link).expect("a link");
        let replaced = AtomicFile::at(&link).expect("writable");
        replaced
            .write(|out| Ok(out.write_all(b"new")?))
            .expect("room");
        assert_eq!(fs::read(&file).expect("a file"), b"new");
        assert!(fs::symlink_metadata(&link).expect("a link").is_symlink());
    }

    #[test]
    fn a_file_keeps_its_mode_owner_and_attributes() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.svg");
        let mode = || fs::metadata(&path).expect("a file").mode() & 0o7777;
        let write = |file: &AtomicFile| file.write(|out| Ok(out.write_all(b"x")?)).expect("room");
        let file = AtomicFile::at(&path).expect("writable");
        write(&file);
        assert_eq!(mode(), 0o600, "others may read what was in memory");
        fs::set_permissions(&path, PermissionsExt::from_mode(0o4640)).expect("it is ours");
        xattr::set(&path, "user.of", b"seven").expect("tmpfs and ext4 have attributes");
        let is_root = Uid::effective().is_root();
        if is_root {
            std::os::unix::fs::chown(&path, Some(1007), Some(1009)).expect("root may");
        }
        write(&AtomicFile::at(&path).expect("writable"));
        write(&file);
        assert_eq!(mode(), 0o640);
        let kept = xattr::get(&path, "user.of").expect("readable");
        assert_eq!(kept.as_deref(), Some(&b"seven"[..]));
        let owner = fs::metadata(&path).expect("a file");
        if is_root {
            assert_eq!((owner.uid(), owner.gid()), (1007, 1009));
        }
        assert_eq!(names(folder.path()), ["a.svg"]);
        let path = folder.path().join("a.prom");
        write(&AtomicFile::readable_at(&path).expect("writable"));
        let mode = fs::metadata(&path).expect("a file").mode();
        assert_eq!(mode & 0o044, 0o044, "a collector cannot read it");
    }

    #[test]
    fn a_failure_is_forgotten_once_the_file_is_written() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("a.prom");
        let mut file = Refreshed::at(&path).expect("writable");
        file.write(|_| bail!("no more"));
        assert!(file.failed.is_some() && !path.exists());
        file.write(|out| Ok(out.write_all(b"one")?));
        file.write(|out| Ok(out.write_all(b"two")?));
        file.finish().expect("it is written");
        assert_eq!(fs::read(&path).expect("a file"), b"two");
        let mut file = Refreshed::at(&path).expect("writable");
        file.write(|_| bail!("no more"));
        let error = file.finish().expect_err("it failed");
        let error = format!("{error:#}");
        assert!(error.ends_with("a.prom: no more"), "{error}");
    }
}
