//! Tests of a hardware context of a null drive in each mode and under each fault.

use blkmq_core::bio::{Flags, Op};
use blkmq_core::time::Nanos;

use super::*;
use crate::null::{NullConfig, NullDevice};
use crate::testing::{cookie, lend, request, request_with};

fn hctx(keys: &[(&str, &str)]) -> Box<dyn HctxDriver> {
    let mut config = NullConfig::default();
    for (key, value) in keys {
        config.set(key, value).unwrap();
    }
    let device = NullDevice::new(config, &[1 << 30]).unwrap();
    device.hctx(HctxId(0)).unwrap()
}

fn issue(hctx: &mut dyn HctxDriver, tag: u32, now: Instant) -> Issued {
    hctx.issue(&request(Op::Read, 0, 4096), cookie(tag), true, now)
}

fn reap(hctx: &mut dyn HctxDriver, now: Instant) -> Vec<(u32, Status)> {
    let mut done = Vec::new();
    hctx.reap(now, &mut done);
    done.iter().map(|d| (d.cookie.tag().0, d.status)).collect()
}

#[test]
fn bare_drive_ends_everything_at_once() {
    let device = NullDevice::new(NullConfig::bare(), &[4096]).unwrap();
    let mut hctx = NullHctx::new(device.into_shared(), HctxId(0));
    assert!(hctx.plain);
    for op in [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes] {
        let issued = hctx.issue(&request(op, 0, 4096), cookie(0), true, Instant(0));
        assert_eq!(issued, Issued::Done(Status::Ok));
    }
}

#[test]
fn deferred_request_ends_at_the_next_reap() {
    let mut hctx = hctx(&[("completion", "deferred")]);
    assert_eq!(issue(&mut *hctx, 3, Instant(5)), Issued::Queued);
    assert_eq!(hctx.next_event(), Some(Instant(0)));
    assert_eq!(reap(&mut *hctx, Instant(5)), [(3, Status::Ok)]);
    assert_eq!(hctx.next_event(), None);
    assert_eq!(reap(&mut *hctx, Instant(5)), []);
}

#[test]
fn timed_request_ends_when_its_latency_has_passed() {
    let mut hctx = hctx(&[("latency", "80us")]);
    for (tag, now_us) in [(0, 0), (1, 10), (2, 10)] {
        let now = Instant(0) + Nanos::from_micros(now_us);
        assert_eq!(issue(&mut *hctx, tag, now), Issued::Queued);
    }
    assert_eq!(hctx.next_event(), Some(Instant(80_000)));
    assert_eq!(reap(&mut *hctx, Instant(79_999)), []);
    assert_eq!(reap(&mut *hctx, Instant(80_000)), [(0, Status::Ok)]);
    assert_eq!(
        reap(&mut *hctx, Instant(200_000)),
        [(1, Status::Ok), (2, Status::Ok)]
    );
}

#[test]
fn read_of_a_served_disk_sees_zeroes_and_not_old_memory() {
    let mut memory = vec![0xaau8; 4096];
    let rq = request_with(Op::Read, Flags::NONE, 0, 0, &[lend(&mut memory)]);
    let issued = hctx(&[]).issue(&rq, cookie(0), true, Instant(0));
    assert_eq!(issued, Issued::Done(Status::Ok));
    assert!(memory.iter().all(|byte| *byte == 0));
}

#[test]
fn full_context_takes_no_more_until_one_has_ended() {
    let mut hctx = hctx(&[("completion", "deferred"), ("depth", "2")]);
    assert_eq!(issue(&mut *hctx, 0, Instant(0)), Issued::Queued);
    assert_eq!(issue(&mut *hctx, 1, Instant(0)), Issued::Queued);
    assert_eq!(issue(&mut *hctx, 2, Instant(0)), Issued::DeviceResource);
    reap(&mut *hctx, Instant(0));
    assert_eq!(issue(&mut *hctx, 2, Instant(0)), Issued::Queued);
}

#[test]
fn request_that_touches_a_bad_range_fails_and_its_neighbour_does_not() {
    let mut hctx = hctx(&[("bad", "8K-16K"), ("bad", "1M-2M")]);
    let mut status = |op, offset, len| hctx.issue(&request(op, offset, len), cookie(0), true, Instant(0));
    let (ok, medium) = (Issued::Done(Status::Ok), Issued::Done(Status::Medium));
    assert_eq!(status(Op::Read, 4096, 4096), ok);
    assert_eq!(status(Op::Read, 4096, 4608), medium);
    assert_eq!(status(Op::Write, 12288, 4096), medium);
    assert_eq!(status(Op::Write, 16384, 4096), ok);
    assert_eq!(status(Op::WriteZeroes, 0, 4 << 20), medium);
    assert_eq!(status(Op::Flush, 0, 0), ok);
}

