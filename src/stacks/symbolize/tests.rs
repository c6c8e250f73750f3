use std::hash::DefaultHasher;

use super::*;
use crate::process::address_space::{AddressSpaces, TrackedProcesses};
use crate::process::proc::Process;
use crate::stacks::table::WalkEnd;

#[test]
fn hashes_differ_where_offsets_do() {
    let pid = std::process::id();
    let mut spaces = AddressSpaces::of(TrackedProcesses::Chosen);
    let process = Process::open(pid).expect("we run");
    spaces.read_mappings(&process).expect("our mappings");
    let image = spaces.newest_image(pid).expect("our image");
    let address = image.program().expect("our program").range.start + 16;
    let hash = |place| {
        let stack = Stack {
            side: Side::User,
            frames: vec![place],
            end: WalkEnd::Root,
            checked: true,
        };
        let mut hasher = DefaultHasher::new();
        let is_all = hash_places_in(image, &stack, &mut hasher);
        (is_all, hasher.finish())
    };
    let returns = hash(RawFrame::Return(address));
    assert_eq!(hash(RawFrame::Return(address)), returns);
    // The same instruction, but another offset.
    assert_ne!(hash(RawFrame::Interrupted(address - 1)), returns);
    assert!(returns.0);
}
