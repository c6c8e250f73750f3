//! What this process is permitted to do (capabilities(7)), for remedies that name what is missing.

use std::fs;

use caps::CapSet;
pub use caps::Capability;

/// Whether this thread has a capability in effect.
pub fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Effective, capability).unwrap_or(false)
}

/// The remedy, as the end of a message, if this thread lacks a capability; else nothing.
pub fn remedy(capability: Capability) -> String {
    if has(capability) {
        String::new()
    } else {
        format!("; it wants {capability}: run it as root, or with this capability")
    }
}

/// The remedy, as the end of a message, where the kernel refuses perf events to who has CAP_PERFMON.
pub fn remedy_for_perf_events() -> String {
    let remedy = remedy(Capability::CAP_SYS_ADMIN);
    if remedy.is_empty() || !perf_events_want_sys_admin() {
        return String::new();
    }
    format!("{remedy}, or: sysctl kernel.perf_event_paranoid=2")
}

/// Whether CAP_PERFMON does not suffice for perf events.
///
/// Debian and Ubuntu have patched their kernels so that kernel.perf_event_paranoid can be 3 and more, and set it.
pub fn perf_events_want_sys_admin() -> bool {
    let paranoid = fs::read_to_string("/proc/sys/kernel/perf_event_paranoid").unwrap_or_default();
    paranoid.trim().parse().is_ok_and(|level: i32| level > 2)
}
