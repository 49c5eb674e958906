//! Decides what the others may have while a reactor is late whose clients had a backlog: what they had before, and no more. `mod`
//! tells it what is served and what ends, the gate when each reactor has answered.
//!
//! ```text
//!            its last queue runs dry         an end unanswered for LATE_MIN
//!  backlog ──────────────────────────► dry ─────────────────────────────────► held: the others go on at their pace
//!     ▲                                 │ comes back                             │
//!     └─────────────────────────────────┴────────────────────────────────────────┘ answers; HOLD_MAX; no credit left
//! ```
//! A thread that loses its processor for some milliseconds loses its clients' shares with it: they have ends that nobody has told
//! them of, so they cannot ask again. To the scheduler they look like clients that have fallen silent, and the others take
//! their part. A debt could be paid later only by starving these; what is not given away needs no paying.
//!
//! *The pace* is what clients of all other reactors were served over the last WINDOW in which nobody was late: bytes over time. So
//! they notice nothing, and the drive does less meanwhile. How much that may be in the long run is bounded by a credit of 1 in
//! `CREDIT_PART` of all time.

use crate::ids::{GroupId, REACTORS_MAX, ReactorId, ReactorSet};
use crate::time::{Instant, Nanos};

/// What is known of the reactors' clients.
#[derive(Debug)]
pub(super) struct Absence {
    reactors: Vec<Clients>,
    /// Reactors that have had clients.
    seen: usize,
    /// Reactors that had a part of the drive worth looking after, and have nothing queued now.
    dry: ReactorSet,
    heavy: ReactorSet,
    /// Served since the queue was made, in bytes.
    served: u64,
    /// When the window began, and how long the last one was.
    window_at: Instant,
    window: Nanos,
    hold: Option<Hold>,
    credit: Nanos,
    credit_at: Instant,
}

/// The clients of one reactor.
#[derive(Clone, Copy, Debug, Default)]
struct Clients {
    /// Their queues that have something.
    backlog: u32,
    /// Served in this window, and in the last one, in bytes.
    served: u64,
    pace: u64,
    /// Whose request ended last, and when.
    ended: Instant,
    group: GroupId,
    /// It was seen to be late since then, having answered until then; and what all clients had been served.
    late_since: Option<Instant>,
    answered: Instant,
    served_then: u64,
}

#[derive(Clone, Copy, Debug)]
struct Hold {
    reactor: ReactorId,
    since: Instant,
    until: Instant,
    /// What all had been served when it began.
    served_then: u64,
    /// Since when something was kept back.
    kept_since: Option<Instant>,
}

impl Absence {
    pub(super) fn new() -> Self {
        Self {
            reactors: vec![Clients::default(); REACTORS_MAX],
            seen: 0,
            dry: ReactorSet::default(),
            heavy: ReactorSet::default(),
            served: 0,
            window_at: Instant(0),
            window: Nanos::ZERO,
            hold: None,
            credit: CREDIT_MAX,
            credit_at: Instant(0),
        }
    }

    /// A queue of a client of this reactor has something.
    #[inline]
    pub(super) fn filled(&mut self, reactor: ReactorId) {
        self.seen = self.seen.max(reactor.index() + 1);
        self.reactors[reactor.index()].backlog += 1;
        self.dry.remove(reactor);
    }

    /// It has nothing any more.
    #[inline]
    pub(super) fn emptied(&mut self, reactor: ReactorId) {
        let clients = &mut self.reactors[reactor.index()];
        clients.backlog -= 1;
        if clients.backlog == 0 {
            clients.late_since = None;
            self.dry.insert(reactor);
        }
    }

    /// A client of this reactor was served.
    #[inline]
    pub(super) fn served(&mut self, reactor: ReactorId, bytes: u32, now: Instant) {
        self.served += u64::from(bytes);
        self.reactors[reactor.index()].served += u64::from(bytes);
        if now.since(self.window_at) >= WINDOW {
            self.close_window(now);
        }
    }

    /// A request of a client of this reactor has ended.
    #[inline]
    pub(super) fn ended(&mut self, reactor: ReactorId, group: GroupId, at: Instant) {
        let clients = &mut self.reactors[reactor.index()];
        clients.ended = clients.ended.max(at);
        clients.group = group;
    }

    /// Whose answers are of interest now.
    #[inline]
    pub(super) fn awaited(&self) -> ReactorSet {
        self.dry.and(self.heavy)
    }

