//! The figures of a visit by clients: for each client its result compared with its due and with its result
//! alone, for all of them the error of the shares and the use of the drive; and over several visits the
//! median and the worst of each figure.

use std::collections::BTreeMap;

use super::super::SHARE_WINDOW;
use super::super::processes::Visit;
use super::super::scene::Scene;
use crate::report::Row;
use crate::rounds::{Latency, median};

/// The result of one visit.
pub(super) struct Outcome {
    /// Of each tenant; the light one is last.
    pub(super) tenants: Vec<Got>,
    /// The largest difference of a share from its due, as a part of the due, over all of the visit; none where
    /// tenants ask for less by their rate.
    share_error: Option<f64>,
    /// The same over the worst second of the visit, or over the whole visit if that is shorter.
    worst_share_error: Option<f64>,
    /// Bytes per second of all.
    pub(super) total: f64,
    /// The same as a part of the total without a scheduler in the same round.
    bytes_vs_none: f64,
}

/// What one tenant got.
pub(super) struct Got {
    bytes: f64,
    ios: f64,
    latency: Latency,
    /// Its share as a part of its due; the light tenant asks for less.
    of_due: Option<f64>,
    /// Only of a tenant that may have too little under way for its due.
    alone: Option<AgainstAlone>,
}

/// The result of a tenant alone.
#[derive(Clone, Copy, Debug)]
pub(super) struct Alone {
    pub(super) bytes: f64,
    pub(super) latency: Latency,
}

struct AgainstAlone {
    /// Its bytes as a part of its bytes alone.
    bytes: f64,
    p99: f64,
    /// Its bytes alone as a part of its due here: below 1 it cannot reach its due.
    due: f64,
}

impl Outcome {
    /// Evaluates a visit. `none` is the total without a scheduler, or none if this is that visit;
    /// `alone` has an entry for each tenant.
    pub(super) fn new(scene: &Scene, visit: &Visit, none: Option<f64>, alone: &[Option<Alone>]) -> Self {
        let crowd = visit.series.of_first(scene.crowd.len());
        let due = scene.due(&scene.tree, &scene.crowd);
        let due_of_all = scene.due(&scene.tree, &scene.tenants());
        let rates = visit.series.rates();
        let total: f64 = rates.iter().sum();
        let length = crowd.moments.last().map_or(SHARE_WINDOW, |(end, _)| *end);
        let wants_due = scene.crowd.iter().all(|tenant| tenant.load.rate == 0);
        let crowd_total: f64 = rates[..due.len()].iter().sum();
        let got = |place: usize| {
            let (bytes, sample) = (rates[place], &visit.samples[place]);
            Got {
                bytes,
                ios: sample.iops(),
                latency: sample.latency,
                of_due: due.get(place).map(|due| bytes / (crowd_total * due).max(1.0)),
                alone: alone[place].map(|alone| AgainstAlone {
                    bytes: bytes / alone.bytes.max(1.0),
                    p99: sample.latency.p99_ns as f64 / alone.latency.p99_ns.max(1) as f64,
                    due: alone.bytes / (total * due_of_all[place]).max(1.0),
                }),
            }
        };
        Self {
            tenants: (0..rates.len()).map(got).collect(),
            share_error: wants_due.then(|| crowd.share_error(&due)),
            worst_share_error: wants_due.then(|| crowd.worst_share_error(&due, length.min(SHARE_WINDOW))),
            total,
            bytes_vs_none: total / none.unwrap_or(total).max(1.0),
        }
    }

    fn largest_p99(&self) -> f64 {
        let all = self.tenants.iter().map(|got| got.latency.p99_ns as f64);
        all.fold(0.0, f64::max)
    }
}

/// Which tenants may have too little under way for their due: those whose part of all bytes under
/// way is smaller than their due.
pub(super) fn may_lack_depth(scene: &Scene) -> Vec<bool> {
    let tenants = scene.tenants();
    let all: u64 = tenants.iter().map(|tenant| tenant.load.bytes()).sum();
    let due = scene.due(&scene.tree, &tenants);
    let part = |bytes: u64| bytes as f64 / all.max(1) as f64;
    tenants
        .iter()
        .zip(due)
        .map(|(tenant, due)| part(tenant.load.bytes()) < due * (1.0 - 1e-9))
        .collect()
}

/// The figures of a case over its visits, by name; `…_worst` is of the worst visit.
pub(super) fn of_case(outcomes: &[Outcome]) -> BTreeMap<String, f64> {
    fold(&OF_CASE, &outcomes.iter().collect::<Vec<_>>())
}

