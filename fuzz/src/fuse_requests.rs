//! Bytes against the parser of FUSE requests: a request whose range and length are as they should be, or an error.

use blkmq_export::fuse::protocol::{
    Call, DATA_BYTES_MAX, FIXED_BYTES_MAX, FRONT_BYTES, Request, init_answer,
};

/// Runs one input, as a request that was received whole.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
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
                let agreed = init_answer(&init, 128);
                assert_eq!(agreed.is_some(), init.major == 7 && init.minor >= 28);
            }
            _ => {}
        },
        Err(error) => assert!(!error.to_string().is_empty()),
    }
}
