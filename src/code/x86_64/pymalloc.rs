//! Instructions of x86-64 by which CPython's allocator takes a slot of a pool and gives one back.

mod body;

use std::collections::HashSet;
use std::fs::File;
use std::ops::Range;

use anyhow::Result;
use iced_x86::Register;

use self::body::{Body, Found, InlinedPymalloc};
use super::jumps;
use crate::code::elf::{self, MAX_FUNCTION};
use crate::code::elf_file::read_at;
use crate::code::limits::Deadline;
use crate::code::pymalloc::{Pymalloc, SlotOp, SlotProbe};

/// Largest amount of code that is searched, in bytes; an interpreter has 4 to 8 MB.
const MAX_CODE: u64 = 32 << 20;

/// Finds the places of pymalloc in a file whose functions are at these addresses. Returns None if the code is not as
/// expected, so that probes would miss some objects.
///
/// # Errors
/// If the code cannot be read, or the search takes too long.
pub fn places(file: &File, functions: &[Range<u64>]) -> Result<Option<Pymalloc>> {
    let segments = elf::code_segments(file)?;
    let size = |range: &Range<u64>| range.end.saturating_sub(range.start);
    let all: u64 = segments.iter().map(|segment| segment.size).sum();
    let searched = functions.iter().map(size).fold(0, u64::saturating_add);
    // Functions that overlap would have the same code decoded again and again.
    if all > MAX_CODE || searched > all || functions.iter().any(|one| size(one) > MAX_FUNCTION) {
        return Ok(None);
    }
    let deadline = Deadline::start();
    let mut search = Search::default();
    for segment in &segments {
        let code = read_at(file, segment.file_offset, segment.size as usize)?;
        let Range { start, end } = segment.range();
        let own = functions
            .iter()
            .filter(|function| segment.has(function.start) && function.end <= end);
        let to_offset = |address| segment.file_offset_of(address);
        for function in own {
            deadline.check()?;
            let bytes = (function.start - start) as usize..(function.end - start) as usize;
            if !search.add(&Body::decode(function.clone(), &code[bytes]), to_offset) {
                return Ok(None);
            }
        }
    }
    let Some(new_pool) = search.new_pool() else {
        return Ok(None);
    };
    let windows: Vec<(Range<u64>, usize)> = (0..)
        .zip(&search.probed)
        .filter_map(|(index, probed)| {
            let jump = probed.jump.as_ref()?;
            Some((probed.change.address + 1..jump.address + 1, index))
        })
        .collect();
    for index in jumps::windows_with_jump_target(file, &segments, windows)? {
        search.probed[index].jump = None;
    }
    let mut slots: Vec<SlotProbe> = search.probed.iter().map(Probed::place).collect();
    slots.sort_by_key(|slot| slot.file_offset);
    Ok(Some(Pymalloc { slots, new_pool }))
}

/// Copy of pymalloc with the instructions at which it can be probed.
struct Probed {
    moves: SlotOp,
    pool: Register,
    /// Instruction that changes the count.
    change: Place,
    /// Jump that costs a probe less, and is executed once after each change, unless other jumps lead there.
    jump: Option<Place>,
}

/// Instruction that can be probed.
struct Place {
    address: u64,
    file_offset: u64,
    slot: Option<Register>,
}

impl Probed {
    fn new(body: &Body, copy: &InlinedPymalloc, file_offset: impl Fn(u64) -> u64) -> Self {
        let place = |at: usize, slot| {
            let address = body.instructions[at].ip();
            Place {
                address,
                file_offset: file_offset(address),
                slot,
            }
        };
        let jump = body.jump_behind(copy);
        Self {
            moves: copy.moves,
            pool: copy.pool,
            change: place(copy.change, None),
            jump: jump.map(|(jump, slot)| place(jump, slot)),
        }
    }

    fn place(&self) -> SlotProbe {
        let number = |register: Register| register.number() as u8;
        let at = self.jump.as_ref().unwrap_or(&self.change);
        SlotProbe {
            file_offset: at.file_offset,
            moves: self.moves,
            pool: number(self.pool),
            slot: at.slot.map(number),
        }
    }
}

