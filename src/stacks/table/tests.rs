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
    let stack = Stack::read(&entry);
    assert_eq!((stack.side, stack.end), (Side::User, End::Depth));
    assert_eq!(
        stack.places,
        [
            Place::Interrupted(10),
            Place::Return(20),
            Place::Interrupted(30)
        ]
    );
    assert_eq!(stack.places[1].instruction(), Some(19));
    assert_eq!(stack.places[2].instruction(), Some(30));

    const PYTHON: u64 = 1 << 63;
    entry.pc[..3].copy_from_slice(&[10, PYTHON | 7 << 20 | 2, PYTHON]);
    let stack = Stack::read(&entry);
    let python = [Place::Python(PYTHON | 7 << 20 | 2), Place::PythonUnpaired];
    assert_eq!(stack.places[1..], python);
    assert_eq!(stack.places[1].instruction(), None);

    entry.flags = KERNEL;
    entry.end = types::stack_end::STACK_END_ROOT.0 as u8;
    entry.depth = u32::MAX;
    let stack = Stack::read(&entry);
    assert_eq!((stack.side, stack.end), (Side::Kernel, End::Root));
    assert_eq!(stack.places.len(), MAX_DEPTH as usize);
    // All addresses of the kernel have that bit.
    assert_eq!(stack.places[2], Place::Interrupted(PYTHON));
}
