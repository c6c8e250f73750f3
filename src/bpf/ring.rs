//! Typed events from the ring buffer of `bpf/include/event.bpf.h`.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::collections::vec_deque::IntoIter;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::rc::Rc;

use anyhow::{Context, Result, ensure};
use libbpf_rs::{MapCore, RingBuffer, RingBufferBuilder};
use plain::Plain;

/// Events that are passed to a tool at once, at most. Printing this many takes about 10 ms, during which the ring
/// buffer has space for more.
const MAX_BATCH: usize = 1024;
/// Events that may wait in user space. From this number on the ring buffer is not read until some have been passed
/// on.
const MAX_QUEUED: usize = 1 << 17;

/// The events of one tool, in the order in which their handlers reserved them.
pub struct Events<'map, T> {
    ring: RingBuffer<'map>,
    queue: Rc<RefCell<VecDeque<T>>>,
    malformed: Rc<Cell<bool>>,
}

impl<'map, T: Plain + Copy + 'map> Events<'map, T> {
    /// Reads from the skeleton's map `events`, whose records begin with a `T`.
    ///
    /// # Errors
    /// If the ring buffer cannot be mapped.
    pub fn new(map: &'map impl MapCore) -> Result<Self> {
        // Records of a ring buffer are aligned to 8 bytes, which no event type exceeds.
        Self::decoding(map, |record| plain::from_bytes(record).ok().copied())
    }
}

impl<'map, T: 'map> Events<'map, T> {
    /// Reads from the skeleton's map `events`, whose records `decode` decodes.
    ///
    /// # Errors
    /// If the ring buffer cannot be mapped.
    pub fn decoding(
        map: &'map impl MapCore,
        decode: impl Fn(&[u8]) -> Option<T> + 'map,
    ) -> Result<Self> {
        let queue = Rc::new(RefCell::new(VecDeque::new()));
        let malformed = Rc::new(Cell::new(false));
        let (sink, bad) = (Rc::clone(&queue), Rc::clone(&malformed));
        let mut builder = RingBufferBuilder::new();
        builder
            .add(map, move |record| {
                match decode(record) {
                    Some(event) => sink.borrow_mut().push_back(event),
                    None => bad.set(true),
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

    /// Reads everything that is in the ring buffer now, and returns all events that have not been passed on.
    ///
    /// # Errors
    /// If the kernel does not let us read the buffer, or a record cannot be decoded, which only a mismatch between BPF
    /// program and binary causes.
    pub fn drain(&self) -> Result<IntoIter<T>> {
        self.read()?;
        Ok(self.queue.take().into_iter())
    }

    /// Moves everything from the ring buffer into the queue.
    fn read(&self) -> Result<()> {
        let read = self.ring.consume();
        read.context("failed to read the ring buffer")?;
        ensure!(
            !self.malformed.get(),
            "a record of the ring buffer has another layout than expected"
        );
        Ok(())
    }

    /// Reads the ring buffer, unless [`MAX_QUEUED`] events wait. Returns the first events of the queue,
    /// [`MAX_BATCH`] at most.
    pub(crate) fn next(&self) -> Result<IntoIter<T>> {
        if self.queue.borrow().len() < MAX_QUEUED {
            self.read()?;
        }
        if self.queue.borrow().len() <= MAX_BATCH {
            // Taking the whole queue also frees the memory that a burst has taken.
            return Ok(self.queue.take().into_iter());
        }
        let next: VecDeque<T> = self.queue.borrow_mut().drain(..MAX_BATCH).collect();
        Ok(next.into_iter())
    }

    /// Whether no event waits in the queue.
    pub(crate) fn is_idle(&self) -> bool {
        self.queue.borrow().is_empty()
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
