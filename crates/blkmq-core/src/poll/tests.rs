//! Tests of the predictor: the invariants of `poll`, one by one.

use proptest::prelude::*;

use super::*;

/// A device and a reactor at depth 1: the least that shows what a predictor decides.
struct Rig {
    predictor: Predictor,
    host: WakeLatency,
    setting: Setting,
    now: Instant,
    /// How late a sleeper wakes, in turn.
    late: Vec<u64>,
    sleeps: usize,
}

/// The course of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Seen {
    slept: bool,
    overslept: bool,
}

const POLLED: Setting = Setting {
    wait: Wait::Auto,
    policy: Policy::Predicted,
    is_polled: true,
};

impl Rig {
    fn new(late: &[u64], setting: Setting) -> Self {
        let observed: Vec<Nanos> = late.iter().cycle().take(128).map(|late| Nanos(*late)).collect();
        Self {
            predictor: Predictor::new(4),
            host: WakeLatency::new(Nanos(2_000), &observed),
            setting,
            now: Instant(1_000_000),
            late: late.to_vec(),
            sleeps: 0,
        }
    }

    /// One request that takes the device `time`.
    fn request(&mut self, op: Op, len: u64, time: u64) -> Seen {
        self.now = self.now + Nanos(500);
        let end = self.now + Nanos(time);
        self.predictor.issued(Tag(0), op, len, self.now);
        let mut seen = Seen {
            slept: false,
            overslept: false,
        };
        loop {
            match self.predictor.verdict(self.setting, &mut self.host, self.now) {
                Verdict::SleepUntil(wake) => {
                    assert!(!seen.slept, "a request is slept for twice");
                    assert!(wake > self.now);
                    let late = self.late[self.sleeps % self.late.len()];
                    self.sleeps += 1;
                    self.now = wake + Nanos(late);
                    self.host.observe(Nanos(late));
                    self.predictor.waited(Waited::Asleep, self.now);
                    seen.slept = true;
                    seen.overslept = end <= self.now;
                }
                Verdict::Spin => {
                    self.predictor
                        .waited(Waited::Looking, self.now.max(end - Nanos(100)));
                    self.now = self.now.max(end);
                }
                Verdict::Block => panic!("nothing would wake it"),
            }
            if end <= self.now {
                self.predictor.completed(Tag(0), self.now);
                self.predictor.looked(self.now);
                return seen;
            }
            self.predictor.looked(self.now);
        }
    }

    fn reads(&mut self, count: usize, time: u64) -> Vec<Seen> {
        (0..count).map(|_| self.request(Op::Read, 4096, time)).collect()
    }
}

fn slept(seen: &[Seen]) -> usize {
    seen.iter().filter(|seen| seen.slept).count()
}

fn overslept(seen: &[Seen]) -> usize {
    seen.iter().filter(|seen| seen.overslept).count()
}

#[test]
fn device_that_keeps_its_time_is_slept_for_and_never_overslept() {
    let mut rig = Rig::new(&[14_000, 20_000], POLLED);
    let seen = rig.reads(200, 100_000);
    assert!(slept(&seen[..8]) == 0 && slept(&seen[8..]) == 192, "{seen:?}");
    assert_eq!(overslept(&seen), 0);
    let read = Bucket::of(Op::Read, 4096).unwrap();
    assert_eq!(rig.predictor.stats(read).slept, 192);
}

#[test]
fn device_faster_than_a_sleeper_is_late_is_spun_on() {
    let mut rig = Rig::new(&[14_000, 20_000], POLLED);
    assert_eq!(slept(&rig.reads(200, 20_000)), 0);
    assert_eq!(slept(&rig.reads(200, 5_000)), 0);
}

#[test]
fn reactor_that_looks_repeatedly_has_refused_one_sleep_for_each_request() {
    // Sleepers are sometimes 60 µs late, so 50 µs are not slept for; queries meanwhile must not make that forgotten.
    let late: Vec<u64> = (0..16).map(|at| if at == 0 { 60_000 } else { 24_000 }).collect();
    let mut rig = Rig::new(&late, POLLED);
    rig.reads(50, 50_000);
    let high = rig.host.high();
    rig.predictor.issued(Tag(0), Op::Read, 4096, rig.now);
    for look in 0..100_000 {
        let now = rig.now + Nanos(look / 2);
        assert_eq!(rig.predictor.verdict(POLLED, &mut rig.host, now), Verdict::Spin);
    }
    assert_eq!(rig.host.high(), high);
}

