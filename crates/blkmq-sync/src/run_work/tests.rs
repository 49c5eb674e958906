//! Tests of run work, with real threads where several are needed.

use std::sync::atomic::{AtomicU64 as StdU64, Ordering as StdOrdering};
use std::thread;

use super::*;

#[test]
fn only_the_first_of_many_runs_wakes_the_owner() {
    let work = RunWork::new();
    assert!(!work.take(0), "nothing is due");
    assert_eq!(work.run(), Kick::Wake);
    assert_eq!(work.run(), Kick::None);
    assert!(work.take(0));
    assert!(!work.take(0), "one pass at a time");
    assert!(!work.finish());
    assert!(!work.take(0));
}

#[test]
fn cheap_ways_to_ask_answer_as_run_does() {
    let ways: [fn(&RunWork) -> Kick; 3] = [RunWork::run, RunWork::run_by_owner, |work| {
        work.run_published(&Published::now())
    }];
    for ask in ways {
        let work = RunWork::new();
        assert_eq!((ask(&work), ask(&work)), (Kick::Wake, Kick::None));
        assert!(work.take(0));
        assert_eq!((ask(&work), ask(&work)), (Kick::None, Kick::None));
        assert!(work.finish(), "once more");
        assert!(work.take(0) && !work.finish());
        work.stop();
        assert_eq!(ask(&work), Kick::None);
        assert_eq!(work.start(), Kick::Wake);
    }
}

#[test]
fn run_during_a_pass_makes_one_more_pass() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    assert!(work.take(0));
    assert_eq!(work.run(), Kick::None);
    assert_eq!(work.run(), Kick::None);
    assert!(work.finish(), "once more");
    assert_eq!(work.run(), Kick::None, "it is queued");
    assert!(work.take(0));
    assert!(!work.finish());
}

#[test]
fn delayed_run_is_due_at_its_deadline_and_never_before() {
    let work = RunWork::new();
    assert_eq!(work.run_delayed(5_001), Delay::Rearm);
    assert_eq!(work.deadline(), Some(6_000), "rounded up to a microsecond");
    assert!(!work.take(5_999));
    assert!(work.take(6_000));
    assert_eq!(work.deadline(), None);
    assert!(!work.finish());
}

#[test]
fn deadlines_at_both_ends_of_the_range_are_kept() {
    let work = RunWork::new();
    assert_eq!(work.run_delayed(u64::MAX), Delay::Rearm);
    assert!(work.deadline().is_some_and(|at| at >= u64::MAX - NS_PER_UNIT));
    assert!(!work.take(u64::MAX / 2));
    assert_eq!(work.run_delayed(0), Delay::Rearm);
    assert_eq!(work.deadline(), Some(1_000), "0 is rounded up too");
    assert!(work.take(1_000));
}

#[test]
fn flaw_b_cancelling_does_not_swallow_later_runs() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    work.stop();
    assert!(work.is_stopped() && !work.take(0), "the queued run is taken back");
    assert_eq!(work.start(), Kick::Wake);
    assert!(!work.is_stopped() && work.take(0));
    assert!(!work.finish());
    assert_eq!(work.run(), Kick::Wake, "as good as new");
}

#[test]
fn flaw_c_a_start_runs_once_even_if_nobody_asked() {
    let work = RunWork::new();
    work.stop();
    assert_eq!(work.start(), Kick::Wake);
    assert!(work.take(0));
    assert!(!work.finish());

    work.stop();
    assert_eq!(work.run(), Kick::None);
    assert_eq!(work.run_delayed(9_000), Delay::Kept);
    assert_eq!(work.deadline(), None);
    assert_eq!(work.start(), Kick::Wake);
    assert!(work.take(0));
    assert!(!work.finish(), "once");
}

#[test]
fn flaw_d_an_immediate_run_is_not_postponed_by_a_delayed_one() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    assert_eq!(work.run_delayed(9_000), Delay::Kept);
    assert_eq!(work.deadline(), None);
    assert!(work.take(0));
    assert!(!work.finish());

    assert_eq!(work.run_delayed(9_000), Delay::Rearm);
    assert_eq!(work.run(), Kick::Wake, "an immediate run overtakes a delayed one");
    assert!(work.take(0));
    assert!(!work.finish());
    assert!(!work.take(9_000), "which is thereby done");
}

