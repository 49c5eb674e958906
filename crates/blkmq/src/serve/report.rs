//! A running daemon's statistics on a terminal: one line for each active group, and the events of each queue.

use std::fmt::Write;

use blkmq_core::bio::Direction;
use blkmq_core::ids::GroupId;
use blkmq_core::mapper::multipath::NoPath;
use blkmq_core::stat::{DirectionStats, GroupStats};
use blkmq_drivers::multipath::MultipathDevice;
use blkmq_export::common::Common;
use blkmq_host::control::Control;

use super::upgrade::Earlier;
use crate::control::ANSWER_MAX;

/// Writes the statistics of all groups of all queues since the start; of the first daemon, if
/// others have taken over since.
pub(super) fn statistics(control: &Control, earlier: &Earlier) -> String {
    let mut out = String::new();
    let in_flight = control.in_flight(ANSWER_MAX);
    for (number, queue) in control.queues() {
        let _ = writeln!(out, "queue {} ({})", queue.name(), queue.elevator());
        for (group, id) in control.groups(number) {
            let mut stats = queue.group_stats(id);
            if let Some(before) = earlier.get(&(queue.name().to_owned(), group.to_string())) {
                stats.add(before);
            }
            let has = in_flight.as_ref();
            let has = has.map(|all| all.get(&(number, id)).copied().unwrap_or_default());
            if stats.total().ios > 0 || has.is_some_and(|has| has.requests > 0) {
                out += &group_lines(&group, &stats);
                let _ = match has {
                    Some(has) => writeln!(
                        out,
                        "  {group} in_flight {}, oldest_time {}",
                        has.requests, has.oldest.0
                    ),
                    None => writeln!(out, "  {group} in_flight unknown: a reactor does not answer"),
                };
            }
        }
        for (who, behind, waited) in queue.delays().pairs {
            let name = |id: Option<GroupId>| {
                let found = control.groups(number).into_iter().find(|(_, at)| Some(*at) == id);
                found.map_or_else(|| "others".to_owned(), |(group, _)| group.to_string())
            };
            let _ = writeln!(
                out,
                "  delayed: {} behind {}: {} µs",
                name(who),
                name(behind),
                waited.0 / 1000
            );
        }
        if let Some(how) = control.describe_polling(number) {
            let _ = writeln!(out, "  polled: {how}");
        }
        if let Ok(drive) = MultipathDevice::of_queue(control, number) {
            out += &path_lines(&drive);
        }
        for (bucket, seen) in control.poll_stats(number) {
            let _ = writeln!(
                out,
                "  poll {bucket}: samples {}, mean {}, min {}, max {}, low {}, slept {}, overslept {}",
                seen.samples, seen.mean.0, seen.min.0, seen.max.0, seen.low.0, seen.slept, seen.overslept
            );
        }
        let events = queue.event_stats().fields();
        let events: Vec<String> = events
            .iter()
            .map(|(name, count)| format!("{name}={count}"))
            .collect();
        let _ = writeln!(out, "  events: {}", events.join(" "));
    }
    out
}

/// The number of connections of each address, and the memory that all of them hold.
pub(super) fn connections(common: &Common) -> String {
    let memory = &common.memory;
    let mut out = format!("nbd_memory: used {} of {}\n", memory.used(), memory.bytes_max());
    for address in common.connections.stats() {
        let _ = writeln!(
            out,
            "export {}: connections open {} of {}, negotiating {}, refused {}, displaced {}",
            address.name, address.open, address.max, address.negotiating, address.refused, address.displaced
        );
    }
    out
}

/// The paths of a multipath disk, and the setting for no usable path.
fn path_lines(drive: &MultipathDevice) -> String {
    let all = drive.groups();
    let mut out = format!(
        "  paths: group {} is used, {} switches, selector {}{}\n",
        all.current,
        all.switches,
        all.selector,
        match (all.has_no_path, all.gave_up, all.no_path) {
            (false, ..) => "",
            (true, false, NoPath::Queue | NoPath::QueueFor(_)) => "; no path is left, requests are held",
            (true, ..) => "; no path is left, requests fail",
        }
    );
    for path in drive.paths() {
        let state = format!("{:?}", path.state).to_lowercase();
        let last = match path.fails {
            0 => String::new(),
            _ => format!(" ({:?})", path.last_error),
        };
        let _ = writeln!(
            out,
            "  path {}: {state}, group {}, in flight {}, requests {}, bytes {}, errors {}, failures {}{last}, service time {} µs",
            path.name,
            path.group,
            path.in_flight,
            path.ios,
            path.bytes,
            path.errors,
            path.fails,
            path.service.0 / 1000
        );
    }
    out
}

/// The group itself, under Linux' names (`blkio.bfq.*`); times in nanoseconds.
fn group_lines(group: &str, stats: &GroupStats) -> String {
    let mut out = String::new();
    let mut line = |name: &str, of: &dyn Fn(&DirectionStats) -> u64| {
        let directions = Direction::ALL.map(|direction| {
            let name = format!("{direction:?}").to_lowercase();
            format!("{name} {}", of(&stats.of(direction)))
        });
        let _ = writeln!(
            out,
            "  {group} {name}: {}, sync {}, async {}, total {}",
            directions.join(", "),
            of(&stats.synchronous()),
            of(&stats.asynchronous()),
            of(&stats.total()),
        );
    };
    line("io_serviced", &|one| one.inserted);
    line("io_service_bytes", &|one| one.bytes);
    line("io_service_time", &|one| one.service_ns);
    line("io_wait_time", &|one| one.wait_ns);
    line("io_merged", &|one| one.merged);
    line("errors", &|one| one.errors);
    let tenths = stats.queue.queued_sum * 10 / stats.queue.samples.max(1);
    let _ = writeln!(
        out,
        "  {group} io_queued {}, sectors {}, avg_queue_size {}.{}, time {}, group_wait_time {}, idle_time {}, empty_time {}, dequeue {}",
        stats.queued,
        stats.total().bytes / 512,
        tenths / 10,
        tenths % 10,
        stats.turn_ns,
        stats.group_wait_ns,
        stats.idle_ns,
        stats.empty_ns,
        stats.dequeues,
    );
    for (name, histogram) in [("queue wait", &stats.wait), ("device time", &stats.device)] {
        let below = |permille| histogram.permille(permille).map_or(0, |bound| bound.0 / 1000);
        let _ = writeln!(
            out,
            "  {group} {name} below: p50 {} µs, p99 {} µs, p99.9 {} µs",
            below(500),
            below(990),
            below(999)
        );
    }
    out
}
