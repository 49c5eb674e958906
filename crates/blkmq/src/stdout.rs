//! Decides how commands print their output: whole texts at once, to a reader that may close early.

use std::io::{self, Write};

use anyhow::Result;

/// Prints a text.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// The result of printing; a reader that has closed is no failure.
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
