//! Places of probes, checked against real libraries.
//!
//! [`probe_point::places`] claims that at the chosen instruction, what a handler reads is where the place says,
//! as it was at the function's entry, and that only the entry leads to that instruction. Both claims are checked
//! for every function of every allocator, of the C and the C++ library. The first one is checked by running the
//! function up to the instruction, step by step, with random values in its registers. The second one is checked
//! by what objdump, which is not our decoder, finds in the whole file.

#[expect(dead_code, reason = "the end-to-end tests use the rest")]
#[cfg_attr(target_arch = "aarch64", path = "e2e/harness/aarch64.rs")]
#[cfg_attr(target_arch = "x86_64", path = "e2e/harness/x86_64.rs")]
mod arch;
#[path = "e2e/harness/libraries.rs"]
mod libraries;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;

use libc::user_regs_struct as Registers;
use memtools::code::elf;
use memtools::code::probe_point::{self, Preference, ProbePoint};
use nix::sys::mman::{MapFlags, ProtFlags, mmap, mmap_anonymous};
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill, raise};
use nix::sys::wait::{WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork};
use object::read::elf::ElfFile64;
use object::{Object, ObjectSegment};

const FOLDERS: [&str; 2] = [libraries::FOLDER, "/lib"];

/// Returns the names of the libraries.
fn libraries() -> [&'static str; 6] {
    [
        "libc.so.6",
        "libstdc++.so.6",
        "libjemalloc.so.2",
        "libtcmalloc_minimal.so.4",
        libraries::mimalloc(),
        "ld-musl-x86_64.so.1",
    ]
}

/// Numbers of the arguments that a function's handler may read.
const ARGUMENTS: [&[u8]; 3] = [&[1], &[1, 2], &[1, 2, 3, 4, 5, 6]];

/// Number of runs of each function.
const TRIALS: usize = 3;

const PAGE: usize = 4096;

/// Function, with the instruction to probe.
struct Placed {
    name: String,
    /// Address of the entry in the file's own address space.
    address: u64,
    place: ProbePoint,
}

struct Library {
    path: String,
    file: File,
    /// Ranges of addresses, with the ranges of the file that are mapped there.
    segments: Vec<(std::ops::Range<u64>, std::ops::Range<u64>)>,
    functions: Vec<Placed>,
}

impl Library {
    fn open(name: &str, arguments: &[u8]) -> Self {
        let path = FOLDERS
            .iter()
            .map(|folder| format!("{folder}/{name}"))
            .find(|path| Path::new(path).exists())
            .unwrap_or_else(|| panic!("no {name}; see TEST_PACKAGES in the Makefile"));
        let bytes = std::fs::read(&path).expect("the library");
        let parsed = ElfFile64::<object::Endianness>::parse(&*bytes).expect("an ELF file");
        let segments: Vec<_> = parsed
            .segments()
            .map(|segment| {
                let (start, size) = segment.file_range();
                let address = segment.address();
                (address..address + segment.size(), start..start + size)
            })
            .collect();
        let file = File::open(&path).expect("the library");
        let address = |offset: u64| {
            let (addresses, bytes) = segments
                .iter()
                .find(|(_, bytes)| bytes.contains(&offset))
                .expect("a segment");
            addresses.start + offset - bytes.start
        };
        let symbols = elf::functions(&file, |_, local| !local).expect("symbols");
        let asked: Vec<_> = symbols
            .iter()
            .map(|function| (function, arguments.to_vec()))
            .collect();
        let places = probe_point::places(&file, &asked, Preference::Cheap).expect("places");
        let functions = symbols
            .iter()
            .zip(places)
            .filter_map(|(function, place)| {
                Some(Placed {
                    name: function.name.clone(),
                    address: address(function.file_offset),
                    place: place?,
                })
            })
            .collect();
        Self {
            path,
            file,
            segments,
            functions,
        }
    }
}

/// Disassembly of a library by objdump.
struct Disassembly {
    /// Instructions by address.
    lines: BTreeMap<u64, Line>,
    /// Targets of jumps and calls.
    targets: BTreeSet<u64>,
}

