//! Tests that a virtual machine keeps its data when the daemon is killed, and when another one takes over.

#[path = "../../../blkmq-export/tests/vhost_user/attached.rs"]
pub(crate) mod attached;
#[path = "../../../blkmq-export/tests/vhost_user/blk_cases.rs"]
pub(crate) mod blk_cases;
#[path = "../../../blkmq-export/tests/vhost_user/sys.rs"]
mod sys;

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::common::pattern::{self, BLOCK, SECTOR};
use crate::common::{Daemon, Scratch};
use blkmq_testkit::Random;
use blkmq_testkit::vhost_user::{self, AVAIL, DATA, FrontEnd, USED, words};

/// A driver that has up to five requests in flight, each to a block of its own, and verifies what
/// it reads.
pub(crate) struct Driver {
    pub(crate) client: FrontEnd,
    ring: Ring,
    random: Random,
    /// By their heads.
    in_flight: BTreeMap<u16, Request>,
    /// The generation of each block, once its write has ended.
    generations: BTreeMap<u64, u64>,
    /// The generation of each block at the end of its latest write, and the durable one after a
    /// flush; flushes are drawn if `durable` is there.
    answered: BTreeMap<u64, u64>,
    durable: Option<BTreeMap<u64, u64>>,
    pub(crate) flushes: u64,
    writes: u64,
    reads: u64,
}

#[derive(Debug)]
enum Request {
    Read {
        block: u64,
    },
    Write {
        block: u64,
        generation: u64,
    },
    /// What was answered before it was submitted.
    Flush(BTreeMap<u64, u64>),
}

impl Driver {
    pub(crate) fn new(socket: &Path, seed: u64, ring: Ring) -> Self {
        let packed = match ring {
            Ring::Split { .. } => 0,
            Ring::Packed { .. } => RING_PACKED,
        };
        Self {
            client: FrontEnd::connect_with(socket, vhost_user::FEATURES | packed),
            ring,
            random: Random::new(seed),
            in_flight: BTreeMap::new(),
            generations: BTreeMap::new(),
            answered: BTreeMap::new(),
            durable: None,
            flushes: 0,
            writes: 0,
            reads: 0,
        }
    }

    /// Submits requests while heads are free, and processes those that have ended, until `end`.
    pub(crate) fn load_until(&mut self, end: Instant) {
        while Instant::now() < end {
            self.step();
        }
    }

    /// Submits what can be submitted, and processes what has ended. Returns whether anything has.
    pub(crate) fn step(&mut self) -> bool {
        for head in HEADS {
            if !self.in_flight.contains_key(&head) {
                self.begin(head);
            }
        }
        self.client.kick();
        let before = self.ended();
        self.take_ended();
        self.ended() > before
    }

    /// The position from which its ring continues.
    pub(crate) fn base(&self) -> u64 {
        self.ring.base()
    }

    /// How many requests have ended.
    pub(crate) fn ended(&self) -> u64 {
        self.writes + self.reads
    }

    /// How many requests are in flight.
    pub(crate) fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Has its ring served after a kill: the record has the requests in flight.
    pub(crate) fn serve_again(&mut self, socket: &Path, record: &OwnedFd) {
        self.client.connect_again(socket);
        send_record(&self.client, record);
        self.client.start_at(self.ring.base());
    }

    /// Has its ring served: a packed one with a record of the requests in flight, a split one
    /// without, so that it continues where the previous daemon states.
    pub(crate) fn serve(&mut self) {
        if matches!(self.ring, Ring::Packed { .. }) {
            let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
            ftruncate(&record, RECORD_BYTES).unwrap();
            send_record(&self.client, &record);
        }
        self.client.start_at(self.ring.base());
    }

    /// Waits for the requests in flight, over the same connection and ring.
    pub(crate) fn finish(&mut self) {
        assert_eq!(self.client.ask(GET_STATUS, &[]), 0, "the front end's connection");
        self.client.kick();
        self.wait_for_all();
    }

    /// Checks the image against what was written last.
    pub(crate) fn verify_image(&self, image: &Path) {
        let image = std::fs::read(image).expect("the image");
        for block in self.generations.keys() {
            let at = BLOCK * *block as usize;
            self.verify(*block, &image[at..at + BLOCK]);
        }
    }