#[test]
fn half_the_mean_settles_at_twice_the_lateness_and_the_prediction_does_not() {
    let half_mean = Setting {
        policy: Policy::HalfMean,
        ..POLLED
    };
    let (late, device) = (20_000, 10_000);
    let mut before = Rig::new(&[late], half_mean);
    before.reads(100_000, device);
    let seen = before.predictor.stats(Bucket::of(Op::Read, 4096).unwrap());
    assert!((38_000..=42_000).contains(&seen.mean.0), "{seen:?}");
    let mut ours = Rig::new(&[late], POLLED);
    ours.reads(20_000, device);
    let seen = ours.predictor.stats(Bucket::of(Op::Read, 4096).unwrap());
    assert_eq!((seen.mean.0, seen.slept), (device, 0));
}

#[test]
fn one_fast_request_disables_half_of_the_minimum_for_ever_and_ours_for_32_requests() {
    let sleeping = |policy| {
        let mut rig = Rig::new(&[3_000], Setting { policy, ..POLLED });
        rig.request(Op::Read, 4096, 600);
        rig.reads(200, 100_000);
        let start = rig.now;
        rig.predictor.issued(Tag(0), Op::Read, 4096, start);
        match rig.predictor.verdict(rig.setting, &mut rig.host, start) {
            Verdict::SleepUntil(wake) => wake.since(start).0,
            other => panic!("{policy:?}: {other:?}"),
        }
    };
    assert_eq!(sleeping(Policy::HalfMin), 300);
    assert!(sleeping(Policy::Predicted) > 90_000);
}

#[test]
fn sizes_and_directions_do_not_leak_into_each_other() {
    let mut rig = Rig::new(&[3_000], POLLED);
    for _ in 0..200 {
        let small = rig.request(Op::Read, 512, 20_000);
        let large = rig.request(Op::Read, 65536, 200_000);
        let write = rig.request(Op::Write, 512, 60_000);
        assert!(!(small.overslept || large.overslept || write.overslept));
    }
    let low = |op, len| rig.predictor.stats(Bucket::of(op, len).unwrap()).low.0;
    assert!((19_000..=20_000).contains(&low(Op::Read, 512)));
    assert!((199_000..=200_000).contains(&low(Op::Read, 65536)));
    assert!((59_000..=60_000).contains(&low(Op::Write, 512)));
    assert_eq!(low(Op::Write, 65536), 0);
}

#[test]
fn earliest_predicted_end_of_all_in_flight_ends_the_sleep() {
    let mut rig = Rig::new(&[3_000], POLLED);
    for _ in 0..50 {
        rig.request(Op::Read, 512, 40_000);
        rig.request(Op::Read, 65536, 200_000);
    }
    let start = rig.now;
    rig.predictor.issued(Tag(0), Op::Read, 65536, start);
    rig.predictor.issued(Tag(1), Op::Read, 512, start);
    let verdict = rig.predictor.verdict(POLLED, &mut rig.host, start);
    let Verdict::SleepUntil(wake) = verdict else {
        panic!("{verdict:?}")
    };
    let slept = wake.since(start).0;
    assert!((36_000..=37_000).contains(&slept), "{slept}");
}

#[test]
fn flush_in_flight_is_looked_for_where_nothing_would_wake_the_reactor() {
    let mut rig = Rig::new(&[3_000], POLLED);
    rig.reads(50, 100_000);
    rig.predictor.issued(Tag(0), Op::Read, 4096, rig.now);
    rig.predictor.issued(Tag(1), Op::Flush, 0, rig.now);
    assert_eq!(
        rig.predictor.verdict(POLLED, &mut rig.host, rig.now),
        Verdict::Spin
    );
    let woken = Setting {
        is_polled: false,
        ..POLLED
    };
    assert!(matches!(
        rig.predictor.verdict(woken, &mut rig.host, rig.now),
        Verdict::SleepUntil(_)
    ));
}

#[test]
fn tag_that_is_not_in_flight_tells_nothing() {
    let mut rig = Rig::new(&[3_000], POLLED);
    rig.predictor.completed(Tag(2), rig.now);
    rig.predictor.issued(Tag(2), Op::Read, 4096, rig.now);
    rig.predictor.forget(Tag(2));
    rig.predictor.completed(Tag(2), rig.now);
    assert!(Bucket::all().all(|bucket| rig.predictor.stats(bucket) == BucketStats::default()));
}

