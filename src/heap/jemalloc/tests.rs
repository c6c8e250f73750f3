//! A small heap, written by hand: whole, then damaged in every word.

use crate::heap::image::Thread;
use crate::heap::image::made::ImageBuilder;
use crate::heap::page_index::PAGE;

use super::*;

const DATA: u64 = 0x7f00_0000_0000;
/// The page map's table, and its one leaf.
const TABLE: u64 = DATA + 0x1000;
const LEAF: u64 = 0x7e00_0040_0000;
const LEAF_BYTES: u64 = 2 << 20;
/// Memory that jemalloc takes for itself: extents' descriptions, and an arena.
const OWN_MEMORY: u64 = 0x7e00_0000_0000;
const ARENA: u64 = OWN_MEMORY + 0x1_0000;
const BINS: u64 = ARENA + 0x1_0000;
/// Extents: a slab of blocks of 64 bytes, the threads' caches, and one that is free.
const MEMORY: u64 = 0x7d00_0000_0000;
const SLAB: u64 = OWN_MEMORY + 0x1000;
const LISTS: u64 = OWN_MEMORY + 0x1080;
const IDLE: u64 = OWN_MEMORY + 0x1100;
const THREAD: u64 = DATA + 0x30_0000;
/// The size classes of 64 bytes, and of 28 KiB.
const CLASS: u64 = 4;
const LARGE: u64 = 39;

/// Writes an extent: its description, and its elements in the page map.
fn extent(made: &mut ImageBuilder, edata: u64, bits: u64, pages: std::ops::Range<u64>, all: bool) {
    made.put(edata, bits);
    made.put(edata + 8, MEMORY + PAGE * pages.start);
    made.put(edata + 16, PAGE * (pages.end - pages.start));
    let first = (MEMORY >> 12) & 0x3ffff;
    for page in pages.clone() {
        if all || page == pages.start || page + 1 == pages.end {
            made.put(LEAF + 8 * (first + page), edata);
        }
    }
}

/// Makes a heap: a slab of 64 blocks, the lists of caches, and a free extent. Blocks 0 to 59 are in use, except 7 and
/// 9, which are in a thread's cache.
fn heap() -> ImageBuilder {
    let mut made = ImageBuilder::default();
    made.map(
        DATA..DATA + 0x40_0000,
        "rw-p 00000000 fe:00 7 /lib/libjemalloc.so.2",
    );
    made.map(OWN_MEMORY..OWN_MEMORY + 0x20_0000, "rw-p 00000000 00:00 0 ");
    made.map(LEAF..LEAF + LEAF_BYTES, "rw-p 00000000 00:00 0 ");
    made.map(MEMORY..MEMORY + 0x20_0000, "rw-p 00000000 00:00 0 ");
    made.put(TABLE + 8 * (MEMORY >> 30), LEAF);
    extent(&mut made, SLAB, 4 << 28 | CLASS << 20 | 1 << 12, 0..1, true);
    made.put(SLAB + map::BITMAP, 0xf << 60);
    extent(&mut made, LISTS, LARGE << 20, 1..9, false);
    extent(&mut made, IDLE, 1 << 17 | 232 << 20, 9..20, false);
    // The arena: one thread, its caches, the pages in use, and bins.
    made.put(DATA, ARENA);
    made.put(ARENA, 1);
    made.put(ARENA + 0x800, THREAD);
    made.put(ARENA + 0x1000, DATA + 0x800);
    made.put(ARENA + 0x1008, 9);
    let counts = BINS + 224 * CLASS + 112;
    for (number, count) in [(0, 100), (1, 40), (3, 60), (6, 5), (8, 1), (9, 1)] {
        made.put(counts + 8 * number, count);
    }
    made.put(counts + 80, SLAB);
    for class in 0..SMALL as u64 {
        // The words of an empty bin are present, too.
        made.put(BINS + 224 * class, 0);
    }
    // The thread's caches, of which that of 64 bytes holds two blocks.
    made.put(THREAD, THREAD);
    made.put(THREAD + 8, THREAD);
    made.put(THREAD + 16, THREAD + 0x100);
    let lists = MEMORY + PAGE + 8;
    for class in 0..41 {
        let (begin, end) = (lists + 80 * class, lists + 80 * (class + 1));
        let from = end - if class == CLASS { 16 } else { 0 };
        let at = THREAD + 0x100 + 24 * class;
        made.put(at, from);
        made.put(
            at + 16,
            begin & 0xffff | (begin & 0xffff) << 16 | (end & 0xffff) << 32,
        );
        made.put(end - 16, MEMORY + 64 * 9);
        made.put(end - 8, MEMORY + 64 * 7);
    }
    made.put(MEMORY, 0);
    made
}

