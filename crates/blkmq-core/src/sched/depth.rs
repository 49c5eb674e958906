//! The limit on how many requests a drive holds at once while tenants share it: few enough that a request of a
//! tenant who seldom comes finds no queue in the drive, and enough to lose no throughput.
//! `bfq` asks for the limit and reports every completion. Nobody configures a figure.
//!
//! While the limit binds, the drive's *work* is the limit times the least time of its requests over the time that
//! they take now: so many requests would be in the drive if none had to wait. The rest is the drive's own queue.
//! The limit is the work, a *slack* of at least a fourth of it, and one request more, which keeps the drive busy
//! while an end is answered:
//!
//! ```text
//!             1 ───► Growing ───► Resting ───► Low ───► Trial ───┐
//!  least times      until they      follows     least    slack    │
//!  are known        are exceeded    the work    times             │
//!                                      ▲                          │
//!                                      └──────────────────────────┘
//! ```
//! *Growing* begins at one request, which finds no queue, and doubles while requests take their least time.
//! *Resting*: each window (a millisecond and some completions) moves the limit to what the work asks for. If
//! requests take no less time at a lower limit, the drive itself has become slower, and that time is the least
//! one from now on; if they take less than the least time, it has become faster.
//! *Low* is one window at half of the limit, to measure the least times again.
//! *Trial* compares the throughput with that of twice the limit, in short windows, of those whose I/O depends on
//! the limit: what tenants send who pause arrives by itself, and its chance would hide the gain of the others. On a
//! drive whose throughput still grows where requests already wait, such as one behind a busy processor, a trial finds
//! a gain, and the slack grows; it shrinks again where there is none.
//!
//! The work is the idea of delay-based congestion control (Brakmo and Peterson, "TCP Vegas", 1995; Cardwell and
//! others, "BBR", 2016); there, a minimum over some seconds is the least time. Here a drive's least time differs
//! by kind (`depth/least.rs`), and the slack is found by trials, since a drive is no link of constant rate.
//!
//! Shares do not depend on the limit: `bfq` keeps them by a bound on the lead. A window in which the limit did
//! not bind, since that bound or a lack of requests did, never raises it. It falls to what is in the drive if half
//! of that does as much, by a trial; these trials have a rest of their own, however the limit moves meanwhile.

mod least;
mod trial;

use self::least::{Kind, LeastTimes, Sums};
use self::trial::{Rates, Trial, Verdict};
use crate::bio::Direction;
use crate::time::{Instant, Nanos};

/// The state of the controller for one drive.
#[derive(Debug)]
pub(super) struct DepthLaw {
    /// The largest depth; a group without competitors gets it.
    max: u32,
    /// The limit outside of low windows and trials.
    operating: u32,
    /// The limit for a given work, in 1/16 of it.
    slack: u64,
    least: LeastTimes,
    contended: bool,
    /// When competition ended last.
    calm_since: Instant,
    phase: Phase,
    window: Window,
    /// The limit of the latest window that bound, and the time that requests took in it, in 1/64 of the least.
    latest: (u32, u64),
    trial: Trial,
    /// Which way the slack changed last.
    verdict: Verdict,
    /// The length of the next rest, and when the present one ends.
    rest: Nanos,
    rests_until: Instant,
    /// The same for trials below the limit, and how many requests were in the drive before the latest.
    rest_below: Nanos,
    rests_below_until: Instant,
    below_at: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// The limit doubles until requests wait.
    Growing,
    /// The limit follows the work.
    Resting,
    /// One window at half of the limit.
    Low,
    /// Windows at a base and at twice as much. The limit may be raised if the base is the limit; otherwise, fewer
    /// than the limit were in the drive, and the base is half of these.
    Trial { base: u32, raises: bool },
}

/// The measurement under way: the work done between two moments at one limit.
#[derive(Debug, Default)]
struct Window {
    limit: u32,
    /// Completions still to be ignored, since their requests were issued at another limit.
    skip: u32,
    since: Instant,
    /// The latest completion.
    last: Instant,
    /// How often time has passed between completions.
    moments: u32,
    completions: u32,
    /// In a trial, the completions and bytes of those whose I/O depends on the limit.
    elastic: u32,
    elastic_bytes: u64,
    /// The sum of their times in the drive; and by kind, in which a late request counts for little.
    time: Nanos,
    sums: Sums,
    /// How often requests waited because of the limit alone.
    full: u32,
}