#[test]
fn reactor_that_completions_wake_sleeps_for_sure_times_and_blocks_for_others() {
    let woken = Setting {
        is_polled: false,
        ..POLLED
    };
    let verdict = |times: &[u64], setting: Setting| {
        let mut rig = Rig::new(&[14_000, 20_000], POLLED);
        times.iter().cycle().take(64).for_each(|&time| {
            rig.request(Op::Read, 4096, time);
        });
        rig.predictor.issued(Tag(0), Op::Read, 4096, rig.now);
        rig.predictor.verdict(setting, &mut rig.host, rig.now)
    };
    assert!(matches!(
        verdict(&[100_000, 110_000], woken),
        Verdict::SleepUntil(_)
    ));
    assert_eq!(verdict(&[100_000, 400_000], woken), Verdict::Block);
    let hybrid = Setting {
        wait: Wait::Hybrid,
        ..woken
    };
    assert!(matches!(
        verdict(&[100_000, 400_000], hybrid),
        Verdict::SleepUntil(_)
    ));
    let block = Setting {
        wait: Wait::Block,
        ..woken
    };
    assert_eq!(verdict(&[100_000], block), Verdict::Block);
    assert_eq!(verdict(&[10_000], woken), Verdict::Spin);
}

#[test]
fn known_time_is_slept_for_and_met_awake() {
    let host = WakeLatency::new(Nanos(14_000), &[Nanos(20_000); 128]);
    let (now, at) = (Instant(0), Instant(100_000));
    assert_eq!(
        verdict_at(at, Wait::Auto, &host, now),
        Verdict::SleepUntil(Instant(80_000))
    );
    assert_eq!(verdict_at(at, Wait::Auto, &host, Instant(85_000)), Verdict::Spin);
    assert_eq!(verdict_at(at, Wait::Block, &host, now), Verdict::Block);
}

#[test]
fn verdicts_of_several_contexts_join_to_the_most_wakeful() {
    let (early, late) = (Verdict::SleepUntil(Instant(1)), Verdict::SleepUntil(Instant(2)));
    assert_eq!(Verdict::Block.and(late).and(early), early);
    assert_eq!(early.and(Verdict::Spin).and(Verdict::Block), Verdict::Spin);
}

proptest! {
    #[test]
    fn step_in_either_direction_is_learned_within_64_requests(from in 30_000u64..400_000, to in 30_000u64..400_000) {
        let mut rig = Rig::new(&[1_000, 2_000, 3_000], POLLED);
        rig.reads(100, from);
        rig.reads(64, to);
        let after = rig.reads(64, to);
        prop_assert_eq!(overslept(&after), 0);
        prop_assert_eq!(slept(&after), 64);
        let low = rig.predictor.stats(Bucket::of(Op::Read, 4096).unwrap()).low.0;
        prop_assert!((to - 100..=to).contains(&low), "{low}");
    }
}

#[test]
fn whatever_the_spread_few_requests_are_slept_for_too_long() {
    let mut state = 1u64;
    let mut draw = |range: u64| {
        // Knuth's multiplier: enough for a spread.
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (state >> 33) % range
    };
    let mut times: [(&str, Vec<u64>); 3] = Default::default();
    times[0] = ("even", (0..20_000).map(|_| 30_000 + draw(100_000)).collect());
    times[1] = (
        "two kinds",
        (0..20_000)
            .map(|_| {
                if draw(2) == 0 {
                    40_000
                } else {
                    150_000 + draw(9_000)
                }
            })
            .collect(),
    );
    times[2] = (
        "few fast",
        (0..20_000)
            .map(|_| {
                if draw(100) < 3 {
                    8_000
                } else {
                    100_000 + draw(9_000)
                }
            })
            .collect(),
    );
    for (name, times) in times {
        let mut rig = Rig::new(&[1_000, 2_000, 3_000], POLLED);
        let seen: Vec<Seen> = times
            .iter()
            .map(|&time| rig.request(Op::Read, 4096, time))
            .collect();
        let rate = (overslept(&seen), slept(&seen));
        assert!(rate.0 * 100 <= times.len() * 5, "{name}: {rate:?}");
        assert!(rate.1 > 2_000, "{name}: {rate:?}");
    }
}
