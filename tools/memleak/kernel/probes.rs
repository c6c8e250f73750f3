//! BPF programs of kernel mode: loads them, and attaches them to the tracepoints that this kernel has.

use std::cell::RefCell;
use std::io;
use std::os::fd::{AsFd, AsRawFd};

use anyhow::{Context, Result, bail};
use libbpf_rs::skel::{OpenSkel, Skel};
use libbpf_rs::{Link, MapCore, MapFlags, MapHandle, MapType, Program, ProgramMut};
use memtools::bpf::attach::{self, Variant};
use memtools::bpf::kernel_support;
use memtools::bpf::map_batch;
use memtools::bpf::map_create;
use memtools::bpf::types;
use memtools::host::page_size;
use memtools::parse::UsageError;
use memtools::process::filter::Filter;
use memtools::run::losses::Losses;
use nix::fcntl::{FcntlArg, fcntl};

use super::args::Kinds;
use super::bpf::types::{block, block_maps, program_pair};
use super::bpf::{self, Loaded, Prepared};
use crate::args::count_within;
use crate::plan::{KernelPlan, MemorySettings};

/// Capacity of a pipe for which the kernel allocates one object of order LEARN_ORDER (2): 256 buffers of 40 bytes,
/// which is more than the objects of kmalloc's largest slab cache have.
const LEARNING_PIPE_BYTES: i32 = 1 << 20;
/// Number of attempts to learn: an interrupt can come in between.
const LEARNING_ATTEMPTS: usize = 3;

/// Capacity of the map of totals by stack, unless --stack-storage-size gives one.
const DEFAULT_TOTALS: u32 = 16384;
/// Limits of the capacities of the first and the second map of blocks without --max-allocs: a number of blocks, and the
/// divisor of what --mem-limit leaves. The third map has the rest. The second and the third are made when they are
/// needed.
const BLOCK_STEPS: [(u32, u32); MORE_BLOCKS] = [(1_000_000, 4), (4_000_000, 2)];
const MORE_BLOCKS: usize = block_maps::MORE_BLOCKS.0 as usize;
/// Bytes that each block takes from the start: an entry of a preallocated hash map, and its bucket.
const BLOCK_BYTES: u64 = 112;

/// Suffix of the names of tracepoints' second programs, which the macro TRACED of the BPF program makes.
const SECOND: &str = "_nested";

/// A tracepoint's two programs, in the order in which they are called.
type Pair<'a> = [&'a ProgramMut<'a>; 2];

/// Loaded BPF programs with their links.
pub(super) struct Attached {
    pub(super) skel: Loaded,
    pub(super) links: Vec<Link>,
    /// Names of the tracepoints of allocations.
    pub(super) tracepoints: Vec<&'static str>,
    /// Maps that were added to `more_blocks`.
    added: RefCell<Vec<MapHandle>>,
    /// Capacity of each map of blocks, first `blocks`, then those in `more_blocks`, whether they exist yet or not.
    capacities: Vec<u32>,
}

/// Ways to trace frees in bulk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Bulk {
    Kprobe,
    Unseen,
}

/// Loads and attaches the programs for these kinds of memory.
pub(super) fn start(plan: &KernelPlan, filter: &Filter) -> Result<Attached> {
    block_capacities(&plan.memory)?;
    let kinds = plan.kinds;
    let way = |name, bulk| Variant::new(name, move || try_start(plan, filter, bulk));
    let mut ways = Vec::new();
    if kinds.slab {
        ways.push(way("bulk frees by kprobe", Bulk::Kprobe));
    }
    ways.push(way("tracepoints", Bulk::Unseen));
    let (way, attached) = attach::first_that_works(plan.verbose, ways)?;
    memtools::message!("tracing {} ({way})", attached.tracepoints.join(", "));
    if kinds.slab && way == "tracepoints" {
        memtools::message!(
            "this kernel has no hook for bulk frees, as by kfree_rcu(): such memory stays \
             in the reports until it is used again"
        );
    }
    Ok(attached)
}