/// Instruction, with its target if that is written in it.
struct Line {
    mnemonic: String,
    operands: String,
    target: Option<u64>,
}

impl Disassembly {
    fn of(library: &Library) -> Self {
        let output = Command::new("objdump")
            .args(["-d", "--no-show-raw-insn", &library.path])
            .output()
            .expect("objdump, of the package binutils");
        let text = String::from_utf8_lossy(&output.stdout);
        let lines: BTreeMap<u64, Line> = text.lines().filter_map(Line::parse).collect();
        Self {
            targets: lines.values().filter_map(|line| line.target).collect(),
            lines,
        }
    }

    /// Whether every kernel from 5.10 on emulates the instruction at an address.
    fn is_cheap_at(&self, address: u64) -> bool {
        let mut lines = self.lines.range(address..);
        let Some((_, line)) = lines.next().filter(|(at, _)| **at == address) else {
            return false;
        };
        let length = lines.next().map_or(0, |(next, _)| next - address);
        match line.mnemonic.as_str() {
            "push" => line.operands.starts_with("%r"),
            "nop" => length == 1,
            mnemonic => mnemonic.starts_with('j') && line.target.is_some(),
        }
    }

    /// Returns the first instruction of a function that kernels emulate, if it is certain to be reached.
    fn cheap_place(&self, entry: u64) -> Option<u64> {
        let lines = self.lines.range(entry..);
        let reached = lines.take_while(|(_, line)| !line.dereferences());
        reached.map(|(at, _)| *at).find(|at| self.is_cheap_at(*at))
    }
}

impl Line {
    /// Whether the instruction reads or writes where a register points to, which may be no memory.
    fn dereferences(&self) -> bool {
        let of_register = self.operands.contains("(%") && !self.operands.contains("(%rip)");
        of_register
            && !["lea", "nop"]
                .iter()
                .any(|kind| self.mnemonic.starts_with(kind))
    }

    /// Parses `  98ef3:\tje     98fb8 <cfree+0xc8>`.
    fn parse(line: &str) -> Option<(u64, Self)> {
        let (address, instruction) = line.trim_start().split_once(":\t")?;
        let address = u64::from_str_radix(address, 16).ok()?;
        let instruction = instruction.split('#').next()?.trim();
        let instruction = instruction.trim_start_matches("bnd ");
        let (mnemonic, operands) = instruction.split_once(' ').unwrap_or((instruction, ""));
        let (mnemonic, operands) = (mnemonic.to_owned(), operands.trim().to_owned());
        let leads = ["j", "call", "loop", "xbegin"]
            .iter()
            .any(|kind| mnemonic.starts_with(kind));
        let target = operands.split_whitespace().next().filter(|_| leads);
        let target = target.and_then(|target| u64::from_str_radix(target, 16).ok());
        let line = Self {
            mnemonic,
            operands,
            target,
        };
        Some((address, line))
    }
}

#[test]
fn only_the_entry_leads_to_a_probe() {
    for name in libraries() {
        let code = Disassembly::of(&Library::open(name, &[]));
        for arguments in ARGUMENTS {
            let library = Library::open(name, arguments);
            let mut cheap = 0;
            for function in &library.functions {
                let (entry, offset) = (function.address, function.place.offset);
                let emulated = code.is_cheap_at(entry + offset);
                cheap += usize::from(emulated);
                let function = &function.name;
                assert!(
                    emulated || offset == 0,
                    "{name}: {function}+{offset:#x} is not an instruction that kernels emulate"
                );
                let within = code.targets.range(entry + 1..entry + offset + 1).next();
                assert!(
                    within.is_none(),
                    "{name}: a jump leads to {within:x?}, before the probe at \
                     {function}+{offset:#x}"
                );
            }
            println!(
                "{name}: {cheap} of {} functions are probed where it is cheap if {} arguments are \
                 read",
                library.functions.len(),
                arguments.len(),
            );
            assert!(cheap > 0, "{name}: nothing was checked");
        }
    }
}

