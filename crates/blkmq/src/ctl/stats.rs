//! `ctl stats`: of each group its counts since the start, or rates and percentiles of the time between two
//! answers.

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::printed::print_json;
use super::table::{Column, table};
use crate::control::client::Client;
use crate::control::statistics::{Counts, Statistics};
use crate::rates::{Interval, Samples};
use crate::stdout::print;

/// Prints a line for each active group: since the start or, from the second time on, since the time
/// before.
pub(super) fn run(is_json: bool, client: &mut Client, interval: Option<f64>) -> Result<()> {
    let Some(seconds) = interval else {
        let all = client.call("statistics.get", &json!({}))?;
        return match is_json {
            true => print_json(&all),
            false => print(&since_start(serde_json::from_value(all)?)),
        };
    };
    let interval = Duration::try_from_secs_f64(seconds).context("seconds between two answers")?;
    if is_json {
        client.subscribe(interval)?;
        return told(client);
    }
    client.follow(interval)?;
    let mut samples = Samples::default();
    loop {
        let now = client.next_statistics()?;
        let interval = samples.take(now.clone());
        print(&interval.map_or_else(|| since_start(now), |interval| between(&interval)))?;
    }
}

/// Prints the daemon's notifications unchanged.
fn told(client: &mut Client) -> Result<()> {
    loop {
        print_json(&client.next_line()?["params"].take())?;
    }
}

fn since_start(now: Statistics) -> String {
    of_groups(&Interval::since_start(now), |count| count)
}

fn between(interval: &Interval) -> String {
    of_groups(interval, |count| interval.per_second(count) as u64)
}

fn of_groups(interval: &Interval, rate: impl Fn(u64) -> u64) -> String {
    let mut rows: Vec<Value> = Vec::new();
    for queue in &interval.queues {
        for group in queue.groups.iter().filter(|group| group.total.ios > 0) {
            let (read, write): (Counts, Counts) = (group.read, group.write);
            rows.push(json!({
                "queue": queue.name,
                "group": group.path,
                "reads": rate(read.ios),
                "writes": rate(write.ios),
                "read": rate(read.bytes),
                "written": rate(write.bytes),
                "wait_p99_ns": group.wait.p99_ns,
                "device_p50_ns": group.device.p50_ns,
                "device_p99_ns": group.device.p99_ns,
                "errors": group.total.errors,
            }));
        }
    }
    table(COLUMNS, &rows)
}

const COLUMNS: &[Column] = &[
    Column::text("queue"),
    Column::text("group"),
    Column::number("reads"),
    Column::number("writes"),
    Column::bytes("read"),
    Column::bytes("written"),
    Column::time("wait_p99_ns"),
    Column::time("device_p50_ns"),
    Column::time("device_p99_ns"),
    Column::number("errors"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::tests::{answer, reads};

    #[test]
    fn rates_are_of_what_came_since_the_time_before() {
        let at = |seconds, ios| answer(seconds, vec![reads("/a", ios, 0), reads("/idle", 5, 0)]);
        let text = between(&crate::rates::tests::between(at(1, 100), at(3, 700)).unwrap());
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[1][..5], ["q", "/a", "300", "0", "1.2M"]);
    }
}
