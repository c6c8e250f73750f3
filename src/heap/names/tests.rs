//! Tests of the names of whole heaps, made up.

use super::*;
use crate::heap::names::memory::sample::{self, FakeProcess};

const MODULE: u64 = 0x40_0000;
const HEAP: u64 = 0x10_0000;
const STACK: u64 = 0x7000_0000;

/// A C++ program with two classes, and the words that their objects begin with.
fn program() -> (FakeProcess, [u64; 2]) {
    let mut sample = FakeProcess::default();
    sample.module(MODULE, 0x10000, "program");
    sample.anonymous(HEAP, 0x10000);
    sample.anonymous(STACK, 0x1000);
    sample.words(MODULE, &[0, MODULE + 0x40]);
    sample.words(MODULE + 0x40, &[MODULE + 16, MODULE + 0x60]);
    sample.string(MODULE + 0x60, b"N10__cxxabiv117__class_type_infoE");
    let classes = [(0x1000, "7Session"), (0x2000, "5Cache")].map(|(at, name)| {
        let at = MODULE + at;
        sample.words(at, &[0, at + 0x20]);
        sample.words(at + 0x20, &[MODULE + 16, at + 0x80]);
        sample.string(at + 0x80, name.as_bytes());
        at + 16
    });
    (sample, classes)
}

fn at(number: u64) -> u64 {
    HEAP + number * 0x400
}

/// Returns the names of blocks of these sizes, 0x400 bytes apart.
fn names(sample: &FakeProcess, sizes: &[u64]) -> Vec<String> {
    let blocks: Vec<_> = (0..).map(at).zip(sizes.iter().copied()).collect();
    let heap = sample::heap(&blocks);
    let names = Names::of(&sample.made.image(), &heap, sample.modules());
    let name = |block| names.of_block(block).map_or("", |of| &of.name).to_owned();
    (0..sizes.len()).map(name).collect()
}

#[test]
fn objects_of_a_class_are_equally_large() {
    let (mut sample, [session, cache]) = program();
    for number in 0..5 {
        sample.words(at(number), &[session]);
    }
    // The third is memory that is handed out in parts; the fourth an array; in the fifth the vtable
    // comes again anywhere.
    sample.words(at(3) + 40, &[session]);
    sample.words(at(3) + 80, &[session]);
    sample.words(at(4) + 40, &[session]);
    sample.words(at(4) + 48, &[session]);
    sample.words(at(5), &[cache]);
    let names = names(&sample, &[40, 56, 1000, 120, 120, 1000]);
    assert_eq!(names, ["Session", "Session", "", "Session[]", "", "Cache"]);
}

#[test]
fn a_buffer_is_of_the_object_that_its_container_is_in() {
    let (mut sample, [session, cache]) = program();
    let string = |number: u64| [at(number), 21, 30];
    for number in 3..=5 {
        sample.string(at(number), b"a text of some twenty");
    }
    sample.words(at(0), &[session]);
    sample.words(at(0) + 8, &string(3));
    sample.words(at(1), &[cache]);
    sample.words(at(1) + 8, &string(4));
    sample.words(at(2), &[session]);
    sample.words(at(2) + 8, &string(4));
    // The block is also a vector's, if there is no string.
    sample.words(STACK, &string(5));
    sample.words(STACK + 0x20, &[at(5), at(5) + 8, at(5) + 32]);
    let names = names(&sample, &[40, 40, 40, 40, 40, 40]);
    let expected = [
        "Session",
        "Cache",
        "Session",
        "std::string buffer of Session",
        "std::string buffer",
        "std::string buffer",
    ];
    assert_eq!(names, expected);
}

#[test]
fn what_one_block_alone_points_at_is_held_by_it() {
    let (mut sample, [session, _]) = program();
    sample.words(at(0), &[session, at(1), at(2), at(3)]);
    sample.words(at(1), &[at(4)]);
    sample.string(at(2), b"a text of some twenty");
    sample.words(STACK, &[at(3)]);
    let names = names(&sample, &[40, 104, 24, 104, 104]);
    assert_eq!(names, ["Session", "owned by Session", "text", "", ""]);
}

