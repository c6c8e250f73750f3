//! A small heap, written by hand: whole, then damaged in every word.

use crate::heap::arch;
use crate::heap::image::made::ImageBuilder;
use crate::heap::image::{GENERAL_REGISTERS, Thread};

use super::*;

const DATA: u64 = 0x7f00_0000_0000;
const MAIN: u64 = DATA + 0xc60;
const BINS: u64 = MAIN + 0x70;
const MP: u64 = DATA + 0x100;
const HEAP: u64 = 0x5555_0000_0000;
const MAPPED: u64 = 0x7e00_0000_0000;
const THREAD: u64 = 0x7d00_0000_1000;
/// The key of tcaches.
const KEY: u64 = 0x1234_5678_9abc_def1;

/// Writes chunks with these sizes, each in use or free, from an address on. Returns the address after them.
fn chunks(made: &mut ImageBuilder, mut at: u64, chunks: &[(u64, bool)]) -> u64 {
    let mut previous = true;
    for &(size, in_use) in chunks {
        made.put(at + 8, size | u64::from(previous));
        if !in_use {
            made.put(at + size, size);
        }
        previous = in_use;
        at += size;
    }
    made.put(at + 8, u64::from(previous));
    at
}

/// Makes a heap: a tcache (2.30 to 2.41) with one chunk in it, four blocks, a free chunk, and an mmapped block.
fn heap() -> ImageBuilder {
    let mut made = ImageBuilder::default();
    made.map(DATA..DATA + 0x3000, "rw-p 00000000 fe:00 7 /lib/libc.so.6");
    made.map(HEAP..HEAP + 0x21000, "rw-p 00000000 00:00 0 [heap]");
    made.map(MAPPED..MAPPED + 0x22000, "rw-p 00000000 00:00 0 ");
    made.map(THREAD - 0x1000..THREAD + 0x1000, "rw-p 00000000 00:00 0 ");
    let row = [
        (0x290, true),
        (0x20, true),
        (0x70, true),
        (0x500, false),
        (0x30, true),
        (0x40, true),
        (0x20, true),
    ];
    let top = chunks(&mut made, HEAP, &row);
    let size = HEAP + 0x21000 - top;
    made.put(top + 8, size | 1);
    // The free chunk is in the unsorted bin, all other bins are empty.
    let free = HEAP + 0x290 + 0x20 + 0x70;
    for bin in 0..127 {
        let at = BINS + 16 * bin;
        let (first, last) = if bin == 0 {
            (free, free)
        } else {
            (at - 16, at - 16)
        };
        made.put(at, first);
        made.put(at + 8, last);
    }
    made.put(free + 16, BINS - 16);
    made.put(free + 24, BINS - 16);
    made.put(BINS - 16, top);
    let next = BINS + 127 * 16 + 16;
    made.put(next, MAIN);
    made.put(next + 24, 0x21000);
    made.put(next + 32, 0x21000);
    // mp_: n_mmaps 1 of 65536, and what they take.
    made.put(MP - 40, 1 << 32);
    made.put(MP - 32, 65_536 | 1 << 32);
    made.put(MP - 16, 0x22000);
    made.put(MP - 8, 0x22000);
    made.put(MP, HEAP);
    made.put(MP + 8, 64);
    made.put(MP + 16, 0x408);
    made.put(MP + 24, 7);
    made.put(MAPPED + 8, 0x22000 | 2);
    // The last block of 0x20 is in the tcache's list of that size.
    let cached = top - 0x20 + 16;
    let tcache = HEAP + 16;
    made.put(tcache, 1);
    made.put(tcache + 128, cached);
    made.put(cached, cached >> 12);
    made.put(cached + 8, KEY);
    made.put(THREAD - 0x48, tcache);
    let mut general = vec![0; GENERAL_REGISTERS.len()];
    general[arch::THREAD_POINTER] = THREAD;
    made.threads = vec![Thread::new(1, b"made".to_vec(), general, Vec::new())];
    made
}

#[test]
fn a_whole_heap_has_its_blocks_and_its_free_chunks() {
    let image = heap().image();
    let walk = walk(&image).expect("a C library");
    assert_eq!(walk.coverage(), Coverage::Complete, "{walk:?}");
    let heap = walk.heap();
    let blocks: Vec<_> = heap
        .blocks()
        .iter()
        .map(|block| (block.address, block.size))
        .collect();
    let row = [(0x2a0, 0x18), (0x2c0, 0x68), (0x830, 0x28), (0x860, 0x38)];
    let mut expected: Vec<_> = row.map(|(at, size)| (HEAP + at, size)).into();
    expected.push((MAPPED + 16, 0x21ff0));
    assert_eq!(blocks, expected);
    assert_eq!(
        heap.regions,
        [HEAP..HEAP + 0x21000, MAPPED..MAPPED + 0x22000]
    );
    assert_eq!(heap.structures.len(), 1);
    assert!(heap.structures[0].contains(&MAIN) && heap.structures[0].contains(&BINS));
    let free: Vec<_> = heap
        .free
        .iter()
        .map(|range| range.end - range.start)
        .collect();
    assert_eq!(free, [0x500, 0x20, 0x21000 - 0x8b0]);
    assert_eq!(heap.allocators[0].name, "glibc malloc (2.27 to 2.42)");
}

