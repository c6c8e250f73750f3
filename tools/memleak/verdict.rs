//! Whether memory is lost: which blocks of a process nothing refers to, found in copies of it. Nothing is traced, and
//! it does not matter when they were allocated.
//!
//! What is lost in one image may be on its way from one place to another, in the hands of the kernel. So it is looked
//! for again in a second image, and called a leak only if it is lost there, too.

pub(crate) mod args;
mod judge;
mod names;
mod report;

use std::collections::HashSet;
use std::process::ExitCode;
use std::thread;
use std::time::Duration;

use anyhow::{Result, bail};
use memtools::heap::blocks::{Coverage, Heap};
use memtools::heap::capture::Request;
use memtools::heap::image::Image;
use memtools::heap::kernel;
use memtools::heap::names::{self as types, RunningModules, pymalloc};
use memtools::heap::reach::Reach;
use memtools::heap::walk::Walked;
use memtools::print::output::Output;
use memtools::print::text;
use memtools::process::proc::Process;
use memtools::process::smaps;
use memtools::run::privileges;

use crate::args::Args;
use crate::difference::FailOn;
use args::Question;
use judge::{Judgement, Kind};
use names::Names;
use report::{Branch, Held, Lost, Verdict, Why};

/// The exit status with --fail-on unreachable, if there is a leak.
const LEAKS: u8 = 3;
/// Blocks of a chain that are shown.
const CHAIN: usize = 6;
/// Time between two images, in which what is only on its way from one place to another gets there.
const BETWEEN: Duration = Duration::from_millis(100);

/// Finds out which blocks of the process nothing refers to, and shows that, and what holds the rest.
///
/// # Errors
/// If no image of the process can be taken, or its heap cannot be walked, so that there is no verdict.
pub(crate) fn run(args: &Args) -> Result<ExitCode> {
    let process = Process::open(args.pid[0])?;
    let (_poller, mut output) = args.start()?;
    privileges::keep_what_tracing_takes(&[])?;
    let request = Request {
        process: &process,
        max_pause: args.heap.max_pause,
    };
    let case = Case::look_twice(&request)?;
    let leaks = case.print(args, &mut output)?;
    output.finish()?;
    let fails = leaks > 0 && args.difference.fail_on == Some(FailOn::Unreachable);
    Ok(if fails {
        ExitCode::from(LEAKS)
    } else {
        ExitCode::SUCCESS
    })
}

/// Refuses to judge what is not known as a whole: a block or a page that is missing holds what looks lost.
fn expect_whole(walked: &Walked) -> Result<()> {
    let pid = walked.image.pid;
    if let Some(nonsense) = walked.nonsense() {
        bail!("no verdict: {nonsense}");
    }
    if let Coverage::Unknown { why } = &walked.heap.coverage {
        bail!("no verdict on process {pid}: {why}");
    }
    if walked.image.unread > 0 {
        bail!(
            "no verdict on process {pid}: the kernel refused to read {} of its memory, which may hold references",
            text::bytes(walked.image.unread)
        );
    }
    Ok(())
}

/// Refuses to judge if there is memory that the process itself may not read now, and has written: it is not in the
/// image, and the process can take its protection away again.
fn expect_readable(image: &Image) -> Result<()> {
    let pid = image.pid;
    let protected = judge::protected_bytes(image, &smaps::read(pid)?);
    if protected > 0 {
        bail!(
            "no verdict on process {pid}: {} of its memory are protected from being read (PROT_NONE), and may hold \
             references",
            text::bytes(protected)
        );
    }
    Ok(())
}

/// What there is to judge.
struct Case<'a> {
    process: &'a Process,
    image: Image,
    heap: Heap,
    reach: Reach,
    /// The types of blocks, if there are objects of CPython.
    types: Option<types::Names>,
    /// What nothing referred to in the image before.
    before: HashSet<(u64, u64)>,
    /// How long the process stood still for each image, in microseconds.
    pauses: Vec<u64>,
}

impl<'a> Case<'a> {
    /// Takes an image, and another one if something is lost in it.
    fn look_twice(request: &Request<'a>) -> Result<Self> {
        let mut case = Self::look(request)?;
        case.before = judge::lost_blocks(&case.heap, &case.reach);
        if case.before.is_empty() {
            return Ok(case);
        }
        expect_readable(&case.image)?;
        let (before, mut pauses) = (case.before, case.pauses);
        // The first copy is given back before there is another one.
        drop((case.image, case.heap, case.reach, case.types));
        thread::sleep(BETWEEN);
        case = Self::look(request)?;
        pauses.append(&mut case.pauses);
        Ok(Self {
            before,
            pauses,
            ..case
        })
    }

    fn look(request: &Request<'a>) -> Result<Self> {
        // What the kernel has at the time between is in one of these, unless it has it for less than that.
        let mut kept = kernel::words(request.process.pid());
        let walked = Walked::take(request, "memleak")?;
        expect_whole(&walked)?;
        kept.extend(kernel::words(request.process.pid()));
        let Walked {
            mut image, heap, ..
        } = walked;
        image.kept = kept;
        let (heap, pools) = pymalloc::with_pools(&image, heap);
        // Types are needed of objects of CPython already to judge them.
        let types = (pools.blocks > 0).then(|| types_of(request.process, &image, &heap));
        let python = types.as_ref().map_or(&[][..], |types| &types.python);
        Ok(Self {
            process: request.process,
            reach: Reach::new(&image, &heap, python),
            types,
            before: HashSet::new(),
            pauses: vec![image.paused.as_micros() as u64],
            image,
            heap,
        })
    }

