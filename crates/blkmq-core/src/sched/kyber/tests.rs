//! Scenarios of the policy, one sentence each, and random histories against what must hold at every step.

use proptest::prelude::*;

use super::*;
use crate::bio::{Bio, Flags};
use crate::ids::ReactorId;
use crate::time::Nanos;

const BLOCK: u64 = 4096;
const READ: u64 = 0;
const WRITE: u64 = 10_000;
const BACKGROUND: u64 = 20_000;
const DISCARD: u64 = 30_000;
const ZERO: u64 = 40_000;

/// An elevator whose requests are named by the blocks where they begin, which tell their kind too; checked after every call.
struct Bench {
    kyber: Kyber,
    now: Instant,
    out: Vec<Box<Request>>,
}

impl Bench {
    fn new() -> Self {
        let limits = Limits {
            discard_max: 1 << 30,
            zeroes_max: 1 << 30,
            ..Limits::default()
        };
        Self {
            kyber: Kyber::new(limits, 512),
            now: Instant(1),
            out: Vec::new(),
        }
    }

    fn insert(&mut self, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            let mut rq = Request::for_test(ReactorId(0), bio(block), 0);
            rq.inserted_at = self.now;
            self.kyber.insert(rq, InsertAt::Ordered, self.now);
            self.kyber.check_invariants();
        }
    }

    /// Requests of the kind that `from` begins, none touching another.
    fn insert_apart(&mut self, from: u64, count: u64) {
        self.insert((0..count).map(|n| from + 2 * n));
    }

    fn dispatch(&mut self) -> Option<u64> {
        let mut rq = self.kyber.dispatch(self.now)?;
        self.kyber.check_invariants();
        rq.issued_at = self.now;
        let block = rq.position() / BLOCK;
        self.out.push(rq);
        Some(block)
    }

    fn next(&mut self, count: usize) -> Vec<u64> {
        std::iter::from_fn(|| self.dispatch()).take(count).collect()
    }

    fn end(&mut self, index: usize) {
        let rq = self.out.swap_remove(index);
        self.kyber.completed(&Note::of(&rq, self.now));
        self.kyber.check_invariants();
    }

    fn requeue(&mut self, index: usize) {
        let rq = self.out.remove(index);
        self.kyber.insert(rq, InsertAt::Head, self.now);
        self.kyber.check_invariants();
    }

    /// So many requests of one kind that take these times, one after the other, in the time of one look.
    fn serve(&mut self, from: u64, count: u64, wait_us: u64, device_us: u64) {
        let begin = self.now;
        for _ in 0..count {
            self.now = begin;
            self.insert([from]);
            self.now = begin + Nanos::from_micros(wait_us);
            self.dispatch().unwrap();
            self.now = self.now + Nanos::from_micros(device_us);
            self.end(0);
        }
    }

    /// Ends one request after the next look is due, so that it takes place; its own times are good ones.
    fn look(&mut self) {
        self.now = self.now + Nanos::from_millis(100);
        self.serve(ZERO, 1, 0, 1);
    }
}

fn bio(block: u64) -> Bio {
    let (op, flags) = match block / 10_000 {
        0 => (Op::Read, Flags::NONE),
        1 => (Op::Write, Flags::NONE),
        2 => (Op::Write, Flags::ASYNC),
        3 => (Op::Discard, Flags::NONE),
        _ => (Op::WriteZeroes, Flags::NONE),
    };
    Bio {
        op,
        flags,
        offset: block * BLOCK,
        len: BLOCK,
        ..Bio::default()
    }
}

fn count(blocks: &[u64], from: u64) -> usize {
    blocks
        .iter()
        .filter(|&&block| (from..from + 10_000).contains(&block))
        .count()
}

#[test]
fn domains_take_turns_in_batches_and_each_goes_by_arrival() {
    let mut bench = Bench::new();
    for from in [ZERO, DISCARD, WRITE, READ] {
        bench.insert_apart(from, 20);
    }
    let order = bench.next(17 + 8 + 1 + 1);
    let reads: Vec<u64> = (0..16).map(|n| READ + 2 * n).collect();
    assert_eq!(order[..16], reads);
    assert_eq!(order[16], WRITE);
    assert_eq!(order[23], WRITE + 14);
    assert_eq!(order[24..], [DISCARD, ZERO, READ + 32]);
}

#[test]
fn batch_ends_early_when_its_domain_has_nothing_more() {
    let mut bench = Bench::new();
    bench.insert([READ, WRITE, WRITE + 2]);
    assert_eq!(bench.next(3), [READ, WRITE, WRITE + 2]);
    bench.insert([WRITE + 4, READ + 2]);
    assert_eq!(
        bench.next(2),
        [WRITE + 4, READ + 2],
        "the batch of writes goes on"
    );
}

#[test]
fn domain_without_tokens_lets_the_others_go_and_goes_on_when_one_comes_back() {
    let mut bench = Bench::new();
    bench.insert_apart(READ, 300);
    assert_eq!(bench.next(1000).len(), 256);
    bench.insert([WRITE]);
    assert_eq!(bench.next(9), [WRITE]);
    bench.end(0);
    assert_eq!(bench.next(9), [READ + 512]);
}

#[test]
fn asynchronous_writes_leave_a_quarter_of_the_tokens_to_synchronous_ones() {
    let mut bench = Bench::new();
    bench.insert_apart(BACKGROUND, 200);
    assert_eq!(bench.next(1000).len(), 96);
    bench.insert_apart(WRITE, 200);
    let order = bench.next(1000);
    assert_eq!((order.len(), count(&order, WRITE)), (32, 32));
}

