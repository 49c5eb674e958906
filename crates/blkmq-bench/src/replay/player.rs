//! The player of recorded I/Os, which submits them at their times, stretched, or as soon as there is room;
//! and measures how long they take.

use std::thread;
use std::time::Duration;

use blkmq_core::bio::{Bio, Data, Direction, Op};
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::{Attached, Disk};

use super::source::{Recorded, Recording};
use crate::histogram::Histogram;
use crate::sys::Buffers;

/// How fast a recording is replayed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Speed {
    /// This many times as fast as recorded.
    Times(f64),
    /// Without its pauses.
    Max,
}

impl Speed {
    /// When an I/O that was recorded `at` after the first one is due.
    pub(super) fn due(self, at: u64) -> Nanos {
        match self {
            Self::Times(times) => Nanos((at as f64 / times) as u64),
            Self::Max => Nanos(0),
        }
    }
}

/// The results of the I/Os of one direction.
#[derive(Default)]
pub(super) struct Played {
    pub(super) count: u64,
    pub(super) bytes: u64,
    pub(super) failed: u64,
    pub(super) latency: Histogram,
}

/// The results of all I/Os.
#[derive(Default)]
pub(super) struct Outcome {
    /// In the order of [`Direction::ALL`].
    pub(super) played: [Played; Direction::COUNT],
    /// How much later than due each was submitted.
    pub(super) late: Histogram,
    pub(super) elapsed: Duration,
}

impl Outcome {
    /// Counts an I/O that has ended.
    pub(super) fn count(&mut self, bio: &Bio, took: Nanos) {
        let played = &mut self.played[bio.op.direction() as usize];
        played.count += 1;
        played.bytes += bio.len;
        played.failed += u64::from(!bio.status.is_ok());
        played.latency.record(took.0);
    }
}

/// Replays a recording, its devices' I/Os onto `disks` in the same order, with at most `depth`
/// under way.
pub(super) fn play(
    recording: &Recording,
    disks: &[Disk],
    speed: Speed,
    depth: u32,
    attached: &mut Attached,
) -> Outcome {
    let lengths = recording
        .ios
        .iter()
        .filter(|io| moves_data(io.op))
        .map(|io| io.len);
    let usual = lengths.max().unwrap_or(0).clamp(512, USUAL_MAX);
    let mut player = Player {
        buffers: Buffers::new(depth, usual as u32),
        usual,
        large: None,
        under_way: vec![None; depth as usize],
        free: (0..depth).collect(),
        outcome: Outcome::default(),
        start: attached.now(),
    };
    let mut ended = Vec::with_capacity(depth as usize);
    for io in &recording.ios {
        let due = player.start + speed.due(io.at);
        player.wait_until(due, attached, &mut ended);
        player.make_room(io, attached, &mut ended);
        player.submit(io, &disks[io.device as usize], due, attached, &mut ended);
    }
    attached.unplug();
    while attached.outstanding() > 0 {
        attached.wait(&mut ended, None);
        player.take(&mut ended, attached.now());
    }
    player.outcome.elapsed = Duration::from_nanos(attached.now().since(player.start).0);
    player.outcome
}

/// The I/Os under way, and the results of the others.
struct Player {
    /// One buffer for each I/O under way, of `usual` bytes.
    buffers: Buffers,
    usual: u64,
    /// The memory of a larger I/O, of which one at a time is under way.
    large: Option<Buffers>,
    /// By the cookies of bios: the time of submission.
    under_way: Vec<Option<Instant>>,
    /// Unused cookies.
    free: Vec<u32>,
    outcome: Outcome,
    start: Instant,
}

impl Player {
    /// Waits until an I/O is due and there is room for it.
    fn wait_until(&mut self, due: Instant, attached: &mut Attached, ended: &mut Vec<Bio>) {
        loop {
            let left = due.since(attached.now());
            if left == Nanos(0) && !self.free.is_empty() {
                return;
            }
            // I/Os that are due at the same time form a batch, so they can be merged.
            attached.unplug();
            if attached.outstanding() == 0 {
                thread::sleep(Duration::from_nanos(left.0));
            }
            attached.wait(ended, (left > Nanos(0)).then_some(left));
            self.take(ended, attached.now());
        }
    }

    /// Ensures that a large I/O has memory, by waiting until no other such I/O is under way.
    fn make_room(&mut self, io: &Recorded, attached: &mut Attached, ended: &mut Vec<Bio>) {
        if !moves_data(io.op) || io.len <= self.usual {
            return;
        }
        while self.large.is_some() {
            attached.wait(ended, None);
            self.take(ended, attached.now());
        }
        self.large = Some(Buffers::new(1, io.len as u32));
    }

    fn submit(
        &mut self,
        io: &Recorded,
        disk: &Disk,
        due: Instant,
        attached: &mut Attached,
        ended: &mut Vec<Bio>,
    ) {
        let now = attached.now();
        self.outcome.late.record(now.since(due).0);
        let cookie = self.free.pop().expect("waited for");
        self.under_way[cookie as usize] = Some(now);
        let data = match moves_data(io.op) {
            true if io.len > self.usual => self.large.as_mut().expect("made for it").lend(),
            true => self.buffers.lend_part(io.len as u32),
            false => Data::None,
        };
        let mut bio = Bio {
            op: io.op,
            flags: io.flags,
            disk: disk.id,
            group: disk.group,
            offset: io.offset,
            len: io.len,
            data,
            cookie: cookie.into(),
            ..Bio::default()
        };
        while let Err(back) = attached.submit(disk.queue, bio) {
            bio = back;
            attached.unplug();
            attached.wait(ended, None);
            self.take(ended, attached.now());
        }
    }

    fn take(&mut self, ended: &mut Vec<Bio>, now: Instant) {
        for bio in ended.drain(..) {
            let cookie = bio.cookie as usize;
            let begun = self.under_way[cookie].take().expect("a bio ends once");
            self.free.push(cookie as u32);
            self.outcome.count(&bio, now.since(begun));
            if bio.len > self.usual && moves_data(bio.op) {
                let mut large = self.large.take().expect("one is under way");
                large.take_back(bio);
            } else {
                self.buffers.take_back(bio);
            }
        }
    }
}

/// Says whether an operation needs memory.
pub(super) fn moves_data(op: Op) -> bool {
    matches!(op, Op::Read | Op::Write)
}

/// The size of each of the many buffers is at most 1 MiB.
const USUAL_MAX: u64 = 1 << 20;
