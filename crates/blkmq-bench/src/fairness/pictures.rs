//! The pictures of how tenants share a drive: the distribution of the light tenant's latency, a curve for
//! each side; and each tenant's share over time, a panel for each side.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result};

use super::score::Series;
use crate::histogram::Histogram;
use crate::plot::{Axis, Curve, Panel, draw};
use crate::rounds::Latency;

/// The data of the visits to each case, by side.
#[derive(Default)]
pub(super) struct Pictures {
    latencies: BTreeMap<String, Vec<(String, Distribution)>>,
    shares: BTreeMap<String, Vec<(String, Vec<f64>, Series)>>,
}

/// A distribution of latencies.
enum Distribution {
    Whole(Histogram),
    /// Of sides that report only percentiles, the latest ones.
    Percentiles(Latency),
}

impl Distribution {
    /// Points of the curve: the logarithm of the latency in µs, and that of the part of I/Os above
    /// it, negated.
    fn points(&self) -> Vec<(f64, f64)> {
        let at = |ns: u64| (ns.max(1) as f64 / 1000.0).log10();
        match self {
            Self::Whole(histogram) => (1..=60)
                .map(|step| f64::from(step) / 20.0)
                .map(|nines| (at(histogram.quantile(1.0 - 10f64.powf(-nines))), nines))
                .collect(),
            Self::Percentiles(latency) => vec![
                (at(latency.p50_ns), 2f64.log10()),
                (at(latency.p99_ns), 2.0),
                (at(latency.p999_ns), 3.0),
            ],
        }
    }
}

impl Pictures {
    /// Records the latencies of a visit.
    pub(super) fn note_latency(&mut self, case: &str, side: &str, latency: &Histogram) {
        let of_case = self.latencies.entry(case.to_owned()).or_default();
        match of_case.iter_mut().find(|known| known.0 == side) {
            Some((_, Distribution::Whole(all))) => all.merge(latency),
            _ => of_case.push((side.to_owned(), Distribution::Whole(latency.clone()))),
        }
    }

    /// The same for a side that reports only percentiles.
    pub(super) fn note_percentiles(&mut self, case: &str, side: &str, latency: Latency) {
        let of_case = self.latencies.entry(case.to_owned()).or_default();
        of_case.retain(|known| known.0 != side);
        of_case.push((side.to_owned(), Distribution::Percentiles(latency)));
    }

    /// Records how much each tenant moved over time, and its due.
    pub(super) fn note_shares(&mut self, case: &str, side: &str, due: &[f64], series: &Series) {
        let of_case = self.shares.entry(case.to_owned()).or_default();
        of_case.retain(|known| known.0 != side);
        of_case.push((side.to_owned(), due.to_vec(), series.clone()));
    }

    /// Draws all pictures into a directory, which is made if necessary.
    pub(super) fn write(&self, dir: &Path) -> Result<()> {
        fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
        let put = |case: &str, what: &str, svg: &str| {
            let name = case.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
            let file = dir.join(format!("{name}-{what}.svg"));
            fs::write(&file, svg).with_context(|| format!("writing {}", file.display()))
        };
        for (case, sides) in &self.latencies {
            let title = format!("{case}: how many of the light tenant's I/Os took no longer");
            put(case, "latency", &draw(&title, &[latency_panel(sides)]))?;
        }
        for (case, sides) in &self.shares {
            let title = format!("{case}: share of the bytes, over {} ms", STEP.as_millis());
            let panels: Vec<Panel> = sides.iter().map(share_panel).collect();
            put(case, "shares", &draw(&title, &panels))?;
        }
        Ok(())
    }
}

fn latency_panel(sides: &[(String, Distribution)]) -> Panel {
    let curve = |(index, (side, distribution)): (usize, &(String, Distribution))| Curve {
        name: side.clone(),
        colour: index,
        is_dashed: matches!(distribution, Distribution::Percentiles(_)),
        points: distribution.points(),
    };
    let curves: Vec<Curve> = sides.iter().enumerate().map(curve).collect();
    let ends = curves.iter().flat_map(|curve| &curve.points).map(|point| point.0);
    let (low, high) = ends.fold((f64::MAX, f64::MIN), |(low, high), x| (low.min(x), high.max(x)));
    let (low, high) = (low.floor(), high.ceil().max(low.floor() + 1.0));
    let names = [
        "1 µs", "10 µs", "100 µs", "1 ms", "10 ms", "100 ms", "1 s", "10 s",
    ];
    let decades = (0..)
        .zip(names)
        .map(|(power, name)| (f64::from(power), name.to_owned()));
    let nines = [
        (0.0, "0"),
        (2f64.log10(), "50 %"),
        (1.0, "90 %"),
        (2.0, "99 %"),
        (3.0, "99.9 %"),
    ];
    Panel {
        title: "dashed: percentiles alone are known".to_owned(),
        x: Axis {
            low,
            high,
            ticks: decades.filter(|(at, _)| (low..=high).contains(at)).collect(),
        },
        y: Axis {
            low: 0.0,
            high: 3.0,
            ticks: nines.map(|(at, name)| (at, name.to_owned())).to_vec(),
        },
        curves,
    }
}

/// Each tenant's share over time, and, dashed, its due.
fn share_panel((side, due, series): &(String, Vec<f64>, Series)) -> Panel {
    let begin = series.moments.first().map_or(Duration::ZERO, |moment| moment.0);
    let end = series.moments.last().map_or(Duration::ZERO, |moment| moment.0);
    let seconds = end.saturating_sub(begin).as_secs_f64().max(1e-3);
    let all: f64 = due.iter().sum();
    let mut curves = Vec::new();
    for (tenant, due) in due.iter().enumerate() {
        curves.push(Curve {
            name: format!("tenant {}", tenant + 1),
            colour: tenant,
            is_dashed: false,
            points: series.shares_of(tenant, STEP),
        });
        curves.push(Curve {
            name: String::new(),
            colour: tenant,
            is_dashed: true,
            points: vec![(0.0, due / all), (seconds, due / all)],
        });
    }
    let second = |second: u32| (f64::from(second), format!("{second} s"));
    Panel {
        title: side.clone(),
        x: Axis {
            low: 0.0,
            high: seconds,
            ticks: (0..=seconds as u32).map(second).collect(),
        },
        y: Axis {
            low: 0.0,
            high: 1.0,
            ticks: [0.0, 0.25, 0.5, 0.75, 1.0]
                .map(|part| (part, format!("{} %", part * 100.0)))
                .to_vec(),
        },
        curves,
    }
}

/// The interval over which a share is taken.
const STEP: Duration = Duration::from_millis(100);
