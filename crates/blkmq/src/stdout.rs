//! Decides how commands print what they were asked for: whole texts at once, to a reader who may leave when it has had enough.

use std::io::{self, Write};

use anyhow::Result;

/// Prints a text.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// What came of printing, where a reader who has left is no failure.
pub(crate) fn unless_reader_left(printed: Result<()>) -> Result<()> {
    let is_broken_pipe = |error: &anyhow::Error| {
        let error = error.downcast_ref::<io::Error>();
        error.is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
    };
    match printed {
        Err(error) if is_broken_pipe(&error) => Ok(()),
        printed => printed,
    }
}
