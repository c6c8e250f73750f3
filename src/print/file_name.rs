//! Names under which tools create files. Every file, FIFO or socket that an option names is found here, so that no other
//! user of the machine decides what is written to.
//!
//! The rules of fs.protected_symlinks, fs.protected_regular and fs.protected_fifos (sysctl/fs.rst) apply, also where
//! these are off, and a stricter one: a link leads only to what belongs to the link's owner, unless that is root or the
//! tool's own user.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::hash::{BuildHasher, RandomState};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail, ensure};
use caps::{Capability, CapsHashSet};
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, FcntlArg, OFlag, fcntl, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, fstat, fstatat};
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs};
use nix::unistd::{UnlinkatFlags, getegid, geteuid, unlinkat};

use crate::print::text;

/// Mode of a new file, which has stacks, addresses and names from the memory of processes.
pub const PRIVATE: Mode = Mode::S_IRUSR.union(Mode::S_IWUSR);
/// Mode of a new file that a program of another user is to read, less the umask.
pub const PUBLIC: Mode = PRIVATE.union(Mode::S_IRGRP).union(Mode::S_IROTH);
/// Number of symbolic links that are followed, as in the kernel.
const MAX_LINKS: usize = 40;
/// Bits of the kinds of files.
const KIND: u32 = libc::S_IFMT;

/// Capabilities that the files found so far take, as bits.
static NEEDED: AtomicU64 = AtomicU64::new(0);

/// Returns the capabilities that writing the files takes, of all that [`FileName::find`] has found.
pub fn needed_capabilities() -> CapsHashSet {
    let needed = NEEDED.load(Ordering::Relaxed);
    let mut all = caps::all();
    all.retain(|capability| needed & capability.bitmask() != 0);
    all
}

fn need(capability: Capability) {
    NEEDED.fetch_or(capability.bitmask(), Ordering::Relaxed);
}

/// A file's directory, held open, and its name therein. What the path meant when it was found stays meant, whoever
/// replaces a directory or a link of the path later.
#[derive(Debug)]
pub struct FileName {
    folder: OwnedFd,
    name: OsString,
    /// Path as it was given, escaped.
    shown: String,
    /// Owners of the links that led here, other than root and this user.
    led_by: Vec<u32>,
    /// Whether the name is a link of procfs, such as /proc/self/fd/1, which the kernel resolves.
    is_magic: bool,
}

impl FileName {
    /// Finds the directory of a path. A file of this name need not exist.
    ///
    /// # Errors
    /// If a directory does not exist, if the path names no file, or if another user could have redirected it.
    pub fn find(path: &Path) -> Result<Self> {
        let shown = text::escape_bytes(path.as_os_str().as_encoded_bytes());
        let found = Self::walk(path, shown.clone());
        let found = found.with_context(|| format!("failed to write {shown}"))?;
        found.note_needs();
        Ok(found)
    }

    fn walk(path: &Path, shown: String) -> Result<Self> {
        let mut at = Self {
            folder: open_at(AT_FDCWD, ".", FOLDER, Mode::empty())?,
            name: OsString::new(),
            shown,
            led_by: Vec::new(),
            is_magic: false,
        };
        let mut ahead = Vec::new();
        push(&mut ahead, path);
        let mut links = 0;
        while let Some(part) = ahead.pop() {
            if !is_name(&part) {
                at.folder = open_at(&at.folder, &part, FOLDER, Mode::empty())?;
                continue;
            }
            let is_last = ahead.is_empty();
            let Some(entry) = at.entry(&part, is_last)? else {
                at.name = part;
                break;
            };
            let stat = status(&entry)?;
            at.expect_no_stranger(&stat)
                .with_context(|| text::escape_bytes(part.as_bytes()))?;
            let is_link = stat.st_mode & KIND == libc::S_IFLNK;
            let is_magic = is_link
                && fstatfs(&entry).map_err(io::Error::from)?.filesystem_type() == PROC_SUPER_MAGIC;
            if is_link && !is_magic {
                links += 1;
                ensure!(links <= MAX_LINKS, "too many symbolic links");
                if !is_trusted(stat.st_uid) {
                    at.led_by.push(stat.st_uid);
                }
                let target = readlinkat(&entry, "").map_err(io::Error::from)?;
                push(&mut ahead, Path::new(&target));
            } else if is_last {
                (at.name, at.is_magic) = (part, is_magic);
            } else if is_magic {
                at.folder = open_at(&at.folder, &part, FOLDER, Mode::empty())?;
            } else {
                at.folder = entry;
            }
        }
        ensure!(!at.name.is_empty(), "not the name of a file");
        let existing = at.existing()?;
        at.expect_rightful(existing.as_ref())?;
        Ok(at)
    }

