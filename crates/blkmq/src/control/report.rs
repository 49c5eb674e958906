//! Decides what a daemon counts looks like as JSON: times in nanoseconds, sizes in bytes, counts since the start (of the first
//! daemon, if others have taken over since).

use std::collections::BTreeMap;

use anyhow::Result;
use blkmq_core::bio::Direction;
use blkmq_core::group::Node;
use blkmq_core::ids::GroupId;
use blkmq_core::stat::{DirectionStats, GroupStats, Histogram};
use blkmq_host::control::Control;
use blkmq_host::disk::{MAPPED, QueueId};
use serde_json::{Map, Value, json};

use super::server::Daemon;

pub(super) fn status(daemon: &Daemon) -> Value {
    let (control, common) = (daemon.running.control(), daemon.running.common());
    let open: u32 = common
        .connections
        .stats()
        .iter()
        .map(|address| address.open)
        .sum();
    json!({
        "uptime_s": daemon.started.elapsed().as_secs(),
        "disks": control.disks().len(),
        "queues": control.queues().len(),
        "connections": open,
        "nbd_memory": {"used": common.memory.used(), "max": common.memory.bytes_max()},
    })
}

pub(super) fn disks(control: &Control) -> Value {
    let queues: BTreeMap<QueueId, String> = names(control);
    let disks = control.disks();
    let disk = |disk: &blkmq_host::disk::Disk| {
        json!({
            "name": disk.name,
            "description": disk.description,
            "queue": queues.get(&disk.queue),
            "is_mapped": disk.queue == MAPPED,
            "size": disk.size,
            "block_size": disk.block_size,
            "read_only": disk.read_only,
            "group": control.group_path(disk.queue, disk.group),
            "used_by": disk.used_by,
            "clients": disk.users.count(),
        })
    };
    disks.iter().map(disk).collect()
}

pub(super) fn queues(control: &Control) -> Result<Value> {
    let queue = |(id, queue): (QueueId, std::sync::Arc<blkmq_core::queue::Queue>)| {
        let tunables: Map<String, Value> = control
            .tunables(id)?
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        Ok(json!({
            "name": queue.name(),
            "sched": queue.elevator().name(),
            "tunables": tunables,
            "depth": queue.depth(),
            "depth_max": queue.depth_max(),
            "in_flight": queue.outstanding(),
            "io_poll": queue.is_polled(),
            "polling": control.describe_polling(id),
        }))
    };
    control.queues().into_iter().map(queue).collect()
}

pub(super) fn groups(control: &Control) -> Result<Value> {
    let mut all = Vec::new();
    for (id, queue) in control.queues() {
        for (path, _) in control.groups(id) {
            // It may be gone by now.
            let Ok(Node {
                weight,
                caps,
                latency_target,
                ..
            }) = control.group(id, &path)
            else {
                continue;
            };
            let caps = caps.iter().map(|(kind, cap)| {
                (
                    kind.name().to_owned(),
                    json!({"rate": cap.rate, "burst": cap.burst}),
                )
            });
            all.push(json!({
                "queue": queue.name(),
                "path": path,
                "weight": weight,
                "caps": caps.collect::<Map<_, _>>(),
                "latency_target_ns": latency_target.map(|target| target.0),
            }));
        }
    }
    Ok(all.into())
}

pub(super) fn exports(daemon: &Daemon) -> Value {
    let stats = daemon.running.common().connections.stats();
    let address = |address: &blkmq_export::common::AddressStats| {
        json!({
            "address": address.name,
            "open": address.open,
            "max": address.max,
            "negotiating": address.negotiating,
            "refused": address.refused,
            "displaced": address.displaced,
        })
    };
    stats.iter().map(address).collect()
}

pub(super) fn statistics(daemon: &Daemon) -> Value {
    let control = daemon.running.control();
    let queues = control.queues().into_iter().map(|(id, queue)| {
        let paths = control.groups(id);
        let path_of = |group: Option<GroupId>| {
            let found = paths.iter().find(|(_, id)| Some(*id) == group);
            found.map_or_else(|| "others".to_owned(), |(path, _)| path.clone())
        };
        let groups = paths.iter().filter_map(|(path, group)| {
            let mut stats = queue.group_stats(*group);
            if let Some(before) = daemon.earlier.get(&(queue.name().to_owned(), path.clone())) {
                stats.add(before);
            }
            (stats.total().ios > 0 || stats.queued > 0).then(|| group_stats(path, &stats))
        });
        let delays = queue.delays().pairs.into_iter().map(
            |(who, behind, waited)| json!({"group": path_of(who), "behind": path_of(behind), "ns": waited.0}),
        );
        let events = queue.event_stats().fields().into_iter();
        json!({
            "name": queue.name(),
            "sched": queue.elevator().name(),
            "in_flight": queue.outstanding(),
            "depth": queue.depth(),
            "groups": groups.collect::<Vec<_>>(),
            "delays": delays.collect::<Vec<_>>(),
            "events": events.map(|(name, count)| (name.to_owned(), count.into())).collect::<Map<_, _>>(),
        })
    });
    let queues: Vec<Value> = queues.collect();
    json!({
        "uptime_ns": daemon.started.elapsed().as_nanos() as u64,
        "queues": queues,
        "exports": exports(daemon),
        "nbd_memory": {
            "used": daemon.running.common().memory.used(),
            "max": daemon.running.common().memory.bytes_max(),
        },
    })
}

fn group_stats(path: &str, stats: &GroupStats) -> Value {
    let mut all = json!({
        "path": path,
        "queued": stats.queued,
        "idle_ns": stats.idle_ns,
        "group_wait_ns": stats.group_wait_ns,
        "wait": histogram(&stats.wait),
        "device": histogram(&stats.device),
    });
    for direction in Direction::ALL {
        all[format!("{direction:?}").to_lowercase()] = counts(&stats.of(direction));
    }
    all["total"] = counts(&stats.total());
    all
}

fn counts(stats: &DirectionStats) -> Value {
    json!({
        "ios": stats.ios,
        "bytes": stats.bytes,
        "merged": stats.merged,
        "errors": stats.errors,
        "service_ns": stats.service_ns,
        "wait_ns": stats.wait_ns,
    })
}

/// Bounds below which so many lie, in nanoseconds; and the counts themselves, below each bound, where there are some.
fn histogram(histogram: &Histogram) -> Value {
    let below = |permille| histogram.permille(permille).map(|bound| bound.0);
    let buckets = histogram.buckets().filter(|(_, count)| *count > 0);
    json!({
        "count": histogram.count(),
        "p50_ns": below(500),
        "p99_ns": below(990),
        "p999_ns": below(999),
        "buckets": buckets.map(|(bound, count)| json!([bound.0, count])).collect::<Vec<_>>(),
    })
}

fn names(control: &Control) -> BTreeMap<QueueId, String> {
    let queues = control.queues().into_iter();
    queues.map(|(id, queue)| (id, queue.name().to_owned())).collect()
}
