//! Decides what an address writes to the log about its connections: no more lines than its budget has. `listener` and `connection`
//! say what they have to say through it.

use std::fmt;

use blkmq_core::time::Instant;
use blkmq_host::LogBudget;

/// The lines that may still be written; all connections of an address share it.
#[derive(Debug)]
pub(super) struct Log(LogBudget);

impl Default for Log {
    fn default() -> Self {
        Self(LogBudget::new("other connections of this address"))
    }
}

impl Log {
    /// Writes a warning, unless too many lines were written lately.
    pub(super) fn warn(&self, now: Instant, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.0.take(now) {
            tracing::warn!("nbd: {what}{withheld}");
        }
    }

    /// Writes what is no defect of ours or the client's, unless too many lines were written lately.
    pub(super) fn info(&self, now: Instant, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.0.take(now) {
            tracing::info!("nbd: {what}{withheld}");
        }
    }
}