    /// Opens an entry of the directory without following it. Returns `None` if the last part does not exist.
    fn entry(&self, name: &OsStr, is_last: bool) -> Result<Option<OwnedFd>> {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        if !is_last {
            // As a directory first: only so is a file system mounted that is mounted on demand.
            let as_folder = flags | OFlag::O_DIRECTORY;
            match open_at(&self.folder, name, as_folder, Mode::empty()) {
                Err(error) if error.kind() == io::ErrorKind::NotADirectory => {}
                folder => return Ok(Some(folder?)),
            }
        }
        match open_at(&self.folder, name, flags, Mode::empty()) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && is_last => Ok(None),
            entry => Ok(Some(entry?)),
        }
    }

    /// Refuses an entry of the present directory that belongs to a stranger, if everyone may create entries there.
    fn expect_no_stranger(&self, entry: &FileStat) -> Result<()> {
        let folder = status(&self.folder)?;
        let is_shared = folder.st_mode & libc::S_ISVTX != 0 && folder.st_mode & 0o022 != 0;
        let owner = entry.st_uid;
        if is_shared && owner != geteuid().as_raw() && owner != folder.st_uid {
            bail!(
                "it belongs to user {owner}, in a directory where others may create files: name a file elsewhere, or \
                 remove it"
            );
        }
        Ok(())
    }

    /// Refuses what links of strangers led to, unless the file or its directory is their own.
    fn expect_rightful(&self, file: Option<&FileStat>) -> Result<()> {
        let folder = status(&self.folder)?;
        let is_own =
            |owner: u32| folder.st_uid == owner || file.is_some_and(|file| file.st_uid == owner);
        if let Some(owner) = self.led_by.iter().find(|&&owner| !is_own(owner)) {
            bail!(
                "a link of user {owner} leads to what belongs to user {}: name the file itself",
                file.unwrap_or(&folder).st_uid
            );
        }
        Ok(())
    }

    /// Refuses an existing file by which a stranger could have the tool write to something else.
    fn expect_safe(&self, file: &FileStat) -> Result<()> {
        self.expect_no_stranger(file)?;
        self.expect_rightful(Some(file))?;
        let folder = status(&self.folder)?;
        let others_write = !is_trusted(folder.st_uid) || folder.st_mode & 0o022 != 0;
        ensure!(
            file.st_mode & KIND != libc::S_IFREG || file.st_nlink <= 1 || !others_write,
            "it has other names (hard links), and others may write to its directory: remove it, or name another file"
        );
        Ok(())
    }

    /// Notes the capabilities that creating, replacing and appending to this file take.
    fn note_needs(&self) {
        let mine = |stat: &FileStat, bits| {
            stat.st_uid == geteuid().as_raw() && stat.st_mode & bits == bits
        };
        let existing = self.existing().ok().flatten();
        let folder = status(&self.folder);
        if !folder.is_ok_and(|folder| mine(&folder, 0o300))
            || existing.is_some_and(|file| !mine(&file, 0o200))
        {
            need(Capability::CAP_DAC_OVERRIDE);
        }
        if existing.is_some_and(|file| {
            file.st_uid != geteuid().as_raw() || file.st_gid != getegid().as_raw()
        }) {
            need(Capability::CAP_CHOWN);
        }
    }

    /// The path as it was given, escaped.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Returns the status of the file that has this name now, if there is one. A link is not followed.
    ///
    /// # Errors
    /// If the directory cannot be searched.
    pub fn existing(&self) -> Result<Option<FileStat>> {
        let flags = if self.is_magic {
            AtFlags::empty()
        } else {
            AtFlags::AT_SYMLINK_NOFOLLOW
        };
        match fstatat(&self.folder, self.name.as_os_str(), flags) {
            Ok(stat) => {
                self.expect_safe(&stat)?;
                Ok(Some(stat))
            }
            Err(Errno::ENOENT) => Ok(None),
            Err(error) => Err(io::Error::from(error).into()),
        }
    }

    /// Returns the regular file that is to be replaced, if there is one.
    ///
    /// # Errors
    /// If something else than a regular file has the name.
    pub fn replaceable(&self) -> Result<Option<FileStat>> {
        let existing = self.existing()?;
        let is_file = |stat: &FileStat| stat.st_mode & KIND == libc::S_IFREG && !self.is_magic;
        ensure!(
            existing.as_ref().is_none_or(is_file),
            "it is no regular file; name another one"
        );
        Ok(existing)
    }

    /// Opens the file for appending, or creates it with the mode [`PRIVATE`]. A FIFO is opened only if a program reads
    /// it.
    ///
    /// # Errors
    /// If the file cannot be opened, or a stranger could have had another one opened.
    pub fn open_append(&self) -> Result<File> {
        let mut flags = OFlag::O_WRONLY
            | OFlag::O_APPEND
            | OFlag::O_NONBLOCK
            | OFlag::O_NOCTTY
            | OFlag::O_CLOEXEC;
        if !self.is_magic {
            flags |= OFlag::O_NOFOLLOW;
        }
        let open = |flags| open_at(&self.folder, &self.name, flags, PRIVATE);
        let opened = match open(flags) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                open(flags | OFlag::O_CREAT | OFlag::O_EXCL)
            }
            opened => opened,
        };
        let file = match opened {
            Err(error) if error.raw_os_error() == Some(libc::ENXIO) => {
                bail!("no program reads this FIFO: start its reader first")
            }
            opened => File::from(opened?),
        };
        // The file that was opened, which need not be the one that was found before.
        self.expect_safe(&status(&file)?)?;
        let flags = fcntl(&file, FcntlArg::F_GETFL).map_err(io::Error::from)?;
        let flags = OFlag::from_bits_retain(flags) - OFlag::O_NONBLOCK;
        fcntl(&file, FcntlArg::F_SETFL(flags)).map_err(io::Error::from)?;
        Ok(file)
    }

    /// Opens the file as [`FileName::open_append`] does, and empties it if it is a regular file.
    ///
    /// # Errors
    /// See [`FileName::open_append`].
    pub fn open_empty(&self) -> Result<File> {
        let file = self.open_append()?;
        if file.metadata()?.is_file() {
            file.set_len(0)?;
        }
        Ok(file)
    }

    /// Creates a new file in the directory, with a name of its own, to take this file's place later.
    ///
    /// # Errors
    /// If the directory cannot be written to.
    pub fn create_draft(&self, mode: Mode) -> Result<Draft<'_>> {
        // The crate getrandom would open /dev/urandom in a static program, and a container may lack it.
        let random = RandomState::new().hash_one(self.name.as_os_str());
        let name = OsString::from(format!(".memtools-{random:016x}"));
        let flags =
            OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = open_at(&self.folder, &name, flags, mode)?;
        Ok(Draft {
            file: File::from(file),
            place: self,
            name: Some(name),
        })
    }

    /// Opens the existing file, to read its attributes.
    ///
    /// # Errors
    /// If there is none, or it cannot be read.
    pub fn open_existing(&self) -> io::Result<File> {
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = open_at(&self.folder, &self.name, flags, Mode::empty())?;
        Ok(File::from(file))
    }

    /// Returns the open directory of the file.
    ///
    /// # Errors
    /// If there are no descriptors left.
    pub fn folder(&self) -> io::Result<OwnedFd> {
        self.folder.try_clone()
    }

    /// Removes the file.
    ///
    /// # Errors
    /// If the file does not exist or cannot be removed.
    pub fn remove(&self) -> io::Result<()> {
        Ok(unlinkat(
            &self.folder,
            self.name.as_os_str(),
            UnlinkatFlags::NoRemoveDir,
        )?)
    }

    /// Returns a path that names the file for as long as this value exists, for calls that take no descriptor.
    pub fn path(&self) -> PathBuf {
        let folder = format!("/proc/self/fd/{}", self.folder.as_raw_fd());
        Path::new(&folder).join(&self.name)
    }
}

