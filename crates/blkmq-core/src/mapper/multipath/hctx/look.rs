//! One hardware context's update after a change of the table: it opens and closes drivers of paths, and
//! computes how it chooses from now on.

use std::sync::Arc;

use crate::bio::Status;
use crate::ids::{HctxId, Tag};
use crate::time::Instant;

use super::super::choice::Choice;
use super::super::shared::{List, Multipath, View};
use super::super::{PATHS_MAX, PathId, paths_in};
use super::check::Checker;
use super::{DETOURS, Frame, MultipathHctx, Opener, UNCOMMITTED};

impl MultipathHctx {
    /// Opens a context of a queue with `depth` tags, with a driver of each path.
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
        let shard = shared.open(hctx);
        let mut this = Self {
            choice: Choice::new(hctx, Arc::clone(&shard)),
            shard,
            shared: Arc::clone(shared),
            view: View::new(),
            usable: List::default(),
            attention: 0,
            inserts_by_detour: false,
            lowers: [const { None }; PATHS_MAX],
            restless: 0,
            frames: vec![Frame::FREE; depth_of].into(),
            opener,
            hctx,
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

    /// Says whether a path's driver has a probe, so that its memory is in use.
    pub fn is_probing(&self) -> bool {
        self.checker.as_ref().is_some_and(Checker::is_probing_any)
    }

    /// Updates the context's copy of the table. Requests that were pushed back may have a path now, or must fail.
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
        self.leaving = self.opened & !self.view.present;
        paths_in(self.view.present & !self.opened).for_each(|path| self.open_path(path));
        let usable = self.view.usable;
        self.usable = List::default();
        for path in usable.iter().filter(|path| self.opened & 1 << path != 0) {
            self.usable.push(path);
        }
        let detours = self.view.detours;
        if detours.has_any() && self.detour.is_none() {
            self.detour = self.opener.detour();
        }
        let has_detours = detours.has_any() && self.detour.is_some();
        self.inserts_by_detour = has_detours && detours.insert;
        self.attention &= UNCOMMITTED;
        self.attention |= if has_detours { DETOURS } else { 0 };
        let shards = self.shared.shards();
        self.choice
            .learn(&self.view, &self.usable, shards, self.inserts_by_detour);
    }

    /// Opens a path's driver; the table counts this context as a holder already.
    fn open_path(&mut self, path: usize) {
        let Some(mut driver) = self.opener.open(PathId(path as u8)) else {
            self.shared.release(PathId(path as u8));
            return;
        };
        driver.set_polled(self.polled);
        self.shard.paths[path].adopt(self.view.serials[path]);
        self.choice.adopt(path);
        self.restless |= u32::from(driver.idle_polled().is_some()) << path;
        self.lowers[path] = Some(driver);
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
            self.lowers[path] = None;
            self.restless &= !(1 << path);
            self.attention &= !(1 << path);
            (self.opened, self.leaving) = (self.opened & !(1 << path), self.leaving & !(1 << path));
            self.shared.release(PathId(path as u8));
        }
    }

    pub(super) fn active_paths(&self) -> impl Iterator<Item = usize> + use<> {
        paths_in(self.active_mask())
    }
}
