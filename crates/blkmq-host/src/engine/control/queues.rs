//! Adds and removes queues while an engine runs, each completely or not at all, like the disks of `devices`.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use blkmq_core::ids::ReactorId;
use blkmq_core::queue::QueueHandle;

use super::Control;
use super::devices::take_number;
use crate::disk::{MAPPED, QueueId};
use crate::engine::build::{self, OfQueue};
use crate::engine::config::QueueSpec;
use crate::error::Error;
use crate::group_paths::Paths;
use crate::reactor::core::ReactorCore;
use crate::reactor::queues::empty_handle;
use crate::reactor::shared::QueueEntry;

impl Control {
    /// Adds a queue, with its disks.
    ///
    /// # Errors
    /// If there is a queue or a disk of one of these names, or the configuration is not possible; no part of it
    /// is left then.
    pub fn add_queue(&self, spec: QueueSpec) -> Result<QueueId, Error> {
        let mut next_number = self.coming_or_going();
        if self.queues().iter().any(|(_, queue)| queue.name() == spec.name) {
            return Err(Error::Disk(format!(
                "queue {}: there is one of this name",
                spec.name
            )));
        }
        for disk in &spec.disks {
            self.check_name(&disk.name)?;
        }
        let reactors = self.shared.inboxes.len();
        let (device, disks) = (Arc::clone(&spec.device), spec.disks.clone());
        let paths = Paths::new(&spec.group_paths);
        let (queue, handles) = build::make_queue(spec, reactors, reactors + self.shared.attached_max)?;
        let id = self.shared.free_queue_id();
        if id == MAPPED {
            return Err(Error::Disk(format!(
                "queue {}: there are {} already",
                queue.name(),
                MAPPED.0
            )));
        }
        let mut all = self.shared.disks().to_vec();
        let before = all.len();
        let of_queue = OfQueue {
            id,
            core: &queue,
            paths: &paths,
            tenants: &self.shared.tenants,
        };
        of_queue.list_disks(&mut all, &device, disks)?;
        all[before..]
            .iter_mut()
            .for_each(|disk| disk.number = take_number(&mut next_number));
        device.set_runner(build::runner(&self.shared, &queue));
        let paths = paths.into();
        let entry = Arc::new(QueueEntry { queue, device, paths });
        self.shared.set_entry(id, Some(Arc::clone(&entry)));
        let handles: RefCell<Vec<_>> = RefCell::new(handles.into_iter().map(Some).collect());
        let added = self.shared.on_reactors(|reactor| {
            let handle = handles.borrow_mut()[reactor.index()].take();
            let device = Arc::clone(&entry.device);
            move |core| core.add_queue(id, handle.expect(ONE_EACH), &*device)
        });
        if let Some(error) = added.into_iter().find_map(Result::err) {
            self.let_go(id)?;
            return Err(error);
        }
        let take = |of: ReactorId| handles.borrow_mut()[of.index()].take().expect(ONE_EACH);
        // Nobody waits for the answers: a thread that cannot open the drive has a queue here that refuses all bios.
        let name = entry.queue.name();
        self.shared.on_attached(
            |free| put_handle(&mut free.handles, id, take(free.id)),
            |of| {
                let (handle, device, name) = (take(of), Arc::clone(&entry.device), name.to_owned());
                move |core: &mut ReactorCore| {
                    if let Err(error) = core.add_queue(id, handle, &*device) {
                        tracing::error!("queue {name}: an attached thread cannot use it: {error}");
                    }
                }
            },
        );
        self.shared.set_disks(all.into());
        Ok(id)
    }

    /// Removes a queue that has no disks any more.
    ///
    /// # Errors
    /// If it has disks, or its drive cannot be closed alone, or as for [`Control::freeze`].
    pub fn remove_queue(&self, queue: QueueId) -> Result<(), Error> {
        let _changing = self.coming_or_going();
        let entry = self.entry(queue)?;
        let problem = |text: &str| Err(Error::Disk(format!("queue {}: {text}", entry.queue.name())));
        if self.shared.disks().iter().any(|disk| disk.queue == queue) {
            return problem("has disks; remove them first");
        }
        if !entry.device.is_removable() {
            return problem("its driver cannot be closed while the engine runs");
        }
        self.let_go(queue)
    }

    /// Removes a queue from all reactors that have it.
    fn let_go(&self, queue: QueueId) -> Result<(), Error> {
        let entry = self.entry(queue)?;
        // Only the drive's own requests are left under way.
        let _frozen = self.freeze(queue)?;
        let has_gone = || {
            let remove = |_| move |reactor: &mut ReactorCore| reactor.remove_queue(queue);
            let gone = self.shared.on_reactors(remove);
            gone.into_iter().all(|gone| gone)
        };
        if !self.wait_for(super::DRAIN_MAX, has_gone) {
            return Err(Error::Disk(format!(
                "queue {}: a reactor does not let it go",
                entry.queue.name()
            )));
        }
        let answers = self.shared.on_attached(
            |free| {
                if let Some(handle) = free.handles.get_mut(queue.index()) {
                    *handle = empty_handle();
                }
            },
            |_| move |core: &mut ReactorCore| core.remove_queue(queue),
        );
        // One that does not come back in time keeps its part of the drive until it does.
        for answer in answers {
            if answer.recv_timeout(LET_GO_MAX) != Ok(true) {
                let name = entry.queue.name();
                tracing::warn!("queue {name}: removed; an attached thread still has its drive open");
            }
        }
        self.shared.set_entry(queue, None);
        Ok(())
    }
}

/// Puts a handle behind the others, or in the place of a queue that was removed.
fn put_handle(handles: &mut Vec<QueueHandle>, id: QueueId, handle: QueueHandle) {
    match handles.get_mut(id.index()) {
        Some(place) => *place = handle,
        None => handles.push(handle),
    }
}

const ONE_EACH: &str = "one for each thread";
/// How long a removal waits for attached threads to close their part of a drive.
const LET_GO_MAX: Duration = Duration::from_secs(1);
