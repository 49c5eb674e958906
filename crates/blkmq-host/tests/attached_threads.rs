//! Tests whether attached threads and reactors lose, repeat or forget I/O: real threads on null
//! disks.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use blkmq_core::bio::Direction;
use blkmq_core::ids::GroupId;
use blkmq_core::sched;
use blkmq_core::time::Nanos;
use blkmq_drivers::null::{Completion, NullConfig};
use blkmq_host::{Engine, EngineConfig, Error, QueueId};
use common::{engine, queue, read, submit_and_count};

const Q: QueueId = QueueId(0);

fn completing(completion: Completion) -> NullConfig {
    let mut null = NullConfig {
        completion: Some(completion),
        ..NullConfig::bare()
    };
    if completion == Completion::Timer {
        null.latency = Nanos::from_micros(20);
    }
    null
}

#[test]
fn each_bio_ends_once_under_four_attached_threads_and_two_reactors() {
    for elevator in sched::BUILT_IN {
        for completion in [Completion::Inline, Completion::Deferred, Completion::Timer] {
            let engine = engine(2, 4, completing(completion), elevator);
            thread::scope(|scope| {
                for depth in [1, 7, 32, 200] {
                    let engine = &engine;
                    scope.spawn(move || submit_and_count(&mut engine.attach().unwrap(), 3000, depth));
                }
            });
            let stats = engine.control().group_stats(Q, GroupId(0));
            let ios = stats.total().ios;
            assert_eq!(ios, 4 * 3000, "{elevator} {completion:?}");
            engine.shutdown(Nanos::from_secs(10)).unwrap();
        }
    }
}

/// Most of 40 queues are idle at any moment, so their threads do not poll them. Bios that are
/// submitted, requests that are handed to the one reactor with a hardware context, and changes must
/// be noticed all the same.
#[test]
fn queues_that_idle_among_many_notice_what_comes() {
    const QUEUES: u16 = 40;
    for elevator in [sched::NONE, sched::BFQ] {
        let mut queues: Vec<_> = (0..QUEUES)
            .map(|n| queue(&format!("q{n}"), completing(Completion::Timer), elevator))
            .collect();
        queues.iter_mut().for_each(|queue| queue.hctxs = Some(1));
        let engine = Engine::start(EngineConfig {
            reactors: 2,
            attached_max: 2,
            queues,
            ..EngineConfig::default()
        })
        .unwrap();
        thread::scope(|scope| {
            for seed in [0, 1] {
                let engine = &engine;
                scope.spawn(move || {
                    let mut attached = engine.attach().unwrap();
                    let mut out = Vec::new();
                    for n in 0..2000_u64 {
                        let disk = ((n * 7 + seed * 3) / 5 % u64::from(QUEUES)) as u16;
                        attached.submit(QueueId(disk), read(n)).expect("one bio has room");
                        while attached.wait(&mut out, Some(Nanos::from_secs(10))) == 0 {
                            assert_eq!(attached.outstanding(), 0, "disk {disk} forgot a read");
                        }
                        out.clear();
                    }
                });
            }
            let control = engine.control();
            for n in (0..QUEUES).chain(0..QUEUES) {
                control.set_depth(QueueId(n), 3).unwrap();
                control.set_elevator(QueueId(n), sched::MQ_DEADLINE).unwrap();
            }
        });
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    }
}

