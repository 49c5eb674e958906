//! Adds and removes disks while an engine runs, each completely or not at all. Each reactor is
//! ordered to change its side; the functions say what must be frozen for that.

use std::any::Any;
use std::io::ErrorKind;
use std::sync::mpsc::RecvTimeoutError;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Duration;

use blkmq_core::driver::DisksError;
use blkmq_core::ids::DiskId;
use blkmq_core::queue::{DiskConfig, Queue};
use blkmq_core::time::{Instant, Nanos};

use super::{Control, Frozen, PAUSE_MAX};
use crate::device::{Allocation, Replacement, State};
use crate::disk::{Disk, MAPPED, QueueId};
use crate::engine::build::{self, OfQueue};
use crate::engine::config::DiskEntry;
use crate::engine::encrypted::is_encrypted;
use crate::error::Error;
use crate::reactor::core::ReactorCore;

/// What a drive has said of a disk's size.
pub struct FoundSize {
    disk: Disk,
    /// In bytes, whole blocks.
    new: u64,
}

impl FoundSize {
    /// In bytes, whole blocks.
    pub fn size(&self) -> u64 {
        self.new
    }
}

/// Disks and queues. All of these are for any thread but a reactor's. Adding and removing are for every engine; all
/// other changes for one to which no thread can be attached.
///
/// An attached thread makes its part of a change when it next comes back to its I/O. What adds does not wait for that:
/// before the thread's next bio it is done. What removes does, since until then the thread may use what is to go.
impl Control {
    /// Adds a disk to a queue; `opened` is its driver's argument ([`crate::device::Device::add_disk`]). If the
    /// queue's tables must grow, which is rare, its requests under way must end first.
    ///
    /// # Errors
    /// If there is a disk of this name, or no room, or the drive refuses it; or as for [`Control::freeze`].
    pub fn add_disk(
        &self,
        queue: QueueId,
        disk: DiskEntry,
        opened: Box<dyn Any + Send>,
    ) -> Result<Disk, Error> {
        let mut next_number = self.coming_or_going();
        let entry = self.entry(queue)?;
        let core = &entry.queue;
        self.check_name(&disk.name)?;
        let Some(id) = core.free_disk_id() else {
            return Err(Error::Disk(format!(
                "disk {}: queue {} has {} disks, and can have no more; give it a queue= of its own",
                disk.name,
                core.name(),
                core.disks_max()
            )));
        };
        let base = core.free_range(disk.size, build::end_of);
        let config = DiskConfig {
            name: disk.name.clone(),
            base: base.ok_or_else(|| build::too_large(core.name(), &disk.name, disk.size))?,
            size: disk.size,
            read_only: disk.read_only,
            logical_block: disk.block_size,
        };
        self.fit_disks(queue, core, id)?;
        entry
            .device
            .add_disk(id, opened)
            .map_err(|error| refused(&disk.name, error))?;
        let added = core.add_disk(id, &config).map_err(Error::from);
        let added = added.and_then(|()| self.refresh(queue).map_err(|error| refused(&disk.name, error)));
        if let Err(error) = added {
            core.remove_disk(id);
            entry.device.remove_disk(id);
            // Drivers that had the disk let it go; the others did not have it.
            let _ = self.refresh(queue);
            return Err(error);
        }
        let allocation: Arc<dyn Allocation> = Arc::clone(&entry.device) as _;
        let of_queue = OfQueue {
            id: queue,
            core,
            paths: &entry.paths.lock().unwrap_or_else(PoisonError::into_inner),
            tenants: &self.shared.tenants,
        };
        let mut made = of_queue.disk(id, disk, allocation);
        made.number = take_number(&mut next_number);
        let disks = self.shared.disks();
        let all = disks.iter().chain([&made]).cloned().collect();
        self.shared.set_disks(all);
        Ok(made)
    }

