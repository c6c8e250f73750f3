//! Unwind rules, compared with readelf's interpretation of the same files, and rules of files that are damaged in
//! every way.

use std::collections::HashSet;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use memtools::bpf::types::{
    unwind_frame_pointer as FramePointer, unwind_kind as Kind, unwind_row_layout as Layout,
};
use memtools::stacks::unwind::rules::{Rules, address_of};
use proptest::prelude::*;

/// Returns the path of a library on this machine.
fn library(name: &str) -> PathBuf {
    let folders = [
        "/lib/x86_64-linux-gnu",
        "/usr/lib/x86_64-linux-gnu",
        "/lib64",
        "/usr/lib64",
    ];
    let path = folders
        .iter()
        .map(|folder| Path::new(folder).join(name))
        .find(|path| path.exists());
    path.unwrap_or_else(|| panic!("{name} is not installed"))
}

/// Decoded row of unwind rules.
#[derive(Debug, PartialEq)]
struct Row {
    kind: Kind,
    /// Offset in bytes.
    offset: i64,
    fp: u32,
    fp_offset: i64,
}

fn row(row: u64) -> Row {
    Row {
        kind: Kind((row & 0xf) as u32),
        offset: i64::from(row as u32 >> Layout::UNWIND_CFA_SHIFT.0) * 8,
        fp: (row >> Layout::UNWIND_FP_SHIFT.0 & 3) as u32,
        fp_offset: i64::from((row >> Layout::UNWIND_FP_OFFSET_SHIFT.0) as i8) * 8,
    }
}

/// Parses a register with an offset, such as `rsp+16`.
fn register_and_offset(text: &str) -> Option<(&str, i64)> {
    let at = text.find(['+', '-'])?;
    Some((&text[..at], text[at..].parse().ok()?))
}

/// Whether a row agrees with a line of readelf, `LOC CFA rbx rbp ra`, by the names of the columns.
fn agrees(row: &Row, columns: &[&str], fields: &[&str], is_signal: bool) -> bool {
    let field = |name| {
        columns
            .iter()
            .position(|column| *column == name)
            .map(|at| fields[at])
    };
    if is_signal {
        return row.kind == Kind::UNWIND_SIGNAL;
    }
    match field("ra") {
        Some("c-8") => {}
        Some("u") => return row.kind == Kind::UNWIND_ROOT,
        _ => return row.kind == Kind::UNWIND_STRANGE,
    }
    let cfa = fields[1];
    let by_expression = [
        Kind::UNWIND_PLT,
        Kind::UNWIND_THROUGH_FP,
        Kind::UNWIND_THROUGH_SP,
        Kind::UNWIND_STRANGE,
    ];
    let cfa_agrees = match register_and_offset(cfa) {
        Some(("rsp", offset)) => (row.kind, row.offset) == (Kind::UNWIND_BY_SP, offset),
        Some(("rbp", offset)) => (row.kind, row.offset) == (Kind::UNWIND_BY_FP, offset),
        Some(("rbx" | "r10" | "r11", offset)) => {
            (row.kind, row.offset) == (Kind::UNWIND_BY_REGISTER, offset)
        }
        Some(_) => row.kind == Kind::UNWIND_STRANGE,
        None => cfa == "exp" && by_expression.contains(&row.kind),
    };
    let fp_agrees = match field("rbp") {
        None | Some("u" | "s") => row.fp == FramePointer::UNWIND_FP_KEPT.0,
        Some("exp") => row.fp == FramePointer::UNWIND_FP_AT_FP.0,
        Some(place) => match register_and_offset(place) {
            Some(("c", offset)) => {
                (row.fp, row.fp_offset) == (FramePointer::UNWIND_FP_AT_CFA.0, offset)
            }
            _ => row.fp == FramePointer::UNWIND_FP_FORGOTTEN.0,
        },
    };
    // A row of the kind UNWIND_STRANGE may have an offset that no row can hold: frames of 2 MiB and more.
    row.kind == Kind::UNWIND_STRANGE || (cfa_agrees && fp_agrees)
}

/// Returns the row that is valid at an address, found as the BPF program finds it.
fn find(rules: &Rules, pages: &[Range<u32>], address: u64) -> Option<u64> {
    let page = (address >> 8).checked_sub(rules.first_page().into())?;
    let rows = pages.get(usize::try_from(page).ok()?)?;
    let rows = &rules.rows[rows.start as usize..rows.end as usize];
    let after = rows.partition_point(|&row| address_of(row) <= address);
    rows.get(after.checked_sub(1)?).copied()
}

