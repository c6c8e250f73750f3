//! Tests of [`reach`](super).

use super::*;
use crate::heap::blocks::{Block, Coverage};
use crate::heap::image::made::ImageBuilder;
use crate::heap::image::{GENERAL_REGISTERS, Thread};
use crate::heap::kernel::KernelWord;

const HEAP: u64 = 0x10_0000;
pub(super) const GLOBALS: u64 = 0x60_0000;
const CODE: u64 = 0x50_0000;

/// A process with a program's data, and a heap with a block of 64 bytes at each multiple of 256.
pub(super) fn process() -> ImageBuilder {
    let mut made = ImageBuilder::default();
    made.map(HEAP..HEAP + 0x10_0000, "rw-p 00000000 00:00 0 [heap]");
    made.map(CODE..CODE + 0x1000, "r--p 00000000 fe:00 7 /bin/app");
    made.map(GLOBALS..GLOBALS + 0x1000, "rw-p 00001000 fe:00 7 /bin/app");
    made
}

pub(super) fn block(number: u64) -> u64 {
    HEAP + 256 * number
}

pub(super) fn heap(blocks: u64) -> Heap {
    let blocks = (0..blocks).map(|number| Block {
        address: block(number),
        size: 64,
    });
    let mut heap = Heap::new(blocks.collect(), Coverage::Complete);
    heap.regions.push(HEAP..HEAP + 0x10_0000);
    heap
}

fn classes(image: &Image, heap: &Heap) -> Vec<Class> {
    let reach = Reach::new(image, heap, &[]).expect("few blocks");
    (0..heap.blocks().len())
        .map(|block| reach.class(block))
        .collect()
}

use Class::{Interior, Reachable, Unreachable, UnreachableVia};

#[test]
fn a_list_is_reached_by_a_global_and_lost_without_it() {
    let mut made = process();
    // 2 -> 1 -> 0
    made.put(block(2), block(1));
    made.put(block(1) + 8, block(0));
    let lost = made.image();
    assert_eq!(
        classes(&lost, &heap(3)),
        [UnreachableVia, UnreachableVia, Unreachable]
    );
    let reach = Reach::new(&lost, &heap(3), &[]).expect("few blocks");
    assert_eq!(reach.leaders(), [Some(2), Some(2), Some(2)]);
    assert_eq!(reach.chain(0), (vec![1, 2], None));

    made.put(GLOBALS + 0x18, block(2));
    let held = made.image();
    assert_eq!(classes(&held, &heap(3)), [Reachable; 3]);
    let reach = Reach::new(&held, &heap(3), &[]).expect("few blocks");
    let (place, chain) = origin(&held, &reach, 0).expect("reached");
    assert_eq!(chain, [1, 2]);
    assert_eq!(
        place,
        RootPlace::Module {
            path: b"/bin/app".to_vec(),
            offset: GLOBALS + 0x18 - CODE
        }
    );
    assert_eq!((reach.holders(1), reach.references()), (vec![2], 2));
}

#[test]
fn a_ring_is_lost_with_one_leader() {
    let mut made = process();
    for number in 0..10 {
        made.put(block(number), block((number + 1) % 10));
    }
    // A block that refers to itself alone, and a lost block that refers to the ring.
    made.put(block(10), block(10));
    made.put(block(11), block(3));
    let image = made.image();
    let reach = Reach::new(&image, &heap(12), &[]).expect("few blocks");
    let classes: Vec<_> = (0..12).map(|block| reach.class(block)).collect();
    assert_eq!(classes[..10], [UnreachableVia; 10], "{classes:?}");
    assert_eq!(classes[10..], [Unreachable; 2]);
    assert!(
        reach.leaders()[..10]
            .iter()
            .all(|leader| *leader == Some(11))
    );
}

#[test]
fn only_a_reference_to_the_middle_is_an_attribute() {
    let mut made = process();
    made.put(GLOBALS, block(0) + 40);
    // A block that only such a block refers to has the same class.
    made.put(block(0), block(1));
    made.put(GLOBALS + 8, block(2) + 72);
    assert_eq!(
        classes(&made.image(), &heap(3)),
        [Interior, Interior, Unreachable]
    );
}