/// Search through the functions of a file.
#[derive(Default)]
struct Search {
    probed: Vec<Probed>,
    /// Functions that may make pools: address, and bytes in the file.
    makers: Vec<(u64, Range<u64>)>,
    /// Addresses of the functions that are called where a slot is taken.
    called: HashSet<u64>,
    /// Whether a function that gives back a slot computes the address of a pool of 16 KiB.
    masks_pools: bool,
}

impl Search {
    /// Adds a function. Returns false if a copy of pymalloc is in an unknown order.
    fn add(&mut self, body: &Body, file_offset: impl Fn(u64) -> u64) -> bool {
        let (mut counted, mut moves) = (HashSet::new(), HashSet::new());
        for found in body.copies() {
            let Found::Copy(copy) = found else {
                return false;
            };
            counted.insert(copy.store);
            moves.insert(copy.moves);
            self.probed.push(Probed::new(body, &copy, &file_offset));
        }
        if moves.contains(&SlotOp::Alloc) {
            self.called.extend(body.calls());
        }
        self.masks_pools |= moves.contains(&SlotOp::Free) && body.masks_pools();
        if body.makes_pools(&counted) {
            let Range { start, end } = body.range;
            let first = file_offset(start);
            self.makers.push((start, first..first + (end - start)));
        }
        true
    }

