//! Cgroup (version 2) of a task and the container of this cgroup, for the column `--container` and for fields of
//! JSON.
//!
//! The BPF side keeps the path of each cgroup that it meets (`bpf/include/cgroup_path.bpf.h`). So containers are
//! known even if they were removed before their events are printed.

use std::collections::HashMap;

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags, OpenMapMut};
use serde::Serialize;

use crate::bpf::map_create;
use crate::bpf::types::{self, cgroup_path};
use crate::print::file_path::{self, PathExtent};
use crate::process::cgroup::{self, Cgroups, LEFT_OUT};

/// The option of tools with a row for each event or process.
#[derive(Debug, Clone, Default, clap::Args)]
pub struct ContainerArgs {
    /// Show the container or systemd unit of each process
    ///
    /// The column CONTAINER has the first digits of the container ID, or the name of the systemd unit.
    #[arg(help_heading = "Output", long)]
    pub container: bool,
}

impl ContainerArgs {
    /// Returns whether the BPF side has to report cgroups: for the column, or for `always`, such as JSON and metrics,
    /// which always have them.
    pub fn wanted(&self, always: bool) -> bool {
        self.container || always
    }
}

/// Shrinks the map `cgroup_paths` of an opened skeleton to one entry if cgroups are not wanted. Returns the value of
/// the skeleton's constant `with_cgroups`.
///
/// # Errors
/// If libbpf refuses to set the size of the map.
pub fn prepare(wanted: bool, paths: &mut OpenMapMut<'_>) -> Result<u8> {
    if !wanted {
        map_create::set_capacity(paths, 1)?;
    }
    Ok(wanted.into())
}

/// Number of digits of a container's id that are shown, as in `docker ps`.
const SHORT_ID: usize = 12;
/// Number of digits of a pod's uid that are shown: its first group.
const SHORT_UID: usize = 8;
/// Width of the column CONTAINER, in characters.
const WIDTH: usize = 16;

/// Cgroup and container of a task.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct CgroupInfo {
    /// The path of the cgroup from the root of the hierarchy, escaped. None if it is not known.
    pub cgroup: Option<String>,
    /// The id of the container that the cgroup belongs to, with all 64 digits. The container's cgroup is the cgroup
    /// itself or one above it.
    pub container_id: Option<String>,
    /// Whether the cgroup was removed before its path could be looked up.
    #[serde(skip)]
    pub gone: bool,
}

impl CgroupInfo {
    /// Returns the cgroup with this path, and its container.
    pub fn at(cgroup: Option<String>) -> Self {
        let container_id = cgroup.as_deref().and_then(container_of);
        Self {
            container_id: container_id.map(str::to_owned),
            cgroup,
            gone: false,
        }
    }

    /// Returns the cgroup of a running process, as this process sees it. If it cannot be read because the process
    /// has exited, it is `gone`.
    pub fn of_process(pid: u32) -> Self {
        let cgroup = cgroup::of_process(pid);
        Self {
            gone: cgroup.is_none(),
            ..Self::at(cgroup)
        }
    }

    /// Returns the systemd service or scope that the cgroup belongs to, such as `nginx.service`: the innermost folder of
    /// its path with such a name.
    pub(crate) fn unit(&self) -> Option<&str> {
        let path = self.cgroup.as_deref()?;
        path.rsplit('/')
            .find(|folder| folder.ends_with(".service") || folder.ends_with(".scope"))
    }

    /// Returns the name of the task's cgroup for human readers, which `--cgroup` accepts, too: the first digits of
    /// the container's id, or outside containers those of the pod's uid. Otherwise the name is that of the cgroup's
    /// directory, without `.service` for a service. The name is `-` for the root and for a task without a cgroup, and
    /// `[gone]` for a cgroup whose path is not known.
    pub fn name(&self) -> String {
        if self.gone {
            return "[gone]".to_owned();
        }
        if let Some(id) = &self.container_id {
            return id[..SHORT_ID].to_owned();
        }
        let path = self.cgroup.as_deref().unwrap_or_default();
        let pod = path.rsplit('/').find_map(cgroup::pod_uid);
        if let Some(digits) = pod.as_deref().and_then(|uid| uid.get(..SHORT_UID)) {
            return digits.to_owned();
        }
        match path.rsplit('/').next().unwrap_or_default() {
            "" => "-".to_owned(),
            folder => folder.strip_suffix(".service").unwrap_or(folder).to_owned(),
        }
    }
}

/// Returns the values of the labels `unit` and `container` of metrics, which are empty outside units and containers.
pub fn labels(cgroup_info: Option<&CgroupInfo>) -> [&str; 2] {
    let unit = cgroup_info.and_then(CgroupInfo::unit);
    let container = cgroup_info.and_then(|info| info.container_id.as_deref());
    [unit.unwrap_or_default(), container.unwrap_or_default()]
}