/// The rows of a case's tenants, one each.
pub(super) fn of_tenants(scene: &Scene, case: &Row, outcomes: &[Outcome]) -> Vec<Row> {
    let tenants = scene.tenants();
    let row = |place: usize| {
        let got: Vec<&Got> = outcomes.iter().map(|outcome| &outcome.tenants[place]).collect();
        let of = |figure: fn(&Got) -> f64| median(got.iter().map(|got| figure(got)).collect());
        let tenant = &tenants[place];
        let mut figures = fold(&OF_TENANT, &got);
        let p99 = got.iter().map(|got| got.latency.p99_ns as f64);
        figures.insert("p99_ns_worst".into(), p99.fold(0.0, f64::max));
        let p50 = got.iter().map(|got| got.latency.p50_ns as f64);
        figures.insert("p50_ns_worst".into(), p50.fold(0.0, f64::max));
        Row {
            case: format!(
                "{}/tenant={}:{}:{}",
                case.case,
                place + 1,
                scene.weight(tenant),
                tenant.load
            ),
            side: case.side.clone(),
            iops: of(|got| got.ios),
            p50_ns: of(|got| got.latency.p50_ns as f64) as u64,
            p99_ns: of(|got| got.latency.p99_ns as f64) as u64,
            p999_ns: of(|got| got.latency.p999_ns as f64) as u64,
            figures,
            rounds: got.iter().map(|got| got.ios).collect(),
            ..Row::default()
        }
    };
    (0..tenants.len()).map(row).collect()
}

/// A figure of the report.
struct Figure<T> {
    name: &'static str,
    worst: Worst,
    of: fn(&T) -> Option<f64>,
}

/// Which visit is the worst.
#[derive(Clone, Copy)]
enum Worst {
    Largest,
    Smallest,
    FarthestFromOne,
}

impl Worst {
    fn of(self, values: &[f64]) -> f64 {
        let badness = |value: &f64| match self {
            Self::Largest => *value,
            Self::Smallest => -*value,
            Self::FarthestFromOne => (*value - 1.0).abs(),
        };
        let worst = values.iter().max_by(|a, b| badness(a).total_cmp(&badness(b)));
        worst.copied().unwrap_or_default()
    }
}

fn fold<T>(figures: &[Figure<T>], visits: &[&T]) -> BTreeMap<String, f64> {
    let mut folded = BTreeMap::new();
    for figure in figures {
        let values: Vec<f64> = visits.iter().filter_map(|visit| (figure.of)(visit)).collect();
        if !values.is_empty() {
            folded.insert(format!("{}_worst", figure.name), figure.worst.of(&values));
            folded.insert(figure.name.to_owned(), median(values));
        }
    }
    folded
}

const OF_CASE: [Figure<Outcome>; 5] = [
    Figure {
        name: "mb_per_s",
        worst: Worst::Smallest,
        of: |outcome| Some(outcome.total / 1e6),
    },
    Figure {
        name: "bytes_vs_none",
        worst: Worst::Smallest,
        of: |outcome| Some(outcome.bytes_vs_none),
    },
    Figure {
        name: "share_error",
        worst: Worst::Largest,
        of: |outcome| outcome.share_error,
    },
    Figure {
        name: "worst_share_error",
        worst: Worst::Largest,
        of: |outcome| outcome.worst_share_error,
    },
    Figure {
        name: "largest_p99_ns",
        worst: Worst::Largest,
        of: |outcome| Some(outcome.largest_p99()),
    },
];

