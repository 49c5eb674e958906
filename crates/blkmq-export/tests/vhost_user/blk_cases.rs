//! Tests the cases of QEMU's test of vhost-user-blk devices that no other test here has: indirect
//! descriptors, devices that are plugged and unplugged, and invalid discards and zeroing.
//! Interrupts are the monitor's task. Each case runs on a server of a zeroed disk at a path; other
//! tests use them, too.

use std::path::Path;

use blkmq_testkit::vhost_user::{DATA, FrontEnd, NEXT, WRITE, words};

/// A discard or zeroing of these sectors, in `bytes` bytes; 16 bytes are one range.
fn range(client: &FrontEnd, head: u16, kind: u32, sector: u64, sectors: u32, flags: u32, bytes: u32) {
    let base = client.fill(head, kind, 0);
    let range = words(&[sector, u64::from(sectors) | u64::from(flags) << 32]);
    client.write(base + 512, &[range.clone(), range].concat());
    client.descriptor(head.into(), base, 16, NEXT, head + 1);
    client.descriptor(u64::from(head) + 1, base + 512, bytes, NEXT, head + 2);
    client.descriptor(u64::from(head) + 2, base + 1024, 1, WRITE, 0);
}

/// Discards and zeroing with wrong flags, lengths or ranges fail without an effect on others.
pub(crate) fn discards_and_zeroing(path: &Path, disk_bytes: u64) {
    let end = disk_bytes / 512;
    for (what, kind, sector, sectors, flags, bytes, status) in [
        ("discard", DISCARD, 8, 8, 0, 16, OK),
        ("discard up to the end", DISCARD, end - 8, 8, 0, 16, OK),
        ("discard beyond the end", DISCARD, end - 8, 9, 0, 16, IO_ERROR),
        (
            "discard at an end that wraps",
            DISCARD,
            u64::MAX,
            8,
            0,
            16,
            IO_ERROR,
        ),
        ("discard of nothing", DISCARD, 8, 0, 0, 16, IO_ERROR),
        (
            "discard of more than there is",
            DISCARD,
            0,
            u32::MAX,
            0,
            16,
            IO_ERROR,
        ),
        ("discard with unmap", DISCARD, 8, 8, UNMAP, 16, UNSUPPORTED),
        (
            "discard with a flag of the future",
            DISCARD,
            8,
            8,
            2,
            16,
            UNSUPPORTED,
        ),
        ("discard of two ranges", DISCARD, 8, 8, 0, 32, IO_ERROR),
        ("discard of half a range", DISCARD, 8, 8, 0, 15, IO_ERROR),
        ("zeroing", WRITE_ZEROES, 16, 8, 0, 16, OK),
        ("zeroing with unmap", WRITE_ZEROES, 16, 8, UNMAP, 16, OK),
        (
            "zeroing with a flag of the future",
            WRITE_ZEROES,
            16,
            8,
            2,
            16,
            UNSUPPORTED,
        ),
        ("zeroing beyond the end", WRITE_ZEROES, end, 1, 0, 16, IO_ERROR),
        ("zeroing of two ranges", WRITE_ZEROES, 16, 8, 0, 32, IO_ERROR),
    ] {
        let client = FrontEnd::connect(path);
        client.start();
        // The data in the range and in front of it shows what was done.
        client.request(0, OUT, 16);
        client.write(DATA + 512, &[0x5a; 512]);
        range(&client, 3, kind, sector, sectors, flags, bytes);
        client.request(6, IN, 16);
        client.offer(&[0]);
        client.used(1);
        client.offer(&[0, 3]);
        client.used(2);
        client.offer(&[0, 3, 6]);
        client.used(3);
        assert_eq!(client.status(3), status, "{what}");
        let is_zeroed = kind == WRITE_ZEROES && status == OK;
        let expected = if is_zeroed { [0; 512] } else { [0x5a; 512] };
        assert_eq!(client.status(6), OK, "{what}");
        assert!(client.read::<512>(DATA + 6 * 4096 + 512) == expected, "{what}");
    }
}

/// A request in an indirect table is served like any other.
pub(crate) fn table_of_its_own(path: &Path) {
    let client = FrontEnd::connect(path);
    client.start();
    for (head, kind) in [(0, OUT), (1, IN)] {
        let base = client.fill(head, kind, 40);
        let table = base + 2048;
        let data = if kind == IN { NEXT | WRITE } else { NEXT };
        for (index, (at, bytes, flags)) in
            (0..).zip([(base, 16, NEXT), (base + 512, 512, data), (base + 1024, 1, WRITE)])
        {
            let word = bytes | u64::from(flags) << 32 | (index + 1) << 48;
            client.write(table + 16 * index, &words(&[at, word]));
        }
        client.descriptor(head.into(), table, 48, INDIRECT, 0);
    }
    client.write(DATA + 512, &[0xa5; 512]);
    client.offer(&[0]);
    client.used(1);
    client.offer(&[0, 1]);
    assert_eq!(client.used(2), [0, 1]);
    assert_eq!([client.status(0), client.status(1)], [OK, OK]);
    assert!(client.read::<512>(DATA + 4096 + 512) == [0xa5; 512]);
}

/// A device that is plugged and unplugged repeatedly finds its data.
pub(crate) fn plug_and_unplug(path: &Path) {
    let other = FrontEnd::connect(path);
    other.start();
    for round in 0_u8..30 {
        let client = FrontEnd::connect(path);
        client.start();
        client.request(0, IN, 4);
        client.request(3, OUT, 4);
        client.write(DATA + 3 * 4096 + 512, &[round + 1; 512]);
        client.offer(&[0]);
        client.used(1);
        assert!(client.read::<512>(DATA + 512) == [round; 512], "round {round}");
        client.offer(&[0, 3]);
        client.used(2);
        // Some are unplugged with requests in flight.
        if round % 3 == 0 {
            client.request(6, IN, 0);
            client.offer(&[0, 3, 6]);
        }
    }
    other.request(0, IN, 4);
    other.offer(&[0]);
    other.used(1);
    assert!(other.read::<512>(DATA + 512) == [30; 512]);
}

const IN: u32 = 0;
const OUT: u32 = 1;
const DISCARD: u32 = 11;
const WRITE_ZEROES: u32 = 13;
const UNMAP: u32 = 1;
const INDIRECT: u16 = 4;
const OK: u8 = 0;
const IO_ERROR: u8 = 1;
const UNSUPPORTED: u8 = 2;
