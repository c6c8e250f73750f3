//! File that another user may control, opened once.
//!
//! The user who runs a process chooses what the process maps, and what its paths mean later: a FIFO, a device or a
//! link can take the place of a library. So a file is opened without following links and without waiting. Then it is
//! checked to be a regular file, and to be the mapped file, by device and inode. All further use of the file,
//! including attaching, goes through this descriptor.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use memmap2::MmapOptions;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag, openat2};

use crate::print::text;
use crate::process::proc::{self, FileId, Mapping};

/// Open file from which a process executes code, regardless of what its path means now. The file is held open until
/// the value and all its clones are dropped.
#[derive(Debug, Clone)]
pub struct MappedFile {
    file: Arc<File>,
    name: PathBuf,
}

impl MappedFile {
    /// Opens the file of a mapping. It is opened through the mapping itself, which works for deleted files, too. If
    /// the kernel denies this, or the process has exited, the file is opened by its path.
    ///
    /// # Errors
    /// `NotFound` if the file cannot be found any more; `InvalidInput` if it is no regular file.
    pub fn open(pid: u32, mapping: &Mapping) -> io::Result<Self> {
        let file = open_mapped(pid, mapping)?;
        Ok(Self {
            file: Arc::new(file),
            name: mapping.path.clone(),
        })
    }

    /// Opens a file that the user of the tool has named. Links are followed.
    ///
    /// # Errors
    /// If it cannot be opened, or is no regular file.
    pub fn open_path(path: &Path) -> io::Result<Self> {
        Ok(Self {
            file: Arc::new(open_regular(path)?),
            name: path.to_owned(),
        })
    }

    /// Returns the open file.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns a path by which we, and the kernel on our behalf, reach exactly this file while it is open.
    pub fn path(&self) -> PathBuf {
        by_descriptor(&*self.file)
    }

    /// Returns the path in the process's own mount namespace, which may mean another file by now.
    pub fn name(&self) -> &Path {
        &self.name
    }

    /// Returns the device and the inode, which identify the file among those that we have opened.
    ///
    /// # Errors
    /// If the metadata cannot be read.
    pub fn identity(&self) -> io::Result<(u64, u64)> {
        let metadata = self.file.metadata()?;
        Ok((metadata.dev(), metadata.ino()))
    }

    /// Returns the file's name without directories, escaped.
    pub fn module(&self) -> String {
        let name = self.name.file_name().unwrap_or(self.name.as_os_str());
        text::escape_bytes(name.as_bytes())
    }
}

/// Opens a regular file for reading, and no other kind of file. Links are followed.
///
/// The first open uses O_PATH: it runs no code of a device and does not wait for the writer of a FIFO.
///
/// # Errors
/// If it cannot be opened for reading, or is no regular file.
pub(crate) fn open_regular(path: &Path) -> io::Result<File> {
    let found = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_PATH)
        .open(path)?;
    read_regular(&OwnedFd::from(found))
}

/// Opens the file of an O_PATH descriptor for reading.
fn read_regular(found: &OwnedFd) -> io::Result<File> {
    let found_file = File::from(found.try_clone()?);
    if !found_file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "not a regular file",
        ));
    }
    // A link of /proc to a descriptor leads to exactly its file. Without O_NONBLOCK, a process that holds a lease on
    // a file (fcntl F_SETLEASE) would make us wait for 45 s.
    OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
        .open(by_descriptor(found))
}

/// Opens a path with `root` as the root directory, without following any link.
///
/// # Errors
/// The error of openat2(2), and `InvalidInput` if the path names no regular file.
pub(crate) fn open_within(root: impl AsFd, path: &Path) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_SYMLINKS);
    read_regular(&openat2(root, path, how)?)
}

/// Opens a file whose name does not come from the kernel. Its directory may be a link within `root`, as `/tmp` can be,
/// but the file itself may not.
///
/// # Errors
/// If it cannot be opened for reading, is a link, or is no regular file.
pub(crate) fn open_own(root: impl AsFd, path: &Path) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    read_regular(&openat2(root, path, how)?)
}

/// Opens a file that an administrator has installed: links are followed, but none leads out of `root`.
///
/// # Errors
/// The error of openat2(2), and `InvalidInput` if the path names no regular file.
pub(crate) fn open_installed(root: impl AsFd, path: &Path) -> io::Result<File> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_IN_ROOT | ResolveFlag::RESOLVE_NO_MAGICLINKS);
    read_regular(&openat2(root, path, how)?)
}

/// Opens the root directory of a process, for openat2(2).
///
/// # Errors
/// If the process has exited, or permission is denied.
pub fn root_of(pid: u32) -> io::Result<File> {
    let root = proc::file(pid, "root");
    let flags = libc::O_PATH | libc::O_DIRECTORY;
    OpenOptions::new().read(true).custom_flags(flags).open(root)
}

/// Returns the root directories to which a process's paths may refer: its own while it runs, and ours.
pub fn roots(pid: u32) -> impl Iterator<Item = File> {
    [root_of(pid), File::open("/")].into_iter().flatten()
}

