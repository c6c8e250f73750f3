//! Verdict on a heap: which blocks of a process nothing refers to, and what holds the other blocks, found in copies of
//! the process. It does not matter when the blocks were allocated. Blocks whose allocation was traced are shown by
//! stack. heapscan and memleak print the rows.
//!
//! The only reference to a block can be in transit from one place to another, in the hands of the kernel, while an
//! image is taken. So lost blocks are looked for again in a second image, and called a leak only if they are lost
//! there, too.

mod args;
mod idle;
mod judge;
mod names;
mod question;
mod report;
mod stacks;
mod suppressions;
mod traced_blocks;
mod why;

use std::cell::OnceCell;
use std::collections::HashSet;
use std::thread;
use std::time::Duration;

use anyhow::{Error, Result, anyhow, bail};

use crate::heap::blocks::{Coverage, Heap};
use crate::heap::capture::{self, Request};
use crate::heap::file_words;
use crate::heap::image::Image;
use crate::heap::kernel::{self, KernelWord};
use crate::heap::names::pymalloc::{self, Pools};
use crate::heap::names::{self as types, RunningModules};
use crate::heap::reach::Reach;
use crate::heap::walk::Walked;
use crate::print::output::Output;
use crate::print::text;
use crate::process::container::{CgroupInfo, ProcessName};
use crate::process::proc::Process;
use crate::process::smaps;

pub use args::CopyArgs;
pub use idle::Idle;
use judge::{Judgement, TypeOrSize};
pub use judge::{Sum, Sums, lost_blocks};
pub use names::RootNames;
use question::WhyQuery;
pub use report::{
    Chain, IdleSum, Lost, Memcheck, Next, Origin, Reachable, Suppressed, Trace, Verdict, What,
};
use stacks::SymbolizedStacks;
pub use stacks::{Stacks, Untraced};
pub use suppressions::Suppressions;
pub use traced_blocks::{AllocSite, TracedAllocation, TracedBlocks};
use why::Branch;
pub use why::Why;

/// Maximum number of blocks of a chain that are shown.
const CHAIN: usize = 6;
/// Largest difference between the size of a block and that of its chunk, or that which the program has requested, in
/// bytes.
const HEADER: u64 = 16;
/// Smallest share of a group's bytes whose holder is shown beside that of most bytes.
const OTHER_HOLDER: f64 = 0.1;
/// Time between two images, in which a reference that is in transit arrives.
pub const BETWEEN: Duration = Duration::from_millis(100);

/// Settings of a report.
#[derive(Debug, Clone, Copy)]
pub struct Settings<'a> {
    /// Maximum number of groups of unreachable blocks, and of groups of reachable blocks.
    pub top: usize,
    /// Questions of --why: addresses, types, sizes or functions.
    pub why: &'a [String],
    /// Whether text output names the container of the process.
    pub container: bool,
}

/// Rows of a verdict.
#[derive(Debug)]
pub struct Report {
    /// Sums of the blocks by class.
    pub verdict: Verdict,
    /// Idle part of the reachable blocks, if memory use was watched.
    pub idle: Option<Idle>,
    /// Groups of unreachable blocks, those with most bytes first.
    pub lost: Vec<Lost>,
    /// Sums of suppressed blocks, by entry of --suppressions.
    pub suppressed: Vec<Suppressed>,
    /// Groups of reachable blocks, those with most bytes first.
    pub reachable: Vec<Reachable>,
    /// Number of groups of unreachable and of reachable blocks, including those that are not shown.
    pub groups: usize,
    /// Answers to the questions of --why.
    pub whys: Vec<Why>,
    /// Sums by Memcheck's categories.
    pub memcheck: Memcheck,
    /// Command to run next.
    pub next: Option<Next>,
}

/// Groups of blocks that are printed of a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sections {
    /// Unreachable blocks, and suppressed ones.
    pub leaks: bool,
    /// Reachable blocks, with what holds them.
    pub roots: bool,
}

