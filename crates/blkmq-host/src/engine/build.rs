//! Builds the queues of an engine: the core's queue for each drive, the table of disks, and each thread's
//! handles.

use std::sync::{Arc, Mutex};

use blkmq_core::ids::{DiskId, REACTORS_MAX, ReactorId, ReactorSet};
use blkmq_core::queue::{DiskConfig, Queue, QueueConfig, QueueHandle, ReactorConfig};

use crate::clock::Clock;
use crate::device::{Allocation, Device};
use crate::disk::{Disk, QueueId, Users};
use crate::engine::config::{DiskEntry, EngineConfig, QueueSpec};
use crate::engine::mapped;
use crate::error::Error;
use crate::group_paths::Paths;
use crate::reactor::shared::{Parts, QueueEntry, ReactorQueues, Shared};
use crate::reactor::wakeup::Wakeup;
use crate::register::Register;
use crate::runner::Runner;

/// Makes the queues, and for each thread its handles of all of them.
pub(super) fn build(config: EngineConfig) -> Result<(Arc<Shared>, Vec<ReactorQueues>), Error> {
    let reactors = config.reactors.max(1);
    let handles = reactors + config.attached_max;
    if handles > REACTORS_MAX {
        return Err(Error::Range {
            name: "number of reactors and attached threads",
            value: handles as u64,
            min: 1,
            max: REACTORS_MAX as u64,
        });
    }
    let mut free_queues: Vec<ReactorQueues> = (0..handles)
        .map(|id| ReactorQueues {
            id: ReactorId(id as u16),
            handles: Vec::with_capacity(config.queues.len()),
        })
        .collect();
    let tenants = Register::default();
    // The groups of mapped disks have the same number on all queues.
    let paths_of_mapped = config
        .queues
        .first()
        .map_or_else(Vec::new, |spec| spec.group_paths.clone());
    let mut disks = Vec::new();
    let mut queues = Vec::with_capacity(config.queues.len());
    for (index, spec) in config.queues.into_iter().enumerate() {
        let device = Arc::clone(&spec.device);
        let entries = spec.disks.clone();
        let paths = Paths::new(&spec.group_paths);
        let (queue, handles) = make_queue(spec, reactors, handles)?;
        let of_queue = OfQueue {
            id: QueueId(index as u16),
            core: &queue,
            paths: &paths,
            tenants: &tenants,
        };
        of_queue.list_disks(&mut disks, &device, entries)?;
        let paths = Mutex::new(paths);
        free_queues
            .iter_mut()
            .zip(handles)
            .for_each(|(reactor_queues, handle)| reactor_queues.handles.push(handle));
        queues.push(Arc::new(QueueEntry { queue, device, paths }));
    }
    let mapped = mapped::add(&mut disks, config.mapped, |group| {
        let path = paths_of_mapped.get(group.index()).map(String::as_str);
        tenants.tenant("", group, path)
    })?;
    (0..)
        .zip(&mut disks)
        .for_each(|(number, disk)| disk.number = number);
    let wakeups: Result<Box<[Wakeup]>, _> = (0..handles).map(|_| Wakeup::new()).collect();
    let wakeups = wakeups.map_err(|cause| Error::Os {
        what: "making an event to wake a reactor with".to_owned(),
        cause,
    })?;
    let shared = Arc::new(Shared::new(Parts {
        ring: config.ring,
        spin_max: config.spin_max,
        wait: config.wait,
        wakeups,
        reactors,
        queues,
        disks,
        mapped,
        tenants,
    }));
    for (_, entry) in shared.entries() {
        entry.device.set_runner(runner(&shared, &entry.queue));
    }
    Ok((shared, free_queues))
}

/// The runner of a queue's hardware contexts. It does not keep the engine alive, which owns the device that
/// has the runner.
pub(super) fn runner(shared: &Arc<Shared>, queue: &Arc<Queue>) -> Runner {
    let size_news = Arc::clone(&shared.size_news);
    let (shared, queue) = (Arc::downgrade(shared), Arc::clone(queue));
    let run = move |hctx| {
        let Some(shared) = shared.upgrade() else {
            return;
        };
        if let Some(reactor) = queue.ask_to_run(hctx) {
            let mut kicks = ReactorSet::default();
            kicks.insert(reactor);
            shared.kick(kicks);
        }
    };
    Runner::new(run, size_news)
}

