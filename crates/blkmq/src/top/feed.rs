//! The feed of a daemon's activity: in notifications after each interval, on a thread of its own, which
//! reconnects when the daemon is lost. Lists are queried when the daemon reports a change, and disks now and
//! then for their clients.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use super::Event;
use super::lists::Lists;
use crate::control::client::{Client, QUERY_MAX};
use crate::control::statistics::Statistics;

/// What a daemon did, and has.
#[derive(Clone, Debug, Default)]
pub(super) struct Sample {
    pub(super) statistics: Statistics,
    pub(super) lists: Arc<Lists>,
}

/// Follows the daemon at a socket as long as the receiver exists.
pub(super) fn start(path: PathBuf, interval: Duration, to: Sender<Event>) -> Result<()> {
    let thread = thread::Builder::new().name("feed".to_owned());
    let run = move || {
        loop {
            let Err(lost) = follow(&path, interval, &to);
            if to.send(Event::Lost(format!("{lost:#}"))).is_err() {
                return;
            }
            thread::sleep(TRY_AGAIN);
        }
    };
    thread.spawn(run).context("no thread for the daemon's answers")?;
    Ok(())
}

fn follow(path: &std::path::Path, interval: Duration, to: &Sender<Event>) -> Result<Infallible> {
    let mut client = Client::connect_within(path, QUERY_MAX)?;
    client.follow(interval)?;
    let (mut lists, mut asked): (Arc<Lists>, Option<(u64, Instant)>) = (Arc::default(), None);
    loop {
        let statistics = client.next_statistics()?;
        match asked {
            Some((changes, _)) if changes != statistics.changes => lists = Lists::ask(&mut client)?.into(),
            None => lists = Lists::ask(&mut client)?.into(),
            Some((_, at)) if at.elapsed() > DISKS_EACH => Arc::make_mut(&mut lists).ask_again(&mut client)?,
            Some(_) => {
                send(to, statistics, &lists)?;
                continue;
            }
        }
        asked = Some((statistics.changes, Instant::now()));
        send(to, statistics, &lists)?;
    }
}

fn send(to: &Sender<Event>, statistics: Statistics, lists: &Arc<Lists>) -> Result<()> {
    let sample = Sample {
        statistics,
        lists: Arc::clone(lists),
    };
    Ok(to.send(Event::Sample(Box::new(sample)))?)
}

/// Pause before a lost daemon is tried again.
const TRY_AGAIN: Duration = Duration::from_secs(1);
/// Oldest age of the number of a disk's clients.
const DISKS_EACH: Duration = Duration::from_secs(10);
