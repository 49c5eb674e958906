//! SIGHUP: the configuration file is read again and its differences are applied, by a thread of its own. `running`
//! makes the changes.

use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::thread;

use anyhow::{Context, Result};
use blkmq_config::Document;

use super::running::Running;
use super::{Daemon, configuration, notify};
use crate::cli::ServeArgs;

impl Daemon {
    /// Starts a thread that reloads whenever it is asked to: files and drives may take long to answer,
    /// and the signal that ends the daemon must be seen meanwhile.
    pub(super) fn reload_aside(&self, args: &ServeArgs) -> Result<SyncSender<()>> {
        // One that waits covers those that are asked for meanwhile.
        let (ask, asked) = mpsc::sync_channel(1);
        let (args, running) = (args.clone(), Arc::downgrade(&self.running));
        let mut loaded = self.running.document();
        let reload_all = move || {
            for () in asked {
                let Some(running) = running.upgrade() else { return };
                reload(&running, &args, &mut loaded);
            }
        };
        let thread = thread::Builder::new().name("reload".to_owned());
        thread
            .spawn(reload_all)
            .context("no thread for reloads can be made")?;
        Ok(ask)
    }
}

/// Makes the differences between the file with the flags as they were `loaded` last and as they are now. What was
/// changed by other ways stays.
fn reload(running: &Running, args: &ServeArgs, loaded: &mut Document) {
    notify::reloading();
    let mut done = Vec::new();
    let mut change = || {
        let (new, _) = configuration(args)?;
        let changed = running.change(|document| document.follow(loaded, &new), false)?;
        *loaded = new;
        anyhow::Ok(changed)
    };
    let mut changed = change();
    // After the change, which may name other files.
    let (refreshed, unreadable) = running.refresh();
    let mut failed = unreadable;
    // Last: drives may take long to answer.
    let grown = running.resize_all();
    if changed.is_err() && !grown.is_empty() {
        // The file may ask for the sizes that the disks have only now.
        changed = change();
    }
    match changed {
        Ok(changed) => done.extend(changed.steps),
        Err(error) => failed.insert(0, format!("the configuration is not changed: {error:#}")),
    }
    done.extend(refreshed);
    done.extend(grown);
    failed
        .iter()
        .for_each(|problem| tracing::error!("SIGHUP: {problem}"));
    match done.is_empty() {
        false => tracing::info!("SIGHUP: {}", done.join("; ")),
        true if failed.is_empty() => tracing::info!("SIGHUP: nothing differs"),
        true => {}
    }
    say_what_stays(running, args, loaded);
    notify::reloaded();
}

/// Logs in what the daemon is otherwise than its file says.
fn say_what_stays(running: &Running, args: &ServeArgs, loaded: &Document) {
    let stays = running.document().differences(loaded);
    if let Some(file) = &args.config
        && !stays.is_empty()
    {
        let more = if stays.len() > NAMED_MAX { ", …" } else { "" };
        tracing::info!(
            "SIGHUP: by ctl and otherwise than in the file are: {}{more}; `blkmq ctl apply {} --dry-run` shows the differences, \
             --remove takes them away",
            stays[..stays.len().min(NAMED_MAX)].join(", "),
            file.display()
        );
    }
}

/// How many differences a line names.
const NAMED_MAX: usize = 10;
