//! Copy of a process's pages by several workers at once.

use std::io;
use std::ops::Range;
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result, ensure};
use memmap2::{Advice, MmapMut};

use super::arch;
use super::crew::{Board, Job, NEAR, Own};
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::PageRuns;
use crate::process::proc;

/// Bytes that a worker copies at a time. With more, workers end at different times, and the caches have no space for
/// the pieces.
const PIECE: usize = 1 << 20;
/// The last piece that a worker reads at once is behind the others.
const _: () = assert!(NEAR >= 2 * PIECE);
/// Largest number of ranges in one system call.
const RANGES: usize = 64;

/// Allocates memory with all of its pages in place. To allocate them during a pause took 1.3 s/GB and more.
///
/// # Errors
/// If there is not enough memory.
pub(super) fn buffer(bytes: usize) -> Result<MmapMut> {
    let no_room = || format!("not enough memory for a copy of {bytes} bytes");
    let mut buffer = MmapMut::map_anon(bytes.max(1)).with_context(no_room)?;
    // A kernel without huge pages refuses this advice.
    let _ = buffer.advise(Advice::HugePage);
    let advised = buffer.advise(Advice::PopulateWrite);
    place(&mut buffer, advised).with_context(no_room)?;
    Ok(buffer)
}

/// Puts the pages of a buffer in place if the kernel does not know the advice MADV_POPULATE_WRITE. `advised` is the
/// result of the advice.
fn place(buffer: &mut [u8], advised: io::Result<()>) -> io::Result<()> {
    match advised {
        // Kernels before 5.14 have no MADV_POPULATE_WRITE.
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
            buffer
                .iter_mut()
                .step_by(PAGE as usize)
                .for_each(|byte| *byte = 1);
            Ok(())
        }
        advised => advised,
    }
}

/// Returns the number of workers that copy.
pub(super) fn workers() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(8)
}

/// Range of the process's memory, with its place in the copy.
#[derive(Debug)]
struct Piece {
    from: Range<u64>,
    /// Where the copy goes, in [`CopyPages::into`].
    to: *mut u8,
    /// Bytes that could be read.
    read: AtomicUsize,
}

impl Piece {
    fn length(&self) -> usize {
        (self.from.end - self.from.start) as usize
    }
}

/// Copy of pages by a crew. The pieces are read into the worker's near buffer first, which stays in the caches. The
/// kernel writes through the caches: a destination outside of them would be read from memory before it is written.
#[derive(Debug)]
pub(super) struct CopyPages {
    tid: u32,
    pieces: Vec<Piece>,
    /// Pieces that are read in one system call.
    batches: Vec<Range<usize>>,
    next: AtomicUsize,
    into: MmapMut,
}

// SAFETY: each piece has a part of the buffer for itself, and one worker takes it.
unsafe impl Send for CopyPages {}
// SAFETY: as above.
unsafe impl Sync for CopyPages {}

impl CopyPages {
    /// Prepares a copy of these ranges of a process's memory to the beginning of `into`, one after the other.
    ///
    /// # Errors
    /// If the buffer is too small.
    pub(super) fn new(pid: u32, runs: &[Range<u64>], mut into: MmapMut) -> Result<Self> {
        let mut pieces = Vec::with_capacity(runs.len());
        let mut rest = &mut into[..];
        for run in runs {
            for start in run.clone().step_by(PIECE) {
                let end = (start + PIECE as u64).min(run.end);
                let length = (end - start) as usize;
                ensure!(
                    length <= rest.len(),
                    "the process has grown while it was examined"
                );
                let (to, after) = rest.split_at_mut(length);
                rest = after;
                pieces.push(Piece {
                    from: start..end,
                    to: to.as_mut_ptr(),
                    read: AtomicUsize::new(length),
                });
            }
        }
        Ok(Self {
            tid: proc::living_thread(pid),
            batches: batches(&pieces),
            pieces,
            next: AtomicUsize::new(0),
            into,
        })
    }

    /// Returns the buffer, and the ranges that could not be read, in order. The copy has zeros there, to the end of
    /// the piece. The crew must have finished the copy or ended.
    pub(super) fn finish(self) -> (MmapMut, PageRuns) {
        let mut unread = PageRuns::new();
        for piece in self.pieces {
            let read = piece.read.into_inner() as u64;
            if piece.from.start + read < piece.from.end {
                unread.push(piece.from.start + read..piece.from.end);
            }
        }
        (self.into, unread)
    }

    /// Reads pieces in one system call, or one by one if that does not read all.
    fn copy(&self, pieces: &[Piece], near: &mut [u8]) {
        let wanted: usize = pieces.iter().map(Piece::length).sum();
        let Some(near) = near.get_mut(..wanted) else {
            return;
        };
        let whole = self.read(pieces, near) == wanted;
        let mut rest = near;
        for piece in pieces {
            let (own, after) = rest.split_at_mut(piece.length());
            rest = after;
            // SAFETY: the piece has this many bytes of the buffer for itself, and the buffer lives as long as this.
            let to = unsafe { slice::from_raw_parts_mut(piece.to, own.len()) };
            if whole {
                arch::copy_around_caches(to, own);
                continue;
            }
            let read = self.read(slice::from_ref(piece), own) & !(PAGE as usize - 1);
            own[read..].fill(0);
            to.copy_from_slice(own);
            piece.read.store(read, Ordering::Relaxed);
        }
    }

