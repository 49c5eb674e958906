//! Tests of a store: it keeps what was written, reads zeroes elsewhere, and gives memory back.

use blkmq_core::bio::{Flags, Op};

use super::*;
use crate::sys;
use crate::testing::{lend, request_with};

fn write(store: &Store, offset: u64, fill: u8, len: usize) {
    store.write_bytes(offset, &vec![fill; len]).unwrap();
}

fn read(store: &Store, offset: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0xee; len];
    let rq = request_with(Op::Read, Flags::NONE, 0, offset, &[lend(&mut bytes)]);
    sys::for_each_sink(&rq, |mut sink| store.read(offset, len as u64, &mut sink));
    bytes
}

fn extents(store: &Store, offset: u64, len: u64, max: usize) -> Vec<Extent> {
    let mut out = Vec::new();
    store.extents(offset, len, max, &mut out).unwrap();
    out
}

#[test]
fn write_across_chunks_is_read_back_between_zeroes() {
    let store = Store::new(1 << 30, false);
    let at = CHUNK_BYTES - 1536;
    write(&store, at, 7, 4096);
    let seen = read(&store, at - 512, 5120);
    assert!(seen[..512].iter().chain(&seen[4608..]).all(|byte| *byte == 0));
    assert!(seen[512..4608].iter().all(|byte| *byte == 7));
    assert_eq!(store.present_bytes(), 2 * 4096);
}

#[test]
fn random_history_reads_as_a_plain_array_does() {
    let size = 3 * CHUNK_BYTES + 4096;
    let store = Store::new(size, false);
    let mut plain = vec![0u8; size as usize];
    let mut chance = crate::chance::Chance::new(11, 0);
    for step in 0..700u64 {
        let offset = chance.bits() % (size / 512) * 512;
        let longest = [512, 8192, CHUNK_BYTES * 2][step as usize % 3];
        let len = (chance.bits() % (longest / 512) * 512 + 512).min(size - offset);
        let range = offset as usize..(offset + len) as usize;
        let fill = chance.bits() as u8;
        let kind = chance.bits() % 4;
        match kind {
            0 => store.discard(offset, len),
            1 => store.write_zeroes(offset, len).unwrap(),
            _ => write(&store, offset, fill, len as usize),
        }
        plain[range.clone()].fill(if kind < 2 { 0 } else { fill });
        assert_eq!(read(&store, offset, len as usize), plain[range], "step {step}");
    }
    assert_eq!(read(&store, 0, size as usize), plain);
    let covered: u64 = extents(&store, 0, size, usize::MAX >> 1)
        .iter()
        .map(|e| e.len)
        .sum();
    assert_eq!(covered, size);
}

#[test]
fn discard_gives_whole_pages_back_and_zeroes_the_rest() {
    let store = Store::new(1 << 30, false);
    write(&store, 0, 9, 8 * 4096);
    store.discard(4096 - 512, 2 * 4096);
    assert_eq!(store.present_bytes(), 7 * 4096);
    let seen = read(&store, 0, 8 * 4096);
    assert!(seen[3584..11776].iter().all(|byte| *byte == 0));
    assert!(seen[..3584].iter().chain(&seen[11776..]).all(|byte| *byte == 9));
    store.discard(0, 1 << 30);
    assert_eq!(store.present_bytes(), 0);
}

#[test]
fn discard_gives_resident_memory_back_to_the_system() {
    let resident = || {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        let pages: u64 = statm.split(' ').nth(1).unwrap().parse().unwrap();
        pages * 4096
    };
    let store = Store::new(1 << 30, false);
    write(&store, 0, 1, 256 << 20);
    let before = resident();
    store.discard(0, 256 << 20);
    let freed = before.saturating_sub(resident());
    // Other tests allocate meanwhile, but nothing like this.
    assert!(freed > 192 << 20, "{freed} bytes were freed");
}

#[test]
fn extents_tell_holes_from_data_and_stop_at_the_limits() {
    let store = Store::new(1 << 40, false);
    write(&store, 1 << 20, 1, 4096);
    write(&store, (1 << 20) + 8192, 1, 4096);
    store.write_zeroes(2 << 20, 4096).unwrap();
    let mib = 1 << 20;
    let all = extents(&store, 0, 1 << 40, 100);
    let expected = [
        Extent::hole(mib),
        Extent::data(4096),
        Extent::hole(4096),
        Extent::data(4096),
        Extent::hole(mib - 3 * 4096),
        Extent::data(4096),
        Extent::hole((1 << 40) - 2 * mib - 4096),
    ];
    assert_eq!(all, expected);
    assert_eq!(extents(&store, 0, 1 << 40, 2), expected[..2]);
    assert_eq!(
        extents(&store, mib + 512, 1024, 100),
        [Extent::data(1024)],
        "a part of a page is of its page's kind"
    );
    assert!(store.extents(1 << 40, 1, 1, &mut Vec::new()).is_err());
}

#[test]
fn concurrent_writers_of_one_chunk_tear_no_copy_of_a_block() {
    let store = Store::new(CHUNK_BYTES, false);
    std::thread::scope(|scope| {
        for fill in 1..=4u8 {
            let store = &store;
            scope.spawn(move || {
                for _ in 0..2000 {
                    write(store, 4096, fill, 8192);
                    let seen = read(store, 4096, 8192);
                    assert!(seen.iter().all(|byte| *byte == seen[0]), "a torn copy");
                }
            });
        }
    });
}

#[test]
fn huge_pages_change_nothing_but_the_speed() {
    let store = Store::new(64 << 20, true);
    write(&store, GROUP_BYTES - 4096, 5, 8192);
    assert_eq!(read(&store, GROUP_BYTES - 4096, 8192), vec![5; 8192]);
    assert_eq!(
        store.present_bytes(),
        8192,
        "presence is counted in pages, whatever backs them"
    );
    store.discard(GROUP_BYTES - 4096, 4096);
    let seen = read(&store, GROUP_BYTES - 4096, 8192);
    assert!(seen[..4096].iter().all(|byte| *byte == 0) && seen[4096..].iter().all(|byte| *byte == 5));
}
