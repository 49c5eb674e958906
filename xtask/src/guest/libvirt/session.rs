//! libvirt in a session of a user of its own: nothing of this machine's libvirt is configured or changed.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};

/// A session, with its files in a directory of its user's.
pub(super) struct Session {
    dir: PathBuf,
}

impl Session {
    pub(super) fn new(dir: &Path) -> Result<Self> {
        let dir = dir.join("session");
        for dir in [&dir, &dir.join("run")] {
            fs::create_dir_all(dir)?;
            fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
            chown(dir, Some(NOBODY), Some(NOBODY))?;
        }
        Ok(Self { dir })
    }

    /// Writes a file that the user may read. Returns its path.
    pub(super) fn write(&self, name: &str, text: &str) -> Result<String> {
        let path = self.dir.join(name);
        fs::write(&path, text)?;
        chown(&path, Some(NOBODY), Some(NOBODY))?;
        Ok(path.display().to_string())
    }

    /// Runs virsh, which starts its session's libvirt.
    pub(super) fn virsh(&self, words: &[&str]) -> Result<String> {
        let mut command = Command::new("setpriv");
        let ids = [format!("--reuid={NOBODY}"), format!("--regid={NOBODY}")];
        command
            .args(ids)
            .args(["--clear-groups", "virsh", "-c", "qemu:///session"]);
        command.args(words).current_dir(&self.dir).env_clear();
        command
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("XDG_RUNTIME_DIR", self.dir.join("run"));
        for key in ["HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_DATA_HOME"] {
            command.env(key, &self.dir);
        }
        let done = command.output()?;
        let said = String::from_utf8_lossy(&done.stdout).into_owned();
        ensure!(
            done.status.success(),
            "virsh {}: {said}{}",
            words.join(" "),
            String::from_utf8_lossy(&done.stderr)
        );
        Ok(said)
    }

    /// Waits until the domain has said this of a disk three times more.
    pub(super) fn wait_for(&self, disk: &str, what: &str) -> Result<()> {
        let line = format!("{disk} {what} ");
        let (count, start) = (
            || self.said().lines().filter(|said| said.starts_with(&line)).count(),
            Instant::now(),
        );
        let wanted = count() + 3;
        while count() < wanted {
            ensure!(
                start.elapsed() < WAIT_MAX,
                "the domain does not say `{line}`: {}",
                self.said()
            );
            thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }

    /// Checks that no content was wrong.
    pub(super) fn check(&self) -> Result<()> {
        let said = self.said();
        let wrong = said.lines().find(|line| line.contains(" wrong "));
        ensure!(wrong.is_none(), "{}", wrong.unwrap_or_default());
        let right = said.lines().filter(|line| line.contains(" right ")).count();
        println!("    {right} times what was read was what had been written");
        Ok(())
    }

    fn said(&self) -> String {
        let said = fs::read(self.dir.join("serial.log")).unwrap_or_default();
        String::from_utf8_lossy(&said).replace('\r', "")
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        // Its libvirt ends by itself, when it has had no domain for a while.
        let _ = self.virsh(&["destroy", super::NAME]);
    }
}

/// The user, by name.
pub(super) const USER: &str = "nobody";
const NOBODY: u32 = 65534;
const WAIT_MAX: Duration = Duration::from_secs(90);
