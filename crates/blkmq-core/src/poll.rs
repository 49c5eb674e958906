//! Hybrid polling: how a reactor waits for requests in flight. It polls, sleeps until an instant and then
//! polls, or blocks until it is woken. One [`Predictor`] for each hardware context learns from
//! completions; the reactor asks all of its contexts, joins their [`Verdict`]s, acts on the result, and
//! reports how it waited. Time is an argument.
//!
//! ```text
//!   issue ──────────────── sleep ──────────────►│◄── o ──►│◄───── look ─────►│ end
//!                                   wake-up asked for   awake              seen at once
//! ```
//! A sleeper wakes late, by `o`. An estimate from what such a sleeper *sees* includes its lateness: half of
//! the mean drifts to max(L, 2 o). So a request that ended before its reactor awoke is a censored sample
//! here, and `o` is measured separately.
//!
//! After Axboe's hybrid polling (2016). Differences: a low quantile instead of half the mean (`low`),
//! measured lateness (`oversleep`), one sleep for all requests in flight, and no sleep where it is unsafe or
//! does not pay.

mod in_flight;
mod low;
mod of_queue;
mod oversleep;
mod policy;
mod recent;
mod stats;
#[cfg(test)]
mod tests;

use self::in_flight::InFlight;
use self::low::Low;
pub(crate) use self::of_queue::Polling;
pub use self::oversleep::WakeLatency;
pub use self::policy::{DELAY_MAX_US, Policy, Wait};
pub(crate) use self::stats::PollShard;
use self::stats::Windows;
pub use self::stats::{BUCKETS, Bucket, BucketStats};
use crate::bio::Op;
use crate::ids::Tag;
use crate::time::{Instant, Nanos};

/// What to do until a request ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Block until woken.
    Block,
    /// Sleep until then unless woken earlier, then poll.
    SleepUntil(Instant),
    /// Poll.
    Spin,
}

impl Verdict {
    /// A verdict that serves both: polling before sleeping, the earlier sleep, sleeping before blocking.
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Spin, _) | (_, Self::Spin) => Self::Spin,
            (Self::SleepUntil(a), Self::SleepUntil(b)) => Self::SleepUntil(a.min(b)),
            (Self::Block, other) | (other, Self::Block) => other,
        }
    }
}

/// How a reactor spent the time before it polls for completions again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waited {
    /// It polled until now, and saw nothing before.
    Looking,
    /// It slept until a time that it had chosen.
    Asleep,
    /// It was blocked until an event woke it. A sleeper wakes late by this much.
    Woken(Nanos),
}

/// The settings that decide how a context's requests are waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setting {
    /// The reactor's way of waiting.
    pub wait: Wait,
    /// The queue's policy for sleeping, if its driver is polled.
    pub policy: Policy,
    /// The end of a request is found by polling only: nothing wakes the reactor.
    pub is_polled: bool,
}

/// What one hardware context records of its requests in flight and of earlier ones.
#[derive(Clone, Debug)]
pub struct Predictor {
    in_flight: InFlight,
    buckets: [Of; BUCKETS],
    /// When the latest poll for completions was.
    last_look: Instant,
    waited: Option<Waited>,
    /// When the latest sleep ended: requests issued before were in flight during it.
    awoke_at: Option<Instant>,
    /// The shortest time ever seen.
    shortest: Option<Nanos>,
    /// Buckets with unpublished changes, a bit each.
    news: u16,
}

/// The records of one bucket.
#[derive(Clone, Debug)]
struct Of {
    low: Low,
    windows: Windows,
    slept: u64,
    overslept: u64,
    /// For requests issued up to then, sleeping is already decided: none is slept for twice.
    decided_until: Option<Instant>,
    /// When the latest request that was seen without a sleep was issued, and when its end was seen: requests
    /// issued and seen together with it took equally long, and add no information about the device.
    latest: (Instant, Instant),
    /// The request that the latest verdict sleeps for, by its time of issue, and until when.
    aim: Option<(Instant, Instant)>,
}

impl Predictor {
    /// Makes a predictor for tags below `depth`.
    pub fn new(depth: u32) -> Self {
        Self {
            in_flight: InFlight::new(depth),
            buckets: std::array::from_fn(|_| Of::new()),
            last_look: Instant(0),
            waited: None,
            awoke_at: None,
            shortest: None,
            news: 0,
        }
    }

