//! `blkmq iostat`: a line for each queue and for each group on it, in the form of `iostat -x`.
//!
//! A column of iostat is here if it has the same meaning. `%util` is not: nothing counts how long a
//! drive was busy.

use std::time::Duration;

use anyhow::{Result, bail};
use clap::Args;
use serde_json::{Map, Value, json};

use crate::control::client::{Client, QUERY_MAX};
use crate::control::path_to_ask;
use crate::control::statistics::{Counts, GroupStatistics, Statistics};
use crate::rates::{Interval, Samples, is_active, sum};
use crate::stdout::{print, unless_reader_left};

/// What `iostat` takes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct IostatArgs {
    /// Seconds between two reports, 0.1 to 3600; without, one report
    #[arg(value_parser = interval)]
    pub interval: Option<Duration>,
    /// How many reports [default: until stopped]
    #[arg(value_parser = clap::value_parser!(u64).range(1..))]
    pub count: Option<u64>,
    /// The daemon's control socket, unix:PATH [default: blkmq/control.sock in $XDG_RUNTIME_DIR, else in /run]
    #[arg(long, visible_alias = "control", value_name = "ADDRESS")]
    pub socket: Option<String>,
    /// Print each report as a JSON object on a line
    #[arg(long)]
    pub json: bool,
    /// Leave out the first report, which covers the time since the daemon's start
    #[arg(short = 'y')]
    pub skips_first: bool,
    /// Leave out queues and groups that did nothing
    #[arg(short = 'z')]
    pub skips_idle: bool,
}

/// Reports the activity of a running daemon repeatedly.
///
/// # Errors
/// The daemon's error, or there is no daemon.
pub fn main(args: &IostatArgs) -> Result<()> {
    let mut client = Client::connect_within(&path_to_ask(args.socket.as_deref())?, QUERY_MAX)?;
    unless_reader_left(run(args, &mut client))
}

fn run(args: &IostatArgs, client: &mut Client) -> Result<()> {
    let Some(time) = args.interval else {
        if args.skips_first {
            bail!("-y leaves out the only report: give an interval, as in blkmq iostat -y 1");
        }
        let all: Statistics = serde_json::from_value(client.call("statistics.get", &json!({}))?)?;
        return report(args, &Interval::since_start(all), true);
    };
    client.follow(time)?;
    let (mut samples, mut left) = (Samples::default(), args.count);
    while left != Some(0) {
        let is_first = samples.is_empty();
        let now = client.next_statistics()?;
        let interval = match is_first && !args.skips_first {
            true => {
                samples.take(now.clone());
                Some(Interval::since_start(now))
            }
            false => samples.take(now),
        };
        if let Some(interval) = interval {
            report(args, &interval, is_first)?;
            left = left.map(|left| left - 1);
        }
    }
    Ok(())
}

fn report(args: &IostatArgs, interval: &Interval, is_since_start: bool) -> Result<()> {
    let mut lines = lines(interval);
    lines.retain(|line| !args.skips_idle || is_active(&line.did));
    let text = match args.json {
        true => json_of(&lines, interval, is_since_start),
        false => table_of(&lines, interval),
    };
    print(&text)
}

/// A queue, or a group on it.
struct Line<'a> {
    queue: &'a str,
    /// `None` for all groups together.
    group: Option<&'a str>,
    did: GroupStatistics,
}

fn lines(interval: &Interval) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    for queue in &interval.queues {
        let all = (None, sum(&queue.groups));
        let groups = queue.groups.iter();
        let groups = groups.map(|group| (Some(group.path.as_str()), group.clone()));
        lines.extend(std::iter::once(all).chain(groups).map(|(group, did)| Line {
            queue: &queue.name,
            group,
            did,
        }));
    }
    lines
}

impl Line<'_> {
    fn name(&self) -> String {
        format!(
            "{}{}",
            self.queue,
            self.group.map_or(String::new(), |group| format!(":{group}"))
        )
    }

    /// The values of iostat's columns, with their names.
    fn columns(&self, interval: &Interval) -> Vec<(&'static str, f64)> {
        let mut columns = Vec::new();
        for (names, counts) in [
            (READ, &self.did.read),
            (WRITE, &self.did.write),
            (DISCARD, &self.did.discard),
        ] {
            // As in the kernel: a merged I/O counts once, as the request into which it was merged.
            let requests = counts.ios.saturating_sub(counts.merged);
            let values = [
                interval.per_second(requests),
                interval.per_second(counts.bytes) / 1024.0,
                interval.per_second(counts.merged),
                ratio(counts.merged * 100, counts.ios),
                await_ms(counts),
                ratio(counts.bytes, requests) / 1024.0,
            ];
            columns.extend(names.into_iter().zip(values));
        }
        let (flush, total) = (&self.did.flush, &self.did.total);
        // By Little's law: the mean number of I/Os is the time that all spent, over the time that has passed.
        let queued = interval.per_second(total.wait_ns + total.service_ns) / 1e9;
        columns.extend([
            ("f/s", interval.per_second(flush.ios)),
            ("f_await", await_ms(flush)),
            ("aqu-sz", queued),
        ]);
        columns
    }
}

/// From insertion to end, on average.
fn await_ms(counts: &Counts) -> f64 {
    ratio(counts.wait_ns + counts.service_ns, counts.ios) / 1e6
}

