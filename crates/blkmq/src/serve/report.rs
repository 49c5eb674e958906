//! Decides how the statistics of a running daemon look on a terminal: one line for each group that did something, and the
//! events of each queue.

use std::fmt::Write;

use blkmq_core::bio::Direction;
use blkmq_host::QueueId;
use blkmq_host::control::Control;

/// Writes what all groups of all queues did since the start.
pub(super) fn statistics(control: &Control) -> String {
    let mut out = String::new();
    for (number, queue) in (0..).zip(control.queues()) {
        let _ = writeln!(out, "queue {} ({})", queue.name(), queue.elevator());
        for (group, id) in control.groups(QueueId(number)) {
            let stats = queue.group_stats(id);
            for direction in Direction::ALL {
                let one = stats.of(direction);
                if one.ios == 0 {
                    continue;
                }
                let mean = |ns: u64| ns / one.ios / 1000;
                let _ = writeln!(
                    out,
                    "  {group} {}: {} ios, {} bytes, {} errors, {} merged, wait {} µs, service {} µs",
                    format!("{direction:?}").to_lowercase(),
                    one.ios,
                    one.bytes,
                    one.errors,
                    one.merged,
                    mean(one.wait_ns),
                    mean(one.service_ns),
                );
            }
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
