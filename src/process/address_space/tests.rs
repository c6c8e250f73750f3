//! Tests of [`address_space`](super).

use super::*;

fn mapped(pid: u32, start: u64, name: &str) -> Change {
    Change::Mapped(
        pid,
        Mapping {
            range: start..start + 0x1000,
            executable: true,
            file_offset: 0,
            device: (8, 1),
            inode: 1,
            path: name.into(),
        },
    )
}

fn at(spaces: &mut AddressSpaces, pid: u32, addresses: &[u64]) -> Vec<String> {
    let image = spaces
        .image_with(pid, addresses.iter().copied())
        .unwrap_or_default();
    let module = |address| {
        image
            .find(address)
            .map(|code| code.file.module().to_string())
    };
    addresses
        .iter()
        .map(|&address| module(address).unwrap_or_default())
        .collect()
}

/// PID that no process has.
const PID: u32 = i32::MAX as u32 - 1;

#[test]
fn a_stack_finds_the_image_that_it_is_of() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    spaces.apply(mapped(PID, 0x1000, "/bin/sh"));
    spaces.apply(mapped(PID, 0x5000, "/lib/libc"));
    spaces.apply(Change::Forked(PID, PID + 1));
    spaces.apply(Change::Exec(PID + 1));
    spaces.apply(mapped(PID + 1, 0x1000, "/bin/ls"));
    spaces.apply(mapped(PID + 1, 0x7000, "/lib/libc"));
    spaces.apply(Change::Exited(PID + 1));

    assert_eq!(at(&mut spaces, PID, &[0x1000, 0x5fff]), ["sh", "libc"]);
    assert_eq!(at(&mut spaces, PID, &[0x1000, 0x6000]), ["sh", ""]);
    // Before its exec, the child executed its parent's code.
    assert_eq!(at(&mut spaces, PID + 1, &[0x1000, 0x5000]), ["sh", "libc"]);
    assert_eq!(at(&mut spaces, PID + 1, &[0x1000, 0x7000]), ["ls", "libc"]);
    assert_eq!(at(&mut spaces, PID + 1, &[0x1000]), ["ls"]);
}

#[test]
fn a_copy_of_the_programs_code_has_its_functions() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    spaces.apply(mapped(PID, 0x1000, "/usr/bin/php"));
    spaces.apply(mapped(PID, 0x5000, "/lib/libc"));
    spaces.apply(mapped(PID, 0x1000, "/memfd:text"));
    spaces.apply(mapped(PID, 0x5000, "/memfd:jit"));
    assert_eq!(
        at(&mut spaces, PID, &[0x1000, 0x5000]),
        ["php", "memfd:jit"]
    );
}

#[test]
fn a_program_that_a_child_executes_is_returned_once() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::Chosen);
    spaces.choose(PID);
    spaces.apply(Change::Exec(PID));
    spaces.apply(Change::Forked(PID, PID - 1));
    assert_eq!(spaces.take_program_of_child(), None);
    spaces.apply(Change::Exited(PID - 1));
    // The PID is now that of a stranger.
    spaces.apply(Change::Exec(PID - 1));
    assert_eq!(spaces.take_program_of_child(), None);

    spaces.apply(Change::Forked(PID, PID - 2));
    spaces.apply(Change::Exec(PID - 2));
    assert_eq!(spaces.take_program_of_child(), Some(PID - 2));
    spaces.apply(Change::Exec(PID - 2));
    assert_eq!(spaces.take_program_of_child(), None);
}

#[test]
fn code_that_is_mapped_for_ever_takes_bounded_memory() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    for _ in 0..3 * MAX_MAPPINGS {
        spaces.apply(mapped(PID, 0x1000, "/bin/jit"));
    }
    assert_eq!(spaces.images[&PID][0].code.len(), 1);
    for number in 0..3 * MAX_MAPPINGS as u64 {
        let start = 0x10_0000 + number * 0x1000;
        let Change::Mapped(pid, mut mapping) = mapped(PID, start, "/tmp/file") else {
            panic!("it was mapped");
        };
        mapping.inode = 2 + number;
        spaces.apply(Change::Mapped(pid, mapping));
    }
    assert_eq!(spaces.images[&PID][0].code.len(), MAX_MAPPINGS);
    assert_eq!(spaces.forgotten_mappings(), 2 * MAX_MAPPINGS as u64 + 1);
    assert!(spaces.files.len() <= MAX_FILES, "{}", spaces.files.len());
    let last = 0x10_0000 + (3 * MAX_MAPPINGS as u64 - 1) * 0x1000;
    assert_eq!(at(&mut spaces, PID, &[0x1000, last]), ["jit", "file"]);
    // No two files have the same number.
    let numbers = spaces.files.values().map(|file| file.number);
    assert_eq!(numbers.collect::<HashSet<_>>().len(), spaces.files.len());
}