#[test]
fn at_a_probe_all_is_as_at_the_entry() {
    for (name, arguments) in libraries()
        .iter()
        .flat_map(|name| ARGUMENTS.map(|all| (name, all)))
    {
        let library = Library::open(name, arguments);
        let mut stepper = Stepper::new(&library);
        let moved = library
            .functions
            .iter()
            .filter(|function| function.place.offset > 0);
        let (reached, faulted): (Vec<&Placed>, Vec<&Placed>) = moved.partition(|function| {
            let arrivals = (0..TRIALS).filter(|_| stepper.check(function, arguments));
            arrivals.count() > 0
        });
        println!(
            "{name}: {} probes beyond the entry were reached if {} arguments are read, {} not",
            reached.len(),
            arguments.len(),
            faulted.len()
        );
        let names: Vec<&str> = faulted.iter().map(|placed| &*placed.name).collect();
        assert!(
            reached.len() > 10 * faulted.len(),
            "{name}: too few probes are reached, not those in {names:?}"
        );
    }
}

/// The busiest functions are those that an allocating program calls most. A compiler can leave them no such place, as
/// that of Debian 13 did with jemalloc's free().
#[test]
fn the_busiest_functions_are_probed_where_it_is_cheap() {
    let (mut cheap, mut others) = (0, 0);
    for name in libraries() {
        let library = Library::open(name, &[1]);
        let code = Disassembly::of(&library);
        for busy in ["malloc", "free", "_Znwm", "_ZdlPv", "_ZdlPvm"] {
            for function in library
                .functions
                .iter()
                .filter(|placed| placed.name == busy)
            {
                let offset = function.place.offset;
                println!("{name}: {busy}+{offset:#x}");
                if code.is_cheap_at(function.address + offset) {
                    cheap += 1;
                } else {
                    others += 1;
                    let place = code.cheap_place(function.address);
                    assert_eq!(place, None, "{name}: {busy}+{offset:#x}");
                }
            }
        }
    }
    assert!(cheap > 4 * others, "{cheap} are, {others} are not");
}

/// Stopped child that has the library mapped. The test runs the library's code in it, step by step.
struct Stepper {
    child: Pid,
    idle: Registers,
    base: u64,
    arena: u64,
    stack: u64,
    random: u64,
}

const ARENA: usize = 1 << 20;
const STACK: usize = 64 << 10;

impl Stepper {
    fn new(library: &Library) -> Self {
        let base = map(library);
        let arena = allocate_pages(ARENA);
        // Every word of the arena is a valid pointer into the arena.
        let words = arena as *mut u64;
        for index in 0..ARENA / 8 {
            // SAFETY: within the mapping just made.
            unsafe { words.add(index).write(arena + (ARENA / 2) as u64) };
        }
        let stack = allocate_pages(STACK);
        // SAFETY: the child makes system calls only.
        let child = match unsafe { fork() }.expect("a child") {
            ForkResult::Parent { child } => child,
            ForkResult::Child => {
                let _ = ptrace::traceme().and_then(|()| raise(Signal::SIGSTOP));
                // SAFETY: ends the process at once.
                unsafe { libc::_exit(0) }
            }
        };
        let stopped = waitpid(child, None).expect("our child");
        assert_eq!(stopped, WaitStatus::Stopped(child, Signal::SIGSTOP));
        ptrace::setoptions(child, ptrace::Options::PTRACE_O_EXITKILL).expect("a tracee");
        let mut idle = ptrace::getregs(child).expect("registers");
        // The kernel must not restart a system call.
        idle.orig_rax = u64::MAX;
        Self {
            child,
            idle,
            base,
            arena,
            stack,
            random: 0x9e37_79b9_7f4a_7c15,
        }
    }

