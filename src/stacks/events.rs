//! The stacks of events, which are symbolized when the events are printed.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::rc::Rc;

use anyhow::Result;
use libbpf_rs::MapCore;

use crate::stacks::interpreter_names::InterpreterNames;
use crate::stacks::named::{NamedStack, StackIds};
use crate::stacks::symbolize::Symbolizer;
use crate::stacks::table::{MAX_EVENT_ENTRIES, StackMaps, Stacks};

/// Maximum number of symbolized stacks in the cache.
const MAX_CACHED: usize = 1024;

/// The table of the stacks of events, with their symbolizer.
///
/// Events come in bursts, and the events of a burst have few distinct stacks: each of these is symbolized once.
pub struct EventStacks<'map, M> {
    table: Stacks<'map, M>,
    /// The symbolizer; None if stacks were not requested.
    symbolizer: Option<Symbolizer>,
    named: Recent,
}

impl<'map, M: MapCore> EventStacks<'map, M> {
    /// Creates the table from the maps of a skeleton. `symbolizer` is None if stacks were not requested.
    ///
    /// # Errors
    /// If the map that says how full the table is cannot be mapped.
    pub fn new(maps: StackMaps<'map, M>, symbolizer: Option<Symbolizer>) -> Result<Self> {
        Ok(Self {
            table: Stacks::new(maps, MAX_EVENT_ENTRIES)?,
            symbolizer,
            named: Recent::default(),
        })
    }

    /// Calls [`Symbolizer::begin`] if stacks were requested. To be called once the probes are live.
    ///
    /// # Errors
    /// If there are no file descriptors left.
    pub fn begin(&mut self, names: Option<InterpreterNames>) -> Result<Option<OwnedFd>> {
        let symbolizer = self.symbolizer.as_mut();
        symbolizer
            .map(|symbolizer| symbolizer.begin(names))
            .transpose()
    }

    /// Reads new mappings. Call it when events have arrived, before they are handled.
    pub fn refresh(&mut self) {
        self.named = Recent::default();
        if let Some(symbolizer) = &mut self.symbolizer {
            symbolizer.refresh();
        }
    }

    /// Returns the symbolized stacks with these ids, or None if stacks were not requested.
    ///
    /// # Errors
    /// If the table of stacks cannot be read.
    pub fn named(&mut self, ids: &StackIds<'_>) -> Result<Option<Rc<NamedStack>>> {
        let Some(symbolizer) = &mut self.symbolizer else {
            return Ok(None);
        };
        if let Some(named) = self.named.find(ids) {
            return Ok(Some(named));
        }
        let named = Rc::new(NamedStack::read(ids, &mut self.table, symbolizer)?);
        self.named.add(ids, &named);
        Ok(Some(named))
    }

    /// Reads the stack with this id into the cache, so that it can be symbolized after the table was renewed.
    ///
    /// # Errors
    /// If the table of stacks cannot be read.
    pub fn remember(&mut self, id: u64) -> Result<()> {
        self.table.get(id)?;
        Ok(())
    }

    /// Renews the table if it needs to grow ([`Stacks::renew_for_events`]). Call it when all pending events have been
    /// handled.
    ///
    /// # Errors
    /// If the map in use cannot be read, or its fill level cannot be set.
    pub fn renew(&mut self) -> Result<()> {
        self.table.renew_for_events()
    }

    /// Calls [`Symbolizer::report_losses`] if stacks were requested.
    pub fn report_losses(&self) {
        if let Some(symbolizer) = &self.symbolizer {
            symbolizer.report_losses();
        }
    }
}

/// Cache of the symbolized stacks of current events, by process and ids.
#[derive(Default)]
struct Recent(HashMap<(u32, Option<u64>, Option<u64>), Rc<NamedStack>>);

impl Recent {
    fn find(&self, ids: &StackIds<'_>) -> Option<Rc<NamedStack>> {
        let named = self.0.get(&(ids.pid, ids.user, ids.kernel))?;
        // Threads of a process have names of their own.
        (named.comm == ids.comm).then(|| Rc::clone(named))
    }

    fn add(&mut self, ids: &StackIds<'_>, named: &Rc<NamedStack>) {
        if self.0.len() >= MAX_CACHED {
            self.0.clear();
        }
        let key = (ids.pid, ids.user, ids.kernel);
        self.0.insert(key, Rc::clone(named));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stacks_are_found_by_process_thread_name_and_ids() {
        let ids = StackIds {
            pid: 7,
            comm: "worker",
            user: Some(11),
            kernel: None,
        };
        let named = Rc::new(NamedStack {
            pid: 7,
            comm: "worker".to_owned(),
            ..NamedStack::default()
        });
        let mut recent = Recent::default();
        assert!(recent.find(&ids).is_none());
        recent.add(&ids, &named);
        let found = recent.find(&ids).expect("what was added");
        assert!(Rc::ptr_eq(&found, &named));
        for other in [
            StackIds { pid: 8, ..ids },
            StackIds {
                comm: "main",
                ..ids
            },
            StackIds {
                user: Some(12),
                ..ids
            },
            StackIds {
                kernel: Some(11),
                ..ids
            },
        ] {
            assert!(recent.find(&other).is_none(), "{other:?}");
        }
        for pid in 0..5003 {
            recent.add(&StackIds { pid, ..ids }, &named);
            assert!(recent.0.len() <= MAX_CACHED);
        }
        assert!(recent.find(&StackIds { pid: 5002, ..ids }).is_some());
    }
}
