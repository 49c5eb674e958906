//! The lines of one queue, made of what its groups did in an interval: sums of what is below, shares, caps, and behind
//! whom a group waited.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::{Key, Node, Numbers, OfQueue, Row};
use crate::control::statistics::{Delay, GroupStatistics, QueueStatistics};
use crate::rates::{Interval, is_active, sum};
use crate::top::lists::{Cap, Disk, Group};
use crate::top::shares::{Competitor, due};

/// The data of one queue.
pub(super) struct Builder<'a> {
    interval: &'a Interval,
    queue: &'a QueueStatistics,
    did: BTreeMap<&'a str, &'a GroupStatistics>,
    groups: BTreeMap<&'a str, &'a Group>,
    disks: BTreeMap<&'a str, Vec<&'a Disk>>,
    /// The direct children of each group.
    parts: BTreeMap<&'a str, BTreeSet<&'a str>>,
}

/// A group with the sum of all below it.
struct Branch<'a> {
    path: &'a str,
    did: GroupStatistics,
    /// Whether it had work of its own.
    has_own: bool,
    parts: Vec<Branch<'a>>,
}

/// What is passed down the tree.
#[derive(Clone, Copy)]
struct Above {
    due: Option<f64>,
    capped: Option<f64>,
}

impl<'a> Builder<'a> {
    pub(super) fn new(interval: &'a Interval, queue: &'a QueueStatistics, lists: &OfQueue<'a>) -> Self {
        let groups = lists.groups.iter().map(|group| (group.path.as_str(), *group));
        let did: BTreeMap<_, _> = queue
            .groups
            .iter()
            .map(|group| (group.path.as_str(), group))
            .collect();
        let mut disks: BTreeMap<&str, Vec<&Disk>> = BTreeMap::new();
        for disk in &lists.disks {
            disks
                .entry(disk.group.as_deref().unwrap_or(ROOT))
                .or_default()
                .push(disk);
        }
        let mut parts: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
        // A configured group exists on every queue; it is shown where it has a disk, or was active.
        for path in did.keys().chain(disks.keys()) {
            let mut path = *path;
            while path != ROOT && parts.entry(parent_of(path)).or_default().insert(path) {
                path = parent_of(path);
            }
        }
        Self {
            interval,
            queue,
            did,
            groups: groups.collect(),
            disks,
            parts,
        }
    }

    pub(super) fn build(&self) -> Node {
        let root = self.branch(ROOT);
        let numbers = Numbers {
            queued: self.queue.in_flight,
            depth: Some(match self.queue.depth_limit {
                0 => self.queue.depth,
                limit => limit.min(self.queue.depth),
            }),
            ..self.numbers(&root.did)
        };
        let above = Above {
            due: Some(1.0),
            capped: self.cap_used(ROOT, &root.did),
        };
        let mut children = self.children(&root, above, root.did.total.bytes);
        if root.has_own || self.disks.contains_key(ROOT) {
            children.insert(0, self.own_node(&root, above).into());
        }
        let row = Row {
            key: Key::Queue(self.queue.name.clone()),
            name: format!("{} ({})", self.queue.name, self.queue.sched),
            numbers: Some(numbers),
            remark: String::new(),
        };
        Node {
            row: row.into(),
            children,
        }
    }

    fn branch(&self, path: &'a str) -> Branch<'a> {
        let below = self.parts.get(path).into_iter().flatten();
        let parts: Vec<Branch<'a>> = below.map(|part| self.branch(part)).collect();
        let own = self.did.get(path).copied();
        let all = own.into_iter().chain(parts.iter().map(|part| &part.did));
        let did = match (own, parts.is_empty()) {
            (Some(own), true) => own.clone(),
            _ => sum(all),
        };
        Branch {
            path,
            did,
            has_own: own.is_some_and(is_active),
            parts,
        }
    }

    /// The children of a group, with their own children.
    fn children(&self, of: &Branch<'a>, above: Above, queue_bytes: u64) -> Vec<Arc<Node>> {
        let competitor = |part: &Branch<'a>| Competitor {
            weight: self.weight(part.path),
            is_active: is_active(&part.did),
        };
        let competitors: Vec<Competitor> = of.parts.iter().map(competitor).collect();
        let shares = due(above.due, of.has_own, &competitors);
        let pairs = of.parts.iter().zip(shares);
        pairs
            .map(|(part, due)| self.node(part, due, above, queue_bytes).into())
            .collect()
    }

    /// A group with all below it; `due` is its share.
    fn node(&self, of: &Branch<'a>, due: Option<f64>, above: Above, queue_bytes: u64) -> Node {
        let capped = self.cap_used(of.path, &of.did);
        let capped = [capped, above.capped].into_iter().flatten().reduce(f64::max);
        let numbers = Numbers {
            due,
            got: due.and_then(|_| share(of.did.total.bytes, queue_bytes)),
            capped,
            weight: Some(self.weight(of.path)),
            behind: self.behind(of.path, capped),
            ..self.numbers(&of.did)
        };
        let mut children = self.children(of, Above { due, capped }, queue_bytes);
        children.extend(self.disk_nodes(of.path));
        let row = self.group_row(of.path, numbers);
        Node {
            row: row.into(),
            children,
        }
    }

    fn weight(&self, path: &str) -> u16 {
        let group = self.groups.get(path);
        group.map_or(blkmq_core::group::WEIGHT_DEFAULT, |group| group.weight)
    }

