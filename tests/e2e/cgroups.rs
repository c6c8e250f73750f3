//! Cgroups that are named by what runs in them: a systemd unit, the id of a container, the uid of a pod, or the
//! text of the column CONTAINER. Also names that several cgroups share.

use anyhow::{Context, Result, ensure};
use libtest_mimic::Trial;

use crate::containers::Layout;
use crate::harness::{self, Tool, Workload};

pub(crate) fn tests() -> Vec<Trial> {
    harness::tests! { "cgroups":
        each_is_found_by_what_runs_in_it,
        what_the_column_shows_is_found,
        several_of_a_name_are_listed [Once],
    }
}

/// Id of a container that no other test uses.
const ID: &str = "9e3779b97f4a7c159e3779b97f4a7c159e3779b97f4a7c159e3779b97f4a7c15";
const UID: &str = "bf58476d-1ce4-e5b9-94d0-49bb133111eb";

/// Checks that `faults --cgroup NAME` counts the process in that cgroup, and no other.
fn expect_only(inside: Workload, name: &str) -> Result<()> {
    let mut inside = inside;
    let mut outside = Workload::start("minor", &["29"])?;
    let mut tool = Tool::start("faults", &["-j", "--by-process", "--cgroup", name])?;
    tool.wait_for_stderr("tracing page faults")?;
    inside.work()?;
    outside.work()?;
    let ended = tool.interrupt()?;
    let rows = ended.objects()?;
    let mut pids = rows
        .iter()
        .filter(|row| row["type"] == "process")
        .map(|row| row["pid"].to_string());
    ensure!(
        (pids.next(), pids.next()) == (Some(inside.pid()), None),
        "{name}: {ended:?}"
    );
    inside.finish()?;
    Ok(())
}

fn each_is_found_by_what_runs_in_it() -> Result<()> {
    let in_slice = UID.replace('-', "_");
    let pod =
        format!("kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{in_slice}.slice");
    for (path, name) in [
        (format!("system.slice/docker-{ID}.scope"), &ID[..12]),
        (format!("docker/{ID}"), &ID[..8]),
        (format!("machine.slice/libpod-{ID}.scope/container"), ID),
        (format!("{pod}/cri-containerd-{ID}.scope"), &ID[..12]),
        (format!("{pod}/crio-{ID}.scope"), &ID[..12]),
        (format!("{pod}/crio-{ID}.scope"), UID),
        (format!("kubepods/burstable/pod{UID}/{ID}"), &UID[..8]),
        ("system.slice/memtools-db.service".to_owned(), "memtools-db"),
        (
            "system.slice/memtools-db.service".to_owned(),
            "memtools-db.service",
        ),
    ] {
        let inside = Workload::start("minor", &["23"])?;
        let mut layout = Layout::new()?;
        layout.put(&inside.pid(), &path)?;
        expect_only(inside, name).with_context(|| path.clone())?;
    }
    Ok(())
}

/// A name that is wider than the column, as a tool has printed it, is accepted.
fn what_the_column_shows_is_found() -> Result<()> {
    let mut workload = Workload::start("minor", &["23"])?;
    let pid = workload.pid();
    let mut layout = Layout::new()?;
    layout.put(&pid, "system.slice/memtools-with-a-long-name.service")?;
    let mut tool = Tool::start("faults", &["--by-process", "--container", "-p", &pid])?;
    tool.wait_for_stderr("tracing page faults")?;
    workload.work()?;
    let ended = tool.interrupt()?;
    let shown = "memtools…ng-name";
    let mut lines = ended.stdout.lines();
    let header = lines.next().context("no header")?;
    let row = lines.next().context("no row")?;
    ensure!(
        header == "PID     COMM             CONTAINER        FAULTS",
        "{ended:?}"
    );
    ensure!(
        row.starts_with(&format!("{pid:<7} minor            {shown:<16} ")),
        "{ended:?}"
    );

    let inside = Workload::start("minor", &["23"])?;
    layout.put(
        &inside.pid(),
        "system.slice/memtools-with-a-long-name.service",
    )?;
    workload.finish()?;
    expect_only(inside, shown)
}

fn several_of_a_name_are_listed() -> Result<()> {
    let mut layout = Layout::new()?;
    let (one, other) = (
        Workload::start("minor", &["23"])?,
        Workload::start("minor", &["29"])?,
    );
    let short = "c2b2ae3d27d4";
    for (workload, digit) in [(&one, "0"), (&other, "1")] {
        let id = format!("{short}{}", digit.repeat(52));
        layout.put(&workload.pid(), &format!("system.slice/docker-{id}.scope"))?;
    }
    let ended = harness::run("faults", &["--cgroup", short])?;
    ensure!(ended.status.code() == Some(2), "{ended:?}");
    let (_, listed) = ended
        .stderr
        .split_once("several cgroups go by it: ")
        .with_context(|| format!("{ended:?}"))?;
    ensure!(
        listed.matches("/system.slice/docker-c2b2ae3d27d4").count() == 2,
        "{ended:?}"
    );
    Ok(())
}
