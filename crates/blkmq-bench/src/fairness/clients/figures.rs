//! The figures of a visit by clients: for each client its result compared with its due and with its result
//! alone, for all of them the error of the shares and the use of the drive, beside light tenants the goals; and
//! over several visits the median and the worst of each figure.

use std::collections::BTreeMap;
use std::time::Duration;

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
    /// Bytes per second.
    pub(super) totals: Totals,
    /// Those of all as a part of those without a scheduler in the same round.
    bytes_vs_none: f64,
    /// Only beside light tenants.
    light: Option<Light>,
}

/// Bytes per second of a visit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Totals {
    pub(super) all: f64,
    /// Of those that are not light.
    pub(super) floods: f64,
}

/// What a visit is compared with, from the same round.
pub(super) struct Reference {
    /// Totals without a scheduler, or none if this is that visit.
    pub(super) none: Option<Totals>,
    /// An entry for each tenant.
    pub(super) alone: Vec<Option<Alone>>,
    /// What a request of the floods takes by itself.
    pub(super) flood_request: Option<Duration>,
}

/// What the light tenants have, and those beside them, against the case's goal.
struct Light {
    /// The largest of their medians.
    p50_ns: f64,
    p99_ns: f64,
    /// Of the tenant that is the farthest beyond its goal: 1 and below meets it.
    p50_of_goal: f64,
    p99_of_goal: f64,
    /// Bytes of the floods as a part of those without a scheduler, and that as a part of the goal: 1 and above meets it.
    floods_vs_none: f64,
    floods_of_goal: f64,
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
    /// Evaluates a visit.
    pub(super) fn new(scene: &Scene, visit: &Visit, reference: &Reference) -> Self {
        let crowd = visit.series.of_first(scene.crowd.len());
        let due = scene.due(&scene.tree, &scene.crowd);
        let due_of_all = scene.due(&scene.tree, &scene.tenants());
        let rates = visit.series.rates();
        let light = scene.light_places();
        let floods = rates
            .iter()
            .enumerate()
            .filter(|(place, _)| !light.contains(place));
        let totals = Totals {
            all: rates.iter().sum(),
            floods: floods.map(|(_, rate)| rate).sum(),
        };
        let length = crowd.moments.last().map_or(SHARE_WINDOW, |(end, _)| *end);
        let wants_due = scene.crowd.iter().all(|tenant| !tenant.load.is_light());
        let crowd_total: f64 = rates[..due.len()].iter().sum();
        let got = |place: usize| {
            let (bytes, sample) = (rates[place], &visit.samples[place]);
            Got {
                bytes,
                ios: sample.iops(),
                latency: sample.latency,
                of_due: due.get(place).map(|due| bytes / (crowd_total * due).max(1.0)),
                alone: reference.alone[place].map(|alone| AgainstAlone {
                    bytes: bytes / alone.bytes.max(1.0),
                    p99: sample.latency.p99_ns as f64 / alone.latency.p99_ns.max(1) as f64,
                    due: alone.bytes / (totals.all * due_of_all[place]).max(1.0),
                }),
            }
        };
        let none = reference.none.unwrap_or(totals);
        Self {
            tenants: (0..rates.len()).map(got).collect(),
            share_error: wants_due.then(|| crowd.share_error(&due)),
            worst_share_error: wants_due.then(|| crowd.worst_share_error(&due, length.min(SHARE_WINDOW))),
            totals,
            bytes_vs_none: totals.all / none.all.max(1.0),
            light: Light::new(scene, visit, reference, totals.floods / none.floods.max(1.0)),
        }
    }

    fn largest_p99(&self) -> f64 {
        let all = self.tenants.iter().map(|got| got.latency.p99_ns as f64);
        all.fold(0.0, f64::max)
    }
}

impl Light {
    /// Evaluates the light tenants; none if there are none, or nobody beside them.
    fn new(scene: &Scene, visit: &Visit, reference: &Reference, floods_vs_none: f64) -> Option<Self> {
        let request_ns = reference.flood_request?.as_nanos() as f64;
        let mut light = Self {
            p50_ns: 0.0,
            p99_ns: 0.0,
            p50_of_goal: 0.0,
            p99_of_goal: 0.0,
            floods_vs_none,
            floods_of_goal: floods_vs_none / scene.goal.of_none,
        };
        for place in scene.light_places() {
            let (p50_ns, p99_ns) = in_ns(visit.samples[place].latency);
            let goal = scene.goal.latency;
            let goal = goal.map(|(p50, p99)| (p50.as_nanos() as f64, p99.as_nanos() as f64));
            let alone = reference.alone[place].map(|alone| in_ns(alone.latency));
            let from_alone = alone.map(|(p50, p99)| (3.0 * p50, 2.0f64.mul_add(p99, 2.0 * request_ns)));
            let (p50_goal, p99_goal) = goal.or(from_alone)?;
            light.p50_ns = light.p50_ns.max(p50_ns);
            light.p99_ns = light.p99_ns.max(p99_ns);
            light.p50_of_goal = light.p50_of_goal.max(p50_ns / p50_goal.max(1.0));
            light.p99_of_goal = light.p99_of_goal.max(p99_ns / p99_goal.max(1.0));
        }
        Some(light)
    }
}

