//! Tests of [`pprof`](super).

use std::io::Read;
use std::process::Command;

use flate2::read::GzDecoder;

use super::*;
use crate::export::profile::ValueType;
use crate::process::address_space::{AddressSpaces, TrackedProcesses};
use crate::process::proc::Process;
use crate::stacks::named::FrameKind;

fn frame(name: Option<&str>, address: u64, kernel: bool) -> Frame {
    Frame {
        address,
        instruction: address - 1,
        symbol: name.map(|name| (name.into(), 0)),
        module: kernel.then(|| ("kernel".into(), address)),
        kind: if kernel {
            FrameKind::Kernel
        } else {
            FrameKind::Native
        },
        ..Frame::default()
    }
}

fn sample(frames: &[Frame], kernel: &[Frame], values: [u64; 2]) -> Sample {
    let part = |frames: &[Frame], truncated: Option<&str>| Part {
        frames: frames.to_vec(),
        truncated: truncated.map(str::to_owned),
    };
    Sample {
        stack: NamedStack {
            pid: 7,
            comm: "p".into(),
            user: Some(part(frames, Some("deep"))),
            kernel: (!kernel.is_empty()).then(|| part(kernel, None)),
            program: None,
        },
        values: values.to_vec(),
    }
}

fn decoded(samples: Vec<Sample>) -> message::Profile {
    let profile = Profile {
        tool: "memleak",
        target: "pid 7".into(),
        subject: "allocations".into(),
        since: "2026-11-22T12:55:15+00:00[+00:00]".parse().expect("a time"),
        until: "2026-11-22T12:55:18+00:00[+00:00]".parse().expect("a time"),
        values: vec![
            ValueType::count("alloc_objects", "allocations"),
            ValueType::bytes("alloc_space"),
        ],
        main_value: 1,
        by_thread: false,
        samples,
        remarks: vec!["estimated".into()],
    };
    let mut file = Vec::new();
    write(&profile, &mut file).expect("memory");
    let mut bytes = Vec::new();
    GzDecoder::new(&file[..])
        .read_to_end(&mut bytes)
        .expect("a whole file");
    message::Profile::decode(&bytes[..]).expect("a message")
}

/// Returns the names of a sample's functions, innermost first; an address where no function is known.
fn names(profile: &message::Profile, sample: &message::Sample) -> Vec<String> {
    let name = |id: &u64| {
        let location = &profile.location[*id as usize - 1];
        assert_eq!(location.id, *id);
        match location.line.first() {
            Some(line) => {
                let function = &profile.function[line.function_id as usize - 1];
                profile.string_table[function.name as usize].clone()
            }
            None => format!("{:#x}", location.address),
        }
    };
    sample.location_id.iter().map(name).collect()
}

#[test]
fn stacks_begin_with_the_kernel_and_end_with_what_is_missing() {
    let main = frame(Some("main"), 0x200, false);
    let user = [
        frame(Some("f"), 0x100, false),
        frame(None, 0x300, false),
        main,
    ];
    let kernel = [frame(Some("do_brk_flags"), u64::MAX - 9, true)];
    let profile = decoded(vec![
        sample(&user, &kernel, [23, 92]),
        sample(&user[..1], &[], [7, 28]),
        sample(&[], &[], [5, 20]),
        sample(&user, &[], [0, 0]),
    ]);
    let stacks: Vec<Vec<String>> = profile
        .sample
        .iter()
        .map(|sample| names(&profile, sample))
        .collect();
    let truncated = "[truncated: deep]";
    assert_eq!(stacks[0], ["do_brk_flags", "f", "0x2ff", "main", truncated]);
    assert_eq!(stacks[1], ["f", truncated]);
    assert_eq!(stacks[2], ["[lost]"]);
    assert_eq!(profile.sample[0].value, [23, 92]);
    assert_eq!(stacks.len(), 3, "one without any number is omitted");
    // Equal entries are stored once: f, an unknown frame, main, the kernel's, and two placeholders.
    assert_eq!((profile.location.len(), profile.function.len()), (6, 5));
}

#[test]
fn a_frame_of_python_is_its_function_file_and_line() {
    let at = |word, line| Frame::of_python(word, "load", Some(("/srv/orders.py", line)));
    let stacks = [
        [at(1 << 63 | 1, Some(41)), at(1 << 63 | 9, Some(43))],
        // Other instructions of the same lines.
        [at(1 << 63 | 2, Some(41)), at(1 << 63 | 8, Some(43))],
    ];
    let samples = stacks.iter().map(|frames| sample(frames, &[], [1, 1]));
    let profile = decoded(samples.collect());
    let text = |index: i64| profile.string_table[index as usize].as_str();
    let function = &profile.function[0];
    assert_eq!(
        (text(function.name), text(function.filename)),
        ("load", "/srv/orders.py")
    );
    let lines = profile
        .location
        .iter()
        .map(|location| location.line[0].line);
    // The last location is the placeholder for missing frames.
    assert_eq!(lines.collect::<Vec<_>>(), [41, 43, 0]);
    assert_eq!(profile.sample[0].location_id, profile.sample[1].location_id);
}

