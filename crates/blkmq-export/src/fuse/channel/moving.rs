//! Decides how a mount is handed over to another daemon: nothing more is read from the kernel, what
//! was read is answered, and the state that the successor needs is saved; then the mount continues
//! unchanged, or is released without an unmount. The kernel's requests meanwhile wait in the
//! kernel. The code that restores a mount saved by another daemon is here too.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_host::service::Cx;

use super::super::filesystem::FileSystem;
use super::super::front_door::DOOR;
use super::super::saved::SavedMount;
use super::super::slots::Memory;
use super::{Channel, Home};
use crate::handover::{Phase, Saved};

/// How far the hand-over of a mount to another daemon, or from one, is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moving {
    /// None is under way.
    No,
    /// Nothing more is read, and what was begun ends.
    Stopping,
    /// The mount has been saved, or is restored and not served yet.
    AtRest,
}

impl Channel {
    /// Continues a mount that another daemon has saved.
    pub(in super::super) fn restored(
        filesystem: Arc<FileSystem>,
        device: OwnedFd,
        memory: Memory,
        home: Home,
        saved: &SavedMount,
    ) -> Self {
        let mut channel = Self::new(filesystem, device, memory, home);
        channel.requests.agreed = saved.agreed;
        channel.home.told_size = saved.size;
        channel.home.is_restored = true;
        channel
    }

    /// Records whether the mount is to be handed over, is not any more, or has been.
    pub(super) fn follow(&mut self) {
        match (self.home.member.phase(), self.moving) {
            (Phase::Suspended, Moving::No) => self.moving = Moving::Stopping,
            (Phase::Suspended, Moving::AtRest) if !self.home.member.has_settled() => {
                self.moving = Moving::Stopping
            }
            (Phase::Serving, Moving::Stopping | Moving::AtRest) => {
                self.moving = Moving::No;
                self.is_saved = false;
                self.filesystem.ownership().set(true);
            }
            (Phase::Gone, _) if !self.is_stopping => self.let_go(),
            _ => {}
        }
    }

    /// Saves the mount, if all that was read has been answered.
    pub(super) fn save_if_at_rest(&mut self, cx: &Cx<'_>) {
        if self.is_stopping || !self.is_idle() || cx.outstanding() > 0 {
            return;
        }
        self.moving = Moving::AtRest;
        self.is_saved = true;
        let saved = self.filesystem.save(self.home.told_size, self.requests.agreed);
        self.home.member.settle(Some(Saved {
            door: DOOR,
            address: self.filesystem.address().to_owned(),
            body: saved.bytes(),
            fds: vec![Arc::clone(self.device())],
        }));
    }

    /// Releases the mount to another daemon. A mount made for a daemon that could not take over
    /// belongs to nobody.
    pub(super) fn let_go(&mut self) {
        if std::mem::take(&mut self.is_saved) {
            self.filesystem.ownership().set(false);
        }
        self.is_stopping = true;
        self.filesystem.unmount_and_end();
    }
}
