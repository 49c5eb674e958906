//! The bios of a client: the mix of operations, the sizes and places, the depth, bursts and pauses. Each
//! reactor has one client; `world` takes bios from it and reports their ends.

use blkmq_core::bio::{Bio, Class, Data, Flags, Op, Prio};
use blkmq_core::ids::{DiskId, GroupId};
use blkmq_core::time::{Instant, Nanos};

use crate::rng::{Ppm, Rng};

/// The behaviour of a client.
#[derive(Clone, Debug)]
pub struct Workload {
    /// Number of bios that it submits.
    pub bios: u64,
    /// How many it has under way at a time: drawn for each burst, at least and at most.
    pub depth: (u64, u64),
    /// Weights of read, write, flush, discard and zeroing.
    pub mix: [u32; 5],
    /// How often a write has FUA.
    pub fua: Ppm,
    /// How often a write has PREFLUSH.
    pub preflush: Ppm,
    /// How often a bio forbids merging.
    pub no_merge: Ppm,
    /// How often a bio continues where the last one ended, with the same operation, group and priority.
    pub sequential: Ppm,
    /// Longest bio in blocks.
    pub blocks_max: u64,
    /// The disks it uses; all if empty.
    pub disks: Vec<u32>,
    /// It draws its groups from `0..groups`.
    pub groups: u32,
    /// How often a bio has a priority other than the default.
    pub prio: Ppm,
    /// How often a bio is one that no disk can accept.
    pub invalid: Ppm,
    /// Bios in a burst, at least and at most.
    pub burst: (u64, u64),
    /// Longest pause between bursts.
    pub pause_max: Nanos,
}

impl Workload {
    /// All operations, all sizes, streams and random places.
    pub fn mixed(rng: &mut Rng) -> Self {
        let depth = rng.pick(&[1, 4, 16, 64]);
        Self {
            bios: 60,
            depth: (1, depth),
            mix: [40, 45, 5, 5, 5],
            fua: Ppm::percent(8),
            preflush: Ppm::percent(5),
            no_merge: Ppm::percent(2),
            sequential: Ppm::percent(40),
            blocks_max: rng.pick(&[1, 4, 32]),
            disks: Vec::new(),
            groups: 3,
            prio: Ppm::percent(20),
            invalid: Ppm::percent(1),
            burst: (1, 40),
            pause_max: Nanos::from_micros(300),
        }
    }
}

/// One client.
#[derive(Clone, Debug)]
pub struct Client {
    workload: Workload,
    rng: Rng,
    disk_blocks: Vec<u32>,
    block: u64,
    left: u64,
    depth: u64,
    burst: u64,
    under_way: u64,
    refused: Option<Bio>,
    /// The last bio with a range, as it was before its flags.
    stream: Option<Bio>,
}

impl Client {
    /// Makes a client of a queue whose disks have these numbers of blocks, of `block` bytes each.
    pub fn new(workload: Workload, disk_blocks: Vec<u32>, block: u32, rng: Rng) -> Self {
        let left = workload.bios;
        let mut client = Self {
            workload,
            rng,
            disk_blocks,
            block: u64::from(block),
            left,
            depth: 1,
            burst: 0,
            under_way: 0,
            refused: None,
            stream: None,
        };
        client.next_burst();
        client
    }

    /// Says whether it has a bio to submit now.
    pub fn wants(&self) -> bool {
        match self.refused {
            // A refused bio is submitted again after an end, which takes it out of `refused` for
            // that time.
            Some(_) => false,
            None => self.left > 0 && self.burst > 0 && self.under_way < self.depth,
        }
    }

    /// Says whether it has nothing left to do and nothing under way.
    pub fn is_finished(&self) -> bool {
        self.left == 0 && self.under_way == 0 && self.refused.is_none()
    }

    /// Returns how many of its bios are under way.
    pub fn under_way(&self) -> u64 {
        self.under_way
    }

    /// Makes the next bio. The caller gives the token.
    pub fn next_bio(&mut self, reactor: u32, token: u64) -> Bio {
        self.left -= 1;
        self.burst -= 1;
        self.under_way += 1;
        let mut bio = self.draw();
        bio.client = reactor;
        bio.cookie = token;
        bio.data = Data::Token(token);
        bio
    }

    /// Takes back a bio that was refused: the client must wait for an end.
    pub fn refused(&mut self, bio: Bio) {
        self.under_way -= 1;
        self.refused = Some(bio);
    }

    /// Returns the bio that was refused, to submit it again.
    pub fn retry(&mut self) -> Option<Bio> {
        let bio = self.refused.take()?;
        self.under_way += 1;
        Some(bio)
    }

    /// Notes that one of its bios has ended.
    pub fn ended(&mut self) {
        self.under_way -= 1;
    }

    /// At the end of a burst: starts the next one, and returns the pause before it.
    pub fn pause(&mut self, now: Instant) -> Option<Instant> {
        if self.burst > 0 || self.left == 0 {
            return None;
        }
        Some(now + Nanos(self.rng.below(self.workload.pause_max.0 + 1)))
    }

    /// Starts a burst.
    pub fn next_burst(&mut self) {
        let (least, most) = self.workload.depth;
        self.depth = self.rng.from_to(least, most);
        let (least, most) = self.workload.burst;
        self.burst = self.rng.from_to(least, most);
    }

