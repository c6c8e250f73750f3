//! Copy of a process's pages by several threads at once.

use std::io::{self, IoSliceMut};
use std::ops::Range;
use std::sync::Mutex;
use std::thread;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use memmap2::{Advice, MmapMut};
use nix::sys::uio::{RemoteIoVec, process_vm_readv};
use nix::unistd::Pid;

use super::arch;
use crate::heap::page_index::PAGE;
use crate::heap::page_runs::PageRuns;
use crate::process::proc;

/// Bytes that a thread copies at a time. With less, threads wait for each other. With more, threads end at different
/// times, and the caches have no space for the pieces.
const PIECE: usize = 1 << 20;
/// Largest number of ranges in one system call.
const RANGES: usize = 64;
/// Bytes that are copied to measure the speed of a copy.
const SAMPLE: usize = 32 << 20;

/// Allocates memory with all of its pages in place. To allocate them during a pause took 1.3 s/GB and more.
///
/// # Errors
/// If there is not enough memory.
pub(super) fn buffer(bytes: usize) -> Result<MmapMut> {
    let no_room = || format!("no room for a copy of {bytes} bytes");
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

/// Returns the number of threads that copy.
pub(super) fn threads() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(8)
}

/// Allocates a buffer for each thread that copies, which stays in the caches. A buffer has space for two pieces: the
/// last range that a thread reads at once is behind the others.
///
/// # Errors
/// If there is no memory for them.
pub(super) fn staging_buffers() -> Result<Vec<MmapMut>> {
    (0..threads()).map(|_| buffer(2 * PIECE)).collect()
}

/// Measures the bytes per second that all threads together copy from memory to memory at present.
pub(super) fn rate() -> Result<f64> {
    let (from, mut to) = (buffer(SAMPLE)?, buffer(SAMPLE)?);
    let part = SAMPLE.div_ceil(threads());
    let start = Instant::now();
    thread::scope(|scope| {
        for (from, to) in from.chunks(part).zip(to.chunks_mut(part)) {
            scope.spawn(move || to.copy_from_slice(from));
        }
    });
    Ok(SAMPLE as f64 / start.elapsed().as_secs_f64().max(1e-9))
}

/// Range of the process's memory, with its place in the copy.
struct Piece<'a> {
    from: Range<u64>,
    to: &'a mut [u8],
}

/// Copies the ranges to the beginning of `into`, one after the other, by a thread for each near buffer. Returns the
/// ranges that could not be read, in order. The copy has zeros there, to the end of the piece.
///
/// # Errors
/// If the buffer is too small.
pub(super) fn copy(
    pid: u32,
    runs: &[Range<u64>],
    into: &mut [u8],
    near: &mut [MmapMut],
) -> Result<PageRuns> {
    let mut rest = into;
    let mut pieces = Vec::with_capacity(runs.len());
    for run in runs {
        for start in run.clone().step_by(PIECE) {
            let end = (start + PIECE as u64).min(run.end);
            let length = (end - start) as usize;
            ensure!(
                length <= rest.len(),
                "the process has grown while it was looked at"
            );
            let (to, after) = rest.split_at_mut(length);
            rest = after;
            pieces.push(Piece {
                from: start..end,
                to,
            });
        }
    }
    let unread = Mutex::new(Vec::new());
    let pieces = Mutex::new(pieces.into_iter());
    let work = |near: &mut [u8]| {
        let mut some = Vec::with_capacity(RANGES);
        loop {
            let Ok(mut pieces) = pieces.lock() else {
                return;
            };
            let mut bytes = 0;
            while bytes < PIECE
                && some.len() < RANGES
                && let Some(piece) = pieces.next()
            {
                bytes += piece.to.len();
                some.push(piece);
            }
            drop(pieces);
            if some.is_empty() {
                return;
            }
            let rest = read(pid, &mut some, near);
            if let Ok(mut unread) = unread.lock() {
                unread.extend(rest);
            }
            some.clear();
        }
    };
    let (own, others) = near.split_last_mut().context("no buffer to copy by")?;
    thread::scope(|scope| {
        for near in others {
            scope.spawn(|| work(near));
        }
        work(own);
    });
    let mut unread = unread.into_inner().unwrap_or_default();
    unread.sort_by_key(|range: &Range<u64>| range.start);
    Ok(unread)
}

/// Reads pieces in one system call, or one by one if that does not read all. Returns the ranges that cannot be read,
/// in whole pages.
///
/// The pieces are read into the near buffer first, which stays in the caches. The kernel writes through the caches: a
/// destination outside of them would be read from memory before it is written.
fn read(pid: u32, pieces: &mut [Piece], near: &mut [u8]) -> PageRuns {
    let wanted: usize = pieces.iter().map(|piece| piece.to.len()).sum();
    if read_near(pid, pieces, &mut near[..wanted]) == wanted {
        let mut rest = &*near;
        for piece in pieces {
            let (own, after) = rest.split_at(piece.to.len());
            arch::copy_around_caches(piece.to, own);
            rest = after;
        }
        return PageRuns::new();
    }
    let mut unread = PageRuns::new();
    for piece in pieces {
        let near = &mut near[..piece.to.len()];
        let done = read_near(pid, std::slice::from_ref(piece), near) & !(PAGE as usize - 1);
        piece.to[..done].copy_from_slice(&near[..done]);
        if done < piece.to.len() {
            piece.to[done..].fill(0);
            unread.push(piece.from.start + done as u64..piece.from.end);
        }
    }
    unread
}

/// Reads pieces into `near`, one behind the other. Returns the number of bytes that could be read.
fn read_near(pid: u32, pieces: &[Piece], near: &mut [u8]) -> usize {
    let from: Vec<_> = pieces
        .iter()
        .map(|piece| RemoteIoVec {
            base: piece.from.start as usize,
            len: piece.to.len(),
        })
        .collect();
    let pid = Pid::from_raw(proc::living_thread(pid).cast_signed());
    process_vm_readv(pid, &mut [IoSliceMut::new(near)], &from).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn memory_arrives_in_order_and_what_is_not_there_is_told() {
        let mut source = MmapMut::map_anon(5 << 20).expect("memory");
        for (number, byte) in source.iter_mut().enumerate() {
            *byte = (number / 4096) as u8;
        }
        let start = source.as_ptr() as u64;
        let runs = [
            start..start + (3 << 20),
            start + (4 << 20)..start + (5 << 20),
        ];
        let mut copied = buffer(5 << 20).expect("memory");
        let mut near = staging_buffers().expect("memory");
        assert_eq!(
            copy(std::process::id(), &runs, &mut copied, &mut near).expect("room"),
            []
        );
        assert_eq!(copied[..3 << 20], source[..3 << 20]);
        assert_eq!(copied[3 << 20..4 << 20], source[4 << 20..]);
        let too_small = copy(std::process::id(), &runs, &mut copied[..4096], &mut near);
        assert!(too_small.is_err());
        let runs = [0x1000..0x3000, runs[1].clone()];
        let unread = copy(std::process::id(), &runs, &mut copied, &mut near);
        assert_eq!(unread.expect("room"), runs[..1]);
        assert!(rate().expect("memory") > 1e6);
    }
}
