//! Whether a running daemon may be changed. Two parties may forbid it, each for itself: the end of
//! the daemon, and a takeover by another one.

use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};

/// The marks of both. A change looks at them when it has the lock of the state, and whoever has set a
/// mark takes that lock once, so no change begins afterwards.
#[derive(Debug, Default)]
pub(super) struct Gate {
    is_closed: AtomicBool,
    is_held: AtomicBool,
}

/// Forbids changes while another daemon takes over, until it is dropped.
#[derive(Debug)]
pub(crate) struct Held<'a>(&'a Gate);

impl Gate {
    /// Forbids changes for good.
    pub(super) fn close(&self) {
        // Release: pairs with the Acquire in `is_closed`.
        self.is_closed.store(true, Ordering::Release);
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    /// Forbids changes for a while. For one thread at a time.
    pub(super) fn hold(&self) -> Held<'_> {
        // Release: pairs with the Acquire in `check`.
        self.is_held.store(true, Ordering::Release);
        Held(self)
    }

    /// # Errors
    /// Why no change is permitted now.
    pub(super) fn check(&self) -> Result<()> {
        if self.is_closed() {
            bail!("the daemon shuts down");
        }
        if self.is_held.load(Ordering::Acquire) {
            bail!("another daemon takes over: try again");
        }
        Ok(())
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.is_held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn takeover_that_fails_leaves_the_mark_of_the_end() {
        let gate = Gate::default();
        gate.check().unwrap();
        let held = gate.hold();
        assert!(gate.check().unwrap_err().to_string().contains("takes over"));
        gate.close();
        drop(held);
        assert!(gate.check().unwrap_err().to_string().contains("shuts down"));
        let gate = Gate::default();
        drop(gate.hold());
        gate.check().unwrap();
    }
}
