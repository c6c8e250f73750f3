//! Functions that HotSpot has inlined into others, by the debug information of the compiled code.
//!
//! For each call in compiled code, HotSpot keeps the Java functions that contain the call. They form a chain of
//! scopes, innermost first. Each scope has its `Method`, the bytecode of the call, and the offset of the next scope.
//! Numbers in a scope take one to five bytes.

use std::collections::HashSet;
use std::ops::Range;

use anyhow::{Context, Result, ensure};

use super::numbers::{MAX_NUMBER_BYTES, Numbers};
use super::vm_structs::VmStructs;
use crate::interpreters::memory::Memory;

/// Maximum depth of inlined functions: the compilers stop at some tens.
const MAX_DEPTH: usize = 256;
/// Maximum size of the places (`PcDesc`) of one function's debug information, in bytes.
const MAX_PC_DESC_BYTES: u64 = 16 << 20;
/// Maximum number of scopes that are read to find out whether any function is inlined.
const MAX_SCOPES: usize = 4096;
/// Bytes of a scope that are read: its first three numbers, which are the offset of the next scope, the `Method` and
/// the bytecode.
const SCOPE_BYTES: usize = 3 * MAX_NUMBER_BYTES;

/// Java function that contains a call.
pub(super) struct Scope {
    /// The address of its `Method`.
    pub(super) method: u64,
    /// The index of the bytecode of the call.
    pub(super) bytecode: u32,
}

/// Debug information of one compiled function.
pub(super) struct Scopes<'a> {
    memory: &'a Memory,
    /// Offsets of places in the code, ascending, each with the offset of its scope; `PcDesc`.
    places: Vec<(i32, i32)>,
    /// The address of the scopes.
    data: u64,
    /// The address of the array of pointers to `Method`s. Scopes refer to it by index, from 1.
    methods: u64,
    /// The compiled function's own `Method`.
    own: u64,
    numbers: Numbers,
}

impl<'a> Scopes<'a> {
    /// Reads the debug information of the compiled function whose description is at `blob`.
    ///
    /// # Errors
    /// If the memory cannot be read, or the debug information of this version is not supported.
    pub(super) fn of(memory: &'a Memory, structs: &VmStructs, blob: u64, own: u64) -> Result<Self> {
        let (range, data, methods) = parts(memory, structs, blob)?;
        let bytes = range.end.checked_sub(range.start);
        let bytes = bytes.filter(|&bytes| bytes <= MAX_PC_DESC_BYTES);
        let bytes = bytes.context("debug information without an end")?;
        let places = memory.read(range.start, bytes as usize)?;
        let size = usize::try_from(structs.size("PcDesc")?)?;
        let field = |name| structs.offset("PcDesc", name).map(usize::from);
        let (offset, scope) = (field("_pc_offset")?, field("_scope_decode_offset")?);
        ensure!(
            offset.max(scope) + size_of::<i32>() <= size,
            "places of {size} bytes"
        );
        let places = places.chunks_exact(size);
        let places = places.map(|place| (int(place, offset), int(place, scope)));
        Ok(Self {
            memory,
            places: places.collect(),
            data,
            methods,
            own,
            numbers: Numbers::of(memory, structs)?,
        })
    }

    /// Returns the functions that contain the call that returns to this offset. The inlined functions come first,
    /// from the innermost on; the compiled function itself is last. None if the offset has no debug information.
    ///
    /// # Errors
    /// If the memory cannot be read, or is inconsistent.
    pub(super) fn at_call(&self, offset: u64) -> Result<Option<Vec<Scope>>> {
        let Ok(offset) = i32::try_from(offset) else {
            return Ok(None);
        };
        let found = self
            .places
            .binary_search_by_key(&offset, |&(offset, _)| offset);
        let scope = found.ok().map(|at| self.places[at].1);
        let chain = scope.map(|scope| self.chain(scope)).transpose()?;
        Ok(chain.filter(|chain| !chain.is_empty()))
    }

    /// Returns whether any function is inlined. Returns true if there are too many scopes to check.
    ///
    /// # Errors
    /// If the memory cannot be read, or is inconsistent.
    pub(super) fn any(&self) -> Result<bool> {
        let scopes: HashSet<i32> = self.places.iter().map(|&(_, scope)| scope).collect();
        if scopes.len() > MAX_SCOPES {
            return Ok(true);
        }
        for scope in scopes {
            if self.chain(scope)?.len() > 1 {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads a scope and the scopes around it; the last one is the compiled function's own. Scope 0 means that there
    /// is no information: the result is empty.
    fn chain(&self, scope: i32) -> Result<Vec<Scope>> {
        let (mut chain, mut scope) = (Vec::new(), u64::try_from(scope)?);
        while scope != 0 {
            ensure!(chain.len() < MAX_DEPTH, "a chain without an end");
            let bytes: [u8; SCOPE_BYTES] = self.memory.bytes(self.data.wrapping_add(scope))?;
            let (around, rest) = self.numbers.read(&bytes).context("no number")?;
            let (method, rest) = self.numbers.read(rest).context("no number")?;
            let (bytecode, _) = self.numbers.read(rest).context("no number")?;
            let method = method.checked_sub(1).context("a scope without a method")?;
            let method = self.methods.wrapping_add(8 * u64::from(method));
            chain.push(Scope {
                method: self.memory.word(method)?,
                // 0 encodes the point before the first bytecode.
                bytecode: bytecode.saturating_sub(1),
            });
            scope = around.into();
        }
        let is_own = |last: &Scope| last.method == self.own;
        ensure!(
            chain.last().is_none_or(is_own),
            "a chain that ends in another function"
        );
        Ok(chain)
    }
}

/// Returns the address range of the places, the address of the scopes, and the address of the array of `Method`s.
fn parts(memory: &Memory, structs: &VmStructs, blob: u64) -> Result<(Range<u64>, u64, u64)> {
    let word = |class: &str, field: &str| -> Result<u64> {
        memory.word(blob.wrapping_add(structs.at(class, field)?))
    };
    let offset = |class: &str, field: &str| -> Result<u64> {
        let at = blob.wrapping_add(structs.at(class, field)?);
        memory.bytes(at).map(u32::from_ne_bytes).map(u64::from)
    };
    let places = offset("nmethod", "_scopes_pcs_offset")?;
    // JDK 23 and later keep constant data in a separate block.
    if structs.field("nmethod", "_immutable_data").is_some() {
        let constant = word("nmethod", "_immutable_data")?;
        let data = constant.wrapping_add(offset("nmethod", "_scopes_data_offset")?);
        let methods = word("CodeBlob", "_mutable_data")?
            .wrapping_add(offset("CodeBlob", "_relocation_size")?);
        return Ok((constant.wrapping_add(places)..data, data, methods));
    }
    let end = offset("nmethod", "_dependencies_offset")?;
    let data = word("CompiledMethod", "_scopes_data_begin")?;
    let methods = offset("nmethod", "_metadata_offset")?;
    let at = |offset: u64| blob.wrapping_add(offset);
    Ok((at(places)..at(end), data, at(methods)))
}

/// Returns the 32-bit number at an offset of a place.
fn int(place: &[u8], at: usize) -> i32 {
    let bytes = place[at..].first_chunk().copied();
    i32::from_ne_bytes(bytes.unwrap_or_default())
}

#[cfg(test)]
impl Scopes<'_> {
    /// Returns the offsets of all places.
    pub(super) fn offsets(&self) -> impl Iterator<Item = u64> {
        let offsets = self.places.iter().map(|&(offset, _)| offset);
        offsets.filter_map(|offset| offset.try_into().ok())
    }
}