pub(super) fn make_queue(
    spec: QueueSpec,
    reactors: usize,
    handles: usize,
) -> Result<(Arc<Queue>, Vec<QueueHandle>), Error> {
    let io_poll = spec.is_polled()?;
    if io_poll {
        log_polling(&spec.name, &*spec.device);
    }
    let mut base = 0;
    let mut disks = Vec::with_capacity(spec.disks.len());
    for entry in spec.disks {
        let (name, size) = (entry.name.clone(), entry.size);
        disks.push(DiskConfig {
            name: entry.name,
            base,
            size: entry.size,
            read_only: entry.read_only,
            logical_block: entry.block_size,
        });
        base = end_of(base, size).ok_or_else(|| too_large(&spec.name, &name, size))?;
    }
    let config = QueueConfig {
        name: spec.name,
        reactors: (0..handles)
            .map(|id| ReactorConfig {
                is_event_loop: id < reactors,
            })
            .collect(),
        hctxs: spec
            .device
            .hctxs(spec.hctxs.unwrap_or(handles as u16), reactors as u16),
        tags: spec.tags,
        depth: spec.depth,
        requests_per_reactor: spec.requests_per_reactor,
        limits: spec.device.limits(),
        elevator: spec.elevator,
        dispatch: spec.dispatch,
        rerun: spec.rerun,
        timeout: spec.timeout,
        merges: spec.merges,
        groups: spec.groups,
        stats: spec.stats,
        clock: || Clock::get().now(),
        io_poll,
        poll_policy: spec.poll_policy,
        disks_max: spec.device.disks_max(disks.len()),
        disks,
    };
    let can_attach = handles > reactors;
    let (queue, handles) = Queue::new(config)?;
    if can_attach {
        // Later the tables cannot grow: not all attached threads would come for it.
        let room = (queue.fitted_disks() + DISKS_SPARE).min(queue.disks_max());
        queue.freeze_begin();
        queue.fit_disks(room).expect("nobody uses it yet");
        queue.freeze_end();
    }
    for (name, value) in spec.tunables {
        let set = queue
            .set_tunable(&name, value)
            .expect("nobody else is inside yet");
        set.map_err(|cause| Error::Tunable {
            queue: queue.name().to_owned(),
            cause,
        })?;
    }
    Ok((queue, handles))
}

/// Where the next disk may begin after one of `size` bytes at `base`: disks have gaps between them on the
/// queue, so that the end of one is not adjacent to the beginning of the next.
pub(super) fn end_of(base: u64, size: u64) -> Option<u64> {
    let end = base.checked_add(size)?.checked_next_multiple_of(DISK_SPACING)?;
    end.checked_add(DISK_SPACING)
}

/// The error for a disk that does not fit after the others of its queue.
pub(super) fn too_large(queue: &str, disk: &str, size: u64) -> Error {
    Error::Disk(format!(
        "queue {queue}: disk {disk}: size {size} rejected: all disks of a queue together must be smaller than 16777216T; make it \
         smaller, or give it a queue= of its own"
    ))
}

/// The queue whose disks are listed.
pub(super) struct OfQueue<'a> {
    pub(super) id: QueueId,
    pub(super) core: &'a Queue,
    pub(super) paths: &'a Paths,
    pub(super) tenants: &'a Register,
}

impl OfQueue<'_> {
    /// Lists the disks of a queue after others.
    pub(super) fn list_disks(
        &self,
        disks: &mut Vec<Disk>,
        device: &Arc<dyn Device>,
        entries: Vec<DiskEntry>,
    ) -> Result<(), Error> {
        let allocation: Arc<dyn Allocation> = Arc::<dyn Device>::clone(device);
        for (id, entry) in entries.into_iter().enumerate() {
            if disks.iter().any(|disk| disk.name == entry.name) {
                let name = entry.name;
                return Err(Error::Disk(format!(
                    "disk {name}: there are two of this name; rename one"
                )));
            }
            disks.push(self.disk(DiskId(id as u32), entry, Arc::clone(&allocation)));
        }
        Ok(())
    }

    /// A disk of the queue, as its users see it.
    pub(super) fn disk(&self, id: DiskId, entry: DiskEntry, allocation: Arc<dyn Allocation>) -> Disk {
        let path = self.paths.path_of(entry.group);
        Disk {
            serial: crate::disk::serial_of(&entry.name, entry.serial.as_deref()),
            export: entry.export.unwrap_or_else(|| entry.name.clone()),
            name: entry.name,
            description: entry.description,
            queue: self.id,
            id,
            size: entry.size,
            read_only: entry.read_only,
            block_size: entry.block_size,
            group: entry.group,
            tenant: self.tenants.tenant(self.core.name(), entry.group, path),
            limits: allocation.limits_of(id, self.core.limits()),
            allocation,
            used_by: None,
            number: 0,
            users: Users::default(),
        }
    }
}

/// Logs how a queue will be polled, if there is more than one way; the device finds it out in this call.
pub(crate) fn log_polling(queue: &str, device: &dyn Device) {
    if let Some(how) = device.describe_polling() {
        tracing::info!("queue {queue}: polled: {how}");
    }
}

/// Disks that can be added to a queue at which threads can be attached.
const DISKS_SPARE: usize = 15;
const DISK_SPACING: u64 = 1 << 20;
