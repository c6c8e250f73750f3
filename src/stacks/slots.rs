//! Number of slots, each of which holds a stack that a BPF program is taking (`bpf/include/stack_table.bpf.h`).
//!
//! A thread holds its slot from the first frame to the last. On each CPU, one thread at a time takes a stack. Where a
//! thread can be preempted meanwhile, others on its CPU take stacks, too.

use anyhow::Result;
use libbpf_rs::{OpenMapMut, num_possible_cpus};

use crate::bpf::kernel_support;
use crate::bpf::map_create;

/// Slots for each CPU that may come online: half of them are free.
const PER_CPU: u32 = 2;
/// Minimum number of slots. A program that interrupts another one on the same CPU needs a slot of its own.
const MIN: u32 = 128;
/// Slots for each CPU where the kernel preempts threads at any time. Threads that wait for a CPU hold slots, too.
const PER_CPU_PREEMPTIBLE: u32 = 4;
/// Minimum number of slots where the kernel preempts threads at any time.
const MIN_PREEMPTIBLE: u32 = 1024;
/// Maximum number of slots, at 12 KB each with those for frames of Python.
const MAX: u32 = 1 << 15;

/// Returns the number of slots for this machine, a power of two.
///
/// # Errors
/// If the number of possible CPUs cannot be read.
pub fn count() -> Result<u32> {
    let cpus = u32::try_from(num_possible_cpus()?).unwrap_or(u32::MAX);
    Ok(count_for(cpus, kernel_support::preempts_at_any_time()))
}

fn count_for(cpus: u32, preemptible: bool) -> u32 {
    let (per_cpu, min) = match preemptible {
        true => (PER_CPU_PREEMPTIBLE, MIN_PREEMPTIBLE),
        false => (PER_CPU, MIN),
    };
    cpus.saturating_mul(per_cpu)
        .clamp(min, MAX)
        .next_power_of_two()
}

/// Sizes an opened skeleton's maps of slots before load. Those in `with_spare` have one entry more, which is for user
/// space.
///
/// # Errors
/// If libbpf refuses a size.
pub fn set_capacity<const MAPS: usize, const SPARE: usize>(
    count: u32,
    maps: [&mut OpenMapMut<'_>; MAPS],
    with_spare: [&mut OpenMapMut<'_>; SPARE],
) -> Result<()> {
    for map in maps {
        map_create::set_capacity(map, count)?;
    }
    for map in with_spare {
        map_create::set_capacity(map, count + 1)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Slots that a thread tries to take: STACK_PROBES.
    const PROBES: u32 = 16;

    /// Pseudo-random numbers, the same in each run.
    struct Random(u64);

    impl Random {
        fn below(&mut self, limit: u32) -> u32 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (((self.0 >> 32) * u64::from(limit)) >> 32) as u32
        }
    }

    /// Returns how many of `walks` walks found no slot among `slots`. Each of these threads is in a walk for
    /// `percent` of its time.
    fn lost(threads: &[u32], percent: u32, slots: u32, walks: u32) -> u32 {
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        let mut held = vec![false; slots as usize];
        let mut slot_of = vec![None; threads.len()];
        let (mut begun, mut lost) = (0, 0);
        while begun < walks {
            let number = random.below(threads.len() as u32) as usize;
            let walks_now = random.below(100) < percent;
            if let Some(slot) = slot_of[number].take() {
                held[slot as usize] = false;
            }
            if walks_now {
                begun += 1;
                let thread = threads[number];
                let step = thread / slots * 2 + 1;
                let mut tried =
                    (0..PROBES).map(|probe| thread.wrapping_add(probe.wrapping_mul(step)) % slots);
                slot_of[number] = tried.find(|&slot| !held[slot as usize]);
                match slot_of[number] {
                    Some(slot) => held[slot as usize] = true,
                    None => lost += 1,
                }
            }
        }
        lost
    }

    #[test]
    fn fewer_than_one_walk_in_ten_thousand_finds_no_slot() {
        const WALKS: u32 = 1_000_000;
        let mut random = Random(1);
        for (cpus, preemptible, threads) in [
            (2, false, 2),
            (64, false, 64),
            (512, false, 512),
            (2, true, 512),
            (512, true, 1024),
        ] {
            let slots = count_for(cpus, preemptible);
            let in_order: Vec<u32> = (0..threads).map(|number| 4_000_000 + number).collect();
            let any: Vec<u32> = (0..threads).map(|_| random.below(1 << 22)).collect();
            for (threads, percent) in [(&in_order, 40), (&in_order, 95), (&any, 40), (&any, 95)] {
                let lost = lost(threads, percent, slots, WALKS);
                assert!(
                    lost < WALKS / 10_000,
                    "{cpus} CPUs, {} threads, {percent} %: {lost} lost of {WALKS}, {slots} slots",
                    threads.len()
                );
            }
        }
        // The simulation shows what too few slots would do.
        let any: Vec<u32> = (0..512).map(|_| random.below(1 << 22)).collect();
        assert!(lost(&any, 40, 128, WALKS) > WALKS / 100);
    }

    #[test]
    fn the_number_is_a_power_of_two_for_any_machine() {
        for cpus in [1, 2, 3, 64, 129, 512, 8192, u32::MAX] {
            for preemptible in [false, true] {
                assert!(count_for(cpus, preemptible).is_power_of_two(), "{cpus}");
            }
        }
        assert_eq!((count_for(2, false), count_for(2, true)), (128, 1024));
        assert_eq!((count_for(512, false), count_for(512, true)), (1024, 2048));
    }
}