#[test]
fn the_head_says_what_the_numbers_are() {
    let profile = decoded(Vec::new());
    let text = |index: i64| profile.string_table[index as usize].as_str();
    let types = profile.sample_type.iter();
    let types: Vec<_> = types.map(|of| (text(of.kind), text(of.unit))).collect();
    assert_eq!(
        types,
        [("alloc_objects", "count"), ("alloc_space", "bytes")]
    );
    assert_eq!(text(profile.default_sample_type), "alloc_space");
    assert_eq!((text(0), profile.duration_nanos), ("", 3_000_000_000));
    assert_eq!(profile.time_nanos, 1_795_352_118_000_000_000);
    let mut comments = profile.comment.iter().map(|&index| text(index));
    assert!(comments.next_back() == Some("estimated"));
}

#[test]
fn a_function_has_its_mangled_name_or_none() {
    let named = |symbol: &str, mangled: Option<&str>| Frame {
        mangled: mangled.map(Into::into),
        ..frame(Some(symbol), 0x100, false)
    };
    let frames = [
        named("app::run()", Some("_ZN3app3runEv")),
        named("<module>", None),
    ];
    let profile = decoded(vec![sample(&frames, &[], [1, 1])]);
    let text = |index: i64| profile.string_table[index as usize].as_str();
    let names = profile.function.iter();
    let names: Vec<_> = names
        .map(|of| (text(of.name), text(of.system_name)))
        .collect();
    assert_eq!(
        names[..2],
        [("app::run()", "_ZN3app3runEv"), ("<module>", "")]
    );
}

#[test]
fn a_frame_without_a_name_is_its_place() {
    let unnamed = Frame {
        module: Some(("libb.so".into(), 0x1f)),
        ..frame(None, 0x300, false)
    };
    let profile = decoded(vec![sample(&[unnamed], &[], [1, 1])]);
    assert_eq!(names(&profile, &profile.sample[0])[0], "libb.so+0x1f");
}

#[test]
fn a_profile_of_several_programs_is_headed_by_none() {
    let mut spaces = AddressSpaces::of(TrackedProcesses::Chosen);
    let mut other = Command::new("sleep").arg("60").spawn().expect("coreutils");
    let programs = [std::process::id(), other.id()].map(|pid| {
        let process = Process::open(pid).expect("it runs");
        spaces.read_mappings(&process).expect("its mappings");
        let image = spaces.newest_image(pid).expect("its image");
        image.program().expect("its program").clone()
    });
    other.kill().expect("it is ours");
    other.wait().expect("it has ended");
    let of = |program: &MappedCode, bytes| {
        let mut sample = sample(&[], &[], [1, bytes]);
        sample.stack.program = Some(program.clone());
        sample
    };
    let head = |profile: &message::Profile| {
        let name = profile.mapping[0].filename;
        profile.string_table[name as usize].clone()
    };
    let several = decoded(vec![of(&programs[1], 7), of(&programs[0], 8)]);
    assert_eq!(head(&several), "");
    let one = decoded(vec![of(&programs[1], 7), of(&programs[1], 8)]);
    assert!(head(&one).ends_with("/sleep"), "{}", head(&one));
}

#[test]
fn labels_and_comments_name_the_machine_and_the_unit() {
    let mut of_us = sample(&[], &[], [1, 1]);
    of_us.stack.pid = std::process::id();
    let profile = decoded(vec![of_us]);
    let text = |index: i64| profile.string_table[index as usize].as_str();
    let group = CgroupInfo::of_process(std::process::id());
    let labels: HashMap<_, _> = profile.sample[0]
        .label
        .iter()
        .map(|label| (text(label.key), text(label.str)))
        .collect();
    assert_eq!(labels.get("cgroup").copied(), group.cgroup.as_deref());
    assert_eq!(
        labels.get("container").copied(),
        group.container_id.as_deref()
    );
    assert_eq!(labels.get("unit").copied(), group.unit());
    let comments: Vec<_> = profile.comment.iter().map(|&index| text(index)).collect();
    assert!(comments[1].starts_with("host: "), "{comments:?}");
    assert!(
        comments[2].starts_with("command: ") && comments[2].len() > 9,
        "{comments:?}"
    );
}