    /// Removes a disk. Its users ([`crate::disk::Users`]) are told, and this call waits for at most about `limit`
    /// until they have let it go; meanwhile the disk cannot be found. Attached threads must submit no other bio to it
    /// from when [`crate::disk::Users::are_told_to_leave`]; their I/O under way ends first.
    ///
    /// # Errors
    /// If there is no such disk, another disk lies on it, it is still used after `limit`, or this thread is attached; the
    /// disk is unchanged then.
    pub fn remove_disk(&self, name: &str, limit: Nanos) -> Result<(), Error> {
        let until = self.shared.clock.now() + limit;
        let mut next_number = self.coming_or_going();
        if self.shared.is_attached_here() {
            return Err(Error::Disk(format!(
                "disk {name}: this thread is attached, and cannot do its part meanwhile: have another thread remove the disk"
            )));
        }
        let disk = self.removable(name, &[])?;
        let disks = self.shared.disks();
        let others = disks.iter().filter(|disk| disk.name != name).cloned();
        let mut others: Vec<Disk> = others.collect();
        self.shared.set_disks(others.clone().into());
        let was_locked = disk.users.are_to_leave();
        disk.users.withdraw(true);
        let refuse = |why: &str| {
            self.shared.set_disks(disks);
            Err(Error::Disk(format!(
                "disk {name}: {why} in {limit}; it is served on, and clients that have left can come again"
            )))
        };
        if !self.wait_for(limit, || disk.users.have_left()) {
            // Parts of one that has left are of one, too.
            let clients = match disk.users.count() {
                0 | 1 => "1 client has".to_owned(),
                count => format!("{count} clients have"),
            };
            disk.users.withdraw(was_locked);
            return refuse(&format!("{clients} not let it go"));
        }
        if disk.queue == MAPPED {
            if !self.let_encrypted_go(&disk, limit) {
                disk.users.withdraw(was_locked);
                return refuse("a reactor has not let it go");
            }
            // A number that nobody knows, as before.
            for other in &mut others {
                if other.used_by.as_deref() == Some(name) {
                    (other.used_by, other.number) = (None, take_number(&mut next_number));
                }
            }
            self.shared.set_disks(others.into());
            return Ok(());
        }
        let entry = self.entry(disk.queue)?;
        let drained = match self.shared.attached_max {
            0 => None,
            _ => match self.attached_have_let_go(disk.queue, until) {
                Ok(frozen) => Some(frozen),
                Err(why) => {
                    disk.users.withdraw(was_locked);
                    return refuse(&why);
                }
            },
        };
        entry.queue.remove_disk(disk.id);
        entry.device.remove_disk(disk.id);
        drop(drained);
        if let Err(error) = self.refresh(disk.queue) {
            // Its clients have left, and nobody finds it: it is removed all the same.
            tracing::error!(
                disk = name,
                "disk {name}: removed; a driver keeps what it had of it: {error}"
            );
        }
        Ok(())
    }

    /// Checks that a disk can be removed after others, but for its users.
    ///
    /// # Errors
    /// As for [`Control::remove_disk`].
    pub fn check_removal(&self, name: &str, others: &[&str]) -> Result<(), Error> {
        let _changing = self.coming_or_going();
        self.removable(name, others).map(drop)
    }

    fn removable(&self, name: &str, others: &[&str]) -> Result<Disk, Error> {
        let refuse = |why: &str| Err(Error::Disk(format!("disk {name}: {why}")));
        let disks = self.shared.disks();
        let Some(disk) = disks.iter().find(|disk| disk.name == name) else {
            return refuse("there is no such disk");
        };
        match &disk.used_by {
            Some(user) if !others.contains(&user.as_str()) => {
                refuse(&format!("disk {user} lies on it; remove that one first"))
            }
            _ if disk.queue == MAPPED && !is_encrypted(disk) => {
                refuse("lies on other disks, and cannot be removed while the daemon runs")
            }
            // Each of them has a part of it, with its keys.
            _ if disk.queue == MAPPED && self.shared.attached_max > 0 => {
                refuse("is encrypted, and stays as long as the engine where threads can be attached")
            }
            _ => Ok(disk.clone()),
        }
    }

