//! Bodies of responses, and the memory that all bodies may take at once: clients decide how many bodies there are, and
//! how long they last.

use std::io::{self, Write};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{Error, Result};

/// Capacity that a body is begun with, in bytes.
const FIRST_CAPACITY: usize = 4096;

/// Memory for the bodies of all responses that are being sent, and of the last report.
#[derive(Debug)]
pub(super) struct BodyMemory {
    limit: usize,
    used: AtomicUsize,
}

impl BodyMemory {
    pub(super) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            limit,
            used: AtomicUsize::new(0),
        })
    }

    /// Makes a body of what `write` writes.
    ///
    /// # Errors
    /// If the body does not fit into the memory that is left, or `write` fails.
    pub(super) fn body(
        self: &Arc<Self>,
        write: impl FnOnce(&mut dyn Write) -> Result<()>,
    ) -> Result<Body, NoBody> {
        let mut out = Bytes {
            bytes: Vec::new(),
            memory: Some(Arc::clone(self)),
            is_full: false,
        };
        let written = write(&mut out);
        if out.is_full {
            return Err(NoBody::Full);
        }
        written.map_err(NoBody::Failed)?;
        out.shrink();
        Ok(Body(Arc::new(out)))
    }

    /// Returns how many bytes all bodies take now.
    #[cfg(test)]
    pub(super) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Takes that many bytes, if they are left.
    fn take(&self, bytes: usize) -> bool {
        let more = |used: usize| used.checked_add(bytes).filter(|&used| used <= self.limit);
        let taken = self
            .used
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok()
    }

    fn release(&self, bytes: usize) {
        self.used.fetch_sub(bytes, Ordering::Relaxed);
    }
}

/// Reason why there is no body.
#[derive(Debug)]
pub(super) enum NoBody {
    /// Bodies take all of the memory that they may take.
    Full,
    /// The content could not be made.
    Failed(Error),
}

/// Body of a response. Its clones are one copy in memory.
#[derive(Debug, Clone)]
pub(super) struct Body(Arc<Bytes>);

impl Body {
    /// Makes the body of a short message, which is not counted.
    pub(super) fn message(text: String) -> Self {
        Self(Arc::new(Bytes {
            bytes: text.into_bytes(),
            memory: None,
            is_full: false,
        }))
    }

    /// The bytes to send.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.0.bytes
    }
}

/// Bytes that are counted as long as they are in memory.
#[derive(Debug)]
struct Bytes {
    bytes: Vec<u8>,
    /// Where the capacity of `bytes` is counted.
    memory: Option<Arc<BodyMemory>>,
    /// Whether there was no memory left.
    is_full: bool,
}

impl Bytes {
    /// Makes capacity for `more` bytes. Returns false if there is no memory left.
    fn grow(&mut self, more: usize) -> bool {
        let (length, capacity) = (self.bytes.len(), self.bytes.capacity());
        let needed = length.saturating_add(more);
        if needed <= capacity {
            return true;
        }
        // Doubled where that is possible, so that few copies are made.
        let wanted = needed.max(capacity.saturating_mul(2)).max(FIRST_CAPACITY);
        for new in [wanted, needed] {
            let added = new - capacity;
            if self.memory.as_ref().is_none_or(|memory| memory.take(added)) {
                self.bytes.reserve_exact(new - length);
                return true;
            }
        }
        false
    }

    fn shrink(&mut self) {
        let before = self.bytes.capacity();
        self.bytes.shrink_to_fit();
        if let Some(memory) = &self.memory {
            memory.release(before - self.bytes.capacity());
        }
    }
}

impl Write for Bytes {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if !self.grow(bytes.len()) {
            self.is_full = true;
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.bytes.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for Bytes {
    fn drop(&mut self) {
        if let Some(memory) = &self.memory {
            memory.release(self.bytes.capacity());
        }
    }
}

/// Body of a report in one format, made for the first client that requests it.
#[derive(Debug, Default)]
pub(super) struct CachedBody(Mutex<Option<Body>>);

impl CachedBody {
    /// Returns the body, which `make` makes unless it is there. Other clients wait meanwhile.
    ///
    /// # Errors
    /// If `make` fails.
    pub(super) fn get_or_make(
        &self,
        make: impl FnOnce() -> Result<Body, NoBody>,
    ) -> Result<Body, NoBody> {
        // No panic can leave half a body.
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(body) = &*kept {
            return Ok(body.clone());
        }
        let body = make()?;
        *kept = Some(body.clone());
        Ok(body)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: usize = 1 << 20;

    fn body(memory: &Arc<BodyMemory>, bytes: usize) -> Result<Body, NoBody> {
        memory.body(|out| {
            for _ in 0..bytes / 16 {
                out.write_all(&[7; 16])?;
            }
            Ok(())
        })
    }

    #[test]
    fn bodies_take_no_more_than_the_limit() {
        let memory = BodyMemory::new(LIMIT);
        let first = body(&memory, LIMIT / 2).expect("room");
        assert_eq!(memory.used(), LIMIT / 2, "more is counted than is kept");
        let second = body(&memory, LIMIT / 2).expect("room, without any to spare");
        assert!(matches!(body(&memory, 16), Err(NoBody::Full)));
        assert_eq!(memory.used(), LIMIT);
        drop(second);
        let clones = vec![first.clone(); 64];
        assert_eq!(memory.used(), LIMIT / 2);
        assert!(matches!(body(&memory, LIMIT), Err(NoBody::Full)));
        drop((first, clones));
        assert_eq!(memory.used(), 0);
        let failed = memory.body(|out| {
            out.write_all(b"half")?;
            anyhow::bail!("no more")
        });
        assert!(matches!(failed, Err(NoBody::Failed(_))));
        assert_eq!(memory.used(), 0);
    }

    #[test]
    fn a_body_is_made_once_unless_it_fails() {
        let memory = BodyMemory::new(LIMIT);
        let cached = CachedBody::default();
        let failed = cached.get_or_make(|| Err(NoBody::Full));
        assert!(failed.is_err());
        let first = cached.get_or_make(|| body(&memory, 32)).expect("room");
        let second = cached.get_or_make(|| unreachable!("it is there"));
        assert_eq!(
            second.expect("it is there").bytes().as_ptr(),
            first.bytes().as_ptr()
        );
    }
}