/// Returns the id of the innermost container whose cgroup is on this path.
fn container_of(path: &str) -> Option<&str> {
    path.rsplit('/').find_map(cgroup::container_id)
}

/// Formats the column CONTAINER of a row, with the blank after it; empty if the column is not shown. If a name is
/// wider than the column, its middle is omitted, because its end may distinguish it from other names. The width is
/// fixed, because rows are printed one by one. `--cgroup` accepts the name as it is shown.
pub fn column(cgroup_info: Option<&CgroupInfo>, is_shown: bool) -> String {
    let cgroup_info = cgroup_info.filter(|_| is_shown);
    cgroup_info.map_or_else(String::new, |cgroup_info| cell(&cgroup_info.name()))
}

/// Formats the column CONTAINER of a row that belongs to no task.
pub fn empty_column(asked_for: bool) -> String {
    if asked_for { cell("") } else { String::new() }
}

/// Formats a task's container for a sentence: ` in NAME`, with the whole name; empty if the container is not requested.
pub fn inside(cgroup_info: Option<&CgroupInfo>) -> String {
    cgroup_info.map_or_else(String::new, |cgroup_info| {
        format!(" in {}", cgroup_info.name())
    })
}

/// A process as rows name it.
#[derive(Debug, Clone, Default, Serialize)]
pub struct ProcessName {
    /// Id of the process.
    pub pid: u32,
    /// Name of the process (comm), escaped.
    pub comm: String,
    /// Cgroup that the process is in, or was in. None if cgroups are not wanted.
    #[serde(flatten)]
    pub cgroup_info: Option<CgroupInfo>,
    /// Whether text output names the container.
    #[serde(skip)]
    pub container: bool,
}

impl ProcessName {
    /// Returns the text that names the container: ` in NAME`, or nothing if --container is not given.
    pub fn inside(&self) -> String {
        inside(self.cgroup_info.as_ref().filter(|_| self.container))
    }
}

fn cell(name: &str) -> String {
    format!("{:<WIDTH$} ", cut(name))
}

/// Shortens a name to the width of the column.
fn cut(name: &str) -> String {
    let length = name.chars().count();
    if length <= WIDTH {
        return name.to_owned();
    }
    let head: String = name.chars().take(WIDTH / 2).collect();
    let tail = WIDTH - 1 - WIDTH / 2;
    let tail: String = name.chars().skip(length - tail).collect();
    format!("{head}{LEFT_OUT}{tail}")
}

/// Formats the heading of the column, with the width of the column.
pub fn header(asked_for: bool) -> String {
    if asked_for {
        cell("CONTAINER")
    } else {
        String::new()
    }
}

/// Lookup of the cgroups of tasks, by the cgroup ids that the BPF side reports.
pub struct CgroupResolver<'a> {
    /// The map `cgroup_paths`.
    kept: &'a dyn MapCore,
    /// The cgroups of the file system, for paths that the BPF side could not keep.
    tree: Option<Cgroups>,
    /// Cgroups by their ids. The kernel does not reuse ids.
    known: HashMap<u64, CgroupInfo>,
}

impl<'a> CgroupResolver<'a> {
    /// Creates a lookup in this map, which is `cgroup_paths` of the BPF side.
    pub fn new(kept: &'a dyn MapCore) -> Self {
        Self {
            kept,
            tree: None,
            known: HashMap::new(),
        }
    }

    /// Creates a lookup if cgroups are wanted.
    pub fn if_wanted(wanted: bool, kept: &'a dyn MapCore) -> Option<Self> {
        wanted.then(|| Self::new(kept))
    }

    /// Returns the cgroup with this id, and its container. The id is 0 if the BPF side knows no cgroup.
    pub fn of(&mut self, id: u64) -> CgroupInfo {
        if id == 0 {
            return CgroupInfo::default();
        }
        if let Some(cgroup_info) = self.known.get(&id) {
            return cgroup_info.clone();
        }
        let path = self.kept_path(id).or_else(|| {
            let tree = self.tree.get_or_insert_with(Cgroups::new);
            tree.path(id).map(str::to_owned)
        });
        let gone = path.is_none();
        let cgroup_info = CgroupInfo {
            gone,
            ..CgroupInfo::at(path)
        };
        // A missing path is not cached: the BPF side may have kept the complete path by the next lookup.
        if !gone {
            self.known.insert(id, cgroup_info.clone());
        }
        cgroup_info
    }

