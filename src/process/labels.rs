//! What runs in a cgroup, as labels: systemd unit, and pod and container of Kubernetes or another runtime. They come
//! from the cgroup's path, and the names of pods and containers from the names of the kubelet's log files. No API server
//! is asked.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::print::text;
use crate::process::cgroup;
use crate::process::container::CgroupInfo;

/// Directory in which the kubelet has a link for the log of each container, `POD_NAMESPACE_CONTAINER-ID.log`.
pub const CONTAINER_LOGS: &str = "/var/log/containers";
/// Maximum number of log files whose names are read.
const MAX_LOGS: usize = 20_000;

/// Labels of a cgroup. Each is empty if it does not apply, or is not known.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct Workload {
    /// Systemd service or scope, such as `redis.service`; empty for containers.
    pub unit: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod, or its uid if the name is not known.
    pub pod: String,
    /// Name of the container in its pod.
    pub container: String,
    /// Full id of the container.
    pub container_id: String,
}

impl Workload {
    /// Names of the labels, in the order of [`Workload::labels`].
    pub const NAMES: [&str; 5] = ["unit", "namespace", "pod", "container", "container_id"];

    /// Returns the labels that are not empty, with their names.
    pub fn labels(&self) -> Vec<(&'static str, String)> {
        let values = [
            &self.unit,
            &self.namespace,
            &self.pod,
            &self.container,
            &self.container_id,
        ];
        let labels = Self::NAMES.into_iter().zip(values);
        let labels = labels.filter(|(_, value)| !value.is_empty());
        labels.map(|(name, value)| (name, value.clone())).collect()
    }

    /// Returns the labels of the cgroup at this path, as far as the path has them.
    pub fn at(path: &str) -> Self {
        let info = CgroupInfo::at(Some(path.to_owned()));
        let pod = path.rsplit('/').find_map(cgroup::pod_uid);
        let unit = info
            .unit()
            .filter(|unit| cgroup::container_id(unit).is_none());
        Self {
            unit: unit
                .filter(|_| pod.is_none())
                .unwrap_or_default()
                .to_owned(),
            pod: pod.unwrap_or_default(),
            container_id: info.container_id.unwrap_or_default(),
            ..Self::default()
        }
    }
}

/// Names of pods and containers by the ids of containers.
#[derive(Debug)]
pub struct ContainerNames {
    folder: PathBuf,
    /// Namespace, pod and container.
    known: HashMap<String, [String; 3]>,
}

impl ContainerNames {
    /// Creates a lookup in this directory.
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self {
            folder: folder.into(),
            known: HashMap::new(),
        }
    }

    /// Reads the names of the log files again.
    pub fn look(&mut self) {
        let entries = fs::read_dir(&self.folder).into_iter().flatten().flatten();
        let names = entries.take(MAX_LOGS).filter_map(|entry| {
            let name = text::escape_bytes(entry.file_name().as_encoded_bytes());
            parse(&name)
        });
        self.known = names.collect();
    }

    /// Adds the names to the labels of a container.
    pub fn complete(&self, mut workload: Workload) -> Workload {
        if let Some([namespace, pod, container]) = self.known.get(&workload.container_id) {
            workload.namespace.clone_from(namespace);
            workload.pod.clone_from(pod);
            workload.container.clone_from(container);
        }
        workload
    }

    /// Directory whose file names are read.
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Parses the name of a log file. None of the three names can contain an underscore.
fn parse(name: &str) -> Option<(String, [String; 3])> {
    let (rest, id) = name.strip_suffix(".log")?.rsplit_once('-')?;
    let id = cgroup::container_id(id)?;
    let mut names = rest.split('_').map(str::to_owned);
    let (pod, namespace, container) = (names.next()?, names.next()?, names.next()?);
    names
        .next()
        .is_none()
        .then(|| (id.to_owned(), [namespace, pod, container]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a4c01db0b339c7f2a";
    const POD: &str = "0f7b5b8e-1d2c-4b6a-9c1d-2e3f4a5b6c7d";

    #[test]
    fn paths_of_all_runtimes_have_their_labels() {
        let under = POD.replace('-', "_");
        let mirror = "0123456789abcdef".repeat(2);
        let kubepods =
            format!("/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{under}.slice");
        for (path, expected) in [
            (
                format!("{kubepods}/cri-containerd-{ID}.scope"),
                ["", POD, ID],
            ),
            (format!("{kubepods}/crio-{ID}.scope"), ["", POD, ID]),
            (
                format!("/kubepods.slice/kubepods-pod{under}.slice/crio-{ID}.scope"),
                ["", POD, ID],
            ),
            (
                format!("/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{under}.slice"),
                ["", POD, ""],
            ),
            (format!("/kubepods/burstable/pod{POD}/{ID}"), ["", POD, ID]),
            (format!("/kubepods/pod{POD}"), ["", POD, ""]),
            (
                format!("/kubepods/burstable/pod{mirror}/{ID}"),
                ["", &mirror, ID],
            ),
            (
                format!("{kubepods}/cri-containerd-{ID}.scope/init.scope"),
                ["", POD, ID],
            ),
            (format!("/system.slice/docker-{ID}.scope"), ["", "", ID]),
            (format!("/docker/{ID}"), ["", "", ID]),
            (
                format!("/machine.slice/libpod-{ID}.scope/container"),
                ["", "", ID],
            ),
            (
                "/system.slice/redis.service".into(),
                ["redis.service", "", ""],
            ),
            (
                "/system.slice/podman.service".into(),
                ["podman.service", "", ""],
            ),
            (
                "/system.slice/system-getty.slice/getty@tty1.service".into(),
                ["getty@tty1.service", "", ""],
            ),
            (
                "/user.slice/user-0.slice/user@0.service/app.slice/x.scope".into(),
                ["x.scope", "", ""],
            ),
            ("/system.slice".into(), ["", "", ""]),
            ("/".into(), ["", "", ""]),
        ] {
            let Workload {
                unit,
                pod,
                container_id,
                ..
            } = Workload::at(&path);
            assert_eq!([&*unit, &*pod, &*container_id], expected, "{path}");
        }
    }

    #[test]
    fn names_come_from_the_names_of_log_files() {
        let folder = tempfile::tempdir().expect("a directory");
        for name in [
            format!("web-0_shop_nginx-proxy-{ID}.log"),
            "web-0_shop_nginx-37.log".into(),
            format!("a_b-{}.log", "0".repeat(64)),
            format!("a_b_c_d-{}.log", "1".repeat(64)),
            "x".into(),
        ] {
            fs::write(folder.path().join(name), "").expect("a file");
        }
        let mut names = ContainerNames::new(folder.path());
        names.look();
        assert_eq!(names.known.len(), 1);
        let path = format!("/kubepods/pod{POD}/{ID}");
        assert_eq!(
            names.complete(Workload::at(&path)).labels(),
            [
                ("namespace", "shop".to_owned()),
                ("pod", "web-0".to_owned()),
                ("container", "nginx-proxy".to_owned()),
                ("container_id", ID.to_owned()),
            ]
        );
        let other = Workload::at("/docker/37");
        assert_eq!(names.complete(other.clone()), other);
        assert_eq!(
            ContainerNames::new("/nonexistent").complete(other.clone()),
            other
        );
    }
}