#[test]
fn shapes_are_of_cxx_programs_only() {
    let mut sample = FakeProcess::default();
    sample.anonymous(HEAP, 0x10000);
    sample.anonymous(STACK, 0x1000);
    sample.words(STACK, &[at(0), at(0) + 8, at(0) + 96]);
    assert_eq!(names(&sample, &[104]), [""]);
    sample.module(MODULE, 0x1000, "libstdc++.so.6.0.30");
    assert_eq!(names(&sample, &[104]), ["std::vector buffer"]);
}

#[test]
fn python_objects_have_the_words_before_them() {
    let mut sample = FakeProcess::default();
    sample.module(MODULE, 0x1000, "python3.11");
    sample.anonymous(HEAP, 0x10000);
    let types = HEAP + 0x8000;
    for (at, name, size, flags) in [
        (types, &b"type"[..], 880, 1 << 31 | 1 << 14 | 1 << 12),
        (types + 0x400, b"list", 40, 1 << 14 | 1 << 12),
    ] {
        sample.words(at, &[1, types, 0, at + 0x200, size]);
        sample.words(at + 168, &[flags]);
        sample.string(at + 0x200, name);
    }
    sample.words(at(0), &[at(1), at(1), 3, types + 0x400, 0, at(1)]);
    sample.words(at(1), &[types, types]);
    let heap = sample::heap(&[(at(0), 64), (at(1), 64)]);
    let names = Names::of(&sample.made.image(), &heap, sample.modules());
    let kinds = [0, 1].map(|block| names.of_block(block).map(|of| (of.kind, &of.name[..])));
    let expected = [(Kind::Python, "list"), (Kind::Owned, "owned by list")];
    assert_eq!(kinds, expected.map(Some));
    let object = PythonObject {
        block: 0,
        head: 16,
        references: 3,
        collected: true,
    };
    assert_eq!(names.python, [object]);
}

#[test]
fn names_of_gigabytes_are_bounded() {
    let (mut sample, _) = program();
    // Classes with names of 15 KiB each, as a hostile file can have them by the million.
    let count = 0x200;
    sample.module(0x1000_0000, count * 0x4000, "large");
    let mut vtables = Vec::new();
    for class in 0..count {
        let at = 0x1000_0000 + class * 0x4000;
        let name = format!("15000{}{class:04}", "x".repeat(14996));
        sample.words(at, &[0, at + 0x20]);
        sample.words(at + 0x20, &[MODULE + 16, at + 0x80]);
        sample.string(at + 0x80, name.as_bytes());
        vtables.push(at + 16);
    }
    sample.anonymous(0x2000_0000, count * 0x40);
    let mut blocks = Vec::new();
    for (vtable, at) in vtables.into_iter().zip((0x2000_0000..).step_by(0x40)) {
        sample.words(at, &[vtable]);
        blocks.push((at, 40));
    }
    let heap = sample::heap(&blocks);
    let names = Names::of(&sample.made.image(), &heap, sample.modules());
    let bytes: usize = names.types().iter().map(|of| of.name.len()).sum();
    assert!(bytes <= MAX_NAMES && bytes > 0, "{bytes}");
}

#[test]
fn a_stale_container_in_another_block_leaves_no_owner() {
    let of = |owner, is_inside| ContainerPart::new(Shape::String, owner, is_inside);
    let (in_object, in_block, outside) = (of(Some(3), true), of(None, true), of(None, false));
    assert_eq!(in_object.and(in_object).owner, Some(3));
    // A register or the stack keeps copies of the words for a while.
    assert_eq!(outside.and(in_object).owner, Some(3));
    assert_eq!(in_object.and(outside).owner, Some(3));
    assert_eq!(in_object.and(in_block).owner, None);
    assert_eq!(in_block.and(in_object).and(in_object).owner, None);
}

#[test]
fn the_program_s_own_types_are_known() {
    let is_own = |kind, name: &str| {
        let name = name.to_owned();
        Type { kind, name }.is_own()
    };
    assert!(is_own(Kind::Python, "Session") && is_own(Kind::Class, "list"));
    assert!(!is_own(Kind::Python, "dict") && !is_own(Kind::Owned, "owned by Session"));
}
