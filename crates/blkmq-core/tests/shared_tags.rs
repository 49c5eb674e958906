//! Tests hardware contexts that share tags: which contexts are run when a tag is freed, and how the
//! tags are divided.

mod common;

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_core::ids::{DiskId, ReactorSet};
use blkmq_core::queue::{QueueConfig, ReactorConfig, Rerun, TagMode};
use blkmq_core::time::Nanos;

use common::{Bench, bio, config, end, in_flight_of};

const SLOW: u32 = 0;
const FAST: u32 = 1;

fn shared(reactors: u16, tags: u32) -> QueueConfig {
    QueueConfig {
        tags: TagMode::Shared(tags),
        requests_per_reactor: 256,
        ..config(reactors)
    }
}

fn read(disk: u32, block: u64) -> Bio {
    Bio {
        disk: DiskId(disk),
        ..bio(Op::Read, block * 2, 1, block)
    }
}

fn submit(bench: &mut Bench, side: usize, disk: u32, count: u64) {
    (0..count).for_each(|block| bench.submit(side, read(disk, block)));
    bench.unplug(side);
}

/// How many requests of each disk are at the drivers.
fn counts(bench: &Bench) -> (usize, usize) {
    (
        in_flight_of(bench, DiskId(SLOW)),
        in_flight_of(bench, DiskId(FAST)),
    )
}

/// Eight sides keep 64 requests each under way with 32 tags; the requests of one side at a time
/// end. Returns the numbers of runs scheduled, runs, and ends.
fn load(mut config: QueueConfig, rerun: Rerun) -> (u64, u64, u64) {
    config.rerun = rerun;
    let sides = config.reactors.len();
    let mut bench = Bench::new(config);
    (0..sides).for_each(|side| submit(&mut bench, side, FAST, 64));
    let mut ends = 0;
    for round in 0..2_000 {
        let at = round % sides;
        ends += bench.end_all(at, Status::Ok) as u64;
        // Only sides that were woken run, one after the other, once each.
        let mut told = ReactorSet::default();
        told.insert(Bench::id(at));
        while let Some(id) = told.pop() {
            let now = bench.now;
            let side = &mut bench.sides[id.index()];
            side.local.run(now, &mut side.fx);
            let ended = std::mem::take(&mut side.fx.ended);
            for bio in ended {
                side.local
                    .submit(bio, now, &mut side.fx)
                    .expect("as many as before");
            }
            side.local.unplug(now, &mut side.fx);
            side.local.check_invariants();
            while let Some(other) = side.fx.kicks.pop() {
                told.insert(other);
            }
        }
        bench.now = bench.now + Nanos::from_micros(20);
    }
    let events = bench.queue.event_stats();
    bench.run_dry();
    let ended: usize = (0..sides).map(|side| bench.ended(side).len()).sum();
    assert_eq!(ended, 64 * sides, "all ended, once");
    (events.runs_scheduled, events.runs, ends)
}

#[test]
fn runs_are_scheduled_once_for_each_that_is_made_and_not_for_each_end() {
    for is_event_loop in [true, false] {
        let mut config = shared(8, 32);
        // Attached threads may stop polling; the first thread is the daemon's.
        (1..8).for_each(|side| config.reactors[side] = ReactorConfig { is_event_loop });
        let (scheduled, runs, ends) = load(config.clone(), Rerun::Waiting);
        assert!(ends > 1_000, "{ends}");
        assert!(
            scheduled <= runs + 1,
            "{scheduled} scheduled, {runs} made, {ends} ends"
        );
        let (before, ..) = load(config, Rerun::Every);
        assert!(before > 10 * scheduled, "{before} before, {scheduled} now");
    }
}

#[test]
fn context_that_came_first_leaves_others_their_share_of_the_tags() {
    let mut bench = Bench::new(shared(2, 32));
    submit(&mut bench, 0, SLOW, 128);
    assert_eq!(counts(&bench), (32, 0), "alone it has all");
    submit(&mut bench, 1, FAST, 128);
    bench.now = bench.now + Nanos::from_millis(1);
    end(&mut bench, DiskId(SLOW), 20);
    for round in 0..4 {
        bench.now = bench.now + Nanos::from_millis(1);
        assert_eq!(counts(&bench).1, 16, "round {round}");
        end(&mut bench, DiskId(FAST), 16);
    }
    bench.run_dry();
    assert_eq!((bench.ended(0).len(), bench.ended(1).len()), (128, 128));
}

#[test]
fn slow_disk_leaves_a_fast_one_its_share_in_one_context() {
    let mut bench = Bench::new(shared(1, 32));
    submit(&mut bench, 0, SLOW, 100);
    assert_eq!(counts(&bench), (32, 0), "alone it has all");
    submit(&mut bench, 0, FAST, 100);
    end(&mut bench, DiskId(SLOW), 16);
    for round in 0..4 {
        assert_eq!(counts(&bench), (16, 16), "round {round}");
        end(&mut bench, DiskId(FAST), 16);
    }
    bench.run_dry();
    assert_eq!(bench.ended(0).len(), 200);
}

#[test]
fn disk_that_is_idle_gives_its_share_to_the_others() {
    let mut bench = Bench::new(shared(1, 32));
    submit(&mut bench, 0, FAST, 1);
    submit(&mut bench, 0, SLOW, 100);
    end(&mut bench, DiskId(FAST), 1);
    assert_eq!(counts(&bench), (16, 0), "it may come back soon");
    bench.now = bench.now + Nanos::from_millis(60);
    end(&mut bench, DiskId(SLOW), 1);
    assert_eq!(counts(&bench), (32, 0), "or not");
    bench.run_dry();
    assert_eq!(bench.ended(0).len(), 101);
}

#[test]
fn depth_to_begin_with_bounds_all_contexts_together_as_one_that_is_set_does() {
    let mut begun = Bench::new(QueueConfig {
        depth: Some(8),
        ..shared(2, 32)
    });
    let mut set = Bench::new(shared(2, 32));
    set.queue.set_depth(8).expect("less than there are tags");
    let more = [&mut begun, &mut set].map(|bench| {
        (0..2).for_each(|side| submit(bench, side, FAST, 32));
        assert_eq!(counts(bench).1, 8);
        bench.queue.set_depth(32).expect("as many as there are tags");
        bench.run_until_idle();
        let more = counts(bench).1;
        bench.run_dry();
        assert_eq!((0..2).map(|side| bench.ended(side).len()).sum::<usize>(), 64);
        more
    });
    // Each context keeps its earlier share, eight tags, until it computes it again.
    assert_eq!(more, [16, 16]);
}
