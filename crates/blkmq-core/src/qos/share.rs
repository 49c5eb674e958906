//! Each disk's share of a shared tag set behind an elevator: a fair share while other disks are active,
//! so that a slow disk does not keep the tags from a fast one. The `gate` asks before it issues.
//!
//! The share is max(⌈depth / users⌉, 4); a user is a disk that has requests in the gate, or had some lately.
//! Requests that the elevator dispatches beyond the share are held here, in the elevator's order, until a
//! request of their disk completes. There are no shares with `bfq`, which divides the drive among groups by
//! itself, and none for disks with tags of their own.

use std::collections::VecDeque;

use super::SHARE_MIN;
use crate::ids::DiskId;
use crate::request::Request;
use crate::time::{Instant, Nanos};

/// The requests of a queue's disks in the gate; not counted if there are no shares.
pub(crate) struct Shares {
    disks: Vec<Use>,
    /// Disks that are active.
    users: u32,
    /// Requests dispatched by the elevator beyond the share of their disk.
    held: VecDeque<Box<Request>>,
    /// When the disks were last checked for being inactive.
    looked_at: Instant,
}

#[derive(Clone, Default)]
struct Use {
    /// Bios inside the elevator.
    waiting: u32,
    held: u32,
    in_flight: u32,
    /// It has requests in the gate, or had some not longer than `LINGER` ago.
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

    /// Counts a request that enters the elevator.
    #[inline]
    pub(crate) fn inserted(&mut self, rq: &Request, now: Instant) {
        let bios = rq.bios;
        if let Some(disk) = self.disks.get_mut(rq.disk().index()) {
            disk.waiting += bios;
            disk.seen_at = now;
            self.users += u32::from(!std::mem::replace(&mut disk.is_active, true));
        }
    }

    /// Takes a dispatched request: returns it if it may go now, otherwise holds it.
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

    /// Takes the first held request that may go now.
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

    /// Counts a request that went on and has ended, or that is requeued.
    #[inline]
    pub(crate) fn ended(&mut self, disk: DiskId) {
        if let Some(disk) = self.disks.get_mut(disk.index()) {
            disk.in_flight -= 1;
        }
    }

    /// Checks which disks are no longer active; call it now and then.
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

/// How long a disk without requests in the gate keeps its share.
const LINGER: Nanos = Nanos::from_millis(10);
const LOOK_EVERY: Nanos = Nanos::from_millis(1);