    /// Makes it draw flushes, too.
    pub(crate) fn flush_often(&mut self) {
        self.durable = Some(BTreeMap::new());
    }

    fn begin(&mut self, head: u16) {
        if self.durable.is_some() && self.random.below(6) == 0 {
            return self.begin_flush(head);
        }
        let block = u64::from(head) * BLOCKS_OF_A_HEAD + self.random.below(BLOCKS_OF_A_HEAD);
        let is_write = self.random.below(3) > 0;
        let data = data_of(head);
        let base = self
            .client
            .fill(head, is_write.into(), block * (BLOCK / SECTOR) as u64);
        let generation = self.generations.entry(block).or_default();
        let mut request = Request::Read { block };
        if is_write {
            *generation += 1;
            let generation = *generation;
            request = Request::Write { block, generation };
            self.client.write(data, &pattern::block(block, generation));
        }
        let flags = if is_write { 0 } else { vhost_user::WRITE };
        let chain = [
            (base, 16, 0),
            (data, BLOCK as u32, flags),
            (base + 1024, 1, vhost_user::WRITE),
        ];
        self.in_flight.insert(head, request);
        self.ring.offer(&self.client, head, chain);
    }

    fn begin_flush(&mut self, head: u16) {
        let base = self.client.fill(head, FLUSH, 0);
        // The header in two pieces, since a flush has no data and a request in the ring has three
        // descriptors.
        let chain = [
            (base, 8, 0),
            (base + 8, 8, 0),
            (base + 1024, 1, vhost_user::WRITE),
        ];
        self.in_flight.insert(head, Request::Flush(self.answered.clone()));
        self.ring.offer(&self.client, head, chain);
    }

    pub(crate) fn take_ended(&mut self) {
        while let Some(head) = self.ring.take(&self.client) {
            let request = self.in_flight.remove(&head).expect("given back once");
            assert_eq!(self.client.status(head), 0, "{request:?}");
            match request {
                Request::Write { block, generation } => {
                    self.writes += 1;
                    self.answered.insert(block, generation);
                }
                Request::Read { block } => {
                    self.reads += 1;
                    self.verify(block, &self.client.read::<BLOCK>(data_of(head)));
                }
                Request::Flush(answered) => {
                    self.flushes += 1;
                    // Flushes may end in another order than they were submitted.
                    let durable = self.durable.get_or_insert_default();
                    for (block, generation) in answered {
                        let found = durable.entry(block).or_default();
                        *found = generation.max(*found);
                    }
                }
            }
        }
    }

    /// Checks an image after a power cut: each sector must hold what a flush has made durable, or
    /// what was sent since. Returns how many sectors hold less than what was sent last.
    pub(crate) fn verify_after_a_power_cut(&self, image: &Path) -> usize {
        let image = std::fs::read(image).expect("the image");
        let durable = self.durable.as_ref().expect("it flushes");
        let mut behind = 0;
        for (block, sent) in &self.generations {
            let at = BLOCK * *block as usize;
            let least = durable.get(block).copied().unwrap_or_default();
            for (index, sector) in (0..).zip(image[at..at + BLOCK].chunks(SECTOR)) {
                let found = pattern::generation(*block, index, sector).expect("a sector of this block");
                assert!(
                    (least..=*sent).contains(&found),
                    "LOST: block {block}, sector {index}: generation {found}, {least} is durable, {sent} was sent"
                );
                behind += usize::from(found < *sent);
            }
        }
        behind
    }

    fn verify(&self, block: u64, found: &[u8]) {
        for (index, sector) in (0..).zip(found.chunks(SECTOR)) {
            let generation = pattern::generation(block, index, sector);
            let expected = self.generations[&block];
            assert_eq!(generation, Ok(expected), "block {block}, sector {index}");
        }
    }

    fn wait_for_all(&mut self) {
        let start = Instant::now();
        while !self.in_flight.is_empty() {
            let in_flight = &self.in_flight;
            assert!(start.elapsed() < Duration::from_secs(10), "lost: {in_flight:?}");
            self.take_ended();
        }
    }
}

fn data_of(head: u16) -> u64 {
    DATA + 0x2_0000 + BLOCK as u64 * u64::from(head)
}

/// The driver's side of a ring of 16 descriptors: how many chains, or places, it has offered and
/// seen.
#[derive(Clone, Copy)]
pub(crate) enum Ring {
    Split { offered: u16, seen: u16 },
    Packed { offered: u32, seen: u32 },
}