impl Sections {
    /// All groups.
    pub const ALL: Self = Self {
        leaks: true,
        roots: true,
    };
}

/// Returns the error of a process that has exited before a verdict was due.
pub fn exited_before(pid: u32) -> Error {
    anyhow!("no verdict: process {pid} ended, or was killed, before one was due")
}

impl Report {
    /// Returns the number of blocks that are leaks.
    pub fn leaks(&self) -> u64 {
        self.verdict.sums.unreachable.blocks
    }

    /// Prints the sums, the groups of these sections, the answers, and the command to run next.
    ///
    /// # Errors
    /// If the output cannot be written.
    pub fn print(&self, sections: Sections, output: &mut Output) -> Result<()> {
        output.row(&self.verdict)?;
        if let Some(idle) = &self.idle {
            output.row(idle)?;
        }
        if sections.leaks {
            self.lost.iter().try_for_each(|row| output.row(row))?;
            self.suppressed.iter().try_for_each(|row| output.row(row))?;
        }
        if sections.roots {
            self.reachable.iter().try_for_each(|row| output.row(row))?;
        }
        self.whys.iter().try_for_each(|row| output.row(row))?;
        output.row(&self.memcheck)?;
        self.next.as_ref().map_or(Ok(()), |next| output.row(next))
    }
}

/// Names a process by its image, and by the cgroup that it was in when the image was taken. `container` is whether text
/// output names the container.
pub fn process_name(image: &Image, cgroup_info: CgroupInfo, container: bool) -> ProcessName {
    ProcessName {
        pid: image.pid,
        comm: text::escape_bytes(&image.comm),
        cgroup_info: Some(cgroup_info),
        container,
    }
}

/// Refuses to judge a heap that is not known as a whole: a missing block or page may hold blocks that look lost. Also
/// refuses a heap that this machine lacks the memory to judge.
///
/// # Errors
/// If the heap is incomplete or too large. The error says what is missing.
pub fn expect_whole(walked: &Walked) -> Result<()> {
    let pid = walked.image.pid;
    if let Some(nonsense) = walked.inconsistency() {
        bail!("no verdict: {nonsense}");
    }
    if let Coverage::Unknown { why } = &walked.heap.coverage {
        bail!("no verdict on process {pid}: {why}");
    }
    if walked.image.unread > 0 {
        bail!(
            "no verdict on process {pid}: the kernel refused to read {} of its memory, which may contain references",
            text::bytes(walked.image.unread)
        );
    }
    capture::expect_memory_to_judge(pid, walked.heap.blocks().len())
}

/// Refuses to judge if the process has memory that may contain references and is not in the image: memory that it has
/// written and may not read now, as the process can remove the protection again, and pages of mapped files that are
/// neither in its page table nor in the page cache.
///
/// # Errors
/// If there is such memory. The error says how much.
pub fn expect_readable(image: &Image) -> Result<()> {
    let pid = image.pid;
    let protected = protected_bytes(image)?;
    if protected > 0 {
        bail!(
            "no verdict on process {pid}: {} of its memory are protected from being read (PROT_NONE), and may contain \
             references",
            text::bytes(protected)
        );
    }
    let unexamined = image.file_words.unexamined;
    if unexamined > 0 {
        bail!(
            "no verdict on process {pid}: {} of shared memory or of mapped files are in swap, on disk, or not \
             visible, and may contain references; once they are in memory again, try again",
            text::bytes(unexamined)
        );
    }
    Ok(())
}

/// Returns the bytes that the process has written, and may not read now.
///
/// # Errors
/// If its mappings cannot be read.
fn protected_bytes(image: &Image) -> Result<u64> {
    Ok(judge::protected_bytes(image, &smaps::read(image.pid)?))
}

