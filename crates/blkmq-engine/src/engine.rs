//! A running engine, and what it tells of its disks and groups. `builder` starts it, `attached` is a thread
//! that takes part.

use std::collections::BTreeSet;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use blkmq_config::{Config, Registries, group, live};
use blkmq_core::ids::ReactorId;
use blkmq_core::stat::GroupStats;
use blkmq_core::time::Nanos;

use crate::attached::Attached;
use crate::builder::Builder;
use crate::client::Client;
use crate::disk::Disk;
use crate::error::Error;
use crate::statistics::Statistics;
use crate::sys::forks;

/// A running engine. Cheap to clone; for any thread.
///
/// It ends when the last clone and the last [`Attached`] are dropped, or with [`Engine::shutdown`]: I/O under
/// way is finished first, for at most 30 s.
///
/// After a `fork(2)` it belongs to the parent. In the child, its calls return [`Error::Forked`], a drop does
/// nothing, and I/O that is submitted ends with [`Status::Shutdown`](crate::Status::Shutdown).
#[derive(Clone)]
pub struct Engine(Arc<Running>);

/// The engine proper, and the process to which its threads belong.
pub(crate) struct Running {
    /// Always present, except while it is being dropped.
    host: Option<blkmq_host::Engine>,
    process: u32,
    /// Forks that were counted when it started.
    forks: u32,
    /// What disks and groups there are, for those that come. Locked before anything of the engine's is changed.
    config: Mutex<Config>,
    registries: Registries,
    /// How many clients were opened. None when the engine shuts down, so that none comes behind the order to drain.
    clients: Mutex<Option<usize>>,
}

