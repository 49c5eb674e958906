//! Statistics of the latest N observations: the smallest, the largest, the median, the mean. `low` and
//! `oversleep` use it. Order statistics of a sliding window need no assumption about the distribution: of
//! N + 1 exchangeable values the newest is the smallest with probability 1 / (N + 1).

/// The latest `N` values, in order of arrival and in order of size.
#[derive(Clone, Debug)]
pub(super) struct Recent<const N: usize> {
    arrived: [u32; N],
    sorted: [u32; N],
    len: usize,
    /// Where the next value goes; the oldest value, once full.
    next: usize,
    sum: u64,
}

impl<const N: usize> Recent<N> {
    pub(super) const fn new() -> Self {
        Self {
            arrived: [0; N],
            sorted: [0; N],
            len: 0,
            next: 0,
            sum: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Adds a value, and removes the oldest if there are `N`.
    pub(super) fn push(&mut self, value: u32) {
        if self.len == N {
            self.take_out(self.arrived[self.next]);
        }
        let at = self.sorted[..self.len].partition_point(|&other| other < value);
        self.sorted.copy_within(at..self.len, at + 1);
        self.sorted[at] = value;
        self.len += 1;
        self.sum += u64::from(value);
        self.arrived[self.next] = value;
        self.next = (self.next + 1) % N;
    }

    /// The smallest value; 0 if there is none.
    pub(super) fn smallest(&self) -> u32 {
        self.sorted[0]
    }

    /// The largest value but `rank`; 0 if there are no more than `rank`.
    pub(super) fn largest(&self, rank: usize) -> u32 {
        let at = self.len.checked_sub(rank + 1);
        at.map_or(0, |at| self.sorted[at])
    }

    /// The median; of two, the larger.
    pub(super) fn middle(&self) -> u32 {
        self.sorted[self.len / 2]
    }

    pub(super) fn mean(&self) -> u32 {
        self.sum.checked_div(self.len as u64).unwrap_or(0) as u32
    }

    fn take_out(&mut self, value: u32) {
        let at = self.sorted[..self.len].partition_point(|&other| other < value);
        debug_assert_eq!(self.sorted[at], value, "what arrived is in the sorted list");
        self.sorted.copy_within(at + 1..self.len, at);
        self.len -= 1;
        self.sum -= u64::from(value);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn window_agrees_with_sorting_the_latest_values(values in prop::collection::vec(0u32..50, 1..100)) {
            let mut recent = Recent::<8>::new();
            for (count, &value) in values.iter().enumerate() {
                recent.push(value);
                let start = (count + 1).saturating_sub(8);
                let mut latest = values[start..=count].to_vec();
                latest.sort_unstable();
                let n = latest.len();
                prop_assert_eq!(recent.len(), n);
                prop_assert_eq!(recent.smallest(), latest[0]);
                prop_assert_eq!(recent.largest(0), latest[n - 1]);
                prop_assert_eq!(recent.middle(), latest[n / 2]);
                prop_assert_eq!(recent.mean(), latest.iter().sum::<u32>() / n as u32);
            }
        }
    }
}
