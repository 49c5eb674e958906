//! Reads what queues have counted, for all who ask: `report` and `metrics`. An idle queue is not read
//! again, and has the same reading as before: a thousand of them cost an observer next to nothing.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use blkmq_core::ids::GroupId;
use blkmq_core::local::InFlight;
use blkmq_core::queue::Queue;
use blkmq_core::stat::{EventStats, GroupStats};
use blkmq_host::control::InFlightOfGroups;
use blkmq_host::disk::QueueId;

use super::server::Daemon;

/// What a queue has counted since the start (of the first daemon, if others have taken over since).
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) name: String,
    pub(crate) state: State,
    /// Groups that did something, or have something at the drive.
    pub(crate) groups: Vec<GroupReading>,
    /// Whether reactors have said what groups have in flight.
    pub(crate) knows_in_flight: bool,
    /// Which group waited behind which, in nanoseconds.
    pub(crate) delays: Vec<(String, String, u64)>,
}

/// What a group has counted since the start, and what it has at the drive now.
#[derive(Clone, Debug)]
pub(crate) struct GroupReading {
    pub(crate) path: String,
    pub(crate) stats: GroupStats,
    /// Nothing, unless the reading knows.
    pub(crate) in_flight: InFlight,
}

/// What is cheap to read, and tells whether the rest is still the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct State {
    pub(crate) sched: &'static str,
    pub(crate) in_flight: u64,
    pub(crate) depth: u32,
    pub(crate) depth_limit: u32,
    pub(crate) events: EventStats,
    finished: u64,
    /// Of the configuration: groups may be others.
    changes: u64,
}

/// The last readings of all queues.
#[derive(Debug, Default)]
pub(crate) struct Readings {
    last: Mutex<BTreeMap<QueueId, Last>>,
}

#[derive(Clone, Debug)]
struct Last {
    reading: Arc<Reading>,
    /// When the queue was first seen in this state.
    since: Instant,
    /// Read late enough to have the last request's counts.
    is_final: bool,
}

impl Readings {
    /// Reads all queues. One that is idle has the reading that it had the last time.
    pub(crate) fn take(&self, daemon: &Daemon) -> Vec<Arc<Reading>> {
        let changes = daemon.running.changes();
        // Before anything is locked: it may wait for reactors.
        let in_flight = daemon.running.control().in_flight(ANSWER_MAX);
        let in_flight = in_flight.as_ref();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let queues = daemon.running.control().queues();
        let read = |(id, queue): &(QueueId, Arc<Queue>)| {
            let state = State::of(queue, changes);
            let now = match last.remove(id) {
                Some(last) if last.is_of(queue, &state) => last.again(daemon, *id, queue, in_flight),
                _ => Last::new(Reading::take(daemon, *id, queue, state, in_flight)),
            };
            (*id, now)
        };
        // Those that are left have no queue any more.
        *last = queues.iter().map(read).collect();
        last.values().map(|last| Arc::clone(&last.reading)).collect()
    }
}

impl Last {
    fn new(reading: Reading) -> Self {
        Self {
            reading: Arc::new(reading),
            since: Instant::now(),
            is_final: false,
        }
    }

    fn is_of(&self, queue: &Queue, state: &State) -> bool {
        self.reading.state == *state && self.reading.name == queue.name()
    }

    /// The reading of a queue whose state is as before.
    fn again(
        self,
        daemon: &Daemon,
        id: QueueId,
        queue: &Queue,
        in_flight: Option<&InFlightOfGroups>,
    ) -> Self {
        if self.is_final {
            return self;
        }
        let state = self.reading.state;
        Self {
            is_final: state.in_flight == 0 && self.since.elapsed() > COUNTED_WITHIN,
            reading: Arc::new(Reading::take(daemon, id, queue, state, in_flight)),
            since: self.since,
        }
    }
}

impl State {
    fn of(queue: &Queue, changes: u64) -> Self {
        Self {
            sched: queue.elevator().name,
            in_flight: queue.outstanding(),
            depth: queue.depth(),
            depth_limit: queue.depth_limit(),
            events: queue.event_stats(),
            finished: queue.finished(),
            changes,
        }
    }
}

