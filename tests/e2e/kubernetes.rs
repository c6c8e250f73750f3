//! The containers of packaging/kubernetes. A command that runs as a file says, in a root like a pod's, does its
//! work; without any one of the file's capabilities, it names the missing capability.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use caps::{CapSet, CapsHashSet};
use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_no_new_privs;
use nix::unistd::{chdir, chroot};
use serde::Deserialize;
use serde_yaml_ng::{self as yaml, Value};
use tempfile::TempDir;

use crate::harness::{self, Tool, ToolOutput, Workload, tool};
use crate::java_kits::{self, Java};
use crate::java_names::{NOBODY, Traces};
use crate::memleak;
use crate::memtriage::doctor::doctor;
use crate::pressure::{Group, Setting};

const DAEMON_SET: &str = include_str!("../../packaging/kubernetes/daemonset.yaml");
const DEBUG: &str = include_str!("../../packaging/kubernetes/debug.yaml");
const DEBUG_SYS_ADMIN: &str = include_str!("../../packaging/kubernetes/debug-sys-admin.yaml");

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests!("kubernetes":
        the_daemon_set_s_agent_lacks_nothing,
        each_capability_of_the_agent_is_wanted,
        memleak_runs_on_demand,
        every_tool_can_run_on_demand,
        names_of_java_are_asked_for_with_two_capabilities_more [Host],
    )
}

/// ConfigMap of the agent.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct ConfigMap {
    api_version: String,
    kind: String,
    metadata: Value,
    data: BTreeMap<String, String>,
}

