//! What a change does to the settings of queues, and what it may ask of them.

use anyhow::Result;
use blkmq_config::diff::Change;
use blkmq_config::plan::drives::{self, AcrossQueues, QueueDrives};
use blkmq_config::plan::scheduler::{WithoutEffect, without_effect};
use blkmq_config::plan::settings::{self, Wish};
use blkmq_config::{Config, live};
use blkmq_host::device::State;
use blkmq_host::disk::QueueId;

use super::Running;
use super::prepared::Planned;

impl Running {
    /// Changes the settings of every queue.
    pub(super) fn set_queues(&self, old: &Config, new: &Config) -> Result<()> {
        let control = self.control();
        let mut done: Vec<(QueueId, Wish, Wish)> = Vec::new();
        for (queue, was, is) in self.wishes(old, new)? {
            if let Err(error) = live::set_queue(&control, queue, &was, &is) {
                done.push((queue, was, is));
                for (queue, was, is) in done.iter().rev() {
                    let undone = live::set_queue(&control, *queue, is, was);
                    undone
                        .err()
                        .iter()
                        .for_each(|error| tracing::error!("change: taking it back: {error}"));
                }
                return Err(error.into());
            }
            done.push((queue, was, is));
        }
        Ok(())
    }

    /// Checks that disks and settings agree about each existing queue, that its drive permits them, and that
    /// no new disk needs a queue that cannot take it.
    pub(super) fn check_queues(&self, old: &Config, new: &Config) -> Result<()> {
        self.wishes(new, new)?;
        // Those that new disks bring, too, so that nothing is done before one of them is refused.
        for queue in new.queues.keys() {
            let disks = new.disks.iter().filter(|disk| disk.queue_name() == Some(queue));
            settings::wish(new, queue, disks.map(|disk| disk.name.as_str()))?;
        }
        let control = self.control();
        for (id, was, is) in self.wishes(old, new)? {
            live::check_queue(&control, id, &was, &is)?;
            let queue = control.core(id)?;
            let (name, max) = (queue.name(), queue.depth_max());
            if let Some(depth) = is.depth.filter(|depth| *depth > max) {
                anyhow::bail!(
                    "queue {name}: depth {depth} rejected: must be from 1 to {max} while it is served"
                );
            }
        }
        live::check_groups(&control, new)?;
        let served = self.engine.disks();
        for disk in new.disks.iter().filter(|disk| !old.has_disk(&disk.name)) {
            // A driver that keeps its connections keeps its queue.
            let queue = disk.queue_name().and_then(|name| control.queue(name).ok());
            if let Some(queue) = queue
                && !served.iter().any(|other| other.queue == queue)
            {
                anyhow::bail!(
                    "disk {}: its queue has the connections of a disk that was removed, until the daemon ends: choose another \
                     name, or another queue=",
                    disk.name
                );
            }
        }
        Ok(())
    }

    /// Gives queues for which no scheduler is named the one that their groups need by now.
    pub(super) fn follow_groups(&self, config: &Config) -> Result<()> {
        let control = self.control();
        for (id, name, disks) in self.queues() {
            let wish = settings::wish(config, &name, disks.iter().map(String::as_str))?;
            if control.core(id)?.elevator() != wish.elevator.unwrap_or_default() {
                live::set_queue(&control, id, &wish, &wish)?;
            }
        }
        Ok(())
    }

    /// What an operator should know of a change, which is logged unless that is only planned: queues that get a
    /// scheduler which nobody has named, settings of groups that have no effect, where they are new or changed, and keys
    /// of disks that stay locked.
    pub(super) fn notes(&self, planned: &Planned, is_dry_run: bool) -> Result<Vec<String>> {
        let Planned { old, new, .. } = planned;
        let is_set = |found: &WithoutEffect| {
            let mut changes = planned.changes.iter();
            changes.any(|change| matches!(change, Change::Group(path) if found.concerns(path)))
        };
        let mut notes = Vec::new();
        for (_, name, disks) in self.queues() {
            let disks = || disks.iter().map(String::as_str);
            let wish = |config| settings::wish(config, &name, disks());
            let (was, is) = (wish(old)?, wish(new)?);
            if was.elevator != is.elevator
                && let Some(reason) = is.reason(&name)
            {
                if !is_dry_run {
                    tracing::info!("{reason}");
                }
                notes.push(reason);
            }
            let found = without_effect(new, &name, disks())?;
            if let Some(found) = &found
                && (is_set(found) || without_effect(old, &name, disks())?.as_ref() != Some(found))
            {
                if !is_dry_run {
                    tracing::warn!("{found}");
                }
                notes.push(found.to_string());
            }
        }
        for found in self.across_queues(new)? {
            if !self.across_queues(old)?.contains(&found) {
                if !is_dry_run {
                    tracing::warn!("{found}");
                }
                notes.push(found.to_string());
            }
        }
        notes.extend(self.still_locked(&planned.changes));
        Ok(notes)
    }

    /// What remains to be done for locked disks whose keys are elsewhere now.
    fn still_locked(&self, changes: &[Change]) -> impl Iterator<Item = String> {
        let is_locked = |name: &str| {
            (self.engine.disks().iter()).any(|disk| *disk.name == *name && disk.state() == State::Locked)
        };
        changes.iter().filter_map(move |change| match change {
            Change::Key(disk) if is_locked(disk) => Some(format!(
                "disk {disk} is still locked: blkmq ctl unlock {disk} opens it now, the new key when it is opened next"
            )),
            _ => None,
        })
    }

    /// The weights that span queues of one drive.
    fn across_queues(&self, config: &Config) -> Result<Vec<AcrossQueues>> {
        let (control, queues) = (self.control(), self.queues());
        let queues = queues.iter().map(|(id, queue, disks)| {
            Ok(QueueDrives {
                queue,
                disks: disks.iter().map(String::as_str).collect(),
                drives: control.device(*id)?.drives(),
            })
        });
        Ok(drives::across(config, &queues.collect::<Result<Vec<_>>>()?))
    }

    /// Each existing queue, with its name and those of its disks.
    fn queues(&self) -> Vec<(QueueId, String, Vec<String>)> {
        let served = self.engine.disks();
        let queues = self.control().queues().into_iter();
        queues
            .map(|(id, queue)| {
                let disks = served.iter().filter(|disk| disk.queue == id);
                let disks = disks.map(|disk| disk.name.clone()).collect();
                (id, queue.name().to_owned(), disks)
            })
            .collect()
    }

    /// The old and new settings of each existing queue, where they differ.
    fn wishes(&self, old: &Config, new: &Config) -> Result<Vec<(QueueId, Wish, Wish)>> {
        let mut all = Vec::new();
        for (id, queue, disks) in self.queues() {
            let wish = |config| settings::wish(config, &queue, disks.iter().map(String::as_str));
            let (was, is) = (wish(old)?, wish(new)?);
            if was != is {
                all.push((id, was, is));
            }
        }
        Ok(all)
    }
}
