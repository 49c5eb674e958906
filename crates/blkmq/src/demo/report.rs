//! The report of the demo: figures, and statements about them. Each statement follows from the figures.

use std::fmt;

use super::client::Sample;
use super::scene::{Rule, WEIGHTED};

/// The measured tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tenant {
    /// The light tenant without a neighbour.
    Alone,
    /// The light tenant beside the flooding one.
    Light,
    /// The one that pauses after each read, beside both.
    Pausing,
    /// The flooding tenant.
    Flooding,
    /// The tenant of this index among those with weights.
    Weighted(usize),
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Alone => "light, alone",
            Self::Light => "light",
            Self::Pausing => "pausing",
            Self::Flooding => "flooding",
            Self::Weighted(place) => WEIGHTED[*place].name,
        })
    }
}

/// One run of the load.
pub(super) struct Run {
    pub(super) rule: Rule,
    pub(super) tenants: Vec<(Tenant, Sample)>,
}

impl Sample {
    fn iops(&self) -> f64 {
        if self.seconds > 0.0 {
            self.latency.len() as f64 / self.seconds
        } else {
            0.0
        }
    }

    fn mb_per_s(&self) -> f64 {
        self.iops() * f64::from(self.block_bytes) / 1e6
    }

    /// The latency that the share `1 - 1 / one_in` does not exceed, if there were enough requests to tell.
    fn latency_ns(&self, one_in: u64) -> Option<u64> {
        (self.latency.len() >= one_in).then(|| self.latency.all_but(one_in))
    }
}

/// Draws the table: a line for each tenant of each run.
pub(super) fn table(runs: &[Run]) -> String {
    let mut text = line(["shared by", "tenant", "IOPS", "MB/s", "p50", "p99", "p99.9"]);
    for run in runs {
        for (tenant, sample) in &run.tenants {
            let latency = |one_in| sample.latency_ns(one_in).map_or_else(|| "-".into(), time);
            text += &line([
                run.rule.name(),
                &tenant.to_string(),
                &format!("{:.0}", sample.iops()),
                &format!("{:.1}", sample.mb_per_s()),
                &latency(2),
                &latency(100),
                &latency(1000),
            ]);
        }
    }
    text
}

fn line([scheduler, tenant, iops, rate, p50, p99, p999]: [&str; 7]) -> String {
    format!("{scheduler:<12} {tenant:<13} {iops:>8} {rate:>8} {p50:>9} {p99:>9} {p999:>9}\n")
}

/// Draws the table of tenants with weights: a line for each tenant, a column for each run.
pub(super) fn shares(runs: &[Run]) -> String {
    let total_weight: u32 = WEIGHTED.iter().map(|tenant| u32::from(tenant.weight)).sum();
    let mut text = format!("{:<13} {:>9} {:>6} {:>7}", "tenant", "in flight", "weight", "due");
    for run in runs {
        text += &format!("  {:>18}", run.rule.name());
    }
    for (place, tenant) in WEIGHTED.into_iter().enumerate() {
        let due = 100.0 * f64::from(tenant.weight) / f64::from(total_weight);
        text += &format!(
            "\n{:<13} {:>9} {:>6} {due:>5.1} %",
            tenant.name, tenant.depth, tenant.weight
        );
        for run in runs {
            let rate = |tenant| find(run, tenant).map_or(0.0, Sample::mb_per_s);
            let total: f64 = (0..WEIGHTED.len())
                .map(|place| rate(Tenant::Weighted(place)))
                .sum();
            let mine = rate(Tenant::Weighted(place));
            text += &format!("  {mine:>5.0} MB/s {:>5.1} %", 100.0 * mine / total.max(1e-9));
        }
    }
    text
}

