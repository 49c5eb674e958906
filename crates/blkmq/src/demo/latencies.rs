//! The latencies of one tenant of the demo, each kept, so that its percentiles are exact. A client
//! records them, the report reads them; a run lasts seconds, so there are few.

/// Latencies in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct Latencies(Vec<u64>);

impl Latencies {
    pub(super) fn record(&mut self, ns: u64) {
        self.0.push(ns);
    }

    pub(super) fn clear(&mut self) {
        self.0.clear();
    }

    pub(super) fn len(&self) -> u64 {
        self.0.len() as u64
    }

    /// Returns the latency that the share `1 - 1 / one_in` of all does not exceed; 0 if there is none.
    pub(super) fn all_but(&self, one_in: u64) -> u64 {
        let mut sorted = self.0.clone();
        let rank = self.len() - self.len() / one_in;
        let Some(place) = rank.checked_sub(1) else {
            return 0;
        };
        *sorted.select_nth_unstable(place as usize).1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latencies_have_exact_percentiles() {
        let mut latencies = Latencies::default();
        assert_eq!((latencies.len(), latencies.all_but(2)), (0, 0));
        (1..=1000).rev().for_each(|ns| latencies.record(ns));
        assert_eq!(latencies.len(), 1000);
        let found = [2, 100, 1000].map(|one_in| latencies.all_but(one_in));
        assert_eq!(found, [500, 990, 999]);
        latencies.clear();
        assert_eq!(latencies.len(), 0);
    }
}
