//! What --doctor says about the machine: the conditions that decide what the tools can do here.

use std::fs;
use std::io::{self, Write};
use std::path::Path;

use memtools::bpf::kernel_support::{self, BTF, TRACEFS};
use memtools::host::capabilities::{self, Capability};
use memtools::host::mounts::Mounts;
use memtools::print::output::Row;
use nix::sys::utsname::uname;
use serde::Serialize;

use crate::doctor;

/// Capabilities that the tools need for all that they can do.
const WANTED: [Capability; 8] = [
    Capability::CAP_BPF,
    Capability::CAP_PERFMON,
    Capability::CAP_SYS_PTRACE,
    Capability::CAP_DAC_READ_SEARCH,
    Capability::CAP_SYSLOG,
    Capability::CAP_IPC_LOCK,
    Capability::CAP_SYS_RESOURCE,
    Capability::CAP_SYS_ADMIN,
];

/// Row of a condition.
#[derive(Debug, Serialize)]
#[serde(tag = "type", rename = "condition")]
pub(crate) struct Condition {
    name: &'static str,
    met: bool,
    /// What was found, or what is missing, with the remedy.
    text: String,
}

impl Condition {
    fn new(name: &'static str, found: Result<String, String>) -> Self {
        let met = found.is_ok();
        let (Ok(text) | Err(text)) = found;
        Self { name, met, text }
    }
}

impl Row for Condition {
    fn text(&self, out: &mut dyn Write) -> io::Result<()> {
        doctor::write_row(out, self.name, self.met, [&*self.text])
    }
}

/// Returns the conditions of this machine, in the order in which they are printed.
pub(crate) fn conditions() -> Vec<Condition> {
    let mounts = Mounts::now();
    vec![
        Condition::new("kernel", kernel()),
        Condition::new("sysfs", sysfs(&mounts)),
        Condition::new("BTF", btf()),
        Condition::new("tracefs", tracefs()),
        Condition::new("cgroups", cgroups(&mounts)),
        Condition::new("privileges", privileges(capabilities::has)),
    ]
}

fn kernel() -> Result<String, String> {
    let name = uname().map_err(|error| format!("its version is unknown: {error}"))?;
    let found = format!(
        "{} {}",
        name.release().to_string_lossy(),
        name.machine().to_string_lossy()
    );
    if kernel_support::is_before(5, 10) {
        return Err(format!("{found}; 5.10 or later is needed"));
    }
    Ok(found)
}

/// The tools only read below /sys.
fn sysfs(mounts: &Mounts) -> Result<String, String> {
    match mounts.iter().filter(|mount| mount.kind == "sysfs").last() {
        Some(mount) if mount.has_option("ro") => Ok("read-only, which suffices".to_owned()),
        Some(_) => Ok("mounted".to_owned()),
        None => Err("not mounted; try: mount -t sysfs sysfs /sys".to_owned()),
    }
}

fn btf() -> Result<String, String> {
    match fs::File::open(BTF) {
        Ok(_) => Ok(BTF.to_owned()),
        Err(error) => Err(format!(
            "{BTF}: {error}; the kernel needs CONFIG_DEBUG_INFO_BTF=y"
        )),
    }
}

fn tracefs() -> Result<String, String> {
    let mut folders = TRACEFS.iter();
    let found = folders.find(|folder| Path::new(folder).join("events").exists());
    found.map_or_else(
        || {
            Err(format!(
                "not mounted, or not readable; as root: mount -t tracefs tracefs {}",
                TRACEFS[0]
            ))
        },
        |folder| Ok((*folder).to_owned()),
    )
}

fn cgroups(mounts: &Mounts) -> Result<String, String> {
    let of_version_1 = mounts.cgroup1_memory().map(|folder| (1, folder));
    let of_version_2 = mounts.cgroup2().map(|folder| (2, folder));
    let found: Vec<String> = of_version_1
        .into_iter()
        .chain(of_version_2)
        .map(|(version, folder)| format!("version {version} on {}", folder.display()))
        .collect();
    if found.is_empty() {
        return Err(
            "not mounted: --cgroup and the names of containers are not available".to_owned(),
        );
    }
    Ok(found.join(", "))
}

fn privileges(has: impl Fn(Capability) -> bool) -> Result<String, String> {
    let missing = WANTED.iter().filter(|capability| !has(**capability));
    let missing: Vec<String> = missing.map(ToString::to_string).collect();
    if missing.is_empty() {
        return Ok("all that the tools need".to_owned());
    }
    Err(format!(
        "missing: {}; run it as root, or with these capabilities",
        missing.join(", ")
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capabilities_that_are_missing_are_named() {
        assert_eq!(
            privileges(|_| true),
            Ok("all that the tools need".to_owned())
        );
        let without =
            |capability| capability != Capability::CAP_BPF && capability != Capability::CAP_SYSLOG;
        assert_eq!(
            privileges(without),
            Err(
                "missing: CAP_BPF, CAP_SYSLOG; run it as root, or with these capabilities"
                    .to_owned()
            )
        );
    }

    #[test]
    fn cgroups_of_both_versions_are_shown() {
        let both = b"cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n\
            cgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(
            cgroups(&Mounts::parse(both)),
            Ok(
                "version 1 on /sys/fs/cgroup/memory, version 2 on /sys/fs/cgroup/unified"
                    .to_owned()
            )
        );
        assert!(cgroups(&Mounts::default()).is_err());
    }

    #[test]
    fn a_read_only_sysfs_suffices() {
        let read_only = Mounts::parse(b"sysfs /sys sysfs ro,nosuid 0 0\n");
        assert_eq!(
            sysfs(&read_only),
            Ok("read-only, which suffices".to_owned())
        );
        assert!(sysfs(&Mounts::default()).is_err());
    }
}