    /// Learns that a reactor has answered all that had ended until then. Returns for whom a hold has ended by that, if things were
    /// kept back, and for how long.
    pub(super) fn answered(
        &mut self,
        reactor: ReactorId,
        until: Instant,
        now: Instant,
    ) -> Option<(GroupId, Nanos)> {
        let served = self.served;
        let clients = &mut self.reactors[reactor.index()];
        let is_late = clients.ended > until;
        if !is_late || clients.late_since.is_none() || clients.answered != until {
            clients.late_since = is_late.then_some(now);
            clients.answered = until;
            clients.served_then = served;
            return self.end_if(reactor, now);
        }
        let since = clients.late_since.unwrap_or(now);
        let served_then = clients.served_then;
        let is_due = now.since(since) >= LATE_MIN && now.since(since) < HOLD_MAX;
        if self.hold.is_none() && is_due && self.window > Nanos::ZERO {
            self.earn(now);
            let left = self.credit.min(HOLD_MAX);
            if left > LATE_MIN {
                self.hold = Some(Hold {
                    reactor,
                    since,
                    until: since + left,
                    served_then,
                    kept_since: None,
                });
            }
        }
        None
    }

    /// Says whether somebody is waited for.
    #[inline]
    pub(super) fn holds(&self) -> bool {
        self.hold.is_some()
    }

    /// Says whether the others may be served now.
    pub(super) fn admits(&mut self, now: Instant) -> bool {
        let Some(hold) = self.hold else {
            return true;
        };
        let admits = self.due_at(&hold) <= now;
        if !admits && let Some(hold) = &mut self.hold {
            hold.kept_since.get_or_insert(now);
        }
        admits
    }

    /// Says when the others may be served again.
    pub(super) fn next_wakeup(&self) -> Option<Instant> {
        self.hold.map(|hold| self.due_at(&hold))
    }

    /// Ends a hold that is over; returns for whom it was and how long something was kept back.
    pub(super) fn look(&mut self, now: Instant) -> Option<(GroupId, Nanos)> {
        let hold = self.hold?;
        let is_back = self.reactors[hold.reactor.index()].backlog > 0;
        (is_back || now >= hold.until).then(|| self.end(now)).flatten()
    }

    fn end_if(&mut self, reactor: ReactorId, now: Instant) -> Option<(GroupId, Nanos)> {
        self.hold
            .filter(|hold| hold.reactor == reactor)
            .and_then(|_| self.end(now))
    }

    fn end(&mut self, now: Instant) -> Option<(GroupId, Nanos)> {
        let hold = self.hold.take()?;
        self.earn(now);
        self.credit = Nanos(self.credit.0.saturating_sub(now.since(hold.since).0));
        self.restart_window(now);
        let group = self.reactors[hold.reactor.index()].group;
        Some((group, now.since(hold.kept_since?)))
    }

    /// When the others have had no more than their pace since the hold began; its end, at the latest.
    fn due_at(&self, hold: &Hold) -> Instant {
        let total: u64 = self.reactors[..self.seen].iter().map(|one| one.pace).sum();
        let pace = total - self.reactors[hold.reactor.index()].pace;
        if pace == 0 {
            return hold.until;
        }
        let ahead = u128::from(self.served - hold.served_then) * u128::from(self.window.0) / u128::from(pace);
        hold.until
            .min(hold.since + Nanos(u64::try_from(ahead).unwrap_or(u64::MAX / 4)))
    }

    fn earn(&mut self, now: Instant) {
        let earned = now.since(self.credit_at).0 / CREDIT_PART;
        self.credit = Nanos(self.credit.0.saturating_add(earned)).min(CREDIT_MAX);
        self.credit_at = now;
    }

    #[inline(never)]
    fn close_window(&mut self, now: Instant) {
        let length = now.since(self.window_at);
        let someone_is_late = self.reactors[..self.seen]
            .iter()
            .any(|one| one.backlog == 0 && one.late_since.is_some_and(|since| now.since(since) >= LATE_MIN));
        if self.hold.is_none() && !someone_is_late && length.0 < 4 * WINDOW.0 {
            let total: u64 = self.reactors[..self.seen].iter().map(|one| one.served).sum();
            self.heavy = ReactorSet::default();
            for (id, one) in self.reactors[..self.seen].iter_mut().enumerate() {
                one.pace = one.served;
                if one.pace >= total / HEAVY_PART {
                    self.heavy.insert(ReactorId(id as u16));
                }
            }
            self.window = length;
        }
        self.restart_window(now);
    }

    fn restart_window(&mut self, now: Instant) {
        self.window_at = now;
        self.reactors[..self.seen]
            .iter_mut()
            .for_each(|one| one.served = 0);
    }
}

/// So long what all are served is added up to a pace.
const WINDOW: Nanos = Nanos::from_millis(4);
/// Who has not answered for so long is late: a sleeper needs less to wake up.
const LATE_MIN: Nanos = Nanos::from_micros(200);
/// So long the others are kept to their pace: an idle group's part is the others' within 10 ms.
const HOLD_MAX: Nanos = Nanos::from_millis(10);
/// Holds take one in so many of all time at most, and so much at once.
const CREDIT_PART: u64 = 32;
const CREDIT_MAX: Nanos = Nanos::from_millis(30);
/// A reactor is waited for whose clients have at least one in so many of all bytes.
const HEAVY_PART: u64 = 16;

