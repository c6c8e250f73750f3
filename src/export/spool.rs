//! Directory of folders that are written whole or not at all, and the oldest of which are removed.
//!
//! A folder is written under a name that begins with `.tmp-`, and renamed when its files are on the disk. The oldest
//! folders are renamed back before their files are removed. So no reader ever sees a part of a folder, whenever the
//! writer is killed; what was left half is removed at the next start.

use std::cmp::Reverse;
use std::fs::{self, DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, renameat};
use nix::sys::stat::{Mode, SFlag, fstat, fstatat, mkdirat};
use nix::sys::statvfs::fstatvfs;
use nix::unistd::{UnlinkatFlags, fsync, geteuid, unlinkat};

use crate::print::file_name::{FileName, PRIVATE};
use crate::print::text;

/// Beginning of the names of folders that are being written or removed.
const TEMPORARY: &str = ".tmp-";
/// Mode of directories.
const PRIVATE_FOLDER: Mode = Mode::S_IRWXU;
/// How directories are opened.
const FOLDER: OFlag = OFlag::O_RDONLY
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);
/// Part of a file system that is left free: a tenth, ...
const LEFT_FREE_PART: u64 = 10;
/// ... but no more than this many bytes.
const LEFT_FREE_BYTES: u64 = 1 << 30;

/// Maximum number and size of the folders that are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Number of folders.
    pub folders: usize,
    /// Bytes of their files.
    pub bytes: u64,
}

/// Directory of folders.
#[derive(Debug)]
pub struct Spool {
    folder: OwnedFd,
    shown: String,
    limits: Limits,
}

impl Spool {
    /// Opens the directory, and creates it if it does not exist. Removes what was left half.
    ///
    /// # Errors
    /// If the directory cannot be created or opened, or other users could redirect or change it.
    pub fn open(path: &Path, limits: Limits) -> Result<Self> {
        match DirBuilder::new().mode(0o700).create(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => {
                made.with_context(|| format!("failed to create the directory {}", path.display()))?
            }
        }
        let place = FileName::find(&path.join("x"))?;
        let folder = openat(&place.folder()?, ".", FOLDER, Mode::empty())?;
        let shown = place.shown().trim_end_matches("/x").to_owned();
        let status = fstat(&folder)?;
        ensure!(
            status.st_mode & 0o022 == 0 && status.st_uid == geteuid().as_raw(),
            "others may write into {shown}: use a directory that only you can write to (chmod go-w)"
        );
        let spool = Self {
            folder,
            shown,
            limits,
        };
        for name in spool.names(|name| name.starts_with(TEMPORARY))? {
            spool.remove(&name)?;
        }
        Ok(spool)
    }

    /// Path of the directory, escaped.
    pub fn shown(&self) -> &str {
        &self.shown
    }

    /// Writes a folder of files, each with its name and content, and removes the oldest folders beyond the limits. The
    /// names of folders must begin with their time, as the order of names is that of age. Returns the number of folders
    /// that were removed.
    ///
    /// # Errors
    /// If a tenth of the file system, or 1 GiB, would not be left free, or a file cannot be written. The folder is then
    /// not there.
    pub fn write(&self, name: &str, files: &[(&str, Vec<u8>)]) -> Result<u64> {
        let failed = || format!("failed to write {}/{name}", self.shown);
        let size: u64 = files.iter().map(|(_, content)| content.len() as u64).sum();
        self.expect_free(size).with_context(failed)?;
        let draft = format!("{TEMPORARY}{name}");
        let written = self.write_draft(&draft, name, files);
        if written.is_err() {
            // If this fails, too, the next start removes the folder.
            let _ = self.remove(&draft);
        }
        written.with_context(failed)?;
        self.remove_oldest()
            .with_context(|| format!("failed to remove old folders of {}", self.shown))
    }