impl DepthLaw {
    /// Makes a controller for a drive with at most `max` requests in flight, at least 1.
    pub(super) fn new(max: u32) -> Self {
        assert!(max > 0, "a drive without depth");
        Self {
            max,
            operating: 1,
            slack: SLACK_MIN,
            least: LeastTimes::unknown(),
            contended: false,
            calm_since: Instant::default(),
            phase: Phase::Growing,
            window: Window::default(),
            latest: (1, STRETCH_NONE),
            trial: Trial::default(),
            verdict: Verdict::Keep,
            rest: REST_MIN,
            rests_until: Instant::default(),
            rest_below: REST_MIN,
            rests_below_until: Instant::default(),
            below_at: 0,
        }
    }

    /// A controller that has found a depth.
    #[cfg(test)]
    pub(super) fn resting_at(operating: u32, max: u32) -> Self {
        Self {
            operating,
            phase: Phase::Resting,
            ..Self::new(max)
        }
    }

    /// How many requests may be in flight now.
    #[inline]
    pub(super) fn limit(&self) -> u32 {
        if self.contended {
            self.window.limit
        } else {
            self.max
        }
    }

    /// Notes whether more than one group has work now or had some lately. A single group gets the largest depth.
    pub(super) fn set_contended(&mut self, contended: bool, in_flight: u32, now: Instant) {
        if contended == self.contended {
            return;
        }
        self.contended = contended;
        if !contended {
            self.calm_since = now;
            return;
        }
        if now.since(self.calm_since) >= FORGET {
            *self = Self {
                contended,
                ..Self::new(self.max)
            };
        }
        self.rest_for(REST_MIN, now);
        // What is in flight was issued at the full depth.
        self.window = Window::default();
        self.open(in_flight, now);
    }

    /// Counts the end of a request that the drive had for `time`; `in_flight` requests remain. `is_elastic` says whether
    /// its sender would send more at a higher limit; only trials ask.
    #[inline]
    pub(super) fn completed(
        &mut self,
        direction: Direction,
        bytes: u64,
        time: Nanos,
        in_flight: u32,
        now: Instant,
        is_elastic: impl FnOnce() -> bool,
    ) {
        if !self.contended {
            return;
        }
        if now > self.window.last {
            // Completions of one moment belong to one window; otherwise a drive that completes in bursts would
            // distort the measurement.
            if self.window.is_full(self.phase) {
                self.close(in_flight, self.window.last);
            } else if self.window.is_interrupted(now) {
                self.interrupt();
            }
            self.window.last = now;
            self.window.moments += u32::from(self.window.skip == 0);
        }
        let window = &mut self.window;
        if window.skip > 0 {
            window.skip -= 1;
            window.since = now;
        } else if now > window.since {
            let kind = Kind::of(direction, bytes);
            window.sums.add(kind, self.least.counted(kind, time));
            if matches!(self.phase, Phase::Trial { .. }) && is_elastic() {
                window.elastic += 1;
                window.elastic_bytes += bytes;
            }
            window.time += time.min(now.since(window.since));
            window.completions += 1;
        }
    }

    /// What the drive takes at least for a request, if that is known.
    #[inline]
    pub(super) fn least_time(&self, direction: Direction, bytes: u64) -> Option<Nanos> {
        self.least
            .of(Kind::of(direction, bytes))
            .filter(|_| self.contended)
    }

    /// How long a request that took `time`, as one of `in_flight`, would have kept the whole drive busy.
    pub(super) fn part_of_drive(
        &self,
        direction: Direction,
        bytes: u64,
        time: Nanos,
        in_flight: u32,
    ) -> Nanos {
        let least = self.least.of(Kind::of(direction, bytes));
        match least.filter(|_| self.contended && in_flight >= self.window.limit) {
            // A part of its time it waited in the drive.
            Some(least) => {
                let (limit, stretch) = self.latest;
                let served = u64::from(limit) * STRETCH_NONE / stretch;
                Nanos(time.min(least).0 / served.max(1))
            }
            None => Nanos(time.0 / u64::from(in_flight.max(1))),
        }
    }

