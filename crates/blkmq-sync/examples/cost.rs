//! Question: what does each operation of `blkmq-sync` cost one thread when nobody contends?
//!
//! `cargo run --release -p blkmq-sync --example cost` prints nanoseconds per operation: median and spread
//! (lowest to highest) of the rounds, each well below a scheduler's time slice. `-- --quick` makes them
//! shorter. A figure includes the loop around it, well below 1 ns. The line `fence(SeqCst)` is the standard
//! library's full fence, for comparison.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::Instant;

use blkmq_sync::{Counter, FreezeState, Gate, Published, RunWork, TagBitmap, WakeFlag, mpsc, spsc};

const ROUNDS: usize = 101;
const BATCH: u64 = 32;

fn main() {
    let is_quick = std::env::args().any(|arg| arg == "--quick");
    let cost = Cost {
        turns: if is_quick { 2_000 } else { 40_000 },
    };
    println!("{:<58} {:>8}   spread", "ns per operation, one thread", "median");
    references(&cost);
    rings(&cost);
    marks(&cost);
    tags(&cost);
    counts(&cost);
}

fn references(cost: &Cost) {
    let word = AtomicU64::new(0);
    cost.of("reference: fetch_add", 1, || {
        black_box(word.fetch_add(1, Ordering::AcqRel));
    });
    cost.of("reference: compare_exchange", 1, || {
        let seen = word.load(Ordering::Relaxed);
        let _ = black_box(word.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed));
    });
    cost.of("reference: store, fence(SeqCst), load", 1, || {
        word.store(1, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        black_box(word.load(Ordering::Relaxed));
    });
}

fn rings(cost: &Cost) {
    let (mut producer, mut consumer) = spsc::ring::<u64>(256);
    cost.of("spsc: push and pop", 1, || {
        let _ = producer.push(black_box(7));
        black_box(consumer.pop());
    });
    cost.of("spsc: push 32 and drain, per item", BATCH, || {
        for n in 0..BATCH {
            let _ = producer.push(black_box(n));
        }
        consumer.drain(|item| {
            black_box(item);
        });
    });
    cost.of("spsc: is_empty of an empty ring", 1, || {
        black_box(consumer.is_empty());
    });
    let (sender, mut receiver) = mpsc::channel::<u64>(256);
    cost.of("mpsc: push and pop", 1, || {
        let _ = sender.push(black_box(7));
        black_box(receiver.pop());
    });
    cost.of("mpsc: is_empty of an empty ring", 1, || {
        black_box(receiver.is_empty());
    });
}

fn marks(cost: &Cost) {
    let gate = Gate::new(0_u64);
    cost.of("gate: try_enter and leave", 1, || {
        let mut inside = gate.try_enter().expect("free");
        *inside += 1;
        let _ = black_box(inside.leave());
    });
    let inside = gate.try_enter();
    cost.of("gate: try_enter, held and marked", 1, || {
        black_box(gate.try_enter().is_some());
    });
    drop(inside);
    let work = RunWork::new();
    cost.of("run work: run, take, finish", 1, || {
        let _ = black_box(work.run());
        black_box(work.take(0));
        black_box(work.finish());
    });
    let _ = work.run();
    cost.of("run work: redundant run (goal: at most 5)", 1, || {
        let _ = black_box(work.run());
    });
    cost.of("run work: redundant run, one of many", 1, || {
        let _ = black_box(work.run_published(&Published::by_rmw()));
    });
    cost.of("run work: redundant run by the owner", 1, || {
        let _ = black_box(work.run_by_owner());
    });
    let flag = WakeFlag::new();
    cost.of("wake flag: notify while awake", 1, || {
        black_box(flag.notify());
    });
}

fn tags(cost: &Cost) {
    for depth in [32, 1024] {
        let tags = TagBitmap::new(depth);
        let mut hint = 0;
        cost.of(&format!("tags: alloc and free, depth {depth}"), 1, || {
            let tag = tags.alloc(&mut hint).expect("free");
            tags.free(black_box(tag));
        });
        cost.of(
            &format!("tags: alloc, free, take_waiters, depth {depth}"),
            1,
            || {
                let tag = tags.alloc(&mut hint).expect("free");
                tags.free(black_box(tag));
                black_box(tags.take_waiters());
            },
        );
        while tags.alloc(&mut hint).is_some() {}
        cost.of(&format!("tags: alloc that finds none, depth {depth}"), 1, || {
            black_box(tags.alloc(&mut hint));
        });
    }
}

fn counts(cost: &Cost) {
    let state = FreezeState::new(2);
    cost.of("freeze count: enter, add_started, add_finished, exit", 1, || {
        if state.enter(0) {
            state.add_started(0, 1);
            state.add_finished(0, 1);
            state.exit(0);
        }
    });
    let counter = Counter::new();
    cost.of("counter: add", 1, || black_box(&counter).add(black_box(1)));
}

struct Cost {
    turns: u64,
}

impl Cost {
    /// Runs `turn`, which makes `operations` of what is measured, in several rounds and prints the cost of
    /// one.
    fn of(&self, name: &str, operations: u64, mut turn: impl FnMut()) {
        let turns = (self.turns / operations).max(1);
        let mut rounds: Vec<f64> = (0..ROUNDS)
            .map(|_| {
                let start = Instant::now();
                (0..turns).for_each(|_| turn());
                start.elapsed().as_nanos() as f64 / (turns * operations) as f64
            })
            .collect();
        rounds.sort_by(f64::total_cmp);
        println!(
            "{name:<58} {:>8.2}   {:.2} to {:.2}",
            rounds[ROUNDS / 2],
            rounds[0],
            rounds[ROUNDS - 1]
        );
    }
}
