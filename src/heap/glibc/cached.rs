//! Free chunks that look as if they were in use: those in threads' tcaches, and those in fastbins.

use std::collections::{BTreeMap, HashMap};

use crate::heap::arch;
use crate::heap::image::Image;

use super::{Chunk, MMAPPED, State, Walk, half, word};

/// Layouts of `tcache_perthread_struct`, by the size of its chunk: with 64 counts of one byte (2.26 to 2.29), with 64
/// of two bytes (2.30 to 2.41), and with 76 (2.42). A chunk may be 16 bytes larger, if the rest was too small to be
/// cut off.
const SHAPES: [TcacheLayout; 3] = [
    TcacheLayout::new(0x250, 64, 1),
    TcacheLayout::new(0x290, 64, 2),
    TcacheLayout::new(0x300, 76, 2),
];

/// Number of lists that hold chunks of one size each. Further lists hold sizes up to a power of two.
const SMALL: u64 = 64;
/// Largest number of chunks in one list. Counts have 16 bits.
const LONGEST: usize = 0x1_0000;
/// Bytes next to the thread pointer in which a thread's own pointer to its tcache is looked for.
const TLS: u64 = 4096;

/// Layout of a tcache.
#[derive(Debug, Clone, Copy)]
struct TcacheLayout {
    chunk: u64,
    lists: u64,
    count_bytes: u64,
}

impl TcacheLayout {
    const fn new(chunk: u64, lists: u64, count_bytes: u64) -> Self {
        Self {
            chunk,
            lists,
            count_bytes,
        }
    }

    fn of(chunk: &Chunk) -> Option<Self> {
        let fits = |shape: &Self| [shape.chunk, shape.chunk + 16].contains(&chunk.size);
        let possible = chunk.state == State::InUse && chunk.arena != MMAPPED;
        SHAPES.into_iter().find(|shape| possible && fits(shape))
    }

    /// Returns the count of a list.
    fn count(&self, image: &Image, tcache: u64, list: u64) -> u64 {
        let at = tcache + self.count_bytes * list;
        let bits = u64::from(half(image, at & !3)) >> (8 * (at & 3));
        bits & ((1 << (8 * self.count_bytes)) - 1)
    }
}

/// Marks tcaches and the chunks in them, then the chunks in fastbins.
pub(super) fn mark(image: &Image, walk: &mut Walk, used: &[usize]) {
    let candidates: Vec<(usize, TcacheLayout)> = walk
        .chunks
        .iter()
        .enumerate()
        .filter_map(|(at, chunk)| Some((at, TcacheLayout::of(chunk)?)))
        .collect();
    // Links are mangled since 2.32. The library's decoding is the one by which more tcaches are valid.
    let by = |mangled: bool| {
        let lists = |&(at, shape): &(usize, TcacheLayout)| {
            let held = cached_chunks(image, walk, at, shape, mangled)?;
            (!held.is_empty()).then_some((at, held))
        };
        candidates.iter().filter_map(lists).collect::<Vec<_>>()
    };
    let (plain, mangled) = (by(false), by(true));
    let is_mangled = mangled.len() >= plain.len();
    let found = if is_mangled { mangled } else { plain };
    let mut keys: HashMap<u64, usize> = HashMap::new();
    let mut cached = 0;
    for (tcache, held) in found {
        walk.chunks[tcache].state = State::Internal;
        walk.tcaches.push(walk.chunks[tcache].user());
        for at in held {
            walk.chunks[at].state = State::Tcache;
            *keys
                .entry(word(image, walk.chunks[at].user() + 8))
                .or_default() += 1;
            cached += 1;
        }
    }
    check_threads(image, walk);
    mark_fastbins(image, walk, used, is_mangled);
    check_key(image, walk, &keys, cached);
}

fn next(image: &Image, entry: u64, mangled: bool) -> u64 {
    let link = word(image, entry);
    if mangled { link ^ (entry >> 12) } else { link }
}

