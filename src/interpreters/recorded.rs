//! Interpreters in recorded memory, read as in the memory of a process. The memory of a process is as untrusted as a
//! file; by these functions, fuzzers reach the code that reads it.
//!
//! A recording consists of numbers, and of the pieces of memory that were read: for each piece its address, its length
//! and its bytes. Numbers, addresses and lengths are little-endian words of 8 bytes.

use std::collections::BTreeMap;
use std::io;

use super::hotspot::machine::Machine;
use super::memory::Memory;
use super::python::locate;
use super::raw_frame::RawFrame;
use super::search::Located;
use crate::code::lines::SourceLine;

/// Maximum number of frames whose functions are read from one recording.
const FRAMES: u64 = 16;

/// Pieces of memory, by address.
#[derive(Debug, Default)]
pub(super) struct Pieces(BTreeMap<u64, Vec<u8>>);

impl Pieces {
    /// Decodes the pieces of a recording, as far as they are complete.
    fn decode(mut bytes: &[u8]) -> Self {
        let mut pieces = BTreeMap::new();
        while let (Some(address), Some(length)) = (word(&mut bytes), word(&mut bytes)) {
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let Some((piece, rest)) = bytes.split_at_checked(length) else {
                break;
            };
            pieces.insert(address, piece.to_vec());
            bytes = rest;
        }
        Self(pieces)
    }

    /// Reads memory. Returns fewer bytes if the pieces end before.
    ///
    /// # Errors
    /// `InvalidInput` if no piece has the address.
    pub(super) fn read(&self, address: u64, length: usize) -> io::Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while bytes.len() < length {
            let Some(at) = address.checked_add(bytes.len() as u64) else {
                break;
            };
            let piece = self.0.range(..=at).next_back();
            let rest = piece.and_then(|(start, piece)| piece.get((at - start) as usize..));
            match rest.filter(|rest| !rest.is_empty()) {
                Some(rest) => {
                    bytes.extend_from_slice(&rest[..rest.len().min(length - bytes.len())])
                }
                None if bytes.is_empty() => return Err(io::ErrorKind::InvalidInput.into()),
                None => break,
            }
        }
        Ok(bytes)
    }
}