#[test]
fn a_whole_heap_has_its_blocks_and_what_is_free() {
    let image = heap().image();
    let (heap, walk) = walk(&image).expect("a heap");
    let usage = walk.usage(&image);
    assert_eq!(heap.coverage, Coverage::Complete);
    let used = (0..60).filter(|number| ![7, 9].contains(number));
    let expected: Vec<_> = used
        .map(|number| Block {
            address: MEMORY + 64 * number,
            size: 64,
        })
        .collect();
    assert_eq!(heap.blocks(), expected);
    let all = MEMORY..MEMORY + 20 * PAGE;
    assert_eq!(heap.regions.as_slice(), std::slice::from_ref(&all));
    let free: u64 = heap.free.iter().map(|range| range.end - range.start).sum();
    assert_eq!(free, 64 * 6 + 11 * PAGE);
    let covers = |address: u64| heap.structures.iter().any(|range| range.contains(&address));
    assert!(covers(ARENA) && covers(BINS) && covers(SLAB) && covers(LEAF));
    assert_eq!(heap.allocators[0].file, b"/lib/libjemalloc.so.2");
    let all = usage.all;
    let counts = [all.in_use, all.cached, all.slabs, all.own].map(|sum| sum.count);
    assert_eq!(counts, [58, 2, 4, 1]);
    let bytes = [all.active, all.dirty, all.muzzy, all.retained].map(|sum| sum.bytes / PAGE);
    assert_eq!(bytes, [9, 11, 0, 0]);
    assert_eq!(all.allocated(), 60 * 64 + (28 << 10));
    assert_eq!(usage.arenas[&(0, 0)].address, ARENA);
    let class = usage.classes[&64];
    assert_eq!((class.in_use.count, class.free.count), (58, 6));
}

/// A jemalloc that was built for 57 address bits has another table between the first one and the leaf, and elements of
/// two words. The same blocks are found as with 48 bits.
#[test]
fn a_map_of_three_levels_leads_to_the_same_blocks() {
    const INNER: u64 = LEAF + LEAF_BYTES;
    // Behind the array of arenas, in which only arenas are.
    const OUTER: u64 = DATA + 0x10_0000;
    let mut made = heap();
    made.put(TABLE + 8 * (MEMORY >> 30), 0);
    let elements = [(0, SLAB), (1, LISTS), (8, LISTS), (9, IDLE), (19, IDLE)];
    for (page, _) in elements {
        made.put(LEAF + 8 * ((MEMORY >> 12 & 0x3ffff) + page), 0);
    }
    made.map(INNER..INNER + (256 << 10), "rw-p 00000000 00:00 0 ");
    made.put(OUTER + 8 * (MEMORY >> 42), INNER);
    made.put(INNER + 8 * (MEMORY >> 27 & 0x7fff), LEAF);
    for (page, edata) in elements {
        let element = LEAF + 16 * ((MEMORY >> 12 & 0x7fff) + page);
        made.put(element, edata);
        made.put(element + 8, CLASS << 5 | 1);
    }
    let (found, _) = walk(&made.image()).expect("a heap");
    let (expected, _) = walk(&heap().image()).expect("a heap");
    assert_eq!(found.coverage, Coverage::Complete);
    assert_eq!(found.blocks(), expected.blocks());
    assert_eq!(found.free, expected.free);
    // An entry that refers to no table.
    made.put(OUTER, DATA);
    let (broken, _) = walk(&made.image()).expect("a heap");
    assert!(
        matches!(broken.coverage, Coverage::Incomplete { .. }),
        "{broken:?}"
    );
}

