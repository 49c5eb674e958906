//! The bios of encrypted disks on their way through a thread's queues: `encrypt` has what is done to them.

use std::sync::Arc;

use blkmq_core::bio::Bio;

use super::ReactorCore;
use crate::engine::encrypted::Encrypted;
use crate::reactor::encrypt::{Below, Encrypter};

impl ReactorCore {
    #[inline(never)]
    pub(super) fn submit_encrypted(&mut self, bio: Bio) -> Result<(), Bio> {
        let (encrypter, mut below) = self.encrypter();
        encrypter.submit(bio, &mut below)
    }

    /// Takes one more encrypted disk, in the place `index`.
    pub(crate) fn add_encrypted(&mut self, index: usize, disk: Arc<Encrypted>) {
        self.encrypter.add_disk(index, disk);
    }

    /// Lets an encrypted disk go. Says whether it did: not while bios of the disk are under way.
    pub(crate) fn remove_encrypted(&mut self, index: usize) -> bool {
        self.encrypter.remove_disk(index)
    }

    /// Wipes what ciphers have left on this thread's stack.
    #[inline]
    pub(crate) fn wipe(&mut self) {
        self.encrypter.wipe();
    }

    /// Encrypts and decrypts what waits.
    #[inline(never)]
    pub(super) fn encrypt(&mut self) {
        let (encrypter, mut below) = self.encrypter();
        encrypter.work(&mut below);
        self.runs_again |= self.encrypter.has_work();
    }

    /// Takes the ends of bios of encrypted disks.
    #[inline(never)]
    pub(super) fn take_encrypted(&mut self) {
        let (encrypter, mut below) = self.encrypter();
        encrypter.take_ends(&mut below);
        self.runs_again |= self.encrypter.has_work();
    }

    /// The encrypter, and where its bios go.
    fn encrypter(&mut self) -> (&mut Encrypter, Below<'_>) {
        let below = Below {
            queues: &mut self.queues,
            stack: &mut self.stack,
            now: self.now,
            fx: &mut self.fx,
        };
        (&mut self.encrypter, below)
    }
}
