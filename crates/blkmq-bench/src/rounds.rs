//! The rounds of a bench: the order in which points are visited, and the evaluation of the visits by medians
//! and spread. `engine` and `nbd` make the points; `report` prints the rows.
//!
//! One round visits every point once, the sides of a case one after the other. So sides alternate
//! (A B A B), and disturbances of the machine affect all of them.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::args::Plan;
use crate::histogram::Histogram;
use crate::interrupt;
use crate::progress::Progress;
use crate::report::{Row, say};
use crate::table;
use crate::usage::Usage;

/// The percentiles that are reported, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    /// Half of all I/Os took no longer.
    pub p50_ns: u64,
    /// 99 % took no longer.
    pub p99_ns: u64,
    /// 99.9 % took no longer.
    pub p999_ns: u64,
}

impl From<&Histogram> for Latency {
    fn from(histogram: &Histogram) -> Self {
        Self {
            p50_ns: histogram.quantile(0.50),
            p99_ns: histogram.quantile(0.99),
            p999_ns: histogram.quantile(0.999),
        }
    }
}

/// The measurements of one visit to a point.
#[derive(Clone, Debug, Default)]
pub struct Sample {
    /// I/Os that ended within the window.
    pub ios: u64,
    /// The window's true length.
    pub elapsed: Duration,
    /// Percentiles of their latency.
    pub latency: Latency,
    /// What the measured side used within the window.
    pub usage: Usage,
    /// What the load generator used, if it is another process than the measured side.
    pub client: Option<Usage>,
    /// Figures of this bench only, by name; the same names in every visit to a point.
    pub figures: Vec<(&'static str, f64)>,
}

impl Sample {
    /// Returns I/Os per second.
    pub fn iops(&self) -> f64 {
        self.ios as f64 / self.elapsed.as_secs_f64().max(1e-9)
    }
}

/// One side at one case, and how to measure it once.
pub struct Point<'a> {
    /// Name of the case: `null/none/jobs=1/depth=64`.
    pub case: String,
    /// Name of the side: `ours`, or a peer.
    pub side: String,
    /// Sets up, runs the load, measures for the plan's window, tears down.
    pub measure: Measure<'a>,
}

/// One visit to a point.
pub type Measure<'a> = Box<dyn FnMut(&Plan) -> Result<Sample> + 'a>;