/// Distance between two heaps: 64 elements of the page map's table.
const APART: u64 = 64 << 30;

/// Makes two heaps: the heap, and a copy of it whose file has its data `data_by` further on.
fn two_heaps(data_by: u64, second_file: &str) -> ImageBuilder {
    let mut made = heap();
    let moved = |address: u64| match address {
        DATA..0x7f00_0040_0000 => address + data_by,
        MEMORY..DATA => address + APART,
        other => other,
    };
    for (page, bytes) in made.pages.clone() {
        let (words, _) = bytes.as_chunks::<8>();
        for (at, &word) in (page..).step_by(8).zip(words) {
            made.put(moved(at), moved(u64::from_le_bytes(word)));
        }
    }
    let data = DATA + data_by;
    made.map(
        data..data + 0x40_0000,
        &format!("rw-p 00000000 fe:00 8 {second_file}"),
    );
    for start in [OWN_MEMORY, LEAF, MEMORY] {
        let start = start + APART;
        made.map(start..start + 0x20_0000, "rw-p 00000000 00:00 0 ");
    }
    made
}

/// Without slabs, no bin is recognised. The arena's count of pages is the proof.
#[test]
fn a_heap_without_small_blocks_is_known_by_its_pages() {
    let mut made = heap();
    made.put(SLAB, 1 << 17 | 232 << 20);
    made.put(ARENA + 0x1008, 8);
    for number in 0..11 {
        made.put(BINS + 224 * CLASS + 112 + 8 * number, 0);
    }
    let lists = MEMORY + PAGE + 8;
    made.put(THREAD + 0x100 + 24 * CLASS, lists + 80 * (CLASS + 1));
    let (found, _) = walk(&made.image()).expect("a heap of jemalloc");
    assert_eq!(
        (&found.coverage, found.blocks().len()),
        (&Coverage::Complete, 0)
    );
    made.put(ARENA + 0x1008, 7);
    assert!(walk(&made.image()).is_none());
}

#[test]
fn each_jemalloc_of_a_process_is_walked() {
    // In two files, and in the data of one.
    for (data_by, second) in [(APART, "/bin/server"), (0x40_0000, "/lib/libjemalloc.so.2")] {
        let mut made = two_heaps(data_by, second);
        let image = made.image();
        let (heap, found) = walk(&image).expect("heaps");
        assert_eq!(heap.coverage, Coverage::Complete);
        assert_eq!((heap.blocks().len(), heap.regions.len()), (2 * 58, 2));
        let files = heap.allocators.iter().map(|one| one.file.as_slice());
        let expected = [&b"/lib/libjemalloc.so.2"[..], second.as_bytes()];
        assert_eq!(files.collect::<Vec<_>>(), expected);
        let usage = found.usage(&image);
        assert_eq!((usage.all.in_use.count, usage.arenas.len()), (2 * 58, 2));
        assert_ne!(usage.arenas[&(0, 0)].address, usage.arenas[&(1, 0)].address);
        // The second heap's arena has counted other pages.
        made.put(ARENA + APART + 0x1008, 20);
        let (heap, _) = walk(&made.image()).expect("heaps");
        assert!(matches!(heap.coverage, Coverage::Incomplete { .. }));
    }
}

/// Makes the heap with the thread whose caches these are, and with its stack in the data. A thread that is inside of
/// the allocator has made a call out of the allocator's code.
fn with_thread(is_inside: bool) -> ImageBuilder {
    const CODE: u64 = DATA - 0x1_0000;
    const STACK: u64 = DATA + 0x20_0000;
    let mut made = heap();
    let code = "r-xp 00000000 fe:00 7 /lib/libjemalloc.so.2";
    made.map(CODE..DATA, code);
    made.put(STACK + 0x100, if is_inside { CODE + 0x123 } else { 1 });
    made.threads.push(Thread {
        instruction: 0x1000,
        stack_pointer: STACK,
        thread_pointer: THREAD + 0x1000,
        general: vec![u64::MAX; 16],
        ..Thread::default()
    });
    made
}

