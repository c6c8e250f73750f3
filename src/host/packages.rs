//! Packages of installed files, by dpkg's lists (`/var/lib/dpkg/info/PACKAGE.list`).
//!
//! Without these lists, as with RPM, no packages are found.

use std::fs;
use std::path::Path;

use crate::print::text;

/// Folder in which dpkg has a list of files for each package.
const LISTS: &str = "/var/lib/dpkg/info";
/// Maximum size of a list that is read, in bytes: the list of a kernel's headers has 2 MB.
const MAX_LIST: u64 = 16 << 20;

/// Returns for each file the name of its package, without architecture, escaped. None if no package has the file.
pub(crate) fn of_files(paths: &[&Path]) -> Vec<Option<String>> {
    in_lists(Path::new(LISTS), paths)
}

fn in_lists(folder: &Path, paths: &[&Path]) -> Vec<Option<String>> {
    let mut packages = vec![None; paths.len()];
    let lists = fs::read_dir(folder).into_iter().flatten().flatten();
    for list in lists.map(|list| list.path()) {
        let is_list = list
            .extension()
            .is_some_and(|extension| extension == "list");
        let is_short = || list.metadata().is_ok_and(|list| list.len() <= MAX_LIST);
        if packages.iter().all(Option::is_some) {
            break;
        }
        if !is_list || !is_short() {
            continue;
        }
        let Ok(files) = fs::read_to_string(&list) else {
            continue;
        };
        for (path, package) in paths.iter().zip(&mut packages) {
            if package.is_none() && has(&files, path) {
                let name = list.file_stem().unwrap_or_default().to_string_lossy();
                let name = name.split(':').next().unwrap_or_default();
                *package = Some(text::escape(name).into_owned());
            }
        }
    }
    packages
}

/// Returns whether a list contains a file, by its path as it is mapped, or by its path before `/lib` became a link to
/// `/usr/lib`.
fn has(files: &str, path: &Path) -> bool {
    let Some(path) = path.to_str() else {
        return false;
    };
    let before = path.strip_prefix("/usr").unwrap_or(path);
    files.contains(before) && files.lines().any(|line| line == path || line == before)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_found_by_the_old_path_and_by_the_new_one() {
        let lists = tempfile::tempdir().expect("a directory");
        let list = |name: &str, files: &str| {
            fs::write(lists.path().join(name), files).expect("room");
        };
        list("libc6:riscv64.list", "/.\n/lib\n/lib/x/libc.so.6\n");
        list("redis.list", "/usr/bin/redis-server\n");
        list("redis.md5sums", "/usr/bin/other\n");
        let paths = [
            "/usr/lib/x/libc.so.6",
            "/usr/bin/redis-server",
            "/usr/bin/redis",
            "/usr/bin/other",
        ];
        let found = in_lists(lists.path(), &paths.map(Path::new));
        let found: Vec<_> = found.iter().map(Option::as_deref).collect();
        assert_eq!(found, [Some("libc6"), Some("redis"), None, None]);
    }
}