#[test]
fn a_number_is_given_to_another_process() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    spaces.apply(mapped(PID, 0x1000, "/bin/old"));
    spaces.apply(Change::Exited(PID));
    spaces.apply(Change::Forked(PID + 1, PID));
    spaces.apply(Change::Exec(PID));
    spaces.apply(mapped(PID, 0x2000, "/bin/new"));
    assert_eq!(at(&mut spaces, PID, &[0x1000]), ["old"]);
    assert_eq!(at(&mut spaces, PID, &[0x2000]), ["new"]);
}

#[test]
fn the_processes_that_exited_first_are_forgotten_first() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    let others = MAX_EXITED as u32;
    for pid in PID - others..=PID {
        spaces.apply(mapped(pid, 0x1000, "/bin/sh"));
        spaces.apply(Change::Exited(pid));
    }
    assert_eq!(spaces.forgotten_processes(), 1);
    assert_eq!(at(&mut spaces, PID - others, &[0x1000]), [""]);
    assert_eq!(at(&mut spaces, PID - others + 1, &[0x1000]), ["sh"]);
}

#[test]
fn who_has_exited_can_be_forgotten_without_loss() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::All);
    spaces.apply(mapped(PID, 0x1000, "/bin/old"));
    spaces.apply(mapped(PID + 1, 0x1000, "/bin/sh"));
    spaces.apply(mapped(PID + 2, 0x1000, "/bin/later"));
    spaces.apply(Change::Exited(PID));
    let exits = spaces.exits();
    spaces.apply(Change::Forked(PID + 1, PID));
    spaces.apply(mapped(PID, 0x2000, "/bin/new"));
    spaces.apply(Change::Exited(PID + 2));
    spaces.forget_exited(exits);
    assert_eq!(at(&mut spaces, PID, &[0x1000]), ["sh"]);
    assert_eq!(at(&mut spaces, PID, &[0x2000]), ["new"]);
    assert_eq!(at(&mut spaces, PID + 2, &[0x1000]), ["later"]);
    spaces.forget_exited(spaces.exits());
    assert_eq!(at(&mut spaces, PID + 2, &[0x1000]), [""]);
    assert_eq!(spaces.forgotten_processes(), 0);
}

#[test]
fn only_what_is_chosen_is_remembered() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::Chosen);
    spaces.choose(PID);
    spaces.apply(mapped(PID, 0x1000, "/bin/sh"));
    spaces.apply(mapped(PID + 1, 0x1000, "/bin/sh"));
    assert_eq!(at(&mut spaces, PID, &[0x1000]), ["sh"]);
    assert_eq!(at(&mut spaces, PID + 1, &[0x1000]), [""]);
}

#[test]
fn descendants_are_remembered_and_who_has_their_numbers_later_is_not() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::Descendants);
    let (child, grandchild, other) = (PID - 1, PID - 2, PID - 3);
    spaces.choose(PID);
    spaces.apply(mapped(PID, 0x1000, "/bin/make"));
    spaces.apply(Change::Forked(PID, child));
    spaces.apply(Change::Forked(child, grandchild));
    spaces.apply(Change::Forked(other, other - 1));
    spaces.apply(Change::Exec(grandchild));
    spaces.apply(mapped(grandchild, 0x1000, "/bin/cc"));
    spaces.apply(mapped(other - 1, 0x1000, "/bin/sh"));
    // The first thread of the grandchild exits, and another thread of it calls exec.
    spaces.apply(Change::Exited(grandchild));
    spaces.apply(Change::Exec(grandchild));
    spaces.apply(mapped(grandchild, 0x3000, "/bin/ld"));
    spaces.apply(Change::Exited(child));
    spaces.apply(Change::Forked(other, child));
    spaces.apply(mapped(child, 0x2000, "/bin/sh"));

    assert_eq!(at(&mut spaces, child, &[0x1000]), ["make"]);
    assert_eq!(at(&mut spaces, child, &[0x2000]), [""]);
    assert_eq!(at(&mut spaces, grandchild, &[0x1000]), ["cc"]);
    assert_eq!(at(&mut spaces, grandchild, &[0x3000]), ["ld"]);
    assert_eq!(at(&mut spaces, other - 1, &[0x1000]), [""]);
}