    /// Returns the bytes of the function that makes pools. Returns None if there is not just one such function, or if
    /// the rest of pymalloc was not found.
    fn new_pool(&self) -> Option<Range<u64>> {
        let makers = self.makers.iter();
        let mut makers = makers.filter(|(start, _)| self.called.contains(start));
        let (_, bytes) = makers.next().filter(|_| self.masks_pools)?;
        makers.next().is_none().then(|| bytes.clone())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Code that takes a slot, as in PyObject_Malloc of CPython 3.11 by GCC 12.
    const TAKE: &[u8] = &[
        0x48, 0x8b, 0x72, 0x10, // mov 0x10(%rdx),%rsi
        0x48, 0x39, 0xf2, // cmp %rsi,%rdx
        0x74, 0x14, // je to the call
        0x48, 0x8b, 0x42, 0x08, // mov 0x8(%rdx),%rax
        0x83, 0x02, 0x01, // addl $0x1,(%rdx)
        0x48, 0x8b, 0x08, // mov (%rax),%rcx
        0x48, 0x89, 0x4a, 0x08, // mov %rcx,0x8(%rdx)
        0x48, 0x85, 0xc9, // test %rcx,%rcx
        0x74, 0x06, // je to the end
        0xc3, // ret
        0xe8, 0x24, 0x00, 0x00, 0x00, // call MAKE
        0xc3, // ret
    ];
    /// Code that gives a slot back, as in PyObject_Free.
    const GIVE_BACK: &[u8] = &[
        0x48, 0x89, 0xfe, // mov %rdi,%rsi
        0x48, 0x81, 0xe6, 0x00, 0xc0, 0xff, 0xff, // and $-0x4000,%rsi
        0x48, 0x8b, 0x56, 0x08, // mov 0x8(%rsi),%rdx
        0x48, 0x89, 0x17, // mov %rdx,(%rdi)
        0x8b, 0x06, // mov (%rsi),%eax
        0x48, 0x89, 0x7e, 0x08, // mov %rdi,0x8(%rsi)
        0x83, 0xe8, 0x01, // sub $0x1,%eax
        0x89, 0x06, // mov %eax,(%rsi)
        0x48, 0x85, 0xd2, // test %rdx,%rdx
        0x74, 0x01, // je to the end
        0xc3, // ret
        0xc3, // ret
    ];
    /// Code that makes a pool, as in allocate_from_new_pool.
    const MAKE: &[u8] = &[
        0xc7, 0x00, 0x01, 0x00, 0x00, 0x00, // movl $0x1,(%rax)
        0x39, 0xcd, // cmp %ecx,%ebp
        0x74, 0x01, // je to the load
        0xc3, // ret
        0x48, 0x8b, 0x58, 0x08, // mov 0x8(%rax),%rbx
        0x48, 0x8b, 0x13, // mov (%rbx),%rdx
        0x48, 0x89, 0x50, 0x08, // mov %rdx,0x8(%rax)
        0xc3, // ret
    ];
    const RAX: u8 = 0;
    const RDX: u8 = 2;
    const RSI: u8 = 6;
    const START: u64 = 0x40_0000;

    /// Search through functions that are one behind the other. None if one is in an unknown order.
    fn search(functions: &[&[u8]]) -> Option<Search> {
        let mut search = Search::default();
        let mut start = START;
        for code in functions {
            let end = start + code.len() as u64;
            let body = Body::decode(start..end, code);
            search.add(&body, |address| address - START).then_some(())?;
            start = end;
        }
        Some(search)
    }

    fn places(search: &Search) -> Vec<SlotProbe> {
        search.probed.iter().map(Probed::place).collect()
    }

    #[test]
    fn slots_are_seen_at_the_jump_behind_their_count() {
        let found = search(&[TAKE, GIVE_BACK, MAKE]).expect("a known order");
        let taken = SlotProbe {
            file_offset: 0x1a,
            moves: SlotOp::Alloc,
            pool: RDX,
            slot: Some(RAX),
        };
        let given_back = SlotProbe {
            file_offset: 0x42,
            moves: SlotOp::Free,
            pool: RSI,
            slot: None,
        };
        assert_eq!(places(&found), [taken, given_back]);
        assert_eq!(found.new_pool(), Some(0x46..0x5d));
    }

    #[test]
    fn slots_are_seen_at_the_count_where_the_jump_is_of_no_use() {
        // mov %rbx,%rax, before the test: the slot's register is overwritten.
        let overwritten = [&TAKE[..0x17], &[0x48, 0x89, 0xd8], &TAKE[0x17..]].concat();
        let found = search(&[&overwritten]).expect("a known order");
        let at_count = SlotProbe {
            file_offset: 0xd,
            moves: SlotOp::Alloc,
            pool: RDX,
            slot: None,
        };
        assert_eq!(places(&found), [at_count]);
        let mut led_into = search(&[TAKE]).expect("a known order");
        led_into.probed[0].jump = None;
        assert_eq!(places(&led_into), [at_count]);
    }

    #[test]
    fn an_unknown_order_is_refused() {
        // The next slot is stored before the count is changed.
        let load = &TAKE[0x9..0xd];
        let (count, next, store) = (&TAKE[0xd..0x10], &TAKE[0x10..0x13], &TAKE[0x13..0x17]);
        let order = |parts: [&[u8]; 4]| search(&[&parts.concat()]).map(|found| found.probed.len());
        assert_eq!(order([load, count, next, store]), Some(1));
        assert_eq!(order([count, load, next, store]), Some(1));
        assert_eq!(order([load, next, count, store]), Some(1));
        assert_eq!(order([load, next, store, count]), None);
    }

    #[test]
    fn all_parts_of_pymalloc_have_to_be_there() {
        let is_complete =
            |functions: &[&[u8]]| search(functions).is_some_and(|found| found.new_pool().is_some());
        assert!(is_complete(&[TAKE, GIVE_BACK, MAKE]));
        assert!(!is_complete(&[TAKE, GIVE_BACK]));
        assert!(!is_complete(&[GIVE_BACK, MAKE]));
        // Nobody calls it.
        assert!(!is_complete(&[GIVE_BACK, TAKE, MAKE]));
        // and $-0x1000,%rsi: pools of 4 KiB.
        let mut small = GIVE_BACK.to_vec();
        small[7] = 0xf0;
        assert!(!is_complete(&[TAKE, &small, MAKE]));
    }

    #[test]
    fn other_counts_are_left_alone() {
        // Objects whose deallocation was put off: a list in the first object's header.
        let put_off = [
            0x48, 0x8b, 0x47, 0x08, // mov 0x8(%rdi),%rax
            0x48, 0x8b, 0x4f, 0xf8, // mov -0x8(%rdi),%rcx
            0x48, 0x89, 0x4f, 0x08, // mov %rcx,0x8(%rdi)
            0x83, 0x2f, 0x01, // subl $0x1,(%rdi)
            0xc3, // ret
        ];
        let found = search(&[&put_off]).expect("no copy");
        assert!(found.probed.is_empty());
    }
}
