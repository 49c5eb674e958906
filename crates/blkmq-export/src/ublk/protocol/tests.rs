//! What the bytes are, against those of the kernel's header, and requests that no kernel sends.

use super::*;

const SHAPE: Shape = Shape {
    size: 1 << 20,
    block_size: 4096,
    read_only: false,
    data_bytes_max: DATA_BYTES_MAX,
    memory: 0x7000,
};

fn descriptor(word: u32, sectors: u32, start: u64, memory: u64) -> [u8; DESCRIPTOR_BYTES] {
    let mut bytes = [0; DESCRIPTOR_BYTES];
    put(&mut bytes, 0, &word.to_ne_bytes());
    put(&mut bytes, 4, &sectors.to_ne_bytes());
    put(&mut bytes, 8, &start.to_ne_bytes());
    put(&mut bytes, 16, &memory.to_ne_bytes());
    bytes
}

fn parse(word: u32, sectors: u32, start: u64) -> Result<Request, Refused> {
    Request::parse(&descriptor(word, sectors, start, SHAPE.memory), &SHAPE)
}

#[test]
fn commands_have_the_numbers_of_the_kernel() {
    assert_eq!((ADD, GET_INFO), (0xc020_7504, 0x8020_7512));
    assert_eq!((FETCH, COMMIT_AND_FETCH), (0xc010_7520, 0xc010_7521));
}

#[test]
fn each_operation_is_read_with_its_modifiers() {
    let read = parse(0, 8, 16).unwrap();
    assert_eq!((read.op, read.offset, read.len), (Op::Read, 8192, 4096));
    let write = parse(1 | FUA, 16, 0).unwrap();
    assert_eq!((write.op, write.flags, write.len), (Op::Write, Flags::FUA, 8192));
    assert_eq!(parse(2, 0, 0).unwrap().op, Op::Flush);
    let discard = parse(3, 2048, 0).unwrap();
    assert_eq!((discard.op, discard.len), (Op::Discard, 1 << 20));
    let zeroes = parse(5 | NO_UNMAP | FUA, 8, 0).unwrap();
    assert_eq!(zeroes.flags, Flags::FUA.with(Flags::NO_UNMAP));
    assert_eq!(parse(5, 8, 0).unwrap().flags, Flags::NONE);
}

#[test]
fn range_or_operation_that_the_disk_lacks_is_refused() {
    assert_eq!(parse(4, 8, 0), Err(Refused::Unsupported(4)));
    assert_eq!(parse(0, 8, 2048), Err(Refused::Range(2048, 8)));
    assert_eq!(parse(0, 0, 0), Err(Refused::Range(0, 0)));
    assert_eq!(parse(0, 1, 0), Err(Refused::Range(0, 1)));
    assert_eq!(parse(0, 8, u64::MAX), Err(Refused::Range(u64::MAX, 8)));
    assert_eq!(parse(0, 512, 0), Err(Refused::TooLong(256 << 10)));
    let elsewhere = Request::parse(&descriptor(1, 8, 0, 0x8000), &SHAPE);
    assert_eq!(elsewhere, Err(Refused::Elsewhere(0x8000)));
    let read_only = Shape {
        read_only: true,
        ..SHAPE
    };
    let write = Request::parse(&descriptor(3, 8, 0, 0), &read_only);
    assert_eq!(write, Err(Refused::ReadOnly));
}

#[test]
fn parameters_of_a_device_are_read_as_they_were_written() {
    let info = DeviceInfo {
        queues: 2,
        depth: 64,
        state: QUIESCED,
        data_bytes_max: DATA_BYTES_MAX,
        number: 7,
        process: -1,
        features: RECOVERY | REISSUE,
        identity: identity("vm1"),
    };
    assert_eq!(DeviceInfo::parse(&info.bytes()), info);
    assert!(info.is_served() && info.has(RECOVERY) && !info.has(RECOVERY | UNPRIVILEGED));
    assert!(!DeviceInfo { depth: 0, ..info }.is_served());
    assert_ne!(identity("vm1"), identity("vm2"));
}

#[test]
fn parameters_stand_where_the_kernel_reads_them() {
    let parameters = Parameters {
        size: 1 << 30,
        block_size: 512,
        physical_block: 4096,
        optimal_io: 4 << 20,
        data_bytes_max: DATA_BYTES_MAX,
        read_only: true,
        discard_max: 1 << 20,
        discard_granularity: 4096,
        zeroes_max: 1 << 30,
    };
    let bytes = parameters.bytes();
    let word = |at| u32::from_ne_bytes(part(&bytes, at));
    assert_eq!((word(0), word(4), word(8)), (60, 3, 13));
    assert_eq!(bytes[12..16], [9, 12, 22, 12]);
    assert_eq!((word(16), word(24)), (256, 1 << 21));
    assert_eq!((word(44), word(48), word(52), word(56)), (4096, 2048, 1 << 21, 1));
    let read = Parameters::parse(&bytes);
    assert_eq!((read.size, read.block_size, read.read_only), (1 << 30, 512, true));
}
