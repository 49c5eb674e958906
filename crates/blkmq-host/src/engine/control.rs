//! Control of a running engine: freezing, quiescing, elevator, depth, groups, statistics. The queue's own
//! operations never block; here the calling thread, which is no reactor, waits for them.

mod devices;
mod encrypted;
mod groups;
mod in_flight;
mod queues;
mod trace;

use std::cell::Cell;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::poll::{Bucket, BucketStats, DELAY_MAX_US, Policy};
use blkmq_core::queue::{Busy, Queue};
use blkmq_core::sched::ElevatorType;
use blkmq_core::stat::{EventStats, GroupStats};
use blkmq_core::time::{Instant, Nanos};

use crate::device::{Device, Polling};
use crate::disk::{Disk, QueueId};
use crate::engine::build::log_polling;
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::{Order, QueueEntry, Shared};
use crate::size_news::SizeNews;

pub use self::devices::FoundSize;
pub use self::in_flight::InFlightOfGroups;
pub use self::trace::{Trace, receivers};

/// A handle to change and watch an engine with. Cheap to clone; for any thread but a reactor's.
#[derive(Clone)]
pub struct Control {
    shared: Arc<Shared>,
}

/// A queue that starts no request, until this is dropped.
#[must_use = "the queue thaws when this is dropped"]
pub struct Frozen {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
}

/// The answers of reactors that were asked for a sign of life.
#[derive(Debug)]
pub struct Answers {
    receiver: Receiver<ReactorId>,
    missing: Vec<ReactorId>,
}

impl Answers {
    /// Waits for the answers, for at most `limit`. Returns the reactors of which none has come yet.
    pub fn wait(&mut self, limit: Duration) -> &[ReactorId] {
        // Each has its time: they answer side by side.
        while !self.missing.is_empty()
            && let Ok(reactor) = self.receiver.recv_timeout(limit)
        {
            self.missing.retain(|missing| *missing != reactor);
        }
        &self.missing
    }
}

/// A queue that issues no request to its drive, until this is dropped.
#[must_use = "the queue goes on when this is dropped"]
pub struct Quiesced {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
}

/// A queue whose caps hold nothing back, until this is dropped.
#[must_use = "the caps hold again when this is dropped"]
pub struct Uncapped {
    shared: Arc<Shared>,
    queue: Arc<Queue>,
}

impl Control {
    pub(crate) fn new(shared: Arc<Shared>) -> Self {
        Self { shared }
    }

    /// All disks.
    pub fn disks(&self) -> Arc<[Disk]> {
        self.shared.disks()
    }

    /// Asks every reactor for a sign of life. Each sends its number when it next takes orders, in its own turn; one that
    /// is stopped, or waits for something that does not come, sends none.
    pub fn ask_reactors(&self) -> Answers {
        let (sender, receiver) = channel();
        let count = self.shared.inboxes.len();
        for number in 0..count {
            let (reactor, sender) = (ReactorId(number as u16), sender.clone());
            // Who asked may wait no longer.
            let answer = move |_: &mut ReactorCore| {
                let _ = sender.send(reactor);
            };
            self.shared.order(reactor, Order::Change(Box::new(answer)));
        }
        let missing = (0..count).map(|number| ReactorId(number as u16)).collect();
        Answers { receiver, missing }
    }

    /// Reports of devices that sizes of disks may have changed: for a thread that then calls [`Control::ask_size`].
    pub fn size_news(&self) -> Arc<SizeNews> {
        Arc::clone(&self.shared.size_news)
    }

    /// The queues, in the order of their ids.
    pub fn queues(&self) -> Vec<(QueueId, Arc<Queue>)> {
        let entries = self.shared.entries().into_iter();
        entries
            .map(|(id, entry)| (id, Arc::clone(&entry.queue)))
            .collect()
    }

    /// Finds a queue by its name.
    ///
    /// # Errors
    /// If there is none; the text lists the existing queues.
    pub fn queue(&self, name: &str) -> Result<QueueId, Error> {
        let queues = self.queues();
        let found = queues.iter().find(|(_, queue)| queue.name() == name);
        found.map(|(id, _)| *id).ok_or_else(|| {
            let known: Vec<&str> = queues.iter().map(|(_, queue)| queue.name()).collect();
            Error::NoQueue {
                name: name.to_owned(),
                known: known.join(", "),
            }
        })
    }

    /// A group's statistics on a queue.
    ///
    /// # Panics
    /// If there is no such queue or group.
    pub fn group_stats(&self, queue: QueueId, group: GroupId) -> GroupStats {
        self.known(queue).queue.group_stats(group)
    }