    /// Notes that the host has lost its power and starts again: nothing is under way.
    pub fn reboot(&mut self) {
        self.under_way = 0;
        self.refused = None;
        self.next_burst();
    }

    fn draw(&mut self) -> Bio {
        let streaming = self.rng.chance(self.workload.sequential);
        let mut bio = match self.stream.clone() {
            Some(last) if streaming => self.draw_next(last),
            _ => self.draw_fresh(),
        };
        if bio.op != Op::Flush {
            self.stream = Some(bio.clone());
            self.draw_flags(&mut bio);
        }
        if self.rng.chance(self.workload.invalid) {
            self.spoil(&mut bio);
        }
        bio
    }

    /// Continues where the last bio ended, with the same properties, so that the two can be merged;
    /// or starts at the disk's start.
    fn draw_next(&mut self, mut bio: Bio) -> Bio {
        let size = u64::from(self.disk_blocks[bio.disk.index()]);
        let blocks = self.rng.from_to(1, self.workload.blocks_max.min(size));
        let next = bio.end() / self.block;
        bio.offset = if next + blocks <= size {
            next * self.block
        } else {
            0
        };
        bio.len = blocks * self.block;
        bio
    }

    fn draw_fresh(&mut self) -> Bio {
        let op = Self::OPS[self.rng.weighted(&self.workload.mix)];
        let mut bio = Bio {
            op,
            disk: self.draw_disk(),
            group: GroupId(self.rng.below(u64::from(self.workload.groups.max(1))) as u32),
            prio: self.draw_prio(),
            ..Bio::default()
        };
        if op != Op::Flush {
            let size = u64::from(self.disk_blocks[bio.disk.index()]);
            let blocks = self.rng.from_to(1, self.workload.blocks_max.min(size));
            bio.offset = self.rng.below(size - blocks + 1) * self.block;
            bio.len = blocks * self.block;
        }
        bio
    }

    fn draw_disk(&mut self) -> DiskId {
        if self.workload.disks.is_empty() {
            // In proportion to the size, so that every block is equally likely.
            DiskId(self.rng.weighted(&self.disk_blocks) as u32)
        } else {
            DiskId(self.rng.pick(&self.workload.disks))
        }
    }

    fn draw_prio(&mut self) -> Prio {
        if !self.rng.chance(self.workload.prio) {
            return Prio::default();
        }
        Prio {
            class: self.rng.pick(&[Class::Rt, Class::Be, Class::Idle]),
            level: self.rng.below(8) as u8,
        }
    }

    fn draw_flags(&mut self, bio: &mut Bio) {
        if bio.op == Op::Write && self.rng.chance(self.workload.fua) {
            bio.flags = bio.flags.with(Flags::FUA);
        }
        if bio.op == Op::Write && self.rng.chance(self.workload.preflush) {
            bio.flags = bio.flags.with(Flags::PREFLUSH);
        }
        // Depends only on the place, so that neighbours are alike and can still be merged.
        if bio.op == Op::Write && bio.offset >> 16 & 3 == 3 {
            bio.flags = bio.flags.with(Flags::ASYNC);
        }
        if bio.op == Op::WriteZeroes && self.rng.chance(Ppm::percent(30)) {
            bio.flags = bio.flags.with(Flags::NO_UNMAP);
        }
        if self.rng.chance(self.workload.no_merge) {
            bio.flags = bio.flags.with(Flags::NO_MERGE);
        }
    }

    fn spoil(&mut self, bio: &mut Bio) {
        match self.rng.below(3) {
            0 => bio.len += 1,
            1 => bio.offset = u64::MAX - self.block + 1,
            _ => bio.offset = u64::from(self.disk_blocks[bio.disk.index()]) * self.block,
        }
        if bio.op == Op::Flush {
            bio.len = self.block;
        }
    }

    const OPS: [Op; 5] = [Op::Read, Op::Write, Op::Flush, Op::Discard, Op::WriteZeroes];
}

#[cfg(test)]
mod tests {
    use super::*;
    use blkmq_core::limits::Limits;

    #[test]
    fn bios_are_valid_unless_spoiled_and_stay_within_the_depth() {
        let mut rng = Rng::new(5, 0);
        let workload = Workload {
            bios: 500,
            invalid: Ppm::NEVER,
            ..Workload::mixed(&mut rng)
        };
        let limits = crate::setup::limits(&mut rng);
        let limits = Limits {
            logical_block: 4096,
            ..limits
        };
        let mut client = Client::new(workload, vec![64, 32], 4096, rng);
        let mut made = 0;
        while !client.is_finished() {
            while client.wants() {
                made += 1;
                let bio = client.next_bio(0, made);
                let size = [64, 32][bio.disk.index()] * 4096;
                assert_eq!(limits.check_bio(&bio, size, false), Ok(()), "{bio:?}");
            }
            assert!(client.under_way() <= client.depth);
            while client.under_way() > 0 {
                client.ended();
            }
            if client.pause(Instant(0)).is_some() {
                client.next_burst();
            }
        }
        assert_eq!(made, 500);
    }
}
