//! Tests with tables of real files in BPF maps. Nothing is published, as that takes a BPF program.

use std::fs;
use std::io::{Seek, Write};

use libbpf_rs::MapType;

use super::*;
use crate::bpf::map_create;

/// Creates tables with memory for the words of one shard, and the map of published entries.
pub(in crate::stacks::unwind) fn tables() -> Option<(Tables, MapHandle)> {
    let like = map_create::create_for_test(
        MapType::Array,
        (4, 8),
        types::unwind_layout::UNWIND_SHARD_WORDS.0,
        libbpf_rs::libbpf_sys::BPF_F_MMAPABLE,
    )?;
    let shards = map_create::create_array_of(&like, "unwind_shards", 8).expect("a map of maps");
    let sizes = (8, size_of::<types::unwind_file>());
    let known = map_create::create_for_test(MapType::Hash, sizes, 64, 0)?;
    let mut tables = Tables::new(Store::new(shards, 1), true);
    let entries = map_create::reopen(&known).expect("a second handle");
    tables.entries = Some(entries);
    Some((tables, known))
}

/// Creates a file of its own with the code of this program.
fn program() -> File {
    copy_of("/proc/self/exe")
}

fn copy_of(program: &str) -> File {
    let mut copy = tempfile::tempfile().expect("a file");
    copy.write_all(&fs::read(program).expect("a program"))
        .expect("room");
    copy.rewind().expect("a file");
    copy
}

/// Adds a file's entry to the published ones, last used at this time.
fn know(known: &MapHandle, file: &StoredFile, used_ns: u64) {
    let entry = types::unwind_file {
        number: file.number,
        used_ns,
        ..Default::default()
    };
    let key = u64::from(file.number).to_ne_bytes();
    let entry = types::bytes_of(&entry);
    known.update(&key, entry, MapFlags::ANY).expect("an entry");
}

/// Returns the numbers of the published files.
fn known_numbers(known: &MapHandle) -> Vec<u32> {
    let entries = published(known).expect("it can be read");
    entries.iter().map(|(_, entry)| entry.number).collect()
}

fn of(tables: &Tables, file: &File) -> Arc<StoredFile> {
    let key = key_of(&file.metadata().expect("a file"));
    Arc::clone(&tables.files[&key])
}

#[test]
fn a_file_has_one_table_whoever_maps_it() {
    let Some((mut tables, _)) = tables() else {
        return;
    };
    let (program, text) = (program(), tempfile::tempfile().expect("a file"));
    for _ in 0..3 {
        tables.preload("program", &program).expect("it is read");
        tables.preload("text", &text).expect("it is read");
    }
    assert_eq!((tables.files(), tables.no_room().len()), (1, 0));
    let number = of(&tables, &program).number;
    assert_eq!(tables.name(number), "program");
    assert_eq!(tables.name(number + 17), "a file");
}

#[test]
fn a_file_that_cannot_be_understood_says_why() {
    let Some((mut tables, _)) = tables() else {
        return;
    };
    let cut_short = program();
    cut_short.set_len(1 << 16).expect("a file");
    tables.preload("program", &cut_short).expect("it is read");
    let number = of(&tables, &cut_short).number;
    let why = "program: its code is said to be where it cannot be";
    assert_eq!((tables.files(), tables.name(number)), (0, why));
}

#[test]
fn what_finds_no_room_is_left_out_until_others_make_some() {
    let Some((mut tables, known)) = tables() else {
        return;
    };
    let files: Vec<File> = std::iter::repeat_with(program).take(200).collect();
    let full = files.iter().position(|file| {
        tables.preload("program", file).expect("it is read");
        !tables.no_room().is_empty()
    });
    let full = full.expect("a shard is not for 200 programs");
    assert!(full > 0, "the first finds room");
    assert_eq!(tables.no_room(), ["program"]);
    let left_out = of(&tables, &files[full]);
    assert!(left_out.left_out && left_out.words.is_empty());
    assert_eq!(left_out.entry().pages, UNWIND_TABLE_LEFT_OUT);
    assert!(tables.may_recover());

    // The first file is in use, and the second is not.
    let (first, second) = (of(&tables, &files[0]), of(&tables, &files[1]));
    know(&known, &first, clock::monotonic_ns());
    know(&known, &second, 0);
    know(&known, &left_out, clock::monotonic_ns());
    tables.collected = None;
    assert!(tables.collect(0).expect("it is collected"));
    assert_eq!(tables.files(), 1);
    let left: Vec<Vec<u8>> = known.keys().collect();
    assert_eq!(left, [u64::from(first.number).to_ne_bytes()]);
    assert!(!tables.collect(0).expect("not so soon again"));
    tables.preload("program", &files[full]).expect("it is read");
    assert_eq!(of(&tables, &files[full]).words, second.words);
}

#[test]
fn the_table_that_was_used_longest_ago_makes_room() {
    let Some((mut tables, known)) = tables() else {
        return;
    };
    // Three small tables fit into a shard.
    let files = [(); 3].map(|()| copy_of("/bin/sh"));
    for file in &files {
        tables.preload("sh", file).expect("it is read");
    }
    assert!(tables.no_room().is_empty());
    let now = clock::monotonic_ns();
    let stored: Vec<_> = files.iter().map(|file| of(&tables, file)).collect();
    // All have been used in the last thirty seconds, and the last one is in use as long as the test runs.
    know(&known, &stored[0], now - 5_000_000_000);
    know(&known, &stored[1], now - 7_000_000_000);
    know(&known, &stored[2], u64::MAX);
    let freed = |tables: &mut Tables, words| {
        tables.collected = None;
        tables.collect(words).expect("it is collected")
    };
    assert!(!freed(&mut tables, 0), "nothing is needed");
    assert!(freed(&mut tables, 1));
    assert!(!known_numbers(&known).contains(&stored[1].number));
    assert_eq!(tables.files(), 2);
    assert!(freed(&mut tables, usize::MAX));
    assert_eq!(known_numbers(&known), [stored[2].number], "it is in use");
    assert!(!freed(&mut tables, usize::MAX));
}