    fn write_draft(&self, draft: &str, name: &str, files: &[(&str, Vec<u8>)]) -> Result<()> {
        mkdirat(&self.folder, draft, PRIVATE_FOLDER)?;
        tests_step();
        let folder = self.open_folder(draft)?;
        for (file, content) in files {
            let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
            let file = openat(&folder, *file, flags | OFlag::O_CLOEXEC, PRIVATE)?;
            let mut file = File::from(file);
            tests_step();
            file.write_all(content)?;
            file.sync_data()?;
            tests_step();
        }
        fsync(&folder)?;
        tests_step();
        renameat(&self.folder, draft, &self.folder, name)?;
        tests_step();
        Ok(fsync(&self.folder)?)
    }

    fn open_folder(&self, name: &str) -> nix::Result<OwnedFd> {
        openat(&self.folder, name, FOLDER, Mode::empty())
    }

    fn expect_free(&self, bytes: u64) -> Result<()> {
        let system = fstatvfs(&self.folder)?;
        let block = system.fragment_size().max(1);
        let left = left_free(system.blocks().saturating_mul(block));
        ensure!(
            system.blocks_available().saturating_mul(block) >= left.saturating_add(bytes),
            "less than {} of the file system would be left free",
            text::bytes(left)
        );
        Ok(())
    }

    /// Returns the names of the directory's entries that are wanted.
    fn names(&self, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        entries(&self.open_folder(".")?, wanted)
    }

    /// Returns the names of the folders that were written, the oldest first.
    ///
    /// # Errors
    /// If the directory cannot be read.
    pub fn written(&self) -> Result<Vec<String>> {
        let mut names = self.names(is_written)?;
        names.sort();
        Ok(names)
    }

    /// Reads a file of a folder that was written, of at most this many bytes.
    ///
    /// # Errors
    /// If the file cannot be read, or is larger.
    pub fn read(&self, name: &str, file: &str, most: u64) -> Result<Vec<u8>> {
        let read = || -> Result<Vec<u8>> {
            let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
            let folder = self.open_folder(name)?;
            let file = openat(&folder, file, flags | OFlag::O_CLOEXEC, Mode::empty())?;
            let mut content = Vec::new();
            File::from(file).take(most + 1).read_to_end(&mut content)?;
            ensure!(content.len() as u64 <= most, "it is too large");
            Ok(content)
        };
        read().with_context(|| format!("failed to read {file} of {}/{name}", self.shown))
    }

    /// Removes a folder that was written, if it is still there.
    ///
    /// # Errors
    /// If the folder cannot be removed.
    pub fn remove_written(&self, name: &str) -> Result<()> {
        let leaving = format!("{TEMPORARY}old-{name}");
        let removed = match renameat(&self.folder, name, &self.folder, &*leaving) {
            Err(Errno::ENOENT) => return Ok(()),
            Err(error) => Err(error.into()),
            Ok(()) => self.remove(&leaving),
        };
        removed.with_context(|| format!("failed to remove {}/{name}", self.shown))
    }

    /// Returns the bytes of all folders that were written.
    pub fn bytes(&self) -> u64 {
        let names = self.written().unwrap_or_default();
        let sizes = names.iter().map(|name| self.size(name).unwrap_or_default());
        sizes.sum()
    }

    fn remove_oldest(&self) -> Result<u64> {
        let mut names = self.names(is_written)?;
        names.sort_by_key(|name| Reverse(name.clone()));
        let (mut kept, mut removed) = (0, 0);
        let mut bytes: u64 = 0;
        for name in names {
            bytes = bytes.saturating_add(self.size(&name).unwrap_or_default());
            // The newest is kept, however large.
            if kept > 0 && (kept >= self.limits.folders || bytes > self.limits.bytes) {
                let leaving = format!("{TEMPORARY}old-{name}");
                renameat(&self.folder, &*name, &self.folder, &*leaving)?;
                tests_step();
                self.remove(&leaving)?;
                removed += 1;
            } else {
                kept += 1;
            }
        }
        Ok(removed)
    }

    /// Returns the bytes of a folder's files.
    fn size(&self, name: &str) -> Result<u64> {
        let folder = self.open_folder(name)?;
        let mut bytes: u64 = 0;
        for file in entries(&folder, |_| true)? {
            let status = fstatat(&folder, &*file, AtFlags::AT_SYMLINK_NOFOLLOW)?;
            bytes = bytes.saturating_add(status.st_size.unsigned_abs());
        }
        Ok(bytes)
    }

