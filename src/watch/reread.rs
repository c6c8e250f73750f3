//! Files of /proc and of cgroups that stay open and are read again and again.

use std::cell::Cell;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

/// Size of the first read, in bytes. The files of one cgroup or process are smaller.
const FIRST: usize = 8 << 10;

/// Number of files that may still be opened and kept open.
#[derive(Debug, Clone)]
pub struct FileBudget(Rc<Cell<usize>>);

impl FileBudget {
    /// Creates a budget of this number of open files.
    pub fn new(files: usize) -> Self {
        Self(Rc::new(Cell::new(files)))
    }

    /// Returns the number of files that may still be kept open.
    pub fn left(&self) -> usize {
        self.0.get()
    }
}

/// File that is read from its beginning at each look. Beyond the budget, the file is opened for each read.
#[derive(Debug)]
pub struct Reread {
    path: PathBuf,
    /// The open file, with the budget that it belongs to.
    kept: Option<(File, FileBudget)>,
}

impl Reread {
    /// Opens a file.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn open(path: PathBuf, budget: &FileBudget) -> io::Result<Self> {
        let file = File::open(&path)?;
        let left = budget.left();
        if left == 0 {
            return Ok(Self { path, kept: None });
        }
        budget.0.set(left - 1);
        let kept = Some((file, budget.clone()));
        Ok(Self { path, kept })
    }

    /// Path of the file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Reads the whole file into `buffer`, whose memory is reused, and returns the content.
    ///
    /// # Errors
    /// If the file cannot be read: ENODEV for a removed cgroup, ESRCH for a process that has exited.
    pub fn read<'a>(&self, buffer: &'a mut Vec<u8>) -> io::Result<&'a [u8]> {
        let length = match &self.kept {
            Some((file, _)) => read_at_start(file, buffer)?,
            None => read_at_start(&File::open(&self.path)?, buffer)?,
        };
        Ok(&buffer[..length])
    }
}

impl Drop for Reread {
    fn drop(&mut self) {
        if let Some((_, budget)) = &self.kept {
            budget.0.set(budget.left() + 1);
        }
    }
}

/// Reads until the end of the file. The kernel makes the content of such a file as a whole at each read from its
/// beginning, so that a read that does not fill the buffer is complete.
fn read_at_start(file: &File, buffer: &mut Vec<u8>) -> io::Result<usize> {
    buffer.resize(buffer.len().max(FIRST), 0);
    let mut length = 0;
    loop {
        match file.read_at(&mut buffer[length..], length as u64) {
            Ok(read) => length += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        }
        if length < buffer.len() {
            return Ok(length);
        }
        buffer.resize(2 * buffer.len(), 0);
    }
}

/// Parses a file that contains one number. None for `max`.
pub(crate) fn number(content: &[u8]) -> Option<u64> {
    str::from_utf8(content).ok()?.trim_ascii().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_is_read_anew_and_whole() {
        let folder = tempfile::tempdir().expect("a directory");
        let path = folder.path().join("x");
        let budget = FileBudget::new(1);
        fs::write(&path, "37\n").expect("a file");
        let kept = Reread::open(path.clone(), &budget).expect("a file");
        let opened = Reread::open(path.clone(), &budget).expect("a file");
        let mut buffer = Vec::new();
        for file in [&kept, &opened] {
            assert_eq!(file.read(&mut buffer).ok().and_then(number), Some(37));
        }
        fs::write(&path, vec![b'x'; 3 * FIRST]).expect("a file");
        assert_eq!(kept.read(&mut buffer).expect("a file").len(), 3 * FIRST);
        fs::write(&path, "5\n").expect("a file");
        assert_eq!(kept.read(&mut buffer).ok().and_then(number), Some(5));
        // Another file of the same name.
        fs::remove_file(&path).expect("it is there");
        fs::write(&path, "7\n").expect("a file");
        assert_eq!(kept.read(&mut buffer).ok().and_then(number), Some(5));
        assert_eq!(opened.read(&mut buffer).ok().and_then(number), Some(7));
        assert_eq!(budget.left(), 0);
        drop((kept, opened));
        assert_eq!(budget.left(), 1);
    }

    #[test]
    fn a_process_that_has_exited_cannot_be_read_any_more() {
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .expect("sleep(1)");
        let path = PathBuf::from(format!("/proc/{}/statm", child.id()));
        let file = Reread::open(path, &FileBudget::new(1)).expect("a file");
        let mut buffer = Vec::new();
        assert!(file.read(&mut buffer).is_ok());
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        let error = file.read(&mut buffer).expect_err("it has exited");
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
