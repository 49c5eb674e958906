//! Bytes against the parser of FUSE requests: a request whose range and length are as they should be, or an error.

use blkmq_export::fuse::protocol::{
    Agreed, Call, DATA_BYTES_MAX, FIXED_BYTES_MAX, FRONT_BYTES, RING_DATA_BYTES_MAX, RING_HEADER_BYTES,
    Request, commit_id, init_answer, put_ring_answer,
};

/// Runs one input, as a request that was received whole, and as one that came through a ring.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let mut area = [0; RING_HEADER_BYTES];
    let len = data.len().min(area.len());
    area[..len].copy_from_slice(&data[..len]);
    run_in_ring(area);
    let fixed = &data[..data.len().min(FIXED_BYTES_MAX)];
    match Request::parse(fixed, data.len()) {
        Ok(request) => match request.call {
            Call::Read(range) | Call::Write { range, .. } => {
                assert!(range.len as usize <= DATA_BYTES_MAX, "{range:?}");
                assert!(range.offset.checked_add(range.len.into()).is_some(), "{range:?}");
                if matches!(request.call, Call::Write { .. }) {
                    assert_eq!(data.len(), FRONT_BYTES + range.len as usize);
                }
            }
            Call::Init(init) => {
                let agreed = Agreed::on(&init, true);
                assert_eq!(agreed.is_some(), init.major == 7 && init.minor >= 28);
                agreed.inspect(|agreed| assert_eq!(init_answer(&init, agreed, 128)[0], 7));
            }
            _ => {}
        },
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}

fn run_in_ring(mut area: [u8; RING_HEADER_BYTES]) {
    match Request::parse_in_ring(&area) {
        Ok(request) => {
            if let Call::Read(range) | Call::Write { range, .. } = request.call {
                assert!(range.len as usize <= RING_DATA_BYTES_MAX, "{range:?}");
            }
            let before = commit_id(&area);
            put_ring_answer(&mut area, request.unique, 0, 8);
            assert_eq!(commit_id(&area), before, "the kernel finds the request by it");
        }
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
