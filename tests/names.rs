//! Types of blocks in live processes that record the types themselves: C++, stripped or not, and CPython.
//!
//! The processes wait while they are read, so that no image is needed that stops them. They write down where
//! their blocks are, so that no walk of a heap is needed, either. So the tests need no privileges.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};

use memmap2::MmapMut;
use memtools::heap::area::Area;
use memtools::heap::blocks::{Block, Coverage, Heap};
use memtools::heap::image::Image;
use memtools::heap::names::{Kind, Names, RunningModules, pymalloc};
use memtools::heap::page_index::PAGE;

const WORKLOAD: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/workload");

/// Number of objects of each kind: a prime.
const COUNT: &str = "211";

/// Workload that has done its work, and waits.
struct Waiting {
    child: Child,
    /// Kept open: the program waits for a line.
    _stdin: ChildStdin,
    /// Lines that the workload wrote about its blocks.
    truth: String,
}

impl Waiting {
    fn start(command: &mut Command) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("truth");
        let command = command.arg(COUNT).arg(&path);
        let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = piped.spawn().expect("the workload starts");
        let mut stdin = child.stdin.take().expect("a pipe");
        let mut answers = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let mut expect = |word: &str| {
            let line = answers.next().expect("an answer").expect("text");
            assert!(line.starts_with(word), "{line}");
        };
        expect("ready");
        stdin.write_all(b"\n").expect("the workload reads");
        expect("done");
        let truth = fs::read_to_string(&path).expect("what the workload wrote");
        Self {
            child,
            _stdin: stdin,
            truth,
        }
    }

    /// Returns an image of all memory that the workload may write to.
    fn image(&self) -> Image {
        let pid = self.child.id();
        let maps = fs::read(format!("/proc/{pid}/maps")).expect("its mappings");
        let memory = File::open(format!("/proc/{pid}/mem")).expect("its memory");
        let mut image = Image::default();
        image.areas = Area::parse_list(&maps);
        let (mut runs, mut bytes): (Vec<Range<u64>>, Vec<u8>) = Default::default();
        for area in image
            .areas
            .iter()
            .filter(|area| area.writable && !area.shared)
        {
            for page in area.mapping.range.clone().step_by(PAGE as usize) {
                let mut copy = [0; PAGE as usize];
                if memory.read_exact_at(&mut copy, page).is_ok() {
                    bytes.extend_from_slice(&copy);
                    runs.push(page..page + PAGE);
                }
            }
        }
        let mut copy = MmapMut::map_anon(bytes.len()).expect("room");
        copy.copy_from_slice(&bytes);
        image.set_memory(runs, copy).expect("in order");
        image
    }

    fn modules(&self) -> RunningModules {
        RunningModules::open(self.child.id()).expect("its memory")
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.child.kill().expect("it runs");
        self.child.wait().expect("it ends");
    }
}

/// Builds the C++ workload with these flags.
fn program(folder: &Path, flags: &[&str]) -> PathBuf {
    let program = folder.join("types");
    let source = Path::new(WORKLOAD).join("types.cc");
    let mut compiler = Command::new("c++");
    let built = compiler
        .args(["-std=c++17", "-O1", "-fno-builtin", "-o"])
        .arg(&program);
    let status = built.arg(source).args(flags).status().expect("a compiler");
    assert!(status.success());
    program
}

/// Removes the spaces from a name, in which demanglers differ.
fn plain(name: &str) -> String {
    name.chars().filter(|character| *character != ' ').collect()
}