fn in_ns(latency: Latency) -> (f64, f64) {
    (latency.p50_ns as f64, latency.p99_ns as f64)
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
    let outcomes: Vec<&Outcome> = outcomes.iter().collect();
    let mut figures = fold(&OF_CASE, &outcomes);
    let light: Vec<&Light> = outcomes
        .iter()
        .filter_map(|outcome| outcome.light.as_ref())
        .collect();
    if !light.is_empty() {
        figures.extend(fold(&OF_LIGHT, &light));
        let worst = |name: &str| figures[&format!("{name}_worst")];
        let met = [
            worst("light_p50_of_goal") <= 1.0,
            worst("light_p99_of_goal") <= 1.0,
            worst("floods_of_goal") >= 1.0,
        ];
        let met = met.iter().filter(|is_met| **is_met).count();
        figures.insert("goals_met".into(), met as f64);
    }
    figures
}

/// The same of each visit.
pub(super) fn rounds_of_case(outcomes: &[Outcome]) -> BTreeMap<String, Vec<f64>> {
    let outcomes: Vec<&Outcome> = outcomes.iter().collect();
    let light: Vec<&Light> = outcomes
        .iter()
        .filter_map(|outcome| outcome.light.as_ref())
        .collect();
    let mut rounds = rounds(&OF_CASE, &outcomes);
    if light.len() == outcomes.len() {
        rounds.extend(self::rounds(&OF_LIGHT, &light));
    }
    rounds
}

