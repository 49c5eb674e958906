//! How a mount is handed over to another daemon: nothing more is read from the kernel, what was read is answered, and what the
//! successor has to know is saved; then it goes on as if nothing had been, or lets go of the mount without unmounting it. What the
//! kernel is asked meanwhile waits there. And how a mount that another daemon has saved begins.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_host::service::Cx;

use super::super::filesystem::FileSystem;
use super::super::front_door::DOOR;
use super::super::saved::SavedMount;
use super::super::slots::Memory;
use super::{Channel, Home};
use crate::handover::{Phase, Saved};

/// How far a mount is on its way to another daemon, or from one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Moving {
    /// It is on none.
    No,
    /// Nothing more is read, and what was begun ends.
    Stopping,
    /// It has been saved, or is in its place and not served yet.
    AtRest,
}

impl Channel {
    /// Goes on with a mount that another daemon has saved.
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

    /// Takes note of whether it is to be handed over, or not any more, or has been.
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

    /// Another daemon serves it, or will. One that was mounted for a daemon that could not take over is nobody's.
    pub(super) fn let_go(&mut self) {
        if std::mem::take(&mut self.is_saved) {
            self.filesystem.ownership().set(false);
        }
        self.is_stopping = true;
        self.filesystem.unmount_and_end();
    }
}
