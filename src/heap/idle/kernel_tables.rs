//! Page tables of the kernel, read by BPF programs that we run ourselves.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::Ordering;

use anyhow::{Context, Result, bail, ensure};
use libbpf_rs::skel::OpenSkel;

use super::arch;
use super::walk::{AT_ONCE, ENTRIES, Table, Tables};
use crate::bpf::attach;
use crate::bpf::map_mmap::MappedArray;
use crate::bpf::test_run::TestRun;

crate::generated!("page_tables");

use generated::types::{page_tables, page_tables_sizes};

const _: () = assert!(AT_ONCE == page_tables_sizes::PAGE_TABLES_AT_ONCE.0 as usize);
const _: () = assert!(ENTRIES == page_tables_sizes::PAGE_TABLE_ENTRIES.0 as usize);

/// Largest number of steps in which the direct map is looked for below a page table: 16 TiB of memory.
const MAX_STEPS: u64 = 1 << 14;

/// Reader of page tables by their addresses in the kernel's own address space.
#[derive(Debug)]
pub(super) struct KernelTables {
    root: TestRun,
    read: TestRun,
    shared: MappedArray,
    /// Number of levels of each process's page tables.
    pub(super) levels: u32,
}

/// Reader of page tables by their physical addresses: the kernel has mapped all memory, from `base` on.
#[derive(Debug)]
pub(super) struct DirectMap<'a> {
    pub(super) tables: &'a KernelTables,
    pub(super) base: u64,
}

impl KernelTables {
    pub(super) fn load() -> Result<Self> {
        let open = attach::open::<generated::PageTablesSkelBuilder>()?;
        let loaded = open
            .load()
            .context("failed to load what reads page tables")?;
        Ok(Self {
            root: TestRun::new(&loaded.progs.page_table_root)?,
            read: TestRun::new(&loaded.progs.page_tables_read)?,
            shared: MappedArray::new(&loaded.maps.page_tables)?,
            levels: arch::levels(),
        })
    }

    /// Returns the address of the root table of the process to which a pagemap belongs.
    pub(super) fn root(&self, pagemap: &File) -> Result<u64> {
        let file = pagemap.as_raw_fd().cast_unsigned();
        run(&self.root, u64::from(file))?;
        let root = self
            .shared
            .word(0, std::mem::offset_of!(page_tables, root))?;
        let root = root.load(Ordering::Relaxed);
        ensure!(
            root != 0,
            "the kernel does not expose the location of page tables"
        );
        Ok(root)
    }

    fn read_at(&self, addresses: impl ExactSizeIterator<Item = u64>) -> Result<Vec<Option<Table>>> {
        let count = addresses.len();
        ensure!(count <= AT_ONCE, "{count} page tables are too many at once");
        let word = |offset: usize, at: usize| self.shared.word(0, offset + 8 * at);
        let address_offset = std::mem::offset_of!(page_tables, address);
        let table_offset = std::mem::offset_of!(page_tables, table);
        for (at, address) in addresses.enumerate() {
            word(address_offset, at)?.store(address, Ordering::Relaxed);
        }
        run(&self.read, count as u64)?;
        let copied = |at: usize| -> Result<Option<Table>> {
            if word(address_offset, at)?.load(Ordering::Relaxed) == 0 {
                return Ok(None);
            }
            let mut table: Table = Box::new([0; ENTRIES]);
            for (entry, to) in table.iter_mut().enumerate() {
                *to = word(table_offset, at * ENTRIES + entry)?.load(Ordering::Relaxed);
            }
            Ok(Some(table))
        };
        (0..count).map(copied).collect()
    }

    /// Finds the address at which the kernel has mapped all memory. With the right address, the tables below `root`
    /// lead to a page of ours, which is recognised by its content.
    ///
    /// # Errors
    /// If the page is found with no address.
    pub(super) fn direct_map(&self, root: u64, page: u64, content: &[u64; ENTRIES]) -> Result<u64> {
        let first = root & !(arch::DIRECT_MAP_STEP - 1);
        let bases = (0..MAX_STEPS).map(|step| first - step * arch::DIRECT_MAP_STEP);
        for base in bases.take_while(|&base| base >= arch::LOWEST_DIRECT_MAP) {
            let map = DirectMap { tables: self, base };
            if map.finds(root, page, content)? {
                return Ok(base);
            }
        }
        bail!("a page of memleak's own is not found by its page tables")
    }
}

impl DirectMap<'_> {
    /// Whether the tables below `root` lead from a page's address to its content.
    fn finds(&self, root: u64, page: u64, content: &[u64; ENTRIES]) -> Result<bool> {
        let mut at = root - self.base;
        for level in (0..self.tables.levels).rev() {
            let Some(table) = self.read(&[at])?.pop().flatten() else {
                return Ok(false);
            };
            at = arch::address(table[arch::index(page, level)]);
        }
        let found = self.read(&[at])?.pop().flatten();
        Ok(found.is_some_and(|found| *found == *content))
    }
}

impl Tables for DirectMap<'_> {
    fn read(&self, addresses: &[u64]) -> Result<Vec<Option<Table>>> {
        let base = self.base;
        self.tables
            .read_at(addresses.iter().map(|address| base.wrapping_add(*address)))
    }
}

fn run(program: &TestRun, argument: u64) -> Result<()> {
    let returned = program.run(&[argument]);
    let returned = returned.context("failed to read page tables (BPF_PROG_TEST_RUN)")?;
    ensure!(returned == 0, "the kernel does not expose page tables");
    Ok(())
}