    /// Reads pieces into `near`, one behind the other. Returns the number of bytes that could be read.
    fn read(&self, pieces: &[Piece], near: &mut [u8]) -> usize {
        let nothing = libc::iovec {
            iov_base: ptr::null_mut(),
            iov_len: 0,
        };
        let mut from = [nothing; RANGES];
        for (from, piece) in from.iter_mut().zip(pieces) {
            from.iov_base = piece.from.start as *mut libc::c_void;
            from.iov_len = piece.length();
        }
        let to = libc::iovec {
            iov_base: near.as_mut_ptr().cast(),
            iov_len: near.len(),
        };
        let (to, from) = (ptr::from_ref(&to) as usize, from.as_ptr() as usize);
        let count = pieces.len().min(RANGES);
        // SAFETY: the kernel writes at most as many bytes as `near` has.
        let read = unsafe {
            arch::system_call(
                libc::SYS_process_vm_readv,
                [self.tid as usize, to, 1, from, count, 0],
            )
        };
        usize::try_from(read).unwrap_or(0)
    }
}

// SAFETY: makes system calls, and copies within buffers whose sizes fit.
unsafe impl Job for CopyPages {
    fn work(&self, own: &mut Own, board: &Board) {
        while !board.is_over() {
            let at = self.next.fetch_add(1, Ordering::Relaxed);
            let Some(pieces) = self.batches.get(at) else {
                return;
            };
            if let Some(pieces) = self.pieces.get(pieces.clone()) {
                self.copy(pieces, &mut own.near);
                board.advance(pieces.iter().map(Piece::length).sum::<usize>() as u64);
            }
        }
    }

    fn total(&self) -> u64 {
        self.pieces.iter().map(Piece::length).sum::<usize>() as u64
    }
}

/// Groups pieces into those that fit into a near buffer: a piece ends the group that has a size of [`PIECE`].
fn batches(pieces: &[Piece]) -> Vec<Range<usize>> {
    let mut batches = Vec::new();
    let (mut start, mut bytes) = (0, 0);
    for (at, piece) in pieces.iter().enumerate() {
        bytes += piece.length();
        if bytes >= PIECE || at + 1 - start == RANGES || at + 1 == pieces.len() {
            batches.push(start..at + 1);
            (start, bytes) = (at + 1, 0);
        }
    }
    batches
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::super::crew::{Crew, Until};
    use super::*;
    use crate::heap::capture::arch::LINE;

    #[test]
    fn pages_are_touched_only_if_the_advice_is_unknown() {
        let touched = |errno| {
            let mut buffer = [0; 2 * 4096];
            let placed = place(&mut buffer, Err(io::Error::from_raw_os_error(errno)));
            (
                placed.is_ok(),
                buffer.iter().filter(|&&byte| byte != 0).count(),
            )
        };
        assert_eq!(touched(libc::EINVAL), (true, 2));
        assert_eq!(touched(libc::ENOMEM), (false, 0));
    }

    #[test]
    fn memory_arrives_in_order_and_what_is_not_there_is_named() {
        let mut source = MmapMut::map_anon(5 << 20).expect("memory");
        for (number, byte) in source.iter_mut().enumerate() {
            *byte = (number / 4096) as u8;
        }
        let start = source.as_ptr() as u64;
        let runs = [
            start..start + (3 << 20),
            start + (4 << 20)..start + (5 << 20),
        ];
        let mut crew = Crew::start().expect("processes");
        let mut copied = |runs: &[Range<u64>]| {
            let into = buffer(5 << 20).expect("memory");
            let job = CopyPages::new(std::process::id(), runs, into).expect("enough memory");
            let job = Arc::new(job);
            crew.run(job.clone(), Until::PROGRESS).expect("in time");
            Arc::into_inner(job).expect("it is done").finish()
        };
        let (copy, unread) = copied(&runs);
        assert_eq!(unread, []);
        assert_eq!(copy[..3 << 20], source[..3 << 20]);
        assert_eq!(copy[3 << 20..4 << 20], source[4 << 20..]);
        let (copy, unread) = copied(&[0x1000..0x3000, runs[1].clone()]);
        assert_eq!((unread.len(), &unread[0]), (1, &(0x1000..0x3000)));
        assert_eq!(copy[..0x2000], [0; 0x2000]);
        assert_eq!(copy[0x2000..0x2000 + (1 << 20)], source[4 << 20..]);
        let small = buffer(4096).expect("memory");
        assert!(CopyPages::new(std::process::id(), &runs, small).is_err());
    }

    #[test]
    fn small_pieces_are_read_together() {
        let pieces = |lengths: &[usize]| -> Vec<Range<usize>> {
            let piece = |&length: &usize| Piece {
                from: 0..length as u64,
                to: ptr::null_mut(),
                read: AtomicUsize::new(0),
            };
            batches(&lengths.iter().map(piece).collect::<Vec<_>>())
        };
        assert_eq!(pieces(&[]), []);
        assert_eq!(pieces(&[4096, PIECE - 4096, 1, PIECE]), [0..2, 2..4]);
        assert_eq!(pieces(&[4096; RANGES + 1]), [0..RANGES, RANGES..RANGES + 1]);
    }

    #[test]
    fn all_bytes_arrive_wherever_they_begin_and_end() {
        let from: Vec<u8> = (0..1009).map(|number| number as u8).collect();
        for start in 0..LINE + 1 {
            for length in [0, 1, 15, LINE - 1, LINE, LINE + 1, 127, 128, 700] {
                let mut to = vec![0xff; 1009];
                arch::copy_around_caches(&mut to[start..start + length], &from[..length]);
                assert_eq!(
                    to[start..start + length],
                    from[..length],
                    "{start}, {length}"
                );
                assert!(
                    to[..start]
                        .iter()
                        .chain(&to[start + length..])
                        .all(|&byte| byte == 0xff)
                );
            }
        }
    }
}