    /// The activity of the root itself, which is a group like others.
    fn own_node(&self, root: &Branch<'a>, above: Above) -> Node {
        let nothing = GroupStatistics::default();
        let own = self.did.get(ROOT).copied().unwrap_or(&nothing);
        let numbers = Numbers {
            got: share(own.total.bytes, root.did.total.bytes),
            capped: above.capped,
            behind: self.behind(ROOT, above.capped),
            ..self.numbers(own)
        };
        Node {
            row: self.group_row(ROOT, numbers).into(),
            children: self.disk_nodes(ROOT).collect(),
        }
    }

    fn group_row(&self, path: &str, numbers: Numbers) -> Row {
        let name = path.rsplit('/').next().filter(|name| !name.is_empty());
        Row {
            key: Key::Group(self.queue.name.clone(), path.to_owned()),
            name: name.unwrap_or(ROOT).to_owned(),
            numbers: Some(numbers),
            remark: String::new(),
        }
    }

    fn disk_nodes(&self, path: &str) -> impl Iterator<Item = Arc<Node>> {
        let disks = self.disks.get(path).into_iter().flatten();
        disks.map(|disk| disk_node(disk).into())
    }

    fn numbers(&self, did: &GroupStatistics) -> Numbers {
        let per_second = |count| self.interval.per_second(count);
        Numbers {
            iops: per_second(did.total.ios),
            bytes: per_second(did.total.bytes),
            reads: per_second(did.read.ios),
            writes: per_second(did.write.ios),
            read_bytes: per_second(did.read.bytes),
            written_bytes: per_second(did.write.bytes),
            errors: per_second(did.total.errors),
            wait_p50: did.wait.p50_ns,
            wait_p99: did.wait.p99_ns,
            device_p50: did.device.p50_ns,
            device_p99: did.device.p99_ns,
            queued: did.queued,
            ..Numbers::default()
        }
    }

    /// The used part of a group's caps: of the cap with the largest part used.
    fn cap_used(&self, path: &str, did: &GroupStatistics) -> Option<f64> {
        let used = |(name, cap): (&String, &Cap)| {
            let (all, read) = (&did.total, &did.read);
            let count = match name.as_str() {
                "bps" => all.bytes,
                "read_bps" => read.bytes,
                "write_bps" => all.bytes - read.bytes,
                "iops" => all.ios,
                "read_iops" => read.ios,
                "write_iops" => all.ios - read.ios,
                _ => return None,
            };
            Some(self.interval.per_second(count) / cap.rate.max(1) as f64)
        };
        let caps = &self.groups.get(path)?.caps;
        caps.iter().filter_map(used).reduce(f64::max)
    }

    /// The sibling behind which a group, with all below it, waited most, or the sibling of a group above it; or a cap
    /// of which it used that part, if it was at one: without the others it would not have got more.
    fn behind(&self, path: &str, capped: Option<f64>) -> Option<(String, f64)> {
        if let Some(used) = capped.filter(|used| *used >= AT_CAP) {
            return Some(("a cap".to_owned(), used));
        }
        let mut waits: BTreeMap<&str, u64> = BTreeMap::new();
        let own = |delay: &&Delay| is_part(&delay.group, path);
        for delay in self.queue.delays.iter().filter(own) {
            *waits.entry(sibling_of(path, &delay.behind)).or_default() += delay.ns;
        }
        let (whom, most) = waits.iter().max_by_key(|(_, ns)| **ns)?;
        Some(((*whom).to_owned(), share(*most, waits.values().sum())?))
    }
}

pub(super) fn disk_node(disk: &Disk) -> Node {
    let clients = match disk.clients {
        1 => "1 client".to_owned(),
        clients => format!("{clients} clients"),
    };
    let row = Row {
        key: Key::Disk(disk.name.clone()),
        name: disk.name.clone(),
        numbers: None,
        remark: format!("disk, {}, {clients}", crate::units::size(disk.size as f64)),
    };
    Node {
        row: row.into(),
        children: Vec::new(),
    }
}

fn share(part: u64, all: u64) -> Option<f64> {
    (all > 0).then(|| part as f64 / all as f64)
}

/// Says whether a group is the other one, or below it. The root stands for its own activity.
fn is_part(path: &str, of: &str) -> bool {
    path == of || of != ROOT && path.strip_prefix(of).is_some_and(|rest| rest.starts_with('/'))
}

/// The group that `behind` is, or is part of, below the last group that has it and `path` in common: a sibling of
/// `path`, or of a group above it.
pub(super) fn sibling_of<'p>(path: &str, behind: &'p str) -> &'p str {
    if is_part(behind, path) {
        return "itself";
    }
    let ends = behind.match_indices('/').map(|(at, _)| at).skip(1);
    let mut from_top = ends.chain([behind.len()]).map(|end| &behind[..end]);
    // None if `behind` is above `path`.
    from_top.find(|above| !is_part(path, above)).unwrap_or(behind)
}

/// The parent of a path.
fn parent_of(path: &str) -> &str {
    match path.rsplit_once('/') {
        Some((parent, _)) if !parent.is_empty() => parent,
        _ => ROOT,
    }
}

/// The root group.
pub(in crate::top) const ROOT: &str = "/";

/// The part of its cap from which on a group counts as held back by it, judged from outside.
pub(in crate::top) const AT_CAP: f64 = 0.95;
