//! The test bed of filesystems: two loop devices, with direct I/O, on two files, and their mount points.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::target_dir;

/// A temporary directory, which is removed when this is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn make() -> Result<Self> {
        let dir = target_dir()?.join(format!("filesystems-{}", std::process::id()));
        fs::create_dir_all(&dir).with_context(|| format!("making {}", dir.display()))?;
        Ok(Self(dir))
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Makes a file of zeroes that uses no space.
    ///
    /// # Errors
    /// If it cannot be made.
    pub(crate) fn sparse(&self, name: &str, bytes: u64) -> Result<PathBuf> {
        let path = self.path(name);
        let file = File::create(&path).with_context(|| format!("making {}", path.display()))?;
        file.set_len(bytes)?;
        Ok(path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("{} is left behind: {error}", self.0.display());
        }
    }
}

/// Two loop devices, as xfstests needs.
pub(crate) struct Ground {
    name: String,
    dir: PathBuf,
    test: Loop,
    scratch: Loop,
}

impl Ground {
    /// Makes loop devices on the files `NAME.test` and `NAME.scratch`, with XFS on the first.
    ///
    /// # Errors
    /// If one cannot be made.
    pub(crate) fn new(dir: &Scratch, name: &str) -> Result<Self> {
        let device = |what: &str| Loop::attach(&dir.path(&format!("{name}.{what}")));
        let ground = Self {
            name: name.to_owned(),
            dir: dir.0.clone(),
            test: device("test")?,
            scratch: device("scratch")?,
        };
        run("mkfs.xfs", &["-q", "-f", &ground.test.0])?;
        for what in ["test", "scratch"] {
            fs::create_dir_all(ground.place(what))?;
        }
        Ok(ground)
    }

    /// Mounts XFS on the first device, and ext4 on the second.
    ///
    /// # Errors
    /// If a filesystem cannot be made or mounted.
    pub(crate) fn mount_both(&self) -> Result<[Mounted; 2]> {
        run("mkfs.ext4", &["-q", "-F", &self.scratch.0])?;
        let mount = |device: &Loop, what: &str| -> Result<Mounted> {
            let place = self.place(what);
            run("mount", &[&device.0, &place.to_string_lossy()])?;
            Ok(Mounted(place))
        };
        Ok([mount(&self.test, "test")?, mount(&self.scratch, "scratch")?])
    }

    /// Checks that both filesystems are undamaged.
    ///
    /// # Errors
    /// The damage that was found.
    pub(crate) fn check_both(&self) -> Result<()> {
        run("xfs_repair", &["-n", &self.test.0])?;
        run("e2fsck", &["-fn", &self.scratch.0])
    }

    /// Writes the configuration of xfstests, and returns its path.
    ///
    /// # Errors
    /// If it cannot be written.
    pub(crate) fn config(&self) -> Result<PathBuf> {
        let path = self.dir.join(format!("{}.config", self.name));
        let text = format!(
            "export FSTYP=xfs\nexport TEST_DEV={}\nexport TEST_DIR={}\nexport SCRATCH_DEV={}\nexport SCRATCH_MNT={}\n\
             export RESULT_BASE={}\n",
            self.test.0,
            self.place("test").display(),
            self.scratch.0,
            self.place("scratch").display(),
            self.dir.join(format!("{}.results", self.name)).display(),
        );
        fs::write(&path, text).with_context(|| format!("writing {}", path.display()))?;
        Ok(path)
    }

    fn place(&self, what: &str) -> PathBuf {
        self.dir.join(format!("{}.mnt.{what}", self.name))
    }
}

impl Drop for Ground {
    fn drop(&mut self) {
        // xfstests leaves its filesystem mounted.
        for what in ["test", "scratch"] {
            let _ = run("umount", &["--quiet", &self.place(what).to_string_lossy()]);
        }
    }
}

/// A mounted filesystem; dropping it unmounts it.
pub(crate) struct Mounted(PathBuf);

impl Mounted {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        if let Err(error) = run("umount", &[&self.0.to_string_lossy()]) {
            eprintln!("{error:#}");
        }
    }
}

/// A loop device, until this is dropped.
struct Loop(String);

impl Loop {
    fn attach(file: &Path) -> Result<Self> {
        let output = Command::new("losetup")
            .args(["--find", "--show", "--direct-io=on"])
            .arg(file)
            .output()
            .context("starting losetup")?;
        ensure!(
            output.status.success(),
            "losetup {}: {}",
            file.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
        Ok(Self(String::from_utf8_lossy(&output.stdout).trim().to_owned()))
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(error) = run("losetup", &["--detach", &self.0]) {
            eprintln!("{error:#}");
        }
    }
}

fn run(program: &str, words: &[&str]) -> Result<()> {
    let output = Command::new(program)
        .args(words)
        .output()
        .with_context(|| format!("starting {program}"))?;
    let said = [output.stdout, output.stderr].concat();
    ensure!(
        output.status.success(),
        "{program} {}: {}: {}",
        words.join(" "),
        output.status,
        String::from_utf8_lossy(&said).trim()
    );
    Ok(())
}

pub(crate) const TEST_BYTES: u64 = 6 << 30;
pub(crate) const SCRATCH_BYTES: u64 = 10 << 30;