/// Returns the findings: the light tenant's tail, and what the flooding tenant gets beside it.
/// `capacity` is the drive's throughput for the flooding tenant, in MB/s, if that is known.
pub(super) fn findings(runs: &[Run], capacity: Option<f64>) -> String {
    let or_else = |found: Option<String>| found.unwrap_or_else(|| "too few requests to tell".into());
    let mut text = format!(
        "What to look at:\n  the light tenant's p99: {}\n  the pausing tenant's p99: {}\n  the flooding tenant's throughput: {}",
        or_else(tails(runs)),
        or_else(tails_of_pausing(runs)),
        or_else(rates(runs)),
    );
    let uncapped = runs.iter().filter(|run| !matches!(run.rule, Rule::Caps { .. }));
    let reached = uncapped.filter_map(|run| Some((flood_rate(run)?, run.rule.name())));
    let least = reached.min_by(|(a, _), (b, _)| a.total_cmp(b));
    if let (Some(capacity), Some((rate, rule))) = (capacity, least)
        && rate < 0.8 * capacity
    {
        text += &format!(
            "\nWith {rule} the flood reached only {rate:.0} of the drive's {capacity:.0} MB/s: this machine is busy, or the \
             scheduler holds it back.\nThen the drive is idle in between, and the light tenant's median says little."
        );
    }
    text
}

fn tails(runs: &[Run]) -> Option<String> {
    let (alone, rest) = runs.split_first()?;
    let alone_ns = p99(alone, Tenant::Alone)?;
    let (first, others) = rest.split_first()?;
    let (first_ns, first_name) = (p99(first, Tenant::Light)?, first.rule.name());
    let mut text = format!(
        "{} alone; {first_name} {} ({})",
        time(alone_ns),
        time(first_ns),
        compare(first_ns, alone_ns, "alone"),
    );
    for run in others {
        text += &format!("; {}", tail_beside(run, Tenant::Light, first_ns, first_name)?);
    }
    Some(text)
}

fn tails_of_pausing(runs: &[Run]) -> Option<String> {
    let (first, others) = runs.split_first()?.1.split_first()?;
    let (first_ns, first_name) = (p99(first, Tenant::Pausing)?, first.rule.name());
    let mut text = format!("{first_name} {}", time(first_ns));
    for run in others {
        text += &format!("; {}", tail_beside(run, Tenant::Pausing, first_ns, first_name)?);
    }
    Some(text)
}

fn tail_beside(run: &Run, who: Tenant, first_ns: u64, first_name: &str) -> Option<String> {
    let ns = p99(run, who)?;
    let relation = compare(ns, first_ns, first_name);
    Some(format!("{} {} ({relation})", run.rule.name(), time(ns)))
}

fn p99(run: &Run, who: Tenant) -> Option<u64> {
    find(run, who)?.latency_ns(100)
}

fn rates(runs: &[Run]) -> Option<String> {
    let (first, others) = runs.split_first()?.1.split_first()?;
    let first_rate = flood_rate(first)?;
    let mut text = format!("{} {first_rate:.0} MB/s", first.rule.name());
    for run in others {
        let rate = flood_rate(run)?;
        let percent = (rate / first_rate - 1.0) * 100.0;
        text += &format!("; {} {rate:.0} MB/s ({percent:+.0} %)", run.rule.name());
    }
    Some(text)
}

/// The throughput of the flooding tenant, in bytes per second.
pub(super) fn flood_bytes(run: &Run) -> f64 {
    find(run, Tenant::Flooding).map_or(0.0, |sample| sample.mb_per_s() * 1e6)
}

fn flood_rate(run: &Run) -> Option<f64> {
    let sample = find(run, Tenant::Flooding)?;
    (sample.latency.len() >= 100).then(|| sample.mb_per_s())
}

fn find(run: &Run, who: Tenant) -> Option<&Sample> {
    run.tenants
        .iter()
        .find(|(tenant, _)| *tenant == who)
        .map(|(_, sample)| sample)
}

/// Returns the relation of one latency to another. One run does not prove a small difference, so
/// below a fifth there is none.
fn compare(ns: u64, base_ns: u64, whom: &str) -> String {
    let ratio = ns as f64 / base_ns.max(1) as f64;
    match ratio {
        r if r >= 1.2 => format!("{r:.1} times longer than {whom}"),
        r if r <= 1.0 / 1.2 => format!("{:.1} times shorter than {whom}", 1.0 / r.max(1e-9)),
        _ => format!("about as {whom}"),
    }
}

/// Writes a latency with three digits.
fn time(ns: u64) -> String {
    let (value, unit) = if ns >= 1_000_000 {
        (ns as f64 / 1e6, "ms")
    } else {
        (ns as f64 / 1e3, "us")
    };
    match value {
        v if v >= 99.95 => format!("{v:.0} {unit}"),
        v if v >= 9.995 => format!("{v:.1} {unit}"),
        v => format!("{v:.2} {unit}"),
    }
}