#[test]
fn as_many_requests_are_requeued_as_configured_and_a_seed_repeats_them() {
    let run = |seed: &str| {
        let mut hctx = hctx(&[("requeue_rate", "10%"), ("seed", seed)]);
        let requeued = |tag| issue(&mut *hctx, tag, Instant(0)) == Issued::Done(Status::Requeue);
        (0..10_000).map(requeued).collect::<Vec<bool>>()
    };
    let count = run("5").iter().filter(|hit| **hit).count();
    assert!((900..1100).contains(&count), "{count} of 10000");
    assert_eq!(run("5"), run("5"));
    assert_ne!(run("5"), run("6"));
}

#[test]
fn swallowed_requests_never_end_by_themselves_and_are_given_up_on_timeout() {
    let mut hctx = hctx(&[("timeout_rate", "50%"), ("completion", "deferred")]);
    for tag in 0..1000 {
        assert_eq!(issue(&mut *hctx, tag, Instant(0)), Issued::Queued);
    }
    let ended: Vec<u32> = reap(&mut *hctx, Instant(1)).iter().map(|(tag, _)| *tag).collect();
    assert!((430..570).contains(&ended.len()), "{} of 1000", ended.len());
    for tag in (0..1000).filter(|tag| !ended.contains(tag)) {
        assert_eq!(hctx.timed_out(cookie(tag)), TimedOut::Ended);
    }
    for tag in 0..1000 {
        issue(&mut *hctx, tag, Instant(2));
    }
    assert!(
        !reap(&mut *hctx, Instant(3)).is_empty(),
        "the slots of timed-out requests are free again"
    );
}

#[test]
fn timed_out_request_is_not_reported_later() {
    let mut hctx = hctx(&[("latency", "1s")]);
    issue(&mut *hctx, 7, Instant(0));
    assert_eq!(hctx.timed_out(cookie(7)), TimedOut::Ended);
    assert_eq!(reap(&mut *hctx, Instant(0) + Nanos::from_secs(5)), []);
}

#[test]
fn device_resource_is_wanted_only_while_somebody_in_flight_can_free_it() {
    let mut hctx = hctx(&[("resource_rate", "50%"), ("completion", "deferred")]);
    let (mut refused, mut by_device) = (0, 0);
    for tag in 0..2000 {
        let in_flight = hctx.next_event().is_some();
        match issue(&mut *hctx, tag, Instant(0)) {
            Issued::Resource => refused += 1,
            Issued::DeviceResource => {
                assert!(in_flight, "nothing in flight would free the resource");
                by_device += 1;
            }
            Issued::Queued if tag % 3 == 0 => drop(reap(&mut *hctx, Instant(0))),
            other => assert_eq!(other, Issued::Queued),
        }
    }
    assert!(
        refused > 500 && by_device > 100,
        "{refused} refused, {by_device} by the device"
    );
}

#[test]
fn drive_with_memory_reads_what_was_written_and_loses_power_as_its_cache_says() {
    let config = NullConfig {
        memory: true,
        cache: true,
        ..NullConfig::default()
    };
    let device = NullDevice::new(config, &[1 << 20]).unwrap();
    let mut hctx = device.hctx(HctxId(0)).unwrap();
    let mut run = |op, fill: u8| {
        let mut bytes = vec![fill; 4096];
        let rq = request_with(op, Flags::NONE, 0, 4096, &[lend(&mut bytes)]);
        assert_eq!(
            hctx.issue(&rq, cookie(0), true, Instant(0)),
            Issued::Done(Status::Ok)
        );
        bytes[4095]
    };
    run(Op::Write, 1);
    assert_eq!(run(Op::Read, 9), 1);
    device.lose_power();
    assert_eq!(run(Op::Read, 9), 0);
}

#[test]
fn polled_context_announces_nothing_and_is_looked_at_while_it_has_work() {
    let keys = [("latency", "80us"), ("poll_queues", "1")];
    let mut hctx = hctx(&keys);
    assert!(hctx.set_polled(true));
    issue(&mut *hctx, 7, Instant(0));
    assert_eq!(hctx.next_event(), None);
    assert_eq!(reap(&mut *hctx, Instant(79_999)), []);
    assert_eq!(reap(&mut *hctx, Instant(80_000)), [(7, Status::Ok)]);
    issue(&mut *hctx, 8, Instant(80_000));
    assert!(!hctx.set_polled(false));
    assert_eq!(hctx.next_event(), Some(Instant(160_000)));
}