#[cfg(test)]
mod tests {
    use super::*;

    const LATE: ReactorId = ReactorId(0);
    const OTHER: ReactorId = ReactorId(1);
    const GROUP: GroupId = GroupId(7);
    const MS: u64 = 1_000_000;

    /// Clients of both reactors have been served, a request each 10 µs in turn, of these sizes, until `Instant(10 MS)`; then
    /// those of `LATE` have run dry, and a request of theirs has ended that it has not answered.
    fn dry(late_bytes: u32, other_bytes: u32) -> Absence {
        let mut absence = Absence::new();
        absence.filled(LATE);
        absence.filled(OTHER);
        for at in (0..10 * MS).step_by(20_000) {
            absence.served(LATE, late_bytes, Instant(at));
            absence.served(OTHER, other_bytes, Instant(at + 10_000));
        }
        absence.emptied(LATE);
        absence.ended(LATE, GROUP, Instant(10 * MS));
        absence
    }

    /// Serves the other reactor whenever it may be, every 10 µs; `LATE` has answered until `answered`. Returns how often.
    fn serve_other(absence: &mut Absence, from: u64, until: u64, answered: u64, bytes: u32) -> u64 {
        let mut served = 0;
        for at in (from..until).step_by(10_000).map(Instant) {
            if absence.awaited().contains(LATE) {
                absence.answered(LATE, Instant(answered), at);
            }
            absence.look(at);
            if absence.admits(at) {
                absence.served(OTHER, bytes, at);
                served += 1;
            }
        }
        served
    }

    #[test]
    fn while_a_reactor_is_late_the_others_have_what_they_had_before() {
        let mut absence = dry(4096, 4096);
        // Twice as often as before, if it could: one each 20 µs is its pace.
        let served = serve_other(&mut absence, 10 * MS, 15 * MS, 0, 4096);
        assert!((245..=260).contains(&served), "{served} in 5 ms");
        assert!(absence.holds());
        assert!(absence.next_wakeup().is_some_and(|at| at > Instant(14 * MS)));
    }

    #[test]
    fn who_answers_and_asks_for_nothing_leaves_its_part_to_the_others() {
        let mut absence = dry(4096, 4096);
        let served = serve_other(&mut absence, 10 * MS, 15 * MS, 10 * MS, 4096);
        assert_eq!(served, 500);
        assert!(!absence.holds());
    }

    #[test]
    fn a_hold_ends_with_the_answer_and_tells_how_long_it_kept_things_back() {
        let mut absence = dry(4096, 4096);
        serve_other(&mut absence, 10 * MS, 12 * MS, 0, 4096);
        assert!(absence.holds());
        let (group, kept) = absence
            .answered(LATE, Instant(12 * MS), Instant(12 * MS))
            .expect("something was kept back");
        assert_eq!(group, GROUP);
        assert!(
            kept >= Nanos::from_millis(1) && kept <= Nanos::from_millis(2),
            "{kept}"
        );
        assert!(!absence.holds() && absence.admits(Instant(12 * MS)));
    }

    #[test]
    fn nobody_waits_for_a_reactor_whose_clients_had_next_to_nothing() {
        let absence = dry(512, 64 << 10);
        assert!(absence.awaited().is_empty());
    }

    #[test]
    fn a_hold_lasts_ten_milliseconds_at_most() {
        let mut absence = dry(4096, 4096);
        serve_other(&mut absence, 10 * MS, 21 * MS, 0, 4096);
        assert!(!absence.holds());
        assert_eq!(serve_other(&mut absence, 21 * MS, 22 * MS, 0, 4096), 100);
    }

    #[test]
    fn a_reactor_that_is_always_late_costs_a_bounded_part_of_the_drive() {
        let mut absence = dry(4096, 4096);
        let mut served = 0;
        let mut now = 10 * MS;
        for _ in 0..200 {
            // Late for 5 ms, then back for 5.
            absence.ended(LATE, GROUP, Instant(now));
            served += serve_other(&mut absence, now, now + 5 * MS, now - 1, 4096);
            absence.filled(LATE);
            for at in (now + 5 * MS..now + 10 * MS).step_by(20_000) {
                absence.look(Instant(at));
                absence.served(LATE, 4096, Instant(at));
                absence.served(OTHER, 4096, Instant(at + 10_000));
                served += 1;
            }
            absence.emptied(LATE);
            now += 10 * MS;
        }
        // 500 + 250 in each round without holds; a hold of 1 in 32 of all time, and the first 30 ms, cost half of that at most.
        let most = 200 * 750;
        assert!(served > most * 96 / 100, "{served} of {most}");
    }
}