/// Visits every point in every round and returns a row for each, in the order of `points`.
///
/// # Errors
/// If a visit fails or completes no I/O; the error names the case and the side. The results so far
/// are printed.
pub fn run(plan: &Plan, points: &mut [Point<'_>]) -> Result<Vec<Row>> {
    let mut samples: Vec<Vec<Sample>> = points.iter().map(|_| Vec::new()).collect();
    let ended = visit_all(plan, points, &mut samples);
    let measured = points
        .iter()
        .zip(&samples)
        .filter(|(_, samples)| !samples.is_empty());
    let rows: Vec<Row> = measured
        .map(|(point, samples)| fold(&point.case, &point.side, samples))
        .collect();
    if ended.is_err() && !rows.is_empty() {
        say(&format!(
            "ended before its last round; so far:\n{}",
            table::draw(&rows)
        ));
    }
    ended.map(|()| rows)
}

fn visit_all(plan: &Plan, points: &mut [Point<'_>], samples: &mut [Vec<Sample>]) -> Result<()> {
    let mut progress = Progress::new(points.len() * plan.rounds as usize);
    for round in 1..=plan.rounds {
        for (point, samples) in points.iter_mut().zip(&mut *samples) {
            let what = format!("{} {}", point.case, point.side);
            progress.step(&what, round, plan.rounds);
            let sample = (point.measure)(plan);
            // After a signal, the visit's own error, caused by the end of its processes, is of no
            // interest.
            interrupt::check()?;
            let sample = sample.with_context(|| what.clone())?;
            ensure!(
                sample.ios > 0,
                "{what}: no I/O ended within {:?}; try more --seconds",
                plan.window
            );
            samples.push(sample);
        }
    }
    progress.finish();
    Ok(())
}

/// Makes the row of a point: the median of each figure over the rounds.
fn fold(case: &str, side: &str, samples: &[Sample]) -> Row {
    let of = |figure: &dyn Fn(&Sample) -> f64| median(samples.iter().map(figure).collect());
    let per_io = |total: u64, sample: &Sample| total as f64 / sample.ios.max(1) as f64;
    let rounds: Vec<f64> = samples.iter().map(Sample::iops).collect();
    let client = samples.iter().all(|sample| sample.client.is_some());
    let client_cpu = |sample: &Sample| per_io(sample.client.unwrap_or_default().cpu_ns, sample);
    let by_round = |figure: &dyn Fn(&Sample) -> f64| samples.iter().map(figure).collect::<Vec<f64>>();
    let mut all = BTreeMap::from([
        (
            "p50_ns".to_owned(),
            by_round(&|sample| sample.latency.p50_ns as f64),
        ),
        (
            "p99_ns".to_owned(),
            by_round(&|sample| sample.latency.p99_ns as f64),
        ),
        (
            "p999_ns".to_owned(),
            by_round(&|sample| sample.latency.p999_ns as f64),
        ),
        (
            "cpu_ns_per_io".to_owned(),
            by_round(&|sample| per_io(sample.usage.cpu_ns, sample)),
        ),
        (
            "ctx_per_io".to_owned(),
            by_round(&|sample| per_io(sample.usage.switches, sample)),
        ),
    ]);
    for (place, (name, _)) in samples
        .first()
        .iter()
        .flat_map(|sample| &sample.figures)
        .enumerate()
    {
        let of = |sample: &Sample| sample.figures.get(place).map_or(f64::NAN, |figure| figure.1);
        all.insert((*name).to_owned(), by_round(&of));
    }
    all.retain(|_, rounds| rounds.iter().all(|value| value.is_finite()));
    Row {
        case: case.into(),
        side: side.into(),
        iops: median(rounds.clone()),
        p50_ns: of(&|sample| sample.latency.p50_ns as f64) as u64,
        p99_ns: of(&|sample| sample.latency.p99_ns as f64) as u64,
        p999_ns: of(&|sample| sample.latency.p999_ns as f64) as u64,
        cpu_ns_per_io: of(&|sample| per_io(sample.usage.cpu_ns, sample)),
        ctx_per_io: of(&|sample| per_io(sample.usage.switches, sample)),
        client_cpu_ns_per_io: client.then(|| of(&client_cpu)),
        figures: figures(samples),
        rounds,
        by_round: all,
    }
}

/// The median of each of the bench's own figures; one that is infinite is left out.
fn figures(samples: &[Sample]) -> BTreeMap<String, f64> {
    let names = samples.first().into_iter().flat_map(|sample| &sample.figures);
    let all_of = |name: &str| {
        let all = samples.iter().flat_map(|sample| &sample.figures);
        all.filter(|figure| figure.0 == name)
            .map(|figure| figure.1)
            .collect()
    };
    names
        .map(|(name, _)| ((*name).to_owned(), median(all_of(name))))
        .filter(|(_, value)| value.is_finite())
        .collect()
}

/// The median; of an even number of values the mean of the middle two; of none 0.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    match values.len() {
        0 => 0.0,
        len if len % 2 == 1 => values[middle],
        _ => (values[middle - 1] + values[middle]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    fn plan(rounds: u32) -> Plan {
        Plan {
            rounds,
            window: Duration::from_secs(1),
            warm_up: Duration::ZERO,
        }
    }

    fn sample(ios: u64) -> Sample {
        Sample {
            ios,
            elapsed: Duration::from_secs(1),
            usage: Usage {
                cpu_ns: 500 * ios,
                switches: ios / 2,
            },
            ..Sample::default()
        }
    }

    #[test]
    fn sides_alternate_and_each_point_keeps_its_own_rounds() {
        let order = RefCell::new(String::new());
        let point = |side: &'static str, ios: u64| Point {
            case: "c".into(),
            side: side.into(),
            measure: Box::new({
                let order = &order;
                let mut round = 0;
                move |_| {
                    order.borrow_mut().push_str(side);
                    round += 1;
                    Ok(sample(ios * round))
                }
            }),
        };
        let rows = run(&plan(3), &mut [point("a", 100), point("b", 1000)]).unwrap();
        assert_eq!(*order.borrow(), "ababab");
        assert_eq!(rows[0].rounds, [100.0, 200.0, 300.0]);
        assert_eq!((rows[0].iops, rows[1].iops), (200.0, 2000.0));
        assert_eq!((rows[0].cpu_ns_per_io, rows[0].ctx_per_io), (500.0, 0.5));
        assert_eq!(rows[0].by_round["cpu_ns_per_io"], [500.0; 3]);
    }

    #[test]
    fn figure_that_is_infinite_in_a_round_has_no_rounds() {
        let with = |figures: [f64; 2]| Sample {
            figures: vec![("a", figures[0]), ("b", figures[1])],
            ..sample(1)
        };
        let row = fold("c", "s", &[with([1.0, 2.0]), with([3.0, f64::INFINITY])]);
        assert_eq!(row.by_round["a"], [1.0, 3.0]);
        assert!(!row.by_round.contains_key("b"));
    }

    #[test]
    fn visit_that_ends_no_io_is_an_error_that_names_it() {
        let idle = Point {
            case: "case-x".into(),
            side: "side-y".into(),
            measure: Box::new(|_| Ok(sample(0))),
        };
        let error = run(&plan(1), &mut [idle]).unwrap_err().to_string();
        assert!(error.contains("case-x side-y"), "{error}");
    }

    #[test]
    fn median_is_not_moved_by_one_outlier() {
        assert_eq!(median(vec![1.0, 1e9, 2.0]), 2.0);
        assert_eq!(median(vec![4.0, 2.0]), 3.0);
        assert_eq!(median(Vec::new()), 0.0);
    }
}
