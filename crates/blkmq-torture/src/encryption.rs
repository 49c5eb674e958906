//! An encrypted disk over the image that forgets: its header is elsewhere, so all of the image is data. It is
//! formatted by `cryptsetup`, and zeroed before its history begins. `crashes` uses it.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blkmq_nbd::codec::CommandFlags;
use blkmq_nbd::codec::request::{Command as Request, RequestHeader};

use crate::connection::Connection;
use crate::daemon::EXPORT;

/// The files that open it.
#[derive(Clone, Debug)]
pub(crate) struct Encryption {
    header: PathBuf,
    key: PathBuf,
}

impl Encryption {
    /// Makes a header and a key in `dir`.
    ///
    /// # Errors
    /// There is no `cryptsetup`, or it fails.
    pub(crate) fn make(dir: &Path) -> Result<Self> {
        let (header, key) = (dir.join("header"), dir.join("key"));
        std::fs::write(&key, "a key of the crashes").context("making a key")?;
        let data = dir.join("no-data");
        let file = std::fs::File::create(&data).context("making a file")?;
        file.set_len(1 << 20).context("making a file")?;
        let mut command = Command::new("cryptsetup");
        command.args("luksFormat --batch-mode --type luks2 --sector-size 512 --pbkdf pbkdf2".split(' '));
        command
            .args(["--pbkdf-force-iterations", "1000", "--header"])
            .arg(&header);
        command.arg("--key-file").arg(&key).arg(&data);
        let output = command
            .output()
            .context("cryptsetup, which formats the disk, is not installed")?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cryptsetup has failed: {said}");
        Ok(Self { header, key })
    }

    /// The string of the disk.
    pub(crate) fn disk(&self, below: &str) -> String {
        let (header, key) = (self.header.display(), self.key.display());
        format!("name={EXPORT},luks={below},header={header},key={key}")
    }
}

/// Has a disk read as zeroes, durably.
///
/// # Errors
/// The server refuses, or a request fails.
pub(crate) fn zero(socket: &Path, bytes: usize) -> Result<()> {
    let mut connection = Connection::open(socket, EXPORT)?;
    for (command, length) in [(Request::WRITE_ZEROES, bytes as u64), (Request::FLUSH, 0)] {
        let header = RequestHeader {
            cookie: 0,
            offset: 0,
            length,
            command,
            flags: CommandFlags::NONE,
        };
        connection.send(header, &[], 0, ())?;
        let mut ended = Vec::new();
        while ended.is_empty() {
            ensure!(connection.receive(&mut ended)?, "the server has hung up");
        }
        let error = ended.pop().map_or(0, |end| end.error);
        ensure!(error == 0, "zeroing the disk failed with error {error}");
    }
    Ok(())
}