    /// The counts of the engine's events on a queue.
    ///
    /// # Panics
    /// If there is no such queue.
    pub fn event_stats(&self, queue: QueueId) -> EventStats {
        self.known(queue).queue.event_stats()
    }

    /// Freezes a queue: new requests wait, and this call waits until those under way have ended. Nests. If a request hangs,
    /// the queue is thawed after 50 ms in which nothing has ended, and frozen again a while later, for longer.
    ///
    /// # Errors
    /// If the queue has not drained in 30 s (it is thawed then), or on a reactor's thread.
    pub fn freeze(&self, queue: QueueId) -> Result<Frozen, Error> {
        self.freeze_until(queue, self.shared.clock.now() + DRAIN_MAX)
    }

    /// The same with another limit.
    fn freeze_until(&self, queue: QueueId, until: Instant) -> Result<Frozen, Error> {
        let core = self.core(queue)?;
        off_reactors(&core)?;
        let start = self.shared.clock.now();
        let (mut patience, mut tries) = (FREEZE_MIN, 0);
        loop {
            core.freeze_begin();
            let frozen = Frozen {
                shared: Arc::clone(&self.shared),
                queue: Arc::clone(&core),
            };
            if self.drains(&core, patience, until) {
                return Ok(frozen);
            }
            let waited = self.shared.clock.now().since(start);
            if start + waited > until || self.shared.is_hurried.load(Ordering::Relaxed) {
                return Err(Error::NotDrained {
                    queue: core.name().to_owned(),
                    outstanding: core.outstanding(),
                    waited,
                });
            }
            drop(frozen);
            // In turn, so that no rhythm of a drive avoids each try.
            let thawed = Nanos(patience.0 * (3 + tries % 3));
            self.wait_for(thawed, || self.shared.is_hurried.load(Ordering::Relaxed));
            (patience, tries) = (Nanos(patience.0 * 2).min(FREEZE_MAX), tries + 1);
        }
    }