/// Returns the chunks in the lists of a possible tcache; None if it is not one.
fn cached_chunks(
    image: &Image,
    walk: &Walk,
    tcache: usize,
    shape: TcacheLayout,
    mangled: bool,
) -> Option<Vec<usize>> {
    let tcache = walk.chunks[tcache].user();
    let mut held = Vec::new();
    for list in 0..shape.lists {
        let mut entry = word(image, tcache + shape.lists * shape.count_bytes + 8 * list);
        let mut length = 0;
        while entry != 0 {
            let at = walk.chunk_at(entry.checked_sub(16)?)?;
            let chunk = walk.chunks[at];
            let size_fits = if list < SMALL {
                chunk.size == 0x20 + 16 * list
            } else {
                chunk.size >= 0x420
            };
            length += 1;
            if !size_fits || chunk.state != State::InUse || length > LONGEST {
                return None;
            }
            held.push(at);
            entry = next(image, entry, mangled);
        }
        let counted = shape.count(image, tcache, list) as i64;
        // A thread may have changed the list and not yet its count. Since 2.42, free places are counted instead.
        let expected = match shape.lists {
            76 if list < SMALL => walk.tcache_count().map(|most| most as i64 - counted),
            76 => None,
            _ => Some(counted),
        };
        if expected.is_some_and(|expected| (expected - length as i64).abs() > 1) {
            return None;
        }
    }
    Some(held)
}

/// Compares the tcaches with the threads' own pointers to them, which are at the same distance from each thread
/// pointer. A tcache that no thread refers to belongs to a thread that has ended. A tcache that a thread refers to
/// and that was not recognised makes the walk incomplete, as its chunks would be taken for chunks in use.
fn check_threads(image: &Image, walk: &mut Walk) {
    let mut votes: BTreeMap<u64, usize> = BTreeMap::new();
    for thread in &image.threads {
        let pointer = thread.thread_pointer;
        for (address, word) in image.words(arch::thread_locals(pointer, TLS)) {
            if walk.tcaches.contains(&word) {
                *votes.entry(pointer.wrapping_sub(address)).or_default() += 1;
            }
        }
    }
    let Some((distance, _)) = votes.into_iter().max_by_key(|vote| vote.1) else {
        check_nothing_recognised(image, walk);
        return;
    };
    for thread in &image.threads {
        let tcache = word(image, thread.thread_pointer.wrapping_sub(distance));
        if walk.tcaches.contains(&tcache) {
            continue;
        }
        // A thread that has not allocated has no tcache, or since 2.42 one in the library's data.
        let chunk = tcache
            .checked_sub(16)
            .and_then(|header| walk.chunk_at(header));
        match chunk {
            // This can be an empty tcache.
            Some(at) if TcacheLayout::of(&walk.chunks[at]).is_some() => {
                walk.chunks[at].state = State::Internal;
                walk.tcaches.push(tcache);
                if walk.holds_any(image, &walk.chunks[at]) {
                    let why = format!("the tcache of thread {} is inconsistent", thread.tid);
                    walk.broken.push((why, Some(tcache)));
                }
            }
            Some(_) => {
                let why = format!("the tcache of thread {} has no known layout", thread.tid);
                walk.broken.push((why, Some(tcache)));
            }
            None => {}
        }
    }
}

