//! A GPT of sectors of 512 bytes, as UEFI has it: made in memory, and read from what a client sees of a disk.

use crate::common::pattern::SECTOR;

/// A partition, in sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Partition {
    pub(super) start: u64,
    pub(super) sectors: u64,
}

/// The content of a disk with [`PARTITIONS`], each with a mark in its first and in its last sector.
pub(super) fn disk(bytes: usize) -> Vec<u8> {
    let mut disk = vec![0; bytes];
    let end = (bytes / SECTOR) as u64;
    // A boot record with one partition, of the kind that protects the disk from programs that do not know GPTs.
    disk[446..462].copy_from_slice(&[0, 0, 2, 0, 0xee, 0xff, 0xff, 0xff, 1, 0, 0, 0, 0, 0, 0, 0]);
    disk[458..462].copy_from_slice(&(end as u32 - 1).to_le_bytes());
    disk[510..512].copy_from_slice(&[0x55, 0xaa]);

    let mut entries = vec![0; ENTRIES * ENTRY];
    for ((number, partition), entry) in (1..).zip(PARTITIONS).zip(entries.chunks_mut(ENTRY)) {
        entry[..16].copy_from_slice(&LINUX_DATA);
        entry[16..32].copy_from_slice(&[number; 16]);
        entry[32..40].copy_from_slice(&partition.start.to_le_bytes());
        entry[40..48].copy_from_slice(&(partition.start + partition.sectors - 1).to_le_bytes());
        for sector in [partition.start, partition.start + partition.sectors - 1] {
            disk[sector as usize * SECTOR..][..SECTOR].fill(number);
        }
    }
    let table = (ENTRIES * ENTRY / SECTOR) as u64;
    for (own, other, at) in [(1, end - 1, 2), (end - 1, 1, end - 1 - table)] {
        let header = header(own, other, at, end, &entries);
        disk[own as usize * SECTOR..][..HEADER].copy_from_slice(&header);
        disk[at as usize * SECTOR..][..entries.len()].copy_from_slice(&entries);
    }
    disk
}

fn header(own: u64, other: u64, entries_at: u64, end: u64, entries: &[u8]) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..16].copy_from_slice(b"EFI PART\0\0\x01\0\x5c\0\0\0");
    let first = 2 + (entries.len() / SECTOR) as u64;
    for (at, value) in [
        (24, own),
        (32, other),
        (40, first),
        (48, end - first),
        (72, entries_at),
    ] {
        header[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    header[56..72].fill(7);
    for (at, value) in [(80, ENTRIES as u32), (84, ENTRY as u32), (88, crc32(entries))] {
        header[at..at + 4].copy_from_slice(&value.to_le_bytes());
    }
    let sum = crc32(&header);
    header[16..20].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Returns the partitions of a disk with sectors of 512 bytes, as a guest finds them.
///
/// # Errors
/// If there is no table, or a damaged one.
pub(super) fn partitions(disk: &[u8]) -> Result<Vec<Partition>, String> {
    let mut header: [u8; HEADER] = disk[SECTOR..SECTOR + HEADER].try_into().expect("its length");
    if !header.starts_with(b"EFI PART") {
        return Err(format!("no table: sector 1 begins with {:x?}", &header[..8]));
    }
    let short =
        |bytes: &[u8], at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    let long =
        |bytes: &[u8], at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
    let sum = short(&header, 16);
    header[16..20].fill(0);
    let entries = &disk[long(&header, 72) as usize * SECTOR..][..ENTRIES * ENTRY];
    if (sum, short(&header, 88)) != (crc32(&header), crc32(entries)) {
        return Err("a table with a wrong sum".to_owned());
    }
    let used = entries.chunks(ENTRY).filter(|entry| entry[..16] != [0; 16]);
    let partitions = used.map(|entry| Partition {
        start: long(entry, 32),
        sectors: long(entry, 40) + 1 - long(entry, 32),
    });
    Ok(partitions.collect())
}

/// The sum of Ethernet's frames, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let mut sum = u32::MAX;
    for byte in bytes {
        sum ^= u32::from(*byte);
        for _ in 0..8 {
            sum = (sum >> 1) ^ ((sum & 1) * 0xedb8_8320);
        }
    }
    !sum
}

/// One that begins with a block of 4096 bytes, and one that does not.
pub(super) const PARTITIONS: [Partition; 2] = [
    Partition {
        start: 2048,
        sectors: 8192,
    },
    Partition {
        start: 10_241,
        sectors: 4099,
    },
];
const ENTRIES: usize = 128;
const ENTRY: usize = 128;
const HEADER: usize = 92;
/// The kind of partition that Linux' tools make, 0FC63DAF-8483-4772-8E79-3D69D8477DE4.
const LINUX_DATA: [u8; 16] = [
    0xaf, 0x3d, 0xc6, 0x0f, 0x83, 0x84, 0x72, 0x47, 0x8e, 0x79, 0x3d, 0x69, 0xd8, 0x47, 0x7d, 0xe4,
];

#[test]
fn table_that_was_made_is_read_and_a_damaged_one_is_refused() {
    assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
    let mut disk = disk(8 << 20);
    assert_eq!(partitions(&disk).unwrap(), PARTITIONS);
    disk[2 * SECTOR + 32] ^= 1;
    assert!(partitions(&disk).is_err());
    assert!(partitions(&[0; 8192]).is_err());
}
