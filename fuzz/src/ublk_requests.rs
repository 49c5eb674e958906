//! Bytes against the parsers of ublk: a request that the disk has, or an error; and what a device is, read as it was written.

use blkmq_core::bio::Op;
use blkmq_export::ublk::protocol::{
    DATA_BYTES_MAX, DESCRIPTOR_BYTES, DeviceInfo, INFO_BYTES, PARAMETERS_BYTES, Parameters, Request, Shape,
};
use blkmq_export::ublk::saved::SavedDevice;

/// Runs one input: the disk's shape, and a descriptor.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    if let Some(saved) = SavedDevice::parse(data).ok() {
        assert_eq!(saved.bytes(), data);
    }
    let info = DeviceInfo::parse(&first::<INFO_BYTES>(data));
    assert_eq!(DeviceInfo::parse(&info.bytes()), info);
    let _ = Parameters::parse(&first::<PARAMETERS_BYTES>(data));
    let [shift, blocks, read_only, has_memory] = first(data);
    let shape = Shape {
        size: u64::from(blocks) << (9 + shift % 4),
        block_size: 512 << (shift % 4),
        read_only: read_only % 2 == 1,
        data_bytes_max: DATA_BYTES_MAX,
        memory: 0x1000,
    };
    let mut descriptor: [u8; DESCRIPTOR_BYTES] = first(data.get(4..).unwrap_or_default());
    if has_memory % 2 == 1 {
        descriptor[16..].copy_from_slice(&shape.memory.to_ne_bytes());
    }
    match Request::parse(&descriptor, &shape) {
        Ok(request) => check(&request, &shape),
        Err(refused) => assert!(refused.errno() > 0 && !refused.to_string().is_empty()),
    }
}

fn check(request: &Request, shape: &Shape) {
    let block = u64::from(shape.block_size);
    assert!(request.offset.is_multiple_of(block) && request.len.is_multiple_of(block));
    assert!(
        request
            .offset
            .checked_add(request.len)
            .is_some_and(|end| end <= shape.size)
    );
    assert!(!request.op.is_write() || !shape.read_only);
    assert!(!request.op.has_data() || request.len <= DATA_BYTES_MAX.into());
    assert_eq!(request.len == 0, request.op == Op::Flush);
}

/// The first bytes, with zeroes where there are none.
fn first<const N: usize>(data: &[u8]) -> [u8; N] {
    let mut bytes = [0; N];
    let len = data.len().min(N);
    bytes[..len].copy_from_slice(&data[..len]);
    bytes
}
