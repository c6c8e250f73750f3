//! Tests of [`roots`](super).

use super::*;
use crate::heap::arch;
use crate::heap::blocks::{Block, Coverage};
use crate::heap::image::GENERAL_REGISTERS;
use crate::heap::image::made::ImageBuilder;

const STACK: u64 = 0x7f00_0000_1000;
const STACK_END: u64 = STACK + 0x2_0000;
const CONTROL: u64 = STACK_END - 0x940;

/// Makes a thread's stack as glibc does, with its guard and control block.
fn with_stack() -> ImageBuilder {
    let mut made = ImageBuilder::default();
    made.map(STACK - 0x1000..STACK, "---p 00000000 00:00 0 ");
    made.map(STACK..STACK_END, "rw-p 00000000 00:00 0 ");
    made.put(CONTROL, CONTROL);
    made.put(CONTROL + 16, CONTROL);
    made
}

fn thread(stack_pointer: u64) -> Thread {
    let mut general = vec![0; GENERAL_REGISTERS.len()];
    (general[arch::STACK_POINTER], general[arch::THREAD_POINTER]) = (stack_pointer, CONTROL);
    Thread::new(7, Vec::new(), general, Vec::new())
}

const TABLE: u64 = 0x6010;

/// Adds the control block's table of thread-local storage as glibc has it, of pairs of a block and what is to be
/// freed.
fn add_table(made: &mut ImageBuilder, modules: &[(u64, u64)]) {
    made.put(CONTROL + 8, TABLE);
    made.put(TABLE - 16, modules.len() as u64);
    for (at, &(block, freed)) in (TABLE + 16..).step_by(16).zip(modules) {
        made.put(at, block);
        made.put(at + 8, freed);
    }
}

fn skipped(made: &ImageBuilder) -> Vec<Range<u64>> {
    excluded_ranges(&made.image(), &Heap::new(Vec::new(), Coverage::Complete))
}

#[test]
fn what_a_thread_has_returned_from_is_no_root() {
    let mut made = with_stack();
    made.threads = vec![thread(CONTROL - 0x1000)];
    let below = STACK..CONTROL - 0x1000 - 128;
    assert_eq!(skipped(&made), [below]);
    // Another thread's stack is in the same mapping, or the stack was not made by glibc.
    made.threads.push(thread(CONTROL - 0x2000));
    made.threads[1].tid = 8;
    assert_eq!(skipped(&made), []);
    made.threads = vec![thread(CONTROL - 0x1000)];
    made.threads[0].thread_pointer = 0x1234;
    assert_eq!(skipped(&made), []);
}

#[test]
fn coroutines_on_a_thread_s_own_stack_are_roots() {
    const DATA: u64 = 0x60_0000;
    let excluded_with = |places: &[(u64, u64)], blocks: Vec<Block>| {
        let mut made = with_stack();
        made.map(DATA..DATA + 0x1000, "rw-p 00000000 fe:00 7 /bin/app");
        made.map(DATA + 0x8000..DATA + 0x9000, "rw-p 00000000 00:00 0 ");
        made.threads = vec![thread(CONTROL - 0x1000)];
        places.iter().for_each(|&(at, word)| made.put(at, word));
        let excluded = excluded_ranges(&made.image(), &Heap::new(blocks, Coverage::Complete));
        excluded.into_iter().find(|range| range.start == STACK)
    };
    let (first, second) = (STACK + 0x8000, STACK + 0x4000);
    // Saved stack pointers are in a global, and in a block. Other memory, and a word that is no address, say nothing.
    let in_global = [
        (DATA, first),
        (DATA + 8, STACK + 1),
        (DATA + 0x8100, second),
    ];
    assert_eq!(excluded_with(&in_global, vec![]), Some(STACK..first));
    let block = Block {
        address: DATA + 0x8100,
        size: 64,
    };
    assert_eq!(excluded_with(&in_global, vec![block]), Some(STACK..second));
    assert_eq!(
        excluded_with(&[], vec![block]),
        Some(STACK..CONTROL - 0x1000 - 128)
    );
}

#[test]
fn of_an_ended_thread_only_the_pointer_to_its_table_stays() {
    let mut made = with_stack();
    assert_eq!(skipped(&made), [STACK..CONTROL, CONTROL + 64..STACK_END]);
    made.threads = vec![thread(STACK + 0x100)];
    let below = STACK..STACK + 0x80;
    assert_eq!(skipped(&made), [below]);
    // Memory with no guard before, and memory with none of glibc's marks, may be anything.
    made = with_stack();
    made.maps = made.maps.replace("---p", "rw-p");
    assert_eq!(skipped(&made), []);
    made = with_stack();
    made.put(CONTROL + 16, 0);
    assert_eq!(skipped(&made), []);
}

