//! Generated code of a virtual machine, read from the memory of its process: the function that each block belongs to.

use anyhow::{Context, Result};

use super::code_heaps;
use super::inlined::{Scope, Scopes};
use super::names::Function;
use super::vm_structs::{Tables, VmStructs};
use crate::bpf::types::hotspot_process;
use crate::code::lines::SourceLine;
use crate::interpreters::memory::Memory;
use crate::interpreters::raw_frame::RawFrame;
use crate::print::text;

/// Names of the blocks of compiled functions, and of the blocks with the code around native functions.
const COMPILED: [&str; 2] = ["nmethod", "native nmethod"];

/// Virtual machine whose memory can be read while its process lives.
pub(in crate::interpreters) struct Machine {
    pub(in crate::interpreters) memory: Memory,
    pub(in crate::interpreters) structs: VmStructs,
    pub(super) process: hotspot_process,
}

/// Block of generated code.
struct Block {
    /// The address of its description (`CodeBlob`).
    blob: u64,
    /// The name of its `CodeBlob`.
    kind: String,
    /// The address at which its code begins.
    start: u64,
}

impl Machine {
    /// Finds the virtual machine in recorded memory, by HotSpot's tables. None if it is not initialized.
    ///
    /// # Errors
    /// If the memory lacks a part of the virtual machine, or its layout is not known.
    pub(in crate::interpreters) fn recorded(
        memory: Memory,
        tables: Tables,
    ) -> Result<Option<Self>> {
        let Some(structs) = VmStructs::read_tables(&memory, tables)? else {
            return Ok(None);
        };
        let process = code_heaps::find(&memory, &structs)?;
        Ok(process.map(|process| Self {
            memory,
            structs,
            process,
        }))
    }

    /// Finds the block of generated code that contains an address.
    fn block(&self, address: u64) -> Result<Option<Block>> {
        let (memory, structs) = (&self.memory, &self.structs);
        let Some(block) = code_heaps::block(memory, &self.process, address)? else {
            return Ok(None);
        };
        let blob = block.wrapping_add(self.process.blob.into());
        let kind = code_heaps::name_of_blob(memory, structs, blob)?;
        let code = blob.wrapping_add(self.process.code.into());
        let start = match self.process.code_bytes {
            4 => blob.wrapping_add(u32::from_ne_bytes(memory.bytes(code)?).into()),
            _ => memory.word(code)?,
        };
        Ok(Some(Block { blob, kind, start }))
    }

    /// Returns the address of the `Method` that a block's code belongs to.
    fn method_of(&self, block: &Block) -> Result<u64> {
        let method = (self.structs.at("CompiledMethod", "_method"))
            .or_else(|_| self.structs.at("nmethod", "_method"))?;
        self.memory.word(block.blob.wrapping_add(method))
    }

    /// Returns the name of the function or stub at an address of generated code, and the address at which its code
    /// begins.
    pub(in crate::interpreters) fn code(&self, address: u64) -> Result<Option<Function>> {
        let Some(block) = self.block(address)? else {
            return Ok(None);
        };
        if !COMPILED.contains(&&*block.kind) {
            return Ok(
                (!block.kind.is_empty()).then(|| (text::display_name(&block.kind), block.start))
            );
        }
        let method = self.method(self.method_of(&block)?)?;
        Ok(Some((method.name()?, block.start)))
    }

    /// Returns the functions of a frame and their source lines: the inlined functions first, from the innermost on,
    /// and the executed function last. None if the frame is of no Java function.
    pub(in crate::interpreters) fn lines(
        &self,
        place: RawFrame,
    ) -> Result<Option<Vec<SourceLine>>> {
        const UNKNOWN: &str = "[inlined calls unknown]";
        if let RawFrame::Java { method, bytecode } = place {
            return Ok(Some(vec![self.method(method)?.line_of(bytecode)?]));
        }
        let instruction = place.instruction().context("no code of Java")?;
        let Some(block) = self
            .block(instruction)?
            .filter(|block| block.kind == COMPILED[0])
        else {
            return Ok(None);
        };
        let own = self.method_of(&block)?;
        let scopes = Scopes::of(&self.memory, &self.structs, block.blob, own)?;
        // The debug information for an address belongs to the call that returns there, not to the instruction at the
        // address.
        if let RawFrame::Return(address) = place
            && let Some(scopes) = scopes.at_call(address.wrapping_sub(block.start))?
        {
            let line = |scope: Scope| self.method(scope.method)?.line_at(Some(scope.bytecode));
            return Ok(Some(scopes.into_iter().map(line).collect::<Result<_>>()?));
        }
        let unknown = scopes.any()?.then(|| UNKNOWN.to_owned());
        let unknown = unknown.map(|name| SourceLine::of_function(Some(name)));
        let own = self.method(own)?.line_at(None)?;
        Ok(Some(unknown.into_iter().chain([own]).collect()))
    }
}

#[cfg(test)]
impl Machine {
    /// Reads again what [`code_heaps::find`] reads.
    pub(in crate::interpreters) fn find_again(&self) {
        let found = code_heaps::find(&self.memory, &self.structs).expect("a process of ours");
        assert_eq!(format!("{found:?}"), format!("{:?}", Some(self.process)));
    }

    /// Returns the addresses to which calls in the compiled functions return whose names contain `name`: calls in inlined
    /// functions first.
    pub(in crate::interpreters) fn places_of(&self, name: &str) -> Vec<u64> {
        let mut places = Vec::new();
        for heap in self.process.heaps {
            for at in (heap.start..heap.end).step_by(1 << heap.segment_shift) {
                // Memory that is not used yet cannot be read.
                let Ok(found) = self.block(at) else { break };
                let Some(block) =
                    found.filter(|block| block.kind == COMPILED[0] && block.start > at)
                else {
                    continue;
                };
                let own = self.method_of(&block).expect("a method");
                let of_name = self.method(own).and_then(|method| method.name());
                if !of_name.expect("a name").contains(name) {
                    continue;
                }
                let scopes =
                    Scopes::of(&self.memory, &self.structs, block.blob, own).expect("scopes");
                for offset in scopes.offsets() {
                    let depth = scopes
                        .at_call(offset)
                        .ok()
                        .flatten()
                        .map_or(0, |chain| chain.len());
                    places.push((depth, block.start + offset));
                }
            }
        }
        places.sort_unstable_by(|one, other| other.cmp(one));
        places.dedup();
        places.into_iter().map(|(_, place)| place).collect()
    }
}
