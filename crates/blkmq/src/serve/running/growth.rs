//! How disks grow while they are served, and which of their clients are told.

use std::sync::MutexGuard;

use anyhow::Result;
use blkmq_config::{Config, Document, Kind};
use blkmq_host::control::Control;
use blkmq_host::counted::counted;
use blkmq_host::disk::{Disk, Hearing};

use super::{Running, State};

impl Running {
    /// Changes a disk's size to that of its file or device, after setting it to `size` bytes if
    /// that is asked for and it is a file. Returns its size before and now.
    ///
    /// # Errors
    /// As for [`Control::ask_size`] and [`Control::resize_disk`].
    pub(crate) fn resize(&self, name: &str, size: Option<u64>) -> Result<(u64, u64)> {
        drop(self.open_state()?);
        // A drive that does not answer must not prevent changes, nor the shutdown.
        let found = self.control().ask_size(name, size)?;
        let (mut state, document, config) = self.described_with(name, found.size())?;
        let (old, new) = self.control().resize_disk(&found)?;
        if new > old {
            self.offer(&mut state, &config, &self.engine.disks())?;
            self.describe(&mut state, document, config);
            tracing::info!(disk = name, "disk {name}: has grown from {old} to {new} bytes");
            let (_, not_told) = self.hearings(name);
            if let Some((who, why)) = not_told.first() {
                tracing::warn!(
                    disk = name,
                    "disk {name}: {} not told that it has grown, such as {who}: {why}",
                    counted(not_told.len(), "client is", "clients are")
                );
            }
        }
        Ok((old, new))
    }

    /// The state, to change it, with the description of a daemon whose disk has grown to `size` bytes: a configuration
    /// that has the size gets the new one.
    fn described_with(&self, name: &str, size: u64) -> Result<(MutexGuard<'_, State>, Document, Config)> {
        let is_smaller = |disk: &Disk| disk.name == name && disk.size < size;
        let grows = self.engine.disks().iter().any(is_smaller);
        loop {
            let (seen, mut document) = (self.changes(), self.document());
            let said = document.get(Kind::Disk, name);
            let config = match grows && said.is_some_and(|keys| keys.contains_key("size")) {
                true => {
                    let keys = [("size".to_owned(), Some(toml::Value::Integer(size.try_into()?)))];
                    document.set(Kind::Disk, name, keys)?;
                    // With no lock held: see `Shown`.
                    document.config()?
                }
                false => Config::clone(&self.config()),
            };
            let state = self.open_state()?;
            if self.changes() == seen {
                return Ok((state, document, config));
            }
        }
    }

    /// The users of a disk that are told when it grows; and those that cannot be, with the reason and what to do.
    pub(crate) fn hearings(&self, disk: &str) -> (Vec<String>, Vec<(String, &'static str)>) {
        let disks = self.engine.disks();
        let found = disks.iter().find(|other| other.name == disk);
        let (mut told, mut not_told) = (Vec::new(), Vec::new());
        for Hearing { who, otherwise } in found.map_or_else(Vec::new, |disk| disk.users.hearings()) {
            match otherwise {
                None => told.push(who),
                Some(why) => not_told.push((who, why)),
            }
        }
        (told, not_told)
    }

    /// Checks all disks for files or devices that have grown, but for those of drives that do not
    /// answer. Returns which have.
    pub(crate) fn resize_all(&self) -> Vec<String> {
        let (disks, control): (_, Control) = (self.engine.disks(), self.control());
        let asked = disks.iter().filter(|disk| !control.is_silent(disk));
        let grown = asked.filter(|disk| match self.resize(&disk.name, None) {
            Ok((old, new)) => new > old,
            Err(error) => {
                // Many disks cannot be asked; that is no fault of theirs.
                if let Some(blkmq_host::error::Error::Size(_)) = error.downcast_ref() {
                    tracing::error!("{error:#}");
                }
                false
            }
        });
        grown
            .map(|disk| format!("disk {} has grown", disk.name))
            .collect()
    }
}