    /// Waits until a frozen queue has drained, as long as requests end, and until a time at most: not after a time in which
    /// none has ended.
    fn drains(&self, core: &Queue, patience: Nanos, until: Instant) -> bool {
        let (mut finished, mut since) = (core.finished(), self.shared.clock.now());
        let mut pause = PAUSE_MIN;
        while !core.is_drained() {
            let now = self.shared.clock.now();
            match core.finished() {
                same if same == finished => {}
                more => (finished, since) = (more, now),
            }
            if now.since(since) > patience || now > until || self.shared.is_hurried.load(Ordering::Relaxed) {
                return false;
            }
            self.shared.kick(core.everybody());
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSE_MAX);
        }
        self.shared.kick(core.everybody());
        true
    }

    /// Lifts the caps of a queue's groups: waiting requests continue at once, and new ones pass. They are
    /// charged, so the averages hold afterwards. For one caller at a time.
    ///
    /// # Errors
    /// If there is no such queue.
    pub fn lift_caps(&self, queue: QueueId) -> Result<Uncapped, Error> {
        let core = self.core(queue)?;
        core.lift_caps(true);
        self.shared.kick(core.everybody());
        Ok(Uncapped {
            shared: Arc::clone(&self.shared),
            queue: core,
        })
    }

    /// Quiesces a queue: when this returns, no request is being issued to its drive; completions continue. Nests.
    ///
    /// # Errors
    /// As for [`Self::freeze`].
    pub fn quiesce(&self, queue: QueueId) -> Result<Quiesced, Error> {
        let core = self.core(queue)?;
        off_reactors(&core)?;
        core.quiesce_begin();
        let quiesced = Quiesced {
            shared: Arc::clone(&self.shared),
            queue: Arc::clone(&core),
        };
        self.wait_until(&core, || core.is_quiesced())?;
        Ok(quiesced)
    }

    /// Replaces a queue's elevator, also under load: freezes the queue, waits until it is drained, replaces the
    /// elevator, thaws.
    ///
    /// # Errors
    /// As for [`Self::freeze`]; the old elevator stays then.
    pub fn set_elevator(&self, queue: QueueId, kind: &'static ElevatorType) -> Result<(), Error> {
        let core = self.core(queue)?;
        off_reactors(&core)?;
        let mut next = None;
        self.wait_until(&core, || {
            next = core.make_elevator(kind).ok();
            next.is_some()
        })?;
        let mut next = next.expect("waited for");
        // Thawed before the former elevator is dropped.
        let _frozen = self.freeze(queue)?;
        self.wait_until(&core, || core.exchange_elevator(&mut next).is_ok())
    }

    /// Bounds the requests in flight: per hardware context without an elevator, in total with one. Takes effect
    /// at once.
    ///
    /// # Errors
    /// If `depth` is 0 or more than the queue was made for.
    pub fn set_depth(&self, queue: QueueId, depth: u32) -> Result<(), Error> {
        let core = self.core(queue)?;
        let set = core.set_depth(depth).map_err(|max| Error::Range {
            name: "depth",
            value: depth.into(),
            min: 1,
            max: max.into(),
        });
        self.shared.kick(core.everybody());
        set
    }

    /// Switches polling for a queue's completions on or off (`io_poll`). Takes effect at once.
    ///
    /// # Errors
    /// If it is switched on and the drive cannot be polled.
    pub fn set_io_poll(&self, queue: QueueId, on: bool) -> Result<(), Error> {
        if on {
            self.insist_on_polling(queue, "io_poll", "on")?;
            let entry = self.entry(queue)?;
            log_polling(entry.queue.name(), &*entry.device);
        }
        let core = self.core(queue)?;
        core.set_polled(on);
        self.shared.kick(core.everybody());
        Ok(())
    }

    /// Sets how long a reactor sleeps for a request of a polled queue before it polls (`io_poll_delay`): −1 not at
    /// all, 0 half of the mean, otherwise this many microseconds. [`Self::set_poll_policy`] has all policies,
    /// including the default.
    ///
    /// # Errors
    /// If `delay` is out of range, or the queue's drive cannot be polled.
    pub fn set_io_poll_delay(&self, queue: QueueId, delay: i64) -> Result<(), Error> {
        let core = self.core(queue)?;
        let policy = Policy::from_delay(delay).ok_or_else(|| Error::Attribute {
            queue: core.name().to_owned(),
            name: "io_poll_delay",
            value: delay.to_string(),
            limit: format!(
                "must be -1 (look at once), 0 (sleep half of the mean) or microseconds from 1 to {DELAY_MAX_US}"
            ),
        })?;
        self.set_poll_policy(queue, policy)
    }

    /// Checks whether a queue can be polled, if `polls`, and whether it can have a policy for that.
    ///
    /// # Errors
    /// If its drive cannot be polled.
    pub fn check_polling(&self, queue: QueueId, polls: bool, policy: Policy) -> Result<(), Error> {
        if polls {
            self.insist_on_polling(queue, "io_poll", "on")?;
        }
        // The default is no wish, as at the start.
        if policy != Policy::default() {
            self.insist_on_polling(queue, "io_poll_delay", &policy.to_string())?;
        }
        Ok(())
    }

    /// Sets how a reactor sleeps for requests of a polled queue.
    ///
    /// # Errors
    /// If its drive cannot be polled, and the policy is not the default.
    pub fn set_poll_policy(&self, queue: QueueId, policy: Policy) -> Result<(), Error> {
        self.check_polling(queue, false, policy)?;
        self.core(queue)?.set_poll_policy(policy);
        Ok(())
    }

    /// The measured times of a queue's requests, for each bucket (direction and size) that had any. None if there is no
    /// such queue, as a queue may go at any moment.
    pub fn poll_stats(&self, queue: QueueId) -> Vec<(Bucket, BucketStats)> {
        let Some(entry) = self.shared.entry(queue) else {
            return Vec::new();
        };
        let all = Bucket::all().map(|bucket| (bucket, entry.queue.poll_stats(bucket)));
        all.filter(|(_, stats)| stats.samples > 0).collect()
    }

    /// A text that says how a polled queue's completions are found; none if the queue is not polled or does not exist,
    /// or there is only one way.
    pub fn describe_polling(&self, queue: QueueId) -> Option<String> {
        let entry = self.shared.entry(queue)?;
        entry.queue.is_polled().then(|| entry.device.describe_polling())?
    }

    fn insist_on_polling(&self, queue: QueueId, name: &'static str, value: &str) -> Result<(), Error> {
        let entry = self.entry(queue)?;
        if entry.device.polling() == Polling::Impossible {
            return Err(Error::not_polled(entry.queue.name(), name, value));
        }
        Ok(())
    }

    /// Lists the tunables of a queue's elevator.
    ///
    /// # Errors
    /// If the elevator was in use all the time for 30 s, or on a reactor's thread.
    pub fn tunables(&self, queue: QueueId) -> Result<Vec<(&'static str, u64)>, Error> {
        let core = self.core(queue)?;
        self.insist(queue, || core.tunables())
    }

    /// Sets a tunable of a queue's elevator.
    ///
    /// # Errors
    /// If the elevator refuses the name or the value; otherwise as for [`Self::tunables`].
    pub fn set_tunable(&self, queue: QueueId, name: &str, value: u64) -> Result<(), Error> {
        let core = self.core(queue)?;
        let set = self.insist(queue, || core.set_tunable(name, value))?;
        set.map_err(|cause| Error::Tunable {
            queue: core.name().to_owned(),
            cause,
        })
    }

    /// The device of a queue, for its driver's operations beside I/O: downcast it to the driver's type.
    ///
    /// # Errors
    /// If there is no such queue.
    pub fn device(&self, queue: QueueId) -> Result<Arc<dyn Device>, Error> {
        self.entry(queue).map(|entry| Arc::clone(&entry.device))
    }

    /// Makes a shutdown under way return at once, with an error that says what was not finished.
    pub fn hurry(&self) {
        // Relaxed: nothing is published with it.
        self.shared.is_hurried.store(true, Ordering::Relaxed);
    }

    /// A queue.
    ///
    /// # Errors
    /// If there is no queue of this number.
    pub fn core(&self, queue: QueueId) -> Result<Arc<Queue>, Error> {
        self.entry(queue).map(|entry| Arc::clone(&entry.queue))
    }

    fn entry(&self, queue: QueueId) -> Result<Arc<QueueEntry>, Error> {
        self.shared.entry(queue).ok_or_else(|| Error::NoQueueNumber {
            number: queue.0,
            queues: self.shared.entries().len(),
        })
    }

    /// A queue's name for an error; it may have gone by now.
    fn name(&self, queue: QueueId) -> String {
        let entry = self.shared.entry(queue);
        entry.map_or_else(
            || format!("number {}", queue.0),
            |entry| entry.queue.name().to_owned(),
        )
    }

    /// A queue that the caller requires to exist, for functions that return no error.
    fn known(&self, queue: QueueId) -> Arc<QueueEntry> {
        self.entry(queue).unwrap_or_else(|error| panic!("{error}"))
    }

    /// Retries while the gate is held.
    fn insist<T>(&self, queue: QueueId, attempt: impl Fn() -> Result<T, Busy>) -> Result<T, Error> {
        let core = self.core(queue)?;
        off_reactors(&core)?;
        let mut result = None;
        self.wait_until(&core, || {
            result = attempt().ok();
            result.is_some()
        })?;
        Ok(result.expect("waited until there was one"))
    }

    fn wait_until(&self, queue: &Queue, is_so: impl FnMut() -> bool) -> Result<(), Error> {
        wait_until(&self.shared, queue, DRAIN_MAX, is_so)
    }
}

