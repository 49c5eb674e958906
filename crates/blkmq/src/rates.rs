//! Rates between two samples of a daemon: differences of counts, and the percentiles of that time alone. `ctl
//! stats`, `iostat` and `top` show them.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::control::statistics::{Counts, Delay, GroupStatistics, QueueStatistics, Statistics, Times};

/// The activity of a daemon in an interval: the present state of each queue, and the counts of its
/// groups.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Interval {
    /// The length of the interval.
    pub seconds: f64,
    /// All queues, with differences for counts.
    pub queues: Vec<Arc<QueueStatistics>>,
}

/// Samples of one daemon, one after the other.
#[derive(Debug, Default)]
pub struct Samples {
    before: Option<Statistics>,
    /// What a queue did between two equal samples, by its name: nothing, in many words.
    idle: BTreeMap<String, Arc<QueueStatistics>>,
}

impl Samples {
    /// Whether the next one is the first.
    pub fn is_empty(&self) -> bool {
        self.before.is_none()
    }

    /// Takes the next sample. Returns the activity since the one before; `None` if there is none, if the
    /// two are from two daemons, or the same.
    pub fn take(&mut self, now: Statistics) -> Option<Interval> {
        let before = self.before.replace(now)?;
        let now = self.before.as_ref()?;
        let time = now
            .uptime_ns
            .checked_sub(before.uptime_ns)
            .filter(|time| *time > 0)?;
        let names = before.queues.iter().map(|queue| (queue.name.as_str(), queue));
        let known: BTreeMap<&str, &Arc<QueueStatistics>> = names.collect();
        let mut idle = std::mem::take(&mut self.idle);
        let queue = |now: &Arc<QueueStatistics>| match known.get(now.name.as_str()) {
            None => Arc::clone(now),
            Some(before) if !Arc::ptr_eq(before, now) => Arc::new(queue_since(now, before)),
            Some(_) => {
                let (name, same) = idle
                    .remove_entry(&now.name)
                    .unwrap_or_else(|| (now.name.clone(), Arc::new(queue_since(now, now))));
                self.idle.insert(name, Arc::clone(&same));
                same
            }
        };
        Some(Interval {
            seconds: seconds(time),
            queues: now.queues.iter().map(queue).collect(),
        })
    }
}

impl Interval {
    /// The activity since the start of the daemon.
    pub fn since_start(now: Statistics) -> Self {
        Self {
            seconds: seconds(now.uptime_ns),
            queues: now.queues,
        }
    }

    /// A count as a rate per second.
    pub fn per_second(&self, count: u64) -> f64 {
        count as f64 / self.seconds
    }
}

/// The sum of the counts of groups.
pub fn sum<'a>(groups: impl IntoIterator<Item = &'a GroupStatistics>) -> GroupStatistics {
    let mut sum = GroupStatistics::default();
    let (mut wait, mut device) = (BTreeMap::new(), BTreeMap::new());
    for group in groups {
        sum.queued += group.queued;
        if let Some(more) = group.in_flight {
            *sum.in_flight.get_or_insert(0) += more;
        }
        sum.oldest_ns = sum.oldest_ns.max(group.oldest_ns);
        sum.idle_ns += group.idle_ns;
        sum.group_wait_ns += group.group_wait_ns;
        for (all, one) in parts_mut(&mut sum).into_iter().zip(parts(group)) {
            *all = pairwise(*all, *one, u64::saturating_add);
        }
        for (all, one) in [(&mut wait, &group.wait), (&mut device, &group.device)] {
            for (bound, count) in &one.buckets {
                *all.entry(*bound).or_insert(0) += count;
            }
        }
    }
    sum.wait = Times::new(wait.into_iter().collect());
    sum.device = Times::new(device.into_iter().collect());
    sum
}

/// Whether a group was active, or has I/Os waiting.
pub fn is_active(group: &GroupStatistics) -> bool {
    group.total.ios > 0 || group.queued > 0
}

