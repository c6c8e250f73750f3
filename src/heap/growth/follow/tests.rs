use super::*;
use crate::heap::blocks::Coverage;
use crate::heap::image::made::ImageBuilder;
use crate::heap::names::Modules;

struct NoModules;

impl Modules for NoModules {
    fn read(&self, _: u64, _: &mut [u8]) -> bool {
        false
    }
}

/// Adds a point of blocks, given by address and size. The blocks in `texts` hold a text that fills them.
fn add(follower: &mut Follower, blocks: &[(u64, u64)], texts: &[u64]) {
    let mut made = ImageBuilder::default();
    made.map(0x1000..0x9000, "rw-p 00000000 00:00 0 [heap]");
    for &(address, size) in blocks {
        made.put_bytes(address, &vec![0; size as usize]);
        if texts.contains(&address) {
            made.put_bytes(address, &vec![b'x'; size as usize - 1]);
        }
    }
    let block = |&(address, size): &(u64, u64)| Block { address, size };
    let heap = Heap::new(blocks.iter().map(block).collect(), Coverage::Complete);
    let names = Names::of(&made.image(), &heap, &NoModules);
    follower.add(&heap, &names);
}

fn samples<'a>(follower: &'a Follower, name: &str) -> &'a [Sample] {
    let named = |group: &&Group| group.key.describe() == name;
    let group = follower.groups().iter().find(named);
    &group
        .unwrap_or_else(|| panic!("no {name}: {follower:?}"))
        .samples
}

fn sample(blocks: u64, bytes: u64, kept: u64, original: u64) -> Sample {
    Sample {
        blocks,
        bytes,
        kept,
        original,
    }
}

#[test]
fn blocks_are_followed_by_address_and_size() {
    let mut follower = Follower::default();
    add(
        &mut follower,
        &[(0x1000, 24), (0x2000, 24), (0x3000, 2000)],
        &[],
    );
    // One is freed, one is given to another size, one is new.
    add(
        &mut follower,
        &[(0x1000, 24), (0x3000, 1500), (0x4000, 24)],
        &[],
    );
    add(
        &mut follower,
        &[(0x1000, 24), (0x2000, 24), (0x4000, 24)],
        &[],
    );
    assert_eq!(
        samples(&follower, "blocks of 24 bytes"),
        [
            sample(2, 48, 0, 2),
            sample(2, 48, 1, 1),
            sample(3, 72, 2, 1)
        ]
    );
    assert_eq!(
        samples(&follower, "blocks of 1025 to 2048 bytes"),
        [
            sample(1, 2000, 0, 1),
            sample(1, 1500, 0, 0),
            Sample::default()
        ]
    );
    let since = follower.blocks().iter().map(|followed| followed.since);
    assert!(since.eq([0, 2, 1]), "{:?}", follower.blocks());
    assert_eq!(follower.points(), 3);
}

#[test]
fn a_block_keeps_the_group_that_it_had_at_first() {
    let mut follower = Follower::default();
    add(&mut follower, &[(0x1000, 24), (0x2000, 24)], &[0x1000]);
    add(&mut follower, &[(0x1000, 24), (0x2000, 24)], &[0x2000]);
    add(
        &mut follower,
        &[(0x1000, 24), (0x2000, 24), (0x3000, 24)],
        &[0x3000],
    );
    let text = [
        sample(1, 24, 0, 1),
        sample(1, 24, 1, 1),
        sample(2, 48, 1, 1),
    ];
    assert_eq!(samples(&follower, "text"), text);
    assert_eq!(
        samples(&follower, "blocks of 24 bytes")[2],
        sample(1, 24, 1, 1)
    );
}

#[test]
fn another_class_at_the_same_place_is_another_block() {
    let of = |kind, name: &str| {
        let name = name.to_owned();
        Key::Type(Type { kind, name })
    };
    let mut follower = Follower::default();
    let session = follower.group_index(of(Kind::Class, "Session"));
    let request = follower.group_index(of(Kind::Class, "Request"));
    let held = follower.group_index(of(Kind::Owned, "owned by Session"));
    assert!(follower.contradicts(session, request));
    for (before, now) in [(session, session), (session, held), (held, request)] {
        assert!(!follower.contradicts(before, now), "{before} {now}");
    }
}

#[test]
fn groups_have_a_limit() {
    let mut follower = Follower::default();
    for number in 0..MAX_GROUPS as u64 + 10 {
        follower.group_index(Key::Size(number));
    }
    assert_eq!(follower.groups().len(), MAX_GROUPS + 1);
    assert_eq!(follower.group_index(Key::Size(u64::MAX)), MAX_GROUPS as u32);
}
