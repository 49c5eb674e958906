//! An operator's messages to a running multipath drive: fail, reinstate, add and remove paths, switch
//! groups, and change settings for all paths. Each message is one change of the table; all contexts read
//! it afterwards.

use std::fmt;

use crate::time::Instant;

use super::detour::Detours;
use super::table::{Failback, NoPath, PathState};
use super::{Multipath, PathId, PathSpec, Selector};

/// Why a message was rejected; the text names the drive, the request, and the possible values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MessageError(pub(super) String);

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for MessageError {}

impl Multipath {
    /// Finds a path by its name.
    ///
    /// # Errors
    /// If there is none; the text lists the existing paths.
    pub fn path_of(&self, name: &str) -> Result<PathId, MessageError> {
        let paths = self.path_stats();
        let found = paths.iter().find(|path| path.name == name);
        found.map(|path| path.id).ok_or_else(|| {
            let known: Vec<&str> = paths.iter().map(|path| path.name.as_str()).collect();
            self.refuse(format!(
                "there is no path {name}; the paths are: {}",
                known.join(", ")
            ))
        })
    }

    /// Stops using a path until a message reinstates it. Requests in flight there continue.
    ///
    /// # Errors
    /// If there is no such path.
    pub fn fail_path(&self, path: PathId, now: Instant) -> Result<(), MessageError> {
        self.set_state(path, now, PathState::Disabled)
    }

    /// Uses a path again, even if it was failed by message.
    ///
    /// # Errors
    /// If there is no such path.
    pub fn reinstate_path(&self, path: PathId, now: Instant) -> Result<(), MessageError> {
        self.set_state(path, now, PathState::Active)
    }

    /// Makes a group the current one, until it has no usable path or, by the failback setting, a higher one
    /// gets a path back.
    ///
    /// # Errors
    /// If the group has no usable path.
    pub fn switch_group(&self, group: u8, now: Instant) -> Result<(), MessageError> {
        let is_usable = self.change(now, |table| {
            let is_usable = table.is_usable(group);
            if is_usable {
                table.go_to(group);
            }
            is_usable
        });
        is_usable
            .then_some(())
            .ok_or_else(|| self.refuse(format!("group {group} rejected: it has no usable path")))
    }

    /// Adds a path. Each context opens it when it next reads the table.
    ///
    /// # Errors
    /// If its name is taken, a number is out of range, or there are too many paths.
    pub fn add_path(&self, spec: PathSpec, now: Instant) -> Result<PathId, MessageError> {
        self.check_path(&spec)?;
        let added = self.change(now, |table| {
            let is_new = table.all().all(|(_, path)| path.spec.name != spec.name);
            is_new.then(|| {
                let added = table.add(spec.clone());
                table.fall_back(spec.group, now);
                added
            })
        });
        match added {
            Some(Some(id)) => Ok(id),
            Some(None) => Err(self.refuse(format!(
                "path {} rejected: there are {} already, those being removed included",
                spec.name,
                super::PATHS_MAX
            ))),
            None => Err(self.refuse(format!("path {} rejected: there is one of that name", spec.name))),
        }
    }

    /// Removes a path: no more requests are issued there, requests in flight end, then the contexts close it.
    ///
    /// # Errors
    /// If there is no such path, or it is the last.
    pub fn remove_path(&self, path: PathId, now: Instant) -> Result<(), MessageError> {
        let others = self.change(now, |table| {
            let is_there = |state| state != PathState::Leaving;
            let found = table.path(path).is_some_and(|path| is_there(path.state));
            let others = table
                .all()
                .filter(|(id, other)| *id != path && is_there(other.state));
            let others = found.then_some(others.count());
            if others.is_some_and(|others| others > 0) {
                table.remove(path);
            }
            others
        });
        match others {
            None => Err(self.no_path_of(path)),
            Some(0) => Err(self.refuse("the last path cannot be removed: add another first".to_owned())),
            Some(_) => Ok(()),
        }
    }

    /// Sets a path's throughput relative to the others, for `service-time`.
    ///
    /// # Errors
    /// If there is no such path, or the number is above 100.
    pub fn set_throughput(&self, path: PathId, throughput: u32, now: Instant) -> Result<(), MessageError> {
        self.check_throughput(throughput)?;
        let found = self.change(now, |table| {
            table.path(path).map(|path| path.spec.throughput = throughput)
        });
        found.ok_or_else(|| self.no_path_of(path))
    }

    /// Sets what happens to requests while no path is usable, including those that are held now.
    pub fn set_no_path(&self, no_path: NoPath, now: Instant) {
        self.change(now, |table| {
            (table.no_path, table.gave_up) = (no_path, false);
            if table.no_path_since.is_some() {
                // A new limit counts from now.
                table.no_path_since = Some(now);
            }
        });
    }

    /// Sets how a path is chosen.
    pub fn set_selector(&self, selector: Selector, now: Instant) {
        self.change(now, |table| table.selector = selector);
    }

    /// Sets when a higher group is returned to, from the next returning path on.
    pub fn set_failback(&self, failback: Failback, now: Instant) {
        self.change(now, |table| table.failback = failback);
    }

    /// Sets which parts of a request's way go over a worker.
    pub fn set_detours(&self, detours: Detours, now: Instant) {
        self.change(now, |table| table.detours = detours);
    }

    fn set_state(&self, path: PathId, now: Instant, state: PathState) -> Result<(), MessageError> {
        let found = self.change(now, |table| {
            let found = table.path(path).filter(|path| path.state != PathState::Leaving);
            let Some(found) = found else { return false };
            if state == PathState::Active {
                table.reinstate(path, now);
            } else {
                found.state = state;
            }
            true
        });
        found.then_some(()).ok_or_else(|| self.no_path_of(path))
    }

    fn no_path_of(&self, path: PathId) -> MessageError {
        self.refuse(format!("there is no path number {}", path.0))
    }

    pub(super) fn check_path(&self, spec: &PathSpec) -> Result<(), MessageError> {
        if usize::from(spec.group) >= super::PATHS_MAX {
            let problem = format!(
                "group {} of path {} rejected: must be from 0 to {}",
                spec.group,
                spec.name,
                super::PATHS_MAX - 1
            );
            return Err(self.refuse(problem));
        }
        self.check_throughput(spec.throughput)
    }

    fn check_throughput(&self, throughput: u32) -> Result<(), MessageError> {
        if throughput <= THROUGHPUT_MAX {
            return Ok(());
        }
        let problem = format!("throughput {throughput} rejected: must be from 0 to {THROUGHPUT_MAX}");
        Err(self.refuse(problem))
    }

    fn refuse(&self, problem: String) -> MessageError {
        MessageError(format!("multipath {}: {problem}", self.name()))
    }
}

const THROUGHPUT_MAX: u32 = 100;