/// Process to judge, with its image and heap.
pub struct HeapAnalysis<'a> {
    process: &'a Process,
    /// The cgroup that the process was in.
    cgroup_info: CgroupInfo,
    image: Image,
    heap: Heap,
    reach: Reach,
    /// Blocks of CPython's own allocator.
    pools: Pools,
    /// Types of the blocks, once they are needed.
    types: OnceCell<types::Names>,
    /// Address and size of the blocks that were lost in the image before.
    before: HashSet<(u64, u64)>,
    /// Pauses of the process by image, in microseconds.
    pauses: Vec<u64>,
    /// Blocks whose allocation was traced.
    seen: TracedBlocks,
    /// Trace of the allocations, if they were traced.
    trace: Option<Trace>,
}

impl<'a> HeapAnalysis<'a> {
    /// Takes an image, and a second one if blocks are lost in the first. `look` is called with each walked heap before
    /// it is judged, also if it cannot be judged.
    ///
    /// # Errors
    /// If no image can be taken, the heap cannot be judged, or `look` fails.
    pub fn take_confirmed(
        request: &Request<'a>,
        look: &mut dyn FnMut(&Walked) -> Result<()>,
    ) -> Result<Self> {
        let mut case = Self::take(request, look)?;
        case.before = judge::lost_blocks(&case.heap, &case.reach);
        if case.before.is_empty() {
            return Ok(case);
        }
        expect_readable(&case.image)?;
        let (before, mut pauses) = (case.before, case.pauses);
        // The first copy is freed before the second one is taken.
        drop((case.image, case.heap, case.reach, case.types));
        thread::sleep(BETWEEN);
        case = Self::take(request, look)?;
        pauses.append(&mut case.pauses);
        Ok(Self {
            before,
            pauses,
            ..case
        })
    }

    /// Judges the only image of a process, which is stopped at its exit. A block that is lost now stays lost. If nothing
    /// is allocated (`is_empty`), the process need not have a heap.
    ///
    /// # Errors
    /// If the heap cannot be judged.
    pub fn look_at_exit(process: &'a Process, image: Image, is_empty: bool) -> Result<Self> {
        let mut walked = Walked::of(image);
        if is_empty && matches!(walked.heap.coverage, Coverage::Unknown { .. }) {
            walked.heap.coverage = Coverage::Complete;
        }
        expect_whole(&walked)?;
        let cgroup_info = CgroupInfo::of_process(process.pid());
        let mut case = Self::of(process, cgroup_info, walked, kernel::words(process.pid()))?;
        case.before = judge::lost_blocks(&case.heap, &case.reach);
        if !case.before.is_empty() {
            expect_readable(&case.image)?;
        }
        Ok(case)
    }

    fn take(request: &Request<'a>, look: &mut dyn FnMut(&Walked) -> Result<()>) -> Result<Self> {
        // Words that the kernel keeps while the image is taken are in one of these two lists, unless the kernel keeps
        // them for a shorter time than that.
        let mut kept = kernel::words(request.process.pid());
        // The process may have exited by the time its heap is walked.
        let cgroup_info = CgroupInfo::of_process(request.process.pid());
        let walked = Walked::take(request)?;
        look(&walked)?;
        expect_whole(&walked)?;
        kept.extend(kernel::words(request.process.pid()));
        Self::of(request.process, cgroup_info, walked, kept)
    }

    fn of(
        process: &'a Process,
        cgroup_info: CgroupInfo,
        walked: Walked,
        kept: Vec<KernelWord>,
    ) -> Result<Self> {
        let Walked {
            mut image, heap, ..
        } = walked;
        image.kernel_words = kept;
        image.file_words = file_words::read(&image);
        let (heap, pools) = pymalloc::with_pools(&image, heap);
        // The types of CPython objects are needed to judge them.
        let types = OnceCell::new();
        let python = if pools.blocks > 0 {
            &types
                .get_or_init(|| types_of(process, &image, &heap))
                .python
        } else {
            &[][..]
        };
        Ok(Self {
            process,
            cgroup_info,
            reach: Reach::new(&image, &heap, python)?,
            pools,
            types,
            before: HashSet::new(),
            pauses: vec![image.paused.as_micros() as u64],
            seen: TracedBlocks::default(),
            trace: None,
            image,
            heap,
        })
    }

