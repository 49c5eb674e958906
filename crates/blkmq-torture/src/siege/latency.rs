//! The test whether an attack slowed a tenant down: it compares the tenant's p99 during the attack with
//! that in the quiet window before.
//!
//! One window proves little on a shared machine, where p99 changes by more than the allowance
//! without any attack. So an attack is judged by the median of its pairs of windows, and the worst
//! pair is shown.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

/// A quiet window and the attack after it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pair {
    /// p99 of the quiet window.
    pub alone: Duration,
    /// p99 during the attack.
    pub beside: Duration,
    /// By how much `beside` may exceed twice `alone`.
    pub allowance: Duration,
}

/// All pairs of windows, by the attack's name.
#[derive(Debug, Default)]
pub struct Latencies {
    by_attack: BTreeMap<&'static str, Vec<Pair>>,
}

impl Pair {
    /// Returns the p99 during the attack, as a part of what is allowed: 2 × alone and the allowance.
    /// More than 1 is too much.
    pub fn part_of_allowed(&self) -> f64 {
        let allowed = 2 * self.alone + self.allowance;
        self.beside.as_secs_f64() / allowed.as_secs_f64()
    }
}

impl Latencies {
    /// Records a pair of windows.
    pub fn note(&mut self, attack: &'static str, pair: Pair) {
        self.by_attack.entry(attack).or_default().push(pair);
    }

    /// Returns the attacks during which the median p99 was longer than allowed, of those with at
    /// least three pairs of windows.
    pub fn too_long(&self) -> Vec<&'static str> {
        let judged = self
            .by_attack
            .iter()
            .filter(|(_, pairs)| pairs.len() >= PAIRS_MIN);
        let too_long = judged.filter(|(_, pairs)| median(pairs).part_of_allowed() > 1.0);
        too_long.map(|(attack, _)| *attack).collect()
    }

    /// Returns the median p99 of all windows with attacks, whatever the attack; none if there was no window. Few windows
    /// of a busy machine do not move it, a daemon that has everybody wait does.
    pub fn typical(&self) -> Option<Duration> {
        let mut all: Vec<Duration> = self
            .by_attack
            .values()
            .flatten()
            .map(|pair| pair.beside)
            .collect();
        all.sort_unstable();
        all.get(all.len().saturating_sub(1) / 2).copied()
    }
}

impl fmt::Display for Latencies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(
            f,
            "p99 of the tenant, median of the windows (alone, beside, part of what is allowed), and the worst window:"
        )?;
        for (attack, pairs) in &self.by_attack {
            let (typical, worst) = (median(pairs), worst(pairs));
            writeln!(
                f,
                "  {attack:<12} {:>2} windows  {:>7.2} ms {:>7.2} ms {:>5.2}   worst {:>7.2} ms {:>7.2} ms {:>5.2}",
                pairs.len(),
                ms(typical.alone),
                ms(typical.beside),
                typical.part_of_allowed(),
                ms(worst.alone),
                ms(worst.beside),
                worst.part_of_allowed(),
            )?;
        }
        Ok(())
    }
}

/// The time in milliseconds, for output.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// The median pair; of an even number the lower of the middle two.
fn median(pairs: &[Pair]) -> Pair {
    let mut sorted = pairs.to_vec();
    sorted.sort_by(|one, other| one.part_of_allowed().total_cmp(&other.part_of_allowed()));
    sorted[(sorted.len() - 1) / 2]
}

fn worst(pairs: &[Pair]) -> Pair {
    let worst = pairs.iter().copied();
    let worst = worst.max_by(|one, other| one.part_of_allowed().total_cmp(&other.part_of_allowed()));
    worst.expect("no attack without a window")
}

/// An attack with fewer pairs of windows is not judged.
const PAIRS_MIN: usize = 3;

#[cfg(test)]
mod tests {
    use super::*;

    fn pair(alone_us: u64, beside_us: u64) -> Pair {
        Pair {
            alone: Duration::from_micros(alone_us),
            beside: Duration::from_micros(beside_us),
            allowance: Duration::from_millis(1),
        }
    }

    #[test]
    fn one_bad_window_of_three_is_chance_and_two_are_not() {
        let mut latencies = Latencies::default();
        for pair in [pair(100, 1100), pair(100, 9000), pair(100, 300)] {
            latencies.note("one", pair);
        }
        for pair in [pair(100, 1300), pair(100, 9000), pair(100, 300)] {
            latencies.note("two", pair);
        }
        latencies.note("seldom", pair(100, 9000));
        assert_eq!(latencies.too_long(), ["two"]);
    }

    #[test]
    fn typical_p99_is_that_of_most_windows_of_all_attacks() {
        let mut latencies = Latencies::default();
        assert_eq!(latencies.typical(), None);
        latencies.note("one", pair(100, 70_000));
        latencies.note("one", pair(100, 300));
        latencies.note("two", pair(100, 200));
        assert_eq!(latencies.typical(), Some(Duration::from_micros(300)));
        // Those that wait as long without an attack: no comparison of the two finds it.
        let slow = pair(60_000, 60_000);
        (0..3).for_each(|_| latencies.note("three", slow));
        assert!(latencies.too_long().is_empty());
        assert_eq!(latencies.typical(), Some(slow.beside));
    }
}
