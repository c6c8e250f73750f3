//! What this process is permitted to do (capabilities(7)), for remedies that name what is missing.

use std::fmt;
use std::fs;
use std::io;

/// A capability that a tool may want.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// To read files whatever their mode: tracefs is root's alone on many systems.
    DacReadSearch = 2,
    /// To lock any amount of memory.
    IpcLock = 14,
    /// To look into processes of other users.
    SysPtrace = 19,
    /// All that has no capability of its own.
    SysAdmin = 21,
    /// To be spared when memory runs out, among others.
    SysResource = 24,
    /// To see the kernel's addresses.
    Syslog = 34,
    /// To observe with perf events.
    Perfmon = 38,
    /// To load BPF programs.
    Bpf = 39,
}

impl Capability {
    /// The name, as capabilities(7) has it.
    fn name(self) -> &'static str {
        match self {
            Self::DacReadSearch => "CAP_DAC_READ_SEARCH",
            Self::IpcLock => "CAP_IPC_LOCK",
            Self::SysPtrace => "CAP_SYS_PTRACE",
            Self::SysAdmin => "CAP_SYS_ADMIN",
            Self::SysResource => "CAP_SYS_RESOURCE",
            Self::Syslog => "CAP_SYSLOG",
            Self::Perfmon => "CAP_PERFMON",
            Self::Bpf => "CAP_BPF",
        }
    }

    /// The remedy, as the end of a message, if the process lacks this capability; else nothing.
    pub fn remedy(self) -> String {
        let held = Capabilities::effective().is_ok_and(|effective| effective.have(self));
        if held {
            String::new()
        } else {
            format!("; it wants {self}: run it as root, or with this capability")
        }
    }
}

/// The remedy, as the end of a message, where the kernel refuses perf events to who has CAP_PERFMON.
///
/// Debian and Ubuntu have patched theirs so that kernel.perf_event_paranoid can be 3 and more, and set it.
pub fn remedy_for_perf_events() -> String {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    let paranoid: i32 = paranoid.trim().parse().unwrap_or(0);
    let remedy = Capability::SysAdmin.remedy();
    if paranoid < 3 || remedy.is_empty() {
        return String::new();
    }
    format!("{remedy}, or: sysctl kernel.perf_event_paranoid=2")
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A set of capabilities.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Capabilities(u64);

impl Capabilities {
    /// The capabilities that this process has in effect.
    ///
    /// # Errors
    /// If `/proc` is not there.
    pub fn effective() -> io::Result<Self> {
        let status = fs::read_to_string("/proc/self/status")?;
        Self::in_status(&status).ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    fn in_status(status: &str) -> Option<Self> {
        let hex = status
            .lines()
            .find_map(|line| line.strip_prefix("CapEff:"))?;
        u64::from_str_radix(hex.trim(), 16).ok().map(Self)
    }

    /// Whether this one is among them.
    pub fn have(self, capability: Capability) -> bool {
        self.0 >> capability as u64 & 1 == 1
    }
}

impl FromIterator<Capability> for Capabilities {
    fn from_iter<I: IntoIterator<Item = Capability>>(capabilities: I) -> Self {
        let bits = capabilities
            .into_iter()
            .map(|capability| 1 << capability as u64);
        Self(bits.fold(0, |all, bit: u64| all | bit))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn they_are_read_from_status() {
        let status = "Name:\tx\nCapPrm:\t0000000000000000\nCapEff:\t000000c000080000\n";
        let read = Capabilities::in_status(status).expect("it is there");
        let expected = [Capability::SysPtrace, Capability::Perfmon, Capability::Bpf];
        assert_eq!(read, expected.into_iter().collect());
        assert!(read.have(Capability::Bpf) && !read.have(Capability::SysAdmin));
        assert_eq!(Capabilities::in_status("Name:\tx\n"), None);
    }
}
