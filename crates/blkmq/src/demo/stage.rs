//! The run of the tenants, and the part that is measured: they start, the scheduler is switched under their
//! load, they warm up, and requests that end from then until the stop are counted.

use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::thread::{self, ScopedJoinHandle, sleep};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};

use super::client::{Client, Sample};
use super::report::{Run, Tenant};
use super::scene::Rule;

/// What a tenant is to do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Phase {
    /// Run; nothing is counted.
    WarmUp,
    /// Run; requests that end are counted.
    Measure,
    /// Finish what is in flight and return.
    Stop,
}

/// Signals the phase to all tenants.
#[derive(Debug)]
pub(super) struct Cue(AtomicU8);

impl Cue {
    pub(super) fn new(phase: Phase) -> Self {
        Self(AtomicU8::new(phase as u8))
    }

    /// Relaxed on both sides: it publishes nothing else.
    pub(super) fn phase(&self) -> Phase {
        match self.0.load(Ordering::Relaxed) {
            0 => Phase::WarmUp,
            1 => Phase::Measure,
            _ => Phase::Stop,
        }
    }

    fn give(&self, phase: Phase) {
        self.0.store(phase as u8, Ordering::Relaxed);
    }
}

/// The runs, one after the other.
pub(super) struct Stage<'a> {
    length: Duration,
    total: usize,
    played: usize,
    stop: &'a AtomicBool,
    progress: Progress,
}

/// The result of one run.
pub(super) struct Played(Vec<(Tenant, Sample)>);

impl Played {
    pub(super) fn into_run(self, rule: Rule) -> Run {
        Run {
            rule,
            tenants: self.0,
        }
    }
}

impl<'a> Stage<'a> {
    /// A stage for `total` runs of `length` each, until `stop` is set.
    pub(super) fn new(length: Duration, total: usize, stop: &'a AtomicBool) -> Self {
        Self {
            length,
            total,
            played: 0,
            stop,
            progress: Progress {
                is_terminal: std::io::stderr().is_terminal(),
            },
        }
    }

    /// Runs the tenants together. `switch` is called while they run, before anything is counted.
    ///
    /// # Errors
    /// The error of `switch` or of a tenant's server, or `stop` was set.
    pub(super) fn play(
        &mut self,
        what: &str,
        switch: impl FnOnce() -> Result<()>,
        tenants: Vec<(Tenant, &mut Client)>,
    ) -> Result<Played> {
        let each = self.length + WARM_UP;
        let left = each * (self.total - self.played) as u32;
        self.played += 1;
        self.progress.say(&format!(
            "[{}/{}] {what}  {} s left",
            self.played,
            self.total,
            left.as_secs_f64().ceil()
        ));
        let cue = Cue::new(Phase::WarmUp);
        let samples = thread::scope(|scope| {
            let mut running = Vec::new();
            for (tenant, client) in tenants {
                let cue = &cue;
                running.push((tenant, scope.spawn(move || client.run(cue))));
            }
            let conducted = self.conduct(&cue, switch, &running);
            // Always, or the tenants would never stop.
            cue.give(Phase::Stop);
            let samples: Result<Vec<_>> = running.into_iter().map(join).collect();
            let samples = samples?;
            conducted.map(|()| samples)
        })?;
        Ok(Played(samples))
    }

    fn conduct(
        &self,
        cue: &Cue,
        switch: impl FnOnce() -> Result<()>,
        running: &[(Tenant, Running<'_>)],
    ) -> Result<()> {
        self.wait(WARM_UP / 2, running)?;
        switch()?;
        self.wait(WARM_UP / 2, running)?;
        cue.give(Phase::Measure);
        self.wait(self.length, running)
    }

    /// Waits, unless a signal or the end of a tenant interrupts.
    fn wait(&self, time: Duration, running: &[(Tenant, Running<'_>)]) -> Result<()> {
        let end = Instant::now() + time;
        loop {
            // Relaxed: it publishes nothing else.
            if self.stop.load(Ordering::Relaxed) {
                bail!("interrupted: nothing is left behind");
            }
            let left = end.saturating_duration_since(Instant::now());
            if left.is_zero() || running.iter().any(|(_, thread)| thread.is_finished()) {
                return Ok(());
            }
            sleep(left.min(LOOK_EVERY));
        }
    }
}

type Running<'scope> = ScopedJoinHandle<'scope, Result<Sample>>;

fn join((tenant, thread): (Tenant, Running<'_>)) -> Result<(Tenant, Sample)> {
    let sample = thread
        .join()
        .map_err(|_| anyhow!("the client of the {tenant} tenant panicked"))?;
    match sample {
        Ok(sample) => Ok((tenant, sample)),
        Err(error) => Err(error.context(format!("the client of the {tenant} tenant"))),
    }
}

/// Progress for a waiting user, on standard error: one line in place on a terminal, a line for each
/// run in a log.
struct Progress {
    is_terminal: bool,
}

impl Progress {
    fn say(&self, line: &str) {
        if self.is_terminal {
            eprint!("\r\x1b[2K{line}");
            let _ = std::io::stderr().flush();
        } else {
            eprintln!("{line}");
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if self.is_terminal {
            eprint!("\r\x1b[2K");
        }
    }
}

/// Before each measurement, half of it before the scheduler is switched.
const WARM_UP: Duration = Duration::from_millis(400);
const LOOK_EVERY: Duration = Duration::from_millis(50);