    /// Has a disk served again whose drive was full or gone: see [`Device::reopen`](crate::device::Device::reopen). If
    /// something else takes its place, its queue's requests under way must end first. May block.
    ///
    /// # Errors
    /// There is no such disk, or it cannot be served as before; or as for [`Control::freeze`].
    pub fn reopen_disk(&self, name: &str) -> Result<(), Error> {
        let refuse = |why: String| Error::Disk(format!("disk {name}: {why}"));
        let find = || {
            let disks = self.shared.disks();
            let disk = disks.iter().find(|disk| disk.name == name).cloned();
            disk.ok_or_else(|| refuse("there is no such disk".to_owned()))
        };
        let disk = find()?;
        if disk.queue == MAPPED {
            return Err(refuse("lies on other disks: open those again".to_owned()));
        }
        let device = Arc::clone(&self.entry(disk.queue)?.device);
        let not_opened = |error| refuse(format!("is not opened again: {error}"));
        let Some(other) = device.reopen(disk.id).map_err(not_opened)? else {
            return Ok(());
        };
        let _changing = self.changing()?;
        if find()?.number != disk.number {
            return Err(refuse("was removed meanwhile, and another one added".to_owned()));
        }
        let _frozen = self.freeze(disk.queue)?;
        device.add_disk(disk.id, other).map_err(not_opened)?;
        self.refresh(disk.queue).map_err(|error| refused(name, error))
    }

    /// Replaces what is below disks, all at one moment, while they are used: [`crate::device::Device::replace`].
    ///
    /// # Errors
    /// There is no such disk, the disks are of several queues, one that is to be emptied has users, or a drive refuses.
    pub fn replace_disks(&self, wanted: &[(String, Replacement)]) -> Result<(), Error> {
        let changing = self.changing()?;
        // That takes long and changes nothing: other changes go on meanwhile.
        let is_change = |(_, replacement): &(String, Replacement)| {
            use Replacement::{LeaveCommit, SettleCommit, SettleFlat};
            !matches!(replacement, SettleFlat(_) | SettleCommit(_) | LeaveCommit)
        };
        let _changing = wanted.iter().any(is_change).then_some(changing);
        let disks = self.shared.disks();
        let mut found: Vec<(DiskId, Replacement)> = Vec::new();
        let mut queue = None;
        for (name, replacement) in wanted {
            let refuse = |why: &str| Err(Error::Disk(format!("disk {name}: {why}")));
            let Some(disk) = disks.iter().find(|disk| disk.name == *name) else {
                return refuse("there is no such disk");
            };
            if disk.queue == MAPPED {
                return refuse("lies on other disks: name those");
            }
            if *queue.get_or_insert(disk.queue) != disk.queue {
                return refuse(
                    "is of another queue than the disks before it: name those of one queue at a time",
                );
            }
            if *replacement == Replacement::Reset && (disk.users.count() > 0 || disk.used_by.is_some()) {
                return refuse("has clients, which would find other data: disconnect them first");
            }
            if found.iter().any(|(id, _)| *id == disk.id) {
                return refuse("is named twice");
            }
            found.push((disk.id, replacement.clone()));
        }
        let Some(queue) = queue else { return Ok(()) };
        let refresh = || {
            self.refresh(queue)
                .map_err(|error| std::io::Error::other(error.to_string()))
        };
        let replaced = self.entry(queue)?.device.replace(&found, &refresh);
        let names = || {
            wanted
                .iter()
                .map(|(name, _)| name.as_str())
                .collect::<Vec<_>>()
                .join(", ")
        };
        replaced.map_err(|error| Error::Disk(format!("disk {}: unchanged: {error}", names())))
    }