fn open_mapped(pid: u32, mapping: &Mapping) -> io::Result<File> {
    let Range { start, end } = mapping.range;
    let through_mapping = proc::file(pid, &format!("map_files/{start:x}-{end:x}"));
    let error = match open_regular(&through_mapping) {
        Ok(file) if is_of(&file, mapping) => return Ok(file),
        Ok(_) => io::ErrorKind::NotFound.into(),
        Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Err(error),
        Err(error) => error,
    };
    let mut opened = roots(pid).filter_map(|root| open_within(root, &mapping.path).ok());
    opened.find(|file| is_of(file, mapping)).ok_or(error)
}

/// Returns whether a file is the mapped file.
fn is_of(file: &File, mapping: &Mapping) -> bool {
    let by_name = file.metadata().is_ok_and(|metadata| {
        let device = (libc::major(metadata.dev()), libc::minor(metadata.dev()));
        (device, metadata.ino()) == mapping.file_id()
    });
    by_name || id_when_mapped(file).is_ok_and(|id| id == mapping.file_id())
}

/// Returns the device and inode of a file as the kernel shows them in lists of mappings. In btrfs and overlayfs this
/// device differs from the one that stat(2) returns.
fn id_when_mapped(file: &File) -> io::Result<FileId> {
    // SAFETY: the memory is never read.
    let page = unsafe { MmapOptions::new().len(1).map(file)? };
    let address = page.as_ptr() as u64;
    let maps = fs::read("/proc/self/maps")?;
    let mut mappings = Mapping::parse_list(&maps);
    let found = mappings.find(|mapping| mapping.range.contains(&address));
    found
        .map(|mapping| mapping.file_id())
        .ok_or(io::ErrorKind::NotFound.into())
}

fn by_descriptor(file: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::process::proc::Process;

    /// Returns a mapping of a file, at addresses where no process has a mapping.
    fn mapping(path: &Path, device: u64, inode: u64) -> Mapping {
        Mapping {
            range: 0x1000..0x2000,
            executable: true,
            file_offset: 0,
            device: (libc::major(device), libc::minor(device)),
            inode,
            path: path.to_owned(),
        }
    }

    fn open(path: &Path, (device, inode): (u64, u64)) -> io::Result<MappedFile> {
        MappedFile::open(std::process::id(), &mapping(path, device, inode))
    }

    fn identity(path: &Path) -> (u64, u64) {
        let metadata = fs::metadata(path).expect("a file");
        (metadata.dev(), metadata.ino())
    }

    #[test]
    fn a_file_is_the_one_that_was_mapped_by_device_and_inode() {
        let folder = tempfile::tempdir().expect("a directory");
        let (path, link) = (folder.path().join("file"), folder.path().join("link"));
        fs::write(&path, "its content").expect("a file");
        symlink(&path, &link).expect("a link");
        let (device, inode) = identity(&path);

        let file = open(&path, (device, inode)).expect("the very file");
        assert_eq!(file.identity().expect("its inode"), (device, inode));
        assert_eq!(
            fs::read(file.path()).expect("a path of ours"),
            b"its content"
        );
        open(&path, (device, inode + 1)).expect_err("another inode");
        open(&path, (device + 1, inode)).expect_err("another device");
        open(&link, (device, inode)).expect_err("a link");

        // The open file does not depend on the path.
        fs::remove_file(&path).expect("our own");
        assert_eq!(
            fs::read(file.path()).expect("a path of ours"),
            b"its content"
        );
    }

    #[test]
    fn no_link_is_followed_on_the_way() {
        let folder = tempfile::tempdir().expect("a directory");
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::create_dir(&real).expect("a directory");
        fs::write(real.join("file"), "").expect("a file");
        symlink(&real, &link).expect("a link");
        let id = identity(&real.join("file"));
        open(&real.join("file"), id).expect("the file");
        open(&link.join("file"), id).expect_err("a link on the way");
    }

    #[test]
    fn what_is_no_regular_file_is_not_opened() {
        let folder = tempfile::tempdir().expect("a directory");
        let fifo = folder.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU).expect("a FIFO");
        // An open for reading would wait for a writer.
        let error = open(&fifo, identity(&fifo)).expect_err("no file");
        assert_ne!(error.raw_os_error(), Some(libc::ENXIO));
        for path in [&fifo, Path::new("/dev/null"), folder.path()] {
            let error = open_regular(path).expect_err("no file");
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{path:?}");
        }
    }

    #[test]
    fn the_kernel_names_what_is_mapped() {
        let process = Process::open(std::process::id()).expect("we run");
        let mappings = process.mappings().expect("our mappings");
        let exe = std::env::current_exe().expect("our program");
        let own = mappings.iter().find(|mapping| mapping.path == exe);
        let own = own.expect("our program is mapped");
        let file = File::open(&exe).expect("our program");
        assert_eq!(id_when_mapped(&file).expect("its id"), own.file_id());
    }
}