/// DaemonSet, with only the fields that ours uses. Any other name in the file, such as one that Kubernetes does
/// not know, is an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DaemonSet {
    api_version: String,
    kind: String,
    metadata: Value,
    spec: DaemonSetSpec,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DaemonSetSpec {
    selector: Selector,
    template: Template,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Selector {
    match_labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Template {
    metadata: Labels,
    spec: PodSpec,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Labels {
    labels: BTreeMap<String, String>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct PodSpec {
    #[serde(rename = "hostPID")]
    host_pid: bool,
    automount_service_account_token: bool,
    #[serde(rename = "tolerations")]
    _tolerations: Value,
    containers: Vec<Container>,
    volumes: Vec<Volume>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Container {
    name: String,
    image: String,
    command: Vec<String>,
    ports: Vec<Port>,
    security_context: SecurityContext,
    resources: Resources,
    volume_mounts: Vec<VolumeMount>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Port {
    name: String,
    container_port: u16,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct SecurityContext {
    run_as_user: u32,
    allow_privilege_escalation: bool,
    #[serde(default)]
    read_only_root_filesystem: bool,
    #[serde(default, rename = "appArmorProfile")]
    _app_armor_profile: Value,
    #[serde(default, rename = "seccompProfile")]
    _seccomp_profile: Value,
    capabilities: Capabilities,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Capabilities {
    drop: Vec<String>,
    add: Vec<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Resources {
    #[serde(rename = "requests")]
    _requests: Value,
    limits: Limits,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Limits {
    memory: String,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct VolumeMount {
    name: String,
    mount_path: PathBuf,
    /// Path below the volume's root.
    #[serde(default)]
    sub_path: PathBuf,
    #[serde(default)]
    read_only: bool,
}

/// Volume, which is a path of the node or a ConfigMap.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Volume {
    name: String,
    host_path: Option<HostPath>,
    config_map: Option<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HostPath {
    path: PathBuf,
    r#type: String,
}

/// Part of a container's specification that `kubectl debug --custom` takes.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Debug {
    security_context: SecurityContext,
    volume_mounts: Vec<VolumeMount>,
}

/// Returns the agent's configuration and the pod of the DaemonSet, after checking what Kubernetes requires.
fn daemon_set() -> Result<(String, PodSpec)> {
    let (config, set) = DAEMON_SET.split_once("\n---\n").context("one document")?;
    let mut config: ConfigMap = yaml::from_str(config)?;
    ensure!(config.api_version == "v1" && config.kind == "ConfigMap");
    let set: DaemonSet = yaml::from_str(set)?;
    ensure!(set.api_version == "apps/v1" && set.kind == "DaemonSet");
    for field in ["name", "namespace"] {
        ensure!(set.metadata[field] == config.metadata[field], "{field}");
    }
    let template = set.spec.template;
    ensure!(set.spec.selector.match_labels == template.metadata.labels);
    let pod = template.spec;
    ensure!(pod.host_pid && !pod.automount_service_account_token);
    let [container] = &pod.containers[..] else {
        anyhow::bail!("other containers than one");
    };
    ensure!(container.name == container.command[0]);
    let tag = concat!("localhost/bpf-memtools:", env!("CARGO_PKG_VERSION"));
    ensure!(container.image == tag, "{}", container.image);
    let [port] = &container.ports[..] else {
        anyhow::bail!("other ports than one");
    };
    let file = config.data.remove("memagent.toml").context("no file")?;
    let listens = format!("listen = \"0.0.0.0:{}\"", port.container_port);
    ensure!(port.name == "metrics" && file.contains(&listens), "{file}");
    ensure!(container.volume_mounts.len() == pod.volumes.len());
    for mount in &container.volume_mounts {
        let volume = pod.volumes.iter().find(|volume| volume.name == mount.name);
        let volume = volume.with_context(|| format!("no volume {}", mount.name))?;
        match (&volume.host_path, &volume.config_map) {
            (Some(path), None) => ensure!(path.path.is_absolute()),
            (None, Some(map)) => ensure!(map["name"] == config.metadata["name"]),
            _ => anyhow::bail!("{} has no source, or two", volume.name),
        }
    }
    Ok((file, pod))
}

/// Returns the debug file that suffices on this kernel: from 6.6 on, uprobes do not need CAP_SYS_ADMIN.
fn debug_file() -> Result<&'static str> {
    Ok(if uprobes_want_sys_admin()? {
        DEBUG_SYS_ADMIN
    } else {
        DEBUG
    })
}

/// Whether uprobes need CAP_SYS_ADMIN, as before 6.6.
pub(crate) fn uprobes_want_sys_admin() -> Result<bool> {
    let types = fs::read("/sys/kernel/btf/vmlinux")?;
    let name = b"\0bpf_uprobe_multi_link\0";
    Ok(!types.windows(name.len()).any(|bytes| bytes == name))
}

/// Returns the root and the security context of containers that `kubectl debug` makes. Their volume `host-root`
/// is the node's root, where systemd has mounted tracefs; here, tracefs may not be mounted.
fn debug() -> Result<(Root, SecurityContext)> {
    let debug: Debug = yaml::from_str(debug_file()?)?;
    let [tracing] = &debug.volume_mounts[..] else {
        anyhow::bail!("other volumes than one");
    };
    ensure!(tracing.name == "host-root" && tracing.read_only);
    ensure!(tracing.sub_path == Path::new("sys/kernel/tracing"));
    let mut root = Root::new()?;
    let there = root.inside(&tracing.mount_path)?;
    // Only this mount becomes read-only. Mounted read-only in one step, tracefs would be read-only for every
    // process before 6.12.
    root.mounts
        .push((None, there.clone(), Some("tracefs"), MsFlags::empty()));
    root.mounts.push((None, there, None, READ_ONLY));
    Ok((root, debug.security_context))
}

impl SecurityContext {
    /// Returns the capabilities that a container has.
    fn capabilities(&self) -> Result<CapsHashSet> {
        let Capabilities { drop, add } = &self.capabilities;
        ensure!(*drop == ["ALL"], "{drop:?}");
        let parsed = add.iter().map(|name| format!("CAP_{name}").parse());
        parsed.collect::<Result<_, _>>().context("no capability")
    }
}

/// Flags that make an existing mount read-only, and no other mount of the same file system.
const READ_ONLY: MsFlags = MsFlags::MS_BIND
    .union(MsFlags::MS_RDONLY)
    .union(MsFlags::MS_REMOUNT);

/// Root directory with what a container runtime gives to a pod with `hostPID`, and with the tools in /usr/bin.
struct Root {
    folder: TempDir,
    /// Mounts that the command itself makes, in a mount namespace of its own: source, target, type, flags.
    mounts: Vec<(Option<PathBuf>, PathBuf, Option<&'static str>, MsFlags)>,
}

impl Root {
    fn new() -> Result<Self> {
        let folder = harness::scratch()?;
        fs::set_permissions(folder.path(), Permissions::from_mode(0o755))?;
        let top = folder.path();
        for inside in ["proc", "sys", "dev", "usr/bin"] {
            fs::create_dir_all(top.join(inside))?;
        }
        File::create(top.join("dev/null"))?;
        let tools = tool("memtriage");
        let tools = tools.parent().context("no folder")?;
        let (bind, read_only) = (MsFlags::MS_BIND, MsFlags::MS_RDONLY);
        let (proc, sys) = (top.join("proc"), top.join("sys"));
        let mounts = vec![
            (Some(top.to_owned()), top.to_owned(), None, bind),
            (Some(tools.to_owned()), top.join("usr/bin"), None, bind),
            (None, proc.clone(), Some("proc"), MsFlags::empty()),
            (Some(proc.join("sys")), proc.join("sys"), None, bind),
            (None, proc.join("sys"), None, READ_ONLY),
            (None, sys.clone(), Some("sysfs"), read_only),
            (None, sys.join("fs/cgroup"), Some("cgroup2"), read_only),
            (Some("/dev/null".into()), top.join("dev/null"), None, bind),
        ];
        Ok(Self { folder, mounts })
    }

    /// Returns the path outside of the root for a path inside.
    fn inside(&self, path: &Path) -> Result<PathBuf> {
        Ok(self.folder.path().join(path.strip_prefix("/")?))
    }

    /// Returns a command in this root and in a cgroup, with the user and the capabilities of this context.
    fn command(
        &self,
        name: &str,
        context: &SecurityContext,
        group: Option<&Group>,
    ) -> Result<Command> {
        ensure!(context.run_as_user == 0, "{}", context.run_as_user);
        let mut mounts = self.mounts.clone();
        let top = self.folder.path().to_owned();
        if context.read_only_root_filesystem {
            mounts.push((None, top.clone(), None, READ_ONLY));
        }
        let kept = context.capabilities()?;
        let all = caps::runtime::thread_all_supported();
        let dropped: Vec<_> = all.difference(&kept).copied().collect();
        let may_gain = context.allow_privilege_escalation;
        let procs = group.map(|group| File::create(Path::new(&group.path()).join("cgroup.procs")));
        let procs = procs.transpose()?;
        let mut command = Command::new(Path::new("/usr/bin").join(name));
        command.env_clear().env("PATH", "/usr/bin");
        let enter = move || {
            if let Some(mut procs) = procs.as_ref() {
                procs.write_all(b"0")?;
            }
            unshare(CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWCGROUP)?;
            let none = None::<&str>;
            mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
            for (from, to, kind, flags) in &mounts {
                mount(from.as_ref(), to, *kind, *flags, none)?;
            }
            chroot(&top)?;
            chdir("/")?;
            for capability in &dropped {
                caps::drop(None, CapSet::Bounding, *capability).map_err(io::Error::other)?;
            }
            if !may_gain {
                set_no_new_privs()?;
            }
            Ok(())
        };
        // SAFETY: system calls between fork and exec.
        unsafe { command.pre_exec(enter) };
        command.stdin(Stdio::null());
        Ok(command)
    }
}

/// Has the container of the DaemonSet check what works, with these capabilities. Its directory of incidents is a new one,
/// and it has cgroups only if they are of version 2.
fn check_agent(context: &SecurityContext) -> Result<ToolOutput> {
    let (config, pod) = daemon_set()?;
    let container = &pod.containers[0];
    let node = harness::scratch()?;
    let mut root = Root::new()?;
    for mount in &container.volume_mounts {
        let volume = pod.volumes.iter().find(|volume| volume.name == mount.name);
        let path = volume.and_then(|volume| volume.host_path.as_ref());
        let there = root.inside(&mount.mount_path)?;
        let from = match path {
            // Not the directories of this machine's own agent and kubelet.
            Some(path) if path.r#type == "DirectoryOrCreate" => {
                let from = node.path().join(&volume.context("no volume")?.name);
                fs::create_dir(&from)?;
                from
            }
            Some(path) => path.path.clone(),
            None => {
                let from = node.path().join("config");
                fs::create_dir(&from)?;
                // Another agent may run on this machine.
                let config = config.replace("0.0.0.0:9754", "0");
                fs::write(from.join("memagent.toml"), config)?;
                from
            }
        };
        if from.is_dir() {
            fs::create_dir_all(&there)?;
        } else {
            File::create(&there)?;
        }
        root.mounts
            .push((Some(from), there.clone(), None, MsFlags::MS_BIND));
        if mount.read_only {
            root.mounts.push((None, there, None, READ_ONLY));
        }
    }
    let group = Group::new("memtools-pod", bytes(&container.resources.limits.memory)?)?;
    let mut command = root.command(&container.command[0], context, Some(&group))?;
    command.args(&container.command[1..]).arg("--check");
    Tool::spawn(&mut command)?.wait()
}

/// Parses a quantity in mebibytes, and returns bytes.
fn bytes(quantity: &str) -> Result<u64> {
    let number = quantity.strip_suffix("Mi").context("not in Mi")?;
    Ok(number.parse::<u64>()? << 20)
}

fn the_daemon_set_s_agent_lacks_nothing() -> Result<()> {
    let (_, pod) = daemon_set()?;
    let checked = check_agent(&pod.containers[0].security_context)?;
    ensure!(matches!(checked.status.code(), Some(0 | 3)), "{checked:?}");
    let has_cgroups = Path::new("/sys/fs/cgroup/cgroup.controllers").exists();
    let lacks = checked.stdout.lines().filter(|line| {
        let is_of_machine = line.contains("pressure:") || line.contains("cgroups:") && !has_cgroups;
        !line.starts_with("ok  ") && !is_of_machine
    });
    let lacks: Vec<&str> = lacks.collect();
    ensure!(lacks.is_empty(), "{lacks:?}");
    ensure!(
        checked
            .stdout
            .contains("ok    incidents: in /var/lib/memagent\n"),
        "{checked:?}"
    );
    Ok(())
}

/// Without any one of its capabilities, the agent names what it runs without.
fn each_capability_of_the_agent_is_wanted() -> Result<()> {
    let (_, mut pod) = daemon_set()?;
    let context = pod.containers.remove(0).security_context;
    let had = caps::read(None, CapSet::Permitted)?;
    for without in context.capabilities()?.intersection(&had) {
        let (_, mut pod) = daemon_set()?;
        let mut context = pod.containers.remove(0).security_context;
        let name = without.to_string();
        let add = &mut context.capabilities.add;
        add.retain(|one| name.strip_prefix("CAP_") != Some(one));
        let checked = check_agent(&context)?;
        ensure!(
            checked.stdout.contains(&name),
            "nothing requires {name}: {checked:?}"
        );
    }
    Ok(())
}

fn memleak_runs_on_demand() -> Result<()> {
    let _permits = permit_perf_events()?;
    let mut workload = Workload::start("alloc", &["one", "malloc", "23", "1009"])?;
    let (root, context) = debug()?;
    let mut command = root.command("memleak", &context, None)?;
    command.args(["-j", "-o", "0", "-p", &workload.pid()]);
    let mut memleak = Tool::spawn(&mut command)?;
    memleak.wait_for_stderr(memleak::READY)?;
    workload.work()?;
    let objects = memleak.interrupt()?.objects()?;
    let mut stacks = objects.iter().filter(|object| object["type"] == "stack");
    ensure!(
        stacks.any(|stack| stack["bytes"] == 23 * 1009 && stack["allocations"] == 23),
        "{objects:?}"
    );
    workload.finish()?;
    Ok(())
}

/// In the container, the doctor says that every tool can run that root can run outside of it.
fn every_tool_can_run_on_demand() -> Result<()> {
    let _permits = permit_perf_events()?;
    let (root, context) = debug()?;
    let (inside, _) = doctor(&mut root.command("memtriage", &context, None)?)?;
    if inside.iter().all(|row| row["works"] == true) {
        return Ok(());
    }
    let (outside, _) = doctor(&mut Command::new(tool("memtriage")))?;
    for (inside, outside) in inside.iter().zip(&outside) {
        ensure!(
            inside["works"] == outside["works"],
            "{inside}, else {outside}"
        );
    }
    Ok(())
}

/// Perf map of another user's HotSpot. Without either of the two capabilities that a comment in the file names,
/// memleak says which one it is, and reads names from memory.
fn names_of_java_are_asked_for_with_two_capabilities_more() -> Result<()> {
    let _permits = permit_perf_events()?;
    for file in [DEBUG, DEBUG_SYS_ADMIN] {
        ensure!(
            file.contains(
                "# --java-names for processes of other users wants KILL and DAC_OVERRIDE"
            )
        );
    }
    let java = Java::compile(&java_kits::kits()?[0])?;
    fs::set_permissions(java.folder(), Permissions::from_mode(0o777))?;
    for (more, lacks) in [
        (&[][..], Some("CAP_KILL")),
        (&["KILL"], Some("CAP_DAC_OVERRIDE")),
        (&["KILL", "DAC_OVERRIDE"], None),
    ] {
        let mut workload = java.start_as(NOBODY, &[], &["7"])?;
        let traces = Traces::of(&workload.pid());
        let (root, mut context) = debug()?;
        let add = &mut context.capabilities.add;
        add.extend(more.iter().map(|&name| name.to_owned()));
        let mut memleak = root.command("memleak", &context, None)?;
        memleak.args(["-o", "0", "--java-names", "-p", &workload.pid()]);
        let mut memleak = Tool::spawn(&mut memleak)?;
        memleak.wait_for_stderr(memleak::READY)?;
        workload.work()?;
        let ended = memleak.interrupt()?;
        ensure!(workload.finish()?.success());
        let said = ended
            .stderr
            .lines()
            .find(|line| line.contains("is not queried"));
        let is_told = match (said, lacks) {
            (Some(said), Some(lacks)) => said.contains(&format!("it requires {lacks}")),
            (None, None) => traces.has_map(),
            _ => false,
        };
        ensure!(is_told, "{more:?}: {}", ended.stderr);
    }
    Ok(())
}

/// Lowers perf_event_paranoid to where CAP_PERFMON, which debug.yaml asks for, permits perf events.
fn permit_perf_events() -> Result<Option<Setting>> {
    let paranoid = "/proc/sys/kernel/perf_event_paranoid";
    let forbids = fs::read_to_string(paranoid)?.trim().parse::<i32>()? > 2;
    forbids.then(|| Setting::change(paranoid, "2")).transpose()
}