    /// Returns the path that the BPF side has kept, if the path is complete.
    fn kept_path(&self, id: u64) -> Option<String> {
        let value = self.kept.lookup(&id.to_ne_bytes(), MapFlags::ANY).ok()??;
        let path: &cgroup_path = types::view(&value).ok()?;
        let names: Vec<u8> = path.names.iter().map(|&c| c.cast_unsigned()).collect();
        let names = names.get(..path.bytes as usize)?;
        (path.complete != 0).then(|| file_path::path(names, PathExtent::Complete))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a";
    const POD: &str = "0f7b5b8e_1d2c_4b6a_9c1d_2e3f4a5b6c7d";

    #[test]
    fn containers_go_by_the_first_digits_of_their_ids() {
        let kubepods =
            format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{POD}.slice");
        let uid = POD.replace('_', "-");
        for path in [
            format!("/system.slice/docker-{ID}.scope"),
            format!("/system.slice/docker-{ID}.scope/init.scope/x"),
            format!("/docker/{ID}"),
            format!("/machine.slice/libpod-{ID}.scope/container"),
            format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"),
            format!("{kubepods}/cri-containerd-{ID}.scope"),
            format!("{kubepods}/crio-{ID}.scope"),
            format!("/kubepods/burstable/pod{uid}/{ID}"),
        ] {
            let cgroup_info = CgroupInfo::at(Some(path.clone()));
            assert_eq!(cgroup_info.container_id.as_deref(), Some(ID), "{path}");
            assert_eq!(cgroup_info.name(), "4c01db0b339c", "{path}");
        }
        let cgroup_info = CgroupInfo::at(Some(format!("{kubepods}/sandbox")));
        assert_eq!(
            (cgroup_info.name().as_str(), cgroup_info.container_id),
            ("0f7b5b8e", None)
        );
    }

    #[test]
    fn what_is_in_no_container_goes_by_its_folder() {
        for (path, name) in [
            (Some("/system.slice/db.service"), "db"),
            (
                Some("/user.slice/user-0.slice/session-3.scope"),
                "session-3.scope",
            ),
            (Some("/a\\x1b/b"), "b"),
            (Some("/"), "-"),
            (None, "-"),
        ] {
            let cgroup_info = CgroupInfo::at(path.map(str::to_owned));
            assert_eq!(cgroup_info.container_id, None);
            assert_eq!(cgroup_info.name(), name);
        }
        let gone = CgroupInfo {
            gone: true,
            ..CgroupInfo::default()
        };
        assert_eq!(gone.name(), "[gone]");
    }

    #[test]
    fn a_process_has_a_cgroup_until_it_ends() {
        let own = CgroupInfo::of_process(std::process::id());
        assert!(!own.gone && own.cgroup.is_some());
        // No process has a PID of this size.
        assert_eq!(CgroupInfo::of_process(u32::MAX).name(), "[gone]");
    }

    #[test]
    fn the_column_is_as_wide_as_its_name() {
        let cgroup_info = CgroupInfo::at(Some("/db.service".into()));
        assert_eq!(column(Some(&cgroup_info), true), "db               ");
        assert_eq!(header(true), "CONTAINER        ");
        assert_eq!(empty_column(true), " ".repeat(17));
        assert_eq!(
            [
                column(None, true),
                inside(None),
                header(false),
                empty_column(false)
            ],
            [const { String::new() }; 4]
        );
    }

    #[test]
    fn the_unit_is_the_innermost_service_or_scope() {
        let unit = |path: &str| {
            CgroupInfo::at(Some(path.to_owned()))
                .unit()
                .map(str::to_owned)
        };
        assert_eq!(
            unit("/system.slice/nginx.service/worker").as_deref(),
            Some("nginx.service")
        );
        let session = "/user.slice/user-0.slice/user@0.service/app.slice/run-1.scope";
        assert_eq!(unit(session).as_deref(), Some("run-1.scope"));
        assert_eq!(unit("/system.slice"), None);
        assert_eq!(unit("/"), None);
    }

    #[test]
    fn a_long_name_keeps_its_ends_and_the_column_its_width() {
        for (folder, shown) in [
            ("systemd-journald.service", "systemd-journald "),
            ("NetworkManager-dispatcher.service", "NetworkM…patcher "),
            (
                "app-gnome-org.gnome.Terminal-4961.scope",
                "app-gnom…1.scope ",
            ),
            ("ååååååååååååååååå", "åååååååå…ååååååå "),
        ] {
            let cgroup_info = CgroupInfo::at(Some(format!("/user.slice/{folder}")));
            assert_eq!(column(Some(&cgroup_info), true), shown);
            let whole = folder.strip_suffix(".service").unwrap_or(folder);
            assert_eq!(inside(Some(&cgroup_info)), format!(" in {whole}"));
            assert_eq!(shown.chars().count(), header(true).len());
        }
    }
}
