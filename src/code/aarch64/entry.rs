//! The instructions with which a function of arm64 begins, and which of them a uprobe may be on.
//!
//! Functions are probed at their entries alone. Behind `paciasp`, which signs the return address, a return probe
//! would have the function authenticate the kernel's address, and the process ends; behind the store of the return
//! address, the return probe sees nothing.

use std::sync::LazyLock;

use crate::code::probe_point::ProbePoint;

/// Whether the kernel turns a `nop` under a probe into a call. No kernel does so on arm64.
pub(crate) static CHANGES_NOPS: LazyLock<bool> = LazyLock::new(|| false);

/// Returns the entry of the function that begins with this code. Returns None if the kernel has no way to execute its
/// first instruction: such a probe is never hit, without an error.
pub(crate) fn nearest(head: &[u8], _changes_nops: bool) -> Option<ProbePoint> {
    let refused = head
        .first_chunk()
        .is_some_and(|first| is_refused(u32::from_le_bytes(*first)));
    (!refused).then_some(ProbePoint::ENTRY)
}

/// Returns the first cheap place behind the entry: none.
pub(crate) fn candidate(_code: &[u8], _arguments: &[u8]) -> Option<ProbePoint> {
    None
}

/// Whether kernels refuse a uprobe on an instruction (aarch64_insn_is_steppable() and
/// arm_probe_decode_insn() in arch/arm64/kernel/probes/decode-insn.c): loads relative to the program counter,
/// exclusive loads and stores, and system instructions other than hints and reads of registers.
fn is_refused(instruction: u32) -> bool {
    let is = |mask, value| instruction & mask == value;
    // ldr, ldrsw, prfm of a literal
    is(0x3b00_0000, 0x1800_0000)
        // ldxr, stxr, ldaxr and so on, ldar, stlr
        || is(0x3f00_0000, 0x0800_0000)
        // svc, hvc, smc, brk, hlt
        || is(0xff00_0000, 0xd400_0000)
        // msr of an immediate, of a register; sys
        || is(0xfff8_f01f, 0xd500_401f)
        || is(0xfff0_0000, 0xd510_0000)
        || is(0xfff8_0000, 0xd508_0000)
        // retaa, retab; braa, blraa and so on; eret
        || is(0xffff_fbff, 0xd65f_0bff)
        || is(0xfe9f_f800, 0xd61f_0800)
        || is(0xfffe_0000, 0xd69e_0000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_probe_is_at_the_entry_or_nowhere() {
        // bti c; paciasp; stp x29,x30,[sp,#-32]!; sub sp,sp,#32; cbz x0; adrp; mov x1,x0; ret; mrs x1,tpidr_el0; b
        for probed in [
            0xd503_245f,
            0xd503_233f,
            0xa9be_7bfd,
            0xd100_83ff,
            0xb400_0040,
            0x9000_0000,
            0xaa00_03e1,
            0xd65f_03c0,
            0xd53b_d041,
            0x1400_0004_u32,
        ] {
            let place = nearest(&probed.to_le_bytes(), false);
            assert_eq!(place, Some(ProbePoint::ENTRY), "{probed:x}");
        }
        // ldr x0,literal; ldxr x1,[x0]; svc #0; retaa; brk #1; msr tpidr_el0,x0; braaz x0; eret
        for refused in [
            0x5800_0040,
            0xc85f_7c01,
            0xd400_0001,
            0xd65f_0bff,
            0xd420_0020,
            0xd51b_d040,
            0xd61f_081f,
            0xd69f_03e0_u32,
        ] {
            assert_eq!(nearest(&refused.to_le_bytes(), false), None, "{refused:x}");
        }
        assert_eq!(nearest(&[], false), Some(ProbePoint::ENTRY));
        assert_eq!(candidate(&[0; 8], &[1]), None);
    }
}