/// 0 if the divisor is 0.
fn ratio(of: u64, by: u64) -> f64 {
    if by == 0 { 0.0 } else { of as f64 / by as f64 }
}

fn table_of(lines: &[Line<'_>], interval: &Interval) -> String {
    let names: Vec<String> = lines.iter().map(Line::name).collect();
    let names_width = names.iter().map(|name| name.chars().count()).max();
    let names_width = names_width.unwrap_or(0).max(HEAD.len());
    let titles = [READ, WRITE, DISCARD].into_iter().flatten().chain(LAST);
    let mut out = format!("{HEAD:<names_width$}");
    titles.for_each(|title| out += &format!(" {title:>WIDTH$}"));
    for (line, name) in lines.iter().zip(names) {
        out += &format!("\n{name:<names_width$}");
        for (_, value) in line.columns(interval) {
            out += &format!(" {value:>WIDTH$.2}");
        }
    }
    out + "\n\n"
}

fn json_of(lines: &[Line<'_>], interval: &Interval, is_since_start: bool) -> String {
    let device = |line: &Line<'_>| {
        let did = &line.did;
        let columns = line.columns(interval).into_iter();
        let mut all: Map<String, Value> = columns
            .map(|(name, value)| (name.to_owned(), rounded(value).into()))
            .collect();
        let more = [
            ("queue", line.queue.into()),
            ("group", line.group.into()),
            ("errors", did.total.errors.into()),
            ("queued", did.queued.into()),
            ("wait_p50_ns", did.wait.p50_ns.into()),
            ("wait_p99_ns", did.wait.p99_ns.into()),
            ("device_p50_ns", did.device.p50_ns.into()),
            ("device_p99_ns", did.device.p99_ns.into()),
        ];
        all.extend(more.map(|(name, value): (&str, Value)| (name.to_owned(), value)));
        Value::Object(all)
    };
    let devices: Vec<Value> = lines.iter().map(device).collect();
    let report = json!({
        "seconds": rounded(interval.seconds),
        "since_start": is_since_start,
        "devices": devices,
    });
    format!("{report}\n")
}

/// To thousandths.
fn rounded(value: f64) -> f64 {
    (value * 1000.0).round() / 1000.0
}

/// Parses seconds in the daemon's range.
pub(crate) fn interval(text: &str) -> Result<Duration, String> {
    let seconds = text.parse::<f64>().ok();
    let seconds = seconds.filter(|seconds| (0.1..=3600.0).contains(seconds));
    let seconds = seconds.ok_or("must be seconds from 0.1 to 3600")?;
    Ok(Duration::from_secs_f64(seconds))
}

const HEAD: &str = "Device";
const READ: [&str; 6] = ["r/s", "rkB/s", "rrqm/s", "%rrqm", "r_await", "rareq-sz"];
const WRITE: [&str; 6] = ["w/s", "wkB/s", "wrqm/s", "%wrqm", "w_await", "wareq-sz"];
const DISCARD: [&str; 6] = ["d/s", "dkB/s", "drqm/s", "%drqm", "d_await", "dareq-sz"];
const LAST: [&str; 3] = ["f/s", "f_await", "aqu-sz"];
const WIDTH: usize = 9;

const EXAMPLES: &str = "\
Examples:
  blkmq iostat
  blkmq iostat -y -z 1
  blkmq iostat -y 10 1 --json | jq '.devices[] | select(.group == null)'";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rates::tests::{answer, reads};

    fn one_of(interval: &Interval, group: Option<&str>) -> Vec<(&'static str, f64)> {
        let all = lines(interval);
        let line = all.iter().find(|line| line.group == group).unwrap();
        line.columns(interval)
    }

    #[test]
    fn columns_say_what_iostat_says() {
        let mut group = reads("/a", 100, 900_000);
        group.read.merged = 20;
        let interval = Interval::since_start(answer(2, vec![group]));
        let columns = one_of(&interval, Some("/a"));
        let read: Vec<f64> = columns[..6].iter().map(|(_, value)| *value).collect();
        // Of 100 I/Os 20 were merged; each waited 0.9 ms and took 0.1 ms; the whole lasted 2 s.
        assert_eq!(read, [40.0, 200.0, 10.0, 20.0, 1.0, 5.0]);
        assert_eq!(columns.last().unwrap(), &("aqu-sz", 0.05));
    }

    #[test]
    fn queue_has_what_its_groups_have_together() {
        let groups = vec![reads("/a", 100, 0), reads("/b", 300, 0)];
        let interval = Interval::since_start(answer(1, groups));
        assert_eq!(one_of(&interval, None)[0], ("r/s", 400.0));
        let table = table_of(&lines(&interval), &interval);
        let names: Vec<&str> = table.lines().filter_map(|line| line.split(' ').next()).collect();
        assert_eq!(names, ["Device", "q", "q:/a", "q:/b", ""]);
        let line = json_of(&lines(&interval), &interval, true);
        let report: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(report["devices"][2]["r/s"], 300.0);
        assert_eq!(report["devices"][0]["group"], Value::Null);
    }

    #[test]
    fn interval_that_no_daemon_takes_is_refused() {
        assert_eq!(interval("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "x", "nan", "4000"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }
}
