//! Percentiles of latencies, exactly: of all of them, sorted.

use std::time::Duration;

/// Returns the 99th percentile; 0 if there are no values.
pub fn p99(mut all: Vec<Duration>) -> Duration {
    all.sort_unstable();
    let index = (all.len() * 99).div_ceil(100).saturating_sub(1);
    all.get(index).copied().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn p99_ignores_one_of_a_hundred_and_sees_two() {
        let with = |slow: usize| {
            let all = (0..200).map(|index| Duration::from_millis(if index < slow { 50 } else { 1 }));
            p99(all.collect())
        };
        let (fast, slow) = (Duration::from_millis(1), Duration::from_millis(50));
        assert_eq!((with(2), with(3)), (fast, slow));
        assert_eq!(p99(Vec::new()), Duration::ZERO);
    }
}
