//! Code mappings as processes make them, from the kernel's own log (PERF_RECORD_MMAP2).
//!
//! /proc/PID/maps is gone when a process has exited, and a process can live for less time than it
//! takes to read it. The kernel's log is complete: it has every mapping of code that any process
//! makes, by exec, by its dynamic linker or by dlopen, from the moment that it is opened.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use anyhow::{Context, Result};
use perf_event::data::Record;
use perf_event::events::Software;
use perf_event::{Builder, Sampler};

use crate::process::Mapping;

/// Bytes of log per CPU between two readings. A record is about 100 bytes long.
const LOG_BYTES: usize = 64 << 10;

/// PERF_RECORD_MISC_COMM_EXEC: the name changed because of an exec.
const MISC_COMM_EXEC: u16 = 1 << 13;

/// A change in what code a process can execute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Change {
    /// It mapped code.
    Mapped(u32, Mapping),
    /// It called exec: all that it had mapped is gone.
    Exec(u32),
}

/// The log, of all processes, one buffer per CPU.
pub struct MappingLog {
    cpus: Vec<Sampler>,
    lost: u64,
}

impl MappingLog {
    /// Starts logging.
    pub fn start() -> Result<Self> {
        let cpus = online_cpus()?
            .into_iter()
            .map(|cpu| {
                Builder::new(Software::DUMMY)
                    .any_pid()
                    .one_cpu(cpu)
                    .include_kernel()
                    .mmap(true)
                    .mmap2(true)
                    .comm(true)
                    .comm_exec(true)
                    .enabled(true)
                    .build()
                    .and_then(|counter| counter.sampled(LOG_BYTES))
            })
            .collect::<Result<Vec<_>, _>>()
            .context("failed to open the kernel's log of mappings (perf_event_open)")?;
        Ok(Self { cpus, lost: 0 })
    }

    /// What has happened since the last call. A process that moves between CPUs can have its
    /// changes out of order, by as much as one reading.
    pub fn drain(&mut self) -> Vec<Change> {
        let mut changes = Vec::new();
        for cpu in &mut self.cpus {
            while let Some(record) = cpu.next_record() {
                let exec = record.misc() & MISC_COMM_EXEC != 0;
                match record.parse_record() {
                    Ok(Record::Mmap2(map)) => {
                        let path = PathBuf::from(OsString::from_vec(map.filename.to_vec()));
                        changes.push(Change::Mapped(
                            map.pid,
                            Mapping {
                                range: map.addr..map.addr.saturating_add(map.len),
                                executable: true,
                                file_offset: map.pgoff,
                                device: (map.maj().unwrap_or(0), map.min().unwrap_or(0)),
                                inode: map.ino().unwrap_or(0),
                                path,
                            },
                        ));
                    }
                    Ok(Record::Comm(comm)) if exec => changes.push(Change::Exec(comm.pid)),
                    Ok(Record::Lost(lost)) => self.lost += lost.lost,
                    _ => {}
                }
            }
        }
        changes
    }

    /// Records that did not fit into the log.
    pub fn lost(&self) -> u64 {
        self.lost
    }
}

/// Numbers of the CPUs that are online, from a list such as `0-3,8`.
fn online_cpus() -> Result<Vec<usize>> {
    let list = fs::read_to_string("/sys/devices/system/cpu/online")
        .context("failed to list the CPUs; is /sys mounted?")?;
    parse_cpu_list(&list).context("failed to understand /sys/devices/system/cpu/online")
}

fn parse_cpu_list(list: &str) -> Option<Vec<usize>> {
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
    fn cpu_lists() {
        assert_eq!(parse_cpu_list("0\n"), Some(vec![0]));
        assert_eq!(parse_cpu_list("0-2,5,7-8\n"), Some(vec![0, 1, 2, 5, 7, 8]));
        assert_eq!(parse_cpu_list("x"), None);
    }
}