#[test]
fn synchronous_and_asynchronous_writes_go_in_the_order_of_their_arrival() {
    let mut bench = Bench::new();
    bench.insert([WRITE, BACKGROUND, WRITE + 2, BACKGROUND + 2]);
    assert_eq!(bench.next(4), [WRITE, BACKGROUND, WRITE + 2, BACKGROUND + 2]);
}

#[test]
fn requeued_requests_go_first_with_the_tokens_that_they_have() {
    let mut bench = Bench::new();
    bench.insert_apart(READ, 258);
    bench.next(256);
    bench.requeue(5);
    bench.requeue(0);
    assert_eq!(bench.next(9), [READ + 10, READ]);
    bench.end(255);
    assert_eq!(bench.next(9), [READ + 512]);
}

#[test]
fn neighbours_of_one_kind_become_one_request_with_one_token() {
    let mut bench = Bench::new();
    bench.insert([READ + 1, READ + 2, READ, WRITE]);
    assert_eq!(bench.kyber.queued(), 2);
    assert_eq!(bench.next(9), [READ, WRITE]);
    assert_eq!(bench.out[0].bio_count(), 3);
    bench.insert([WRITE + 10_000 - 1, BACKGROUND]);
    assert_eq!(bench.kyber.queued(), 2, "touching, but not of one kind");
}

#[test]
fn while_the_drive_is_not_congested_nobody_gives_up_tokens() {
    let mut bench = Bench::new();
    for _ in 0..5 {
        bench.serve(READ, 500, 10, 100);
        bench.serve(WRITE, 500, 10, 100);
        bench.look();
    }
    assert_eq!(bench.kyber.depths, DEPTHS_MAX);
}

#[test]
fn writes_that_meet_their_target_give_up_tokens_while_reads_miss_theirs() {
    let mut bench = Bench::new();
    bench.serve(READ, 500, 0, 3_000);
    bench.serve(WRITE, 500, 10, 100);
    bench.look();
    assert_eq!(
        bench.kyber.depths,
        [256, 32, 64, 16],
        "to a quarter: they took less than one"
    );
    bench.serve(READ, 500, 0, 3_000);
    bench.serve(WRITE, 500, 10, 6_000);
    bench.look();
    assert_eq!(bench.kyber.depths[WRITES], 24, "to three quarters");
}

#[test]
fn domain_that_waits_beyond_its_target_gets_more_tokens_up_to_its_most() {
    let mut bench = Bench::new();
    bench.kyber.depths[WRITES] = 1;
    let mut seen = Vec::new();
    for _ in 0..9 {
        bench.serve(WRITE, 500, 15_000, 100);
        bench.look();
        seen.push(bench.kyber.depths[WRITES]);
    }
    assert_eq!(seen, [2, 3, 5, 8, 14, 24, 42, 73, 127]);
    bench.serve(WRITE, 500, 50_000, 100);
    bench.look();
    assert_eq!(bench.kyber.depths[WRITES], 128);
}

#[test]
fn few_slow_requests_decide_nothing_until_a_second_has_passed() {
    let mut bench = Bench::new();
    bench.kyber.depths[WRITES] = 64;
    bench.serve(WRITE, 20, 15_000, 100);
    for look in 0..9 {
        bench.look();
        assert_eq!(bench.kyber.depths[WRITES], 64, "look {look}");
    }
    bench.look();
    assert_eq!(bench.kyber.depths[WRITES], 112);
}

#[test]
fn one_slow_request_in_a_hundred_does_not_count() {
    let mut bench = Bench::new();
    bench.kyber.depths[0] = 100;
    bench.serve(READ, 1000, 10, 100);
    bench.serve(READ, 10, 10_000, 10_000);
    bench.look();
    assert_eq!(bench.kyber.depths[0], 100);
    bench.serve(READ, 980, 10, 100);
    bench.serve(READ, 20, 10_000, 100);
    bench.look();
    assert_eq!(bench.kyber.depths[0], 200);
}

proptest! {
    #[test]
    fn whatever_happens_who_has_a_request_and_a_token_goes(
        steps in prop::collection::vec((0u8..8, any::<u16>(), 0u64..20_000), 1..400)
    ) {
        let mut bench = Bench::new();
        bench.kyber.depths = [4, 3, 2, 1];
        for (step, pick, us) in steps {
            bench.now = bench.now + Nanos::from_micros(us);
            let pick = usize::from(pick);
            match step {
                0..3 => bench.insert([pick as u64 % 50_000]),
                3..6 => {
                    let free: Vec<usize> =
                        (0..LINES).filter(|&line| !bench.kyber.lines[line].is_empty() && has_token(&bench, line)).collect();
                    let came_back = bench.kyber.requeued.len() > 0;
                    prop_assert_eq!(bench.dispatch().is_some(), came_back || !free.is_empty());
                }
                _ if bench.out.is_empty() => {}
                6 => bench.end(pick % bench.out.len()),
                _ => bench.requeue(pick % bench.out.len()),
            }
        }
        let mut left = bench.kyber.queued();
        while left > 0 {
            if bench.dispatch().is_some() {
                left -= 1;
            } else {
                prop_assert!(!bench.out.is_empty(), "{left} requests are left with nothing that would bring a token");
                bench.end(0);
            }
        }
    }
}

/// The rule in the plainest words.
fn has_token(bench: &Bench, line: usize) -> bool {
    let Kyber { out, depths, .. } = &bench.kyber;
    match line {
        SYNC_WRITES => out[1] + out[2] < depths[1],
        ASYNC_WRITES => out[1] + out[2] < depths[1] && out[2] < (depths[1] * 3 / 4).max(1),
        _ => out[line] < depths[DOMAIN_OF_LINE[line]],
    }
}