    /// Prints the verdict. Returns how many blocks are leaks.
    fn print(mut self, args: &Args, output: &mut Output) -> Result<u64> {
        let types = self.types.take();
        let types = types.unwrap_or_else(|| types_of(self.process, &self.image, &self.heap));
        let heap = &self.heap;
        let kind = |block: usize| match types.of_block(block) {
            Some(named) => Kind::Type(named.name.clone()),
            None => Kind::Size(heap.blocks()[block].size),
        };
        let judgement = judge::judge(heap, &self.reach, &self.before, kind);
        let lost: Vec<_> = judgement.lost.iter().take(args.top).collect();
        let held: Vec<_> = judgement.held.iter().take(args.top).collect();
        output.row(&self.verdict(&judgement))?;
        for group in lost {
            output.row(&Lost::of(group, heap.blocks()[group.example].address))?;
        }
        let questions = self.questions(args, kind);
        let asked = questions.iter().flat_map(|(_, blocks)| blocks.iter());
        let examples = held.iter().map(|group| &group.example);
        let names = self.names(examples.chain(asked).copied());
        for group in &held {
            output.row(&self.held(group, kind, &names))?;
        }
        for (question, blocks) in &questions {
            output.row(&self.why(question, blocks, kind, &names))?;
        }
        Ok(judgement.sums.unreachable.blocks)
    }

    fn verdict(&self, judgement: &Judgement) -> Verdict {
        let (image, heap) = (&self.image, &self.heap);
        Verdict {
            pid: image.pid,
            comm: text::escape_bytes(&image.comm),
            pauses_us: self.pauses.clone(),
            copied_bytes: image.copied_bytes(),
            allocator: heap
                .allocators
                .first()
                .map_or(String::new(), |allocator| allocator.name.clone()),
            coverage: "complete",
            references: self.reach.references(),
            sums: judgement.sums,
        }
    }

    fn held(&self, group: &judge::Group, kind: impl Fn(usize) -> Kind, names: &Names) -> Held {
        let heap = &self.heap;
        let (chain, root) = self.reach.chain(group.example);
        let shown = chain.iter().take(CHAIN);
        Held {
            what: (&group.kind).into(),
            blocks: group.sum.blocks,
            bytes: group.sum.bytes,
            address: format!("{:#x}", heap.blocks()[group.example].address),
            chain: shown
                .map(|&by| {
                    text::escape(&judge::describe(&kind(by), &heap.blocks()[by])).into_owned()
                })
                .collect(),
            chain_blocks: chain.len(),
            root: names.root(&self.image, root),
        }
    }

    /// What --why asks for, with the blocks of each question.
    fn questions(&self, args: &Args, kind: impl Fn(usize) -> Kind) -> Vec<(String, Vec<usize>)> {
        let heap = &self.heap;
        let all = || 0..heap.blocks().len();
        let blocks = |question: &str| match Question::parse(question) {
            Question::Address(address) => {
                let block = heap.block_at(address);
                block.map(|(block, _)| block).into_iter().collect()
            }
            Question::Size(bytes) => all()
                .filter(|&block| heap.blocks()[block].size == bytes)
                .collect(),
            Question::Type(name) => all()
                .filter(|&block| kind(block) == Kind::Type(name.clone()))
                .collect(),
        };
        let whys = args.verdict.why.iter();
        whys.map(|question| (text::escape(question).into_owned(), blocks(question)))
            .collect()
    }

    fn why(
        &self,
        question: &str,
        blocks: &[usize],
        kind: impl Fn(usize) -> Kind,
        names: &Names,
    ) -> Why {
        let heap = &self.heap;
        let root = |block: usize| names.root(&self.image, self.reach.chain(block).1);
        let label = |block: usize| {
            let label = judge::describe(&kind(block), &heap.blocks()[block]);
            text::escape(&label).into_owned()
        };
        let tree = judge::tree(heap, &self.reach, blocks, root, label);
        Why {
            question: question.to_owned(),
            blocks: blocks.len() as u64,
            bytes: blocks.iter().map(|&block| heap.blocks()[block].size).sum(),
            traced_blocks: tree.sum.blocks,
            tree: Branch::list(&tree, 0),
        }
    }

    /// The variables that hold the chains of these blocks.
    fn names(&self, blocks: impl Iterator<Item = usize>) -> Names {
        let roots = blocks.filter_map(|block| self.reach.chain(block).1);
        Names::of(&self.image, roots)
    }
}

/// The types of blocks; of a process that has exited since there are fewer.
fn types_of(process: &Process, image: &Image, heap: &Heap) -> types::Names {
    RunningModules::open(process.pid())
        .map(|modules| types::Names::of(image, heap, &modules))
        .unwrap_or_default()
}