    /// Notes that requests wait although nothing but the limit holds them.
    #[inline]
    pub(super) fn note_full(&mut self) {
        self.window.full += 1;
    }

    /// Restarts the measurement, since it says nothing about the drive.
    pub(super) fn interrupt(&mut self) {
        self.window = Window {
            limit: self.window.limit,
            skip: self.window.limit,
            ..Window::default()
        };
    }

    fn close(&mut self, in_flight: u32, now: Instant) {
        let binds = self.window.binds();
        let in_drive = self.window.mean_in_flight(now).min(self.window.limit);
        match self.phase {
            Phase::Trial { .. } => self.count_trial(now),
            _ if binds => self.learn(self.window.limit, now),
            _ if in_drive > 1 => self.learn_below_limit(in_drive, now),
            _ => self.rest_for(self.rest, now),
        }
        self.open(in_flight, now);
    }

    /// Learns from a window in which the limit bound.
    fn learn(&mut self, limit: u32, now: Instant) {
        let is_new = self.least.lacks(&self.window.sums) && limit > 1;
        let least_before = self.least.sum(&self.window.sums);
        let stretch = self.compare(limit);
        let work = work(limit, stretch);
        let was_too_high = least_before > self.least.sum(&self.window.sums) * 11 / 10;
        match self.phase {
            Phase::Growing | Phase::Resting if is_new => {
                // What most of the requests take was seen beside a queue only.
                (self.phase, self.operating) = (Phase::Growing, 1);
            }
            Phase::Growing if stretch <= STRETCH_LITTLE && limit < self.max => {
                self.operating = (2 * limit + 1).min(self.max);
            }
            Phase::Growing => {
                self.follow(work);
                self.begin_rest(REST_MIN, now);
            }
            Phase::Resting => {
                let from = self.operating;
                self.follow(work);
                if was_too_high {
                    // What they are now is seen below a queue.
                    self.phase = Phase::Low;
                } else if from.abs_diff(self.operating) > from / 4 + 1 {
                    // The load, or the drive, is another: the least times may be.
                    self.begin_rest(REST_LEAST, now);
                } else if now >= self.rests_until {
                    self.phase = Phase::Low;
                }
            }
            Phase::Low if was_too_high => {
                // What they are is seen soon, at half of a lower limit.
                self.follow(work);
                self.begin_rest(REST_LEAST, now);
            }
            Phase::Low | Phase::Trial { .. } => self.begin_trial(self.operating, true),
        }
    }

    /// Learns from a window in which about `in_drive` requests were in the drive, fewer than the limit. It may be too
    /// high still: it shrinks, and a trial says whether half as many do as much.
    fn learn_below_limit(&mut self, in_drive: u32, now: Instant) {
        let stretch = self.compare(in_drive);
        let target = self.target(work(in_drive, stretch));
        if target < in_drive && target < self.operating {
            self.operating = target;
        }
        if self.phase != Phase::Resting {
            self.rest_for(self.rest, now);
        } else if now >= self.rests_until && self.may_try_below(in_drive, now) {
            self.begin_trial(in_drive.div_ceil(2), false);
        }
    }

    /// Says whether a trial below the limit is due: its windows have half of the throughput where it is in vain.
    fn may_try_below(&mut self, in_drive: u32, now: Instant) -> bool {
        let is_like_before = in_drive <= 2 * self.below_at && self.below_at <= 2 * in_drive;
        let may = now >= self.rests_below_until || !is_like_before;
        if may {
            self.below_at = in_drive;
        }
        may
    }

    /// Compares the times of a window's requests, at `depth`, with the least ones, and learns the latter. Returns the
    /// mean, in 1/64 of the least time.
    fn compare(&mut self, depth: u32) -> u64 {
        let sums = &self.window.sums;
        self.least.lower(sums);
        let mut stretch = stretch(sums.time(), self.least.sum(sums));
        let (depth_before, stretch_before) = self.latest;
        if depth == 1 || is_the_drives(depth_before, stretch_before, depth, stretch) {
            self.least.set(sums);
            stretch = self::stretch(sums.time(), self.least.sum(sums));
        }
        self.latest = (depth, stretch);
        stretch
    }

