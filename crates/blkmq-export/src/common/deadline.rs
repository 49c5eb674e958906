//! The key `handshake_deadline`, which several front doors have in their tables: how long a client may take to
//! begin.

use std::time::Duration;

use blkmq_host::value::{self, ConfigError};

use crate::keys::{Key, Keys};

/// The key, with what a client must have done by then.
pub(crate) const fn key(help: &'static str) -> Key {
    Key {
        name: NAME,
        range: "100ms and more",
        default: "10s",
        help,
        flag: None,
    }
}

/// Parses the key, if the table has it.
///
/// # Errors
/// It is no time, or too short.
pub(crate) fn parse(table: &Keys) -> Result<Option<Duration>, ConfigError> {
    let Some(text) = table.text(NAME)? else {
        return Ok(None);
    };
    let deadline = Duration::from_nanos(value::time(NAME, text)?.0);
    match deadline < LEAST {
        true => value::bad(NAME, text, "at least 100ms, for a client on a busy host"),
        false => Ok(Some(deadline)),
    }
}

const NAME: &str = "handshake_deadline";
const LEAST: Duration = Duration::from_millis(100);
