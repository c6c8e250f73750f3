//! The tree of cgroups of a hierarchy, of version 1 or 2: each cgroup is a directory in that of its parent.

use std::fs;
use std::path::{Path, PathBuf};

use crate::print::text;

/// Returns the directories of a cgroup's children; none if the cgroup was removed meanwhile.
pub(crate) fn child_folders(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let folders = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    folders.map(|entry| entry.path())
}

/// Returns the directories of a cgroup's children with their paths below the mount, escaped. `path` is that of the
/// cgroup itself, `/` for the root.
pub(crate) fn children(folder: &Path, path: &str) -> impl Iterator<Item = (PathBuf, String)> {
    let parent = path.strip_suffix('/').unwrap_or(path);
    child_folders(folder).map(move |child| {
        let name = child.file_name().unwrap_or_default();
        let path = format!("{parent}/{}", text::escape_bytes(name.as_encoded_bytes()));
        (child, path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn children_are_folders_with_escaped_paths() {
        let mount = tempfile::tempdir().expect("a directory");
        let child = mount.path().join("a\x1b");
        fs::create_dir_all(child.join("b")).expect("directories");
        fs::write(child.join("cgroup.procs"), "1\n").expect("a file");
        let first = (child.clone(), "/a\\x1b".to_owned());
        assert_eq!(children(mount.path(), "/").collect::<Vec<_>>(), [first]);
        let second = (child.join("b"), "/a\\x1b/b".to_owned());
        assert_eq!(children(&child, "/a\\x1b").collect::<Vec<_>>(), [second]);
        assert_eq!(child_folders(&child.join("gone")).count(), 0);
    }
}