/// Compares every row of a file. Returns the number of rows, and the number of rows that our format cannot hold.
fn compare(path: &Path) -> (usize, usize) {
    let rules = Rules::of_file(&File::open(path).expect("a library")).expect("its rules");
    let pages: Vec<_> = rules.pages().collect();
    let output = Command::new("readelf")
        .args(["--debug-dump=frames-interp", "--wide"])
        .arg(path)
        .output()
        .expect("readelf");
    let text = String::from_utf8_lossy(&output.stdout);
    let text = text
        .split("Contents of the .eh_frame section")
        .nth(1)
        .expect("a dump");
    let (mut signals, mut is_signal, mut in_function) = (HashSet::new(), false, false);
    let (mut columns, mut rows, mut strange) = (Vec::new(), 0, 0);
    let mut end = 0;
    for line in text.lines() {
        let fields: Vec<&str> = line.split_whitespace().collect();
        match fields[..] {
            [offset, _, _, "CIE", augmentation, ..] => {
                in_function = false;
                if augmentation.contains('S') {
                    signals.insert(offset.to_owned());
                }
            }
            [_, _, _, "FDE", cie, range, ..] => {
                in_function = true;
                is_signal = signals.contains(cie.trim_start_matches("cie="));
                let last = range.rsplit("..").next().unwrap_or_default();
                end = u64::from_str_radix(last, 16).expect("an address");
            }
            [_, "ZERO", ..] => {}
            ["LOC", ..] => columns = fields,
            [location, ..] if in_function && fields.len() == columns.len() => {
                let Ok(address) = u64::from_str_radix(location, 16) else {
                    continue;
                };
                // The row applies to no instruction.
                if address >= end {
                    continue;
                }
                let found =
                    row(find(&rules, &pages, address).unwrap_or_else(|| panic!("no row: {line}")));
                assert!(
                    agrees(&found, &columns, &fields, is_signal),
                    "{}: {columns:?}\n{line}\n{found:?}",
                    path.display()
                );
                rows += 1;
                strange += usize::from(found.kind == Kind::UNWIND_STRANGE);
            }
            _ => {}
        }
    }
    (rows, strange)
}

#[test]
fn rows_are_those_of_readelf() {
    for (name, least) in [
        ("libc.so.6", 20_000),
        ("libstdc++.so.6", 20_000),
        ("libcrypto.so.3", 50_000),
    ] {
        let (rows, strange) = compare(&library(name));
        println!("{name}: {rows} rows, {strange} of them strange");
        assert!(rows > least, "{name}: {rows} rows");
        assert!(
            strange * 50 < rows,
            "{name}: {strange} of {rows} rows are strange"
        );
    }
}

/// Checks what must hold of any rules, whatever they were made of.
fn check(rules: &Rules) {
    assert!(
        rules
            .rows
            .is_sorted_by(|a, b| address_of(*a) < address_of(*b))
    );
    assert!(
        rules
            .pages()
            .all(|rows| rows.start <= rows.end && rows.end as usize <= rules.rows.len())
    );
    let pages: Vec<_> = rules.pages().collect();
    assert_eq!(pages.len(), rules.pages().len());
    // The index must find what a search of all rows finds.
    for &row in rules.rows.iter().step_by(97) {
        for address in [
            address_of(row),
            address_of(row).saturating_sub(1),
            address_of(row) + 1,
        ] {
            let after = rules
                .rows
                .partition_point(|row| address_of(*row) <= address);
            let expected = after.checked_sub(1).map(|at| rules.rows[at]);
            let last_page = (u64::from(rules.first_page()) + pages.len() as u64) << 8;
            if address < last_page {
                assert_eq!(find(rules, &pages, address), expected, "{address:#x}");
            }
        }
    }
}

fn libgcc() -> &'static [u8] {
    static FILE: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
    FILE.get_or_init(|| fs::read(library("libgcc_s.so.1")).expect("libgcc"))
}

#[test]
fn an_intact_file_has_rules() {
    let rules = Rules::of_image(libgcc()).expect("rules");
    assert!(rules.rows.len() > 500, "{} rows", rules.rows.len());
    check(&rules);
}

/// Returns the range of `.eh_frame` in the file, so that damage hits it more often than not.
fn eh_frame() -> Range<usize> {
    use object::{Object, ObjectSection};
    let file = object::read::elf::ElfFile64::<object::Endianness>::parse(libgcc()).expect("ELF");
    let section = file.section_by_name(".eh_frame").expect("a section");
    let (start, size) = section.file_range().expect("in the file");
    start as usize..(start + size) as usize
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn damaged_frames_are_an_error_or_rules_in_order(
        bytes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..40),
    ) {
        let mut file = libgcc().to_vec();
        let frames = eh_frame();
        for (place, byte) in bytes {
            file[frames.start + place.index(frames.len())] = byte;
        }
        if let Ok(rules) = Rules::of_image(&file) {
            check(&rules);
        }
    }

    #[test]
    fn damaged_headers_are_an_error_or_rules_in_order(
        bytes in prop::collection::vec((0..0x400_usize, any::<u8>()), 1..20),
        sections in prop::collection::vec((0..0x800_usize, any::<u8>()), 0..20),
    ) {
        let mut file = libgcc().to_vec();
        let length = file.len();
        for (place, byte) in bytes {
            file[place] = byte;
        }
        for (place, byte) in sections {
            file[length - 1 - place] = byte;
        }
        if let Ok(rules) = Rules::of_image(&file) {
            check(&rules);
        }
    }

    #[test]
    fn truncated_files_are_an_error_or_rules_in_order(length in any::<prop::sample::Index>()) {
        let file = &libgcc()[..length.index(libgcc().len())];
        if let Ok(rules) = Rules::of_image(file) {
            check(&rules);
        }
    }
}