    /// Records that a request was issued to the driver.
    #[inline]
    pub fn issued(&mut self, tag: Tag, op: Op, len: u64, now: Instant) {
        self.in_flight.add(tag, Bucket::of(op, len), now);
    }

    /// Removes a request that has left the driver without a completion: it says nothing about the device.
    pub fn forget(&mut self, tag: Tag) {
        let _ = self.in_flight.remove(tag);
    }

    /// Records how the time until the next poll was spent. `until` is its end.
    pub fn waited(&mut self, how: Waited, until: Instant) {
        match how {
            Waited::Looking => self.last_look = until,
            Waited::Asleep => {
                self.waited = Some(how);
                self.awoke_at = Some(until);
                for of in &mut self.buckets {
                    if let Some((issued, _)) = of.aim.take_if(|(_, wake)| *wake <= until) {
                        of.decided_until = of.decided_until.max(Some(issued));
                    }
                }
            }
            Waited::Woken(_) => self.waited = Some(how),
        }
    }

    /// Records that a request's completion was seen.
    #[inline]
    pub fn completed(&mut self, tag: Tag, now: Instant) {
        let Some((bucket, issued)) = self.in_flight.remove(tag) else {
            return;
        };
        let of = &mut self.buckets[bucket.index()];
        let time = now.since(issued);
        if of.latest == (issued, now) {
            return of.windows.record_again(time);
        }
        self.shortest = Some(self.shortest.map_or(time, |shortest| shortest.min(time)));
        let mut is_news = of.windows.record(time, now);
        let was_slept = self.awoke_at.is_some_and(|awoke| issued < awoke);
        if was_slept {
            of.slept += 1;
            is_news = true;
        }
        match self.waited {
            Some(Waited::Asleep) => {
                of.overslept += 1;
                of.low.overslept(time);
            }
            Some(Waited::Woken(late)) => of.low.saw(Nanos(time.0.saturating_sub(late.0)), false),
            _ => {
                let unseen = now.since(self.last_look.max(issued));
                if !was_slept {
                    of.latest = (issued, now);
                }
                if unseen.0 <= (time.0 / 8).max(UNSEEN_MAX.0) && unseen < time {
                    of.low.saw(Nanos(time.0 - unseen.0), was_slept);
                }
            }
        }
        self.news |= u16::from(is_news) << bucket.index();
    }

    /// Records that completions were polled for, and taken.
    #[inline]
    pub fn looked(&mut self, now: Instant) {
        self.last_look = now;
        self.waited = None;
    }

    /// The statistics of a bucket.
    pub fn stats(&self, bucket: Bucket) -> BucketStats {
        let of = &self.buckets[bucket.index()];
        BucketStats {
            low: of.low.value().unwrap_or_default(),
            slept: of.slept,
            overslept: of.overslept,
            ..of.windows.stats()
        }
    }

    /// Publishes changes to readers.
    #[inline]
    pub(crate) fn show(&mut self, to: &PollShard) {
        if self.news != 0 {
            let news = std::mem::take(&mut self.news);
            let buckets = Bucket::all().filter(|bucket| news & 1 << bucket.index() != 0);
            buckets.for_each(|bucket| to.show(bucket, &self.stats(bucket)));
        }
    }

    /// Decides how to wait for the requests in flight; there is at least one.
    pub fn verdict(&mut self, setting: Setting, host: &mut WakeLatency, now: Instant) -> Verdict {
        match (setting.wait, setting.is_polled) {
            (Wait::Poll, _) => return Verdict::Spin,
            (Wait::Block, false) => return Verdict::Block,
            _ => {}
        }
        let blind = if setting.is_polled {
            Verdict::Spin
        } else {
            Verdict::Block
        };
        let mut verdict = if self.in_flight.has_others() {
            blind
        } else {
            Verdict::Block
        };
        for bucket in Bucket::all() {
            let Some(issued) = self.in_flight.oldest(bucket) else {
                continue;
            };
            verdict = verdict.and(self.of_oldest(bucket, issued, setting, host, now));
        }
        verdict
    }

