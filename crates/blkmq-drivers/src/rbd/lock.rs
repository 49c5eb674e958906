//! The exclusive lock of an image: only its holder may write. It is kept from the opening of the disk to
//! its end, and not given to others who ask.
//!
//! | holder of the lock | what is done |
//! |---|---|
//! | nobody | the lock is taken |
//! | a client that is alive (it watches the image) | wait for `lock_wait`; then the disk is refused |
//! | a client that has died (it is forgotten after 30 s, the default of OSDs) | librbd bars it from the cluster, and takes the lock |

use std::io;
use std::thread;
use std::time::{Duration, Instant};

use super::error::RbdError;
use super::sys::RawImage;

/// Takes the lock of an image. May block for `wait`, and for as long as the cluster needs to
/// answer.
///
/// # Errors
/// Another client that is alive has it, the image has none, or the cluster refuses.
pub(super) fn take(raw: &RawImage, image: &str, wait: Duration) -> Result<(), RbdError> {
    let end = Instant::now() + wait;
    let mut has_waited = false;
    loop {
        let Some(owner) = try_to_take(raw, image)? else {
            return Ok(());
        };
        if Instant::now() >= end {
            let image = image.to_owned();
            return Err(RbdError::Locked { image, owner });
        }
        if !std::mem::replace(&mut has_waited, true) {
            tracing::info!(
                source = %image,
                "rbd {image}: waits up to {wait:?} for the client at {owner}, which has its exclusive lock"
            );
        }
        thread::sleep(PAUSE);
    }
}

/// Checks that the image has a lock to take.
///
/// # Errors
/// It has none, or the cluster refuses.
pub(super) fn check(raw: &RawImage, image: &str) -> Result<(), RbdError> {
    let image = || image.to_owned();
    match raw.has_lock_feature() {
        Ok(true) => Ok(()),
        Ok(false) => Err(RbdError::NoLock { image: image() }),
        Err(error) => Err(RbdError::Call {
            image: image(),
            action: "ask for its features".into(),
            error,
            advice: "".into(),
        }),
    }
}

/// Takes the lock unless a client that is alive has it; returns that client.
fn try_to_take(raw: &RawImage, image: &str) -> Result<Option<String>, RbdError> {
    let failed = |action: &'static str, error: io::Error| match error.raw_os_error() {
        Some(libc::EINVAL) => RbdError::NoLock {
            image: image.to_owned(),
        },
        _ => RbdError::Call {
            image: image.to_owned(),
            action: action.into(),
            error,
            advice: "".into(),
        },
    };
    let owner = raw
        .lock_owner()
        .map_err(|error| failed("ask who has its lock", error))?;
    if let Some(owner) = owner {
        let watchers = raw
            .watchers()
            .map_err(|error| failed("ask who watches it", error))?;
        if watchers.contains(&owner) {
            return Ok(Some(owner));
        }
    }
    match raw.lock() {
        Ok(()) => Ok(None),
        // Another client came first, and keeps it.
        Err(error) if is_refusal(&error) => {
            let owner = raw.lock_owner().ok().flatten();
            Ok(Some(owner.unwrap_or_else(|| "an unknown address".to_owned())))
        }
        Err(error) => Err(failed("take its exclusive lock", error)),
    }
}

fn is_refusal(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EROFS | libc::EBUSY | libc::EAGAIN)
    )
}

const PAUSE: Duration = Duration::from_millis(250);