#[cfg(test)]
mod tests {
    use blkmq_core::sched;

    use super::super::latencies::Latencies;
    use super::*;

    fn sample(count: u64, each_us: u64, block_bytes: u32) -> Sample {
        let mut latency = Latencies::default();
        (0..count).for_each(|_| latency.record(each_us * 1000));
        Sample {
            latency,
            seconds: 2.0,
            block_bytes,
        }
    }

    fn runs(light_us: [u64; 2], flood: [u64; 2]) -> Vec<Run> {
        let both = |at: usize| {
            vec![
                (Tenant::Light, sample(1000, light_us[at], 4096)),
                (Tenant::Pausing, sample(200, light_us[at], 4096)),
                (Tenant::Flooding, sample(flood[at], 9000, 65536)),
            ]
        };
        let alone = vec![(Tenant::Alone, sample(5000, 200, 4096))];
        let rules = [sched::NONE, sched::NONE, sched::MQ_DEADLINE].map(Rule::Scheduler);
        let tenants = [alone, both(0), both(1)];
        let run = |(rule, tenants)| Run { rule, tenants };
        rules.into_iter().zip(tenants).map(run).collect()
    }

    #[test]
    fn verdict_follows_from_the_figures_in_both_directions() {
        let text = findings(&runs([10_000, 2_500], [10_000, 9_000]), None);
        assert!(
            text.contains("pausing tenant's p99: none 10.0 ms; mq-deadline 2.50 ms (4.0 times shorter"),
            "{text}"
        );
        assert!(
            text.contains("4.0 times shorter than none") && text.contains("(-10 %)"),
            "{text}"
        );
        let text = findings(&runs([2_500, 10_000], [9_000, 9_900]), None);
        assert!(
            text.contains("4.0 times longer than none") && text.contains("(+10 %)"),
            "{text}"
        );
    }

    #[test]
    fn small_difference_is_not_called_one() {
        let text = findings(&runs([2_500, 2_400], [9_000, 9_000]), None);
        assert!(text.contains("about as none"), "{text}");
    }

    #[test]
    fn flood_that_the_drive_could_take_more_of_is_called_that() {
        let runs = runs([10_000, 2_500], [10_000, 9_000]);
        // 9000 writes of 64 KiB in two seconds are 295 MB/s.
        assert!(!findings(&runs, Some(360.0)).contains("busy"));
        let text = findings(&runs, Some(380.0));
        assert!(
            text.contains("With mq-deadline the flood reached only 295 of the drive's 380 MB/s"),
            "{text}"
        );
    }

    #[test]
    fn percentile_of_too_few_requests_is_not_shown() {
        let few = [Run {
            rule: Rule::Scheduler(sched::NONE),
            tenants: vec![(Tenant::Alone, sample(99, 200, 4096))],
        }];
        let table = table(&few);
        let row = table.lines().nth(1).unwrap();
        assert!(row.contains("200 us") && row.ends_with("-         -"), "{row}");
        assert!(findings(&few, None).contains("too few"));
    }

    #[test]
    fn throughput_and_latency_are_written_with_their_units() {
        let table = table(&runs([10_000, 2_500], [10_000, 9_000]));
        assert!(table.contains("327.7") && table.contains("10.0 ms"), "{table}");
        assert_eq!(
            [time(999), time(99_960), time(1_234_000)],
            ["1.00 us", "100 us", "1.23 ms"]
        );
    }
    #[test]
    fn shares_stand_beside_what_is_due() {
        let tenants = [300, 200, 250, 250].into_iter().enumerate();
        let tenants = tenants.map(|(place, count)| (Tenant::Weighted(place), sample(count, 100, 4096)));
        let run = Run {
            rule: Rule::Scheduler(sched::NONE),
            tenants: tenants.collect(),
        };
        let text = shares(&[run]);
        let last = text.lines().last().unwrap();
        assert!(
            last.starts_with("platinum")
                && last.contains(" 4 ")
                && last.contains("53.3 %")
                && last.ends_with("25.0 %"),
            "{text}"
        );
    }
}
