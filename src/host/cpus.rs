//! CPUs that are online, and CPUs that come online later: in a virtual machine that gets more CPUs, or when a machine
//! wakes up. During sleep, all CPUs but the first are offline.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use anyhow::{Context, Result};
use nix::errno::Errno;
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
    /// The socket for device events, or why it could not be opened: then the set does not change.
    events: Result<OwnedFd, Errno>,
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
        let events = open();
        let online = read_list()?;
        Ok(Self { online, events })
    }

    /// Returns the numbers of the CPUs that are online.
    pub fn online(&self) -> impl Iterator<Item = usize> {
        self.online.iter().copied()
    }

    /// Returns a descriptor that is readable when `Cpus::newly_online` may return CPUs.
    ///
    /// # Errors
    /// If the kernel provides no device events here: then `Cpus::newly_online` returns no CPUs.
    pub fn events(&self) -> Result<BorrowedFd<'_>, Errno> {
        self.events
            .as_ref()
            .map(AsFd::as_fd)
            .map_err(|&errno| errno)
    }

    /// Returns the CPUs that have come online since the last call, including CPUs that had been online earlier. Does
    /// not wait. If the kernel has dropped events, the function reads the list of CPUs again, and prints a message on
    /// stderr, as that list does not show which CPUs have been offline.
    pub(crate) fn newly_online(&mut self) -> Vec<usize> {
        let Ok(events) = &self.events else {
            return Vec::new();
        };
        let events = events.as_raw_fd();
        let receive = |message: &mut [u8]| recv(events, message, MsgFlags::MSG_DONTWAIT);
        let (came, lost) = self.update(receive, read_list);
        if let Some(lost) = lost {
            crate::note!("{lost}");
        }
        came
    }

    /// Updates the set by the events that `receive` returns, and, if events were lost, by the list that `read` returns.
    /// Returns the CPUs that have come online, and a message if CPUs may be missing.
    fn update(
        &mut self,
        mut receive: impl FnMut(&mut [u8]) -> nix::Result<usize>,
        read: impl FnOnce() -> Result<BTreeSet<usize>>,
    ) -> (Vec<usize>, Option<String>) {
        let mut came = Vec::new();
        let mut lost = false;
        let mut message = [0; MESSAGE_BYTES];
        loop {
            match receive(&mut message).map(|length| Event::parse(&message[..length])) {
                Ok(Some(Event::Online(cpu))) if self.online.insert(cpu) => came.push(cpu),
                Ok(Some(Event::Offline(cpu))) => {
                    self.online.remove(&cpu);
                }
                Ok(_) | Err(Errno::EINTR) => {}
                // The socket had no room for more events.
                Err(Errno::ENOBUFS) => lost = true,
                Err(_) => break,
            }
        }
        if !lost {
            return (came, None);
        }
        match read() {
            Ok(online) => {
                came.extend(online.difference(&self.online));
                self.online = online;
                let message = "events of CPUs were lost: a CPU that has gone offline and come back is not traced";
                (came, Some(message.into()))
            }
            Err(error) => {
                let message = format!(
                    "events of CPUs were lost, so CPUs that have come online are not traced: {error:#}"
                );
                (came, Some(message))
            }
        }
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

/// Reads the list of the CPUs that are online.
fn read_list() -> Result<BTreeSet<usize>> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online")
        .context("failed to list the CPUs; is /sys mounted?")?;
    let cpus = parse_list(&list).context("failed to understand /sys/devices/system/cpu/online")?;
    Ok(cpus.into_iter().collect())
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
    fn lost_events_are_made_up_for_by_the_list() {
        let mut cpus = Cpus {
            online: BTreeSet::from([0, 1]),
            events: Err(Errno::EAFNOSUPPORT),
        };
        let mut update = |results: &[nix::Result<&str>], list: &[usize]| {
            let mut results = results.iter();
            let receive = |message: &mut [u8]| {
                let event = results.next().copied().unwrap_or(Err(Errno::EAGAIN))?;
                message[..event.len()].copy_from_slice(event.as_bytes());
                Ok(event.len())
            };
            let (came, lost) = cpus.update(receive, || Ok(list.iter().copied().collect()));
            (came, lost.is_some())
        };
        let online = |cpu| format!("online@/devices/system/cpu/cpu{cpu}\0");
        let (second, third) = (online(2), online(3));
        let offline = "offline@/devices/system/cpu/cpu1\0";
        assert_eq!(update(&[Ok(&*second), Ok(offline)], &[]), (vec![2], false));
        let overflow = [Err(Errno::ENOBUFS), Ok(&*third)];
        assert_eq!(update(&overflow, &[0, 1, 2, 3, 5]), (vec![3, 1, 5], true));
        assert_eq!(update(&[Ok(&*online(5))], &[]), (vec![], false));
        assert_eq!(cpus.online, BTreeSet::from([0, 1, 2, 3, 5]));
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
