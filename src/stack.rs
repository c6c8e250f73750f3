//! The table of distinct call stacks, which `bpf/include/stack.bpf.h` and its siblings fill.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use crate::shared;

/// Frames that the table holds of a stack at most.
pub const MAX_DEPTH: u32 = 127;

/// The id of "no stack": the user stack of a kernel thread, the kernel stack of user code.
const NO_STACK: u64 = 1;

/// Bits of an entry's flags, `enum stack_flags` in C.
mod flag {
    pub(super) const TRUNCATED: u32 = 1;
    pub(super) const KERNEL: u32 = 2;
}

/// Whose code a stack goes through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// A process's.
    User,
    /// The kernel's.
    Kernel,
}

/// Where a frame's code was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// It will return to this address: the call lies before it.
    Return(u64),
    /// It was interrupted at this instruction.
    Interrupted(u64),
}

impl Place {
    /// The absolute address, as the stack has it.
    pub fn address(self) -> u64 {
        match self {
            Place::Return(address) | Place::Interrupted(address) => address,
        }
    }

    /// An address within the instruction that the frame is in.
    pub fn instruction(self) -> u64 {
        match self {
            Place::Return(address) => address.wrapping_sub(1),
            Place::Interrupted(address) => address,
        }
    }
}

/// One stack, innermost frame first. It may have no frame at all, as a kernel thread's user stack.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Whose addresses these are.
    pub side: Side,
    /// The frames.
    pub places: Vec<Place>,
    /// Whether frames beyond the depth limit are missing at the end.
    pub truncated: bool,
}

impl Stack {
    fn read(entry: &shared::stack) -> Self {
        let depth = (entry.depth as usize).min(entry.pc.len());
        let interrupted = |frame: usize| entry.interrupted[frame / 64] & (1 << (frame % 64)) != 0;
        let place = |(frame, &pc)| {
            if interrupted(frame) {
                Place::Interrupted(pc)
            } else {
                Place::Return(pc)
            }
        };
        Self {
            side: if entry.flags & flag::KERNEL != 0 {
                Side::Kernel
            } else {
                Side::User
            },
            places: entry.pc[..depth].iter().enumerate().map(place).collect(),
            truncated: entry.flags & flag::TRUNCATED != 0,
        }
    }
}

/// Reads stacks by id, each from the kernel once.
pub struct Stacks<'map, M> {
    map: &'map M,
    read: HashMap<u64, Rc<Stack>>,
}

impl<'map, M: MapCore> Stacks<'map, M> {
    /// The skeleton's map `stacks`.
    pub fn new(map: &'map M) -> Self {
        let none = Stack {
            side: Side::User,
            places: Vec::new(),
            truncated: false,
        };
        Self {
            map,
            read: HashMap::from([(NO_STACK, Rc::new(none))]),
        }
    }

    /// The stack with this id; None if the id is 0 (it was lost) or its frames are just being
    /// written.
    pub fn get(&mut self, id: u64) -> Result<Option<Rc<Stack>>> {
        if let Some(stack) = self.read.get(&id) {
            return Ok(Some(Rc::clone(stack)));
        }
        let Some(bytes) = self
            .map
            .lookup(&id.to_ne_bytes(), MapFlags::ANY)
            .context("failed to read a stack")?
        else {
            return Ok(None);
        };
        let entry: &shared::stack = shared::view(&bytes)?;
        if entry.check == 0 {
            return Ok(None);
        }
        let stack = Rc::new(Stack::read(entry));
        self.read.insert(id, Rc::clone(&stack));
        Ok(Some(stack))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_read_as_it_was_written() {
        let mut entry = shared::stack {
            check: 1,
            depth: 3,
            flags: flag::TRUNCATED,
            ..Default::default()
        };
        entry.interrupted = [0b101, 0];
        entry.pc[..4].copy_from_slice(&[10, 20, 30, 40]);
        let stack = Stack::read(&entry);
        assert_eq!((stack.side, stack.truncated), (Side::User, true));
        assert_eq!(
            stack.places,
            [
                Place::Interrupted(10),
                Place::Return(20),
                Place::Interrupted(30)
            ]
        );
        assert_eq!(stack.places[1].instruction(), 19);
        assert_eq!(stack.places[2].instruction(), 30);

        entry.flags = flag::KERNEL;
        entry.depth = u32::MAX;
        let stack = Stack::read(&entry);
        assert_eq!((stack.side, stack.truncated), (Side::Kernel, false));
        assert_eq!(stack.places.len(), MAX_DEPTH as usize);
    }
}
