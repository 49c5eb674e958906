//! The sandbox of the daemon: what it may open, where it may connect, and which calls of the system its threads may
//! make, by landlock (`files`) and seccomp (`calls`). `reach` finds what a configuration needs. `serve` enters the
//! sandbox between reading the configuration and opening anything; `docs/operate/sandbox.md` is for operators.

mod calls;
mod files;
mod reach;

use std::io;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Result, bail};
use blkmq_config::{Config, Sandbox as Mode};
use blkmq_host::OnReactor;
use blkmq_host::threads;

use self::calls::Calls;
use self::reach::Reach;

/// The sandbox that this process is in, or would be.
#[derive(Debug)]
pub struct Sandbox {
    mode: Mode,
    /// What may be opened; all of it, if there is none.
    reach: Option<Reach>,
    /// What reactors may call.
    reactors: Option<Calls>,
    /// One line for the log: what is confined, and what is not.
    pub summary: String,
}

impl Sandbox {
    /// Confines the calling thread, and those that it will start, to what a configuration, from this file, needs. To be
    /// called before there are others: they would stay as they are.
    ///
    /// # Errors
    /// The configuration asks for a sandbox, and the kernel or an export prevents it.
    pub fn enter(config: &Config, file: Option<&Path>) -> Result<Self> {
        let mode = config.sandbox.unwrap_or(Mode::On);
        if mode == Mode::Off {
            return Ok(Self::none());
        }
        let is_asked_for = config.sandbox == Some(Mode::On);
        let mut reach = Reach::of(config)?;
        if let Some(file) = file {
            reach.add_configuration(file);
        }
        if reach.mounts && is_asked_for {
            bail!(
                "sandbox=on rejected: an export of fuse mounts, which the kernel refuses in a sandbox of files; leave sandbox out \
                 to be confined in calls alone, or serve fuse by a daemon of its own"
            );
        }
        if reach.mounts && !has_admin() {
            // fusermount3 gains what this process lacks, which no_new_privs would prevent.
            return Ok(Self::without(
                "off: fusermount3 has to gain privileges for exports of fuse",
            ));
        }
        if mode == Mode::Warn {
            return Self::warn(reach);
        }
        Self::on(reach, is_asked_for)
    }

    /// No sandbox, for a daemon within another program.
    pub fn none() -> Self {
        Self::without("off: the daemon may do what its user may do")
    }

    fn without(why: &str) -> Self {
        Self {
            mode: Mode::Off,
            reach: None,
            reactors: None,
            summary: why.to_owned(),
        }
    }

    fn warn(reach: Reach) -> Result<Self> {
        threads::start_starter()?;
        let calls = Calls::of(&reach, calls::Denied::Logged);
        calls.enter_process()?;
        Ok(Self {
            mode: Mode::Warn,
            summary: "warn: nothing is refused; the kernel's log has calls that sandbox=on would refuse"
                .to_owned(),
            reactors: Some(calls),
            reach: Some(reach),
        })
    }

    fn on(reach: Reach, is_asked_for: bool) -> Result<Self> {
        rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)?;
        let files = match reach.mounts {
            true => Err("files are not: an export of fuse mounts".to_owned()),
            false => files::enter(&reach).map_err(|error| format!("files are not: {error:#}")),
        };
        threads::start_starter()?;
        let calls = Calls::of(&reach, calls::Denied::Refused);
        let entered = calls.enter_process();
        let entered = entered.map_err(|error| format!("calls are not: {error}"));
        let problems: Vec<&str> = [files.as_ref().err(), entered.as_ref().err()]
            .into_iter()
            .flatten()
            .map(String::as_str)
            .collect();
        if is_asked_for && !problems.is_empty() {
            bail!("sandbox=on rejected: {}", problems.join("; "));
        }
        let summary = match problems.as_slice() {
            [] => format!("on: {}", files.as_deref().unwrap_or_default()),
            _ => format!("on in part: {}", problems.join("; ")),
        };
        Ok(Self {
            mode: Mode::On,
            reach: files.is_ok().then_some(reach),
            reactors: entered.is_ok().then_some(calls),
            summary,
        })
    }

    /// What each reactor calls when it is set up: from then on it opens and makes nothing.
    pub fn on_reactor(&self) -> Option<OnReactor> {
        let calls = self.reactors.clone()?;
        Some(Arc::new(move || calls.enter_reactor().map_err(io::Error::other)))
    }

    /// Whether the rings of reactors are restricted to what drivers and doors use.
    pub fn restricts_rings(&self) -> bool {
        self.mode == Mode::On
    }

    /// Checks that what a new configuration of the running daemon adds to the old one needs nothing that it may not.
    /// May block for as long as a file's drive does not answer.
    ///
    /// # Errors
    /// What is outside, and what to do.
    pub fn check(&self, old: &Config, new: &Config) -> Result<()> {
        let Some(has) = &self.reach else {
            return Ok(());
        };
        match Reach::of_new(old, new).and_then(|needs| has.covers(&needs)) {
            Err(error) if self.mode == Mode::Warn => {
                tracing::warn!("sandbox=on would refuse this: {error:#}");
                Ok(())
            }
            checked => checked,
        }
    }
}

/// Returns whether this process may administrate the system.
fn has_admin() -> bool {
    let sets = rustix::thread::capabilities(None);
    sets.is_ok_and(|sets| sets.effective.contains(rustix::thread::CapabilitySet::SYS_ADMIN))
}