/// Takes the first word of `bytes`.
fn word(bytes: &mut &[u8]) -> Option<u64> {
    let (word, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(u64::from_le_bytes(*word))
}

/// Takes the first words of `bytes`.
fn words<const COUNT: usize>(bytes: &mut &[u8]) -> Option<[u64; COUNT]> {
    let mut words = [0; COUNT];
    for place in &mut words {
        *place = word(bytes)?;
    }
    Some(words)
}

/// Returns the description of the CPython in a recording, which begins with its minor version, 1 if the process uses
/// glibc, and the addresses of `_PyRuntime` and `PyCode_Type`. None if there is no interpreter that can be walked.
pub fn python_interpreter(mut recording: &[u8]) -> Option<String> {
    let numbers = words(&mut recording)?;
    let memory = Memory::recorded(Pieces::decode(recording));
    match locate::recorded(memory, numbers) {
        Ok(Located::Found(process)) => Some(format!("{process:?}")),
        _ => None,
    }
}

/// Returns the functions of frames in the HotSpot of a recording, which begins with the variables that describe
/// HotSpot's tables, the number of frames, and the frames as words of a stack. Names are escaped. Empty if there is no
/// virtual machine.
pub fn hotspot_functions(mut recording: &[u8]) -> Vec<SourceLine> {
    let Some(tables) = words(&mut recording) else {
        return Vec::new();
    };
    let count = word(&mut recording).unwrap_or(0).min(FRAMES);
    let frames: Vec<u64> = (0..count).map_while(|_| word(&mut recording)).collect();
    let memory = Memory::recorded(Pieces::decode(recording));
    let Ok(Some(machine)) = Machine::recorded(memory, tables) else {
        return Vec::new();
    };
    machine.functions(&frames)
}

impl Machine {
    /// Returns the functions of frames, given as words of a stack, as far as they can be read: for each frame the
    /// block of code, and the functions with their lines.
    fn functions(&self, frames: &[u64]) -> Vec<SourceLine> {
        let mut functions = Vec::new();
        for &frame in frames {
            let code = self.code(frame).ok().flatten();
            functions.extend(code.map(|(name, _)| SourceLine::of_function(Some(name))));
            let frame = RawFrame::of_user(frame, false);
            functions.extend(self.lines(frame).ok().flatten().unwrap_or_default());
        }
        functions
    }
}

#[cfg(test)]
pub(super) mod tests {
    use std::path::Path;
    use std::process::Command;
    use std::{env, fs};

    use super::*;
    use crate::interpreters::hotspot::hotspots;
    use crate::interpreters::search::Files;
    use crate::interpreters::search::tests::{Running, is_missing};

    /// Encodes a recording.
    pub(in crate::interpreters) fn encode(numbers: &[u64], memory: &BTreeMap<u64, u8>) -> Vec<u8> {
        let mut pieces: Vec<(u64, Vec<u8>)> = Vec::new();
        for (&address, &byte) in memory {
            match pieces.last_mut() {
                Some((start, piece)) if *start + piece.len() as u64 == address => piece.push(byte),
                _ => pieces.push((address, vec![byte])),
            }
        }
        let mut recording = numbers
            .iter()
            .flat_map(|number| number.to_le_bytes())
            .collect::<Vec<_>>();
        for (address, piece) in pieces {
            recording.extend(address.to_le_bytes());
            recording.extend((piece.len() as u64).to_le_bytes());
            recording.extend(piece);
        }
        recording
    }

    /// Keeps a recording for the fuzzer, if the environment has a folder for it.
    pub(in crate::interpreters) fn keep(parser: &str, recording: &[u8]) {
        let Some(corpus) = env::var_os("MEMTOOLS_CORPUS") else {
            return;
        };
        let folder = Path::new(&corpus).join(parser);
        fs::create_dir_all(&folder).expect("a folder");
        fs::write(folder.join("recorded"), recording).expect("room");
    }

    #[test]
    fn pieces_are_read_across_their_borders_and_not_beyond() {
        let memory = (0x1000..0x1010).chain(0x1020..0x1030);
        let memory = memory.map(|address| (address, address as u8)).collect();
        let recording = encode(&[], &memory);
        let pieces = Pieces::decode(&recording);
        assert_eq!(pieces.read(0x100e, 4).expect("two"), [0x0e, 0x0f]);
        assert_eq!(pieces.read(0x1021, 2).expect("all"), [0x21, 0x22]);
        assert!(pieces.read(0x1010, 1).is_err());
        assert!(pieces.read(u64::MAX, 8).is_err());
        let cut = Pieces::decode(&recording[..recording.len() - 1]);
        assert!(cut.read(0x1020, 1).is_err());
        let adjoining = Pieces(BTreeMap::from([(8, vec![1, 2]), (10, vec![3])]));
        assert_eq!(adjoining.read(9, 8).expect("both"), [2, 3]);
    }

    #[test]
    fn a_recorded_virtual_machine_names_the_functions_of_the_process() {
        if is_missing("java") {
            return;
        }
        let folder = tempfile::tempdir().expect("a directory");
        let source = folder.path().join("Ready.java");
        let program = "class Ready { static int inner(int x) { return Integer.rotateLeft(x, 3) ^ x; }\n\
                       static int outer(int x) { for (int i = 0; i < 9; i++) x += inner(x); return x; }\n\
                       public static void main(String[] a) throws Exception { int x = a.length;\n\
                       for (int i = 0; i < 500000; i++) x += outer(i); System.out.println(\"ready \" + x); System.in.read(); } }";
        fs::write(&source, program).expect("room");
        let java = Running::start(Command::new("java").args(["-Xbatch"]).arg(&source));
        let machine = hotspots::tests::machine(java.pid(), &mut Files::default());
        let frames = machine.places_of("Ready.");
        let frames: Vec<u64> = frames.into_iter().take(FRAMES as usize).collect();
        machine.memory.log.lock().expect("no panic").clear();
        machine.structs.asked.lock().expect("no panic").clear();
        // The description of the code is a part of the recording.
        machine.find_again();
        let live = machine.functions(&frames);
        assert!(
            live.iter()
                .any(|line| line.function.as_deref() == Some("int Ready.outer(int)")),
            "{live:?}"
        );
        let (tables, of_tables) = machine.structs.encode();
        let mut memory = machine.memory.log.lock().expect("no panic").clone();
        memory.extend(of_tables);
        let numbers = [&tables[..], &[frames.len() as u64], &frames].concat();
        let recording = encode(&numbers, &memory);
        keep("hotspot_functions", &recording);
        assert_eq!(hotspot_functions(&recording), live);
    }
}
