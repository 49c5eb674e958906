//! Finds and changes the groups of a queue in use by their paths. Each change is one atomic change of the
//! core; only making a group with its ancestors takes several.

use std::sync::{MutexGuard, PoisonError};

use blkmq_core::group::{Caps, Change, Debts, GroupError, Node, ROOT, WEIGHT_DEFAULT};
use blkmq_core::ids::GroupId;
use blkmq_core::queue::Queue;
use blkmq_core::time::Nanos;

use super::Control;
use crate::disk::{Disk, MAPPED, QueueId};
use crate::error::Error;
use crate::group_paths::{Paths, check_path, group_error, join, parent_of};
use crate::reactor::shared::QueueEntry;

/// Groups. All of these are for any thread but a reactor's; they retry for a while if the gate is in use.
impl Control {
    /// Lists the paths of a queue's groups with their ids, in the order of their paths. None if there is no such queue,
    /// as a queue may go at any moment.
    pub fn groups(&self, queue: QueueId) -> Vec<(String, GroupId)> {
        let Some(entry) = self.shared.entry(queue) else {
            return Vec::new();
        };
        let paths = lock(&entry);
        paths.iter().map(|(path, id)| (path.clone(), *id)).collect()
    }

    /// The path of a group of a queue, if both exist.
    pub fn group_path(&self, queue: QueueId, group: GroupId) -> Option<String> {
        let entry = self.shared.entry(queue)?;
        let paths = lock(&entry);
        paths.path_of(group).map(str::to_owned)
    }

    /// Returns a group's weight, caps and latency target.
    ///
    /// # Errors
    /// If there is none of that path, or the gate was in use all the time for 30 s, or on a reactor's thread.
    pub fn group(&self, queue: QueueId, path: &str) -> Result<Node, Error> {
        let entry = self.entry(queue)?;
        let paths = lock(&entry);
        let id = self.find_group(queue, &paths, path)?;
        let core = self.core(queue)?;
        let node = self.insist(queue, || core.group(id))?;
        node.ok_or_else(|| group_error(path, GroupError::Unknown { id }))
    }

    /// Finds a group, or makes it with the default weight; missing ancestors are made too.
    ///
    /// # Errors
    /// If the path is not valid, is nested too deeply, or there is no room; no part of it is left then. Otherwise
    /// as [`Control::group`].
    pub fn make_group(&self, queue: QueueId, path: &str) -> Result<GroupId, Error> {
        check_path(path)?;
        let entry = self.entry(queue)?;
        let mut paths = lock(&entry);
        let mut made = Vec::new();
        let result = self.make_path(queue, &mut paths, path, &mut made);
        if result.is_err() {
            for (path, id) in made.into_iter().rev() {
                paths.remove(&path);
                self.change(queue, &path, |core| core.remove_group(id))?;
            }
        }
        result
    }