fn try_start(plan: &KernelPlan, filter: &Filter, bulk: Bulk) -> Result<Attached> {
    let kinds = plan.kinds;
    if bulk == Bulk::Kprobe && !kernel_support::has_kprobes() {
        bail!("this kernel is built without kprobes");
    }
    let learns = kinds.slab && (kinds.pages || plan.with_caches());
    let skel = load(plan, filter, bulk, learns)?;
    let programs = &skel.progs;
    let mut links = Vec::new();
    // Frees are attached first: if the allocation of a block is traced, its free must be traced, too.
    let in_bulk = [&programs.bulk_free, &programs.rcu_free];
    for program in in_bulk.into_iter().filter(|program| program.autoload()) {
        let name = program.name().to_string_lossy();
        let link = program.attach();
        links.push(link.with_context(|| format!("failed to attach {name}"))?);
    }
    let allocations = allocations(&skel, kinds);
    for (pair, tracepoint) in frees(&skel, kinds).iter().chain(&allocations) {
        // The second program is called after the first, since it was attached later.
        for program in pair {
            let link = program.attach_raw_tracepoint(tracepoint);
            links.push(link.with_context(|| format!("failed to attach to {tracepoint}"))?);
        }
    }
    let tracepoints = allocations.into_iter().map(|(_, tracepoint)| tracepoint);
    let tracepoints = tracepoints.collect();
    let attached = Attached {
        skel,
        links,
        tracepoints,
        added: RefCell::default(),
        capacities: block_capacities(&plan.memory)?,
    };
    if learns && !attached.learn()? {
        memtools::message!(
            "cannot determine which objects the pages contain: caches are unknown, and pages \
             of slab objects count twice"
        );
    }
    Ok(attached)
}

fn load(plan: &KernelPlan, filter: &Filter, bulk: Bulk, learns: bool) -> Result<Loaded> {
    let kinds = plan.kinds;
    let sheaves = kernel_support::btf_has_name("__kfree_rcu_sheaf");
    let mut open = open(plan, filter)?;
    open.options()?.learns = learns.into();
    let wanted = |program: &str| match program.trim_end_matches(SECOND) {
        "kmalloc" | "cache_alloc" | "kfree" | "cache_free" => kinds.slab,
        "page_alloc" | "page_free" => kinds.pages,
        "percpu_alloc" | "percpu_free" => kinds.percpu,
        "learn_page" => learns,
        "bulk_free" => bulk == Bulk::Kprobe,
        _ => bulk == Bulk::Kprobe && sheaves,
    };
    for mut program in open.open_object_mut().progs_mut() {
        let load = wanted(&program.name().to_string_lossy());
        program.set_autoload(load);
    }
    open.load()
}

/// Returns the tracepoints of allocations, with their programs.
fn allocations(skel: &Loaded, kinds: Kinds) -> Vec<(Pair<'_>, &'static str)> {
    let programs = &skel.progs;
    let mut allocations: Vec<(Pair<'_>, &'static str)> = Vec::new();
    if kinds.slab {
        let kmalloc = [&programs.kmalloc, &programs.kmalloc_nested];
        let cache_alloc = [&programs.cache_alloc, &programs.cache_alloc_nested];
        allocations.push((kmalloc, "kmalloc"));
        allocations.push((cache_alloc, "kmem_cache_alloc"));
        // From Linux 6.1 on, these tracepoints are one with those above.
        if kernel_support::btf_has_name("btf_trace_kmalloc_node") {
            allocations.push((kmalloc, "kmalloc_node"));
            allocations.push((cache_alloc, "kmem_cache_alloc_node"));
        }
    }
    if kinds.pages {
        let page_alloc = [&programs.page_alloc, &programs.page_alloc_nested];
        allocations.push((page_alloc, "mm_page_alloc"));
    }
    if kinds.percpu {
        let percpu_alloc = [&programs.percpu_alloc, &programs.percpu_alloc_nested];
        allocations.push((percpu_alloc, "percpu_alloc_percpu"));
    }
    allocations
}

/// Returns the tracepoints of frees, with their programs.
fn frees(skel: &Loaded, kinds: Kinds) -> Vec<(Pair<'_>, &'static str)> {
    let programs = &skel.progs;
    let mut frees: Vec<(Pair<'_>, &'static str)> = Vec::new();
    if kinds.slab {
        let cache_free = [&programs.cache_free, &programs.cache_free_nested];
        frees.push(([&programs.kfree, &programs.kfree_nested], "kfree"));
        frees.push((cache_free, "kmem_cache_free"));
    }
    if kinds.pages {
        let page_free = [&programs.page_free, &programs.page_free_nested];
        frees.push((page_free, "mm_page_free"));
    }
    if kinds.percpu {
        let percpu_free = [&programs.percpu_free, &programs.percpu_free_nested];
        frees.push((percpu_free, "percpu_free_percpu"));
    }
    frees
}