/// Waits until `is_so`, with short sleeps, and kicks all reactors of the queue meanwhile.
pub(crate) fn wait_until(
    shared: &Shared,
    core: &Queue,
    at_most: Nanos,
    mut is_so: impl FnMut() -> bool,
) -> Result<(), Error> {
    let start = shared.clock.now();
    let mut pause = PAUSE_MIN;
    while !is_so() {
        let waited = shared.clock.now().since(start);
        if waited > at_most || shared.is_hurried.load(Ordering::Relaxed) {
            return Err(Error::NotDrained {
                queue: core.name().to_owned(),
                outstanding: core.outstanding(),
                waited,
            });
        }
        shared.kick(core.everybody());
        std::thread::sleep(pause);
        pause = (pause * 2).min(PAUSE_MAX);
    }
    shared.kick(core.everybody());
    Ok(())
}

impl Drop for Frozen {
    fn drop(&mut self) {
        self.queue.freeze_end();
        self.shared.kick(self.queue.everybody());
    }
}

impl Drop for Uncapped {
    fn drop(&mut self) {
        self.queue.lift_caps(false);
        self.shared.kick(self.queue.everybody());
    }
}

impl Drop for Quiesced {
    fn drop(&mut self) {
        self.queue.quiesce_end();
        self.shared.kick(self.queue.everybody());
    }
}

thread_local! {
    static IS_REACTOR: Cell<bool> = const { Cell::new(false) };
}

/// Marks the calling thread as a reactor's, where control operations would wait for themselves.
pub(crate) fn mark_reactor() {
    IS_REACTOR.set(true);
}

/// Returns whether the calling thread is a reactor's.
pub(crate) fn is_reactor() -> bool {
    IS_REACTOR.get()
}

fn off_reactors(queue: &Queue) -> Result<(), Error> {
    if is_reactor() {
        return Err(Error::OnReactor {
            queue: queue.name().to_owned(),
        });
    }
    Ok(())
}

const DRAIN_MAX: Nanos = Nanos::from_secs(30);
/// How long a frozen queue waits at first for the next end, and at last; then it is thawed for 3 to 5 times as long. A drive
/// whose requests take longer than at first is frozen by a later try.
const FREEZE_MIN: Nanos = Nanos::from_millis(50);
const FREEZE_MAX: Nanos = Nanos::from_millis(400);
const PAUSE_MIN: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(2);