    /// Asks a disk's drive for the disk's size, after the driver has resized it to `wanted` bytes, if given.
    /// The drive may take long to answer; changes continue meanwhile. [`Control::resize_disk`] applies the answer.
    ///
    /// # Errors
    /// [`Error::Size`] if the disk has become smaller or has a size that no disk can have; others if disks lie on it, its file
    /// is to grow and not at its path any more, or its driver cannot resize it.
    pub fn ask_size(&self, name: &str, wanted: Option<u64>) -> Result<FoundSize, Error> {
        drop(self.changing()?);
        let disks = self.shared.disks();
        let Some(disk) = disks.iter().find(|disk| disk.name == name) else {
            return Err(Error::Disk(format!("disk {name}: there is no such disk")));
        };
        let refuse = |why: &str| Err(Error::Disk(format!("disk {name}: {why}")));
        let old = disk.size;
        match (&disk.used_by, wanted) {
            (Some(user), _) => {
                return refuse(&format!("disk {user} lies on it, and keeps the size that it had"));
            }
            (None, Some(wanted)) if wanted < old => {
                return refuse(&format!(
                    "size {wanted} rejected: it has {old} bytes, and can only grow while it is served"
                ));
            }
            (None, Some(wanted)) if !wanted.is_multiple_of(disk.block_size.into()) => {
                let block = disk.block_size;
                return refuse(&format!(
                    "size {wanted} rejected: must be a multiple of its block size {block}"
                ));
            }
            (None, Some(_)) if matches!(disk.state(), State::Missing | State::Replaced) => {
                return refuse(
                    "the file that it has is not at its path any more, and would grow where nobody finds it: see its state",
                );
            }
            _ if disk.queue == MAPPED => {
                return refuse("lies on other disks, and has the size that these give it");
            }
            _ => {}
        }
        let entry = self.entry(disk.queue)?;
        let resized = entry.device.resize(disk.id, wanted);
        let found = resized.map_err(|error| {
            let text = format!("disk {name}: cannot be resized: {error}");
            match error.kind() {
                ErrorKind::InvalidData => Error::Size(text),
                _ => Error::Disk(text),
            }
        })?;
        let new = found - found % u64::from(disk.block_size);
        if new < old {
            return Err(Error::Size(format!(
                "disk {name}: has shrunk from {old} to {found} bytes under its clients"
            )));
        }
        let disk = disk.clone();
        Ok(FoundSize { disk, new })
    }

    /// Says whether a disk's drive has not answered a question in time, nor since: the next one would wait in vain, too.
    pub fn is_silent(&self, disk: &Disk) -> bool {
        self.entry(disk.queue).is_ok_and(|entry| entry.device.is_silent())
    }

    /// Has a disk be as large as its drive has said. Those who use it are woken. Returns its size before and now.
    ///
    /// # Errors
    /// If the disk has been removed since the drive was asked.
    pub fn resize_disk(&self, found: &FoundSize) -> Result<(u64, u64), Error> {
        let _changing = self.changing()?;
        let (name, new) = (&found.disk.name, found.new);
        let disks = self.shared.disks();
        // Another one may have its name by now.
        let Some(disk) = disks.iter().find(|disk| disk.number == found.disk.number) else {
            return Err(Error::Disk(format!("disk {name}: there is no such disk")));
        };
        // Another answer may have come first, with more.
        let (old, new) = (disk.size, new.max(disk.size));
        if new > old {
            let entry = self.entry(disk.queue)?;
            entry.queue.grow_disk(disk.id, new, build::end_of)?;
            // Only drivers can refuse, and only disks that are new to them.
            let _ = self.refresh(disk.queue);
            let resized = disks.iter().cloned().map(|mut other| {
                if other.number == disk.number {
                    other.size = new;
                }
                other
            });
            self.shared.set_disks(resized.collect());
            disk.users.grow(new);
        }
        Ok((old, new))
    }