impl Engine {
    /// Describes an engine to start.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(crate) fn new(host: blkmq_host::Engine, config: Config, registries: Registries) -> Self {
        Self(Arc::new(Running {
            host: Some(host),
            config: Mutex::new(config),
            registries,
            process: std::process::id(),
            forks: forks(),
            clients: Mutex::new(Some(0)),
        }))
    }

    /// Finds a disk by its name.
    ///
    /// # Errors
    /// If there is none.
    pub fn disk(&self, name: &str) -> Result<Disk, Error> {
        let disks = self.host()?.disks();
        let found = disks.iter().find(|disk| disk.name == name);
        let new = |disk| Disk::new(disk, Arc::downgrade(&self.0));
        found.cloned().map(new).ok_or_else(|| Error::NoDisk {
            name: name.to_owned(),
            known: joined(disks.iter().map(|disk| disk.name.as_str())),
        })
    }

    /// Finds a disk by its name, to account its I/O to another group than its own.
    ///
    /// # Errors
    /// If there is no such disk or group.
    pub fn disk_in_group(&self, name: &str, path: &str) -> Result<Disk, Error> {
        let mut disk = self.disk(name)?.host().clone();
        let control = self.host()?.control();
        // A disk that lies on several queues has none that came later, so its group has one number on them.
        let queues = control.queues_of(&disk).into_iter();
        let mut groups = queues.take(1).flat_map(|queue| control.groups(queue));
        let found = groups.find(|(known, _)| known == path);
        let (_, group) = found.ok_or_else(|| self.no_group(path))?;
        disk.group = group;
        Ok(Disk::new(disk, Arc::downgrade(&self.0)))
    }

    /// The names of all disks.
    pub fn disks(&self) -> Vec<String> {
        let host = self.host();
        let disks = host.map_or_else(|_| Arc::default(), |host| host.disks());
        disks.iter().map(|disk| disk.name.clone()).collect()
    }

    /// The paths of all groups, in order.
    pub fn groups(&self) -> Vec<String> {
        let Ok(host) = self.host() else {
            return Vec::new();
        };
        let control = host.control();
        let groups = |(queue, _)| control.groups(queue);
        let all: BTreeSet<String> = control
            .queues()
            .into_iter()
            .flat_map(groups)
            .map(|(path, _)| path)
            .collect();
        all.into_iter().collect()
    }

    /// What a group did, over all queues. Cheap; makes no thread wait.
    ///
    /// # Errors
    /// If there is no such group.
    pub fn statistics(&self, path: &str) -> Result<Statistics, Error> {
        let control = self.host()?.control();
        let mut sum: Option<GroupStats> = None;
        for (queue, _) in control.queues() {
            let groups = control.groups(queue).into_iter();
            for (_, group) in groups.filter(|(known, _)| known == path) {
                sum.get_or_insert_default()
                    .add(&control.group_stats(queue, group));
            }
        }
        sum.map(|sum| Statistics::from(&sum))
            .ok_or_else(|| self.no_group(path))
    }

    /// Changes a group's share against its siblings, 1 to 1000, while it is in use. May block for some
    /// milliseconds.
    ///
    /// # Errors
    /// If there is no such group, or the weight is out of range.
    pub fn set_weight(&self, path: &str, weight: u16) -> Result<(), Error> {
        let control = self.host()?.control();
        for (queue, _) in control.queues() {
            control.set_group_weight(queue, path, weight)?;
        }
        self.note_weight(path, weight);
        Ok(())
    }

    /// Gives a group its weight, caps and latency target while it is in use, as [`Builder::group`] does:
    /// `/a,weight=300,read_bps=100M`. What the text leaves out has its default again; a missing group is made. May
    /// block for some milliseconds.
    ///
    /// # Errors
    /// The fault of the text, a drive that cannot be shared with such a cap, or no room for one more group.
    pub fn set_group(&self, text: &str) -> Result<(), Error> {
        let control = self.host()?.control();
        let spec = group::parse(text).map_err(|error| Error::configuration(&error))?;
        live::set_group_of_all(&control, &spec)?;
        self.note_group(&spec);
        Ok(())
    }

    /// Attaches the calling thread, to do I/O by itself.
    ///
    /// # Errors
    /// If [`Builder::attached_max`] threads are attached, or io_uring is not available.
    pub fn attach(&self) -> Result<Attached, Error> {
        Ok(Attached::new(self.host()?.attach()?, self.clone()))
    }

    /// What tells it from others, as long as one of its handles exists.
    pub(crate) fn number(&self) -> *const Running {
        Arc::as_ptr(&self.0)
    }

    /// Ends the engine for all who use it: I/O under way is finished, and more is refused. Attached threads are
    /// waited for. Blocks for at most about `limit`. Returns at once if it was called before.
    ///
    /// # Errors
    /// If something was not finished in time; the text says what. Its threads and buffers are left as they are.
    pub fn shutdown(&self, limit: Duration) -> Result<(), Error> {
        let host = self.host()?;
        *self.0.clients.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(host.shutdown(nanos(limit))?)
    }

    /// Says whether this process is the engine's own. Cheap.
    ///
    /// # Errors
    /// [`Error::Forked`] in a fork.
    #[inline]
    pub fn check_fork(&self) -> Result<(), Error> {
        let process = self.0.process;
        match self.is_forked() {
            false => Ok(()),
            true => Err(Error::Forked { process }),
        }
    }

    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        self.0.is_forked()
    }

    pub(crate) fn host(&self) -> Result<&blkmq_host::Engine, Error> {
        self.check_fork()?;
        Ok(self.0.host.as_ref().expect("there until dropped"))
    }

    pub(crate) fn config(&self) -> &Mutex<Config> {
        &self.0.config
    }

    pub(crate) fn registries(&self) -> &Registries {
        &self.0.registries
    }

    fn no_group(&self, path: &str) -> Error {
        Error::NoGroup {
            path: path.to_owned(),
            known: joined(self.groups().iter().map(String::as_str)),
        }
    }
}

impl Running {
    /// Opens a client for a disk on the next one of the engine's threads. None if the engine takes no more.
    pub(crate) fn open_client(this: &Weak<Self>, disk: &blkmq_host::Disk) -> Option<Client> {
        let this = this.upgrade().filter(|this| !this.is_forked())?;
        let host = this.host.as_ref()?;
        let mut clients = this.clients.lock().unwrap_or_else(PoisonError::into_inner);
        let count = clients.as_mut()?;
        let reactor = ReactorId((*count % host.reactors()) as u16);
        *count += 1;
        let (client, service) = Client::new(disk);
        host.add_service(reactor, Box::new(move || Box::new(service)));
        Some(client)
    }

    #[inline]
    pub(crate) fn is_forked(&self) -> bool {
        forks() != self.forks
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.is_forked() {
            // The threads that it would end are the parent's.
            std::mem::forget(self.host.take());
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Engine with disks {}", self.disks().join(", "))
    }
}

pub(crate) fn nanos(time: Duration) -> Nanos {
    Nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX / 2))
}

fn joined<'a>(names: impl Iterator<Item = &'a str>) -> String {
    names.collect::<Vec<_>>().join(", ")
}
