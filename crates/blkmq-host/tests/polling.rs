//! Tests that each way to wait finds the ends of requests: bursts after idleness, freezing, time
//! limits, and attributes changed meanwhile.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use blkmq_core::bio::Status;
use blkmq_core::poll::{Policy, Wait};
use blkmq_core::sched;
use blkmq_core::time::Nanos;
use blkmq_drivers::null::{Completion, NullConfig};
use blkmq_host::{Engine, EngineConfig, QueueId, QueueSpec};
use common::{read, submit_and_count};

const Q: QueueId = QueueId(0);

/// A null drive with this latency; polled, or with a timer.
fn null(us: u64, polled: bool) -> NullConfig {
    NullConfig {
        completion: Some(Completion::Timer),
        latency: Nanos::from_micros(us),
        poll_queues: if polled { u16::MAX } else { 0 },
        ..NullConfig::bare()
    }
}

fn start(wait: Wait, spec: QueueSpec) -> Engine {
    Engine::start(EngineConfig {
        attached_max: 2,
        wait,
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap()
}

/// Runs `check` with each way to wait, for a drive that is polled and for one that is not.
fn each_way(mut check: impl FnMut(Wait, bool)) {
    for wait in Wait::ALL {
        for polled in [true, false] {
            check(wait, polled);
        }
    }
}

#[test]
fn after_idleness_a_burst_wakes_the_reactor_that_owns_the_drive_each_time() {
    each_way(|wait, polled| {
        let mut spec = common::queue("q", null(30, polled), sched::NONE);
        // All requests go through the reactor's context: it must be woken, and must wake the thread
        // that waits.
        spec.hctxs = Some(1);
        let engine = start(wait, spec);
        let mut attached = engine.attach().unwrap();
        let mut out = Vec::new();
        for burst in 0..1000u64 {
            if burst % 10 == 0 {
                thread::sleep(Duration::from_micros(burst % 7 * 50));
            }
            for at in 0..1 + burst % 3 {
                attached.submit(Q, read(burst * 4 + at)).unwrap();
            }
            while attached.outstanding() > 0 {
                let ended = attached.wait(&mut out, Some(Nanos::from_secs(10)));
                assert!(ended > 0, "{wait} polled={polled}: burst {burst} is lost");
            }
            assert!(out.drain(..).all(|bio| bio.status.is_ok()));
        }
        drop(attached);
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    });
}

#[test]
fn queue_drains_for_a_freeze_while_threads_sleep_and_look() {
    each_way(|wait, polled| {
        let engine = start(wait, common::queue("q", null(100, polled), sched::NONE));
        let is_over = AtomicBool::new(false);
        thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Ordering::Relaxed) {
                    submit_and_count(&mut engine.attach().unwrap(), 100, 4);
                }
            });
            let control = engine.control();
            for _ in 0..20 {
                drop(control.freeze(Q).unwrap());
                thread::sleep(Duration::from_millis(1));
            }
            is_over.store(true, Ordering::Relaxed);
        });
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    });
}

#[test]
fn request_that_never_ends_is_timed_out_while_it_is_waited_for() {
    each_way(|wait, polled| {
        let mut config = null(100, polled);
        config.set("timeout_rate", "1").unwrap();
        let mut spec = common::queue("q", config, sched::NONE);
        spec.timeout = Nanos::from_millis(20);
        let engine = start(wait, spec);
        let mut attached = engine.attach().unwrap();
        let mut out = Vec::new();
        attached.submit(Q, read(1)).unwrap();
        assert_eq!(
            attached.wait(&mut out, Some(Nanos::from_secs(10))),
            1,
            "{wait} polled={polled}"
        );
        assert_eq!(out[0].status, Status::Timeout);
        drop(attached);
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    });
}

#[test]
fn polling_is_switched_and_its_delay_changed_under_load_and_nothing_is_lost() {
    let engine = start(Wait::Auto, common::queue("q", null(40, true), sched::NONE));
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                submit_and_count(&mut engine.attach().unwrap(), 200, 2);
            }
        });
        let control = engine.control();
        for turn in 0..60 {
            control.set_io_poll(Q, turn % 2 == 1).unwrap();
            control.set_io_poll_delay(Q, [-1, 0, 7][turn % 3]).unwrap();
            if turn % 5 == 0 {
                control.set_poll_policy(Q, Policy::HalfMin).unwrap();
            }
            thread::sleep(Duration::from_millis(2));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn samples_are_reported_for_each_size_and_direction() {
    let engine = start(Wait::Auto, common::queue("q", null(50, true), sched::NONE));
    submit_and_count(&mut engine.attach().unwrap(), 100, 1);
    let stats = engine.control().poll_stats(Q);
    let [(bucket, seen)] = stats[..] else {
        panic!("{stats:?}")
    };
    assert_eq!(bucket.to_string(), "read 4096");
    assert!(
        seen.samples > 0 && seen.min <= seen.mean && seen.mean <= seen.max,
        "{seen:?}"
    );
    assert!(seen.min >= Nanos::from_micros(50), "{seen:?}");
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn attributes_that_cannot_be_are_refused_with_object_value_and_limit() {
    let engine = start(Wait::Auto, common::queue("q", null(50, true), sched::NONE));
    let control = engine.control();
    for wrong in [-2, 1_000_001, i64::MIN] {
        let error = control.set_io_poll_delay(Q, wrong).unwrap_err().to_string();
        let expected = format!("queue q: io_poll_delay {wrong} rejected: must be -1");
        assert!(
            error.starts_with(&expected) && error.contains("1000000"),
            "{error}"
        );
    }
    drop(engine);
    let engine = start(Wait::Auto, common::queue("slow", null(50, false), sched::NONE));
    let control = engine.control();
    let error = control.set_io_poll(Q, true).unwrap_err().to_string();
    assert!(
        error.starts_with("queue slow: io_poll on rejected: its drive cannot be polled"),
        "{error}"
    );
    let error = control.set_io_poll_delay(Q, 0).unwrap_err().to_string();
    assert!(
        error.starts_with("queue slow: io_poll_delay 0 rejected"),
        "{error}"
    );
    control.set_io_poll(Q, false).unwrap();
    drop(engine);
    let mut spec = common::queue("slow", null(50, false), sched::NONE);
    spec.io_poll = Some(true);
    let refused = Engine::start(EngineConfig {
        queues: vec![spec],
        ..EngineConfig::default()
    });
    let error = refused.err().expect("it is refused").to_string();
    assert!(error.contains("queue slow: io_poll on rejected"), "{error}");
}
