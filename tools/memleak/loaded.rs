//! Allocators that a process loads while it is traced, by dlopen or by becoming another program.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Duration;

use libbpf_rs::Link;
use memtools::address_space::CodeFile;
use memtools::process::MappedFile;

use crate::args::Args;
use crate::objects::{self, Object};
use crate::probes::Attached;
use crate::target::Target;

/// Time between two looks, and what is allocated in it from a new allocator is not seen.
pub(crate) const PAUSE: Duration = Duration::from_millis(200);

/// What is known of the files that processes execute code from.
pub(crate) struct Loaded {
    /// Files that were looked through, by the process that they are probed in.
    looked_through: HashMap<i32, HashSet<(u64, u64)>>,
    /// The same by the symbolizer's numbers, which need no look at the file.
    seen: HashSet<(u32, u32)>,
    pub(crate) links: Vec<Link>,
}

impl Loaded {
    pub(crate) fn new(target: &Target) -> Self {
        let mut looked_through: HashMap<_, HashSet<_>> = HashMap::new();
        for traced in &target.processes {
            let pid = target.probed_in(traced.process.pid());
            let known = looked_through.entry(pid).or_default();
            known.extend(&traced.looked_through);
        }
        Self {
            looked_through,
            seen: HashSet::new(),
            links: Vec::new(),
        }
    }

    /// Probes what is new. Says so, or why it cannot be probed.
    pub(crate) fn look(
        &mut self,
        files: Vec<(u32, Rc<CodeFile>)>,
        target: &Target,
        attached: &Attached,
        args: &Args,
    ) {
        for (pid, file) in files {
            if !self.seen.insert((pid, file.number)) || !target.has(pid, args) {
                continue;
            }
            let pid = target.probed_in(pid);
            let known = self.looked_through.entry(pid).or_default();
            let Some(file) = file.open() else { continue };
            if !file.identity().is_ok_and(|identity| known.insert(identity)) {
                continue;
            }
            match self.probe(pid, file, attached, args) {
                Ok(None) => {}
                Ok(Some(object)) => eprintln!(
                    "memleak: {} ({}), loaded within the last {} ms: what it allocated until \
                     now is not known",
                    object.found(),
                    attached.how,
                    PAUSE.as_millis()
                ),
                Err(error) => eprintln!("memleak: {} is not traced: {error:#}", file.module()),
            }
        }
    }

    fn probe(
        &mut self,
        pid: i32,
        file: &MappedFile,
        attached: &Attached,
        args: &Args,
    ) -> anyhow::Result<Option<Object>> {
        // What is no ELF file has no functions.
        let Ok(Some(object)) = objects::of_loaded(file, args) else {
            return Ok(None);
        };
        self.links.extend(attached.probe(pid, &object)?);
        Ok(Some(object))
    }
}