/// Counts the blocks of the C++ workload by their true type and the name that they get.
fn named(flags: &[&str]) -> HashMap<(String, String), usize> {
    let folder = tempfile::tempdir().expect("a folder");
    let waiting = Waiting::start(&mut Command::new(program(folder.path(), flags)));
    let mut truth = HashMap::new();
    let mut blocks = Vec::new();
    for line in waiting.truth.lines() {
        let mut fields = line.splitn(3, ' ');
        let mut field = || fields.next().expect("three fields");
        let address = u64::from_str_radix(field(), 16).expect("an address");
        let size = field().parse().expect("a size");
        blocks.push(Block { address, size });
        truth.insert(address, field());
    }
    let mut heap = Heap::new(blocks, Coverage::Complete);
    heap.regions = heap.blocks().iter().map(Block::range).collect();
    let names = Names::of(&waiting.image(), &heap, &waiting.modules());
    let mut named = HashMap::new();
    for (number, block) in heap.blocks().iter().enumerate() {
        let name = names.of_block(number).map_or("", |of| &of.name);
        let pair = (truth[&block.address].to_owned(), name.to_owned());
        *named.entry(pair).or_default() += 1;
    }
    named
}

/// Whether a name is right. If the type cannot be known, the name may only say what holds the block.
fn is_right(truth: &str, name: &str) -> bool {
    let (truth, name) = (plain(truth), plain(name));
    match &truth[..] {
        "-" => name.is_empty() || name.starts_with("heldby"),
        "std::_Sp_counted_ptr_inplace" => name.starts_with(&truth),
        _ => name == truth || name.starts_with(&format!("{truth}of")),
    }
}

fn every_block_is_right(flags: &[&str]) {
    let named = named(flags);
    let wrong: Vec<_> = named
        .iter()
        .filter(|((truth, name), _)| !is_right(truth, name))
        .collect();
    assert!(wrong.is_empty(), "{flags:?}: {wrong:#?}");
    let owned = |name: &str| {
        let count = named.iter().filter(|((_, known), _)| known == name);
        count.map(|(_, count)| *count).sum::<usize>()
    };
    let count: usize = COUNT.parse().expect("a number");
    assert_eq!(owned("std::map/set node of shop::session"), 2 * count);
    assert_eq!(
        owned("std::vector buffer of shop::session"),
        count - count.div_ceil(5)
    );
    assert_eq!(owned("std::string buffer of shop::session"), count);
    assert_eq!(owned("shop::session"), count);
}

#[test]
fn cxx_blocks_of_a_program() {
    every_block_is_right(&[]);
}

#[test]
fn cxx_blocks_of_a_stripped_program() {
    every_block_is_right(&["-s"]);
}

#[test]
fn cxx_blocks_of_a_stripped_program_at_fixed_addresses() {
    every_block_is_right(&["-s", "-no-pie", "-fno-pie"]);
}

#[test]
fn cxx_blocks_of_a_stripped_static_program() {
    every_block_is_right(&["-s", "-static"]);
}

#[test]
fn objects_of_cpython() {
    let script = Path::new(WORKLOAD).join("objects.py");
    let waiting = Waiting::start(Command::new("python3").arg(script));
    let image = waiting.image();
    let heap = Heap::new(Vec::new(), Coverage::Complete);
    let (heap, pools) = pymalloc::with_pools(&image, heap);
    assert!(pools.pools > 100 && pools.inconsistent == 0, "{pools:?}");
    let names = Names::of(&image, &heap, &waiting.modules());
    let (mut right, mut wrong, mut elsewhere) = (0, Vec::new(), 0);
    for line in waiting.truth.lines() {
        let (address, truth) = line.split_once(' ').expect("two fields");
        let address = u64::from_str_radix(address, 16).expect("an address");
        let Some((block, _)) = heap.block_at(address) else {
            elsewhere += 1;
            continue;
        };
        let of = names.of_block(block).filter(|of| of.kind == Kind::Python);
        // Types that are written in C have the module's name before their own.
        match of.and_then(|of| of.name.rsplit('.').next()) {
            Some(name) if name == truth => right += 1,
            other => wrong.push((truth, other.map(str::to_owned))),
        }
    }
    assert!(
        wrong.is_empty(),
        "{} wrong: {:?}",
        wrong.len(),
        &wrong[..wrong.len().min(20)]
    );
    // Objects of more than 512 bytes come from malloc, and static types are in no block.
    assert!(
        right > 10_000 && elsewhere < right / 10,
        "{right} right, {elsewhere} elsewhere"
    );
}
