//! An image on the filesystem that forgets: made, served, kept as snapshots while requests go on, and looked at with
//! QEMU's eyes after a crash. `crashes` uses it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail, ensure};

use crate::daemon::EXPORT;
use crate::history::Wrong;
use crate::load::Trouble;

/// The image of one world.
#[derive(Debug)]
pub(crate) struct Images {
    program: PathBuf,
    /// Where the filesystem is mounted.
    mounted: PathBuf,
    control: PathBuf,
    is_direct: bool,
    /// Snapshots that were begun since the chain was made flat.
    snapshots: u64,
}

impl Images {
    /// Makes an image of `bytes` on a filesystem, in the place of the one that it has. `dir` is for a socket.
    ///
    /// # Errors
    /// It cannot be made, or QEMU's tools are not there.
    pub(crate) fn make(
        program: &Path,
        file: &Path,
        dir: &Path,
        is_direct: bool,
        bytes: usize,
    ) -> Result<Self> {
        std::fs::remove_file(file).context("removing the file that is there")?;
        let images = Self {
            program: program.to_owned(),
            mounted: file.parent().unwrap_or(Path::new("/")).to_owned(),
            control: dir.join("control.sock"),
            is_direct,
            snapshots: 0,
        };
        // Small ones have more tables; of large ones, most writes copy.
        let cluster = if is_direct { "64K" } else { "4K" };
        let mut create = images.image(&["create", "--cluster", cluster]);
        done(create.arg(images.path()).arg(bytes.to_string()))?;
        Ok(images)
    }

    /// The image that is served.
    fn path(&self) -> PathBuf {
        self.mounted.join("vm1.qcow2")
    }

    fn snapshot_path(&self, number: u64) -> PathBuf {
        self.mounted.join(format!("snapshot{number}"))
    }

    fn image(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command.arg("image").args(words);
        command
    }

    /// What the daemon is to serve.
    pub(crate) fn words(&self) -> Vec<String> {
        let direct = if self.is_direct { "on" } else { "off" };
        let disk = format!("name={EXPORT},qcow2={},direct={direct}", self.path().display());
        let control = format!("unix:{}", self.control.display());
        ["--disk", &disk, "--control", &control].map(str::to_owned).into()
    }

    /// Begins a snapshot, which goes on while the daemon is killed.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn begin_snapshot(&mut self) -> Result<Child> {
        self.snapshots += 1;
        let snapshot = format!("{EXPORT}={}", self.snapshot_path(self.snapshots).display());
        let mut command = Command::new(&self.program);
        command.args(["ctl", "--socket", &format!("unix:{}", self.control.display())]);
        command.args(["snapshot", &snapshot]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        child.context("starting blkmq ctl")
    }

    /// Begins to write the image into the snapshot below it, which goes on while the daemon is killed. `None` if there is none.
    ///
    /// # Errors
    /// The command cannot be started.
    pub(crate) fn begin_commit(&mut self) -> Result<Option<Child>> {
        if self.snapshots == 0 {
            return Ok(None);
        }
        let mut command = Command::new(&self.program);
        command.args(["ctl", "--socket", &format!("unix:{}", self.control.display())]);
        command.args(["commit", EXPORT]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        child.context("starting blkmq ctl").map(Some)
    }

    /// Has QEMU look at the image and its snapshots after a crash. Leaks are allowed.
    ///
    /// # Errors
    /// [`Wrong::Foreign`] with what QEMU says of one that is corrupt.
    pub(crate) fn check(&self) -> Result<(), Trouble> {
        let kept = (1..=self.snapshots).map(|number| self.snapshot_path(number));
        for path in kept.filter(|path| path.exists()).chain([self.path()]) {
            let mut command = Command::new("qemu-img");
            let output = command.args(["check", "-f", "qcow2"]).arg(&path).output();
            let output = output.context("qemu-img, which checks the images, is not installed")?;
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            let is_leaking = output.status.code() == Some(LEAKING);
            if !output.status.success() && !is_leaking {
                return Err(Trouble::AfterCrash(Wrong::Foreign(format!("{path:?}: {said}"))));
            }
        }
        Ok(())
    }

    /// Makes one image of a chain that has become long. Nobody serves it.
    ///
    /// # Errors
    /// It cannot be made.
    pub(crate) fn make_flat(&mut self) -> Result<()> {
        if self.snapshots < CHAIN_MAX {
            return Ok(());
        }
        let flat = self.mounted.join("flat.qcow2");
        let cluster = if self.is_direct { "64K" } else { "4K" };
        let mut convert = self.image(&["convert", "--cluster", cluster]);
        done(convert.arg(self.path()).arg(&flat))?;
        std::fs::rename(&flat, self.path()).context("putting the flat image into its place")?;
        for number in 1..=self.snapshots {
            // It is there if it was durable.
            let _ = std::fs::remove_file(self.snapshot_path(number));
        }
        self.snapshots = 0;
        let directory = std::fs::File::open(&self.mounted).context("opening the directory")?;
        directory.sync_all().context("syncing the directory")
    }
}

fn done(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    match output.status.success() {
        true => Ok(()),
        false => bail!("{command:?} has failed: {said}"),
    }
}

/// Ends a command that had the daemon do something.
///
/// # Errors
/// It cannot be waited for.
pub(crate) fn end(mut child: Child) -> Result<()> {
    let status = child.wait().context("waiting for blkmq ctl")?;
    ensure!(status.code().is_some(), "blkmq ctl was killed: {status}");
    Ok(())
}

/// What `qemu-img check` ends with if clusters are lost and nothing is corrupt.
const LEAKING: i32 = 3;
/// Snapshots below an image, at most.
const CHAIN_MAX: u64 = 5;
