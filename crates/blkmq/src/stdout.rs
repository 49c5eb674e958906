//! The output of commands: whole texts at once, to a reader that may close early.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use anyhow::Result;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;

/// Prints a text.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Waits, unless the output's reader closes it meanwhile: returns whether it has. A command that prints only what changes would
/// not find out.
pub(crate) fn has_reader_left_within(output: impl AsFd, limit: Duration) -> bool {
    let end = Instant::now() + limit;
    loop {
        let left = end.saturating_duration_since(Instant::now());
        // What only errors are asked of reports nothing else.
        let mut polled = [PollFd::new(&output, PollFlags::empty())];
        match poll(&mut polled, left.try_into().ok().as_ref()) {
            Err(Errno::INTR) => {}
            Ok(1) => return true,
            _ => return false,
        }
    }
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
