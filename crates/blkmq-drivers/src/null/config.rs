//! The settings of a null drive, parsed from its keys, and which of them exclude each other. `device`
//! turns the result into a drive.

use std::ops::Range;

use blkmq_core::ids::REACTORS_MAX;
use blkmq_core::time::Nanos;
use blkmq_host::value::{self, ConfigError};

use crate::chance::Rate;

/// When a null drive's requests end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Completion {
    /// While they are issued.
    Inline,
    /// When the hardware context is reaped the next time.
    Deferred,
    /// When their latency has passed.
    Timer,
}

/// What a null drive does. `docs/drivers/null.md` has every key's default, unit and trade-off.
#[derive(Clone, Debug, PartialEq)]
pub struct NullConfig {
    /// When requests end. Default: by timer if `latency`, `slow_rate`, `parallel` or `bandwidth` is set, else inline.
    pub completion: Option<Completion>,
    /// Mean service time. Default 0, and 10 µs if completion by timer is asked for by name.
    pub latency: Nanos,
    /// Standard deviation of the service time, about normally distributed and never below zero. Default 0.
    pub spread: Nanos,
    /// Service time of the slow ones in a bimodal distribution. Default 1 ms.
    pub slow: Nanos,
    /// How many are slow. Default none.
    pub slow_rate: Rate,
    /// How many requests the drive serves at a time, over all hardware contexts; 0 for no such limit. Default 0.
    pub parallel: u32,
    /// Bytes per second of data, over all hardware contexts; 0 for no such limit. Default 0.
    pub bandwidth: u64,
    /// Requests that one hardware context takes, or with `shared_tags` all of them together, 1 to 65536. Default 1024.
    pub depth: u32,
    /// Have all hardware contexts share one set of tags, as the disks behind a host adapter do. Default off.
    pub shared_tags: bool,
    /// How many hardware contexts, the first ones, do not notify: their completions are found only
    /// by polling, so their reactors do not block while one is in flight. Default 0.
    pub poll_queues: u16,
    /// Fill reads with zeroes when there is no memory behind the drive, so that no caller sees stale memory. Default on.
    pub zero: bool,
    /// Keep what is written, in memory. Default off.
    pub memory: bool,
    /// Behave as a drive with a volatile write cache: flushes reach the drive. Default off.
    pub cache: bool,
    /// Bytes that the cache holds before it writes back by itself; matters with `memory` and `cache`. Default 16 MiB.
    pub cache_size: u64,
    /// Honour FUA in the drive instead of having it emulated by flushes; matters with `cache` only. Default on.
    pub fua: bool,
    /// Ranges of every disk on which all but flushes fails with `Status::Medium`. Default none.
    pub bad: Vec<Range<u64>>,
    /// How many requests are taken and never completed. Default none.
    pub timeout_rate: Rate,
    /// How many requests end with `Status::Requeue`. Default none.
    pub requeue_rate: Rate,
    /// How many requests are not taken for want of a resource. Default none.
    pub resource_rate: Rate,
    /// The number of the hardware context whose set-up fails. Default none.
    pub setup_failure: Option<u16>,
    /// Seed of all random choices. Default 1.
    pub seed: u64,
}

impl Default for NullConfig {
    fn default() -> Self {
        Self {
            completion: None,
            latency: Nanos::ZERO,
            spread: Nanos::ZERO,
            slow: Nanos::from_millis(1),
            slow_rate: Rate::NEVER,
            parallel: 0,
            bandwidth: 0,
            depth: 1024,
            shared_tags: false,
            poll_queues: 0,
            zero: true,
            memory: false,
            cache: false,
            cache_size: 16 << 20,
            fua: true,
            bad: Vec::new(),
            timeout_rate: Rate::NEVER,
            requeue_rate: Rate::NEVER,
            resource_rate: Rate::NEVER,
            setup_failure: None,
            seed: 1,
        }
    }
}

