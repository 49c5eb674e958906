//! The bench of the tenants of one cluster: three images behind one daemon, with weights 1, 2 and 4, and the
//! same load on each.

use std::time::Duration;

use anyhow::{Context, Result};

use super::RbdArgs;
use super::sides::{ours, through_nbd};
use crate::args::Plan;
use crate::fio;
use crate::rounds::Sample;
use crate::server::Running;
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// Runs the tenants together. `share_error_percent` is how far the worst is from its part.
pub(super) fn measure(args: &RbdArgs, sched: &str, plan: &Plan) -> Result<Sample> {
    let dir = Scratch::new();
    let socket = dir.path("s");
    let mut command = ours()?;
    command.args(["--nbd", &format!("unix:{}", socket.display())]);
    for (number, weight) in (1..).zip(WEIGHTS) {
        let (name, image) = (format!("t{number}"), format!("{}-{number}", args.image));
        command
            .args(["--disk", &format!("{},sched={sched}", args.disk(&name, &image))])
            .args(["--group", &format!("/{name},weight={weight}")]);
    }
    let running = Running::start(command, dir, socket)?;
    let before = Usage::of(running.pid())?;
    let samples = std::thread::scope(|scope| {
        let tenants: Vec<_> = (1..=WEIGHTS.len())
            .map(|number| {
                let mut options = through_nbd(&format!("t{number}"), running.place());
                options.extend(["--rw=randread", "--bs=64k", "--iodepth=16"].map(str::to_owned));
                scope.spawn(move || fio::run(&options, RAMP, plan.window))
            })
            .collect();
        let ended = tenants
            .into_iter()
            .map(|tenant| tenant.join().expect("fio's thread does not panic"));
        ended.collect::<Result<Vec<Sample>>>()
    });
    let samples = samples.with_context(|| running.last_words())?;
    let iops: Vec<f64> = samples.iter().map(Sample::iops).collect();
    let all: Vec<u64> = samples.iter().map(|sample| sample.ios).collect();
    Ok(Sample {
        ios: all.iter().sum(),
        elapsed: plan.window,
        latency: samples
            .iter()
            .map(|sample| sample.latency)
            .max_by_key(|latency| latency.p99_ns)
            .unwrap_or_default(),
        usage: Usage::of(running.pid())? - before,
        client: None,
        figures: vec![("share_error_percent", 100.0 * worst_error(&iops))],
    })
}

/// How far the worst tenant's part is from what its weight says, of that.
fn worst_error(rates: &[f64]) -> f64 {
    let (total, weights) = (rates.iter().sum::<f64>(), f64::from(WEIGHTS.iter().sum::<u32>()));
    let errors = rates.iter().zip(WEIGHTS).map(|(rate, weight)| {
        let due = total * f64::from(weight) / weights;
        (rate / due - 1.0).abs()
    });
    errors.fold(0.0, f64::max)
}

const WEIGHTS: [u32; 3] = [100, 200, 400];
/// Until all three are there.
const RAMP: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_error_is_of_what_was_due() {
        assert!(worst_error(&[10.0, 20.0, 40.0]) < 1e-9);
        // A third each: the heaviest has 1/3 of 4/7, the lightest 1/3 of 1/7.
        assert!((worst_error(&[10.0, 10.0, 10.0]) - 4.0 / 3.0).abs() < 1e-9);
    }
}