    /// Returns the next number of an xorshift generator.
    fn random(&mut self) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random
    }

    /// Returns a value for a register: in most cases, an address in the arena.
    fn value(&mut self) -> u64 {
        let random = self.random();
        if random.is_multiple_of(16) {
            return random >> 32;
        }
        let middle = (ARENA / 4) as u64;
        (self.arena + middle + random % (ARENA as u64 / 2)) & !15
    }

    /// Runs a function from its entry to its probe. Returns whether it got there: a load through an argument that
    /// is no pointer ends it before.
    fn check(&mut self, function: &Placed, arguments: &[u8]) -> bool {
        let mut entry = self.idle;
        for register in [
            &mut entry.rdi,
            &mut entry.rsi,
            &mut entry.rdx,
            &mut entry.rcx,
            &mut entry.r8,
            &mut entry.r9,
            &mut entry.rbp,
            &mut entry.rax,
            &mut entry.rbx,
            &mut entry.r10,
            &mut entry.r11,
            &mut entry.r12,
            &mut entry.r13,
            &mut entry.r14,
            &mut entry.r15,
        ] {
            *register = self.value();
        }
        entry.rip = self.base + function.address;
        entry.rsp = self.stack + (STACK / 2) as u64 + 8;
        let return_address = self.random().cast_signed();
        ptrace::setregs(self.child, entry).expect("registers");
        ptrace::write(self.child, entry.rsp as *mut _, return_address).expect("its stack");

        let probe = entry.rip + function.place.offset;
        let mut now = entry;
        while now.rip != probe {
            ptrace::step(self.child, None).expect("a step");
            let Ok(WaitStatus::Stopped(_, Signal::SIGTRAP)) = waitpid(self.child, None) else {
                return false;
            };
            now = ptrace::getregs(self.child).expect("registers");
            assert!(
                (entry.rip..=probe).contains(&now.rip),
                "{} goes elsewhere before its probe",
                function.name
            );
        }
        let now_returns_to = ptrace::read(self.child, now.rsp as *mut _).expect("its stack");
        assert_eq!(
            (now.rsp, now.rbp, now_returns_to),
            (entry.rsp, entry.rbp, return_address),
            "{}+{:#x}",
            function.name,
            function.place.offset
        );
        for &argument in arguments {
            let holder = function.place.register_of(argument);
            assert_eq!(
                argument_of(&now, holder),
                argument_of(&entry, argument),
                "{}+{:#x}: argument {argument} in the register of {holder}",
                function.name,
                function.place.offset
            );
        }
        true
    }
}

impl Drop for Stepper {
    fn drop(&mut self) {
        let _ = kill(self.child, Signal::SIGKILL);
        let _ = waitpid(self.child, None);
    }
}

fn argument_of(registers: &Registers, number: u8) -> u64 {
    match number {
        1 => registers.rdi,
        2 => registers.rsi,
        3 => registers.rdx,
        4 => registers.rcx,
        5 => registers.r8,
        _ => registers.r9,
    }
}

/// Maps new memory, and returns its address.
fn allocate_pages(bytes: usize) -> u64 {
    let length = NonZeroUsize::new(bytes).expect("some");
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: the kernel chooses the place.
    let at = unsafe { mmap_anonymous(None, length, access, MapFlags::MAP_PRIVATE) };
    at.expect("memory").as_ptr() as u64
}

/// Maps a library as a dynamic linker would, without linking it. Returns where the library's address 0 is.
fn map(library: &Library) -> u64 {
    let end = library
        .segments
        .iter()
        .map(|(addresses, _)| addresses.end as usize);
    let span = end.max().expect("segments").next_multiple_of(PAGE);
    let base = allocate_pages(span);
    let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE | ProtFlags::PROT_EXEC;
    for (addresses, bytes) in &library.segments {
        let before = addresses.start as usize % PAGE;
        let length = before + (bytes.end - bytes.start) as usize;
        let (Some(at), Some(length)) = (
            NonZeroUsize::new(base as usize + addresses.start as usize - before),
            NonZeroUsize::new(length),
        ) else {
            continue;
        };
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_FIXED;
        let offset = bytes.start as i64 - before as i64;
        // SAFETY: within the space just made.
        unsafe {
            mmap(
                Some(at),
                length,
                access,
                flags,
                library.file.as_fd(),
                offset,
            )
        }
        .expect("the segment");
    }
    base
}
