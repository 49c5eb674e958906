//! The tree of `top`: queues, the groups on each, nested by their paths, and the disks of each group; every
//! line with the activity of all below it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use super::lists::{Cap, Disk, Group, Lists};
use super::shares::{Competitor, due};
use crate::control::statistics::{Delay, GroupStatistics, QueueStatistics};
use crate::rates::{Interval, is_active, sum};

/// The identity of a line, from one interval to the next.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Key {
    Queue(String),
    /// The queue's name, the path.
    Group(String, String),
    Disk(String),
}

/// A line with those below it.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Node {
    pub(super) row: Arc<Row>,
    pub(super) children: Vec<Arc<Node>>,
}

/// What is known of a queue, a group or a disk.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    pub(super) key: Key,
    /// The name below its parent.
    pub(super) name: String,
    /// `None` for disks, which have no counts of their own.
    pub(super) numbers: Option<Numbers>,
    /// A remark instead of numbers.
    pub(super) remark: String,
}

/// The activity in an interval, per second.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Numbers {
    pub(super) iops: f64,
    pub(super) bytes: f64,
    pub(super) reads: f64,
    pub(super) writes: f64,
    pub(super) read_bytes: f64,
    pub(super) written_bytes: f64,
    pub(super) errors: f64,
    /// In nanoseconds, as all times here.
    pub(super) wait_p50: Option<u64>,
    pub(super) wait_p99: Option<u64>,
    pub(super) device_p50: Option<u64>,
    pub(super) device_p99: Option<u64>,
    /// In the scheduler; for a queue, under way.
    pub(super) queued: u64,
    /// For a queue: how many requests may be at the drive now.
    pub(super) depth: Option<u32>,
    pub(super) weight: Option<u16>,
    /// Shares are parts of one.
    pub(super) due: Option<f64>,
    pub(super) got: Option<f64>,
    /// The used part of its cap, or of one above it: of the cap with the largest part used.
    pub(super) capped: Option<f64>,
    /// The group behind which it waited most, and the share of its waiting; or a cap, and how much it used.
    pub(super) behind: Option<(String, f64)>,
}

/// The tree of all queues. What was made of a queue is made again only if something differs.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// Of these lists the lines below were made.
    lists: Arc<Lists>,
    of_queues: Vec<(Arc<QueueStatistics>, Arc<Node>)>,
}

impl Tree {
    /// Makes the tree of what queues did.
    pub(super) fn build(&mut self, interval: &Interval, lists: &Arc<Lists>) -> Vec<Arc<Node>> {
        let are_same = Arc::ptr_eq(&self.lists, lists);
        self.lists = Arc::clone(lists);
        let mut before = std::mem::take(&mut self.of_queues).into_iter();
        let mut of_queues: Option<BTreeMap<&str, OfQueue<'_>>> = None;
        for queue in &interval.queues {
            // In the same places, as long as the lists are the same.
            let node = match before.next() {
                Some((did, node)) if are_same && Arc::ptr_eq(&did, queue) => node,
                _ => {
                    let lists = of_queues.get_or_insert_with(|| by_queue(lists));
                    let lists = lists.remove(queue.name.as_str()).unwrap_or_default();
                    Builder::new(interval, queue, &lists).build().into()
                }
            };
            self.of_queues.push((Arc::clone(queue), node));
        }
        let mut all: Vec<Arc<Node>> = self.of_queues.iter().map(|(_, node)| Arc::clone(node)).collect();
        all.extend(mapped(lists));
        all
    }
}

/// The groups and disks of each queue.
fn by_queue(lists: &Lists) -> BTreeMap<&str, OfQueue<'_>> {
    let mut of_queues: BTreeMap<&str, OfQueue<'_>> = BTreeMap::new();
    for group in &lists.groups {
        if let Some(queue) = &group.queue {
            of_queues.entry(queue).or_default().groups.push(group);
        }
    }
    for disk in &lists.disks {
        if let Some(queue) = &disk.queue {
            of_queues.entry(queue).or_default().disks.push(disk);
        }
    }
    of_queues
}

/// The disks that have no queue, if there are some.
fn mapped(lists: &Lists) -> Option<Arc<Node>> {
    let disks = lists.disks.iter().filter(|disk| disk.queue.is_none());
    let children: Vec<Arc<Node>> = disks.map(|disk| disk_node(disk).into()).collect();
    let row = Row {
        key: Key::Queue(String::new()),
        name: "disks on other disks".to_owned(),
        numbers: None,
        remark: String::new(),
    };
    (!children.is_empty()).then(|| {
        Node {
            row: row.into(),
            children,
        }
        .into()
    })
}

/// The groups and disks of one queue.
#[derive(Default)]
struct OfQueue<'a> {
    groups: Vec<&'a Group>,
    disks: Vec<&'a Disk>,
}

