//! Typed events from the ring buffer of `bpf/include/event.bpf.h`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::collections::vec_deque::IntoIter;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Context, Result};
use libbpf_rs::{Link, MapCore, RingBuffer, RingBufferBuilder};
use plain::Plain;

use crate::bpf::attach;
use crate::run::poll::Poller;

/// Events that are given to a tool at once. To print so many takes some 10 ms, in which the buffer has room for more.
const AT_ONCE: usize = 1024;
/// So many events may wait in our memory; the buffer is left alone then until some have been given.
const WAITING: usize = 1 << 17;

/// The events of one tool, in the order in which their handlers reserved them.
pub struct Events<'map, T> {
    ring: RingBuffer<'map>,
    queue: Rc<RefCell<VecDeque<T>>>,
    malformed: Rc<Cell<u64>>,
}

impl<'map, T: Plain + Copy + 'map> Events<'map, T> {
    /// Reads from the skeleton's map `events`, whose records begin with a `T`.
    ///
    /// # Errors
    /// If the ring buffer cannot be mapped.
    pub fn new(map: &'map impl MapCore) -> Result<Self> {
        // A ring buffer record starts on 8 bytes, as every event type does at most.
        Self::decoding(map, |record| plain::from_bytes(record).ok().copied())
    }
}

impl<'map, T: 'map> Events<'map, T> {
    /// Reads from the skeleton's map `events`, whose records `decode` understands.
    ///
    /// # Errors
    /// If the ring buffer cannot be mapped.
    pub fn decoding(
        map: &'map impl MapCore,
        decode: impl Fn(&[u8]) -> Option<T> + 'map,
    ) -> Result<Self> {
        let queue = Rc::new(RefCell::new(VecDeque::new()));
        let malformed = Rc::new(Cell::new(0));
        let (sink, bad) = (Rc::clone(&queue), Rc::clone(&malformed));
        let mut builder = RingBufferBuilder::new();
        builder
            .add(map, move |record| {
                match decode(record) {
                    Some(event) => sink.borrow_mut().push_back(event),
                    None => bad.set(bad.get() + 1),
                }
                0
            })
            .context("failed to map the ring buffer")?;
        let ring = builder.build().context("failed to map the ring buffer")?;
        Ok(Self {
            ring,
            queue,
            malformed,
        })
    }

    /// Everything that is in the buffer now.
    ///
    /// # Errors
    /// If the kernel does not let us read the buffer.
    pub fn drain(&self) -> Result<IntoIter<T>> {
        self.read()?;
        Ok(self.queue.take().into_iter())
    }

    /// Takes everything out of the buffer, to where it waits to be given.
    fn read(&self) -> Result<()> {
        self.ring
            .consume()
            .context("failed to read the ring buffer")
    }

    /// The first events, [`AT_ONCE`] at the most, when the buffer has been read.
    fn next(&self) -> Result<IntoIter<T>> {
        if self.queue.borrow().len() < WAITING {
            self.read()?;
        }
        if self.queue.borrow().len() <= AT_ONCE {
            // With the memory that a burst has taken.
            return Ok(self.queue.take().into_iter());
        }
        let next: VecDeque<T> = self.queue.borrow_mut().drain(..AT_ONCE).collect();
        Ok(next.into_iter())
    }

    /// Whether no event waits to be given.
    fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
    }

    /// Gives `each` all events as they come, some at a time, until what the poller watches or the deadline ends the
    /// trace. Then it detaches the links, and gives what came before they were gone.
    ///
    /// The buffer is read again after each time, so that a burst has room where there is most of it: in our memory.
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
        poller.watch_events(self);
        loop {
            let wake = if self.is_idle() {
                poller.wait(deadline)?
            } else {
                poller.look(deadline)?
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

    /// Records too short for the event type; only a mismatch of program and binary makes them.
    pub fn malformed(&self) -> u64 {
        self.malformed.get()
    }
}

impl<T> AsFd for Events<'_, T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the ring buffer owns its epoll descriptor, which stays open as long as `self`.
        unsafe { BorrowedFd::borrow_raw(self.ring.epoll_fd()) }
    }
}

impl<T> AsRawFd for Events<'_, T> {
    fn as_raw_fd(&self) -> i32 {
        self.ring.epoll_fd()
    }
}
