//! The form of a message: text, JSON, entries of systemd's journal, or lines for it: the journal adds times itself and
//! takes a line's priority from the number in front of it (`sd-daemon(3)`).

use std::fmt;
use std::os::linux::fs::MetadataExt;

use serde_json::json;
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::fmt::format::{Writer, debug_fn};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

use super::journal::Entry;

/// How messages are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// A line each, with its time.
    Text,
    /// An object in a line each.
    Json,
    /// Lines for the journal.
    Journal,
    /// Entries of the journal, in its own protocol.
    Entries,
}

impl Format {
    /// The format in `BLKMQ_LOG_FORMAT`; without it text or, if standard error is the journal's
    /// stream, entries. Where the journal has no socket for them, they become lines.
    ///
    /// # Errors
    /// The format is unknown.
    pub fn of_environment() -> anyhow::Result<Self> {
        let asked = super::setting("BLKMQ_LOG_FORMAT")?;
        match asked.as_str() {
            "json" => Ok(Self::Json),
            "journal" => Ok(Self::Journal),
            "text" => Ok(Self::Text),
            "" if is_journal() => Ok(Self::Entries),
            "" => Ok(Self::Text),
            _ => anyhow::bail!(
                "environment: BLKMQ_LOG_FORMAT: {asked:?} rejected: must be text, json or journal"
            ),
        }
    }

    /// The lines of a message that no [`Event`] belongs to.
    pub(super) fn message(self, level: Level, text: &str) -> Vec<u8> {
        let lines = match self {
            Self::Entries => return Entry::of_message(level, text),
            Self::Text => format!("{text}\n"),
            Self::Json => {
                let mut timestamp = String::new();
                // Without a clock there is no time.
                let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
                let fields = json!({"timestamp": timestamp, "level": level.as_str(), "message": text});
                format!("{fields}\n")
            }
            Self::Journal => {
                let priority = priority(level);
                text.lines().map(|line| format!("<{priority}>{line}\n")).collect()
            }
        };
        lines.into_bytes()
    }
}

/// Returns whether standard error is the stream that systemd has named in `JOURNAL_STREAM`.
fn is_journal() -> bool {
    let named = std::env::var("JOURNAL_STREAM").unwrap_or_default();
    let stderr = std::fs::metadata("/proc/self/fd/2");
    stderr.is_ok_and(|stderr| named == format!("{}:{}", stderr.st_dev(), stderr.st_ino()))
}

/// The fields of a message in a line: those that say what it is about are left out, since its text says that, too.
pub fn fields_of_lines() -> impl for<'a> FormatFields<'a> + 'static {
    debug_fn(|writer, field, value| match field.name() {
        "message" => write!(writer, "{value:?}"),
        name if SUBJECTS.contains(&name) => Ok(()),
        name => write!(writer, " {name}={value:?}"),
    })
}

/// Puts a message's priority in front of it.
#[derive(Clone, Copy, Debug)]
pub struct WithPriority<F>(pub F);

impl<S, N, F> FormatEvent<S, N> for WithPriority<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        context: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "<{}>", priority(*event.metadata().level()))?;
        self.0.format_event(context, writer, event)
    }
}

pub(super) fn priority(level: Level) -> u8 {
    match level {
        Level::ERROR => 3,
        Level::WARN => 4,
        Level::INFO => 6,
        _ => 7,
    }
}

/// Fields that say what a message is about.
const SUBJECTS: [&str; 5] = ["disk", "group", "client", "export", "source"];
