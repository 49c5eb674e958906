//! The columns of `top`: how each is written and sorted, and which of them a terminal has room for.

use super::tree::Numbers;
use crate::units::{count, size, time};

/// A column of numbers.
#[derive(Debug)]
pub(super) struct Column {
    pub(super) title: &'static str,
    pub(super) help: &'static str,
    pub(super) width: u16,
    /// Columns with low ranks are shown if there is not room for all.
    rank: u8,
    pub(super) text: fn(&Numbers) -> String,
    /// The sort key of lines, the largest first.
    pub(super) order: fn(&Numbers) -> f64,
}

/// The columns that fit beside a name, in their order.
pub(super) fn fitting(width: u16) -> Vec<&'static Column> {
    let mut by_rank: Vec<&Column> = COLUMNS.iter().collect();
    by_rank.sort_by_key(|column| column.rank);
    let mut left = width.saturating_sub(NAME_MIN);
    let mut last = None;
    for column in by_rank {
        let Some(rest) = left.checked_sub(column.width + 1) else {
            break;
        };
        left = rest;
        last = Some(column.rank);
    }
    COLUMNS
        .iter()
        .filter(|column| Some(column.rank) <= last)
        .collect()
}

/// All columns, in the order in which they are shown.
pub(super) static COLUMNS: &[Column] = &[
    Column {
        title: "IOPS",
        help: "I/Os that ended, a second",
        width: 6,
        rank: 0,
        text: |numbers| count(numbers.iops),
        order: |numbers| numbers.iops,
    },
    Column {
        title: "B/s",
        help: "bytes of them",
        width: 6,
        rank: 1,
        text: |numbers| size(numbers.bytes),
        order: |numbers| numbers.bytes,
    },
    Column {
        title: "READ",
        help: "reads, a second",
        width: 6,
        rank: 13,
        text: |numbers| count(numbers.reads),
        order: |numbers| numbers.reads,
    },
    Column {
        title: "WRITE",
        help: "writes, a second",
        width: 6,
        rank: 14,
        text: |numbers| count(numbers.writes),
        order: |numbers| numbers.writes,
    },
    Column {
        title: "rB/s",
        help: "bytes read",
        width: 6,
        rank: 15,
        text: |numbers| size(numbers.read_bytes),
        order: |numbers| numbers.read_bytes,
    },
    Column {
        title: "wB/s",
        help: "bytes written",
        width: 6,
        rank: 16,
        text: |numbers| size(numbers.written_bytes),
        order: |numbers| numbers.written_bytes,
    },
    Column {
        title: "WAIT50",
        help: "half of those that waited in the queue waited less",
        width: 6,
        rank: 11,
        text: |numbers| of_time(numbers.wait_p50),
        order: |numbers| number(numbers.wait_p50),
    },
    Column {
        title: "WAIT99",
        help: "99 of 100 of them waited less",
        width: 6,
        rank: 4,
        text: |numbers| of_time(numbers.wait_p99),
        order: |numbers| number(numbers.wait_p99),
    },
    Column {
        title: "DEV50",
        help: "the device took less for half of all",
        width: 6,
        rank: 8,
        text: |numbers| of_time(numbers.device_p50),
        order: |numbers| number(numbers.device_p50),
    },
    Column {
        title: "DEV99",
        help: "it took less for 99 of 100",
        width: 6,
        rank: 5,
        text: |numbers| of_time(numbers.device_p99),
        order: |numbers| number(numbers.device_p99),
    },
    Column {
        title: "QUEUE",
        help: "of a group: I/Os in the scheduler; a queue: all in it/depth now",
        width: 7,
        rank: 7,
        text: |numbers| match numbers.depth {
            Some(depth) => format!("{}/{depth}", numbers.queued),
            None => numbers.queued.to_string(),
        },
        order: |numbers| numbers.queued as f64,
    },
    Column {
        title: "DUE",
        help: "its share by weight, among those who had work",
        width: 4,
        rank: 2,
        text: |numbers| percent(numbers.due),
        order: |numbers| numbers.due.unwrap_or(NONE),
    },
    Column {
        title: "GOT",
        help: "its share of the queue's bytes",
        width: 4,
        rank: 3,
        text: |numbers| percent(numbers.got),
        order: |numbers| numbers.got.unwrap_or(NONE),
    },
    Column {
        title: "CAP",
        help: "how much of its tightest cap it used, or of one above it",
        width: 4,
        rank: 6,
        text: |numbers| percent(numbers.capped),
        order: |numbers| numbers.capped.unwrap_or(NONE),
    },
    Column {
        title: "BEHIND",
        help: "whom it waited behind most, and how much; or a full cap",
        width: 20,
        rank: 9,
        text: |numbers| numbers.behind.as_ref().map_or_else(String::new, of_behind),
        order: |numbers| numbers.behind.as_ref().map_or(NONE, |(_, part)| *part),
    },
    Column {
        title: "ERR/s",
        help: "I/Os that failed, a second",
        width: 5,
        rank: 10,
        text: |numbers| count(numbers.errors),
        order: |numbers| numbers.errors,
    },
    Column {
        title: "WEIGHT",
        help: "against the other groups of its parent",
        width: 6,
        rank: 12,
        text: |numbers| {
            numbers
                .weight
                .map_or_else(String::new, |weight| weight.to_string())
        },
        order: |numbers| numbers.weight.map_or(NONE, f64::from),
    },
];

fn of_time(ns: Option<u64>) -> String {
    ns.map_or_else(|| "-".to_owned(), time)
}

fn number(ns: Option<u64>) -> f64 {
    ns.map_or(NONE, |ns| ns as f64)
}

fn percent(part: Option<f64>) -> String {
    part.map_or_else(|| "-".to_owned(), |part| format!("{:.0}%", part * 100.0))
}

/// The end of a long path is more specific than its beginning.
fn of_behind((whom, part): &(String, f64)) -> String {
    let part = percent(Some(*part));
    let room = BEHIND_WIDTH - 1 - part.len();
    let cut = whom.chars().count().saturating_sub(room);
    format!("{} {part}", whom.chars().skip(cut).collect::<String>())
}

const BEHIND_WIDTH: usize = 20;
/// The least width of a name, in columns of the terminal.
pub(super) const NAME_MIN: u16 = 21;
/// Below all values.
const NONE: f64 = -1.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wider_terminal_has_all_that_a_narrower_one_has_and_more() {
        let titles = |width| -> Vec<&str> { fitting(width).iter().map(|column| column.title).collect() };
        let narrow = titles(80);
        assert_eq!(
            narrow,
            [
                "IOPS", "B/s", "WAIT99", "DEV50", "DEV99", "QUEUE", "DUE", "GOT", "CAP"
            ]
        );
        for width in 0..200 {
            let (small, large) = (titles(width), titles(width + 1));
            assert!(small.iter().all(|title| large.contains(title)), "{width}");
        }
        assert_eq!((titles(5).len(), titles(200).len()), (0, COLUMNS.len()));
    }

    #[test]
    fn long_neighbours_name_keeps_its_end() {
        let text = of_behind(&("/a-rather-long-name-of-b".to_owned(), 0.5));
        assert_eq!(
            (text.as_str(), text.len()),
            ("er-long-name-of-b 50%".get(1..).unwrap(), 20)
        );
    }
}