    /// Removes a folder of files, or a file of this name.
    fn remove(&self, name: &str) -> Result<()> {
        let status = match fstatat(&self.folder, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(()),
            status => status?,
        };
        if status.st_mode & SFlag::S_IFMT.bits() != SFlag::S_IFDIR.bits() {
            return Ok(unlinkat(&self.folder, name, UnlinkatFlags::NoRemoveDir)?);
        }
        let folder = self.open_folder(name)?;
        for file in entries(&folder, |_| true)? {
            unlinkat(&folder, &*file, UnlinkatFlags::NoRemoveDir)?;
            tests_step();
        }
        Ok(unlinkat(&self.folder, name, UnlinkatFlags::RemoveDir)?)
    }
}

/// Returns how much of a file system of this size is left free. All numbers are bytes.
fn left_free(size: u64) -> u64 {
    (size / LEFT_FREE_PART).min(LEFT_FREE_BYTES)
}

/// Returns the names in an open directory that are text and wanted.
fn entries(folder: &impl AsRawFd, wanted: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let path = format!("/proc/self/fd/{}", folder.as_raw_fd());
    let mut names = Vec::new();
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name().into_string().ok();
        names.extend(name.filter(|name| wanted(name)));
    }
    Ok(names)
}

/// Whether a name is that of a written folder: it begins with a time such as `20261129T115341Z-`. Other files of the
/// directory are not ours.
fn is_written(name: &str) -> bool {
    let form = b"00000000T000000Z-";
    name.len() > form.len()
        && name.bytes().zip(form).all(|(byte, &wanted)| match wanted {
            b'0' => byte.is_ascii_digit(),
            _ => byte == wanted,
        })
}

#[cfg(not(test))]
fn tests_step() {}