/// New file beside the one that it is to replace. Removed unless it has taken the other's place.
#[derive(Debug)]
pub struct Draft<'name> {
    /// The file, open for writing.
    pub file: File,
    place: &'name FileName,
    /// Name in the directory, until the draft has taken the other file's place.
    name: Option<OsString>,
}

impl Draft<'_> {
    /// Replaces the file by the draft.
    ///
    /// # Errors
    /// If the directory does not allow it.
    pub fn replace(mut self) -> io::Result<()> {
        let Some(name) = &self.name else {
            return Ok(());
        };
        let folder = &self.place.folder;
        nix::fcntl::renameat(
            folder,
            name.as_os_str(),
            folder,
            self.place.name.as_os_str(),
        )?;
        self.name = None;
        Ok(())
    }
}

impl Drop for Draft<'_> {
    fn drop(&mut self) {
        if let Some(name) = &self.name {
            // The reason why the draft is dropped is reported; an error of the removal would add nothing.
            let _ = unlinkat(
                &self.place.folder,
                name.as_os_str(),
                UnlinkatFlags::NoRemoveDir,
            );
        }
    }
}

const FOLDER: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_CLOEXEC);

fn open_at(
    folder: impl AsFd,
    name: impl AsRef<OsStr>,
    flags: OFlag,
    mode: Mode,
) -> io::Result<OwnedFd> {
    Ok(openat(folder, name.as_ref(), flags, mode)?)
}

