//! Heaps of the code that HotSpot generates, and the descriptions of the blocks in these heaps.

use anyhow::{Context, Result, ensure};

use super::vm_structs::VmStructs;
use crate::bpf::types::{hotspot_heap, hotspot_layout, hotspot_process};
use crate::interpreters::memory::Memory;

/// Maximum number of heaps that the BPF side supports.
const HEAPS: usize = hotspot_layout::HOTSPOT_HEAPS.0 as usize;
/// Maximum number of steps through a heap's segment map.
const STEPS: u32 = hotspot_layout::HOTSPOT_ROUNDS.0 * hotspot_layout::HOTSPOT_ROUND_STEPS.0;
/// Entry of the segment map for a segment that is in no block.
const FREE: u8 = hotspot_layout::HOTSPOT_FREE.0 as u8;
/// Name of the block that holds the interpreter.
const INTERPRETER: &str = "Interpreter";
/// Prefix of the name of the block that holds the stubs of continuations.
const CONTINUATION: &str = "StubRoutines (continuation";
/// Maximum number of blocks, from the beginning of the heap, that are searched for the stubs of continuations. The
/// stubs were in the seventh block.
const STUB_BLOCKS: u32 = 256;
/// Maximum size of one heap, in bytes: HotSpot's own limit is 2 GiB for all heaps.
const MAX_HEAP_BYTES: u64 = 2 << 30;

/// Finds the generated code of a process, for the BPF side. None if the virtual machine is not initialized yet.
///
/// # Errors
/// If the memory cannot be read, or does not have the layout of a known version. The message continues the words "a
/// HotSpot".
pub(super) fn find(memory: &Memory, structs: &VmStructs) -> Result<Option<hotspot_process>> {
    let mut process = hotspot_process {
        blob: u16::try_from(structs.size("HeapBlock")?).context("with large blocks")?,
        frame_size: structs.offset("CodeBlob", "_frame_size")?,
        ..Default::default()
    };
    describe_code(structs, &mut process)?;
    let heaps = heaps(memory, structs)?;
    for (place, heap) in process.heaps.iter_mut().zip(&heaps) {
        *place = *heap;
    }
    let Some((start, end)) = interpreter(memory, structs)? else {
        return Ok(None);
    };
    if heaps.is_empty() {
        return Ok(None);
    }
    (process.interpreter, process.interpreter_end) = (start, end);
    // If the lookup of the BPF side leads to the right name, the layout is understood.
    let block = block(memory, &process, start)?.context("whose code is not found")?;
    let name = name_of_blob(memory, structs, block.wrapping_add(process.blob.into()))?;
    ensure!(name == INTERPRETER, "whose interpreter is called {name:?}");
    (process.continuation, process.continuation_end) =
        continuation_stubs(memory, structs, &process)?.unwrap_or_default();
    Ok(Some(process))
}

/// Finds the fields in a block's description for the start of its code and for the offset where the frame is
/// complete. The fields depend on the version.
fn describe_code(structs: &VmStructs, process: &mut hotspot_process) -> Result<()> {
    let complete = structs.field("CodeBlob", "_frame_complete_offset");
    process.frame_complete_bytes = match complete.map(|field| field.kind.as_str()) {
        Some("int") => 4,
        Some("int16_t" | "short") => 2,
        _ => anyhow::bail!("without CodeBlob::_frame_complete_offset"),
    };
    process.frame_complete = structs.offset("CodeBlob", "_frame_complete_offset")?;
    (process.code, process.code_bytes) = match structs.offset("CodeBlob", "_code_begin") {
        Ok(pointer) => (pointer, 8),
        Err(_) => (structs.offset("CodeBlob", "_code_offset")?, 4),
    };
    Ok(())
}

/// Reads the heaps of code, at most [`HEAPS`] ones. Empty before the virtual machine has created them.
fn heaps(memory: &Memory, structs: &VmStructs) -> Result<Vec<hotspot_heap>> {
    let heaps = memory.word(structs.at("CodeCache", "_heaps")?)?;
    if heaps == 0 {
        return Ok(Vec::new());
    }
    let count = int(
        memory,
        heaps.wrapping_add(structs.at("GrowableArrayBase", "_len")?),
    )?;
    ensure!(count as usize <= HEAPS, "with {count} code heaps");
    let first = memory.word(heaps.wrapping_add(structs.at("GrowableArray<int>", "_data")?))?;
    (0..u64::from(count))
        .map(|number| {
            heap(
                memory,
                structs,
                memory.word(first.wrapping_add(8 * number))?,
            )
        })
        .collect()
}

