//! The files of an image: what is below it, which of them it writes, and the locks that it has on those.

use std::path::PathBuf;
use std::sync::Arc;

use super::super::chain::Base;
use super::super::create::BaseFormat;
use super::Image;
use crate::file::{FileDisk, FileError};

impl Image {
    /// Returns whether a discard gives space back: zero clusters are there since version 3.
    pub(in crate::qcow2) fn has_zero_clusters(&self) -> bool {
        self.header.version >= 3
    }

    /// The file below it, and its format.
    pub(in crate::qcow2) fn base_file(&self) -> Option<(PathBuf, BaseFormat)> {
        let base = self.base.as_ref()?;
        let format = if base.header.is_some() {
            BaseFormat::Qcow2
        } else {
            BaseFormat::Raw
        };
        Some((base.disk.path().to_owned(), format))
    }

    /// Images of its chain, itself among them.
    pub(in crate::qcow2) fn chain_len(&self) -> usize {
        1 + self.base.iter().flat_map(Base::all).count()
    }

    /// Returns whether its data is in a file of its own.
    pub(in crate::qcow2) fn has_beside(&self) -> bool {
        self.has_beside
    }

    /// The files that it writes, which others may read from now on.
    pub(in crate::qcow2) fn share_locks(&self) -> Result<(), FileError> {
        self.own_files().try_for_each(|file| file.share_lock())
    }

    /// They may not any more.
    pub(in crate::qcow2) fn take_locks_back(&self) -> Result<(), FileError> {
        self.own_files().try_for_each(|file| file.take_lock_back())
    }

    fn own_files(&self) -> impl Iterator<Item = &Arc<FileDisk>> {
        self.files.iter().take(1 + usize::from(self.has_beside))
    }

    pub(in crate::qcow2) fn has_base(&self) -> bool {
        self.base.is_some()
    }
}
