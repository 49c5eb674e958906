//! The files of `bench images`: a raw disk, an image with all of its content, chains, and an empty image on it.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blkmq_testkit::Scratch;

/// Which image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    /// The last one of a chain of so many, of which each has a part of the disk; alone, it has all.
    Chain(u64),
    /// One that has nothing yet, on the raw disk.
    Empty,
}

/// All files, in a directory of their own.
pub(super) struct Files {
    dir: Scratch,
    bytes: u64,
}

impl Files {
    /// Makes the raw disk of `bytes`, and the chains.
    ///
    /// # Errors
    /// QEMU's tools are missing, or there is no room.
    pub(super) fn make(dir: Scratch, bytes: u64, images: &[Image]) -> Result<Self> {
        let _ = dir.noisy_image(RAW, bytes, 7);
        let files = Self { dir, bytes };
        let mut made = Vec::new();
        for image in images {
            if let Image::Chain(len) = image
                && !made.contains(len)
            {
                files.make_chain(*len)?;
                made.push(*len);
            }
        }
        Ok(files)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn raw(&self) -> PathBuf {
        self.dir.path(RAW)
    }

    /// The image that is served.
    pub(super) fn top(&self, image: Image) -> PathBuf {
        match image {
            Image::Chain(len) => self.link(len, len - 1),
            Image::Empty => self.dir.path("empty.qcow2"),
        }
    }

    /// It and what is below it as nodes of QEMU, from below: `n0`, `n1`, …
    pub(super) fn nodes(&self, image: Image) -> Vec<String> {
        let mut files: Vec<(&str, PathBuf)> = match image {
            Image::Chain(len) => (0..len).map(|at| ("qcow2", self.link(len, at))).collect(),
            Image::Empty => vec![("raw", self.raw())],
        };
        if image == Image::Empty {
            files.push(("qcow2", self.top(image)));
        }
        let top = files.len() - 1;
        let node = |(at, (format, path)): (usize, (&str, PathBuf))| {
            let how = match at == top {
                true => "cache.direct=on,file.cache.direct=on",
                false => "read-only=on",
            };
            let below = match at.checked_sub(1) {
                Some(below) => format!(",backing=n{below}"),
                None => String::new(),
            };
            let path = path.display();
            format!(
                "driver={format},node-name=n{at},{how},file.driver=file,file.aio=io_uring,file.filename={path}{below}"
            )
        };
        files.into_iter().enumerate().map(node).collect()
    }

    /// Makes the empty image afresh.
    ///
    /// # Errors
    /// The tool's.
    pub(super) fn make_empty(&self) -> Result<()> {
        let top = self.top(Image::Empty);
        let _ = std::fs::remove_file(&top);
        self.create(&top, Some(("raw", self.raw())))
    }

    fn link(&self, len: u64, at: u64) -> PathBuf {
        self.dir.path(&format!("chain{len}-{at}.qcow2"))
    }

    fn make_chain(&self, len: u64) -> Result<()> {
        let raw = File::open(self.raw()).context("opening the raw disk")?;
        let part = self.bytes / len;
        for at in 0..len {
            let below = at.checked_sub(1).map(|below| ("qcow2", self.link(len, below)));
            let path = self.link(len, at);
            self.create(&path, below)?;
            // QEMU writes it, so it lies there as QEMU lays it.
            let piece = self.dir.path("part");
            let mut content = vec![0; part as usize];
            raw.read_exact_at(&mut content, at * part)
                .context("reading the raw disk")?;
            std::fs::write(&piece, content).context("writing a part")?;
            let write = format!("write -s {} {} {part}", piece.display(), at * part);
            done(
                Command::new("qemu-io")
                    .args(["-f", "qcow2", "-c", &write])
                    .arg(&path),
            )?;
            std::fs::remove_file(piece).context("removing a part")?;
        }
        Ok(())
    }

    fn create(&self, path: &std::path::Path, below: Option<(&str, PathBuf)>) -> Result<()> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2"]);
        if let Some((format, file)) = below {
            command.args(["-F", format, "-b"]).arg(file);
        }
        done(command.arg(path).arg(self.bytes.to_string()))
    }
}

fn done(command: &mut Command) -> Result<()> {
    let output = command
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(())
}

const RAW: &str = "disk.raw";
