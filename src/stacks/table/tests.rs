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
    entry.interrupted = [0b101, 0];
    entry.pc[..4].copy_from_slice(&[10, 20, 30, 40]);
    let stack = Stack::read(&entry, None);
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
    let stack = Stack::read(&entry, None);
    let python = [
        RawFrame::Python(PYTHON | 7 << 20 | 2),
        RawFrame::PythonUnpaired,
    ];
    assert_eq!(stack.frames[1..], python);
    assert_eq!(stack.frames[1].instruction(), None);

    entry.flags = KERNEL;
    entry.end = types::stack_end::STACK_END_ROOT.0 as u8;
    let stack = Stack::read(&entry, None);
    assert_eq!((stack.side, stack.end), (Side::Kernel, WalkEnd::Root));
    // All addresses of the kernel have the bit `PYTHON` set.
    assert_eq!(stack.frames[2], RawFrame::Interrupted(PYTHON));
}

#[test]
fn a_deep_stack_has_two_entries() {
    let mut entry = types::stack {
        depth: 131,
        rest: 7,
        end: types::stack_end::STACK_END_ROOT.0 as u8,
        ..Default::default()
    };
    entry.pc[127] = 10;
    entry.interrupted[1] = 1 << 63;
    let mut rest = types::stack {
        depth: 3,
        ..Default::default()
    };
    rest.pc[..3].copy_from_slice(&[20, 30, 40]);
    rest.interrupted[0] = 0b10;
    let stack = Stack::read(&entry, Some(&rest));
    assert_eq!((stack.frames.len(), stack.end), (131, WalkEnd::Root));
    let behind = [
        RawFrame::Interrupted(10),
        RawFrame::Return(20),
        RawFrame::Interrupted(30),
        RawFrame::Return(40),
    ];
    assert_eq!(stack.frames[127..], behind);

    // A wrong depth is not believed. Without the other entry the stack is cut.
    entry.depth = u32::MAX;
    rest.depth = u32::MAX;
    let stack = Stack::read(&entry, Some(&rest));
    assert_eq!(stack.frames.len(), MAX_DEPTH as usize + 1);
    let stack = Stack::read(&entry, None);
    assert_eq!((stack.frames.len(), stack.end), (128, WalkEnd::Depth));
}
