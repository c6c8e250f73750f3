//! What the copy of a process takes of x86-64: stores that go around the caches.

use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};

const WORD: usize = size_of::<__m128i>();
/// Bytes that go to memory at once.
const LINE: usize = 64;

/// Copies bytes that nobody looks at soon, as `to.copy_from_slice(from)` does. Their destination is not read from memory
/// before, which is a third of what would go to and fro.
///
/// # Panics
/// If the slices have different lengths.
pub(super) fn copy_around_caches(to: &mut [u8], from: &[u8]) {
    assert_eq!(to.len(), from.len());
    let head = to.as_ptr().align_offset(LINE).min(to.len());
    let (to_head, to) = to.split_at_mut(head);
    let (from_head, from) = from.split_at(head);
    to_head.copy_from_slice(from_head);
    let mut to = to.chunks_exact_mut(LINE);
    let mut from = from.chunks_exact(LINE);
    for (to, from) in to.by_ref().zip(from.by_ref()) {
        for at in (0..LINE).step_by(WORD) {
            // SAFETY: both have LINE bytes, and `to` begins at a multiple of them. All x86-64 has SSE2.
            unsafe {
                let word = _mm_loadu_si128(from.as_ptr().add(at).cast());
                _mm_stream_si128(to.as_mut_ptr().add(at).cast(), word);
            }
        }
    }
    // SAFETY: it has no operand. Other threads see what was written once they know that this one has returned.
    unsafe { _mm_sfence() };
    to.into_remainder().copy_from_slice(from.remainder());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_bytes_arrive_wherever_they_begin_and_end() {
        let from: Vec<u8> = (0..1009).map(|number| number as u8).collect();
        for start in 0..LINE + 1 {
            for length in [0, 1, 15, 63, 64, 65, 127, 128, 700] {
                let mut to = vec![0xff; 1009];
                copy_around_caches(&mut to[start..start + length], &from[..length]);
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