fn heap(memory: &Memory, structs: &VmStructs, heap: u64) -> Result<hotspot_heap> {
    let of = |part: &str, field: &str| -> Result<u64> {
        let part = heap.wrapping_add(structs.at("CodeHeap", part)?);
        memory.word(part.wrapping_add(structs.at("VirtualSpace", field)?))
    };
    let shift = structs.at("CodeHeap", "_log2_segment_size")?;
    let found = hotspot_heap {
        start: of("_memory", "_low_boundary")?,
        end: of("_memory", "_high_boundary")?,
        map: of("_segmap", "_low")?,
        segment_shift: int(memory, heap.wrapping_add(shift))?,
        reserved: 0,
    };
    let size = found.end.checked_sub(found.start);
    let makes_sense = size.is_some_and(|size| size <= MAX_HEAP_BYTES)
        && found.map != 0
        && (3..=16).contains(&found.segment_shift);
    ensure!(makes_sense, "with inconsistent code heaps");
    Ok(found)
}

/// Returns the address range of the interpreter's code. None before the code is generated.
fn interpreter(memory: &Memory, structs: &VmStructs) -> Result<Option<(u64, u64)>> {
    let queue = memory.word(structs.at("AbstractInterpreter", "_code")?)?;
    if queue == 0 {
        return Ok(None);
    }
    let start = memory.word(queue.wrapping_add(structs.at("StubQueue", "_stub_buffer")?))?;
    let limit = structs.at("StubQueue", "_buffer_limit")?;
    let bytes = int(memory, queue.wrapping_add(limit))?;
    Ok((bytes > 0).then(|| (start, start.wrapping_add(bytes.into()))))
}

/// Finds the code that copies a virtual thread's frames from Java's heap back to the stack. None if no such code
/// exists: before JDK 21, and with `-XX:-VMContinuations`.
fn continuation_stubs(
    memory: &Memory,
    structs: &VmStructs,
    process: &hotspot_process,
) -> Result<Option<(u64, u64)>> {
    let has_interpreter =
        |heap: &&hotspot_heap| (heap.start..heap.end).contains(&process.interpreter);
    let heap = process.heaps.iter().find(has_interpreter);
    let heap = heap.context("whose interpreter is in no heap")?;
    let length = structs.at("HeapBlock::Header", "_length")?;
    let mut block = heap.start;
    for _ in 0..STUB_BLOCKS {
        // The memory after the last block may not be mapped yet.
        let segments = int(memory, block.wrapping_add(length)).unwrap_or(0);
        let end = block.wrapping_add(u64::from(segments) << heap.segment_shift);
        // A block that is free, or has just been allocated, has no name.
        let name = name_of_blob(memory, structs, block.wrapping_add(process.blob.into()));
        if name.is_ok_and(|name| name.starts_with(CONTINUATION)) {
            return Ok(Some((block, end)));
        }
        if segments == 0 {
            break;
        }
        block = end;
    }
    // If continuations are in use, which not all versions tell, their stubs must exist.
    if let Some(returns_to) = structs.field("ContinuationEntry", "_return_pc") {
        let used = memory.word(returns_to.at)? != 0;
        ensure!(!used, "whose continuations' code is not found");
    }
    Ok(None)
}

/// Returns the block that contains an address, by the same lookup as the BPF side. None if the address is in no
/// block.
pub(super) fn block(
    memory: &Memory,
    process: &hotspot_process,
    address: u64,
) -> Result<Option<u64>> {
    let mut heaps = process.heaps.iter();
    let Some(heap) = heaps.find(|heap| (heap.start..heap.end).contains(&address)) else {
        return Ok(None);
    };
    let mut segment = (address - heap.start) >> heap.segment_shift;
    for _ in 0..STEPS {
        let [back] = memory.bytes(heap.map.wrapping_add(segment))?;
        match back {
            0 => return Ok(Some(heap.start + (segment << heap.segment_shift))),
            FREE => return Ok(None),
            _ => {}
        }
        let Some(before) = segment.checked_sub(back.into()) else {
            return Ok(None);
        };
        segment = before;
    }
    Ok(None)
}

/// Returns the name of a block's `CodeBlob`.
pub(super) fn name_of_blob(memory: &Memory, structs: &VmStructs, blob: u64) -> Result<String> {
    const MAX_NAME: usize = 64;
    let name = blob.wrapping_add(structs.at("CodeBlob", "_name")?);
    memory.c_string(memory.word(name)?, MAX_NAME)
}

fn int(memory: &Memory, address: u64) -> Result<u32> {
    memory.bytes(address).map(u32::from_ne_bytes)
}
