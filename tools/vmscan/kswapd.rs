//! Time of kswapd in each interval: one operation of kswapd can last many seconds.

use anyhow::Result;
use libbpf_rs::MapMut;
use memtools::bpf::{map_batch, types};
use memtools::print::clock;

use crate::bpf::types::{call, operation as Operation};
use crate::totals::Totals;

/// Limit on the reads of the maps, which are repeated until no operation ends between two of them.
const LOOKS: u32 = 4;

/// Time of kswapd that was booked so far, also of operations that have not ended. The sum of all bookings is the time
/// that the operations took.
#[derive(Debug, Default)]
pub(crate) struct ReportedTime {
    ns: u64,
}

impl ReportedTime {
    /// Books the time that was added since the last call, and returns it.
    pub(crate) fn book(&mut self, total_ns: u64) -> u64 {
        // The total can be less than before: an operation was in neither of the two maps, and its time comes with the
        // next interval.
        let more = total_ns.saturating_sub(self.ns);
        self.ns += more;
        more
    }
}

/// Returns the totals, the time of kswapd in nanoseconds, and the moment up to which it is counted.
pub(crate) fn totals_and_time(
    totals: &MapMut<'_>,
    calls: &MapMut<'_>,
) -> Result<(Totals, u64, u64)> {
    let ended = |totals: &Totals| totals.of(Operation::OPERATION_KSWAPD);
    let mut before = Totals::read(totals)?;
    let mut look = 1;
    loop {
        let now_ns = clock::monotonic_ns();
        let running_ns = running_ns(calls, now_ns)?;
        let after = Totals::read(totals)?;
        if look == LOOKS || ended(&before).count == ended(&after).count {
            let time_ns = ended(&before).time_ns + running_ns;
            return Ok((before, time_ns, now_ns));
        }
        before = after;
        look += 1;
    }
}

/// Returns how long the current operations of kswapd have taken so far. There is one kswapd for each node.
fn running_ns(calls: &MapMut<'_>, now_ns: u64) -> Result<u64> {
    let mut sum = 0;
    map_batch::for_each(calls, |key, value| {
        let call: &call = types::view(key)?;
        if call.operation == Operation::OPERATION_KSWAPD.0 {
            sum += now_ns.saturating_sub(*types::view::<u64>(value)?);
        }
        Ok(())
    })?;
    Ok(sum)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_booked_adds_up_to_the_total() {
        let mut booked = ReportedTime::default();
        let mut sum = 0;
        for (total, expected) in [(700, 700), (1700, 1000), (1600, 0), (2900, 1200)] {
            let more = booked.book(total);
            assert_eq!(more, expected, "at {total}");
            sum += more;
        }
        assert_eq!(sum, 2900);
    }
}