/// Ends this process by SIGKILL at the step that the environment names.
#[cfg(test)]
fn tests_step() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static STEPS: AtomicUsize = AtomicUsize::new(0);
    let last = std::env::var(tests::KILLED_AT).ok();
    let last = last.and_then(|step| step.parse::<usize>().ok());
    if last.is_some_and(|last| STEPS.fetch_add(1, Ordering::Relaxed) >= last) {
        let _ = nix::sys::signal::raise(nix::sys::signal::Signal::SIGKILL);
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::os::unix::process::ExitStatusExt;
    use std::path::PathBuf;
    use std::process::Command;

    use super::*;

    /// Variables of the child that is killed: the step, and the directory.
    pub(super) const KILLED_AT: &str = "MEMTOOLS_TEST_SPOOL_KILLED_AT";
    const FOLDER: &str = "MEMTOOLS_TEST_SPOOL_FOLDER";

    const LIMITS: Limits = Limits {
        folders: 2,
        bytes: 1 << 20,
    };

    fn name(second: u32) -> String {
        format!("20261129T1153{second:02}Z-oom-x")
    }

    fn files() -> Vec<(&'static str, Vec<u8>)> {
        vec![("a.json", b"{}".to_vec()), ("b.txt", vec![b'b'; 3000])]
    }

    fn listed(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a directory");
        let mut names: Vec<String> = entries
            .map(|entry| {
                entry
                    .expect("an entry")
                    .file_name()
                    .to_string_lossy()
                    .into_owned()
            })
            .collect();
        names.sort();
        names
    }

    #[test]
    fn a_large_file_system_is_used_up_to_its_last_gibibyte() {
        assert_eq!(left_free(1 << 40), 1 << 30);
        assert_eq!(left_free(1 << 20), (1 << 20) / 10);
    }

    #[test]
    fn folders_are_private_and_the_oldest_go() {
        let above = tempfile::tempdir().expect("a directory");
        let path = above.path().join("spool");
        let spool = Spool::open(&path, LIMITS).expect("a spool");
        fs::write(path.join("notes"), "mine").expect("a file");
        for second in 1..=4 {
            spool.write(&name(second), &files()).expect("space");
        }
        assert_eq!(listed(&path), [name(3), name(4), "notes".into()]);
        let mode = |path: PathBuf| path.metadata().expect("it is there").mode() & 0o777;
        assert_eq!(mode(path.clone()), 0o700);
        assert_eq!(mode(path.join(name(4))), 0o700);
        assert_eq!(mode(path.join(name(4)).join("b.txt")), 0o600);
        assert_eq!(
            fs::read(path.join(name(4)).join("a.json")).expect("a file"),
            b"{}"
        );
        // By size, but the newest stays.
        let large = vec![("c", vec![0; 2 << 20])];
        spool.write(&name(5), &large).expect("space");
        assert_eq!(listed(&path), [name(5), "notes".into()]);
        let again = spool.write(&name(5), &files()).expect_err("it exists");
        assert!(format!("{again:#}").contains(&name(5)), "{again:#}");
        assert_eq!(listed(&path), [name(5), "notes".into()]);
    }

    #[test]
    fn a_folder_of_others_is_refused_and_a_replaced_one_not_followed() {
        let above = tempfile::tempdir().expect("a directory");
        let path = above.path().join("spool");
        let spool = Spool::open(&path, LIMITS).expect("a spool");
        let moved = above.path().join("moved");
        fs::rename(&path, &moved).expect("it is ours");
        let elsewhere = above.path().join("elsewhere");
        fs::create_dir(&elsewhere).expect("a directory");
        symlink(&elsewhere, &path).expect("a link");
        spool.write(&name(1), &files()).expect("space");
        assert_eq!(
            (listed(&elsewhere), listed(&moved)),
            (vec![], vec![name(1)])
        );
        fs::set_permissions(&moved, PermissionsExt::from_mode(0o777)).expect("it is ours");
        let error = Spool::open(&moved, LIMITS).expect_err("others may write");
        assert!(format!("{error:#}").contains("chmod go-w"), "{error:#}");
        fs::write(above.path().join("file"), "").expect("a file");
        assert!(Spool::open(&above.path().join("file"), LIMITS).is_err());
    }

    /// Does nothing but in the child of the next test: writes a folder beside two that are there.
    #[test]
    fn writes_until_it_is_killed() {
        if let Some(folder) = std::env::var_os(FOLDER) {
            let spool = Spool::open(Path::new(&folder), LIMITS).expect("a spool");
            spool.write(&name(3), &files()).expect("space");
        }
    }

    #[test]
    fn killed_at_any_step_it_leaves_whole_folders() {
        let own = std::env::current_exe().expect("a path");
        let mut steps = 0;
        loop {
            let above = tempfile::tempdir().expect("a directory");
            let path = above.path().join("spool");
            let spool = Spool::open(&path, LIMITS).expect("a spool");
            for second in 1..=2 {
                spool.write(&name(second), &files()).expect("space");
            }
            let status = Command::new(&own)
                .args(["--exact", "export::spool::tests::writes_until_it_is_killed"])
                .env(KILLED_AT, steps.to_string())
                .env(FOLDER, &path)
                .output()
                .expect("the tests")
                .status;
            for folder in listed(&path).iter().filter(|name| is_written(name)) {
                let found = files().into_iter().all(|(file, content)| {
                    fs::read(path.join(folder).join(file)).is_ok_and(|read| read == content)
                });
                assert!(found, "step {steps}: {folder} is half");
            }
            Spool::open(&path, LIMITS).expect("a spool");
            let left = listed(&path);
            assert!(
                left.iter().all(|name| is_written(name)),
                "step {steps}: {left:?}"
            );
            assert!(left.contains(&name(2)), "step {steps}: {left:?}");
            if status.success() {
                assert_eq!(left, [name(2), name(3)]);
                break;
            }
            assert_eq!(status.signal(), Some(libc::SIGKILL), "{status:?}");
            steps += 1;
        }
        // Folder, two files of two steps each, two renames, and the removal of the oldest.
        assert_eq!(steps, 10);
    }

    #[test]
    fn names_of_folders_begin_with_a_time() {
        assert!(is_written("20261129T115341Z-oom-x"));
        for other in [
            "20261129T115341Z-",
            ".tmp-20261129T115341Z-oom",
            "2026-11-29",
            "notes",
            "",
        ] {
            assert!(!is_written(other), "{other}");
        }
    }
}
