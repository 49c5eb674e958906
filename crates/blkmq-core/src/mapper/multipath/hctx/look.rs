//! Decides what one hardware context does when the table has changed: it opens and closes drivers of paths, and works out how
//! it chooses from now on.

use std::sync::Arc;

use crate::bio::Status;
use crate::ids::{HctxId, Tag};
use crate::time::Instant;

use super::super::selector::{Dice, Way};
use super::super::shared::{List, Multipath, View};
use super::super::{PathId, paths_in};
use super::check::Checker;
use super::{Frame, Lower, MultipathHctx, Opener, UNCOMMITTED};

impl MultipathHctx {
    /// Opens a context of a queue whose tags number `depth`, with a driver of each path.
    ///
    /// # Errors
    /// The first path whose driver cannot be opened.
    pub fn open(
        shared: &Arc<Multipath>,
        hctx: HctxId,
        depth: u32,
        opener: Box<dyn Opener>,
    ) -> Result<Self, PathId> {
        let depth_of = depth as usize;
        let mut this = Self {
            shard: shared.open(hctx),
            shared: Arc::clone(shared),
            view: View::new(),
            way: Way::None,
            straight: Way::None,
            turn: hctx.index(),
            usable: List::default(),
            are_even: true,
            attention: 0,
            lowers: std::array::from_fn(|_| Lower::default()),
            histories: Default::default(),
            frames: vec![Frame::FREE; depth_of].into(),
            opener,
            hctx,
            dice: Dice::new(hctx),
            shards: Vec::new(),
            opened: 0,
            leaving: 0,
            has_room: false,
            polled: false,
            late: Vec::with_capacity(depth_of),
            partial: Vec::with_capacity(depth_of),
            now: Instant(0),
            checker: (hctx == HctxId(0)).then(|| Checker::new(Tag(depth))),
            detour: None,
            inserted: Vec::with_capacity(depth_of),
            waiting: Vec::with_capacity(depth_of),
            retry_at: None,
        };
        this.look_at_table();
        match this.view.present & !this.opened {
            0 => Ok(this),
            missing => Err(PathId(missing.trailing_zeros() as u8)),
        }
    }

    /// Says whether a probe is with a path's driver, so that its memory is in use.
    pub fn is_probing(&self) -> bool {
        self.checker.as_ref().is_some_and(Checker::is_probing_any)
    }

    /// Brings what is known up to date. What was pushed back may have a path now, or is to fail.
    #[cold]
    #[inline(never)]
    pub(super) fn look(&mut self, now: Instant) {
        self.look_at_table();
        self.has_room = true;
        if let Some(checker) = &mut self.checker {
            checker.look_now();
            // A path without a driver here does not work.
            let missing = self.view.present & !self.opened;
            for path in paths_in(missing) {
                self.shared.failed(PathId(path as u8), Status::Transport, now);
            }
        }
    }

    pub(super) fn look_at_table(&mut self) {
        self.shared.look(self.opened, &mut self.view);
        self.shards.clear();
        self.shards.extend(self.shared.shards().cloned());
        self.leaving = self.opened & !self.view.present;
        paths_in(self.view.present & !self.opened).for_each(|path| self.open_path(path));
        let usable = self.view.usable;
        self.usable = List::default();
        for path in usable.iter().filter(|path| self.opened & 1 << path != 0) {
            self.usable.push(path);
        }
        self.turn %= self.usable.len().max(1);
        let mut speeds = self.usable.iter().map(|path| self.view.throughputs[path]);
        let first = speeds.next();
        self.are_even = first > Some(0) && speeds.all(|speed| Some(speed) == first);
        self.straight = self.view.way(&self.usable, self.hctx);
        let detours = self.view.detours;
        if detours.has_any() && self.detour.is_none() {
            self.detour = self.opener.detour();
        }
        let has_detours = detours.has_any() && self.detour.is_some();
        self.way = if has_detours && detours.insert {
            Way::Detour
        } else {
            self.straight
        };
        self.attention &= UNCOMMITTED;
        self.attention |= Self::attention_of(self.straight == Way::History, has_detours);
    }

    /// Opens a path's driver; the table counts this context as a holder already.
    fn open_path(&mut self, path: usize) {
        let Some(mut driver) = self.opener.open(PathId(path as u8)) else {
            self.shared.release(PathId(path as u8));
            return;
        };
        driver.set_polled(self.polled);
        self.shard.paths[path].adopt(self.view.serials[path]);
        self.histories[path] = Default::default();
        self.lowers[path] = Lower {
            is_restless: driver.is_restless(),
            driver: Some(driver),
        };
        self.opened |= 1 << path;
    }

    /// Closes the drivers of removed paths that have nothing left to report.
    pub(super) fn close_leaving(&mut self) {
        for path in paths_in(self.leaving) {
            let is_probing = self
                .checker
                .as_ref()
                .is_some_and(|checker| checker.is_probing(path));
            if self.shard.paths[path].in_flight() > 0 || is_probing {
                continue;
            }
            self.lowers[path] = Lower::default();
            self.attention &= !(1 << path);
            (self.opened, self.leaving) = (self.opened & !(1 << path), self.leaving & !(1 << path));
            self.shared.release(PathId(path as u8));
        }
    }

    pub(super) fn active_paths(&self) -> impl Iterator<Item = usize> + use<> {
        paths_in(self.active_mask())
    }
}
