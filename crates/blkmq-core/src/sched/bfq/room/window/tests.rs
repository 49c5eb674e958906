//! When the room applies and when it is lifted.

use super::*;

/// Ends `n` requests that take too long, one every `every` microseconds.
fn ends(window: &mut Window, n: u64, every: u64, now: &mut Instant) {
    for _ in 0..n {
        *now = *now + Nanos(every * 1000);
        window.note_held_back(32);
        window.note_end(Nanos(2_000_000), Nanos(1_000_000), 32, *now);
    }
}

/// A room that applies, after requests that took too long ended one in 100 µs.
fn limited() -> (Window, Instant) {
    let (mut window, mut now) = (Window::default(), Instant(0));
    window.note_held_back(32);
    window.begin();
    window.begin_again(true, now);
    ends(&mut window, 400, 100, &mut now);
    assert!(window.permits(0) && !window.permits(1), "{window:?}");
    (window, now)
}

/// An open phase of 5 ms with `ends` ends, and `times` times the usual rate of all members.
fn open(window: &mut Window, ends: u64, times: u64) {
    window.note_open(ends, Nanos::from_millis(5), 1_000_000 * times, 1_000_000);
}

#[test]
fn a_room_that_costs_more_than_it_gains_is_lifted() {
    let (mut window, _) = limited();
    open(&mut window, 40, 2);
    assert!(window.permits(1000), "{window:?}");
}

#[test]
fn a_room_that_gains_much_or_costs_little_stays() {
    for (ends, times) in [(20, 8), (0, 8), (40, 1)] {
        let (mut window, _) = limited();
        open(&mut window, ends, times);
        assert!(
            !window.permits(1),
            "{ends} ends, {times} times as much: {window:?}"
        );
    }
}

#[test]
fn a_lifted_room_counts_again_when_it_would_gain_much() {
    let (mut window, mut now) = limited();
    open(&mut window, 40, 2);
    ends(&mut window, 64, 100, &mut now);
    assert!(window.permits(1000), "as fast as with the room: {window:?}");
    ends(&mut window, 256, 300, &mut now);
    assert!(!window.permits(1000), "a third as fast: {window:?}");
}

#[test]
fn a_room_is_not_lifted_before_its_pace_is_known() {
    let (mut window, mut now) = limited();
    window.forget_gain();
    ends(&mut window, PACE_KNOWN - 1, 100, &mut now);
    open(&mut window, 40, 8);
    assert!(!window.permits(1), "{window:?}");
}
