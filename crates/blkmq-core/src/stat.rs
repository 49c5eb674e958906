//! Decides what is counted, and that counting costs nobody else anything: each reactor adds to its own shard with plain
//! stores, and whoever reads adds the shards up. `sw_ctx` counts ends of bios, the other modules their own events.

use blkmq_sync::counter::Counter;

use crate::bio::Direction;
use crate::ids::GroupId;
use crate::request::Request;

macro_rules! counters {
    ($(#[$shard_doc:meta])* $shard:ident, $(#[$sum_doc:meta])* $sum:ident { $($(#[$doc:meta])* $field:ident,)* }) => {
        $(#[$shard_doc])*
        #[derive(Debug, Default)]
        pub(crate) struct $shard { $(pub(crate) $field: Counter,)* }

        $(#[$sum_doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $sum { $($(#[$doc])* pub $field: u64,)* }

        impl $sum {
            fn fold(&mut self, shard: &$shard) { $(self.$field += shard.$field.get();)* }

            #[allow(dead_code, reason = "not all counters are moved")]
            fn move_to(self, shard: &$shard) { $(shard.$field.set(self.$field);)* }

            /// Lists the counters with their names.
            pub fn fields(&self) -> Vec<(&'static str, u64)> { vec![$((stringify!($field), self.$field)),*] }
        }
    };
}

counters! {
    /// One reactor's part of the counters of one group and direction.
    DirectionShard,
    /// What one group did in one direction, since the queue was made. All counters are monotone.
    DirectionStats {
        /// Bios that ended, however.
        ios,
        /// Their bytes.
        bytes,
        /// Bios that ended with an error.
        errors,
        /// Bios that were merged into an earlier one's request.
        merged,
        /// Time from insertion to issue, in nanoseconds, over all bios.
        wait_ns,
        /// Time from issue to the end as the engine saw it, in nanoseconds, over all bios.
        service_ns,
    }
}

counters! {
    /// One reactor's part of the queue's counters of events.
    EventShard,
    /// How often the engine did what, since the queue was made. All counters are monotone.
    EventStats {
        /// Requests issued to the driver.
        issued,
        /// Requests that the driver pushed back for want of a resource.
        pushed_back,
        /// Requests that the driver ended with the wish to have them again.
        requeued,
        /// Requests that passed the time limit.
        timed_out,
        /// Bios that were cut into parts.
        split,
        /// Flush requests issued.
        flushes,
        /// Times a reactor entered the gate.
        gate_entered,
        /// Times a reactor found the gate held and went on.
        gate_skipped,
        /// Passes through the elevator; more than `gate_entered` when the holder looked again for others.
        gate_passes,
        /// Runs of a hardware context that were executed.
        runs,
        /// Runs that had to be announced to the owning reactor (idle to queued).
        runs_scheduled,
        /// Requests or ends handed to another reactor.
        handed_over,
    }
}

/// What one group did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// By direction, in the order of [`Direction::ALL`].
    pub directions: [DirectionStats; Direction::COUNT],
}

impl GroupStats {
    /// Returns the counters of one direction.
    pub fn of(&self, direction: Direction) -> &DirectionStats {
        &self.directions[direction as usize]
    }
}

/// Everything that one reactor counts for one queue.
#[derive(Debug)]
pub(crate) struct Shard {
    groups: Box<[[DirectionShard; Direction::COUNT]]>,
    pub(crate) events: EventShard,
}

impl Shard {
    pub(crate) fn new(groups: u32) -> Self {
        Self {
            groups: (0..groups).map(|_| Default::default()).collect(),
            events: EventShard::default(),
        }
    }

    /// Counts the end of a single bio's request. Called by the owner alone.
    #[inline]
    pub(crate) fn count_end(&self, rq: &Request) {
        let counters = self.of(rq);
        counters.ios.add(1);
        counters.bytes.add(rq.bio.len);
        counters.wait_ns.add(rq.issued_at.since(rq.inserted_at).0);
        counters.service_ns.add(rq.completed_at.since(rq.issued_at).0);
        if !rq.status.is_ok() {
            counters.errors.add(1);
        }
    }

    /// Counts `bios` more bios of the request's kind as merged.
    pub(crate) fn count_merge(&self, group: GroupId, direction: Direction, bios: u32) {
        self.groups[group.index()][direction as usize]
            .merged
            .add(bios.into());
    }

    #[inline]
    fn of(&self, rq: &Request) -> &DirectionShard {
        &self.groups[rq.bio.group.index()][rq.bio.op.direction() as usize]
    }
}

/// Adds up one group's counters over all shards.
pub(crate) fn group<'a>(shards: impl Iterator<Item = &'a Shard>, group: GroupId) -> GroupStats {
    let mut sum = GroupStats::default();
    for shard in shards {
        for (sum, part) in sum.directions.iter_mut().zip(&shard.groups[group.index()]) {
            sum.fold(part);
        }
    }
    sum
}

/// Adds what a group did, with what its dead did, to the dead of its parent, and forgets it. For whoever is inside the gate,
/// about a group that no reactor counts for any more: its counters are the caller's then.
pub(crate) fn bury<'a>(
    shards: impl Iterator<Item = &'a Shard>,
    dead: &'a Shard,
    group: GroupId,
    parent: GroupId,
) {
    let mut sum = self::group(std::iter::once(dead), parent);
    for shard in shards.chain([dead]) {
        for (sum, part) in sum.directions.iter_mut().zip(&shard.groups[group.index()]) {
            sum.fold(part);
            DirectionStats::default().move_to(part);
        }
    }
    for (sum, part) in sum.directions.iter().zip(&dead.groups[parent.index()]) {
        sum.move_to(part);
    }
}

/// Adds up the events over all shards.
pub(crate) fn events<'a>(shards: impl Iterator<Item = &'a Shard>) -> EventStats {
    let mut sum = EventStats::default();
    shards.for_each(|shard| sum.fold(&shard.events));
    sum
}
