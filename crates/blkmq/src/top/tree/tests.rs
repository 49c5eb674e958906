//! Tests of the tree.

use super::builder::sibling_of;
use super::*;
use crate::control::statistics::Delay;
use crate::rates::tests::{answer, reads};
use crate::top::lists::Cap;

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
fn group_that_uses_its_cap_up_waits_for_that_and_behind_nobody() {
    for (cap, wanted) in [(401, ("a cap", 400.0 / 401.0)), (500, ("/x", 0.75))] {
        let (interval, mut lists) = example();
        lists.groups[1] = group("/c", 100, &[("iops", cap)]);
        let tree = build(&interval, &lists);
        let found = find(&tree, "c").row.numbers.clone().unwrap().behind;
        assert_eq!(found, Some((wanted.0.to_owned(), wanted.1)), "{cap}");
    }
}

#[test]
fn queue_whose_groups_compete_shows_the_depth_that_was_found() {
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
fn group_with_its_own_work_is_one_of_those_in_it() {
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
fn group_is_on_the_queues_where_it_has_disks_or_did_something() {
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
fn disk_without_a_queue_is_listed_behind_all_queues() {
    let (interval, mut lists) = example();
    lists.disks[0].queue = None;
    let tree = build(&interval, &lists);
    assert_eq!((tree.len(), tree[1].children[0].row.name.as_str()), (2, "vm1"));
}

#[test]
fn unchanged_rows_are_not_made_again() {
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