    /// Returns the image that is judged.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Returns the heap that is judged, with the blocks of CPython's own allocator.
    pub fn heap(&self) -> &Heap {
        &self.heap
    }

    /// Returns the number of blocks of CPython's own allocator.
    pub fn pools(&self) -> &Pools {
        &self.pools
    }

    /// Returns the types of the blocks.
    pub fn types(&self) -> &types::Names {
        self.types
            .get_or_init(|| types_of(self.process, &self.image, &self.heap))
    }

    /// Adds the trace of allocations, with those that made blocks of the heap.
    pub fn add_trace(&mut self, seen: TracedBlocks, trace: Trace) {
        self.seen = seen;
        self.trace = Some(trace);
    }

    /// Makes the rows of the verdict.
    ///
    /// # Errors
    /// If a stack of the trace cannot be read.
    pub fn report(
        self,
        settings: &Settings<'_>,
        stacks: &mut dyn Stacks,
        suppressions: &Suppressions,
    ) -> Result<Report> {
        let types = self.types();
        let heap = &self.heap;
        let seen = &self.seen;
        let kind = |block: usize| match types.of_block(block) {
            Some(named) => TypeOrSize::Type(named.name.clone()),
            None => TypeOrSize::Size(seen.bytes(block, &heap.blocks()[block])),
        };
        let known = SymbolizedStacks::of(seen, suppressions, settings.why, stacks)?;
        let idle = self.image.idle.as_ref();
        let judgement = judge::judge(heap, &self.reach, &self.before, (seen, &known), idle, kind);
        let lost = judgement.lost.iter().take(settings.top).map(|group| {
            let address = heap.blocks()[group.example].address;
            let origin = origin_of(group, stacks)?;
            Ok(Lost::of(group, address, origin, self.trace.is_some()))
        });
        let lost = lost.collect::<Result<_>>()?;
        let suppressed = judgement
            .suppressed
            .iter()
            .map(|(&entry, &sum)| Suppressed {
                name: text::escape(suppressions.name(entry)).into_owned(),
                sum,
            });
        let reachable: Vec<_> = judgement.reachable.iter().take(settings.top).collect();
        let questions = self.questions(settings.why, kind, &known);
        let starts = self.reach.starts();
        let start = |block: usize| self.reach.start(&starts, block);
        let asked = questions
            .iter()
            .flat_map(|(_, blocks)| blocks.iter().take(judge::MAX_TREE_BLOCKS));
        let sampled = reachable.iter().flat_map(|group| group.sample());
        let roots = sampled.chain(asked.copied()).filter_map(start);
        let names = RootNames::of(&self.image, roots);
        let globals = types::ModuleGlobals::of(&self.image, heap, types);
        let path = |block: usize| {
            let mut chain = self.reach.nearest(block, judge::MAX_CHAIN_BLOCKS);
            let root = match python_global(&globals, block, &mut chain) {
                Some(global) => global,
                None => names.variable(&self.image, start(block)),
            };
            judge::Path { root, chain }
        };
        let reachable = reachable.into_iter().map(|group| {
            let origin = origin_of(group, stacks)?;
            let chain = |holder: &judge::Holder| {
                let (mut chain, root) = self.reach.chain(holder.example);
                let root = match python_global(&globals, holder.example, &mut chain) {
                    Some(global) => global,
                    None => names.root(&self.image, root),
                };
                self.chain(holder, kind, judge::Path { root, chain }, |at| {
                    types.of_block(at).is_some_and(types::Type::is_own)
                })
            };
            Ok(self.reachable(group, kind, path, chain, origin))
        });
        let whys = questions.iter();
        Ok(Report {
            verdict: self.verdict(&judgement, settings.container),
            idle: idle.map(|pages| {
                let sums = judgement.reachable.iter().map(|group| group.idle);
                Idle::of(pages, sums.fold(Sum::default(), Sum::plus))
            }),
            lost,
            suppressed: suppressed.collect(),
            reachable: reachable.collect::<Result<_>>()?,
            groups: judgement.lost.len() + judgement.reachable.len(),
            whys: whys
                .map(|(question, blocks)| self.why(question, blocks, kind, path))
                .collect(),
            memcheck: Memcheck::from(&judgement.sums),
            next: self.next(!settings.why.is_empty(), &judgement),
        })
    }