#[test]
fn elevator_is_switched_every_10_ms_under_load_and_nothing_is_lost() {
    let engine = engine(2, 3, completing(Completion::Timer), sched::NONE);
    let is_over = AtomicBool::new(false);
    let switches = thread::scope(|scope| {
        let submitters: Vec<_> = (0..3)
            .map(|_| {
                let engine = &engine;
                scope.spawn(move || submit_and_count(&mut engine.attach().unwrap(), 20_000, 16))
            })
            .collect();
        let switcher = scope.spawn(|| {
            let control = engine.control();
            let mut switches = 0;
            while !is_over.load(Ordering::Relaxed) {
                for kind in [sched::MQ_DEADLINE, sched::NONE] {
                    control.set_elevator(Q, kind).unwrap();
                    switches += 1;
                    thread::sleep(Duration::from_millis(10));
                }
            }
            switches
        });
        for submitter in submitters {
            submitter.join().unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        switcher.join().unwrap()
    });
    assert!(switches >= 4, "only {switches} switches happened under load");
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn freeze_holds_new_requests_back_until_the_last_one_thaws() {
    let engine = engine(1, 1, completing(Completion::Inline), sched::NONE);
    let mut attached = engine.attach().unwrap();
    let control = engine.control();
    let outer = control.freeze(Q).unwrap();
    let inner = control.freeze(Q).unwrap();
    let mut out = Vec::new();
    attached.submit(Q, read(1)).unwrap();
    assert_eq!(attached.wait(&mut out, Some(Nanos::from_millis(5))), 0);
    drop(inner);
    assert_eq!(attached.wait(&mut out, Some(Nanos::from_millis(5))), 0);
    let thaw = thread::spawn(move || {
        thread::sleep(Duration::from_millis(20));
        drop(outer);
    });
    assert_eq!(attached.wait(&mut out, Some(Nanos::from_secs(10))), 1);
    thaw.join().unwrap();
}

#[test]
fn thaw_wakes_whoever_it_held_back_five_hundred_times() {
    let engine = engine(1, 1, completing(Completion::Inline), sched::NONE);
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            let control = engine.control();
            for freeze in 0..500 {
                drop(control.freeze(Q).unwrap());
                thread::sleep(Duration::from_micros(freeze % 5 * 10));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        let mut attached = engine.attach().unwrap();
        let mut out = Vec::new();
        while !is_over.load(Ordering::Relaxed) {
            attached.submit(Q, read(0)).unwrap();
            let ended = attached.wait(&mut out, Some(Nanos::from_secs(10)));
            assert_eq!(ended, 1, "a bio was held back for 10 s");
            out.clear();
        }
    });
}

#[test]
fn no_kick_is_lost_over_a_thousand_bursts_after_idleness() {
    // One hardware context, the reactor's: every request of the attached thread goes there and
    // back.
    let mut spec = queue("q", completing(Completion::Inline), sched::NONE);
    spec.hctxs = Some(1);
    let engine = Engine::start(EngineConfig {
        attached_max: 1,
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap();
    let mut attached = engine.attach().unwrap();
    let mut out = Vec::new();
    for burst in 0..1000 {
        for cookie in 0..burst % 5 + 1 {
            attached.submit(Q, read(cookie)).unwrap();
        }
        while attached.outstanding() > 0 {
            let ended = attached.wait(&mut out, Some(Nanos::from_secs(10)));
            assert!(
                ended > 0,
                "burst {burst}: nothing ended in 10 s, {} are outstanding",
                attached.outstanding()
            );
            out.clear();
        }
        // Sometimes long enough for the reactor to sleep, sometimes only until it is about to.
        thread::sleep(Duration::from_micros(burst % 7 * 20));
    }
    let events = engine.control().event_stats(Q);
    assert!(
        events.handed_over >= 2 * 3000 - 2,
        "the requests did not go through the reactor: {events:?}"
    );
}

#[test]
fn dropped_attached_thread_waits_for_its_io_and_leaves_its_handles() {
    let null = NullConfig {
        latency: Nanos::from_millis(20),
        ..completing(Completion::Timer)
    };
    let engine = engine(1, 1, null, sched::MQ_DEADLINE);
    for round in 0..3 {
        let mut attached = engine.attach().unwrap();
        assert!(matches!(engine.attach(), Err(Error::NoQueueHandle { max: 1 })));
        for cookie in 0..10 {
            attached.submit(Q, read(cookie)).unwrap();
        }
        drop(attached);
        let stats = engine.control().group_stats(Q, GroupId(0));
        assert_eq!(stats.of(Direction::Read).ios, (round + 1) * 10);
    }
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn refused_bio_is_given_back_and_fits_after_an_end() {
    let mut spec = queue("q", completing(Completion::Timer), sched::NONE);
    spec.requests_per_reactor = 4;
    let engine = Engine::start(EngineConfig {
        attached_max: 1,
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap();
    let mut attached = engine.attach().unwrap();
    let mut refused = None;
    for cookie in 0..100 {
        if let Err(bio) = attached.submit(Q, read(cookie)) {
            refused = Some(bio);
            break;
        }
    }
    let bio = refused.expect("4 requests and as many waiting bios are fewer than 100");
    assert!(attached.outstanding() >= 4);
    let mut out = Vec::new();
    attached.wait(&mut out, None);
    assert!(attached.submit(Q, bio).is_ok());
}

#[test]
fn timeout_ends_a_wait_although_nothing_ended() {
    let null = NullConfig {
        latency: Nanos::from_millis(200),
        ..completing(Completion::Timer)
    };
    let engine = engine(1, 1, null, sched::NONE);
    let mut attached = engine.attach().unwrap();
    let mut out = Vec::new();
    assert_eq!(
        attached.wait(&mut out, None),
        0,
        "with nothing under way there is nothing to wait for"
    );
    attached.submit(Q, read(0)).unwrap();
    let before = attached.now();
    assert_eq!(attached.wait(&mut out, Some(Nanos::from_millis(10))), 0);
    let waited = attached.now().since(before);
    assert!(
        waited >= Nanos::from_millis(10) && waited < Nanos::from_millis(150),
        "{waited}"
    );
    assert_eq!(attached.wait(&mut out, None), 1);
}

#[test]
fn attachment_that_fails_leaves_its_handles() {
    let null = NullConfig {
        setup_failure: Some(1),
        ..NullConfig::bare()
    };
    let engine = engine(1, 1, null, sched::NONE);
    for _ in 0..2 {
        assert!(matches!(engine.attach(), Err(Error::Device { .. })));
    }
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn shutdown_names_the_threads_that_are_still_attached() {
    let engine = engine(1, 1, NullConfig::bare(), sched::NONE);
    let attached = engine.attach().unwrap();
    let error = engine.shutdown(Nanos::from_millis(20)).unwrap_err();
    assert_eq!(error.to_string(), "shutdown: 1 thread is still attached");
    drop(attached);
}

#[test]
fn ends_in_a_polled_context_are_found_by_reactors_and_attached_threads() {
    for elevator in sched::BUILT_IN {
        let null = NullConfig {
            poll_queues: u16::MAX,
            ..completing(Completion::Timer)
        };
        let engine = engine(1, 2, null, elevator);
        thread::scope(|scope| {
            for depth in [1, 32] {
                let engine = &engine;
                scope.spawn(move || submit_and_count(&mut engine.attach().unwrap(), 2000, depth));
            }
        });
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    }
}