/// The rows of a case's tenants, one each.
pub(super) fn of_tenants(scene: &Scene, case: &Row, outcomes: &[Outcome]) -> Vec<Row> {
    let tenants = scene.tenants();
    let row = |place: usize| {
        let got: Vec<&Got> = outcomes.iter().map(|outcome| &outcome.tenants[place]).collect();
        let of = |figure: fn(&Got) -> f64| median(got.iter().map(|got| figure(got)).collect());
        let tenant = &tenants[place];
        let mut figures = fold(&OF_TENANT, &got);
        let mut by_round = rounds(&OF_TENANT, &got);
        let percentile = |of: fn(&Got) -> u64| got.iter().map(|got| of(got) as f64).collect::<Vec<f64>>();
        let (p50, p99) = (
            percentile(|got| got.latency.p50_ns),
            percentile(|got| got.latency.p99_ns),
        );
        figures.insert("p50_ns_worst".into(), p50.iter().copied().fold(0.0, f64::max));
        figures.insert("p99_ns_worst".into(), p99.iter().copied().fold(0.0, f64::max));
        let p999 = percentile(|got| got.latency.p999_ns);
        for (name, values) in [("p50_ns", p50), ("p99_ns", p99), ("p999_ns", p999)] {
            by_round.insert(name.into(), values);
        }
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
            by_round,
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

/// The figures of each visit, by name; without those that a visit does not have.
fn rounds<T>(figures: &[Figure<T>], visits: &[&T]) -> BTreeMap<String, Vec<f64>> {
    let of = |figure: &Figure<T>| {
        let values: Option<Vec<f64>> = visits.iter().map(|visit| (figure.of)(visit)).collect();
        Some((figure.name.to_owned(), values?))
    };
    figures.iter().filter_map(of).collect()
}

const OF_CASE: [Figure<Outcome>; 5] = [
    Figure {
        name: "mb_per_s",
        worst: Worst::Smallest,
        of: |outcome| Some(outcome.totals.all / 1e6),
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

const OF_LIGHT: [Figure<Light>; 6] = [
    Figure {
        name: "light_p50_ns",
        worst: Worst::Largest,
        of: |light| Some(light.p50_ns),
    },
    Figure {
        name: "light_p99_ns",
        worst: Worst::Largest,
        of: |light| Some(light.p99_ns),
    },
    Figure {
        name: "light_p50_of_goal",
        worst: Worst::Largest,
        of: |light| Some(light.p50_of_goal),
    },
    Figure {
        name: "light_p99_of_goal",
        worst: Worst::Largest,
        of: |light| Some(light.p99_of_goal),
    },
    Figure {
        name: "floods_vs_none",
        worst: Worst::Smallest,
        of: |light| Some(light.floods_vs_none),
    },
    Figure {
        name: "floods_of_goal",
        worst: Worst::Smallest,
        of: |light| Some(light.floods_of_goal),
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

    /// Compared with these bytes per second without a scheduler, and with these loads alone.
    fn reference(none: Option<f64>, alone: Vec<Option<Alone>>) -> Reference {
        Reference {
            none: none.map(|all| Totals { all, floods: all }),
            alone,
            flood_request: None,
        }
    }

    fn is_close(figure: f64, expected: f64) -> bool {
        (figure - expected).abs() < 1e-6
    }

    #[test]
    fn shares_are_scored_against_their_due_and_the_total_against_none() {
        let scene = spec::parse("1:16:64k,3:16:64k").unwrap();
        let outcome = Outcome::new(
            &scene,
            &visit(&[50, 50], &[4, 7]),
            &reference(Some(200e6), vec![None; 2]),
        );
        assert!(is_close(outcome.share_error.unwrap(), 1.0));
        assert!(is_close(outcome.bytes_vs_none, 0.5));
        assert!(is_close(outcome.tenants[0].of_due.unwrap(), 2.0));
        assert!(is_close(outcome.tenants[1].of_due.unwrap(), 2.0 / 3.0));
        assert!(is_close(outcome.largest_p99(), 7e6));
    }

    #[test]
    fn visit_shorter_than_a_second_is_scored_over_all_of_it() {
        let scene = spec::parse("1:16:64k,3:16:64k").unwrap();
        let mut visit = visit(&[50, 50], &[4, 7]);
        for (at, _) in &mut visit.series.moments {
            *at /= 10;
        }
        let outcome = Outcome::new(&scene, &visit, &reference(None, vec![None; 2]));
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
        let outcome = Outcome::new(
            &scene,
            &visit(&[700, 200], &[9, 3]),
            &reference(None, vec![None, Some(alone)]),
        );
        let got = outcome.tenants[1].alone.as_ref().unwrap();
        assert!(is_close(got.bytes, 0.5) && is_close(got.p99, 3.0));
        // Two thirds of 900 are 600, of which it could have 400.
        assert!(is_close(got.due, 2.0 / 3.0), "{}", got.due);
    }

    #[test]
    fn light_tenant_is_beside_the_shares_of_the_others() {
        let scenes = cases::of_clients();
        let scene = scenes.iter().find(|scene| scene.victim.is_some()).unwrap();
        let mb: Vec<u64> = [[100; 8].to_vec(), vec![3]].concat();
        let outcome = Outcome::new(scene, &visit(&mb, &[1; 9]), &reference(None, vec![None; 9]));
        assert!(is_close(outcome.share_error.unwrap(), 0.0));
        assert!(outcome.tenants[8].of_due.is_none());
        assert!(may_lack_depth(scene)[8]);
    }

    #[test]
    fn goals_are_met_where_no_visit_misses_them() {
        let scene = spec::parse("1:32:64k,1:1:4k@200").unwrap();
        let alone = Alone {
            bytes: 1e6,
            latency: Latency {
                p50_ns: 1_000_000,
                p99_ns: 2_000_000,
                ..Latency::default()
            },
        };
        let against = Reference {
            none: Some(Totals {
                all: 301e6,
                floods: 300e6,
            }),
            alone: vec![None, Some(alone)],
            flood_request: Some(Duration::from_millis(3)),
        };
        let of = |mb: u64, p99_ms: u64| Outcome::new(&scene, &visit(&[mb, 1], &[90, p99_ms]), &against);
        // The goals are 3 ms, 2 * 2 + 2 * 3 = 10 ms, and 270 MB/s.
        let met = of_case(&[of(270, 10), of(300, 8)]);
        assert!(
            is_close(met["light_p99_of_goal_worst"], 1.0) && is_close(met["goals_met"], 3.0),
            "{met:?}"
        );
        assert!(is_close(met["floods_vs_none_worst"], 0.9) && is_close(met["light_p99_ns"], 9e6));
        let missed = of_case(&[of(240, 8), of(300, 11)]);
        assert!(is_close(missed["goals_met"], 1.0), "{missed:?}");
        let scene = scene.with_goal(1, 20_000, 0.8);
        let outcome = Outcome::new(&scene, &visit(&[240, 1], &[90, 11]), &against);
        assert!(is_close(of_case(&[outcome])["goals_met"], 3.0));
    }

    #[test]
    fn of_several_visits_the_median_and_the_worst_are_shown() {
        let scene = spec::parse("1:16:64k,1:16:64k").unwrap();
        let visits = [[50, 50], [60, 40], [20, 20]].map(|mb| visit(&mb, &[4, 7]));
        let outcomes =
            visits.map(|visit| Outcome::new(&scene, &visit, &reference(Some(100e6), vec![None; 2])));
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
        assert_eq!(rows[1].by_round["of_due"], [1.0, 0.8, 1.0]);
        assert_eq!(rows[1].by_round["p99_ns"], [7e6; 3]);
        assert!(!rows[1].by_round.contains_key("of_alone"));
        assert_eq!(rounds_of_case(&outcomes)["bytes_vs_none"], [1.0, 1.0, 0.4]);
    }
}
