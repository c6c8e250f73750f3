//! The machine's memory, from /proc/meminfo.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::host::values;
use crate::watch::reread::{FileBudget, Reread};

/// Memory of the machine, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct MachineMemory {
    /// All memory (MemTotal).
    pub total: u64,
    /// Memory that new programs can have without swapping (MemAvailable).
    pub available: u64,
    /// Slab memory, including what can be reclaimed.
    pub slab: u64,
    /// Shared memory and tmpfs.
    pub shmem: u64,
    /// Page tables of processes.
    pub page_tables: u64,
}

impl MachineMemory {
    /// Returns the memory that is not available.
    pub fn held(&self) -> u64 {
        self.total.saturating_sub(self.available)
    }

    /// Parses the content of /proc/meminfo. None if the total or the available memory is missing.
    fn parse(meminfo: &[u8]) -> Option<Self> {
        let names = ["MemTotal", "MemAvailable", "Slab", "Shmem", "PageTables"];
        let kib = values::pick(meminfo, names);
        let [total, available, slab, shmem, page_tables] = kib.map(|kib| kib.map(|kib| kib << 10));
        Some(Self {
            total: total?,
            available: available?,
            slab: slab.unwrap_or_default(),
            shmem: shmem.unwrap_or_default(),
            page_tables: page_tables.unwrap_or_default(),
        })
    }
}

/// Reader of the machine's memory.
#[derive(Debug)]
pub struct Machine {
    meminfo: Reread,
}

impl Machine {
    /// Opens /proc/meminfo.
    ///
    /// # Errors
    /// If it cannot be opened.
    pub fn open(budget: &FileBudget) -> Result<Self> {
        let meminfo = Reread::open(PathBuf::from("/proc/meminfo"), budget);
        Ok(Self {
            meminfo: meminfo.context("failed to open /proc/meminfo")?,
        })
    }

    /// Reads the present numbers.
    ///
    /// # Errors
    /// If they cannot be read.
    pub fn read(&self, buffer: &mut Vec<u8>) -> Result<MachineMemory> {
        let meminfo = self
            .meminfo
            .read(buffer)
            .context("failed to read /proc/meminfo")?;
        MachineMemory::parse(meminfo).context("/proc/meminfo has no MemTotal or MemAvailable")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_available_is_held() {
        let meminfo = b"MemTotal:  1000 kB\nMemFree: 1 kB\nMemAvailable: 150 kB\nShmem: 7 kB\nSlab: 11 kB\nPageTables: 13 kB\n";
        let memory = MachineMemory::parse(meminfo).expect("complete");
        assert_eq!(memory.held(), 850 << 10);
        assert_eq!(
            [memory.shmem, memory.slab, memory.page_tables],
            [7 << 10, 11 << 10, 13 << 10]
        );
        assert_eq!(MachineMemory::parse(b"MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn this_machine_has_memory() {
        let machine = Machine::open(&FileBudget::new(1)).expect("/proc");
        let memory = machine.read(&mut Vec::new()).expect("/proc");
        assert!(memory.total > memory.available && memory.available > 0);
    }
}