fn status(file: impl AsFd) -> io::Result<FileStat> {
    Ok(fstat(file)?)
}

/// Whether a user may decide where this process writes: root, and the process's own user.
fn is_trusted(owner: u32) -> bool {
    owner == 0 || owner == geteuid().as_raw()
}

/// Whether a part of a path is a name, not `/`, `.` or `..`.
fn is_name(part: &OsStr) -> bool {
    !matches!(part.as_bytes(), b"/" | b"." | b"..")
}

/// Adds a path's parts to those that are still to be walked, the first one last.
fn push(ahead: &mut Vec<OsString>, path: &Path) {
    let parts = path.components().map(Component::as_os_str);
    let parts: Vec<OsString> = parts.map(OsStr::to_owned).collect();
    ahead.extend(parts.into_iter().rev());
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::io::Write;
    use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};

    use super::*;

    const STRANGER: u32 = 1007;
    const OTHER: u32 = 1009;

    /// Folder of the mode 1777, as /tmp, with `secret`, a file of this user, outside of it.
    struct Shared {
        above: tempfile::TempDir,
        tmp: PathBuf,
    }

    fn shared() -> Shared {
        let above = tempfile::tempdir().expect("a directory");
        let tmp = above.path().join("tmp");
        fs::create_dir(&tmp).expect("a directory");
        fs::set_permissions(&tmp, PermissionsExt::from_mode(0o1777)).expect("it is ours");
        fs::write(above.path().join("secret"), "secret").expect("room");
        Shared { above, tmp }
    }

    /// Writes to a path as the options do: appends, and replaces.
    fn refusals(path: &Path) -> Vec<String> {
        let find = || FileName::find(path);
        let append = find().and_then(|place| Ok(place.open_empty()?.write_all(b"x")?));
        let replace = find().and_then(|place| {
            place.replaceable()?;
            let mut draft = place.create_draft(PRIVATE)?;
            draft.file.write_all(b"x")?;
            Ok(draft.replace()?)
        });
        let refusals = [append, replace].into_iter().filter_map(Result::err);
        refusals.map(|error| format!("{error:#}")).collect()
    }

    fn is_root() -> bool {
        let is_root = geteuid().is_root();
        if !is_root {
            eprintln!("not run: only root can make files of another user");
        }
        is_root
    }

    #[test]
    fn what_a_stranger_left_in_a_sticky_folder_is_refused() {
        if !is_root() {
            return;
        }
        let Shared { above, tmp } = shared();
        let secret = above.path().join("secret");
        let theirs = |name: &str| {
            let path = tmp.join(name);
            lchown(&path, Some(STRANGER), None).expect("root may");
            path
        };
        symlink(&secret, tmp.join("link")).expect("a link");
        symlink(above.path(), tmp.join("to-directory")).expect("a link");
        fs::write(tmp.join("file"), "theirs").expect("room");
        fs::create_dir(tmp.join("directory")).expect("a directory");
        nix::unistd::mkfifo(&tmp.join("fifo"), Mode::S_IRWXU).expect("a FIFO");
        let paths = [
            theirs("link"),
            theirs("file"),
            theirs("fifo"),
            theirs("to-directory").join("secret"),
            theirs("directory").join("new"),
        ];
        for path in paths {
            let refusals = refusals(&path);
            assert_eq!(refusals.len(), 2, "{path:?}: {refusals:?}");
            for refusal in refusals {
                assert!(refusal.contains("belongs to user 1007"), "{refusal}");
            }
        }
        assert_eq!(fs::read(&secret).expect("a file"), b"secret");
        assert_eq!(fs::read(tmp.join("file")).expect("a file"), b"theirs");
        assert!(!tmp.join("directory/new").exists());
    }

    #[test]
    fn a_stranger_s_link_leads_to_what_is_theirs_only() {
        if !is_root() {
            return;
        }
        let Shared { above, .. } = shared();
        let home = above.path().join("home");
        fs::create_dir_all(home.join("directory")).expect("directories");
        fs::write(home.join("mine"), "").expect("room");
        fs::write(home.join("of-other"), "").expect("room");
        chown(home.join("of-other"), Some(OTHER), None).expect("root may");
        let link = |name: &str, target: &Path| {
            symlink(target, home.join(name)).expect("a link");
            lchown(home.join(name), Some(STRANGER), None).expect("root may");
        };
        link("to-secret", &above.path().join("secret"));
        link("to-new", &above.path().join("new"));
        link("to-above", above.path());
        link("to-other", Path::new("of-other"));
        link("to-mine", Path::new("mine"));
        link("to-directory", Path::new("directory"));
        fs::hard_link(above.path().join("secret"), home.join("hard")).expect("a link");
        for path in ["", "mine", "directory"] {
            chown(home.join(path), Some(STRANGER), None).expect("root may");
        }
        for (name, reason) in [
            ("to-secret", "a link of user 1007 leads to"),
            ("to-new", "a link of user 1007 leads to"),
            ("to-above/secret", "a link of user 1007 leads to"),
            ("to-above/new", "a link of user 1007 leads to"),
            ("hard", "other names"),
        ] {
            let refusals = refusals(&home.join(name));
            assert!(refusals.len() == 2, "{name}: {refusals:?}");
            assert!(refusals[0].contains(reason), "{name}: {refusals:?}");
        }
        let secret = fs::read(above.path().join("secret"));
        assert_eq!(secret.expect("a file"), b"secret");
        for name in [
            "to-mine",
            "mine",
            "to-directory/new",
            "directory/new",
            "to-other",
            "new",
        ] {
            assert_eq!(refusals(&home.join(name)), [""; 0], "{name}");
        }
    }

    #[test]
    fn own_links_and_those_of_the_kernel_are_followed() {
        let Shared { above, tmp } = shared();
        symlink("../secret", tmp.join("link")).expect("a link");
        symlink(above.path(), tmp.join("directory")).expect("a link");
        symlink("loop", tmp.join("loop")).expect("a link");
        for name in ["link", "directory/secret", "directory/tmp/../new", "other"] {
            assert_eq!(refusals(&tmp.join(name)), [""; 0], "{name}");
        }
        assert!(!tmp.join("secret").exists() && above.path().join("new").exists());
        let refusals = refusals(&tmp.join("loop/x"));
        assert!(
            refusals[0].contains("too many symbolic links"),
            "{refusals:?}"
        );
        let file = tempfile::tempfile().expect("a file");
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        let place = FileName::find(Path::new(&path)).expect("the kernel's link");
        place
            .open_empty()
            .expect("open")
            .write_all(b"x")
            .expect("room");
        assert_eq!(file.metadata().expect("a file").len(), 1);
        assert!(
            place.replaceable().is_err(),
            "a link of procfs cannot be replaced"
        );
    }

    #[test]
    fn a_folder_that_is_replaced_later_is_not_written_to() {
        let Shared { above, .. } = shared();
        let (folder, moved) = (above.path().join("directory"), above.path().join("moved"));
        fs::create_dir(&folder).expect("a directory");
        let place = FileName::find(&folder.join("file")).expect("writable");
        fs::rename(&folder, &moved).expect("it is ours");
        fs::create_dir(&folder).expect("a directory");
        drop(place.open_append().expect("writable"));
        assert!(moved.join("file").exists() && !folder.join("file").exists());
    }
}