impl Ring {
    pub(crate) const SPLIT: Self = Self::Split { offered: 0, seen: 0 };
    pub(crate) const PACKED: Self = Self::Packed { offered: 0, seen: 0 };

    /// The position from which a device without a record continues.
    fn base(self) -> u64 {
        match self {
            Self::Split { seen, .. } => seen.into(),
            Self::Packed { seen, .. } => {
                let round = if seen / 16 % 2 == 0 { 1 << 15 } else { 0 };
                let place = u64::from(seen % 16) | round;
                place | place << 16
            }
        }
    }

    /// Offers a chain of three descriptors: address, bytes, flags.
    pub(crate) fn offer(&mut self, client: &FrontEnd, head: u16, chain: [(u64, u32, u16); 3]) {
        match self {
            Self::Split { offered, .. } => {
                for (index, (at, bytes, flags)) in (head..).zip(chain) {
                    let more = if index < head + 2 { vhost_user::NEXT } else { 0 };
                    client.descriptor(index.into(), at, bytes, flags | more, index + 1);
                }
                client.write(AVAIL + 4 + 2 * u64::from(*offered % 16), &head.to_le_bytes());
                *offered = offered.wrapping_add(1);
                client.write(AVAIL + 2, &offered.to_le_bytes());
            }
            Self::Packed { offered, .. } => {
                // The first descriptor last, and its flags last: they make the chain available.
                for (number, (at, bytes, flags)) in [0, 1, 2].into_iter().zip(chain).rev() {
                    let place = *offered + number;
                    let more = if number < 2 { vhost_user::NEXT } else { 0 };
                    let round = if place / 16 % 2 == 0 { 1 << 7 } else { 1 << 15 };
                    let start = 16 * u64::from(place % 16);
                    client.write(start, &words(&[at]));
                    client.write(start + 8, &bytes.to_le_bytes());
                    client.write(start + 12, &head.to_le_bytes());
                    client.write(start + 14, &(flags | more | round).to_le_bytes());
                }
                *offered += 3;
            }
        }
    }

    /// Returns the next used chain.
    pub(crate) fn take(&mut self, client: &FrontEnd) -> Option<u16> {
        match self {
            Self::Split { seen, .. } => {
                let used = u16::from_le_bytes(client.read(USED + 2));
                let head = client.read::<4>(USED + 4 + 8 * u64::from(*seen % 16));
                (*seen != used).then(|| {
                    *seen = seen.wrapping_add(1);
                    u32::from_le_bytes(head) as u16
                })
            }
            Self::Packed { offered, seen } => {
                let at = 16 * u64::from(*seen % 16);
                let flags = u16::from_le_bytes(client.read(at + 14)) & (1 << 7 | 1 << 15);
                let used = if *seen / 16 % 2 == 0 { 1 << 7 | 1 << 15 } else { 0 };
                (seen != offered && flags == used).then(|| {
                    *seen += 3;
                    u16::from_le_bytes(client.read(at + 12))
                })
            }
        }
    }
}

#[test]
fn daemon_killed_under_load_of_a_driver_loses_nothing_and_repeats_no_ended_request() {
    kill_under_load(Ring::SPLIT);
}

#[test]
fn daemon_killed_under_load_of_a_driver_with_a_packed_ring_does_neither() {
    kill_under_load(Ring::PACKED);
}