    /// The limit for this work, in 1/16.
    fn target(&self, work: u64) -> u32 {
        let target = work * self.slack / (WORK_PARTS * SLACK_PARTS) + 1;
        target.min(self.max.into()) as u32
    }

    /// Moves the limit to what the drive's work asks for: at once if that is far away, otherwise by a small step,
    /// since a window is short.
    fn follow(&mut self, work: u64) {
        let (from, target) = (self.operating, self.target(work));
        let is_near = target.abs_diff(from) <= from / 4;
        let step = (from / STEP_PART).max(1);
        self.operating = match target > from {
            true if is_near => from + step.min(target - from),
            true => target,
            false if is_near => from - step.min(from - target),
            // No further: whether the time falls with the limit is seen in the next window.
            false => target.max(from / 2),
        };
    }

    fn begin_trial(&mut self, base: u32, raises: bool) {
        self.trial = Trial::default();
        self.phase = Phase::Trial { base, raises };
    }

    /// Counts a window of a trial; the slack follows the verdict.
    fn count_trial(&mut self, now: Instant) {
        let Phase::Trial { base, raises } = self.phase else {
            return;
        };
        if self.window.elastic * INELASTIC_TIMES < self.window.completions {
            // What most of them send does not depend on the limit, so a trial would find chance alone.
            self.end_trial_below(raises, false, now);
            self.begin_rest(Nanos(self.rest.0 * 2).min(REST_MAX), now);
            return;
        }
        let Some(verdict) = self.trial.add(self.window.rates(now)) else {
            return;
        };
        let (from, slack) = (self.operating, self.slack);
        match verdict {
            Verdict::Raise if raises => {
                self.operating = (from * 3 / 2).max(from + 1).min(self.max);
                self.slack = (slack * 3 / 2).min(SLACK_MAX);
            }
            Verdict::Lower if raises => {
                self.slack = (slack * 3 / 4).max(SLACK_MIN);
                self.operating = (u64::from(from) * self.slack / slack).max(1) as u32;
            }
            Verdict::Lower => {
                self.operating = from.min(base * 3 / 2).max(1);
                self.slack = (slack * u64::from(self.operating) / u64::from(from)).max(SLACK_MIN);
            }
            Verdict::Raise | Verdict::Keep => {}
        }
        let rest = match self.slack == slack {
            true => Nanos(self.rest.0 * 2).min(REST_MAX),
            // The next trial follows soon, and sooner if the last one said the same.
            false if verdict == self.verdict => REST_LEAST,
            false => REST_MIN,
        };
        self.verdict = verdict;
        self.end_trial_below(raises, verdict == Verdict::Lower, now);
        self.begin_rest(rest, now);
    }

    /// Notes the end of a trial, if it was one below the limit, and whether it has changed anything.
    fn end_trial_below(&mut self, raises: bool, has_changed: bool, now: Instant) {
        if !raises {
            self.rest_below = match has_changed {
                true => REST_MIN,
                false => Nanos(self.rest_below.0 * 2).min(REST_MAX),
            };
            self.rests_below_until = now + self.rest_below;
        }
    }

    /// Rests, unless the limit still grows.
    fn rest_for(&mut self, rest: Nanos, now: Instant) {
        if self.phase != Phase::Growing {
            self.begin_rest(rest, now);
        }
    }

    fn begin_rest(&mut self, rest: Nanos, now: Instant) {
        self.phase = Phase::Resting;
        self.rest = rest;
        self.rests_until = now + rest;
    }

    /// Starts the next window at its limit.
    fn open(&mut self, in_flight: u32, now: Instant) {
        let o = self.operating;
        let limit = match self.phase {
            Phase::Growing | Phase::Resting => o,
            Phase::Low => (o / 2).max(1),
            Phase::Trial { base, .. } if self.trial.is_at_low() => base,
            Phase::Trial { base, .. } => (2 * base).min(self.max),
        };
        // Requests in flight above a lower limit drain first; the effect of a higher limit shows when all requests
        // issued before it have ended.
        let skip = if limit == self.window.limit { 0 } else { in_flight };
        self.window = Window {
            limit,
            skip,
            since: now,
            last: now,
            ..Window::default()
        };
    }
}

