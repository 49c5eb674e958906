//! What a client's past predicts: the size of its next budget, whether its requests lie far apart,
//! how soon the next one comes, and whether a user waits for it.
//! `turn` and `mod` use it; each queue has one.

use crate::time::{Instant, Nanos};

/// The history of a queue's client.
#[derive(Clone, Copy, Debug)]
pub(super) struct History {
    /// Budget of the next turn, in bytes; 0 before the first one.
    budget: u32,
    /// A bit for each of the latest requests: whether it was far from the one before.
    far: u32,
    /// Where the latest request ended; `None` before the first one.
    end: Option<u64>,
    /// Think time, from the end of its last request to the next one: a moving mean, and its number of values.
    think: Nanos,
    thinks: u32,
    /// Since when it has no request, waiting or in flight.
    dry_at: Option<Instant>,
    /// Its service since it was last dry, in bytes.
    burst: u64,
    /// A soft real-time client would not return before this time.
    paced_until: Instant,
    /// Until when its weight is raised, and for at most how much service.
    raised_until: Option<Instant>,
    raised_for: u64,
}

/// Why a turn ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TurnEnd {
    /// Its budget did not suffice for the next request.
    Exhausted,
    /// It took too long.
    Timeout,
    /// The queue became empty, and the drive did not wait for it.
    Dry,
    /// The queue became empty, and no request came while the drive waited.
    TooIdle,
    /// Something else changed.
    Asked,
}

impl History {
    /// The history of a new client.
    pub(super) const NEW: Self = Self {
        budget: 0,
        far: 0,
        end: None,
        think: Nanos::ZERO,
        thinks: 0,
        dry_at: None,
        burst: 0,
        paced_until: Instant(0),
        raised_until: None,
        raised_for: 0,
    };

    /// A request came in.
    pub(super) fn inserted(&mut self, position: u64, end: u64) {
        if let Some(last) = self.end {
            self.far = self.far << 1 | u32::from(position.abs_diff(last) > FAR);
        }
        self.end = Some(end);
    }

    /// Whether most of its requests are far from the one before.
    pub(super) fn is_seeky(&self) -> bool {
        self.far.count_ones() > SEEKY_OF_32
    }

    /// Where its latest request ended.
    pub(super) fn end(&self) -> Option<u64> {
        self.end
    }

    /// The last of its requests has ended.
    pub(super) fn dried(&mut self, now: Instant) {
        self.dry_at = Some(now);
        let pace = self.burst.saturating_mul(1_000_000_000) / SOFT_RATE;
        self.paced_until = self.paced_until.max(now + Nanos(pace));
    }

    /// It has a request again; one pause counts as at most `think_max`.
    pub(super) fn woke(&mut self, now: Instant, think_max: Nanos) {
        if let Some(dry_at) = self.dry_at.take() {
            let think = now.since(dry_at).min(think_max);
            let before = if self.thinks == 0 { think } else { self.think };
            self.think = Nanos((before.0 * 7 + think.0) / 8);
            self.thinks = self.thinks.saturating_add(1);
        }
        self.burst = 0;
    }

    /// Whether its mean think time exceeds `time`.
    pub(super) fn thinks_longer_than(&self, time: Nanos) -> bool {
        self.thinks >= THINKS_KNOWN && self.think > time
    }

    /// It was served.
    pub(super) fn served(&mut self, bytes: u32) {
        self.burst += u64::from(bytes);
        self.raised_for = self.raised_for.saturating_sub(bytes.into());
    }

    /// The budget of its next turn, when the largest one is `max`.
    pub(super) fn budget(&self, max: u32) -> u32 {
        if self.budget == 0 {
            max / 2
        } else {
            self.budget.min(max)
        }
    }

    /// Adjusts the budget after a turn: a client that used it up gets a larger one, so that long sweeps
    /// continue; a client that returns late gets a smaller one, so that it is soon due again and the wait for
    /// it costs little.
    pub(super) fn turn_ended(&mut self, why: TurnEnd, served: u64, has_more_in_flight: bool, max: u32) {
        let min = max / BUDGET_STEPS;
        let budget = self.budget(max);
        let new = match why {
            TurnEnd::Exhausted => budget.saturating_mul(4),
            TurnEnd::Timeout => budget.saturating_mul(2),
            TurnEnd::TooIdle if has_more_in_flight => budget.saturating_mul(2),
            TurnEnd::TooIdle => budget.saturating_sub(4 * min),
            TurnEnd::Dry => served.min(u64::from(max)) as u32,
            TurnEnd::Asked => budget,
        };
        self.budget = new.clamp(min.max(1), max);
    }

