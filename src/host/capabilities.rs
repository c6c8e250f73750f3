//! Capabilities of this process (capabilities(7)), for remedies that name what is missing.

use std::fs;

use caps::CapSet;
pub use caps::Capability;

/// Returns whether this thread has a capability in effect.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// Returns the remedy, as the end of a message, if this thread lacks a capability. Otherwise returns an empty text.
pub fn remedy(capability: Capability) -> String {
    if has(capability) {
        String::new()
    } else {
        format!("; it requires {capability}: run it as root, or with this capability")
    }
}

/// Returns the remedy, as the end of a message, if the kernel refuses perf events although CAP_PERFMON is in effect.
pub(crate) fn remedy_for_perf_events() -> String {
    let remedy = remedy(Capability::CAP_SYS_ADMIN);
    if remedy.is_empty() || !perf_events_want_sys_admin() {
        return String::new();
    }
    format!("{remedy}, or: sysctl kernel.perf_event_paranoid=2")
}

/// Returns whether CAP_PERFMON does not suffice for perf events.
///
/// Debian and Ubuntu have patched their kernels so that kernel.perf_event_paranoid can be 3 or more, and they set it
/// so.
pub fn perf_events_want_sys_admin() -> bool {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    paranoid.trim().parse().is_ok_and(|level: i32| level > 2)
}