impl Reading {
    fn take(
        daemon: &Daemon,
        id: QueueId,
        queue: &Queue,
        state: State,
        in_flight: Option<&InFlightOfGroups>,
    ) -> Self {
        let paths = daemon.running.control().groups(id);
        let path_of = |group: Option<GroupId>| {
            let found = paths.iter().find(|(_, id)| Some(*id) == group);
            found.map_or_else(|| "others".to_owned(), |(path, _)| path.clone())
        };
        let stats = |(path, group): &(String, GroupId)| {
            let mut stats = queue.group_stats(*group);
            // Most daemons are the first.
            if !daemon.earlier.is_empty()
                && let Some(before) = daemon.earlier.get(&(queue.name().to_owned(), path.clone()))
            {
                stats.add(before);
            }
            let in_flight = in_flight.and_then(|all| all.get(&(id, *group)));
            let in_flight = in_flight.copied().unwrap_or_default();
            let is_active = stats.total().ios > 0 || stats.queued > 0 || in_flight.requests > 0;
            is_active.then(|| GroupReading {
                path: path.clone(),
                stats,
                in_flight,
            })
        };
        let delays = queue.delays().pairs.into_iter();
        Self {
            name: queue.name().to_owned(),
            state,
            groups: paths.iter().filter_map(stats).collect(),
            knows_in_flight: in_flight.is_some(),
            delays: delays
                .map(|(who, behind, waited)| (path_of(who), path_of(behind), waited.0))
                .collect(),
        }
    }

    /// The same with groups of at most so many levels, each with those below it.
    pub(crate) fn summed(&self, levels: u8) -> Self {
        let mut groups: BTreeMap<&str, (GroupStats, InFlight)> = BTreeMap::new();
        for group in &self.groups {
            let (stats, in_flight) = groups.entry(cut(&group.path, levels)).or_default();
            stats.add(&group.stats);
            in_flight.add(group.in_flight);
        }
        let mut delays = BTreeMap::new();
        for (who, behind, ns) in &self.delays {
            *delays.entry((cut(who, levels), cut(behind, levels))).or_insert(0) += ns;
        }
        let owned = |((who, behind), ns): ((&str, &str), u64)| (who.to_owned(), behind.to_owned(), ns);
        Self {
            name: self.name.clone(),
            state: self.state,
            groups: groups
                .into_iter()
                .map(|(path, (stats, in_flight))| GroupReading {
                    path: path.to_owned(),
                    stats,
                    in_flight,
                })
                .collect(),
            knows_in_flight: self.knows_in_flight,
            delays: delays.into_iter().map(owned).collect(),
        }
    }
}

/// The first levels of a group's path. Others than paths stay as they are.
fn cut(path: &str, levels: u8) -> &str {
    if !path.starts_with('/') {
        return path;
    }
    match path.match_indices('/').nth(levels.into()) {
        Some((0, _)) => "/",
        Some((end, _)) => &path[..end],
        None => path,
    }
}

/// How long a reactor may take to say what groups have in flight; others may ask it meanwhile.
pub(crate) const ANSWER_MAX: Duration = Duration::from_millis(500);
/// How long after a request has ended its group's counts may lack it: a reactor counts both, one right
/// after the other, and may be preempted in between.
const COUNTED_WITHIN: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_of_a_group_is_cut_to_its_first_levels() {
        for (path, levels, wanted) in [
            ("/a/b/c", 0, "/"),
            ("/a/b/c", 1, "/a"),
            ("/a/b/c", 2, "/a/b"),
            ("/a/b/c", 3, "/a/b/c"),
            ("/a/b/c", 8, "/a/b/c"),
            ("/", 1, "/"),
            ("/", 0, "/"),
            ("others", 1, "others"),
        ] {
            assert_eq!(cut(path, levels), wanted, "{path} {levels}");
        }
    }
}