    /// Raises its weight, if it returns at `now` after a long pause, like a program that a user starts
    /// (interactive), or not before it consumed its last burst at a moderate rate, like a media player (soft
    /// real time).
    pub(super) fn start_raising(&mut self, now: Instant) {
        let pause = self.dry_at.map(|dry_at| now.since(dry_at));
        let is_interactive = pause.is_none_or(|pause| pause >= LONG_PAUSE);
        let is_paced = now >= self.paced_until && !self.is_seeky();
        let (time, service) = if is_interactive {
            (RAISED_INTERACTIVE, RAISED_SERVICE)
        } else if is_paced {
            (RAISED_SOFT, u64::MAX)
        } else {
            return;
        };
        let until = self.raised_until.unwrap_or(now).max(now + time);
        self.raised_until = Some(until);
        self.raised_for = self.raised_for.max(service);
    }

    /// The factor by which its weight is raised at `now`.
    pub(super) fn factor(&mut self, now: Instant) -> u32 {
        if self
            .raised_until
            .is_some_and(|until| now >= until || self.raised_for == 0)
        {
            self.raised_until = None;
        }
        if self.raised_until.is_some() { RAISE } else { 1 }
    }

    /// The weight is raised no more.
    pub(super) fn end_raising(&mut self) {
        self.raised_until = None;
    }
}

/// Farther than this from the end of the one before is a seek: 400 KiB.
const FAR: u64 = 400 << 10;
/// More than so many far requests of 32 make a queue seeky.
const SEEKY_OF_32: u32 = 19;
/// Number of pauses from which on their mean counts.
const THINKS_KNOWN: u32 = 8;
/// The smallest budget is this part of the largest.
const BUDGET_STEPS: u32 = 32;
/// The factor of a raised weight.
const RAISE: u32 = 30;
/// A client that returns after this long is assumed to be a program that was just started.
const LONG_PAUSE: Nanos = Nanos::from_secs(2);
/// How long, and for how much service, such a program is favoured: about as much as loading a large one takes.
const RAISED_INTERACTIVE: Nanos = Nanos::from_secs(6);
const RAISED_SERVICE: u64 = 60 << 20;
/// How long a soft real-time client is favoured at each of its bursts.
const RAISED_SOFT: Nanos = Nanos::from_millis(300);
/// The largest rate of a client that counts as soft real time, in bytes per second: a compressed film of
/// high quality.
const SOFT_RATE: u64 = 7000 * 512;

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: u32 = 8 << 20;

    #[test]
    fn budget_grows_to_the_largest_when_used_up_and_shrinks_while_idle() {
        let mut history = History::NEW;
        assert_eq!(history.budget(MAX), MAX / 2);
        history.turn_ended(TurnEnd::Exhausted, 0, false, MAX);
        assert_eq!(history.budget(MAX), MAX);
        for _ in 0..8 {
            history.turn_ended(TurnEnd::TooIdle, 0, false, MAX);
        }
        assert_eq!(history.budget(MAX), MAX / 32);
        history.turn_ended(TurnEnd::Timeout, 0, false, MAX);
        assert_eq!(history.budget(MAX), MAX / 16);
        history.turn_ended(TurnEnd::Dry, 1 << 20, false, MAX);
        assert_eq!(history.budget(MAX), 1 << 20);
    }

    #[test]
    fn scattered_requests_make_a_client_seeky_and_a_sequence_ends_it() {
        let mut history = History::NEW;
        (0..40u64).for_each(|n| history.inserted(n << 30, (n << 30) + 4096));
        assert!(history.is_seeky());
        let from = 40u64 << 30;
        (0..20u64).for_each(|n| history.inserted(from + n * 4096, from + (n + 1) * 4096));
        assert!(!history.is_seeky());
    }

    #[test]
    fn new_client_is_raised_for_a_time_and_an_amount() {
        let mut history = History::NEW;
        history.start_raising(Instant(0));
        assert_eq!(history.factor(Instant(0)), RAISE);
        assert_eq!(history.factor(Instant(0) + RAISED_INTERACTIVE), 1);
        history.start_raising(Instant(0));
        history.served(RAISED_SERVICE as u32);
        assert_eq!(history.factor(Instant(1)), 1);
    }

    #[test]
    fn client_of_a_moderate_rate_is_raised_at_each_burst_and_a_greedy_one_is_not() {
        let (mut player, mut copier) = (History::NEW, History::NEW);
        let mut at = Instant(0);
        for history in [&mut player, &mut copier] {
            history.served(1 << 20);
            history.dried(at);
        }
        at = at + Nanos::from_millis(1);
        copier.start_raising(at);
        assert_eq!(copier.factor(at), 1);
        at = at + Nanos::from_millis(400);
        player.start_raising(at);
        assert_eq!(player.factor(at), RAISE);
    }
}
