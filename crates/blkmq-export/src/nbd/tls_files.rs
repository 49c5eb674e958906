//! The TLS settings of an address, with what their files held when they were read last. Files may be on a drive that does not
//! answer: who holds a lock that others wait for takes what is here, and reads nothing. `front_door` has the address, `door`
//! the clients.

use std::ops::Deref;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_tls::{FileError, Server, Settings};

/// The TLS settings of an address, and what was read of their files.
#[derive(Debug, Default)]
pub struct TlsFiles {
    settings: Settings,
    /// What was read last, if anything was: `None` without TLS.
    latest: Mutex<Option<Option<Server>>>,
}

impl TlsFiles {
    /// Settings of which nothing was read yet.
    pub fn new(settings: Settings) -> Arc<Self> {
        Arc::new(Self {
            settings,
            latest: Mutex::default(),
        })
    }

    /// Reads the files. Blocks for as long as their filesystem does not answer.
    pub(super) fn read(&self) -> Result<Option<Server>, FileError> {
        let server = Server::load(&self.settings)?;
        self.set(server.clone());
        Ok(server)
    }

    /// What was read last; reads the files if that was never done.
    pub(super) fn latest(&self) -> Result<Option<Server>, FileError> {
        let latest = self.lock().clone();
        latest.map_or_else(|| self.read(), Ok)
    }

    /// Takes what was read for the same settings.
    pub(super) fn set(&self, server: Option<Server>) {
        *self.lock() = Some(server);
    }

    fn lock(&self) -> MutexGuard<'_, Option<Option<Server>>> {
        self.latest.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deref for TlsFiles {
    type Target = Settings;

    fn deref(&self) -> &Settings {
        &self.settings
    }
}