fn queue_since(now: &QueueStatistics, before: &QueueStatistics) -> QueueStatistics {
    let was: BTreeMap<&str, &GroupStatistics> = before
        .groups
        .iter()
        .map(|group| (group.path.as_str(), group))
        .collect();
    let group = |now: &GroupStatistics| match was.get(now.path.as_str()) {
        // A smaller count means another group, which was made since.
        Some(before) if before.total.ios <= now.total.ios => group_since(now, before),
        _ => now.clone(),
    };
    let waited: BTreeMap<_, u64> = before
        .delays
        .iter()
        .map(|delay| ((&delay.group, &delay.behind), delay.ns))
        .collect();
    let delay = |now: &Delay| Delay {
        ns: now
            .ns
            .saturating_sub(waited.get(&(&now.group, &now.behind)).copied().unwrap_or(0)),
        ..now.clone()
    };
    let event = |(name, count): (&String, &u64)| {
        let before = before.events.get(name).copied().unwrap_or(0);
        (name.clone(), count.saturating_sub(before))
    };
    QueueStatistics {
        groups: now.groups.iter().map(group).collect(),
        delays: now
            .delays
            .iter()
            .map(delay)
            .filter(|delay| delay.ns > 0)
            .collect(),
        events: now.events.iter().map(event).collect(),
        ..now.clone()
    }
}

fn group_since(now: &GroupStatistics, before: &GroupStatistics) -> GroupStatistics {
    let mut since = GroupStatistics {
        path: now.path.clone(),
        queued: now.queued,
        in_flight: now.in_flight,
        oldest_ns: now.oldest_ns,
        idle_ns: now.idle_ns.saturating_sub(before.idle_ns),
        group_wait_ns: now.group_wait_ns.saturating_sub(before.group_wait_ns),
        wait: times_since(&now.wait, &before.wait),
        device: times_since(&now.device, &before.device),
        ..GroupStatistics::default()
    };
    let pairs = parts(now).into_iter().zip(parts(before));
    for (since, (now, before)) in parts_mut(&mut since).into_iter().zip(pairs) {
        *since = pairwise(*now, *before, u64::saturating_sub);
    }
    since
}

fn times_since(now: &Times, before: &Times) -> Times {
    let mut was = before.buckets.iter().peekable();
    let mut since = Vec::new();
    for &(bound, count) in &now.buckets {
        // Both are in order, and a bucket that was not empty is not empty later.
        while was.next_if(|(at, _)| *at < bound).is_some() {}
        let before = was.next_if(|(at, _)| *at == bound).map_or(0, |(_, count)| *count);
        if count > before {
            since.push((bound, count - before));
        }
    }
    Times::new(since)
}

fn pairwise(one: Counts, other: Counts, of: fn(u64, u64) -> u64) -> Counts {
    Counts {
        ios: of(one.ios, other.ios),
        bytes: of(one.bytes, other.bytes),
        merged: of(one.merged, other.merged),
        errors: of(one.errors, other.errors),
        service_ns: of(one.service_ns, other.service_ns),
        wait_ns: of(one.wait_ns, other.wait_ns),
    }
}

fn parts(group: &GroupStatistics) -> [&Counts; 5] {
    [
        &group.read,
        &group.write,
        &group.discard,
        &group.flush,
        &group.total,
    ]
}

fn parts_mut(group: &mut GroupStatistics) -> [&mut Counts; 5] {
    [
        &mut group.read,
        &mut group.write,
        &mut group.discard,
        &mut group.flush,
        &mut group.total,
    ]
}

