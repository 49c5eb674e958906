//! A daemon's counts as JSON: times in nanoseconds, sizes in bytes, counts since the start (of the first
//! daemon, if others have taken over since).

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use anyhow::Result;
use blkmq_config::GroupSpec;
use blkmq_core::bio::Direction;
use blkmq_core::group::Caps;
use blkmq_core::local::InFlight;
use blkmq_core::stat::{DirectionStats, Histogram};
use blkmq_core::time::Nanos;
use blkmq_export::client_settings::Client;
use blkmq_host::Error;
use blkmq_host::control::Control;
use blkmq_host::disk::{Disk, MAPPED, QueueId};
use serde_json::{Map, Value, json};

use super::readings::{ANSWER_MAX, GroupReading, Reading};
use super::roles::Role;
use super::server::Daemon;
use super::statistics::{
    Counts, Delay, ExportStatistics, GroupStatistics, Memory, QueueStatistics, Statistics, Times,
};

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
    // All of them first: a disk on others has their state.
    disks.iter().for_each(Disk::look);
    let disk = |disk: &Disk| {
        json!({
            "name": disk.name,
            "description": disk.description,
            "serial": disk.serial,
            "export": disk.export,
            "queue": queues.get(&disk.queue),
            "is_mapped": disk.queue == MAPPED,
            "size": disk.size,
            "block_size": disk.block_size,
            "read_only": disk.read_only,
            "group": control.group_path(disk.queue, disk.group),
            "used_by": disk.used_by,
            "clients": disk.users.count(),
            "state": disk.state().name(),
        })
    };
    disks.iter().map(disk).collect()
}

/// What clients of these kinds are told to reach a disk; none if there is no such disk for who asks.
pub(super) fn clients(daemon: &Daemon, name: &str, kinds: &[Client], role: &Role) -> Option<Value> {
    let control = daemon.running.control();
    let disks = control.disks();
    let disk = disks.iter().find(|disk| disk.name == name)?;
    let group = control.group_path(disk.queue, disk.group);
    if !role.sees(group.as_deref().unwrap_or_default()) {
        return None;
    }
    let config = daemon.running.config();
    let mut all = Vec::new();
    for export in config
        .exports
        .iter()
        .filter(|export| config.disks_of(export).contains(&name))
    {
        for kind in kinds {
            if let Some(settings) =
                export
                    .at
                    .client_settings(*kind, disk, group.as_deref().unwrap_or_default())
            {
                all.push(json!({"address": export.address, "client": kind.name(), "settings": settings}));
            }
        }
    }
    Some(all.into())
}

pub(super) fn queues(control: &Control) -> Result<Value> {
    let queue = |(id, queue): (QueueId, Arc<blkmq_core::queue::Queue>)| {
        let tunables = match control.tunables(id) {
            // It has gone meanwhile.
            Err(Error::NoQueueNumber { .. }) => return None,
            Err(error) => return Some(Err(error.into())),
            Ok(tunables) => tunables,
        };
        let tunables = tunables.into_iter();
        let tunables: Map<String, Value> = tunables
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        Some(Ok(json!({
            "name": queue.name(),
            "sched": queue.elevator().name,
            "tunables": tunables,
            "depth": queue.depth(),
            "depth_max": queue.depth_max(),
            "depth_limit": queue.depth_limit(),
            "in_flight": queue.outstanding(),
            "io_poll": queue.is_polled(),
            "polling": control.describe_polling(id),
        })))
    };
    control.queues().into_iter().filter_map(queue).collect()
}

/// The groups of each queue, and behind them those that are configured and have no disk.
pub(super) fn groups(control: &Control, configured: &[GroupSpec]) -> Value {
    let mut all = Vec::new();
    let mut known = BTreeSet::new();
    let in_flight = control.in_flight(ANSWER_MAX);
    for (id, queue) in control.queues() {
        for (path, number) in control.groups(id) {
            // It may be gone by now.
            let Ok(node) = control.group(id, &path) else {
                continue;
            };
            let settings = (node.weight, &node.caps, node.latency_target);
            let has = in_flight.as_ref();
            let has = has.map(|all| all.get(&(id, number)).copied().unwrap_or_default());
            all.push(group(Some(queue.name()), &path, settings, has));
            known.insert(path);
        }
    }
    let unused = configured.iter().filter(|spec| !known.contains(&spec.path));
    let settings = |spec: &'_ GroupSpec| {
        group(
            None,
            &spec.path,
            (spec.weight(), &spec.caps, spec.latency_target),
            None,
        )
    };
    all.extend(unused.map(settings));
    all.into()
}