    /// Returns the command to run next: what has allocated the leak, what references the largest group, or how it
    /// grows.
    fn next(&self, is_answered: bool, judgement: &Judgement) -> Option<Next> {
        let pid = self.image.pid;
        if self.trace.is_some_and(|trace| trace.at_exit) {
            return None;
        }
        let largest = judgement
            .reachable
            .iter()
            .find_map(|group| group.kind.as_ref());
        let (command, to) = match largest {
            _ if judgement.sums.unreachable.blocks > 0 && self.trace.is_none() => (
                format!("memleak -p {pid} --verdict 60 1"),
                "what allocates the leak",
            ),
            Some(kind) if !is_answered => {
                let question = judge::question(kind);
                let command = format!("heapscan -p {pid} --why {}", shell_words::quote(&question));
                (command, "what references the largest group")
            }
            _ => (format!("heapscan -p {pid} --growth 60"), "whether it grows"),
        };
        Some(Next { command, to })
    }

    fn verdict(&self, judgement: &Judgement, container: bool) -> Verdict {
        let (image, heap) = (&self.image, &self.heap);
        Verdict {
            process: process_name(image, self.cgroup_info.clone(), container),
            pauses_us: self.pauses.clone(),
            copied_bytes: image.copied_bytes(),
            allocator: heap
                .allocators
                .first()
                .map_or(String::new(), |allocator| allocator.name.clone()),
            coverage: "complete",
            references: self.reach.references(),
            trace: self.trace,
            sums: judgement.sums,
        }
    }

    fn reachable(
        &self,
        group: &judge::Group,
        kind: impl Fn(usize) -> TypeOrSize,
        path: impl Fn(usize) -> judge::Path,
        chain: impl Fn(&judge::Holder) -> Chain,
        origin: Option<Origin>,
    ) -> Reachable {
        let heap = &self.heap;
        let bytes = |block: usize| self.seen.bytes(block, &heap.blocks()[block]);
        let way = |block: usize| judge::way(block, path(block), &kind);
        let holders = group.holders(bytes, way);
        let example = judge::Holder {
            example: group.example,
            share: 1.0,
        };
        let (first, others) = holders.split_first().unwrap_or((&example, &[]));
        let others = others.iter().filter(|other| other.share >= OTHER_HOLDER);
        Reachable {
            what: What::of(group.kind.as_ref()),
            blocks: group.sum.blocks,
            bytes: group.sum.bytes,
            idle: self.image.idle.as_ref().map(|_| group.idle.into()),
            holder: chain(first),
            other_paths: others.map(chain).collect(),
            origin,
            is_traced: self.trace.is_some(),
        }
    }

    /// Describes the reference path to the example of a holder.
    fn chain(
        &self,
        holder: &judge::Holder,
        kind: impl Fn(usize) -> TypeOrSize,
        path: judge::Path,
        is_own: impl Fn(usize) -> bool,
    ) -> Chain {
        let blocks = self.heap.blocks();
        let judge::Path { root, chain } = path;
        let indexes = judge::shown(chain.len(), CHAIN, |at| is_own(chain[at]));
        let label = |by: usize| text::escape(&judge::describe(&kind(by), &blocks[by])).into_owned();
        Chain {
            path_percent: (holder.share * 1000.0).round() / 10.0,
            address: format!("{:#x}", blocks[holder.example].address),
            chain: indexes.iter().map(|&at| label(chain[at])).collect(),
            chain_blocks: chain.len(),
            root,
            indexes,
        }
    }

