//! The result of a bench: rows, with where and how they were measured. `output` writes it;
//! docs/benchmarks/README.md documents its JSON.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::args::Plan;
use crate::facts::{self, Host};
use crate::programs::Program;
use crate::rounds::median;

/// The figures of one side at one case: medians over the rounds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Row {
    /// Name of the point: `null/none/jobs=1/depth=64`.
    pub case: String,
    /// Name of the side: `ours`, `before`, `after`, or a peer.
    pub side: String,
    /// I/Os per second.
    pub iops: f64,
    /// Median latency in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile of the latency in nanoseconds.
    pub p99_ns: u64,
    /// 99.9th percentile of the latency in nanoseconds.
    pub p999_ns: u64,
    /// User and system time per I/O of the measured side, all its threads, in nanoseconds.
    pub cpu_ns_per_io: f64,
    /// Context switches per I/O of the measured side.
    pub ctx_per_io: f64,
    /// The same time of the load generator, if it is a process of its own.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub client_cpu_ns_per_io: Option<f64>,
    /// Figures of this bench only, medians over the rounds, by the names that the bench's page
    /// explains.
    #[serde(flatten)]
    pub figures: BTreeMap<String, f64>,
    /// I/Os per second of each round, in the order measured.
    pub rounds: Vec<f64>,
    /// Every other figure of each round, by its name; without those that were infinite in a round.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", default)]
    pub by_round: BTreeMap<String, Vec<f64>>,
}

impl Row {
    /// Returns the slowest and the fastest round, in I/Os per second.
    pub fn spread(&self) -> (f64, f64) {
        let low = self.rounds.iter().copied().fold(f64::INFINITY, f64::min);
        let high = self.rounds.iter().copied().fold(0.0, f64::max);
        (low.min(high), high)
    }

    /// Compares the I/Os per second of this side with another's of the same case, round by round: a
    /// temporary slowdown of the machine affected both.
    pub fn against(&self, other: &Self) -> Ratio {
        Ratio::of(&self.rounds, &other.rounds)
    }
}

/// One side's figure divided by another's: the median over the rounds, the lowest and the highest.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// The median.
    pub median: f64,
    /// The ratio of the round that was worst for the first side.
    pub low: f64,
    /// The ratio of the round that was best for it.
    pub high: f64,
}

impl Ratio {
    /// Compares what one side measured in each round with what another did in the same one.
    pub(crate) fn of(own: &[f64], other: &[f64]) -> Self {
        let pairs = own.iter().zip(other);
        let ratios: Vec<f64> = pairs.map(|(own, other)| own / other.max(1e-9)).collect();
        Self {
            low: ratios.iter().copied().fold(f64::INFINITY, f64::min),
            high: ratios.iter().copied().fold(0.0, f64::max),
            median: median(ratios),
        }
    }
}

impl fmt::Display for Ratio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} ({:.2}–{:.2})", self.median, self.low, self.high)
    }
}

/// A bench's result and the circumstances of the measurement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Report {
    /// The bench: `engine`, `nbd`.
    pub bench: String,
    /// The commit that was measured.
    pub commit: String,
    /// The machine.
    pub host: Host,
    /// The command that repeats the measurement.
    pub command: String,
    /// The programs that were measured or made the load, and settings of the kernel.
    pub programs: Vec<Program>,
    /// How often each point was visited.
    pub rounds: u32,
    /// How long each visit measured, in seconds.
    pub seconds: f64,
    /// The results.
    pub rows: Vec<Row>,
    /// The question, the object and the block size: for the reader of the table and the picture.
    #[serde(skip)]
    pub about: About,
}

/// The text above a table.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct About {
    /// The question that the bench answers.
    pub question: String,
    /// What was measured and how, one line each.
    pub setting: Vec<String>,
}

/// Prints a text. A reader that stops reading, as in `blkmq-lab bench engine | head`, is no failure.
pub(crate) fn say(text: &str) {
    use std::io::Write;
    let _ = std::io::stdout().write_all(text.as_bytes());
}

