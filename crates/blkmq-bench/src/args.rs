//! The command-line options that all benches share, and the time that benches take. `engine` and `nbd` add
//! their own options to these and pass the resulting [`Plan`] to `rounds`.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Result, ensure};
use blkmq_core::sched::{ElevatorType, Registry, UnknownElevator};

use crate::facts;

/// The options that every bench has.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct BenchArgs {
    /// Measure each point for N seconds in each round [default: 1; 2 with --json]
    #[arg(long, value_name = "N")]
    pub seconds: Option<f64>,
    /// Visit all points N times, sides alternating; medians and spread are reported [default: 5; 9 with --json]
    #[arg(long, value_name = "N", visible_alias = "visits")]
    pub rounds: Option<u32>,
    /// Also write the results to FILE as JSON (the form is documented in docs/benchmarks); refused on a busy machine
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// Write the JSON whatever the load average is
    #[arg(long)]
    pub force: bool,
    /// Also draw the results to FILE as an SVG picture
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// A first impression in under 20 seconds: one short round of every point
    #[arg(long)]
    pub quick: bool,
}

/// Finds an elevator by its name.
pub(crate) fn elevator(name: &str) -> Result<&'static ElevatorType, UnknownElevator> {
    Registry::default().choose(name)
}

/// How long a bench measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// How often each point is visited, at least 1.
    pub rounds: u32,
    /// How long each visit measures.
    pub window: Duration,
    /// How long the load runs before it is measured.
    pub warm_up: Duration,
}

impl BenchArgs {
    /// Determines the times for `points` points (sides counted), each of which needs `set_up`
    /// before its load can run.
    ///
    /// # Errors
    /// If a number from the user is out of range, or a report is to be written and the machine is busy.
    pub fn plan(&self, points: usize, set_up: Duration) -> Result<Plan> {
        if self.is_report() && !self.force {
            is_idle(facts::load())?;
        }
        let rounds = self.rounds.unwrap_or_else(|| self.rounds_default());
        ensure!(
            (1..=ROUNDS_MAX).contains(&rounds),
            "--rounds {rounds} rejected: must be from 1 to {ROUNDS_MAX}"
        );
        let seconds = self.seconds.unwrap_or_else(|| {
            if self.quick {
                quick_seconds(points * rounds as usize, set_up)
            } else if self.json.is_some() {
                REPORT_SECONDS
            } else {
                SECONDS_DEFAULT
            }
        });
        ensure!(
            (SECONDS_MIN..=SECONDS_MAX).contains(&seconds),
            "--seconds {seconds} rejected: must be from {SECONDS_MIN} to {SECONDS_MAX}"
        );
        let window = Duration::from_secs_f64(seconds);
        Ok(Plan {
            rounds,
            window,
            warm_up: warm_up(window),
        })
    }
}

impl BenchArgs {
    /// Says whether the JSON is kept: what goes to another bench that started this one is not.
    fn is_report(&self) -> bool {
        self.json
            .as_deref()
            .is_some_and(|file| file != Path::new(TO_ANOTHER_BENCH))
    }

    fn rounds_default(&self) -> u32 {
        match (self.quick, &self.json) {
            (true, _) => 1,
            (false, Some(_)) => REPORT_ROUNDS,
            (false, None) => ROUNDS_DEFAULT,
        }
    }
}

/// Checks the load average before a run whose figures are to be evidence.
fn is_idle(load: f64) -> Result<()> {
    ensure!(
        load < LOAD_MAX,
        "a report rejected: the load average is {load:.2}, must be below {LOAD_MAX}; wait until other programs have \
         ended, or add --force"
    );
    Ok(())
}

impl Plan {
    /// Returns how long `points` points take, each with `set_up` before it.
    pub fn total(&self, points: usize, set_up: Duration) -> Duration {
        (self.window + self.warm_up + set_up) * (points as u32 * self.rounds)
    }
}

/// The longest window with which `visits` visits stay within the time of a quick run.
fn quick_seconds(visits: usize, set_up: Duration) -> f64 {
    let each = QUICK_BUDGET.as_secs_f64() / visits.max(1) as f64 - set_up.as_secs_f64();
    (each / (1.0 + WARM_UP_SHARE)).clamp(QUICK_SECONDS_MIN, QUICK_SECONDS_MAX)
}

/// A tenth of the window, within bounds: long enough to fill caches and start sleeping cores.
fn warm_up(window: Duration) -> Duration {
    window
        .mul_f64(WARM_UP_SHARE)
        .clamp(Duration::from_millis(5), Duration::from_millis(200))
}

/// Where a bench writes its JSON for the bench that started it.
pub(crate) const TO_ANOTHER_BENCH: &str = "/dev/stderr";
const ROUNDS_DEFAULT: u32 = 5;
/// What a report has at least.
pub(crate) const REPORT_ROUNDS: u32 = 9;
const REPORT_SECONDS: f64 = 2.0;
/// Over one minute.
const LOAD_MAX: f64 = 0.5;
const ROUNDS_MAX: u32 = 1000;
const SECONDS_DEFAULT: f64 = 1.0;
const SECONDS_MIN: f64 = 0.01;
const SECONDS_MAX: f64 = 3600.0;
const QUICK_BUDGET: Duration = Duration::from_secs(16);
const QUICK_SECONDS_MIN: f64 = 0.05;
const QUICK_SECONDS_MAX: f64 = 0.5;
const WARM_UP_SHARE: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    const SET_UP: Duration = Duration::from_millis(50);

    #[test]
    fn quick_run_stays_under_twenty_seconds_with_many_points() {
        let quick = BenchArgs {
            quick: true,
            ..BenchArgs::default()
        };
        for points in [1, 30, 60, 90] {
            let plan = quick.plan(points, SET_UP).unwrap();
            let total = plan.total(points, SET_UP);
            assert!(total < Duration::from_secs(20), "{points} points: {total:?}");
        }
    }

    #[test]
    fn arguments_of_the_user_go_before_quick() {
        let args = BenchArgs {
            seconds: Some(2.0),
            rounds: Some(3),
            quick: true,
            ..BenchArgs::default()
        };
        let plan = args.plan(1000, SET_UP).unwrap();
        assert_eq!((plan.rounds, plan.window), (3, Duration::from_secs(2)));
    }

    #[test]
    fn report_has_nine_rounds_of_two_seconds_and_no_other_load() {
        let report = BenchArgs {
            json: Some("report.json".into()),
            force: true,
            ..BenchArgs::default()
        };
        let plan = report.plan(1, SET_UP).unwrap();
        assert_eq!((plan.rounds, plan.window), (9, Duration::from_secs(2)));
        let plan = BenchArgs::default().plan(1, SET_UP).unwrap();
        assert_eq!((plan.rounds, plan.window), (5, Duration::from_secs(1)));
        assert!(is_idle(0.49).is_ok());
        let error = is_idle(0.5).unwrap_err().to_string();
        assert!(
            error.contains("load average is 0.50, must be below 0.5"),
            "{error}"
        );
    }

    #[test]
    fn numbers_out_of_range_are_refused_with_the_range() {
        let refused = |args: BenchArgs| args.plan(1, SET_UP).unwrap_err().to_string();
        let rounds = BenchArgs {
            rounds: Some(0),
            ..BenchArgs::default()
        };
        assert!(refused(rounds).contains("from 1 to 1000"));
        for seconds in [0.0, -1.0, f64::NAN, 1e9] {
            let args = BenchArgs {
                seconds: Some(seconds),
                ..BenchArgs::default()
            };
            assert!(refused(args).contains("from 0.01 to 3600"));
        }
    }
}