#[test]
fn allocators_memory_is_no_root_and_ranges_are_joined() {
    let mut heap = Heap::new(
        vec![Block {
            address: 0x5000,
            size: 16,
        }],
        Coverage::Complete,
    );
    heap.regions = vec![0x1000..0x3000, 0x3000..0x4000];
    heap.structures.push(0x3800..0x4800);
    assert_eq!(
        excluded_ranges(&Image::default(), &heap),
        [0x1000..0x4800, 0x5000..0x5010]
    );
}

#[test]
fn places_have_names() {
    let mut made = with_stack();
    made.maps.clear();
    made.map(0x1000..0x2000, "r-xp 00000000 fe:00 9 /lib/libx.so");
    made.map(0x2000..0x3000, "rw-p 00001000 fe:00 9 /lib/libx.so");
    made.map(0x3000..0x4000, "rw-p 00000000 00:00 0 ");
    made.map(0x5000..0x6000, "rw-p 00000000 00:00 0 ");
    made.map(0x8000..0x9000, "rw-s 00000000 00:01 5 /dev/shm/x");
    made.map(STACK..STACK_END, "rw-p 00000000 00:00 0 ");
    made.threads = vec![thread(CONTROL - 0x1800)];
    add_table(&mut made, &[(CONTROL - 0x40, 0)]);
    let image = made.image();
    let of = |address| place(&image, Root::Memory(address));
    let module = |offset| RootPlace::Module {
        path: b"/lib/libx.so".to_vec(),
        offset,
    };
    assert_eq!((of(0x2010), of(0x3010)), (module(0x1010), module(0x2010)));
    assert!(matches!(of(0x5008), RootPlace::Other { offset: 8, .. }));
    assert!(matches!(of(0x8008), RootPlace::Other { name, .. } if name == b"/dev/shm/x"));
    assert_eq!(
        of(CONTROL - 0x1800 + 24),
        RootPlace::Stack { tid: 7, offset: 24 }
    );
    assert_eq!(
        of(CONTROL - 16),
        RootPlace::ThreadLocal {
            tid: 7,
            offset: -16
        }
    );
    assert_eq!(
        place(&image, Root::Register(0, GENERAL_REGISTERS[3])),
        RootPlace::Register {
            tid: 7,
            name: GENERAL_REGISTERS[3]
        }
    );
}

#[test]
fn frames_end_where_thread_local_storage_begins() {
    let place_at = |made: &ImageBuilder, address| place(&made.image(), Root::Memory(address));
    let local = |offset| RootPlace::ThreadLocal { tid: 7, offset };
    let mut made = with_stack();
    let stack_pointer = CONTROL - 0x200;
    made.threads = vec![thread(stack_pointer)];
    // Two modules have storage from the start. That of a third was allocated, and one more has none yet.
    let blocks = [
        (CONTROL - 0x20, 0),
        (CONTROL - 0x48, 0),
        (STACK + 0x800, 1),
        (u64::MAX, 0),
    ];
    add_table(&mut made, &blocks);
    assert_eq!(place_at(&made, CONTROL - 0x48), local(-0x48));
    assert_eq!(
        place_at(&made, CONTROL - 0x50),
        RootPlace::Stack {
            tid: 7,
            offset: 0x1b0
        }
    );
    assert_eq!(place_at(&made, CONTROL + 0x300), local(0x300));
    // musl has the table itself in front.
    let table = CONTROL - 0x60;
    for (at, word) in [
        (CONTROL + 8, table),
        (table, 1),
        (table + 8, CONTROL - 0x40),
    ] {
        made.put(at, word);
    }
    assert_eq!(place_at(&made, table), local(-0x60));
    assert!(matches!(
        place_at(&made, table - 8),
        RootPlace::Stack { .. }
    ));
}

#[test]
fn of_stacks_in_one_mapping_the_closest_below_has_a_word() {
    let mut made = with_stack();
    made.threads = vec![thread(STACK + 0x1000), thread(STACK + 0x8000)];
    made.threads[1].tid = 8;
    let of = |address| place(&made.image(), Root::Memory(address));
    assert_eq!(of(STACK + 0x1010), RootPlace::Stack { tid: 7, offset: 16 });
    assert_eq!(of(STACK + 0x8010), RootPlace::Stack { tid: 8, offset: 16 });
}

#[test]
fn what_is_behind_a_modules_bss_is_other_memory() {
    let mut made = ImageBuilder::default();
    made.map(0x2000..0x3000, "rw-p 00001000 fe:00 9 /lib/libx.so");
    made.map(0x3000..0x9000, "rw-p 00000000 00:00 0 ");
    let image = made.image();
    let modules = ModuleSizes(HashMap::from([(b"/lib/libx.so".to_vec(), 0x1808)]));
    let of = |address| modules.place(&image, Root::Memory(address));
    assert!(matches!(
        of(0x3800),
        RootPlace::Module { offset: 0x1800, .. }
    ));
    assert_eq!(
        of(0x3808),
        RootPlace::Other {
            start: 0x3000,
            offset: 0x808,
            name: Vec::new()
        }
    );
}
