//! Decides how much of a shared tag set each disk may have in flight behind an elevator: a fair share while others are
//! active, so that a slow disk does not keep the tags from a fast one. The `gate` asks before it issues.
//!
//! The share is max(⌈depth / users⌉, 4), a user being a disk with something in the gate, or that had lately. What the
//! elevator gives out beyond it is held here, in the elevator's order; a completion of its disk lets it go. `bfq` divides
//! the drive among groups by itself and is left alone, and so are disks with tags of their own.

use std::collections::VecDeque;

use crate::ids::DiskId;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// What the disks of a queue have in the gate; nothing is counted where no share is due.
pub(crate) struct Shares {
    disks: Vec<Use>,
    /// Disks that are active.
    users: u32,
    /// Given out by the elevator, and beyond the share of their disk.
    held: VecDeque<Box<Request>>,
    /// When it was last looked who is no longer active.
    looked_at: Instant,
}

#[derive(Clone, Default)]
struct Use {
    /// Bios inside the elevator.
    waiting: u32,
    held: u32,
    in_flight: u32,
    /// It has something in the gate, or had it not longer than `LINGER` ago.
    is_active: bool,
    seen_at: Instant,
}

impl Shares {
    /// Shares for `disks` disks; for fewer than two there are none.
    pub(crate) fn new(disks: usize, requests_max: usize) -> Self {
        let is_due = disks > 1;
        Self {
            disks: vec![Use::default(); if is_due { disks } else { 0 }],
            users: 0,
            held: VecDeque::with_capacity(if is_due { requests_max } else { 0 }),
            looked_at: Instant(0),
        }
    }

    /// A request goes into the elevator.
    #[inline]
    pub(crate) fn inserted(&mut self, rq: &Request, now: Instant) {
        let bios = rq.bios;
        if let Some(disk) = self.disks.get_mut(rq.disk().index()) {
            disk.waiting += bios;
            disk.seen_at = now;
            self.users += u32::from(!std::mem::replace(&mut disk.is_active, true));
        }
    }

    /// A request comes out of the elevator: gives it back if it may go now, else holds it.
    #[inline]
    pub(crate) fn admit(&mut self, rq: Box<Request>, depth: u32) -> Option<Box<Request>> {
        if self.disks.is_empty() {
            return Some(rq);
        }
        let share = self.share(depth);
        let disk = &mut self.disks[rq.disk().index()];
        disk.waiting -= rq.bios;
        if disk.in_flight < share {
            disk.in_flight += 1;
            return Some(rq);
        }
        disk.held += 1;
        self.held.push_back(rq);
        None
    }

    /// Takes the first request that is held and may go now.
    #[inline]
    pub(crate) fn next_held_back(&mut self, depth: u32) -> Option<Box<Request>> {
        if self.held.is_empty() {
            return None;
        }
        let share = self.share(depth);
        let has_room = |disk: &Use| disk.held > 0 && disk.in_flight < share;
        if !self.disks.iter().any(has_room) {
            return None;
        }
        let place = self
            .held
            .iter()
            .position(|rq| has_room(&self.disks[rq.disk().index()]))?;
        let rq = self.held.remove(place)?;
        let disk = &mut self.disks[rq.disk().index()];
        disk.held -= 1;
        disk.in_flight += 1;
        Some(rq)
    }

    /// A request that may have gone has ended, or comes back to be inserted again.
    #[inline]
    pub(crate) fn ended(&mut self, disk: DiskId) {
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.in_flight -= 1;
        }
    }

    /// Looks which disks are no longer active; to be called now and then.
    #[inline]
    pub(crate) fn look(&mut self, now: Instant) {
        if self.users == 0 || now.since(self.looked_at) < LOOK_EVERY {
            return;
        }
        self.looked_at = now;
        for disk in self.disks.iter_mut().filter(|disk| disk.is_active) {
            if disk.waiting + disk.held + disk.in_flight > 0 {
                disk.seen_at = now;
            } else if now.since(disk.seen_at) > LINGER {
                disk.is_active = false;
                self.users -= 1;
            }
        }
    }

    /// Says whether nothing is held.
    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn share(&self, depth: u32) -> u32 {
        match self.users {
            0 | 1 => u32::MAX,
            users => depth.div_ceil(users).max(SHARE_MIN),
        }
    }
}

/// The least share.
const SHARE_MIN: u32 = 4;
/// For so long a disk that has nothing in the gate keeps its share.
const LINGER: Nanos = Nanos::from_millis(10);
const LOOK_EVERY: Nanos = Nanos::from_millis(1);