impl Window {
    fn is_full(&self, phase: Phase) -> bool {
        let lasts = self.last.since(self.since);
        let is_counted = match phase {
            Phase::Trial { .. } => {
                let enough = self.limit.max(COMPLETIONS_TRIAL);
                self.elastic >= enough || self.completions >= enough * INELASTIC_TIMES
            }
            _ => self.completions >= self.limit.max(COMPLETIONS_MIN),
        };
        is_counted && lasts >= WINDOW_MIN
    }

    /// How many requests were in the drive on average (Little's law), rounded.
    fn mean_in_flight(&self, end: Instant) -> u32 {
        let elapsed = end.since(self.since).0.max(1);
        ((self.time.0 + elapsed / 2) / elapsed) as u32
    }

    /// Says whether the limit was what bound the requests in flight.
    fn binds(&self) -> bool {
        u64::from(self.full) * u64::from(self.limit) * BINDS_PART >= u64::from(self.completions)
    }

    /// Says whether no completion was seen for much longer than usual: the drive paused, or the caller had no
    /// CPU. Then all requests in flight end at once, and a larger number of them looks like a gain.
    fn is_interrupted(&self, now: Instant) -> bool {
        let gap = now.since(self.last).0;
        self.moments >= MOMENTS_MIN
            && gap / INTERRUPTION > self.last.since(self.since).0 / u64::from(self.moments)
    }

    fn rates(&self, end: Instant) -> Rates {
        let elapsed = u128::from(end.since(self.since).0.max(1));
        let per_second = |count: u64| (u128::from(count) * 1_000_000_000 / elapsed) as u64;
        Rates {
            requests: per_second(u64::from(self.elastic) * 1000),
            bytes: per_second(self.elastic_bytes),
        }
    }
}

/// How many of `depth` requests the drive works on if they take so long, in 1/64 of their least time; in 1/16.
fn work(depth: u32, stretch: u64) -> u64 {
    (u64::from(depth) * STRETCH_NONE * WORK_PARTS / stretch).max(1)
}

/// The time that requests took, over their least time, in 1/64.
fn stretch(time: u64, least: u64) -> u64 {
    (time * STRETCH_NONE / least.max(1)).max(STRETCH_NONE)
}

/// Says whether requests take as long at a much lower limit, so that they do not wait in the drive.
fn is_the_drives(limit_before: u32, stretch_before: u64, limit: u32, stretch: u64) -> bool {
    limit_before >= limit + limit / 2 && stretch > STRETCH_LITTLE && stretch * 10 >= stretch_before * 9
}

/// Requests take their least time, and hardly more, in 1/64 of it.
const STRETCH_NONE: u64 = 64;
const STRETCH_LITTLE: u64 = 80;
/// The work is counted in so many parts of a request.
const WORK_PARTS: u64 = 16;
/// The slack: 5/4 at least, 64 at most.
const SLACK_PARTS: u64 = 16;
const SLACK_MIN: u64 = 20;
const SLACK_MAX: u64 = 64 * SLACK_PARTS;
/// A small step of the limit.
const STEP_PART: u32 = 16;
/// Least duration of a window, and its least number of completions.
const WINDOW_MIN: Nanos = Nanos::from_millis(1);
const COMPLETIONS_MIN: u32 = 8;
/// The same for a window of a trial.
const COMPLETIONS_TRIAL: u32 = 16;
/// A trial says nothing if all completions are so many times those that depend on the limit.
const INELASTIC_TIMES: u32 = 8;
/// The limit binds a window if requests waited for it once in so many times the limit's completions.
const BINDS_PART: u64 = 2;
/// A gap this many times longer than the mean gap, taken over at least so many gaps, interrupts a window.
const INTERRUPTION: u64 = 32;
const MOMENTS_MIN: u32 = 8;
/// The rest between two trials that change nothing: it doubles.
const REST_MIN: Nanos = Nanos::from_millis(16);
const REST_MAX: Nanos = Nanos::from_secs(4);
/// The rest after a trial that changes the slack as the one before did.
const REST_LEAST: Nanos = Nanos::from_millis(2);
/// How long the depth is kept without competition.
const FORGET: Nanos = Nanos::from_secs(60);

#[cfg(test)]
mod tests;