#[test]
fn chains_of_all_blocks_begin_where_each_does() {
    let mut made = process();
    // Block 0 is the last of a list, and blocks 3 and 4 are lost.
    (0..2).for_each(|number| made.put(block(number + 1), block(number)));
    made.put(GLOBALS, block(2));
    made.put(block(4), block(3));
    let image = made.image();
    let reach = Reach::new(&image, &heap(5), &[]).expect("few blocks");
    let starts = reach.starts();
    for number in 0..5 {
        let root = (number < 3).then_some(Root::Memory(GLOBALS));
        assert_eq!(
            (reach.start(&starts, number), reach.chain(number).1),
            (root, root)
        );
    }
}

#[test]
fn starts_behind_a_header_are_starts() {
    let mut made = process();
    for (address, word) in [
        (block(0), 48),
        (block(1), 5),
        (block(2), 20),
        (block(2) + 8, 30),
        (block(3), CODE),
        (block(3) + 16, CODE + 8),
        (block(4), 0),
    ] {
        made.put(address, word);
    }
    for (at, address) in [
        block(0) + 8,
        block(1) + 8,
        block(2) + 24,
        block(3) + 16,
        block(4) + 8,
    ]
    .into_iter()
    .enumerate()
    {
        made.put(GLOBALS + 8 * at as u64, address);
    }
    assert_eq!(
        classes(&made.image(), &heap(5)),
        [Reachable, Reachable, Reachable, Reachable, Interior]
    );
}

#[test]
fn free_chunks_and_an_allocators_lists_hold_nothing() {
    let mut made = process();
    made.put(block(0) + 128, block(0));
    made.put(GLOBALS + 0x100, block(1));
    let mut heap = heap(2);
    heap.structures.push(GLOBALS + 0x100..GLOBALS + 0x108);
    assert_eq!(classes(&made.image(), &heap), [Unreachable; 2]);
    heap.structures.clear();
    assert_eq!(classes(&made.image(), &heap), [Unreachable, Reachable]);
}

#[test]
fn registers_hold_what_nothing_else_does() {
    let mut made = process();
    let mut general = vec![0; GENERAL_REGISTERS.len()];
    general[3] = block(0);
    made.threads = vec![Thread::new(12, Vec::new(), general, vec![7, block(1)])];
    let (image, heap) = (made.image(), heap(3));
    let reach = Reach::new(&image, &heap, &[]).expect("few blocks");
    let name = |block| match origin(&image, &reach, block) {
        Some((RootPlace::Register { tid: 12, name }, _)) => Some(name),
        _ => None,
    };
    assert_eq!(
        (name(0), name(1), name(2)),
        (Some(GENERAL_REGISTERS[3]), Some("vector"), None)
    );
}

#[test]
fn the_kernel_holds_what_it_gives_back() {
    let mut image = process().image();
    image.kernel_words = vec![KernelWord {
        what: "sigev_value of timer",
        number: 3,
        word: block(0),
    }];
    let heap = heap(2);
    let reach = Reach::new(&image, &heap, &[]).expect("few blocks");
    let place = RootPlace::Kernel {
        what: "sigev_value of timer",
        number: 3,
    };
    assert_eq!(origin(&image, &reach, 0), Some((place, vec![])));
    assert_eq!(origin(&image, &reach, 1), None);
}

#[test]
fn blocks_without_a_number_are_refused() {
    assert!(expect_numbers((1 << 31) - 1).is_ok());
    let refused = expect_numbers(1 << 31).expect_err("too many");
    assert!(refused.to_string().contains("has 2147483648 blocks"));
}

#[test]
fn chains_are_the_shortest() {
    let mut made = process();
    made.put(GLOBALS, block(0));
    for number in 0..20 {
        made.put(block(number) + 16, block(number + 1));
    }
    made.put(block(1), block(20));
    let image = made.image();
    let reach = Reach::new(&image, &heap(21), &[]).expect("few blocks");
    assert_eq!(reach.chain(20).0, [1, 0]);
    assert_eq!(reach.chain(19).0.len(), 19);
}
