//! Tests of [`table`](super).

use super::*;

#[test]
fn an_entry_is_read_as_it_was_written() {
    let mut entry = types::stack {
        check: 1,
        depth: 3,
        end: types::stack_end::STACK_END_DEPTH.0 as u8,
        ..Default::default()
    };
    entry.interrupted = 0b101;
    entry.pc[..4].copy_from_slice(&[10, 20, 30, 40]);
    let stack = Stack::read(&entry, &[]);
    assert_eq!((stack.side, stack.end), (Side::User, WalkEnd::Depth));
    assert_eq!(
        stack.frames,
        [
            RawFrame::Interrupted(10),
            RawFrame::Return(20),
            RawFrame::Interrupted(30)
        ]
    );
    assert_eq!(stack.frames[1].instruction(), Some(19));
    assert_eq!(stack.frames[2].instruction(), Some(30));

    const PYTHON: u64 = 1 << 63;
    entry.pc[..3].copy_from_slice(&[10, PYTHON | 7 << 20 | 2, PYTHON]);
    let stack = Stack::read(&entry, &[]);
    let python = [
        RawFrame::Python(PYTHON | 7 << 20 | 2),
        RawFrame::PythonUnpaired,
    ];
    assert_eq!(stack.frames[1..], python);
    assert_eq!(stack.frames[1].instruction(), None);

    entry.flags = KERNEL;
    entry.end = types::stack_end::STACK_END_ROOT.0 as u8;
    let stack = Stack::read(&entry, &[]);
    assert_eq!((stack.side, stack.end), (Side::Kernel, WalkEnd::Root));
    // All addresses of the kernel have the bit `PYTHON` set.
    assert_eq!(stack.frames[2], RawFrame::Interrupted(PYTHON));
}

#[test]
fn a_deep_stack_has_several_entries() {
    let mut entry = types::stack {
        depth: 131,
        rest: 7,
        end: types::stack_end::STACK_END_ROOT.0 as u8,
        ..Default::default()
    };
    entry.pc[63] = 10;
    entry.interrupted = 1 << 63;
    let mut rest = [types::stack::default(); 2];
    rest[0].depth = 67;
    rest[0].pc[63] = 20;
    rest[1].depth = 3;
    rest[1].pc[..3].copy_from_slice(&[30, 40, 50]);
    rest[1].interrupted = 0b10;
    let stack = Stack::read(&entry, &rest);
    assert_eq!((stack.frames.len(), stack.end), (131, WalkEnd::Root));
    assert_eq!(stack.frames[63], RawFrame::Interrupted(10));
    let behind = [
        RawFrame::Return(20),
        RawFrame::Return(30),
        RawFrame::Interrupted(40),
        RawFrame::Return(50),
    ];
    assert_eq!(stack.frames[127..], behind);

    // Without one of the entries the stack is cut. A wrong depth is not believed.
    let stack = Stack::read(&entry, &rest[..1]);
    assert_eq!((stack.frames.len(), stack.end), (128, WalkEnd::Depth));
    entry.depth = u32::MAX;
    rest[1].depth = u32::MAX;
    let stack = Stack::read(&entry, &rest);
    assert_eq!((stack.frames.len(), stack.end), (192, WalkEnd::Depth));
}

#[test]
fn the_entries_of_a_stack_are_found_one_by_the_other() {
    let entry = |rest| types::stack {
        rest,
        ..Default::default()
    };
    let found = |first: u64, last: u64| {
        let find = |id| {
            let next = if id == last { LOST } else { id + 1 };
            Ok((id <= last).then(|| types::bytes_of(&entry(next)).to_vec()))
        };
        let rest = rest_of(&entry(first), find).expect("they can be read");
        rest.into_iter().map(|(id, _)| id).collect::<Vec<_>>()
    };
    assert!(found(LOST, 9).is_empty());
    assert_eq!(found(7, 9), [7, 8, 9]);
    assert!(found(7, 6).is_empty(), "the entry is lost");
    // No stack has more entries than its maximum depth takes.
    assert_eq!(found(100, 1000).len(), MAX_ENTRIES - 1);
}