/// Checks the tcaches if none that was recognised belongs to a thread. This is so if all are empty, or if none is
/// used (glibc.malloc.tcache_count=0). If all possible tcaches that threads refer to hold chunks, they are
/// inconsistent.
fn check_nothing_recognised(image: &Image, walk: &mut Walk) {
    // A thread that ends frees its tcache, except for the main thread, which pthread_exit() ends.
    let left = usize::from(!image.has_main_thread());
    if walk.tcaches.len() > left {
        let why = "no thread has a tcache that was found";
        walk.broken
            .push((why.into(), walk.tcaches.first().copied()));
        return;
    }
    // Each thread's pointer to its tcache is at the same distance. Other words that look like one are on stacks,
    // which end there, too.
    let mut by_distance: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
    for thread in &image.threads {
        let pointer = thread.thread_pointer;
        for (address, word) in image.words(arch::thread_locals(pointer, TLS)) {
            let chunk = word
                .checked_sub(16)
                .and_then(|header| walk.chunk_at(header));
            if let Some(at) = chunk.filter(|&at| TcacheLayout::of(&walk.chunks[at]).is_some()) {
                let distance = pointer.abs_diff(address);
                by_distance.entry(distance).or_default().push(at);
            }
        }
    }
    // Of distances with as many words, the nearest is taken: thread-local variables are there, and stacks are further
    // away.
    let best = by_distance.into_values().rev().max_by_key(Vec::len);
    let possible = best.unwrap_or_default();
    let empty: Vec<usize> = possible
        .iter()
        .copied()
        .filter(|&at| !walk.holds_any(image, &walk.chunks[at]))
        .collect();
    if empty.is_empty() && !possible.is_empty() {
        let address = walk.chunks[possible[0]].user();
        let why = "the tcache of a thread is inconsistent";
        walk.broken.push((why.into(), Some(address)));
    }
    for at in empty {
        walk.chunks[at].state = State::Internal;
    }
}

/// Checks for chunks that bear the key of tcaches and are in no tcache. A few were freed again when their thread
/// ended, and allocated since. Many belong to tcaches that were not recognised.
fn check_key(image: &Image, walk: &mut Walk, keys: &HashMap<u64, usize>, cached: usize) {
    const FEW: usize = 256;
    let Some((&key, &count)) = keys.iter().max_by_key(|key| key.1) else {
        return;
    };
    // Before 2.34 each thread has a key of its own, and before 2.29 there is no key.
    if key == 0 || count * 10 < cached * 9 {
        return;
    }
    let in_use = walk
        .chunks
        .iter()
        .filter(|chunk| chunk.state == State::InUse);
    let marked = in_use
        .filter(|chunk| word(image, chunk.user() + 8) == key)
        .count();
    if marked > FEW && marked * 2 > cached {
        let why = format!(
            "{marked} chunks are marked as cached by a thread, and in no cache that was found"
        );
        walk.broken.push((why, None));
    }
}

/// Marks the chunks in fastbins, which 2.43 does not have.
fn mark_fastbins(image: &Image, walk: &mut Walk, used: &[usize], mangled: bool) {
    const FASTBINS: u64 = 10;
    for (number, &place) in used.iter().enumerate() {
        let library = &walk.libraries[place];
        if library.is_2_43() {
            continue;
        }
        let heads = library.top_field(walk.arenas[number].address) - 8 * FASTBINS;
        for list in 0..FASTBINS {
            let mut chunk = word(image, heads + 8 * list);
            while chunk != 0 {
                let at = walk.chunk_at(chunk).filter(|&at| {
                    let found = walk.chunks[at];
                    found.size == 0x20 + 16 * list && found.state == State::InUse
                });
                let Some(at) = at else {
                    let why = "a fastbin leads to what is no chunk of its size";
                    walk.broken.push((why.into(), Some(chunk)));
                    break;
                };
                walk.chunks[at].state = State::Fastbin;
                chunk = next(image, chunk.wrapping_add(16), mangled);
            }
        }
    }
}

impl Walk {
    fn tcache_count(&self) -> Option<u64> {
        let counts = self.libraries.iter().filter_map(|library| library.counts);
        counts
            .map(|counts| counts.tcache_count)
            .find(|&count| count > 0)
    }

    /// Whether a tcache has a list that is not empty.
    fn holds_any(&self, image: &Image, chunk: &Chunk) -> bool {
        let shapes = SHAPES.into_iter();
        let mut fitting =
            shapes.filter(|shape| [shape.chunk, shape.chunk + 16].contains(&chunk.size));
        fitting.any(|shape| {
            let lists = chunk.user() + shape.lists * shape.count_bytes;
            (0..shape.lists).any(|list| word(image, lists + 8 * list) != 0)
        })
    }
}
