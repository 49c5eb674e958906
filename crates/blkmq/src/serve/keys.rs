//! The keys of encrypted disks in this process, and on their way to a successor: what keeps them from cores,
//! debuggers and changes, and the commands that print some. `blkmq_config::luks` has the keys, `upgrade` hands
//! them over.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_config::disk::Source;
use blkmq_config::luks::{KeySource, Keyring};
use blkmq_config::{Config, DiskSpec};
use blkmq_luks::{Secret, VolumeKey};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};

/// A ring with the passphrases that commands of encrypted disks print. For the first thread, before the sandbox,
/// in which no program can be started. A command that fails leaves its disk locked.
///
/// # Errors
/// Cores of this process cannot be prevented.
pub(super) fn of_commands(config: &Config) -> Result<Keyring> {
    leave_no_core_with_keys(&config.disks)?;
    let keyring = Keyring::default();
    for disk in &config.disks {
        if let Source::Luks(source) = &disk.source
            && let Some(KeySource::Command(words)) = &source.key
        {
            leave_no_core()?;
            keyring.set_passphrase(disk.name.clone(), printed(words, COMMAND_MAX));
        }
    }
    Ok(keyring)
}

/// Has the kernel write no core if a driver has a key to one of these disks. Call it before they are opened.
///
/// # Errors
/// As for [`leave_no_core`].
pub(super) fn leave_no_core_with_keys<'a>(disks: impl IntoIterator<Item = &'a DiskSpec>) -> Result<()> {
    let has_key = |disk: &DiskSpec| disk.source.driver().is_some_and(|driver| driver.has_key());
    match disks.into_iter().any(has_key) {
        true => leave_no_core(),
        false => Ok(()),
    }
}

/// Runs a command, and takes what it prints.
fn printed(words: &[String], limit: Duration) -> Result<Secret> {
    let end = Instant::now() + limit;
    let (program, arguments) = words.split_first().context("there is no program")?;
    let mut command = Command::new(program);
    command
        .args(arguments)
        .stdin(Stdio::null())
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("it cannot be run")?;
    let pipe = child.stdout.take().expect("it is piped");
    let read = Secret::read_from(Until { pipe, end });
    let ended = read
        .context("what it prints")
        .and_then(|secret| Ok((secret, ended_by(&mut child, end)?)));
    if ended.is_err() {
        // It may have ended.
        let _ = child.kill();
        let _ = child.wait();
    }
    let (secret, status) = ended?;
    ensure!(status.success(), "it has failed: {status}");
    Ok(secret)
}

/// Waits for a process until a time.
fn ended_by(child: &mut Child, end: Instant) -> io::Result<std::process::ExitStatus> {
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        if Instant::now() > end {
            return Err(io::ErrorKind::TimedOut.into());
        }
        thread::sleep(LOOK_AGAIN);
    }
}

/// A pipe that is read until a time.
struct Until<P> {
    pipe: P,
    end: Instant,
}

impl<P: Read + std::os::fd::AsFd> Read for Until<P> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.end.saturating_duration_since(Instant::now());
        let left = left.try_into().map_err(io::Error::other)?;
        let mut fds = [PollFd::new(&self.pipe, PollFlags::IN)];
        match poll(&mut fds, Some(&left))? {
            0 => Err(io::ErrorKind::TimedOut.into()),
            _ => self.pipe.read(bytes),
        }
    }
}

/// Has the kernel write no core of this process, and permit no other process of its user to read its memory.
///
/// # Errors
/// The system refuses.
pub(super) fn leave_no_core() -> Result<()> {
    set_dumpable_behavior(DumpableBehavior::NotDumpable).context("cores of this process cannot be prevented")
}

/// Puts a key into memory that nobody can change, for the process that gets the descriptor.
///
/// # Errors
/// The system's error.
pub(super) fn sealed(key: &VolumeKey) -> io::Result<OwnedFd> {
    let memory = memfd_create("blkmq-key", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(memory);
    file.write_all(key.bytes())?;
    let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL;
    fcntl_add_seals(&file, seals)?;
    Ok(file.into())
}

/// Takes a key out of such memory.
///
/// # Errors
/// The system's error, or what is there is no key.
pub(super) fn unsealed(memory: OwnedFd) -> io::Result<VolumeKey> {
    let mut file = File::from(memory);
    // Both processes have one position in it.
    file.seek(SeekFrom::Start(0))?;
    Ok(VolumeKey::from_secret(Secret::read_from(file)?))
}

/// How long a command may take.
const COMMAND_MAX: Duration = Duration::from_secs(30);
const LOOK_AGAIN: Duration = Duration::from_millis(5);

#[cfg(test)]
mod tests {
    use super::*;

    fn printed_by(words: &[&str]) -> Result<Secret> {
        let words: Vec<String> = words.iter().map(|word| (*word).to_owned()).collect();
        printed(&words, Duration::from_millis(300))
    }

    #[test]
    fn command_prints_a_key_or_says_why_not() {
        let secret = printed_by(&["printf", "a key\\n"]).expect("it prints");
        assert_eq!(secret.bytes(), b"a key\n");
        for (words, why) in [
            (&["/no/such/program"][..], "it cannot be run"),
            (&["true"], "it is empty"),
            (&["sh", "-c", "echo key; exit 3"], "it has failed: exit status: 3"),
            (&["sleep", "60"], "timed out"),
            (&["sh", "-c", "echo key; exec >&-; sleep 60"], "timed out"),
        ] {
            let error = printed_by(words).expect_err("there is no key");
            assert!(format!("{error:#}").contains(why), "{words:?}: {error:#}");
        }
    }

    #[test]
    fn key_in_sealed_memory_is_read_and_cannot_be_changed() {
        let key = VolumeKey::from_secret(Secret::take(&mut [7; 64]).expect("locked memory"));
        let memory = sealed(&key).expect("a memory file");
        let mut other = File::from(memory.try_clone().expect("a descriptor"));
        assert!(other.write_all(b"x").is_err());
        assert_eq!(unsealed(memory).expect("a key").bytes(), [7; 64]);
    }
}