#[test]
fn what_does_not_add_up_is_incomplete() {
    let coverage = |address: u64, word: u64| {
        let mut made = heap();
        made.put(address, word);
        walk(&made.image()).expect("a C library").coverage()
    };
    let next = BINS + 127 * 16 + 16;
    for (what, address, word) in [
        ("a longer heap", next + 24, 0x22000),
        ("another mmapped chunk", MP - 40, 2 << 32),
        ("more mmapped bytes", MP - 16, 0x12000),
        ("a tcache that leads nowhere", HEAP + 16 + 128, HEAP + 0x18),
        ("a fastbin that leads nowhere", BINS - 16 - 80, HEAP + 0x18),
    ] {
        let coverage = coverage(address, word);
        assert!(
            matches!(coverage, Coverage::Incomplete { .. }),
            "{what}: {coverage:?}"
        );
    }
    // A header that was overwritten is reported with its address.
    let header = HEAP + 0x290 + 0x20;
    match coverage(header + 8, 0x5a5a_5a5a_5a5a_5a5a) {
        Coverage::Incomplete { address, .. } => assert_eq!(address, Some(header)),
        other => panic!("{other:?}"),
    }
}

/// Other memory may look like an mmapped chunk. What malloc has counted decides, unless two choices fit.
#[test]
fn what_only_looks_like_an_mmapped_chunk_is_left_out() {
    const OTHER: u64 = 0x7c00_0000_0000;
    let with = |imitations: &[(u64, u64)], mmaps: u64, bytes: u64| {
        let mut made = heap();
        made.map(OTHER..OTHER + 0x40000, "rw-p 00000000 00:00 0 ");
        for (at, size) in imitations {
            made.put(OTHER + at + 8, size | 2);
        }
        made.put(MP - 40, mmaps << 32);
        made.put(MP - 32, 65_536 | mmaps << 32);
        made.put(MP - 16, 0x22000 + bytes);
        made.put(MP - 8, 0x22000 + bytes);
        let walk = walk(&made.image()).expect("a C library");
        (walk.coverage() == Coverage::Complete, walk.mmapped)
    };
    let known = MAPPED..MAPPED + 0x22000;
    let (one, other, same) = ((0x3000, 0x4000), (0x9000, 0x5000), (0x10000, 0x4000));
    assert_eq!(with(&[one], 1, 0), (true, vec![known.clone()]));
    assert_eq!(with(&[one, other], 1, 0), (true, vec![known.clone()]));
    let left = OTHER + 0x9000..OTHER + 0xe000;
    assert_eq!(with(&[one, other], 2, 0x5000), (true, vec![left, known]));
    assert!(!with(&[one, same], 2, 0x4000).0);
    // A chunk at the start of a mapping, or two beside each other, are in no doubt.
    assert!(!with(&[(0, 0x4000)], 1, 0).0);
    assert!(!with(&[one, (0x7000, 0x5000)], 1, 0).0);
}

/// Tests that the walk ends whatever a word holds, and that blocks are within what was walked.
#[test]
fn a_heap_that_is_damaged_in_any_word_is_walked_to_an_end() {
    let whole = heap();
    let words: Vec<u64> = whole
        .pages
        .iter()
        .flat_map(|(page, bytes)| {
            let (words, _) = bytes.as_chunks::<8>();
            let written = words.iter().enumerate().filter(|word| *word.1 != [0; 8]);
            written.map(move |(at, _)| page + 8 * at as u64)
        })
        .collect();
    assert!(words.len() > 280, "{} words", words.len());
    for at in words {
        let values = [
            0,
            1,
            0x21,
            at,
            at - 16,
            HEAP,
            HEAP + 0x21,
            MAIN,
            u64::MAX,
            u64::MAX << 4,
            1 << 46,
        ];
        for word in values {
            let mut made = whole.clone();
            made.put(at, word);
            let Some(walk) = walk(&made.image()) else {
                continue;
            };
            let heap = walk.heap();
            for block in heap.blocks() {
                let inside = |range: &Range<u64>| {
                    range.start <= block.address && block.address + block.size <= range.end + 8
                };
                let known = heap.regions.iter().any(inside);
                let complete = heap.coverage == Coverage::Complete;
                assert!(known || !complete, "{at:#x} = {word:#x}: {block:x?}");
            }
        }
    }
}