#[test]
fn what_a_thread_in_the_middle_of_its_cache_has_there_is_in_doubt() {
    for is_inside in [false, true] {
        let image = with_thread(is_inside).image();
        let (heap, walk) = walk(&image).expect("a heap");
        assert_eq!(heap.coverage, Coverage::Complete);
        let usage = walk.usage(&image).all;
        let counts = [usage.in_use, usage.cached, usage.in_doubt].map(|sum| sum.count);
        assert_eq!(heap.blocks().len(), 58);
        let block = |number: u64| Block {
            address: MEMORY + 64 * number,
            size: 64,
        };
        let all = MEMORY..MEMORY + 20 * PAGE;
        if is_inside {
            assert_eq!(heap.in_doubt, [block(7), block(9)]);
            assert_eq!(counts, [58, 0, 2]);
            // As memory of the program's own, blocks in doubt keep reachable what they refer to.
            let parts = [
                all.start..block(7).address,
                block(8).address..block(9).address,
                block(10).address..all.end,
            ];
            assert_eq!(heap.regions, parts);
        } else {
            assert_eq!((heap.in_doubt, counts), (Vec::new(), [58, 2, 0]));
            assert_eq!(heap.regions.as_slice(), std::slice::from_ref(&all));
        }
        assert!(
            heap.free
                .iter()
                .all(|free| !is_inside || !free.contains(&block(7).address))
        );
    }
}

#[test]
fn what_does_not_agree_is_told() {
    let counts = BINS + 224 * CLASS + 112;
    // The cache of 64 bytes has two entries at its end.
    let entries = MEMORY + PAGE + 8 + 80 * 5 - 16;
    for (address, word, says) in [
        (counts + 64, 2, "other blocks of 64 bytes"),
        (ARENA + 0x1008, 20, "pages of arena 0 were found"),
        (ARENA, 2, "other caches than its 2 threads"),
        (
            SLAB + map::BITMAP,
            0xe << 60,
            "another number of free blocks",
        ),
        (SLAB, 4 << 28 | CLASS << 20 | 1 << 12 | 1, "no such arena"),
        (IDLE + 16, PAGE, "no extent"),
        (LISTS, (LARGE + 4) << 20, "smaller than its block"),
        (entries, MEMORY + 64 * 62, "is free, or in another"),
        (entries, MEMORY + 64 * 7, "is free, or in another"),
        (entries, MEMORY + 8, "the cache of a thread is inconsistent"),
    ] {
        let mut made = heap();
        made.put(address, word);
        let (heap, _) = walk(&made.image()).expect("a heap");
        match heap.coverage {
            Coverage::Incomplete { why, .. } => assert!(why.contains(says), "{address:#x}: {why}"),
            other => panic!("{address:#x} {word:#x}: {other:?}"),
        }
    }
}

#[test]
fn a_heap_damaged_anywhere_ends_the_walk() {
    let whole = heap();
    let addresses = whole.pages.iter().flat_map(|(&page, bytes)| {
        let words = bytes.chunks(8).zip((page..).step_by(8));
        words.filter(|(word, _)| word.iter().any(|&byte| byte != 0))
    });
    let mut complete = 0;
    for (_, address) in addresses {
        for word in [
            0,
            1,
            u64::MAX,
            MEMORY + 64,
            SLAB,
            LEAF,
            ARENA,
            1 << 40,
            THREAD,
        ] {
            let mut made = whole.clone();
            made.put(address, word);
            if let Some((heap, _)) = walk(&made.image()) {
                // Whatever the coverage is, blocks are in order and disjoint.
                let apart = heap.blocks().windows(2);
                assert!(
                    apart
                        .into_iter()
                        .all(|two| two[0].range().end <= two[1].address),
                    "{address:#x} {word:#x}"
                );
                complete += u32::from(heap.coverage == Coverage::Complete);
            }
        }
    }
    // The heap stays complete if the word keeps its value, or if nothing is proved by the word: addresses of blocks'
    // lists, counts of requests.
    assert!(complete > 0);
}