fn group(
    queue: Option<&str>,
    path: &str,
    (weight, caps, latency_target): (u16, &Caps, Option<Nanos>),
    in_flight: Option<InFlight>,
) -> Value {
    let caps = caps.iter().map(|(kind, cap)| {
        (
            kind.name().to_owned(),
            json!({"rate": cap.rate, "burst": cap.burst}),
        )
    });
    json!({
        "queue": queue,
        "path": path,
        "weight": weight,
        "caps": caps.collect::<Map<_, _>>(),
        "latency_target_ns": latency_target.map(|target| target.0),
        "in_flight": in_flight.map(|has| has.requests),
        "oldest_ns": oldest_ns(in_flight),
    })
}

pub(super) fn exports(daemon: &Daemon) -> Vec<ExportStatistics> {
    let stats = daemon.running.common().connections.stats();
    let address = |address: blkmq_export::common::AddressStats| ExportStatistics {
        address: address.name,
        open: address.open,
        max: address.max,
        negotiating: address.negotiating,
        refused: address.refused,
        displaced: address.displaced,
        state: address.state.name().to_owned(),
        problem: None,
    };
    let refused = daemon.running.refused().into_iter();
    let refused = refused.map(|refused| ExportStatistics {
        address: refused.spec.address,
        state: "refused".to_owned(),
        problem: Some(refused.reason),
        ..ExportStatistics::default()
    });
    stats.into_iter().map(address).chain(refused).collect()
}

/// All statistics, with those of the given queues.
pub(super) fn statistics(daemon: &Daemon, readings: &[Arc<Reading>]) -> Statistics {
    let memory = &daemon.running.common().memory;
    Statistics {
        uptime_ns: daemon.started.elapsed().as_nanos() as u64,
        changes: daemon.running.changes(),
        is_partial: false,
        queues: readings.iter().map(|reading| of_queue(reading).into()).collect(),
        exports: exports(daemon),
        nbd_memory: Memory {
            used: memory.used(),
            max: memory.bytes_max(),
        },
    }
}

fn of_queue(reading: &Reading) -> QueueStatistics {
    let groups = reading.groups.iter();
    let delay = |(group, behind, ns): &(String, String, u64)| Delay {
        group: group.clone(),
        behind: behind.clone(),
        ns: *ns,
    };
    let state = &reading.state;
    let events = state.events.fields().into_iter();
    QueueStatistics {
        name: reading.name.clone(),
        sched: state.sched.to_owned(),
        in_flight: state.in_flight,
        depth: state.depth,
        depth_limit: state.depth_limit,
        groups: groups
            .map(|group| of_group(group, reading.knows_in_flight))
            .collect(),
        delays: reading.delays.iter().map(delay).collect(),
        events: events.map(|(name, count)| (name.to_owned(), count)).collect(),
    }
}

fn of_group(group: &GroupReading, knows_in_flight: bool) -> GroupStatistics {
    let stats = &group.stats;
    let in_flight = knows_in_flight.then_some(group.in_flight);
    let mut all = GroupStatistics {
        path: group.path.clone(),
        in_flight: in_flight.map(|has| has.requests),
        oldest_ns: oldest_ns(in_flight),
        queued: stats.queued,
        idle_ns: stats.idle_ns,
        group_wait_ns: stats.group_wait_ns,
        wait: times(&stats.wait),
        device: times(&stats.device),
        total: counts(&stats.total()),
        ..GroupStatistics::default()
    };
    for direction in Direction::ALL {
        *all.of(direction) = counts(&stats.of(direction));
    }
    all
}

/// The age of the oldest request, if there is one.
fn oldest_ns(in_flight: Option<InFlight>) -> Option<u64> {
    let has = in_flight.filter(|has| has.requests > 0);
    has.map(|has| has.oldest.0)
}

fn counts(stats: &DirectionStats) -> Counts {
    Counts {
        ios: stats.ios,
        bytes: stats.bytes,
        merged: stats.merged,
        errors: stats.errors,
        service_ns: stats.service_ns,
        wait_ns: stats.wait_ns,
    }
}

fn times(histogram: &Histogram) -> Times {
    Times::new(
        histogram
            .buckets()
            .map(|(bound, count)| (bound.0, count))
            .collect(),
    )
}

fn names(control: &Control) -> BTreeMap<QueueId, String> {
    let queues = control.queues().into_iter();
    queues.map(|(id, queue)| (id, queue.name().to_owned())).collect()
}