    /// Decides for the oldest request of one bucket.
    fn of_oldest(
        &mut self,
        bucket: Bucket,
        issued: Instant,
        setting: Setting,
        host: &mut WakeLatency,
        now: Instant,
    ) -> Verdict {
        let half_min = self.shortest.map(|shortest| Nanos(shortest.0 / 2));
        let of = &mut self.buckets[bucket.index()];
        of.aim = None;
        let policy = if setting.is_polled {
            setting.policy
        } else {
            Policy::Predicted
        };
        let is_decided = of.decided_until.is_some_and(|until| issued <= until);
        let delay = match policy {
            Policy::Classic => None,
            Policy::Fixed(delay) => Some(delay),
            Policy::HalfMean => of.windows.mean().map(|mean| Nanos(mean.0 / 2)),
            Policy::HalfMin => half_min,
            Policy::Predicted | Policy::Cautious => {
                return of.predicted(issued, is_decided, setting, host, now);
            }
        };
        match delay.map(|delay| issued + delay) {
            Some(wake) if wake > now && !is_decided => {
                of.aim = Some((issued, wake));
                Verdict::SleepUntil(wake)
            }
            _ => Verdict::Spin,
        }
    }
}

impl Of {
    fn new() -> Self {
        Self {
            low: Low::new(),
            windows: Windows::default(),
            slept: 0,
            overslept: 0,
            decided_until: None,
            latest: (Instant(u64::MAX), Instant(u64::MAX)),
            aim: None,
        }
    }

    fn predicted(
        &mut self,
        issued: Instant,
        is_decided: bool,
        setting: Setting,
        host: &mut WakeLatency,
        now: Instant,
    ) -> Verdict {
        let Some(low) = self.low.value() else {
            return if setting.is_polled {
                Verdict::Spin
            } else {
                Verdict::Block
            };
        };
        let expected = Expected {
            low: issued + low,
            mean: issued + self.low.mean(),
        };
        let wake = match (is_decided, setting.is_polled) {
            (true, _) => None,
            (false, true) => host.wake_for_polled(expected.low, setting.policy == Policy::Cautious, now),
            (false, false) => host.wake_for(expected.low, now),
        };
        let verdict = expected.verdict(wake, setting, host, now);
        if let Verdict::SleepUntil(wake) = verdict {
            self.aim = Some((issued, wake));
        } else if wake.is_none() && !is_decided {
            // A later time will be no better. Once per request, although a reactor that polls asks again and again.
            self.decided_until = self.decided_until.max(Some(issued));
            if expected.low - host.typical() > now {
                host.refuse();
            }
        }
        verdict
    }
}

/// When an event is expected.
#[derive(Clone, Copy, Debug)]
struct Expected {
    /// The event hardly comes before this.
    low: Instant,
    mean: Instant,
}

impl Expected {
    /// Decides how to wait for the event; `wake` is when a sleep for it would end.
    fn verdict(self, wake: Option<Instant>, setting: Setting, host: &WakeLatency, now: Instant) -> Verdict {
        let by_cost = setting.wait == Wait::Auto && !setting.is_polled;
        // The cost of blocking over that of a sleep: the wake-up's latency.
        let worth = Nanos(host.typical().0 * LATENCY_WORTH);
        match wake {
            Some(wake) => {
                let looking = self.mean.since(wake + host.typical());
                if by_cost && looking > worth {
                    return Verdict::Block;
                }
                Verdict::SleepUntil(wake)
            }
            None => {
                // Near, or overdue: a reactor that has polled in vain for as long as blocking would have
                // cost, blocks.
                let limit = host.cost() + worth;
                if by_cost && (self.mean.since(now) > limit || now.since(self.low) > limit) {
                    return Verdict::Block;
                }
                Verdict::Spin
            }
        }
    }
}

/// Decides how to wait for an event at a known time: a timer, or a drive that predicts its completions.
pub fn verdict_at(at: Instant, wait: Wait, host: &WakeLatency, now: Instant) -> Verdict {
    match wait {
        Wait::Block => Verdict::Block,
        Wait::Poll => Verdict::Spin,
        Wait::Hybrid | Wait::Auto => {
            let setting = Setting {
                wait,
                policy: Policy::Predicted,
                is_polled: false,
            };
            let expected = Expected { low: at, mean: at };
            expected.verdict(host.wake_for(at, now), setting, host, now)
        }
    }
}

/// What a nanosecond of latency is worth, in nanoseconds of processor time. A larger value polls longer for
/// unpredictable requests.
const LATENCY_WORTH: u64 = 2;
/// A completion is seen at once if polls are no further apart than this, or than an eighth of the request's time.
const UNSEEN_MAX: Nanos = Nanos::from_micros(1);
