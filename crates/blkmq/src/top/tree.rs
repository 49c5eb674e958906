//! The tree of `top`: queues, the groups on each, nested by their paths, and the disks of each group; every
//! line with the activity of all below it.

mod builder;

use std::collections::BTreeMap;
use std::sync::Arc;

pub(super) use self::builder::{AT_CAP, ROOT};
use self::builder::{Builder, disk_node};
use super::lists::{Disk, Group, Lists};
use crate::control::statistics::QueueStatistics;
use crate::rates::Interval;

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

#[cfg(test)]
pub(super) mod tests;
