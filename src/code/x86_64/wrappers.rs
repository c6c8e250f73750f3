//! Calls in the x86-64 code of a file, which are followed to find [wrappers](crate::code::wrappers).

use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::hash::Hash;
use std::os::unix::fs::FileExt;

use anyhow::{Context, Result};
use iced_x86::{
    Decoder, DecoderOptions, FlowControl, Instruction, InstructionInfoFactory, Mnemonic, OpKind,
    Register,
};
use rustc_hash::FxHashSet;

use super::instruction::LONGEST;
use super::register_contents::{RegisterContents, writes};
use crate::code::elf::{self, CodeSegment, Function};
use crate::code::elf_file::Elf;
use crate::code::wrappers::{Callee, Forwarded, Forwarding};

/// Instructions at most that are followed in one function. A function that only passes a call on is short.
const MAX_INSTRUCTIONS: usize = 512;
/// Bytes of a file that are read at a time.
const PAGE: u64 = 4096;

/// Functions that do not return, whose calls end a path.
const NO_RETURN: [&str; 5] = [
    "__cxa_throw",
    "_ZSt17__throw_bad_allocv",
    "_Unwind_Resume",
    "__stack_chk_fail",
    "abort",
];

/// The code of a file, for following calls in it.
pub struct Calls {
    file: File,
    /// Parts of the file that were read, by the number of their first page.
    pages: RefCell<HashMap<u64, Vec<u8>>>,
    segments: Vec<CodeSegment>,
    /// Names of imported functions, by the address of the pointer that the dynamic linker sets.
    imports: HashMap<u64, String>,
}

/// Arguments that a function gives to the function that it calls: which of its own arguments each one is.
#[derive(Debug, Clone, Copy)]
pub struct CallArguments(RegisterContents);

impl CallArguments {
    /// Returns the number of the caller's own argument that is given as `argument`; None if another value is given.
    pub fn as_argument(&self, argument: u8) -> Option<u8> {
        self.0.in_register_of(argument)
    }
}

/// State of a path through a function.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum State {
    /// The other function was not called, or its result was overwritten.
    Before(RegisterContents),
    /// The other function was called, and what it passes on is unchanged.
    Passed(RegisterContents),
}

/// Paths through a function that are still to be followed, as addresses of instructions, each with the state there.
struct Paths<S> {
    ahead: Vec<(u64, S)>,
    followed: FxHashSet<(u64, S)>,
}

impl<S: Copy + Eq + Hash> Paths<S> {
    fn from(entry: (u64, S)) -> Self {
        Self {
            ahead: vec![entry],
            followed: FxHashSet::default(),
        }
    }

    fn add(&mut self, address: u64, state: S) {
        self.ahead.push((address, state));
    }

    /// Returns an instruction and a state with which it was not followed before. Returns None at the end of all paths.
    fn next(&mut self) -> Option<(u64, S)> {
        while let Some(path) = self.ahead.pop() {
            if self.followed.insert(path) {
                return Some(path);
            }
        }
        None
    }

    fn are_too_long(&self) -> bool {
        self.followed.len() > MAX_INSTRUCTIONS
    }
}

/// Whether a call ends a path.
fn does_not_return(callee: Option<Callee<'_>>) -> bool {
    matches!(callee, Some(Callee::Import(name)) if NO_RETURN.contains(&name))
}

impl Calls {
    /// The calls in this file's code.
    ///
    /// # Errors
    /// If it is no 64-bit ELF file, or its imports are inconsistent.
    pub fn of(file: &File) -> Result<Self> {
        let elf = Elf::read(file)?.require_64_bit()?;
        Ok(Self {
            imports: elf.imports()?,
            segments: elf.code()?,
            pages: RefCell::default(),
            file: file.try_clone().context("failed to keep the file open")?,
        })
    }