impl NullConfig {
    /// Returns the drive for benches: inline completion, buffers left unchanged, nothing else.
    pub fn bare() -> Self {
        Self {
            zero: false,
            ..Self::default()
        }
    }

    /// Sets one key from its text form. `bad` may be given several times and collects.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "completion" => self.completion = Some(completion(value)?),
            "latency" => self.latency = value::time(key, value)?,
            "spread" => self.spread = value::time(key, value)?,
            "slow" => self.slow = value::time(key, value)?,
            "slow_rate" => self.slow_rate = Rate::parse(key, value)?,
            "parallel" => self.parallel = value::whole(key, value, 1..=65536, PARALLEL)?,
            "bandwidth" => self.bandwidth = value::size_from(key, value, 1, BANDWIDTH)?,
            "depth" => self.depth = value::whole(key, value, 1..=65536, "a number from 1 to 65536")?,
            "shared_tags" => self.shared_tags = value::switch(key, value)?,
            "poll_queues" => {
                self.poll_queues = value::whole(key, value, 0..=CONTEXTS_MAX, POLL_QUEUES)?;
            }
            "zero" => self.zero = value::switch(key, value)?,
            "memory" => self.memory = value::switch(key, value)?,
            "cache_size" => self.cache_size = value::size_from(key, value, 1, CACHE_SIZE)?,
            "cache" => self.cache = value::switch(key, value)?,
            "fua" => self.fua = value::switch(key, value)?,
            "bad" => self.bad.push(value::range(key, value)?),
            "timeout_rate" => self.timeout_rate = Rate::parse(key, value)?,
            "requeue_rate" => self.requeue_rate = Rate::parse(key, value)?,
            "resource_rate" => self.resource_rate = Rate::parse(key, value)?,
            "setup_failure" => {
                let number = value::whole(key, value, 0..=CONTEXTS_MAX - 1, SETUP_FAILURE)?;
                self.setup_failure = Some(number);
            }
            "seed" => self.seed = value::whole(key, value, 0..=u64::MAX, "a whole number of 64 bits")?,
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "null",
                    key: key.to_owned(),
                    known: KEYS,
                });
            }
        }
        Ok(())
    }

    /// Checks the settings against each other.
    ///
    /// # Errors
    /// `Conflict` for two that do not go together.
    pub fn check(&self) -> Result<(), ConfigError> {
        let takes_time = self.takes_time();
        if takes_time && matches!(self.completion, Some(Completion::Inline | Completion::Deferred)) {
            return Err(ConfigError::Conflict {
                one: "completion=inline or deferred",
                other: "latency, spread, slow_rate, parallel or bandwidth",
                advice: "use completion=timer or leave it out",
            });
        }
        Ok(())
    }

    /// Returns when requests end under all settings.
    pub fn effective_completion(&self) -> Completion {
        let by_default = if self.takes_time() {
            Completion::Timer
        } else {
            Completion::Inline
        };
        self.completion.unwrap_or(by_default)
    }

    fn takes_time(&self) -> bool {
        self.latency != Nanos::ZERO
            || self.spread != Nanos::ZERO
            || !self.slow_rate.is_never()
            || self.parallel != 0
            || self.bandwidth != 0
    }
}

fn completion(value: &str) -> Result<Completion, ConfigError> {
    match value {
        "inline" => Ok(Completion::Inline),
        "deferred" => Ok(Completion::Deferred),
        "timer" => Ok(Completion::Timer),
        _ => value::bad("completion", value, "inline, deferred or timer"),
    }
}

/// Most hardware contexts: one for each reactor or attached thread.
const CONTEXTS_MAX: u64 = REACTORS_MAX as u64;
const PARALLEL: &str = "a number from 1 to 65536; leave it out for no limit";
const BANDWIDTH: &str = "a size in bytes such as 512M or 2G, for each second; leave it out for no limit";
const POLL_QUEUES: &str = "a number from 0 to 128, the most contexts that there can be";
const CACHE_SIZE: &str =
    "a size in bytes such as 64K or 16M, at least 1; leave cache= out for a drive without one";
