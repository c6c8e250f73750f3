//! Processes that a BPF program has stopped by a signal, and listed in a map, until this tool lets them continue.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::ptr::{from_mut, from_ref, null};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Result;
use libbpf_rs::{MapCore, MapFlags, MapHandle, libbpf_sys};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::process::guard::Guard;
use crate::process::proc::Process;

/// HELD_AT_A_TIME of `bpf/include/held.bpf.h`: maximum number of processes that are stopped at a time.
const HELD_AT_A_TIME: u32 = 256;

/// Maximum time that a process takes to stop once the signal is sent.
const STOPPING: Duration = Duration::from_secs(1);

/// The stopped processes. However the tool ends, a guard process resumes them.
pub struct StoppedProcesses {
    map: MapHandle,
    _guard: Guard,
}

impl StoppedProcesses {
    /// Takes the map in which the BPF program lists the processes: PIDs (`u32`), each with a value (`u64`) that is not 0.
    ///
    /// # Errors
    /// If no guard process can be started.
    pub fn listed_in(map: MapHandle) -> Result<Self> {
        let stopped = map.as_fd();
        // SAFETY: `resume_all` makes system calls only.
        let guard = unsafe { Guard::start(&[stopped], || resume_all(stopped)) }?;
        Ok(Self { map, _guard: guard })
    }

    /// Returns the PIDs of the stopped processes, each with the value that the BPF program has given.
    pub fn listed(&self) -> Vec<(u32, u64)> {
        let value_of = |key: &Vec<u8>| {
            let value = self.map.lookup(key, MapFlags::ANY).ok()??;
            let pid = u32::from_ne_bytes(*key.first_chunk()?);
            Some((pid, u64::from_ne_bytes(*value.first_chunk()?)))
        };
        let keys: Vec<Vec<u8>> = self.map.keys().collect();
        keys.iter().filter_map(value_of).collect()
    }

    /// Waits until a process has stopped, but not for long: someone else may have resumed it.
    pub fn wait_for_stop(process: &Process) {
        let until = Instant::now() + STOPPING;
        while !process.is_stopped() && !process.exited() && Instant::now() < until {
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// Lets a process continue.
    pub fn resume(&self, pid: u32) {
        // A process that has exited is in the list no more, or needs no signal.
        let _ = self.map.delete(&pid.to_ne_bytes());
        resume(pid);
    }
}

/// Resumes the processes of a map: PIDs (`u32`), each with a value (`u64`) that is 0 until the process is stopped.
/// Processes that have stopped themselves are left alone. Makes system calls only, as a guard process has to.
pub(crate) fn resume_all(stopped: BorrowedFd<'_>) {
    let mut last = None;
    for _ in 0..HELD_AT_A_TIME {
        let (mut pid, mut value) = (0u32, 0u64);
        let from = last.as_ref().map_or(null(), from_ref::<u32>);
        let map = stopped.as_raw_fd();
        // SAFETY: keys and values have the sizes of the map, and outlive the call; a null pointer means the beginning.
        let none = unsafe {
            libbpf_sys::bpf_map_get_next_key(map, from.cast(), from_mut(&mut pid).cast()) != 0
                || libbpf_sys::bpf_map_lookup_elem(
                    map,
                    from_ref(&pid).cast(),
                    from_mut(&mut value).cast(),
                ) != 0
        };
        if none {
            break;
        }
        if value != 0 {
            resume(pid);
        }
        last = Some(pid);
    }
}

/// Resumes a process by one system call.
pub(crate) fn resume(pid: u32) {
    // A process that has exited needs no signal.
    let _ = kill(Pid::from_raw(pid.cast_signed()), Signal::SIGCONT);
}
