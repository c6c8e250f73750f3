//! The table of distinct user call stacks, which `bpf/include/stack.bpf.h` fills.

use std::collections::HashMap;
use std::rc::Rc;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags};

use crate::shared;

/// Frames that the table holds of a stack at most.
pub const MAX_DEPTH: u32 = 127;

/// One stack: code addresses, innermost first. All are return addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stack {
    /// Absolute addresses in the process.
    pub addresses: Vec<u64>,
    /// Whether frames beyond the depth limit are missing at the end.
    pub truncated: bool,
}

/// Reads stacks by id, each from the kernel once.
pub struct Stacks<'map, M> {
    map: &'map M,
    read: HashMap<u64, Rc<Stack>>,
}

impl<'map, M: MapCore> Stacks<'map, M> {
    /// The skeleton's map `stacks`.
    pub fn new(map: &'map M) -> Self {
        Self {
            map,
            read: HashMap::new(),
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
        let depth = (entry.depth as usize).min(entry.pc.len());
        let stack = Rc::new(Stack {
            addresses: entry.pc[..depth].to_vec(),
            truncated: entry.truncated != 0,
        });
        self.read.insert(id, Rc::clone(&stack));
        Ok(Some(stack))
    }
}