const OF_TENANT: [Figure<Got>; 5] = [
    Figure {
        name: "mb_per_s",
        worst: Worst::Smallest,
        of: |got| Some(got.bytes / 1e6),
    },
    Figure {
        name: "of_due",
        worst: Worst::FarthestFromOne,
        of: |got| got.of_due,
    },
    Figure {
        name: "of_alone",
        worst: Worst::Smallest,
        of: |got| got.alone.as_ref().map(|alone| alone.bytes),
    },
    Figure {
        name: "alone_of_due",
        worst: Worst::Smallest,
        of: |got| got.alone.as_ref().map(|alone| alone.due),
    },
    Figure {
        name: "p99_vs_alone",
        worst: Worst::Largest,
        of: |got| got.alone.as_ref().map(|alone| alone.p99),
    },
];

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::super::score::Series;
    use super::super::super::{cases, spec};
    use super::*;
    use crate::rounds::Sample;
    use crate::usage::Usage;

    /// A visit of two seconds in which tenants move `mb` MB each second, with these p99 in ms.
    fn visit(mb: &[u64], p99_ms: &[u64]) -> Visit {
        let moment = |second: u64| {
            let bytes = mb.iter().map(|mb| second * mb * 1_000_000);
            (Duration::from_secs(second), bytes.collect())
        };
        let sample = |p99_ms: &u64| Sample {
            ios: 2000,
            elapsed: Duration::from_secs(2),
            latency: Latency {
                p99_ns: p99_ms * 1_000_000,
                ..Latency::default()
            },
            ..Sample::default()
        };
        Visit {
            samples: p99_ms.iter().map(sample).collect(),
            series: Series {
                moments: (0..3).map(moment).collect(),
            },
            usage: Usage::default(),
        }
    }

    fn is_close(figure: f64, expected: f64) -> bool {
        (figure - expected).abs() < 1e-6
    }

    #[test]
    fn shares_are_scored_against_their_due_and_the_total_against_none() {
        let scene = spec::parse("1:16:64k,3:16:64k").unwrap();
        let outcome = Outcome::new(&scene, &visit(&[50, 50], &[4, 7]), Some(200e6), &[None, None]);
        assert!(is_close(outcome.share_error.unwrap(), 1.0));
        assert!(is_close(outcome.bytes_vs_none, 0.5));
        assert!(is_close(outcome.tenants[0].of_due.unwrap(), 2.0));
        assert!(is_close(outcome.tenants[1].of_due.unwrap(), 2.0 / 3.0));
        assert!(is_close(outcome.largest_p99(), 7e6));
    }

    #[test]
    fn a_visit_shorter_than_a_second_is_scored_over_all_of_it() {
        let scene = spec::parse("1:16:64k,3:16:64k").unwrap();
        let mut visit = visit(&[50, 50], &[4, 7]);
        for (at, _) in &mut visit.series.moments {
            *at /= 10;
        }
        let outcome = Outcome::new(&scene, &visit, None, &[None, None]);
        assert!(is_close(outcome.worst_share_error.unwrap(), 1.0));
    }

    #[test]
    fn one_without_enough_under_way_is_shown_against_what_it_has_alone() {
        let scene = spec::parse("1:64:64k,2:4:64k").unwrap();
        assert_eq!(may_lack_depth(&scene), [false, true]);
        let alone = Alone {
            bytes: 400e6,
            latency: Latency {
                p99_ns: 1_000_000,
                ..Latency::default()
            },
        };
        let outcome = Outcome::new(&scene, &visit(&[700, 200], &[9, 3]), None, &[None, Some(alone)]);
        let got = outcome.tenants[1].alone.as_ref().unwrap();
        assert!(is_close(got.bytes, 0.5) && is_close(got.p99, 3.0));
        // Two thirds of 900 are 600, of which it could have 400.
        assert!(is_close(got.due, 2.0 / 3.0), "{}", got.due);
    }

    #[test]
    fn the_light_tenant_is_beside_the_shares_of_the_others() {
        let scenes = cases::of_clients();
        let scene = scenes.iter().find(|scene| scene.victim.is_some()).unwrap();
        let mb: Vec<u64> = [[100; 8].to_vec(), vec![3]].concat();
        let outcome = Outcome::new(scene, &visit(&mb, &[1; 9]), None, &[None; 9]);
        assert!(is_close(outcome.share_error.unwrap(), 0.0));
        assert!(outcome.tenants[8].of_due.is_none());
        assert!(may_lack_depth(scene)[8]);
    }

    #[test]
    fn of_several_visits_the_median_and_the_worst_are_shown() {
        let scene = spec::parse("1:16:64k,1:16:64k").unwrap();
        let visits = [[50, 50], [60, 40], [20, 20]].map(|mb| visit(&mb, &[4, 7]));
        let outcomes = visits.map(|visit| Outcome::new(&scene, &visit, Some(100e6), &[None, None]));
        let figures = of_case(&outcomes);
        assert!(is_close(figures["share_error"], 0.0) && is_close(figures["share_error_worst"], 0.2));
        assert!(is_close(figures["bytes_vs_none"], 1.0) && is_close(figures["bytes_vs_none_worst"], 0.4));
        let case = Row {
            case: "x".into(),
            ..Row::default()
        };
        let rows = of_tenants(&scene, &case, &outcomes);
        assert_eq!(rows[1].case, "x/tenant=2:100:16x64k");
        assert!(is_close(rows[1].figures["of_due"], 1.0) && is_close(rows[1].figures["of_due_worst"], 0.8));
        assert!(!rows[1].figures.contains_key("of_alone"));
    }
}
