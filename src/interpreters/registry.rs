//! Record of what was reported to the BPF side and the user about the interpreters of processes.

use std::collections::HashSet;

use anyhow::{Context, Result};
use libbpf_rs::{MapCore, MapFlags, MapHandle};

use super::memory;

/// Maximum number of distinct reasons that are printed; further processes mostly have one of the same reasons.
const REASONS: usize = 16;

/// Record of what was reported about one kind of interpreter.
pub(super) struct Registry {
    /// The skeleton's map of processes, keyed by layout.
    processes: MapHandle,
    said: HashSet<String>,
}

impl Registry {
    /// Creates an empty record for this map.
    pub(super) fn new(processes: MapHandle) -> Self {
        Self {
            processes,
            said: HashSet::new(),
        }
    }

    /// Returns whether the BPF side knows the interpreter of this process.
    pub(super) fn contains(&self, pid: u32) -> bool {
        let known = |layout: u64| {
            let known = self.processes.lookup(&layout.to_ne_bytes(), MapFlags::ANY);
            known.is_ok_and(|known| known.is_some())
        };
        memory::layout(pid).is_ok_and(known)
    }

    /// Returns the layout of a process. None if it differs from the layout `asked`, which the BPF side has asked
    /// about.
    ///
    /// # Errors
    /// If the process has exited, or may not be read.
    pub(super) fn layout(&self, pid: u32, asked: Option<u64>) -> Result<Option<u64>> {
        let layout = memory::layout(pid)?;
        Ok(Some(layout).filter(|layout| asked.is_none_or(|asked| asked == *layout)))
    }

    /// Stores the description of an interpreter in the map of the BPF side, unless the process has called exec since
    /// it had this layout. Returns whether the description was stored.
    ///
    /// # Errors
    /// If the process has exited, or the map is full.
    pub(super) fn register(&self, pid: u32, layout: u64, process: &[u8]) -> Result<bool> {
        if memory::layout(pid)? != layout {
            return Ok(false);
        }
        self.processes
            .update(&layout.to_ne_bytes(), process, MapFlags::ANY)
            .context("failed to find the interpreter of a process")?;
        Ok(true)
    }

    /// Prints once for each reason why the frames of an interpreter are not walked; `sentence` turns the reason into
    /// a message.
    pub(super) fn warn_once(&mut self, why: String, sentence: impl FnOnce(&str) -> String) {
        if self.said.len() < REASONS && !self.said.contains(&why) {
            crate::note!("{}", sentence(&why));
            self.said.insert(why);
        }
    }
}