    /// Makes room in the queue's tables for a disk of this number.
    fn fit_disks(&self, queue: QueueId, core: &Queue, id: DiskId) -> Result<(), Error> {
        let wanted = id.index() + 1;
        if wanted <= core.fitted_disks() {
            return Ok(());
        }
        if self.shared.attached_max > 0 {
            return Err(Error::Disk(format!(
                "queue {}: has {} disks, and can have no more while threads can be attached; give the disk a queue= of its own",
                core.name(),
                core.fitted_disks()
            )));
        }
        let _frozen = self.freeze(queue)?;
        self.wait_until(core, || core.fit_disks(wanted).is_ok())?;
        self.shared
            .on_reactors(|_| move |reactor: &mut ReactorCore| reactor.queue(queue).fit_disks());
        Ok(())
    }

    /// Makes the drivers of a queue read its list of disks again.
    fn refresh(&self, queue: QueueId) -> Result<(), DisksError> {
        let refreshed = self
            .shared
            .on_reactors(|_| move |reactor: &mut ReactorCore| reactor.queue(queue).refresh_disks());
        self.shared.on_attached(
            |_| {},
            |_| {
                move |core: &mut ReactorCore| {
                    if let Err(error) = core.queue(queue).refresh_disks() {
                        tracing::error!("an attached thread cannot use a disk that was added: {error}");
                    }
                }
            },
        );
        refreshed.into_iter().collect()
    }

    /// Waits until no attached thread has a bio under way that was submitted before this, and freezes the queue.
    ///
    /// # Errors
    /// Why not, for people.
    fn attached_have_let_go(&self, queue: QueueId, until: Instant) -> Result<Frozen, String> {
        loop {
            let has_none = |_| move |core: &mut ReactorCore| core.queue(queue).has_started_all();
            let answers = self.shared.on_attached(|_| {}, has_none);
            let mut have_started = true;
            for answer in answers {
                let left = until.since(self.shared.clock.now());
                match answer.recv_timeout(Duration::from_nanos(left.0)) {
                    Ok(has_started) => have_started &= has_started,
                    // One that leaves has nothing under way.
                    Err(RecvTimeoutError::Disconnected) => {}
                    Err(RecvTimeoutError::Timeout) => {
                        return Err("an attached thread has not come back to its I/O".to_owned());
                    }
                }
            }
            if have_started {
                break;
            }
            if self.shared.clock.now() >= until {
                return Err("an attached thread has always had I/O that waits for room".to_owned());
            }
            std::thread::sleep(PAUSE_MAX);
        }
        // Everything that was submitted has started, so it is among what is drained.
        self.freeze_until(queue, until)
            .map_err(|_| "its I/O under way has not ended".to_owned())
    }

    pub(super) fn check_name(&self, name: &str) -> Result<(), Error> {
        match self.shared.disks().iter().any(|disk| disk.name == name) {
            true => Err(Error::Disk(format!(
                "disk {name}: there is one of this name; choose another"
            ))),
            false => Ok(()),
        }
    }

    /// Begins an addition or a removal, after all other changes have ended.
    pub(super) fn coming_or_going(&self) -> MutexGuard<'_, u32> {
        let changes = &self.shared.changes;
        changes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins another change, after all others have ended.
    pub(super) fn changing(&self) -> Result<MutexGuard<'_, u32>, Error> {
        if self.shared.attached_max > 0 {
            return Err(Error::Disk(
                "disks and queues can be changed only where no thread can be attached (attached_max = 0)"
                    .to_owned(),
            ));
        }
        let changes = &self.shared.changes;
        Ok(changes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Waits for at most `limit` until `is_so`. Says whether it is.
    pub(super) fn wait_for(&self, limit: Nanos, mut is_so: impl FnMut() -> bool) -> bool {
        let start = self.shared.clock.now();
        while !is_so() {
            if self.shared.clock.now().since(start) > limit {
                return false;
            }
            std::thread::sleep(PAUSE_MAX);
        }
        true
    }
}

pub(super) fn take_number(next: &mut u32) -> u32 {
    let number = *next;
    *next += 1;
    number
}

fn refused(disk: &str, error: impl std::fmt::Display) -> Error {
    Error::Disk(format!("disk {disk}: cannot be added: {error}"))
}
