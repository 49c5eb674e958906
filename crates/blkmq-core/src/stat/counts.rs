//! A group's statistics as a list of numbers, from which another process continues counting.

use super::GroupStats;

impl GroupStats {
    /// All monotone counters, in the order that [`Self::from_counts`] expects.
    pub fn counts(&self) -> Vec<u64> {
        let mut counts = Vec::new();
        let mut copy = *self;
        copy.each_count(&mut |count| counts.push(*count));
        counts
    }

    /// Statistics with these counts; none if the number of counts is wrong.
    pub fn from_counts(counts: &[u64]) -> Option<Self> {
        let (mut stats, mut rest) = (Self::default(), counts.iter());
        let mut is_complete = true;
        stats.each_count(&mut |count| match rest.next() {
            Some(found) => *count = *found,
            None => is_complete = false,
        });
        (is_complete && rest.next().is_none()).then_some(stats)
    }

    fn each_count(&mut self, visit: &mut dyn FnMut(&mut u64)) {
        self.kinds.iter_mut().for_each(|kind| kind.each(visit));
        self.queue.each(visit);
        let others = [
            &mut self.group_wait_ns,
            &mut self.empty_ns,
            &mut self.idle_ns,
            &mut self.turn_ns,
            &mut self.dequeues,
        ];
        others.into_iter().for_each(&mut *visit);
        self.wait.each(visit);
        self.device.each(visit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counts_are_read_again_each_at_its_place_and_no_other_number_of_them() {
        let places = GroupStats::default().counts().len() as u64;
        let counts: Vec<u64> = (1..=places).collect();
        let stats = GroupStats::from_counts(&counts).unwrap();
        assert_eq!(stats.counts(), counts);
        assert_eq!((stats.queued, stats.total().inserted > 0), (0, true));
        assert_eq!(GroupStats::from_counts(&counts[1..]), None);
        assert_eq!(GroupStats::from_counts(&[&counts[..], &[0]].concat()), None);
    }
}
