//! The settings of a multipath disk, parsed from its keys.

use blkmq_core::mapper::multipath::{Config, Detours, Failback, NoPath, Selector};
use blkmq_core::time::Nanos;
use blkmq_host::value::{self, ConfigError};

/// The settings of a multipath drive. `docs/mappers/multipath.md` has every key's default, unit and
/// trade-off.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultipathConfig {
    /// How a path is chosen. Default `service-time`.
    pub selector: Selector,
    /// When the drive returns to a group of higher priority. Default at once.
    pub failback: Failback,
    /// What becomes of requests without a usable path. Default: they fail.
    pub no_path: NoPath,
    /// Interval between probes of a failed path. Default 1 s.
    pub check_interval: Nanos,
    /// When a probe that has not ended counts as failed. Default 5 s.
    pub check_timeout: Nanos,
    /// Which steps use a worker thread instead of running inline. Default none.
    pub detours: Detours,
}

impl Default for MultipathConfig {
    fn default() -> Self {
        let config = Config::new("", Vec::new());
        Self {
            selector: config.selector,
            failback: config.failback,
            no_path: config.no_path,
            check_interval: config.check_interval,
            check_timeout: config.check_timeout,
            detours: config.detours,
        }
    }
}

impl MultipathConfig {
    /// Sets one key from its text form.
    ///
    /// # Errors
    /// `UnknownKey`, or `BadValue` with what is allowed.
    pub fn set(&mut self, key: &str, value: &str) -> Result<(), ConfigError> {
        match key {
            "selector" => self.selector = selector(value)?,
            "failback" => self.failback = failback(value)?,
            "queue_if_no_path" => self.no_path = no_path(value)?,
            "check_interval" => self.check_interval = interval(key, value)?,
            "check_timeout" => self.check_timeout = interval(key, value)?,
            _ => {
                return Err(ConfigError::UnknownKey {
                    driver: "multipath",
                    key: key.to_owned(),
                    known: KEYS,
                });
            }
        }
        Ok(())
    }
}

/// Parses a selector's name.
///
/// # Errors
/// `BadValue` with the names there are.
fn selector(name: &str) -> Result<Selector, ConfigError> {
    name.parse().or_else(|_| {
        value::bad(
            "selector",
            name,
            "round-robin, queue-length, service-time, historical-service-time or io-affinity",
        )
    })
}

/// Parses `immediate`, `manual` or a time.
///
/// # Errors
/// `BadValue` for anything else.
fn failback(text: &str) -> Result<Failback, ConfigError> {
    match text {
        "immediate" => Ok(Failback::Immediate),
        "manual" => Ok(Failback::Manual),
        _ => match value::time("failback", text) {
            Ok(delay) => Ok(Failback::After(delay)),
            Err(_) => value::bad("failback", text, "immediate, manual, or a time such as 10s"),
        },
    }
}

/// Parses `on`, `off` or a time.
///
/// # Errors
/// `BadValue` for anything else.
fn no_path(text: &str) -> Result<NoPath, ConfigError> {
    match (value::switch("queue_if_no_path", text), value::time("", text)) {
        (Ok(true), _) => Ok(NoPath::Queue),
        (Ok(false), _) => Ok(NoPath::Fail),
        (_, Ok(limit)) => Ok(NoPath::QueueFor(limit)),
        _ => value::bad("queue_if_no_path", text, "on, off, or for how long, such as 30s"),
    }
}

fn interval(key: &str, text: &str) -> Result<Nanos, ConfigError> {
    match value::time(key, text) {
        Ok(time) if time >= INTERVAL_MIN => Ok(time),
        _ => value::bad(key, text, "a time from 1ms to a day, such as 500ms"),
    }
}

const KEYS: &str = "multipath, selector, failback, queue_if_no_path, check_interval, check_timeout";
const INTERVAL_MIN: Nanos = Nanos::from_millis(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_set_and_refused_by_name() {
        let mut config = MultipathConfig::default();
        for (key, value) in [
            ("selector", "queue-length"),
            ("failback", "2s"),
            ("queue_if_no_path", "30s"),
            ("check_interval", "100ms"),
        ] {
            config.set(key, value).unwrap();
        }
        assert_eq!(config.selector, Selector::QueueLength);
        assert_eq!(config.failback, Failback::After(Nanos::from_secs(2)));
        assert_eq!(config.no_path, NoPath::QueueFor(Nanos::from_secs(30)));
        assert_eq!(config.check_interval, Nanos::from_millis(100));
        assert!(!config.detours.has_any(), "no key switches them on");
        for (key, value, part) in [
            ("selector", "random", "service-time"),
            ("failback", "soon", "immediate, manual"),
            ("queue_if_no_path", "maybe", "on, off"),
            ("check_interval", "0", "1ms"),
            ("pathes", "a", "selector"),
        ] {
            let error = config.set(key, value).unwrap_err().to_string();
            assert!(error.contains(part) && error.contains(key), "{error}");
        }
    }
}