    /// Returns whether a function passes its calls on to one of `others`. `others` is asked about each function that
    /// is called, with the arguments that this function is given.
    pub fn forwarding(
        &self,
        function: &Function,
        passes: Forwarded,
        others: impl Fn(Callee<'_>, CallArguments) -> bool,
    ) -> Forwarding {
        let Some(entry) = elf::address(&self.segments, function.file_offset) else {
            return Forwarding::Never;
        };
        let mut information = InstructionInfoFactory::new();
        let mut paths = Paths::from((entry, State::Before(RegisterContents::at_entry())));
        let (mut on_some_path, mut on_all_paths) = (false, true);
        while let Some((address, state)) = paths.next() {
            let Some(instruction) = self.instruction(address).filter(|_| !paths.are_too_long())
            else {
                on_all_paths = false;
                continue;
            };
            let callee = self.callee(&instruction);
            let arguments = CallArguments(state.held());
            let passed = callee.is_some_and(|callee| others(callee, arguments));
            on_some_path |= passed;
            let next = instruction.next_ip();
            let target = instruction.near_branch_target();
            match instruction.flow_control() {
                FlowControl::Next => {
                    paths.add(next, state.after(&mut information, &instruction, passes));
                }
                FlowControl::ConditionalBranch => {
                    paths.add(next, state);
                    paths.add(target, state);
                }
                // A function's last call can be a jump.
                FlowControl::UnconditionalBranch if passed => {}
                FlowControl::UnconditionalBranch => paths.add(target, state),
                FlowControl::IndirectBranch => on_all_paths &= passed,
                FlowControl::Call | FlowControl::IndirectCall if does_not_return(callee) => {}
                FlowControl::Call | FlowControl::IndirectCall => {
                    paths.add(next, state.after_call(passed, passes));
                }
                FlowControl::Return => on_all_paths &= matches!(state, State::Passed(_)),
                // Traps: the process ends.
                FlowControl::Interrupt | FlowControl::Exception => {}
                FlowControl::XbeginXabortXend => on_all_paths = false,
            }
        }
        match (on_some_path, on_all_paths) {
            (false, _) => Forwarding::Never,
            (true, false) => Forwarding::Sometimes,
            (true, true) => Forwarding::Always,
        }
    }

    /// Whether a function can call one of another file, or one that its code does not name.
    pub fn leaves_the_file(&self, function: &Function) -> bool {
        let Some(entry) = elf::address(&self.segments, function.file_offset) else {
            return true;
        };
        let mut paths = Paths::from((entry, ()));
        while let Some((address, ())) = paths.next() {
            let Some(instruction) = self.instruction(address).filter(|_| !paths.are_too_long())
            else {
                return true;
            };
            let (next, target) = (instruction.next_ip(), instruction.near_branch_target());
            match (instruction.flow_control(), self.callee(&instruction)) {
                (_, callee) if does_not_return(callee) => {}
                (_, Some(Callee::Import(_))) => return true,
                (FlowControl::IndirectCall | FlowControl::IndirectBranch, None) => return true,
                (FlowControl::ConditionalBranch, _) => {
                    paths.add(next, ());
                    paths.add(target, ());
                }
                (FlowControl::UnconditionalBranch, _) => paths.add(target, ()),
                (FlowControl::Next | FlowControl::Call, _) => paths.add(next, ()),
                _ => {}
            }
        }
        false
    }

    /// Returns the function that a call or a jump goes to, if the code names it.
    fn callee(&self, instruction: &Instruction) -> Option<Callee<'_>> {
        match instruction.flow_control() {
            FlowControl::Call | FlowControl::UnconditionalBranch => {
                let target = instruction.near_branch_target();
                // An entry of the procedure linkage table is a jump through a pointer.
                let mut stub = self.instruction(target)?;
                if stub.mnemonic() == Mnemonic::Endbr64 {
                    stub = self.instruction(stub.next_ip())?;
                }
                if stub.flow_control() == FlowControl::IndirectBranch
                    && let Some(name) = self.import(&stub)
                {
                    return Some(Callee::Import(name));
                }
                let segment = self.segments.iter().find(|segment| segment.has(target))?;
                Some(Callee::Own(segment.file_offset_of(target)))
            }
            FlowControl::IndirectBranch | FlowControl::IndirectCall => {
                Some(Callee::Import(self.import(instruction)?))
            }
            _ => None,
        }
    }

    /// Decodes the instruction at this address.
    fn instruction(&self, address: u64) -> Option<Instruction> {
        let segment = self.segments.iter().find(|segment| segment.has(address))?;
        let start = segment.file_offset_of(address);
        let length = (segment.range().end - address).min(LONGEST as u64);
        let mut pages = self.pages.borrow_mut();
        let page = pages
            .entry(start / PAGE)
            .or_insert_with(|| self.page(start / PAGE));
        let start = (start % PAGE) as usize;
        let bytes = page.get(start..start + length as usize)?;
        let instruction = Decoder::with_ip(64, bytes, address, DecoderOptions::NONE).decode();
        (!instruction.is_invalid()).then_some(instruction)
    }

    /// Reads a page of the file, with the bytes behind it of an instruction that begins in it, as far as the file
    /// goes.
    fn page(&self, number: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE as usize + LONGEST];
        let length = self.file.read_at(&mut page, number * PAGE).unwrap_or(0);
        page.truncate(length);
        page
    }

    /// Returns the imported function whose pointer an instruction uses.
    fn import(&self, instruction: &Instruction) -> Option<&str> {
        let by_pointer =
            instruction.op0_kind() == OpKind::Memory && instruction.memory_base() == Register::RIP;
        let pointer = by_pointer.then(|| instruction.memory_displacement64())?;
        self.imports.get(&pointer).map(String::as_str)
    }
}

impl State {
    fn held(self) -> RegisterContents {
        let (Self::Before(held) | Self::Passed(held)) = self;
        held
    }

    /// Returns the state after a call. `passed` is whether the other function is called.
    fn after_call(self, passed: bool, passes: Forwarded) -> Self {
        let held = self.held().after_call();
        match (passed, self, passes) {
            (true, ..) => Self::Passed(held),
            // A block that was freed stays freed.
            (false, Self::Passed(_), Forwarded::Arguments) => Self::Passed(held),
            _ => Self::Before(held),
        }
    }

    /// Returns the state after an instruction that is no jump.
    fn after(
        self,
        information: &mut InstructionInfoFactory,
        instruction: &Instruction,
        passes: Forwarded,
    ) -> Self {
        let held = self.held().after(information, instruction);
        let used = information.info(instruction).used_registers().iter();
        let mut changed = used.filter(|used| writes(used.access()));
        let result_is_lost = passes == Forwarded::Result
            && changed.any(|used| used.register().full_register() == Register::RAX);
        match self {
            Self::Passed(_) if !result_is_lost => Self::Passed(held),
            _ => Self::Before(held),
        }
    }
}
