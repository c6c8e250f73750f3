//! What the kernel half, and the user, were told of the interpreters of processes.

use std::collections::HashSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::memory;

/// Reasons that are said; those of one more process are like one before.
const REASONS: usize = 16;

/// What was told of one kind of interpreter.
pub(super) struct Told {
    /// The skeleton's map of processes, by layout.
    processes: MapHandle,
    said: HashSet<String>,
}

impl Told {
    /// Nothing yet, of this map.
    pub(super) fn new(processes: MapHandle) -> Self {
        Self {
            processes,
            said: HashSet::new(),
        }
    }

    /// Whether the kernel half knows of the interpreter of this process.
    pub(super) fn knows(&self, pid: u32) -> bool {
        let known = |layout: u64| {
            let known = self.processes.lookup(&layout.to_ne_bytes(), MapFlags::ANY);
            known.is_ok_and(|known| known.is_some())
        };
        memory::layout(pid).is_ok_and(known)
    }

    /// The layout of a process; None if the kernel half has asked about another one.
    ///
    /// # Errors
    /// If the process has exited, or may not be read.
    pub(super) fn layout(&self, pid: u32, asked: Option<u64>) -> Result<Option<u64>> {
        let layout = memory::layout(pid)?;
        Ok(Some(layout).filter(|layout| asked.is_none_or(|asked| asked == *layout)))
    }

    /// Tells the kernel half what it needs to know, unless the process has called exec since it had this
    /// layout. Returns whether it was told.
    ///
    /// # Errors
    /// If the process has exited, or the map has no room.
    pub(super) fn tell(&self, pid: u32, layout: u64, process: &[u8]) -> Result<bool> {
        if memory::layout(pid)? != layout {
            return Ok(false);
        }
        self.processes
            .update(&layout.to_ne_bytes(), process, MapFlags::ANY)
            .context("failed to tell where a process has its interpreter")?;
        Ok(true)
    }

    /// Says once why the frames of such an interpreter are not walked: `sentence` makes a sentence of it.
    pub(super) fn say(&mut self, why: String, sentence: impl FnOnce(&str) -> String) {
        if self.said.len() < REASONS && !self.said.contains(&why) {
            eprintln!("{}", sentence(&why));
            self.said.insert(why);
        }
    }
}
