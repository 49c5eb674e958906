//! The settings for polling: how long a reactor sleeps before it polls for a queue's requests
//! (`io_poll_delay`), and how it waits (`wait`). `poll` implements them.

use std::fmt;
use std::str::FromStr;

use crate::time::Nanos;

/// How long to sleep for a request of a polled queue before polling for its end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Policy {
    /// Not at all (`io_poll_delay` −1).
    Classic,
    /// Half the mean of the bucket's times seen in the latest 100 ms (0), as published with hybrid polling in
    /// 2016. These times contain the lateness of the sleeper, so it settles at twice the lateness if the
    /// device is faster.
    HalfMean,
    /// For this time (N µs).
    Fixed(Nanos),
    /// Half of the shortest time ever seen of any request, as in io_uring: one fast request disables it.
    HalfMin,
    /// Until its bucket's requests begin to end, minus the lateness of a sleeper; not at all where that is
    /// unsafe or saves nothing.
    #[default]
    Predicted,
    /// The same, only where all sleepers but 1 in 100, or 1 in 250, wake in time: for the tail. A device
    /// whose times are near the lateness of the host's sleepers is polled all the time.
    Cautious,
}

impl Policy {
    /// The policy of a value of the attribute `io_poll_delay`: −1, 0, or microseconds up to a second; none for another value.
    pub const fn from_delay(delay: i64) -> Option<Self> {
        match delay {
            -1 => Some(Self::Classic),
            0 => Some(Self::HalfMean),
            1..=DELAY_MAX_US => Some(Self::Fixed(Nanos::from_micros(delay as u64))),
            _ => None,
        }
    }

    /// The policy as one number, for an atomic cell.
    pub(crate) const fn to_raw(self) -> u64 {
        match self {
            Self::Predicted => 0,
            Self::Classic => 1,
            Self::HalfMean => 2,
            Self::HalfMin => 3,
            Self::Cautious => 4,
            Self::Fixed(delay) => FIXED + delay.0,
        }
    }

    pub(crate) const fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::Predicted,
            1 => Self::Classic,
            2 => Self::HalfMean,
            3 => Self::HalfMin,
            4 => Self::Cautious,
            raw => Self::Fixed(Nanos(raw - FIXED)),
        }
    }
}

impl fmt::Display for Policy {
    /// As the attribute shows it: a number if there is one, otherwise a word.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Classic => f.write_str("-1"),
            Self::HalfMean => f.write_str("0"),
            Self::Fixed(delay) => (delay.0 / 1000).fmt(f),
            Self::HalfMin => f.write_str("half-min"),
            Self::Predicted => f.write_str("auto"),
            Self::Cautious => f.write_str("cautious"),
        }
    }
}

/// How a reactor waits while requests are under way. If none is expected to end, it blocks, whatever this is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wait {
    /// Blocks at once: least processor time, and a wake-up's latency for each wait.
    Block,
    /// Polls all the time: no latency, a whole core.
    Poll,
    /// Sleeps until the earliest predicted end of all requests in flight, then polls; blocks if there is no
    /// prediction.
    Hybrid,
    /// The one of these that costs least at the moment, with processor time weighed against latency.
    #[default]
    Auto,
}

impl Wait {
    /// All ways.
    pub const ALL: [Self; 4] = [Self::Block, Self::Poll, Self::Hybrid, Self::Auto];

    /// The name in configurations.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Block => "block",
            Self::Poll => "poll",
            Self::Hybrid => "hybrid",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Wait {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|wait| wait.name() == text);
        found.ok_or_else(|| format!("wait {text} rejected: must be block, poll, hybrid or auto"))
    }
}

/// The longest fixed sleep, in microseconds.
pub const DELAY_MAX_US: i64 = 1_000_000;
const FIXED: u64 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn delay_is_minus_one_zero_or_microseconds_and_nothing_else() {
        assert_eq!(Policy::from_delay(-1), Some(Policy::Classic));
        assert_eq!(Policy::from_delay(0), Some(Policy::HalfMean));
        assert_eq!(Policy::from_delay(7), Some(Policy::Fixed(Nanos(7_000))));
        assert_eq!(Policy::from_delay(-2), None);
        assert_eq!(Policy::from_delay(DELAY_MAX_US + 1), None);
    }

    #[test]
    fn policy_survives_being_a_number() {
        let fixed = Policy::Fixed(Nanos(1_000));
        for policy in [
            Policy::Classic,
            Policy::HalfMean,
            Policy::HalfMin,
            Policy::Predicted,
            Policy::Cautious,
            fixed,
        ] {
            assert_eq!(Policy::from_raw(policy.to_raw()), policy);
        }
    }

    #[test]
    fn ways_of_waiting_are_known_by_their_names() {
        for wait in Wait::ALL {
            assert_eq!(wait.name().parse(), Ok(wait));
        }
        assert!("spin".parse::<Wait>().unwrap_err().contains("spin rejected"));
    }
}