/// `BLKMQ_KILLS` is the number of kills, `BLKMQ_KILLS_SEED` the first seed.
fn kill_under_load(ring: Ring) {
    let number = |name, default| std::env::var(name).map_or(default, |value| value.parse().expect(name));
    let (kills, seed): (u64, u64) = (number("BLKMQ_KILLS", 10), number("BLKMQ_KILLS_SEED", 1));
    println!("again: BLKMQ_KILLS={kills} BLKMQ_KILLS_SEED={seed}");
    let scratch = Scratch::new();
    let disk = format!("name=vm,file={},size=1M,create=on", scratch.word("vm.raw"));
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let socket = scratch.path("vm.sock");
    let start = || Daemon::start(&["--disk", &disk, "--vhost-user", &address]);
    let record = memfd_create("record", MemfdFlags::CLOEXEC).unwrap();
    ftruncate(&record, RECORD_BYTES).unwrap();
    let mut daemon = start();
    let mut driver = Driver::new(&socket, seed, ring);
    let mut left = 0;
    for _ in 0..kills {
        send_record(&driver.client, &record);
        driver.client.start_at(driver.ring.base());
        let time = Duration::from_micros(1_000 + driver.random.below(50_000));
        driver.load_until(Instant::now() + time);
        daemon.kill();
        driver.take_ended();
        left += driver.in_flight.len();
        daemon = start();
        driver.client.connect_again(&socket);
    }
    send_record(&driver.client, &record);
    driver.client.start_at(driver.ring.base());
    driver.client.kick();
    driver.wait_for_all();
    daemon.stop();
    driver.verify_image(&scratch.path("vm.raw"));
    let (writes, reads) = (driver.writes, driver.reads);
    println!("{kills} kills, {left} requests in flight at them, {writes} writes, {reads} reads");
    assert!(left > 0, "no kill met a request in flight");
}

#[test]
fn driver_goes_on_under_load_while_other_daemons_take_over() {
    upgrade_under_load(Ring::SPLIT);
}

#[test]
fn driver_with_a_packed_ring_goes_on_under_load_while_other_daemons_take_over() {
    upgrade_under_load(Ring::PACKED);
}

/// `BLKMQ_UPGRADES` is the number of upgrades.
fn upgrade_under_load(ring: Ring) {
    let upgrades = crate::upgrade::upgrades();
    let scratch = Scratch::new();
    let disk = format!("name=vm,file={},size=1M,create=on", scratch.word("vm.raw"));
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let start = |how: &str| Daemon::start(&["--disk", &disk, "--vhost-user", &address, how, &upgrade]);
    let mut daemon = start("--upgrade-socket");
    let mut driver = Driver::new(&scratch.path("vm.sock"), 1, ring);
    driver.serve();
    let (ended, mut pauses) = (AtomicU64::new(0), Vec::new());
    std::thread::scope(|scope| {
        let upgrader = scope.spawn(|| {
            for upgrade in 1..=upgrades as u64 {
                let mut old = std::mem::replace(&mut daemon, start("--take-over"));
                assert!(
                    old.ended_within(Duration::from_secs(20)).success(),
                    "{}",
                    old.said()
                );
                let begun = Instant::now();
                // Relaxed: a count.
                while ended.load(Ordering::Relaxed) <= 10 * upgrade {
                    assert!(begun.elapsed() < Duration::from_secs(20), "no request ends");
                    std::thread::sleep(Duration::from_millis(20));
                }
            }
        });
        let mut last = Instant::now();
        while !upgrader.is_finished() {
            driver.load_until(Instant::now() + Duration::from_micros(200));
            if ended.fetch_max(driver.writes + driver.reads, Ordering::Relaxed) < driver.writes + driver.reads
            {
                pauses.push(last.elapsed());
                last = Instant::now();
            }
        }
    });
    driver.finish();
    daemon.stop();
    driver.verify_image(&scratch.path("vm.raw"));
    pauses.sort_unstable();
    // As many as there were upgrades, about one of each.
    let longest = &pauses[pauses.len().saturating_sub(upgrades)..];
    let (median, worst) = (longest[longest.len() / 2], longest[longest.len() - 1]);
    let ended = ended.into_inner();
    println!("{upgrades} upgrades, {ended} requests; longest pauses: median {median:?}, worst {worst:?}");
}

pub(crate) fn send_record(client: &FrontEnd, record: &OwnedFd) {
    let mut spec = words(&[RECORD_BYTES, 0]);
    spec.extend([1_u16, 16].iter().flat_map(|half| half.to_ne_bytes()));
    client.send(32, &spec, &[record.as_fd()]);
}

/// The kind of requests that are flushes.
const FLUSH: u32 = 4;
/// Each has three descriptors.
pub(crate) const HEADS: [u16; 5] = [0, 3, 6, 9, 12];
/// Few, so that each is soon written again.
const BLOCKS_OF_A_HEAD: u64 = 4;
/// Enough for both kinds of rings.
pub(crate) const RECORD_BYTES: u64 = 32 + 32 * 16 + 32;
const GET_STATUS: u32 = 40;
const RING_PACKED: u64 = 1 << 34;