const SETUP_FAILURE: &str = "the number of a hardware context, from 0 to 127";
const KEYS: &str = "completion, latency, spread, slow, slow_rate, parallel, bandwidth, depth, shared_tags, poll_queues, zero, memory, cache, cache_size, fua, bad, \
                    timeout_rate, requeue_rate, resource_rate, setup_failure, seed";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_key_that_is_named_is_taken() {
        let values = [
            ("completion", "timer"),
            ("latency", "80us"),
            ("spread", "20us"),
            ("slow", "2ms"),
            ("slow_rate", "1%"),
            ("parallel", "8"),
            ("bandwidth", "1G"),
            ("depth", "64"),
            ("shared_tags", "on"),
            ("poll_queues", "2"),
            ("zero", "off"),
            ("memory", "on"),
            ("cache", "on"),
            ("cache_size", "1M"),
            ("fua", "off"),
            ("bad", "1M-2M"),
            ("timeout_rate", "0.5"),
            ("requeue_rate", "10%"),
            ("resource_rate", "0"),
            ("setup_failure", "1"),
            ("seed", "42"),
        ];
        let mut config = NullConfig::default();
        for (key, value) in values {
            config.set(key, value).unwrap();
        }
        let named: Vec<&str> = KEYS.split(", ").map(str::trim).collect();
        assert_eq!(named, values.map(|(key, _)| key));
        assert_eq!(config.latency, Nanos::from_micros(80));
        assert!(config.shared_tags);
        assert_eq!(config.bad.first(), Some(&(1 << 20..2 << 20)));
        assert_eq!(config.check(), Ok(()));
    }

    #[test]
    fn unknown_key_is_answered_with_those_there_are() {
        let error = NullConfig::default()
            .set("latncy", "1us")
            .unwrap_err()
            .to_string();
        assert!(
            error.starts_with("key latncy rejected") && error.contains("latency"),
            "{error}"
        );
    }

    #[test]
    fn value_out_of_its_range_is_refused_with_the_range() {
        for (key, value, allowed) in [
            ("parallel", "0", "from 1 to 65536; leave it out"),
            ("parallel", "65537", "from 1 to 65536"),
            ("bandwidth", "0", "leave it out"),
            ("depth", "0", "from 1 to 65536"),
            ("depth", "65537", "from 1 to 65536"),
            ("poll_queues", "1000", "from 0 to 128"),
            ("poll_queues", "-1", "from 0 to 128"),
            ("cache_size", "0", "at least 1"),
            ("setup_failure", "128", "from 0 to 127"),
            ("latency", "2000000s", "at most a day"),
            ("slow_rate", "101%", "a probability"),
            ("seed", "18446744073709551616", "64 bits"),
        ] {
            let mut config = NullConfig::default();
            let text = config.set(key, value).unwrap_err().to_string();
            assert!(
                text.starts_with(&format!("{key}={value} rejected")) && text.contains(allowed),
                "{text}"
            );
            assert_eq!(config, NullConfig::default());
        }
        for (key, value) in [
            ("parallel", "65536"),
            ("poll_queues", "128"),
            ("setup_failure", "127"),
        ] {
            NullConfig::default().set(key, value).unwrap();
        }
    }

    #[test]
    fn switch_that_is_neither_on_nor_off_is_refused() {
        let error = NullConfig::default().set("shared_tags", "8").unwrap_err();
        let text = error.to_string();
        assert!(
            text.contains("shared_tags") && text.contains("on or off"),
            "{text}"
        );
    }

    #[test]
    fn latency_makes_completion_by_timer_and_contradicts_inline() {
        let mut config = NullConfig::default();
        assert_eq!(config.effective_completion(), Completion::Inline);
        config.set("latency", "1us").unwrap();
        assert_eq!(config.effective_completion(), Completion::Timer);
        config.set("completion", "inline").unwrap();
        assert!(matches!(config.check(), Err(ConfigError::Conflict { .. })));
    }
}