    /// Changes a group's share against its siblings, 1 to 1000.
    ///
    /// # Errors
    /// If there is no such group, or the weight is out of range. Else as [`Control::group`].
    pub fn set_group_weight(&self, queue: QueueId, path: &str, weight: u16) -> Result<(), Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        self.change(queue, path, |core| core.set_group_weight(id, weight))
    }

    /// Replaces a group's caps; the waiting times of its requests are computed again.
    ///
    /// # Errors
    /// If there is no such group, or a cap is out of range. Else as [`Control::group`].
    pub fn set_group_caps(&self, queue: QueueId, path: &str, caps: Caps) -> Result<(), Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        let clock = &self.shared.clock;
        self.change(queue, path, |core| core.set_group_caps(id, caps, clock.now()))
    }

    /// A group's debts: what it has taken beyond its own caps and what time has not yet paid off.
    ///
    /// # Errors
    /// If there is no such group. Else as [`Control::group`].
    pub fn group_debts(&self, queue: QueueId, path: &str) -> Result<Debts, Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        let (core, clock) = (self.core(queue)?, &self.shared.clock);
        self.insist(queue, || core.group_debts(id, clock.now()))
    }

    /// Adds debts that a group has made elsewhere.
    ///
    /// # Errors
    /// As [`Control::group_debts`].
    pub fn add_group_debts(&self, queue: QueueId, path: &str, debts: &Debts) -> Result<(), Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        let clock = &self.shared.clock;
        self.change(queue, path, |core| core.add_group_debts(id, debts, clock.now()))
    }

    /// The elevator's measurements of a group, for an elevator of the same name in another process.
    ///
    /// # Errors
    /// As [`Control::group_debts`].
    pub fn group_learnt(&self, queue: QueueId, path: &str) -> Result<Vec<u64>, Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        let core = self.core(queue)?;
        self.insist(queue, || core.group_learnt(id))
    }

    /// Gives the elevator another one's measurements of a group, if both have the same name.
    ///
    /// # Errors
    /// As [`Control::group_debts`].
    pub fn take_group_learnt(
        &self,
        queue: QueueId,
        path: &str,
        (scheduler, learnt): (&str, &[u64]),
    ) -> Result<(), Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        if self.core(queue)?.elevator().name != scheduler {
            return Ok(());
        }
        let clock = &self.shared.clock;
        self.change(queue, path, |core| {
            core.take_group_learnt(id, learnt, clock.now())
        })
    }

    /// Sets or removes a group's latency target.
    ///
    /// # Errors
    /// If there is no such group. Else as [`Control::group`].
    pub fn set_group_latency_target(
        &self,
        queue: QueueId,
        path: &str,
        target: Option<Nanos>,
    ) -> Result<(), Error> {
        let id = self.find_group(queue, &lock(&*self.entry(queue)?), path)?;
        self.change(queue, path, |core| core.set_group_latency_target(id, target))
    }

    /// Moves a group, with all groups below it, below another. Returns its new path.
    ///
    /// # Errors
    /// If one of the two does not exist, the other is below it or has a child of that name, or a group below it
    /// would be nested too deeply. Otherwise as [`Control::group`].
    pub fn move_group(&self, queue: QueueId, path: &str, parent: &str) -> Result<String, Error> {
        let entry = self.entry(queue)?;
        let mut paths = lock(&entry);
        let id = self.find_group(queue, &paths, path)?;
        let to = self.find_group(queue, &paths, parent)?;
        let name = path.rsplit('/').next().unwrap_or_default();
        let new = join(parent, name);
        if id != ROOT && new != path && paths.get(&new).is_some() {
            let queue = self.name(queue);
            return Err(Error::GroupExists { queue, path: new });
        }
        self.change(queue, path, |core| core.move_group(id, to))?;
        paths.rename(path, &new);
        Ok(new)
    }

    /// Removes a group. Its requests under way continue; bios that library users still submit to its id count for
    /// its parent.
    ///
    /// # Errors
    /// If there is no such group, others are part of it, or a disk is accounted to it. Else as [`Control::group`].
    pub fn remove_group(&self, queue: QueueId, path: &str) -> Result<(), Error> {
        let entry = self.entry(queue)?;
        let mut paths = lock(&entry);
        let id = self.find_group(queue, &paths, path)?;
        let all = self.shared.disks();
        let mut disks = all.iter();
        // A mapped disk's I/O is its group's on the queue of each member.
        let uses = |disk: &Disk| {
            disk.queue == queue || disk.queue == MAPPED && self.queues_of(disk).contains(&queue)
        };
        if let Some(disk) = disks.find(|disk| disk.group == id && id != ROOT && uses(disk)) {
            return Err(Error::GroupInUse {
                queue: self.name(queue),
                path: path.to_owned(),
                disk: disk.name.clone(),
            });
        }
        self.change(queue, path, |core| core.remove_group(id))?;
        paths.remove(path);
        Ok(())
    }

    fn make_path(
        &self,
        queue: QueueId,
        paths: &mut Paths,
        path: &str,
        made: &mut Vec<(String, GroupId)>,
    ) -> Result<GroupId, Error> {
        if let Some(id) = paths.get(path) {
            return Ok(id);
        }
        let parent = self.make_path(queue, paths, parent_of(path), made)?;
        let id = self.change(queue, path, |core| core.create_group(parent, WEIGHT_DEFAULT))?;
        paths.insert(path.to_owned(), id);
        made.push((path.to_owned(), id));
        Ok(id)
    }

    fn change<T>(
        &self,
        queue: QueueId,
        path: &str,
        change: impl Fn(&Queue) -> Change<T>,
    ) -> Result<T, Error> {
        let core = self.core(queue)?;
        let result = self.insist(queue, || change(&core))?;
        result.map_err(|source| group_error(path, source))
    }

    fn find_group(&self, queue: QueueId, paths: &Paths, path: &str) -> Result<GroupId, Error> {
        paths.get(path).ok_or_else(|| {
            let known: Vec<&str> = paths
                .iter()
                .map(|(path, _)| path.as_str())
                .take(KNOWN_MAX)
                .collect();
            Error::NoGroup {
                queue: self.name(queue),
                path: path.to_owned(),
                known: known.join(", "),
            }
        })
    }
}

fn lock(entry: &QueueEntry) -> MutexGuard<'_, Paths> {
    entry.paths.lock().unwrap_or_else(PoisonError::into_inner)
}

/// How many paths an error lists.
const KNOWN_MAX: usize = 20;
