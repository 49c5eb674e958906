//! The tunables of bfq: they have the names and units of Linux. They are read at each decision,
//! so a change has effect at once, also on queued requests.

use crate::sched::elevator::TunableError;
use crate::time::Nanos;

/// The tunables' values.
#[derive(Debug)]
pub(super) struct Tunables {
    /// How long the drive waits for the next request of the queue whose turn it is. A longer time keeps
    /// neighbours together and shares exact, but leaves the drive idle. Used only on drives that seek, or with
    /// `strict_guarantees`.
    pub(super) slice_idle: Nanos,
    /// Whether the order of service matters more than throughput: one request in flight at a time, turns of a
    /// budget, waiting for every synchronous queue.
    pub(super) strict_guarantees: bool,
    /// Whether queues that look interactive, or like soft real time, get more of their group's share.
    pub(super) low_latency: bool,
    /// The longest turn.
    pub(super) timeout_sync: Nanos,
    /// The largest budget, in bytes; 0 for what the drive does within `timeout_sync`.
    pub(super) max_budget: u64,
    /// How far back the next request may lie, in bytes.
    pub(super) back_seek_max: u64,
    /// The factor for a distance backwards.
    pub(super) back_seek_penalty: u64,
    /// After this time a synchronous request goes before those of better position.
    pub(super) fifo_expire_sync: Nanos,
    /// The same for the others.
    pub(super) fifo_expire_async: Nanos,
    /// The cost of a request in addition to its bytes, in bytes. With 0, weights share bytes; the larger it is,
    /// the more they share requests.
    pub(super) request_cost: u32,
}

impl Tunables {
    /// The defaults, for a drive that seeks or one that does not.
    pub(super) fn new(rotational: bool) -> Self {
        Self {
            slice_idle: Nanos::from_millis(8),
            strict_guarantees: false,
            low_latency: rotational,
            timeout_sync: Nanos::from_millis(125),
            max_budget: 0,
            back_seek_max: 16384 * KIB,
            back_seek_penalty: 2,
            fifo_expire_sync: Nanos::from_millis(125),
            fifo_expire_async: Nanos::from_millis(250),
            request_cost: 0,
        }
    }

    /// Lists names and values.
    pub(super) fn list(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("slice_idle", self.slice_idle.0 / MILLISECOND),
            ("slice_idle_us", self.slice_idle.0 / MICROSECOND),
            ("strict_guarantees", self.strict_guarantees.into()),
            ("low_latency", self.low_latency.into()),
            ("timeout_sync", self.timeout_sync.0 / MILLISECOND),
            ("max_budget", self.max_budget / SECTOR),
            ("back_seek_max", self.back_seek_max / KIB),
            ("back_seek_penalty", self.back_seek_penalty),
            ("fifo_expire_sync", self.fifo_expire_sync.0 / MILLISECOND),
            ("fifo_expire_async", self.fifo_expire_async.0 / MILLISECOND),
            ("request_cost", u64::from(self.request_cost) / KIB),
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
            "slice_idle" => self.slice_idle = Nanos::from_millis(within(0, IDLE_MAX_MS)?),
            "slice_idle_us" => self.slice_idle = Nanos::from_micros(within(0, IDLE_MAX_MS * 1000)?),
            "strict_guarantees" => self.strict_guarantees = within(0, 1)? == 1,
            "low_latency" => self.low_latency = within(0, 1)? == 1,
            "timeout_sync" => self.timeout_sync = Nanos::from_millis(within(1, COUNT_MAX)?),
            "max_budget" => self.max_budget = within(0, BUDGET_MAX_SECTORS)? * SECTOR,
            "back_seek_max" => self.back_seek_max = within(0, COUNT_MAX)? * KIB,
            "back_seek_penalty" => self.back_seek_penalty = within(1, COUNT_MAX)?,
            "fifo_expire_sync" => self.fifo_expire_sync = Nanos::from_millis(within(1, COUNT_MAX)?),
            "fifo_expire_async" => self.fifo_expire_async = Nanos::from_millis(within(1, COUNT_MAX)?),
            "request_cost" => self.request_cost = (within(0, REQUEST_COST_MAX_KIB)? * KIB) as u32,
            _ => return Err(TunableError::unknown(elevator, name)),
        }
        Ok(())
    }
}

const KIB: u64 = 1024;
const SECTOR: u64 = 512;
const MICROSECOND: u64 = 1_000;
const MILLISECOND: u64 = 1_000_000;
/// Longest idling: a second.
const IDLE_MAX_MS: u64 = 1_000;
const COUNT_MAX: u64 = i32::MAX as u64;
/// 1 GiB: a budget is counted in 32 bits of bytes.
const BUDGET_MAX_SECTORS: u64 = 1 << 21;
/// A request counts as 16 MiB more than its bytes at most.
const REQUEST_COST_MAX_KIB: u64 = 16 << 10;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_linux_but_for_low_latency_on_flash_and_one_of_our_own() {
        let expected = [
            ("slice_idle", 8),
            ("slice_idle_us", 8000),
            ("strict_guarantees", 0),
            ("low_latency", 1),
            ("timeout_sync", 125),
            ("max_budget", 0),
            ("back_seek_max", 16384),
            ("back_seek_penalty", 2),
            ("fifo_expire_sync", 125),
            ("fifo_expire_async", 250),
            ("request_cost", 0),
        ];
        assert_eq!(Tunables::new(true).list(), expected);
        assert_eq!(Tunables::new(false).list()[3], ("low_latency", 0));
    }

    #[test]
    fn every_tunable_that_is_listed_can_be_set_and_reads_back() {
        let mut tunables = Tunables::new(true);
        for (n, (name, _)) in Tunables::new(true).list().into_iter().enumerate() {
            let value = match name {
                "strict_guarantees" => 1,
                "low_latency" => 0,
                _ => 100 + n as u64,
            };
            tunables.set("bfq", name, value).unwrap();
            assert_eq!(tunables.list()[n], (name, value));
        }
    }

    #[test]
    fn two_names_of_the_idle_time_are_one_value() {
        let mut tunables = Tunables::new(true);
        tunables.set("bfq", "slice_idle_us", 2500).unwrap();
        assert_eq!(tunables.list()[..2], [("slice_idle", 2), ("slice_idle_us", 2500)]);
    }

    #[test]
    fn value_out_of_range_is_named_and_changes_nothing() {
        let mut tunables = Tunables::new(true);
        let error = tunables.set("bfq", "low_latency", 2).unwrap_err();
        assert_eq!(error.to_string(), "low_latency 2 rejected: must be from 0 to 1");
        let error = tunables.set("bfq", "timeout_sync", 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "timeout_sync 0 rejected: must be from 1 to 2147483647"
        );
        let error = tunables.set("bfq", "weights", 1).unwrap_err();
        assert_eq!(error.to_string(), "bfq has no tunable weights");
        assert_eq!(tunables.list(), Tunables::new(true).list());
    }
}
