//! Files that are written whole or not at all: each is written beside the old file, which is then replaced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Error, Result, ensure};

use crate::print::text;

/// File that is written whole or not at all: a draft takes its place.
#[derive(Debug)]
pub struct AtomicFile {
    path: PathBuf,
    /// Path of the file that is written, until the content is complete.
    draft: PathBuf,
}

impl AtomicFile {
    /// Checks that a file can be written at `path`, before anything is traced.
    ///
    /// # Errors
    /// If `path` exists and is not a regular file, such as a device, which would be lost; or if the folder cannot be
    /// written to.
    pub fn at(path: &Path) -> Result<Self> {
        // The target of a symbolic link is replaced, not the link.
        let path = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let shown = text::escape_bytes(path.as_os_str().as_encoded_bytes());
        let name = path
            .file_name()
            .with_context(|| format!("failed to write {shown}: not the name of a file"))?;
        expect_file(&path)?;
        let mut draft = std::ffi::OsString::from(".");
        draft.push(name);
        draft.push(format!(".{}", std::process::id()));
        let file = Self {
            draft: path.with_file_name(draft),
            path,
        };
        let check = || -> io::Result<()> {
            drop(file.create()?);
            fs::remove_file(&file.draft)
        };
        check().with_context(|| format!("failed to write {shown}"))?;
        Ok(file)
    }

    /// The file's path, escaped.
    pub fn name(&self) -> String {
        text::escape_bytes(self.path.as_os_str().as_encoded_bytes())
    }

    /// Writes the whole file, and puts it in the place of the old one.
    ///
    /// # Errors
    /// If the file cannot be written. The old file is then unchanged.
    pub fn write(&self, content: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
        let write = || -> Result<()> {
            let mut out = BufWriter::new(self.create()?);
            content(&mut out)?;
            out.into_inner()?.sync_all()?;
            Ok(fs::rename(&self.draft, &self.path)?)
        };
        write().inspect_err(|_| {
            // The write error is reported; an error of the removal would add nothing.
            let _ = fs::remove_file(&self.draft);
        })
    }

    /// Creates the draft as a new file: a symbolic link that somebody put at its name is not followed.
    fn create(&self) -> io::Result<File> {
        let new = || {
            let mut options = OpenOptions::new();
            options.write(true).create_new(true).open(&self.draft)
        };
        match new() {
            // An earlier tool with the same pid left the draft when it was killed.
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                fs::remove_file(&self.draft)?;
                new()
            }
            outcome => outcome,
        }
    }
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
        Ok(Self {
            file: AtomicFile::at(path)?,
            failed: None,
        })
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

/// Fails if `path` exists and is not a regular file.
pub(super) fn expect_file(path: &Path) -> Result<()> {
    if let Ok(there) = fs::metadata(path) {
        ensure!(
            there.is_file(),
            "failed to write {}: it is there, and no file; name another one",
            text::escape_bytes(path.as_os_str().as_encoded_bytes())
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use anyhow::bail;

    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder");
        let name = |entry: io::Result<fs::DirEntry>| entry.expect("an entry").file_name();
        let mut names: Vec<String> = entries
            .map(|entry| name(entry).into_string().expect("UTF-8"))
            .collect();
        names.sort();
        names
    }

    #[test]
    fn it_is_there_whole_or_as_before() {
        let folder = tempfile::tempdir().expect("a folder");
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
        let folder = tempfile::tempdir().expect("a folder");
        for wrong in ["/dev/null", "/", "/proc/x.svg", "/nonexistent/x.svg"] {
            let error = AtomicFile::at(Path::new(wrong)).expect_err(wrong);
            assert!(format!("{error:#}").contains(wrong), "{error:#}");
        }
        assert!(AtomicFile::at(folder.path()).is_err());
    }

    #[test]
    fn a_link_stays_and_its_file_is_replaced() {
        let folder = tempfile::tempdir().expect("a folder");
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
    fn a_failure_is_forgotten_once_the_file_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
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
