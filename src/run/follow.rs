//! Following a ring buffer until the trace ends.

use std::collections::vec_deque::IntoIter;
use std::time::Instant;

use anyhow::Result;
use libbpf_rs::Link;

use crate::bpf::attach;
use crate::bpf::ring::Events;
use crate::run::poll::Poller;
use crate::run::priority;

impl<'map, T: 'map> Events<'map, T> {
    /// Passes all events to `each` as they arrive, some at a time, until a source of the poller or the deadline ends
    /// the trace. Then detaches the links, and passes on the events that arrived until the links were detached.
    ///
    /// The ring buffer is read again after each call of `each`. A burst is thus held in user space, which has more
    /// memory for it. The thread's priority is raised, so that on a busy machine the buffer is read in time.
    ///
    /// # Errors
    /// If the buffer cannot be read, the kernel does not let us wait, or `each` fails.
    pub fn follow<'a>(
        &'a self,
        mut poller: Poller<'a>,
        deadline: Option<Instant>,
        links: Vec<Link>,
        mut each: impl FnMut(IntoIter<T>) -> Result<()>,
    ) -> Result<()> {
        priority::raise();
        poller.watch_events(self);
        loop {
            let wake = if self.is_idle() {
                poller.wait(deadline)?
            } else {
                poller.poll_now(deadline)?
            };
            each(self.next()?)?;
            if wake.stop || wake.deadline || wake.exited {
                break;
            }
        }
        attach::detach(links);
        loop {
            each(self.next()?)?;
            if self.is_idle() {
                return Ok(());
            }
        }
    }
}
