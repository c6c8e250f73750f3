//! The table of distinct call stacks, which `bpf/include/stack.bpf.h` and its siblings fill.

use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::MapCore;

use crate::recorded::Recorded;
use crate::shared;

/// Frames that the table holds of a stack at most.
pub const MAX_DEPTH: u32 = 127;

/// The id of "no stack": the user stack of a kernel thread, the kernel stack of user code.
const NO_STACK: u64 = 1;

/// The bit of an entry's flags for addresses of the kernel, `enum stack_flags` in C.
const KERNEL: u8 = 1;

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
    /// Why there is no further frame.
    pub end: End,
    /// Whether each frame is known to be in code; frame pointers alone do not tell.
    pub checked: bool,
}

/// Where a walk up a stack has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// At the outermost frame; or, by frame pointers alone, as that was asked for, at the last.
    Root,
    /// At the depth limit.
    Depth,
    /// At the last frame pointer, as there were no tables.
    NoTables,
    /// In code without unwind information.
    NoRule,
    /// Before a frame in no code that the process is known to have mapped.
    NoCode,
    /// Where the stack could not be read.
    Unreadable,
    /// Before a frame that would be nearer to the stack's top.
    Backwards,
}

impl End {
    fn read(end: u8) -> Self {
        match shared::stack_end(end.into()) {
            shared::stack_end::STACK_END_ROOT | shared::stack_end::STACK_END_FRAME_POINTER => {
                Self::Root
            }
            shared::stack_end::STACK_END_DEPTH => Self::Depth,
            shared::stack_end::STACK_END_NO_TABLES => Self::NoTables,
            shared::stack_end::STACK_END_NO_RULE => Self::NoRule,
            shared::stack_end::STACK_END_UNREADABLE => Self::Unreadable,
            shared::stack_end::STACK_END_BACKWARDS => Self::Backwards,
            _ => Self::NoCode,
        }
    }

    /// Why frames are missing, if they are. `module` is where the last one's code is.
    pub fn truncated(self, module: Option<&str>) -> Option<String> {
        Some(match self {
            Self::Root => return None,
            Self::Depth => "deeper than --perf-max-stack-depth".into(),
            Self::NoTables => "by frame pointers alone".into(),
            Self::NoRule => format!("no unwind info: {}", module.unwrap_or("generated code")),
            Self::NoCode => "called from no known code".into(),
            Self::Unreadable => "stack not readable".into(),
            Self::Backwards => "stack makes no sense".into(),
        })
    }
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
            side: if entry.flags & KERNEL != 0 {
                Side::Kernel
            } else {
                Side::User
            },
            places: entry.pc[..depth].iter().enumerate().map(place).collect(),
            end: End::read(entry.end),
            checked: ![
                shared::stack_end::STACK_END_FRAME_POINTER,
                shared::stack_end::STACK_END_NO_TABLES,
            ]
            .contains(&shared::stack_end(entry.end.into())),
        }
    }
}

/// Reads stacks by id, each from the kernel once.
pub struct Stacks<'map, M> {
    recorded: Recorded<'map, M, Rc<Stack>>,
    none: Rc<Stack>,
}

impl<'map, M: MapCore> Stacks<'map, M> {
    /// The skeleton's map `stacks`.
    pub fn new(map: &'map M) -> Self {
        let none = Stack {
            side: Side::User,
            places: Vec::new(),
            end: End::Root,
            checked: true,
        };
        Self {
            recorded: Recorded::new(map),
            none: Rc::new(none),
        }
    }

    /// The stack with this id; None if the id is 0: it was lost.
    pub fn get(&mut self, id: u64) -> Result<Option<Rc<Stack>>> {
        if id == NO_STACK {
            return Ok(Some(Rc::clone(&self.none)));
        }
        self.recorded.get(&id.to_ne_bytes(), |bytes| {
            let entry: &shared::stack = shared::view(bytes)?;
            Ok(Some(Rc::new(Stack::read(entry))))
        })
    }

    /// Removes those from the kernel that were not asked for since the last call.
    pub fn forget_unused(&mut self) -> Result<()> {
        self.recorded.end_round()
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
            end: shared::stack_end::STACK_END_DEPTH.0 as u8,
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
        assert_eq!(stack.places[1].instruction(), 19);
        assert_eq!(stack.places[2].instruction(), 30);

        entry.flags = KERNEL;
        entry.end = shared::stack_end::STACK_END_ROOT.0 as u8;
        entry.depth = u32::MAX;
        let stack = Stack::read(&entry);
        assert_eq!((stack.side, stack.end), (Side::Kernel, End::Root));
        assert_eq!(stack.places.len(), MAX_DEPTH as usize);
    }
}