    /// Returns the questions of --why, each with its blocks.
    fn questions(
        &self,
        why: &[String],
        kind: impl Fn(usize) -> TypeOrSize,
        known: &SymbolizedStacks,
    ) -> Vec<(String, Vec<usize>)> {
        let heap = &self.heap;
        let all = || 0..heap.blocks().len();
        let blocks = |question: &str| match WhyQuery::parse(question) {
            WhyQuery::Address(address) => {
                let block = heap.block_at(address);
                block.map(|(block, _)| block).into_iter().collect()
            }
            WhyQuery::Sizes { sizes, unnamed } => {
                let of_size = |sizes: &std::ops::RangeInclusive<u64>| -> Vec<usize> {
                    let is_it = |&block: &usize| {
                        let of = &heap.blocks()[block];
                        let traced = self.seen.bytes(block, of);
                        (sizes.contains(&of.size) || sizes.contains(&traced))
                            && !(unnamed && matches!(kind(block), TypeOrSize::Type(_)))
                    };
                    all().filter(is_it).collect()
                };
                let found = of_size(&sizes);
                // The size that the program has requested, or that of the chunk with its header.
                let (first, last) = (*sizes.start(), *sizes.end());
                let near = first.saturating_sub(HEADER)..=last.saturating_add(HEADER);
                if found.is_empty() && first == last {
                    of_size(&near)
                } else {
                    found
                }
            }
            WhyQuery::Name(name) => {
                let by_it = |block: usize| {
                    let born = self.seen.born(block);
                    born.is_some_and(|born| known.has_function(born.stack, &name))
                };
                let is_it = |&block: &usize| {
                    let bytes = heap.blocks()[block].size;
                    matches!(kind(block), TypeOrSize::Type(of) if question::is_named(&name, &of, bytes))
                        || by_it(block)
                };
                all().filter(is_it).collect()
            }
        };
        why.iter()
            .map(|question| (text::escape(question).into_owned(), blocks(question)))
            .collect()
    }

    fn why(
        &self,
        question: &str,
        blocks: &[usize],
        kind: impl Fn(usize) -> TypeOrSize,
        path: impl Fn(usize) -> judge::Path,
    ) -> Why {
        let heap = &self.heap;
        let label = |block: usize| {
            let label = judge::describe(&kind(block), &heap.blocks()[block]);
            text::escape(&label).into_owned()
        };
        let all = judge::tree(heap, &self.seen, blocks, path, label);
        let (tree, more) = Branch::list(&all, 0);
        Why {
            question: question.to_owned(),
            blocks: blocks.len() as u64,
            bytes: self.seen.sum(heap, blocks),
            traced_blocks: all.sum.blocks,
            tree,
            more,
        }
    }
}

/// Returns the variable of a Python module that holds a block, if there is one, and cuts the chain of the block there.
pub fn python_global(
    globals: &types::ModuleGlobals<'_>,
    block: usize,
    chain: &mut Vec<usize>,
) -> Option<String> {
    let (length, name) = globals.holder(block, chain)?;
    chain.truncate(length);
    Some(format!("Python global {name}"))
}

/// Returns the stack and the ages of a group's blocks, if their allocation was traced.
fn origin_of(group: &judge::Group, stacks: &mut dyn Stacks) -> Result<Option<Origin>> {
    let origin = group.born.map(|born| stacks.origin(born));
    Ok(origin.transpose()?.flatten())
}

/// Returns the types of blocks. None are known if the memory of the process cannot be opened any more.
pub fn types_of(process: &Process, image: &Image, heap: &Heap) -> types::Names {
    RunningModules::open(process.pid())
        .map(|modules| types::Names::of(image, heap, &modules))
        .unwrap_or_default()
}
