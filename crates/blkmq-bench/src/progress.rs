//! The progress display of a long run: which point is being measured and how much time is left, on stderr. It
//! does not use `indicatif`: a line per step reads the same in a terminal and in a log, and no thread draws
//! during measurements.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

/// The progress of a run of known length.
pub(crate) struct Progress {
    total: usize,
    done: usize,
    started: Instant,
    last_line: Option<Instant>,
    terminal: bool,
}

impl Progress {
    /// Starts a run of `total` steps.
    pub(crate) fn new(total: usize) -> Self {
        Self {
            total,
            done: 0,
            started: Instant::now(),
            last_line: None,
            terminal: std::io::stderr().is_terminal(),
        }
    }

    /// Shows that the next step begins. A terminal shows every step on one line, a log gets a line
    /// every ten seconds.
    pub(crate) fn step(&mut self, what: &str, round: u32, rounds: u32) {
        let left = self.left();
        self.done += 1;
        let (done, total) = (self.done, self.total);
        if self.terminal {
            let line = format!("[{done}/{total}] round {round}/{rounds}  {what}{left}");
            // Wider than the terminal, the line would wrap, and its first half would remain.
            let line: String = line.chars().take(LINE_CHARS_MAX).collect();
            eprint!("\r\x1b[2K{line}");
            let _ = std::io::stderr().flush();
        } else if self.last_line.is_none_or(|last| last.elapsed() >= LOG_EVERY) {
            eprintln!("[{done}/{total}] round {round}/{rounds}  {what}{left}");
            self.last_line = Some(Instant::now());
        }
    }

    /// Clears the line.
    pub(crate) fn finish(&self) {
        if self.terminal {
            eprint!("\r\x1b[2K");
        }
    }

    /// The remaining time at the present pace; empty before there is a pace.
    fn left(&self) -> String {
        if self.done == 0 {
            return String::new();
        }
        let each = self.started.elapsed() / self.done as u32;
        let left = each * (self.total - self.done) as u32;
        format!("  {} s left", left.as_secs())
    }
}

const LOG_EVERY: Duration = Duration::from_secs(10);
const LINE_CHARS_MAX: usize = 79;
