//! Parses the values of a driver's keys: sizes, times, numbers, switches and ranges. The drivers'
//! configurations call it for each `key=value` of a disk string or a table of the configuration file. It
//! does not use `bytesize` and `humantime`: 64K is 65536 here, as for QEMU and fio, and an error names
//! the key and its bounds.

use std::ops::Range;

use blkmq_core::time::Nanos;

/// Why a driver's key is rejected. States what is wrong and what is allowed; the caller adds the disk's name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The driver has no such key.
    #[error("key {key} rejected: the {driver} driver has no such key; it has {known}")]
    UnknownKey {
        /// The driver.
        driver: &'static str,
        /// The key that was given.
        key: String,
        /// The keys that the driver has, separated by commas.
        known: &'static str,
    },
    /// There is no such key for a part of the configuration that has no driver.
    #[error("key {key} rejected: {part} has no such key; it has {known}")]
    NoSuchKey {
        /// The part, as in `a group`.
        part: &'static str,
        /// The key that was given.
        key: String,
        /// The keys that it has, separated by commas.
        known: &'static str,
    },
    /// The value is not one of those that the key takes.
    #[error("{key}={value} rejected: must be {allowed}")]
    BadValue {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The value has a syntax of its own, and violates it.
    #[error("{key}={value} rejected: {why}")]
    Refused {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What is wrong with the value, and what to do.
        why: String,
    },
    /// A key that may be given once is given twice.
    #[error("{key}= is given twice: keep one")]
    Twice {
        /// The key.
        key: String,
    },
    /// Two keys exclude each other.
    #[error("{one} does not go together with {other}: {advice}")]
    Conflict {
        /// One setting.
        one: &'static str,
        /// The other.
        other: &'static str,
        /// The next step.
        advice: &'static str,
    },
}

/// Parses a size in bytes: a whole number with an optional suffix K, M, G, T (powers of 1024; KiB and KB mean the same).
///
/// # Errors
/// `BadValue` if it is not such a number or needs more than 64 bits.
pub fn size(key: &str, value: &str) -> Result<u64, ConfigError> {
    let (digits, suffix) = split_suffix(value);
    let shift = match suffix.to_ascii_lowercase().as_str() {
        "" | "b" => 0,
        "k" | "kb" | "kib" => 10,
        "m" | "mb" | "mib" => 20,
        "g" | "gb" | "gib" => 30,
        "t" | "tb" | "tib" => 40,
        _ => return bad(key, value, SIZE),
    };
    let whole: Option<u64> = digits.parse().ok();
    whole
        .and_then(|n| n.checked_mul(1 << shift))
        .map_or_else(|| bad(key, value, SIZE), Ok)
}

/// Parses a size of at least `least` bytes.
///
/// # Errors
/// `BadValue`, which repeats `allowed`, for anything else.
pub fn size_from(key: &str, value: &str, least: u64, allowed: &'static str) -> Result<u64, ConfigError> {
    match size(key, value) {
        Ok(size) if size >= least => Ok(size),
        _ => bad(key, value, allowed),
    }
}

/// Parses a time: a number, fractions allowed, with a suffix ns, us, ms or s. At most one day.
///
/// # Errors
/// `BadValue` if it is not such a time.
pub fn time(key: &str, value: &str) -> Result<Nanos, ConfigError> {
    let (digits, suffix) = split_suffix(value);
    let unit_ns = match suffix {
        "ns" => 1.0,
        "us" | "µs" => 1e3,
        "ms" => 1e6,
        "s" => 1e9,
        "" if digits == "0" => 1.0,
        _ => return bad(key, value, TIME),
    };
    match digits.parse::<f64>() {
        Ok(n) if n * unit_ns <= DAY_NS => Ok(Nanos((n * unit_ns).round() as u64)),
        _ => bad(key, value, TIME),
    }
}

/// Parses a switch: on or off (also true, yes, 1 and false, no, 0).
///
/// # Errors
/// `BadValue` for anything else.
pub fn switch(key: &str, value: &str) -> Result<bool, ConfigError> {
    match value {
        "on" | "true" | "yes" | "1" => Ok(true),
        "off" | "false" | "no" | "0" => Ok(false),
        _ => bad(key, value, "on or off"),
    }
}

/// Parses a whole number within bounds.
///
/// # Errors
/// `BadValue`, which repeats `allowed`, for anything else.
pub fn whole<N: TryFrom<u64>>(
    key: &str,
    value: &str,
    range: std::ops::RangeInclusive<u64>,
    allowed: &'static str,
) -> Result<N, ConfigError> {
    let number = value.parse().ok().filter(|n| range.contains(n));
    number
        .and_then(|n| N::try_from(n).ok())
        .map_or_else(|| bad(key, value, allowed), Ok)
}

/// Parses a range of bytes, `START-END`, both sizes; END is the first byte after the range.
///
/// # Errors
/// `BadValue` if it is not such a range or is empty.
pub fn range(key: &str, value: &str) -> Result<Range<u64>, ConfigError> {
    let ends = value.split_once('-').and_then(|(start, end)| {
        let start = size(key, start).ok()?;
        Some(start..size(key, end).ok()?)
    });
    match ends {
        Some(range) if !range.is_empty() => Ok(range),
        _ => bad(key, value, RANGE),
    }
}

/// Returns a `BadValue`.
///
/// # Errors
/// Always.
pub fn bad<T>(key: &str, value: &str, allowed: &'static str) -> Result<T, ConfigError> {
    Err(ConfigError::BadValue {
        key: key.to_owned(),
        value: value.to_owned(),
        allowed,
    })
}

fn split_suffix(value: &str) -> (&str, &str) {
    let value = value.trim();
    let at = value
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(value.len());
    value.split_at(at)
}

const DAY_NS: f64 = 86_400e9;
const SIZE: &str = "a size in bytes such as 4096, 64K, 512M or 2G";
const TIME: &str = "a time of at most a day such as 500ns, 80us, 2.5ms or 1s";
const RANGE: &str = "START-END in bytes such as 1M-1028K, with START before END, the first byte after it";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_binary_suffixes_and_do_not_overflow() {
        assert_eq!(size("size", "64K"), Ok(65536));
        assert_eq!(size("size", "2GiB"), Ok(2 << 30));
        assert_eq!(size("size", "0"), Ok(0));
        for wrong in ["", "K", "-1", "1.5G", "1x", "99999999T", "0x10"] {
            assert!(size("size", wrong).is_err(), "{wrong} was taken");
        }
    }

    #[test]
    fn times_need_a_unit() {
        assert_eq!(time("latency", "80us"), Ok(Nanos(80_000)));
        assert_eq!(time("latency", "2.5ms"), Ok(Nanos(2_500_000)));
        assert_eq!(time("latency", "0"), Ok(Nanos(0)));
        for wrong in ["80", "us", "-1us", "2d", "1e9s", "90000s"] {
            assert!(time("latency", wrong).is_err(), "{wrong} was taken");
        }
    }

    #[test]
    fn error_names_key_value_and_what_is_allowed() {
        assert_eq!(
            range("bad", "5-5").unwrap_err().to_string(),
            "bad=5-5 rejected: must be START-END in bytes such as 1M-1028K, with START before END, the first byte after it"
        );
        assert_eq!(range("bad", "1K-2K"), Ok(1024..2048));
    }
}
