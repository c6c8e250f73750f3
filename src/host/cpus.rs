//! CPUs that are online, and CPUs that come online later: in a virtual machine that gets more CPUs, or when a machine
//! wakes up. During sleep, all CPUs but the first are offline.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, socket,
};

/// Netlink multicast group to which the kernel itself sends its device events.
const FROM_KERNEL: u32 = 1;
/// Maximum size of a device event, in bytes: UEVENT_BUFFER_SIZE of the kernel and the line before it.
const MESSAGE_BYTES: usize = 4096;

/// Set of the CPUs that are online, kept up to date by the kernel's device events (NETLINK_KOBJECT_UEVENT).
#[derive(Debug)]
pub struct Cpus {
    online: BTreeSet<usize>,
    /// None if the socket for device events could not be opened: then the set does not change.
    events: Option<OwnedFd>,
}

/// Device event of a CPU that has come online or gone offline.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Event {
    Online(usize),
    Offline(usize),
}

impl Cpus {
    /// Returns the CPUs that are online now.
    ///
    /// # Errors
    /// If `/sys` cannot be read.
    pub fn now() -> Result<Self> {
        // Opened before the list is read: a CPU that comes online in between is in the list, or has an event.
        let events = open().ok();
        let list = fs::read_to_string("/sys/devices/system/cpu/online")
            .context("failed to list the CPUs; is /sys mounted?")?;
        let online = parse_list(&list)
            .context("failed to understand /sys/devices/system/cpu/online")?
            .into_iter()
            .collect();
        Ok(Self { online, events })
    }

    /// Returns the numbers of the CPUs that are online.
    pub fn online(&self) -> impl Iterator<Item = usize> {
        self.online.iter().copied()
    }

    /// Returns a descriptor that is readable when [`Cpus::came`] may return CPUs.
    pub fn events(&self) -> Option<BorrowedFd<'_>> {
        self.events.as_ref().map(AsFd::as_fd)
    }

    /// Returns the CPUs that have come online since the last call, including CPUs that had been online earlier. Does
    /// not wait.
    pub fn came(&mut self) -> Vec<usize> {
        let mut came = Vec::new();
        let Some(events) = &self.events else {
            return came;
        };
        let mut message = [0; MESSAGE_BYTES];
        while let Ok(length) = recv(events.as_raw_fd(), &mut message, MsgFlags::MSG_DONTWAIT) {
            match Event::parse(&message[..length]) {
                Some(Event::Online(cpu)) if self.online.insert(cpu) => came.push(cpu),
                Some(Event::Offline(cpu)) => {
                    self.online.remove(&cpu);
                }
                _ => {}
            }
        }
        came
    }
}

fn open() -> nix::Result<OwnedFd> {
    let events = socket(
        AddressFamily::Netlink,
        SockType::Datagram,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkKObjectUEvent,
    )?;
    bind(events.as_raw_fd(), &NetlinkAddr::new(0, FROM_KERNEL))?;
    Ok(events)
}

impl Event {
    /// Parses `online@/devices/system/cpu/cpu1`, the beginning of an event up to its first NUL.
    fn parse(message: &[u8]) -> Option<Self> {
        let head = message.split(|&byte| byte == 0).next()?;
        let (action, device) = std::str::from_utf8(head).ok()?.split_once('@')?;
        let cpu = device.strip_prefix("/devices/system/cpu/cpu")?;
        let cpu = cpu.parse().ok()?;
        match action {
            "online" => Some(Self::Online(cpu)),
            "offline" => Some(Self::Offline(cpu)),
            _ => None,
        }
    }
}

/// Parses a list such as `0-3,8`.
fn parse_list(list: &str) -> Option<Vec<usize>> {
    let mut cpus = Vec::new();
    for range in list.trim().split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        cpus.extend(first.parse::<usize>().ok()?..=last.parse().ok()?);
    }
    Some(cpus)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists() {
        assert_eq!(parse_list("0\n"), Some(vec![0]));
        assert_eq!(parse_list("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_list("x"), None);
    }

    #[test]
    fn events_of_other_devices_are_none() {
        let parse = |message: &str| Event::parse(message.as_bytes());
        assert_eq!(
            parse("online@/devices/system/cpu/cpu12\0ACTION=online\0"),
            Some(Event::Online(12))
        );
        assert_eq!(
            parse("offline@/devices/system/cpu/cpu1\0"),
            Some(Event::Offline(1))
        );
        assert_eq!(parse("add@/devices/system/cpu/cpu1\0"), None);
        assert_eq!(parse("online@/devices/system/memory/memory1\0"), None);
        assert_eq!(parse("libudev\0\u{1}"), None);
        assert_eq!(parse(""), None);
    }
}
