//! The log of an address about its connections: no more lines than its budget has. `listener` and
//! `connection` log through it.

use std::fmt;

use blkmq_core::time::Instant;
use blkmq_host::LogBudget;

/// The lines that may still be written; all connections of an address share it.
#[derive(Debug)]
pub(crate) struct Log {
    /// The front door, with which each line begins.
    door: &'static str,
    budget: LogBudget,
}

/// What a line is about, for who looks for all lines about a disk or a client: in JSON and in the journal these are
/// fields of their own. The text of the line has them, too.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct About<'a> {
    pub(crate) disk: Option<&'a str>,
    pub(crate) client: Option<&'a str>,
    /// The address at which it came, where no disk is known yet.
    pub(crate) export: Option<&'a str>,
}

impl Log {
    pub(crate) fn new(door: &'static str) -> Self {
        Self {
            door,
            budget: LogBudget::new("other connections of this address"),
        }
    }

    /// The front door.
    pub(crate) fn door(&self) -> &'static str {
        self.door
    }

    /// Writes a warning, unless too many lines were written lately.
    pub(crate) fn warn(&self, now: Instant, about: About<'_>, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.budget.take(now) {
            let About { disk, client, export } = about;
            tracing::warn!(disk, client, export, "{}: {what}{withheld}", self.door);
        }
    }

    /// Writes an event that is no defect of this daemon or of the client, unless too many lines
    /// were written lately.
    pub(crate) fn info(&self, now: Instant, about: About<'_>, what: fmt::Arguments<'_>) {
        if let Some(withheld) = self.budget.take(now) {
            let About { disk, client, export } = about;
            tracing::info!(disk, client, export, "{}: {what}{withheld}", self.door);
        }
    }
}