impl Attached {
    /// Returns the counts of what could not be recorded.
    pub(super) fn losses(&self) -> Result<Losses> {
        let loses = |program: &Program<'_>| {
            program.autoload() && loses_if_skipped(&program.name().to_string_lossy())
        };
        let programs = self.skel.object().progs().filter(loses);
        let losses = Losses::counted(self.skel.object())?.with_skipped_runs(programs)?;
        Ok(Losses {
            runs: losses.runs.saturating_sub(self.harmless_skips()?),
            ..losses
        })
    }

    /// Returns the number of frees that were not traced, as far as their memory was allocated again.
    pub(super) fn unseen_frees(&self) -> u64 {
        let counters = self.skel.maps.bss_data.as_deref();
        counters.map_or(0, |counters| counters.unseen_frees)
    }

    /// Adds the next map of blocks if those that exist are half full. Returns the capacity of the added map.
    pub(super) fn add_blocks(&self) -> Result<Option<u32>> {
        let mut added = self.added.borrow_mut();
        let made = 1 + added.len();
        let Some(&next) = self.capacities.get(made) else {
            return Ok(None);
        };
        let capacity: u64 = self.capacities[..made].iter().copied().map(u64::from).sum();
        if self.live_blocks()? < capacity / 2 {
            return Ok(None);
        }
        let sizes = (size_of::<u64>(), size_of::<block>());
        let map = map_create::create(MapType::Hash, "blocks", sizes, next, 0)
            .context("no memory for more blocks; lower --mem-limit")?;
        let (number, fd) = (added.len() as u32, map.as_fd().as_raw_fd());
        self.skel
            .maps
            .more_blocks
            .update(&number.to_ne_bytes(), &fd.to_ne_bytes(), MapFlags::ANY)
            .context("failed to add a map for more blocks")?;
        added.push(map);
        Ok(Some(next))
    }

    /// Returns the number of blocks in the maps, as the BPF programs count.
    fn live_blocks(&self) -> Result<u64> {
        let counts = self
            .skel
            .maps
            .live_blocks
            .lookup_percpu(&0u32.to_ne_bytes(), MapFlags::ANY);
        let counts = counts.context("failed to read the number of blocks")?;
        let mut sum = 0u64;
        for count in counts.unwrap_or_default() {
            sum = sum.wrapping_add(*types::view::<u64>(&count)?);
        }
        Ok(sum)
    }

    /// Calls `each` with the key and the value of each block.
    pub(super) fn for_each_block(&self, mut each: impl FnMut(u64, &block)) -> Result<()> {
        let added = self.added.borrow();
        let first: &dyn MapCore = &self.skel.maps.blocks;
        let later = added.iter().map(|map| map as &dyn MapCore);
        for map in [first].into_iter().chain(later) {
            map_batch::for_each(map, |key, value| {
                each(*types::view(key)?, types::view(value)?);
                Ok(())
            })?;
        }
        Ok(())
    }

    /// Returns how often a second program was skipped without a loss, as the first had been called.
    fn harmless_skips(&self) -> Result<u64> {
        let pairs = &self.skel.maps.program_pairs;
        let mut skips = 0;
        for key in pairs.keys() {
            let cpus = pairs.lookup_percpu(&key, MapFlags::ANY);
            for value in cpus
                .context("failed to read the pairs of programs")?
                .unwrap_or_default()
            {
                skips += types::view::<program_pair>(&value)?.harmless_skips;
            }
        }
        Ok(skips)
    }

    /// Has the BPF programs learn where the struct page of an address is. Returns whether they have learned that.
    fn learn(&self) -> Result<bool> {
        let pages = self
            .skel
            .progs
            .learn_page
            .attach_raw_tracepoint("mm_page_alloc");
        let _pages = pages.context("failed to attach to mm_page_alloc")?;
        for _ in 0..LEARNING_ATTEMPTS {
            let (_reader, writer) = io::pipe().context("failed to make a pipe")?;
            // If the kernel refuses this size (pipe-max-size), nothing is learned.
            let _ = fcntl(&writer, FcntlArg::F_SETPIPE_SZ(LEARNING_PIPE_BYTES));
            let learned = self.skel.maps.bss_data.as_deref();
            if learned.is_some_and(|bss| bss.page_bias != 0) {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// Returns the capacities of the maps of blocks, in the order in which the maps are made.
fn block_capacities(memory: &MemorySettings) -> Result<Vec<u32>, UsageError> {
    if let Some(blocks) = memory.blocks {
        memory.expect_room(blocks, u64::from(blocks) * BLOCK_BYTES)?;
        return Ok(vec![blocks]);
    }
    let each = BLOCK_BYTES + memory.reported_block_bytes();
    let mut rest = count_within(memory.bytes_for_blocks(), each);
    let mut capacities = Vec::new();
    for (most, part) in BLOCK_STEPS.into_iter().chain([(u32::MAX, 1)]) {
        let blocks = most.min(rest / part);
        capacities.push(blocks);
        rest -= blocks;
    }
    capacities.retain(|&blocks| blocks > 0);
    Ok(capacities)
}

/// Whether something is lost if the program with this name is skipped. If the first of a tracepoint's two programs is
/// skipped, the second does its work. The programs of [`Bulk::Kprobe`] have no second.
fn loses_if_skipped(program: &str) -> bool {
    program.ends_with(SECOND) || ["bulk_free", "rcu_free"].contains(&program)
}

/// Opens the skeleton and sets its options, before it is loaded.
fn open<'filter>(plan: &KernelPlan, filter: &'filter Filter) -> Result<Prepared<'filter>> {
    let mut open = bpf::prepare(filter, plan.memory.stack_capacity())?;
    let cpus = libbpf_rs::num_possible_cpus().context("failed to count the CPUs")?;
    let options = open.options()?;
    options.min_size = plan.recording.min_size;
    options.max_size = plan.recording.max_size;
    options.sample_rate = plan.recording.sample_rate;
    options.page_shift = page_size::page_shift()?;
    options.possible_cpus = cpus as u32;
    options.keep_totals = plan.recording.only_totals.into();
    options.by_cache = plan.by_cache.into();
    options.with_caches = plan.with_caches().into();
    options.with_pages = plan.kinds.pages.into();
    if let Some(cache) = &plan.cache {
        options.one_cache = 1;
        for (to, from) in options.cache_name.iter_mut().zip(cache.bytes()) {
            *to = from.cast_signed();
        }
    }
    let arguments = |tracepoint| -> Result<Vec<String>> {
        Ok(kernel_support::tracepoint_arguments(tracepoint)?.unwrap_or_default())
    };
    let tells_cache = arguments("kmem_cache_alloc")?
        .iter()
        .any(|name| name == "kmem_cache");
    options.tells_cache = tells_cache.into();
    // The tracepoint's first argument is the call site if it has the allocated bytes, too.
    let tells_bytes = arguments("percpu_alloc_percpu")?
        .first()
        .is_some_and(|name| name != "bool");
    options.tells_percpu_bytes = tells_bytes.into();

    let first = block_capacities(&plan.memory)?
        .first()
        .copied()
        .unwrap_or(1);
    map_create::set_capacity(&mut open.maps.blocks, first)?;
    let totals = if plan.recording.only_totals {
        plan.memory.stacks.unwrap_or(DEFAULT_TOTALS)
    } else {
        1
    };
    map_create::set_capacity(&mut open.maps.totals, totals)?;
    Ok(open)
}

#[cfg(test)]
mod tests {
    use memtools::parse;

    use super::*;
    use crate::plan;

    #[test]
    fn programs_without_a_second_lose_what_they_skip() {
        for program in ["kfree_nested", "bulk_free", "rcu_free"] {
            assert!(loses_if_skipped(program), "{program}");
        }
        for program in ["kfree", "cache_free", "page_free", "learn_page"] {
            assert!(!loses_if_skipped(program), "{program}");
        }
    }

    #[test]
    fn blocks_are_as_many_as_the_limit_allows_unless_they_are_said() {
        let room = |options: &[&str]| {
            let line = [&["memleak", "-k"], options].concat().join(" ");
            block_capacities(&plan::tests::memory(&line).expect("valid"))
        };
        let each = BLOCK_BYTES + 72;
        for limit in ["64M", "768M", "4G"] {
            let capacities = room(&["--mem-limit", limit]).expect("room");
            assert_eq!(capacities.len(), 1 + MORE_BLOCKS, "{capacities:?}");
            assert!(capacities[0] <= BLOCK_STEPS[0].0, "{capacities:?}");
            let bytes = capacities.iter().copied().map(u64::from).sum::<u64>() * each;
            let limit = parse::bytes(limit).expect("valid");
            assert!(bytes <= limit && bytes > limit / 2, "{bytes}");
        }
        assert_eq!(room(&["--max-allocs", "7"]).expect("room"), [7]);
        // Of the memory for --max-allocs, only the kernel's counts.
        let fits = room(&["--max-allocs", "599186", "--mem-limit", "64M"]);
        assert_eq!(fits.expect("room"), [599_186]);
        let error = room(&["--max-allocs", "1000000", "--mem-limit", "64M"]).expect_err("too many");
        assert!(error.to_string().contains("lower --max-allocs"), "{error}");
    }
}