/// Never zero, so that it can be a divisor.
fn seconds(ns: u64) -> f64 {
    ns.max(1) as f64 / 1e9
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A group with so many reads of 4 KiB, of which each had to wait `wait_ns`.
    pub(crate) fn reads(path: &str, ios: u64, wait_ns: u64) -> GroupStatistics {
        let counts = Counts {
            ios,
            bytes: ios * 4096,
            wait_ns: ios * wait_ns,
            service_ns: ios * 100_000,
            ..Counts::default()
        };
        let times = |bound| Times::new(if ios == 0 { vec![] } else { vec![(bound, ios)] });
        GroupStatistics {
            path: path.to_owned(),
            read: counts,
            total: counts,
            wait: times(wait_ns),
            device: times(100_000),
            ..GroupStatistics::default()
        }
    }

    pub(crate) fn answer(seconds: u64, groups: Vec<GroupStatistics>) -> Statistics {
        Statistics {
            uptime_ns: seconds * 1_000_000_000,
            queues: vec![Arc::new(QueueStatistics {
                name: "q".to_owned(),
                sched: "bfq".to_owned(),
                depth: 64,
                groups,
                ..QueueStatistics::default()
            })],
            ..Statistics::default()
        }
    }

    /// The activity between two samples.
    pub(crate) fn between(before: Statistics, now: Statistics) -> Option<Interval> {
        let mut samples = Samples::default();
        assert_eq!(samples.take(before), None);
        samples.take(now)
    }

    /// The only queue of an answer.
    fn queue_mut(of: &mut Statistics) -> &mut QueueStatistics {
        Arc::make_mut(&mut of.queues[0])
    }

    #[test]
    fn counts_and_percentiles_are_of_the_time_between() {
        let slow = reads("/a", 1000, 5_000_000);
        let mut now = sum([&slow, &reads("/a", 100, 10_000)]);
        now.path = "/a".to_owned();
        let interval = between(answer(1, vec![slow]), answer(3, vec![now])).unwrap();
        let group = &interval.queues[0].groups[0];
        assert_eq!((group.read.ios, interval.per_second(group.read.ios)), (100, 50.0));
        assert_eq!(group.wait, Times::new(vec![(10_000, 100)]));
        assert_eq!(group.total.wait_ns, 1_000_000);
    }

    #[test]
    fn new_and_remade_counters_count_from_zero() {
        let before = answer(1, vec![reads("/a", 50, 1)]);
        let now = answer(2, vec![reads("/a", 20, 1), reads("/b", 7, 1)]);
        let interval = between(before.clone(), now).unwrap();
        let ios: Vec<u64> = interval.queues[0].groups.iter().map(|g| g.read.ios).collect();
        assert_eq!(ios, [20, 7]);
    }

    #[test]
    fn answers_of_two_daemons_have_no_time_between_them() {
        let (long, short) = (answer(9, vec![]), answer(1, vec![]));
        assert_eq!(between(long.clone(), short), None);
        assert_eq!(between(long.clone(), long), None);
    }

    #[test]
    fn delays_of_the_time_between_are_differences_too() {
        let delay = |ns| Delay {
            group: "/a".to_owned(),
            behind: "/b".to_owned(),
            ns,
        };
        let (mut before, mut now) = (answer(1, vec![]), answer(2, vec![]));
        queue_mut(&mut before).delays = vec![delay(100)];
        queue_mut(&mut now).delays = vec![delay(130)];
        let interval = between(before.clone(), now).unwrap();
        assert_eq!(interval.queues[0].delays, [delay(30)]);
        let interval = between(before, answer(2, vec![])).unwrap();
        assert_eq!(interval.queues[0].delays, []);
    }

    #[test]
    fn queue_that_stays_as_it_is_did_nothing_and_later_what_it_did_since() {
        let mut samples = Samples::default();
        let first = answer(1, vec![reads("/a", 50, 1)]);
        let ios = |interval: Option<Interval>| interval.unwrap().queues[0].groups[0].read.ios;
        let at = |seconds: u64, like: &Statistics| Statistics {
            uptime_ns: seconds * 1_000_000_000,
            ..like.clone()
        };
        assert_eq!(samples.take(first.clone()), None);
        assert_eq!(ios(samples.take(at(2, &first))), 0);
        assert_eq!(ios(samples.take(at(3, &first))), 0);
        let later = answer(4, vec![reads("/a", 57, 1), reads("/b", 2, 1)]);
        assert_eq!(ios(samples.take(later.clone())), 7);
        let idle = samples.take(at(5, &later)).unwrap();
        assert_eq!(idle.queues[0].groups.len(), 2, "not what it was before");
        assert!(idle.queues[0].groups.iter().all(|group| group.read.ios == 0));
    }

    #[test]
    fn queues_are_found_by_their_names_where_others_have_gone() {
        let named = |seconds, names: &[(&str, u64)]| Statistics {
            queues: names
                .iter()
                .map(|(name, ios)| {
                    let mut one = answer(1, vec![reads("/a", *ios, 1)]);
                    queue_mut(&mut one).name = (*name).to_owned();
                    one.queues.remove(0)
                })
                .collect(),
            ..answer(seconds, vec![])
        };
        let interval = between(
            named(1, &[("x", 1), ("y", 10), ("z", 5)]),
            named(2, &[("y", 12), ("new", 3)]),
        );
        let ios = interval
            .unwrap()
            .queues
            .iter()
            .map(|queue| queue.groups[0].read.ios)
            .collect::<Vec<_>>();
        assert_eq!(ios, [2, 3]);
    }
}