#[test]
fn flaw_e_repeated_delayed_runs_do_not_push_back_the_first() {
    let work = RunWork::new();
    assert_eq!(work.run_delayed(10_000), Delay::Rearm);
    for later in 11..20 {
        assert_eq!(work.run_delayed(later * 1_000), Delay::Kept);
    }
    assert_eq!(work.deadline(), Some(10_000));
    assert_eq!(
        work.run_delayed(3_000),
        Delay::Rearm,
        "an earlier one pulls it forward"
    );
    assert!(work.take(3_000));
}

#[test]
fn delayed_run_asked_for_during_a_pass_is_delayed_after_it() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    assert!(work.take(0));
    assert_eq!(work.run_delayed(7_000), Delay::Rearm);
    assert!(!work.finish());
    assert_eq!(work.deadline(), Some(7_000));
    assert!(!work.take(6_000) && work.take(7_000));
}

#[test]
fn stop_during_a_pass_lets_it_end_and_begins_no_other() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    assert!(work.take(0));
    assert_eq!(work.run(), Kick::None);
    work.stop();
    assert!(work.is_running());
    assert!(!work.finish(), "what was asked for waits for start");
    assert!(!work.is_running() && !work.take(0) && work.is_wanted());
    assert_eq!(work.start(), Kick::Wake);
    assert!(work.take(0));
}

#[test]
fn start_during_a_pass_makes_one_more_pass() {
    let work = RunWork::new();
    assert_eq!(work.run(), Kick::Wake);
    assert!(work.take(0));
    work.stop();
    assert_eq!(work.start(), Kick::None, "the owner is looking");
    assert!(work.finish());
    assert!(work.take(0));
}

#[test]
#[should_panic(expected = "finish without take")]
fn finishing_what_was_not_taken_panics() {
    RunWork::new().finish();
}

/// Four threads publish work and request runs of every kind, one stops and starts; a dedicated owner makes
/// the passes and sleeps by spinning on its notifications. All work must be passed over, with no more
/// wake-ups than passes.
#[test]
fn no_run_is_lost_among_submitters_timers_stops_and_starts() {
    const SUBMITTERS: u64 = 3;
    const ITEMS: u64 = 20_000;
    let work = RunWork::new();
    let (published, asked_at, kicks) = (StdU64::new(0), StdU64::new(1_000), StdU64::new(0));
    let (mut seen, mut passes) = (0, 0);
    thread::scope(|scope| {
        for me in 0..SUBMITTERS {
            let (work, published, asked_at, kicks) = (&work, &published, &asked_at, &kicks);
            scope.spawn(move || {
                for n in 0..ITEMS {
                    published.fetch_add(1, StdOrdering::Relaxed);
                    if n % 5 == me {
                        let _ = work.run_delayed(asked_at.fetch_add(100, StdOrdering::Relaxed));
                    } else if work.run() == Kick::Wake {
                        kicks.fetch_add(1, StdOrdering::Relaxed);
                    }
                    if n % 32 == 0 {
                        thread::yield_now();
                    }
                }
            });
        }
        scope.spawn(|| {
            for _ in 0..200 {
                work.stop();
                thread::yield_now();
                if work.start() == Kick::Wake {
                    kicks.fetch_add(1, StdOrdering::Relaxed);
                }
                thread::yield_now();
            }
        });
        while seen < SUBMITTERS * ITEMS {
            while work.take(asked_at.load(StdOrdering::Relaxed) + NS_PER_UNIT) {
                passes += 1;
                seen = published.load(StdOrdering::Relaxed);
                if !work.finish() {
                    break;
                }
            }
            thread::yield_now();
        }
    });
    // Each start may announce a run that had been announced before the stop.
    let kicks = kicks.into_inner();
    assert!(kicks <= passes + 200 + 1, "{kicks} wake-ups for {passes} passes");
}