/// The data of one queue.
struct Builder<'a> {
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
    fn new(interval: &'a Interval, queue: &'a QueueStatistics, lists: &OfQueue<'a>) -> Self {
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

    fn build(&self) -> Node {
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

fn disk_node(disk: &Disk) -> Node {
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
fn sibling_of<'p>(path: &str, behind: &'p str) -> &'p str {
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
pub(super) const ROOT: &str = "/";

/// The part of its cap from which on a group counts as held back by it, judged from outside.
pub(super) const AT_CAP: f64 = 0.95;

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::rates::tests::{answer, reads};

    fn group(path: &str, weight: u16, caps: &[(&str, u64)]) -> Group {
        let caps = caps
            .iter()
            .map(|(name, rate)| (name.to_string(), Cap { rate: *rate }));
        Group {
            queue: Some("q".to_owned()),
            path: path.to_owned(),
            weight,
            caps: caps.collect(),
        }
    }

    fn disk(name: &str, group: &str) -> Disk {
        Disk {
            name: name.to_owned(),
            queue: Some("q".to_owned()),
            group: Some(group.to_owned()),
            size: 8 << 30,
            clients: 1,
        }
    }

    /// `/c/a` with 300 reads a second and a cap of 400, `/c/b` with 100, `/idle` with none; each with a disk.
    pub(crate) fn example() -> (Interval, Lists) {
        let mut now = answer(1, vec![reads("/c/a", 300, 1000), reads("/c/b", 100, 9000)]);
        let delay = |behind: &str, ns| Delay {
            group: "/c".to_owned(),
            behind: behind.to_owned(),
            ns,
        };
        Arc::make_mut(&mut now.queues[0]).delays = vec![delay("/c", 100), delay("/x", 300)];
        Arc::make_mut(&mut now.queues[0]).in_flight = 7;
        let lists = Lists {
            groups: vec![
                group("/", 100, &[]),
                group("/c", 100, &[]),
                group("/c/a", 300, &[("iops", 400)]),
                group("/c/b", 100, &[]),
                group("/idle", 500, &[]),
            ],
            disks: vec![disk("vm1", "/c/a"), disk("vm2", "/c/b"), disk("vm3", "/idle")],
        };
        (Interval::since_start(now), lists)
    }

    fn build(interval: &Interval, lists: &Lists) -> Vec<Arc<Node>> {
        Tree::default().build(interval, &Arc::new(lists.clone()))
    }

    fn find<'a>(nodes: &'a [Arc<Node>], name: &str) -> &'a Arc<Node> {
        let below = |node: &'a Arc<Node>| node.children.as_slice();
        let here = nodes.iter().find(|node| node.row.name == name);
        here.or_else(|| {
            let mut deeper = nodes.iter().map(below).filter(|below| !below.is_empty());
            deeper.find_map(|below| find_in(below, name))
        })
        .unwrap_or_else(|| panic!("no {name}"))
    }

    fn find_in<'a>(nodes: &'a [Arc<Node>], name: &str) -> Option<&'a Arc<Node>> {
        let mut all = nodes.iter();
        all.find_map(|node| match node.row.name == name {
            true => Some(node),
            false => find_in(&node.children, name),
        })
    }

    #[test]
    fn groups_lie_in_each_other_and_sum_up_what_is_below_them() {
        let (interval, lists) = example();
        let tree = build(&interval, &lists);
        let names: Vec<&str> = tree[0]
            .children
            .iter()
            .map(|node| node.row.name.as_str())
            .collect();
        assert_eq!(names, ["c", "idle"]);
        let numbers = |name| find(&tree, name).row.numbers.clone().unwrap();
        assert_eq!(
            [numbers("q (bfq)").iops, numbers("c").iops, numbers("a").iops],
            [400.0, 400.0, 300.0]
        );
        assert_eq!(
            (numbers("q (bfq)").queued, numbers("q (bfq)").depth),
            (7, Some(64))
        );
        assert_eq!(
            (numbers("c").wait_p50, numbers("c").wait_p99),
            (Some(1000), Some(9000))
        );
        assert_eq!(find(&tree, "a").children[0].row.remark, "disk, 8.0G, 1 client");
    }

    #[test]
    fn shares_caps_and_delays_are_those_of_the_interval() {
        let (interval, lists) = example();
        let tree = build(&interval, &lists);
        let numbers = |name| find(&tree, name).row.numbers.clone().unwrap();
        // The idle group takes nothing, whatever it weighs.
        assert_eq!([numbers("c").due, numbers("idle").due], [Some(1.0), None]);
        assert_eq!((numbers("a").due, numbers("a").got), (Some(0.75), Some(0.75)));
        assert_eq!((numbers("b").due, numbers("b").got), (Some(0.25), Some(0.25)));
        assert_eq!((numbers("a").capped, numbers("b").capped), (Some(0.75), None));
        assert_eq!(numbers("c").behind, Some(("/x".to_owned(), 0.75)));
    }

    #[test]
    fn a_group_that_uses_its_cap_up_waits_for_that_and_behind_nobody() {
        for (cap, wanted) in [(401, ("a cap", 400.0 / 401.0)), (500, ("/x", 0.75))] {
            let (interval, mut lists) = example();
            lists.groups[1] = group("/c", 100, &[("iops", cap)]);
            let tree = build(&interval, &lists);
            let found = find(&tree, "c").row.numbers.clone().unwrap().behind;
            assert_eq!(found, Some((wanted.0.to_owned(), wanted.1)), "{cap}");
        }
    }

    #[test]
    fn a_queue_whose_groups_compete_shows_the_depth_that_was_found() {
        let (mut interval, lists) = example();
        for (limit, shown) in [(12, 12), (0, 64), (500, 64)] {
            Arc::make_mut(&mut interval.queues[0]).depth_limit = limit;
            let tree = build(&interval, &lists);
            let numbers = tree[0].row.numbers.clone().expect("a queue has numbers");
            assert_eq!(numbers.depth, Some(shown), "a limit of {limit}");
        }
    }

    #[test]
    fn nested_groups_are_said_to_wait_behind_their_siblings() {
        let (mut interval, lists) = example();
        let queue = Arc::make_mut(&mut interval.queues[0]);
        let delay = |group: &str, behind: &str, ns| Delay {
            group: group.to_owned(),
            behind: behind.to_owned(),
            ns,
        };
        queue.delays = vec![
            delay("/c/a", "/c/a", 100),
            delay("/c/a", "/c/b", 300),
            delay("/c/b", "/x/y", 600),
            delay("/c/b", "/c", 100),
        ];
        let tree = build(&interval, &lists);
        let behind = |name| find(&tree, name).row.numbers.clone().unwrap().behind.unwrap();
        assert_eq!(behind("a"), ("/c/b".to_owned(), 0.75));
        assert_eq!(behind("b"), ("/x".to_owned(), 6.0 / 7.0));
        assert_eq!(behind("c"), ("/x".to_owned(), 6.0 / 11.0));
        assert_eq!(sibling_of("/c/b", "/c"), "/c");
        assert_eq!(sibling_of("/c/b", "/c/bb/d"), "/c/bb");
        assert_eq!(sibling_of(ROOT, "/c/b"), "/c");
        assert_eq!(sibling_of("/c", "others"), "others");
    }

    #[test]
    fn a_group_with_its_own_work_is_one_of_those_in_it() {
        let mut now = answer(1, vec![reads("/", 10, 0), reads("/a", 10, 0)]);
        Arc::make_mut(&mut now.queues[0]).groups[0].queued = 1;
        let tree = build(&Interval::since_start(now), &Lists::default());
        let names: Vec<&str> = tree[0]
            .children
            .iter()
            .map(|node| node.row.name.as_str())
            .collect();
        assert_eq!(names, ["/", "a"]);
        assert_eq!(find(&tree, "a").row.numbers.as_ref().unwrap().due, Some(0.5));
    }

    #[test]
    fn a_group_is_on_the_queues_where_it_has_disks_or_did_something() {
        let (mut interval, mut lists) = example();
        lists.disks.remove(2);
        let names = |tree: &[Arc<Node>]| -> Vec<String> {
            tree[0]
                .children
                .iter()
                .map(|node| node.row.name.clone())
                .collect()
        };
        assert_eq!(names(&build(&interval, &lists)), ["c"]);
        Arc::make_mut(&mut interval.queues[0])
            .groups
            .push(reads("/idle", 0, 0));
        assert_eq!(names(&build(&interval, &lists)), ["c", "idle"]);
    }

    #[test]
    fn a_disk_without_a_queue_is_listed_behind_all_queues() {
        let (interval, mut lists) = example();
        lists.disks[0].queue = None;
        let tree = build(&interval, &lists);
        assert_eq!((tree.len(), tree[1].children[0].row.name.as_str()), (2, "vm1"));
    }

    #[test]
    fn what_is_the_same_is_not_made_again() {
        let (interval, lists) = example();
        let (lists, others) = (Arc::new(lists.clone()), Arc::new(lists));
        let mut tree = Tree::default();
        let first = tree.build(&interval, &lists);
        assert!(Arc::ptr_eq(&first[0], &tree.build(&interval, &lists)[0]));
        assert!(!Arc::ptr_eq(&first[0], &tree.build(&interval, &others)[0]));
        let mut later = interval.clone();
        Arc::make_mut(&mut later.queues[0]).in_flight = 8;
        let numbers = tree.build(&later, &others)[0].row.numbers.clone();
        assert_eq!(numbers.unwrap().queued, 8);
    }
}