impl Report {
    /// Starts a report: collects facts about the machine and prints the question, the setting and
    /// the circumstances.
    pub fn start(bench: &str, about: About, plan: &Plan) -> Self {
        let report = Self {
            bench: bench.into(),
            commit: facts::commit(),
            host: Host::before_run(),
            command: facts::command_line(),
            programs: Vec::new(),
            rounds: plan.rounds,
            seconds: plan.window.as_secs_f64(),
            rows: Vec::new(),
            about,
        };
        say(&report.heading(plan));
        report
    }

    /// The lines above the table.
    fn heading(&self, plan: &Plan) -> String {
        let mut lines = vec![format!("{}: {}", self.bench, self.about.question)];
        lines.extend(self.about.setting.iter().cloned());
        lines.push(format!(
            "{} round(s) of {} ms each, sides alternating; figures are medians over the rounds",
            plan.rounds,
            plan.window.as_millis()
        ));
        lines.push(self.circumstances());
        lines.join("\n  ") + "\n"
    }

    /// Host and commit in one line.
    pub(crate) fn circumstances(&self) -> String {
        format!(
            "{}, {} core(s), {} MiB, {}, commit {}",
            self.host.cpu, self.host.cores, self.host.memory_mib, self.host.kernel, self.commit
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_has_exactly_the_documented_form() {
        let report = Report {
            bench: "engine".into(),
            commit: "c0ffee".into(),
            host: Host::default(),
            command: "blkmq-lab bench engine".into(),
            programs: Vec::new(),
            rounds: 3,
            seconds: 1.0,
            rows: vec![Row {
                case: "null/none/jobs=1/depth=64".into(),
                side: "ours".into(),
                iops: 2.0,
                rounds: vec![1.0, 2.0, 3.0],
                ..Row::default()
            }],
            about: About::default(),
        };
        let json = serde_json::to_value(&report).unwrap();
        let keys = |value: &serde_json::Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
        assert_eq!(
            keys(&json),
            [
                "bench", "command", "commit", "host", "programs", "rounds", "rows", "seconds"
            ]
        );
        assert_eq!(
            keys(&json["rows"][0]),
            [
                "case",
                "cpu_ns_per_io",
                "ctx_per_io",
                "iops",
                "p50_ns",
                "p999_ns",
                "p99_ns",
                "rounds",
                "side"
            ]
        );
        assert_eq!(
            keys(&json["host"]),
            [
                "cores",
                "cpu",
                "kernel",
                "load_after",
                "load_before",
                "memory_mib"
            ]
        );
    }

    #[test]
    fn row_survives_the_way_through_json() {
        let row = Row {
            case: "nbd/null/conns=1/depth=16".into(),
            side: "nbdkit".into(),
            client_cpu_ns_per_io: Some(900.5),
            rounds: vec![5.0],
            by_round: BTreeMap::from([("p50_ns".to_owned(), vec![7.0])]),
            ..Row::default()
        };
        let text = serde_json::to_string(&row).unwrap();
        assert_eq!(serde_json::from_str::<Row>(&text).unwrap(), row);
    }

    #[test]
    fn spread_is_the_slowest_and_the_fastest_round() {
        let row = Row {
            rounds: vec![3.0, 1.0, 2.0],
            ..Row::default()
        };
        assert_eq!(row.spread(), (1.0, 3.0));
        assert_eq!(Row::default().spread(), (0.0, 0.0));
    }

    #[test]
    fn sides_are_compared_within_rounds() {
        let row = |rounds: [f64; 3]| Row {
            rounds: rounds.into(),
            ..Row::default()
        };
        // The machine was ten times as slow in the second round. The medians' ratio would be 1.1.
        let ratio = row([220.0, 20.0, 210.0]).against(&row([200.0, 10.0, 100.0]));
        assert_eq!(ratio.to_string(), "2.00 (1.10–2.10)");
    }
}
