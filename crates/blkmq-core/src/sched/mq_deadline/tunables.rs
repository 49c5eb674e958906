//! The tunables of mq-deadline, with the names and units of Linux. `class` reads them at each decision,
//! so a change has effect at once, also on queued requests.

use crate::sched::elevator::TunableError;
use crate::time::Nanos;

/// The tunables' values.
#[derive(Debug)]
pub(super) struct Tunables {
    /// After this time a read goes before reads of better position. A shorter time bounds a read's wait, but
    /// causes more seeks.
    pub(super) read_expire: Nanos,
    /// The same for writes.
    pub(super) write_expire: Nanos,
    /// How many batches of reads go before a waiting write. More favours readers, and writes wait longer.
    pub(super) writes_starved: u64,
    /// Requests of one batch, in ascending position and regardless of deadlines. More is better for throughput
    /// and worse for the wait of requests outside the batch.
    pub(super) fifo_batch: u64,
    /// Whether a request may be merged in front of a queued one. Front merges are rare: without such a load, no
    /// saves a search.
    pub(super) front_merges: bool,
    /// After this time behind a higher class, a class gets its turn.
    pub(super) prio_aging_expire: Nanos,
}

impl Default for Tunables {
    fn default() -> Self {
        Self {
            read_expire: Nanos::from_millis(500),
            write_expire: Nanos::from_secs(5),
            writes_starved: 2,
            fifo_batch: 16,
            front_merges: true,
            prio_aging_expire: Nanos::from_secs(10),
        }
    }
}

impl Tunables {
    /// Lists names and values, times in milliseconds.
    pub(super) fn list(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("read_expire", millis(self.read_expire)),
            ("write_expire", millis(self.write_expire)),
            ("writes_starved", self.writes_starved),
            ("fifo_batch", self.fifo_batch),
            ("front_merges", self.front_merges.into()),
            ("prio_aging_expire", millis(self.prio_aging_expire)),
        ]
    }

    /// Sets one tunable.
    ///
    /// # Errors
    /// If `elevator` has no tunable of that name, or the value is out of range.
    pub(super) fn set(&mut self, elevator: &str, name: &str, value: u64) -> Result<(), TunableError> {
        let within = |min: u64, max: u64| {
            let fits = (min..=max).contains(&value);
            fits.then_some(value)
                .ok_or_else(|| TunableError::range(name, value, min, max))
        };
        match name {
            "read_expire" => self.read_expire = Nanos::from_millis(within(0, MILLIS_MAX)?),
            "write_expire" => self.write_expire = Nanos::from_millis(within(0, MILLIS_MAX)?),
            "writes_starved" => self.writes_starved = within(0, COUNT_MAX)?,
            "fifo_batch" => self.fifo_batch = within(1, COUNT_MAX)?,
            "front_merges" => self.front_merges = within(0, 1)? == 1,
            "prio_aging_expire" => self.prio_aging_expire = Nanos::from_millis(within(1, MILLIS_MAX)?),
            _ => return Err(TunableError::unknown(elevator, name)),
        }
        Ok(())
    }
}

fn millis(time: Nanos) -> u64 {
    time.0 / 1_000_000
}

/// About 24 days, in effect never: the largest signed 32-bit number of milliseconds.
const MILLIS_MAX: u64 = i32::MAX as u64;
const COUNT_MAX: u64 = i32::MAX as u64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_linux() {
        let expected = [
            ("read_expire", 500),
            ("write_expire", 5000),
            ("writes_starved", 2),
            ("fifo_batch", 16),
            ("front_merges", 1),
            ("prio_aging_expire", 10000),
        ];
        assert_eq!(Tunables::default().list(), expected);
    }

    #[test]
    fn every_tunable_that_is_listed_can_be_set_and_reads_back() {
        let mut tunables = Tunables::default();
        for (n, (name, _)) in Tunables::default().list().into_iter().enumerate() {
            let value = if name == "front_merges" { 0 } else { 100 + n as u64 };
            tunables.set("mq-deadline", name, value).unwrap();
            assert_eq!(tunables.list()[n], (name, value));
        }
    }

    #[test]
    fn value_out_of_range_is_named_and_changes_nothing() {
        let mut tunables = Tunables::default();
        let error = tunables.set("mq-deadline", "front_merges", 2).unwrap_err();
        assert_eq!(error.to_string(), "front_merges 2 rejected: must be from 0 to 1");
        let error = tunables.set("mq-deadline", "fifo_batch", 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "fifo_batch 0 rejected: must be from 1 to 2147483647"
        );
        let error = tunables.set("mq-deadline", "slice_idle", 8).unwrap_err();
        assert_eq!(error.to_string(), "mq-deadline has no tunable slice_idle");
        assert_eq!(tunables.list(), Tunables::default().list());
    }
}
