//! What a signal does to a bench: the processes that it started end, the files that it made are removed, and
//! the results so far are printed, but not written to files.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use anyhow::{Result, ensure};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;

/// Makes the first SIGINT or SIGTERM end the bench at the next [`check`], and the second one end
/// the process.
///
/// # Errors
/// If the system refuses the handler.
pub(crate) fn listen() -> Result<()> {
    let stop = Arc::clone(STOP.get_or_init(Arc::default));
    for signal in [SIGINT, SIGTERM] {
        // In this order: the first signal only sets the flag, the second finds it set.
        flag::register_conditional_shutdown(signal, 128 + signal, Arc::clone(&stop))?;
        flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(())
}

/// Fails once a signal has come.
///
/// # Errors
/// If a signal has come.
pub(crate) fn check() -> Result<()> {
    // Relaxed: nothing is published with the flag.
    let is_asked = STOP.get().is_some_and(|stop| stop.load(Ordering::Relaxed));
    ensure!(!is_asked, "ended by a signal");
    Ok(())
}

static STOP: OnceLock<Arc<AtomicBool>> = OnceLock::new();
