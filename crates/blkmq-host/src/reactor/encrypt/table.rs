//! The encrypted disks as one thread has them, by their numbers: they come, and they go without a trace of their
//! keys, while others are used.

use std::ops::Index;
use std::sync::Arc;

use super::{Encrypter, Stage};
use crate::engine::encrypted::Encrypted;

/// The disks, by their numbers less the first one's.
#[derive(Default)]
pub(super) struct DiskTable(Vec<Option<Arc<Encrypted>>>);

impl DiskTable {
    pub(super) fn put(&mut self, index: usize, disk: Arc<Encrypted>) {
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some(disk);
    }

    #[inline]
    pub(super) fn get(&self, index: usize) -> Option<&Arc<Encrypted>> {
        self.0.get(index)?.as_ref()
    }
}

impl Index<usize> for DiskTable {
    type Output = Arc<Encrypted>;

    #[inline]
    fn index(&self, index: usize) -> &Arc<Encrypted> {
        self.get(index).expect("a disk with bios is in the table")
    }
}

impl Encrypter {
    /// Lets a disk go, and wipes what its cipher has left here. Says whether it did: not while bios of the disk are
    /// under way.
    pub(crate) fn remove_disk(&mut self, index: usize) -> bool {
        let is_its = |slot: &super::CryptBio| slot.stage != Stage::Free && slot.disk as usize == index;
        if self.slots.iter().any(is_its) {
            return false;
        }
        // Its key must be there for this.
        self.wipe();
        if let Some(place) = self.disks.0.get_mut(index) {
            *place = None;
        }
        true
    }
}
