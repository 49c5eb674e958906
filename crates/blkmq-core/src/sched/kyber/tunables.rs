//! The tunables of kyber: the latency targets, with the names and units of Linux. `scaling` reads them
//! for each request that has ended.

use crate::sched::elevator::TunableError;
use crate::time::Nanos;

/// The tunables' values.
#[derive(Debug)]
pub(super) struct Tunables {
    /// The latency that 99 of 100 reads should not exceed. A lower target holds back others earlier, and costs
    /// throughput.
    pub(super) read_lat: Nanos,
    /// The same for writes.
    pub(super) write_lat: Nanos,
}

impl Default for Tunables {
    fn default() -> Self {
        Self {
            read_lat: Nanos::from_millis(2),
            write_lat: Nanos::from_millis(10),
        }
    }
}

impl Tunables {
    /// Lists names and values, in nanoseconds.
    pub(super) fn list(&self) -> Vec<(&'static str, u64)> {
        vec![
            ("read_lat_nsec", self.read_lat.0),
            ("write_lat_nsec", self.write_lat.0),
        ]
    }

    /// Sets one tunable.
    ///
    /// # Errors
    /// If `elevator` has no tunable of that name, or the value is out of range.
    pub(super) fn set(&mut self, elevator: &str, name: &str, value: u64) -> Result<(), TunableError> {
        let target = match name {
            "read_lat_nsec" => &mut self.read_lat,
            "write_lat_nsec" => &mut self.write_lat,
            _ => return Err(TunableError::unknown(elevator, name)),
        };
        if !(TARGET_MIN..=TARGET_MAX).contains(&value) {
            return Err(TunableError::range(name, value, TARGET_MIN, TARGET_MAX));
        }
        *target = Nanos(value);
        Ok(())
    }
}

/// A microsecond: no drive is faster.
const TARGET_MIN: u64 = 1_000;
/// A thousand seconds: in effect no target.
const TARGET_MAX: u64 = 1_000_000_000_000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_those_of_linux_and_every_tunable_reads_back() {
        let mut tunables = Tunables::default();
        let defaults = [("read_lat_nsec", 2_000_000), ("write_lat_nsec", 10_000_000)];
        assert_eq!(tunables.list(), defaults);
        for (n, (name, _)) in defaults.into_iter().enumerate() {
            tunables.set("kyber", name, 5_000).unwrap();
            assert_eq!(tunables.list()[n], (name, 5_000));
        }
    }

    #[test]
    fn value_out_of_range_is_named_and_changes_nothing() {
        let mut tunables = Tunables::default();
        let error = tunables.set("kyber", "read_lat_nsec", 999).unwrap_err();
        assert_eq!(
            error.to_string(),
            "read_lat_nsec 999 rejected: must be from 1000 to 1000000000000"
        );
        let error = tunables.set("kyber", "fifo_batch", 8).unwrap_err();
        assert_eq!(error.to_string(), "kyber has no tunable fifo_batch");
        assert_eq!(tunables.list(), Tunables::default().list());
    }
}
