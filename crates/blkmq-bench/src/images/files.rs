//! The files of `bench images`: a base, an image with all of its content, which is the raw side's file as well,
//! chains, and an empty image on the base.

use std::fs::File;
use std::io::Read as _;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use blkmq_testkit::Scratch;
use serde::Deserialize;

/// Which image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Image {
    /// The last one of a chain of so many, of which each has a part of the disk; alone, it has all.
    Chain(u64),
    /// One that has nothing yet, on the base.
    Empty,
}

/// All files, in a directory of their own.
pub(super) struct Files {
    dir: Scratch,
    bytes: u64,
    layout: Layout,
}

/// Where the image that has all of the disk has its data, and all that is around: writes to the raw disk destroy it.
#[derive(Default)]
struct Layout {
    first_data: u64,
    tables: Vec<(u64, Vec<u8>)>,
}

/// A part of a disk, as `qemu-img map` tells it.
#[derive(Deserialize)]
struct Extent {
    length: u64,
    offset: u64,
}

impl Files {
    /// Makes the base of `bytes`, and the chains.
    ///
    /// # Errors
    /// QEMU's tools are missing, or there is no room.
    pub(super) fn make(dir: Scratch, bytes: u64, images: &[Image]) -> Result<Self> {
        let mut files = Self {
            dir,
            bytes,
            layout: Layout::default(),
        };
        files.make_base().context("making the base")?;
        let mut made = Vec::new();
        for image in images {
            if let Image::Chain(len) = image
                && !made.contains(len)
            {
                files.make_chain(*len)?;
                made.push(*len);
            }
        }
        if made.contains(&1) {
            files.layout = Layout::of(&files.top(Image::Chain(1)))?;
        }
        Ok(files)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The place of the disk's data in the file of the image that has all of it, which a raw disk serves: a drive is
    /// not equally fast everywhere, so another file would be another drive.
    pub(super) fn data(&self) -> Range<u64> {
        self.layout.first_data..self.layout.first_data + self.bytes
    }

    /// Makes that file an image again, on the drive, after a raw disk was there.
    ///
    /// # Errors
    /// The drive's.
    pub(super) fn restore_tables(&self) -> Result<()> {
        let path = self.top(Image::Chain(1));
        let file = File::options().write(true).open(&path);
        file.and_then(|file| {
            for (at, table) in &self.layout.tables {
                file.write_all_at(table, *at)?;
            }
            file.sync_all()
        })
        .with_context(|| format!("image {}", path.display()))
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
            Image::Empty => vec![("raw", self.base())],
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
        self.create(&top, Some(("raw", self.base())))
    }

    fn link(&self, len: u64, at: u64) -> PathBuf {
        self.dir.path(&format!("chain{len}-{at}.qcow2"))
    }

    fn base(&self) -> PathBuf {
        self.dir.path("base.raw")
    }

    /// Without holes, which cost less than data.
    fn make_base(&self) -> std::io::Result<()> {
        let mut noise = File::open("/dev/urandom")?.take(self.bytes);
        let mut file = File::create(self.base())?;
        std::io::copy(&mut noise, &mut file)?;
        file.sync_all()
    }

    fn make_chain(&self, len: u64) -> Result<()> {
        let base = File::open(self.base()).context("opening the base")?;
        let part = self.bytes / len;
        for at in 0..len {
            let below = at.checked_sub(1).map(|below| ("qcow2", self.link(len, below)));
            let path = self.link(len, at);
            self.create(&path, below)?;
            // QEMU writes it, so it lies there as QEMU lays it.
            let piece = self.dir.path("part");
            let mut content = vec![0; part as usize];
            base.read_exact_at(&mut content, at * part)
                .context("reading the base")?;
            std::fs::write(&piece, content).context("writing a part")?;
            let write = format!("write -s {} {} {part}", piece.display(), at * part);
            let mut io = Command::new("qemu-io");
            done(io.args(["-f", "qcow2", "-c", &write]).arg(&path))?;
            std::fs::remove_file(piece).context("removing a part")?;
            let file = File::open(&path);
            file.and_then(|file| file.sync_all())
                .context("syncing an image")?;
        }
        Ok(())
    }

    fn create(&self, path: &Path, below: Option<(&str, PathBuf)>) -> Result<()> {
        let mut command = Command::new("qemu-img");
        command.args(["create", "-q", "-f", "qcow2"]);
        if let Some((format, file)) = below {
            command.args(["-F", format, "-b"]).arg(file);
        }
        done(command.arg(path).arg(self.bytes.to_string()))?;
        Ok(())
    }
}

impl Layout {
    fn of(path: &Path) -> Result<Self> {
        let mut map = Command::new("qemu-img");
        map.args(["map", "-f", "qcow2", "--output=json"]).arg(path);
        let mut data: Vec<Extent> =
            serde_json::from_slice(&done(&mut map)?).context("reading an image's map")?;
        data.sort_by_key(|extent| extent.offset);
        let file = File::open(path).context("opening an image")?;
        let end = file.metadata().context("asking for an image's size")?.len();
        let ends = data.iter().map(|extent| extent.offset + extent.length);
        let begins = data.iter().map(|extent| extent.offset);
        let mut tables = Vec::new();
        for (from, to) in std::iter::once(0).chain(ends).zip(begins.chain([end])) {
            let mut table = vec![0; to.saturating_sub(from) as usize];
            file.read_exact_at(&mut table, from).context("reading a table")?;
            tables.push((from, table));
        }
        let first = data.first().context("an image without data")?;
        Ok(Self {
            first_data: first.offset,
            tables,
        })
    }
}

/// Runs a command to its end and returns its output.
fn done(command: &mut Command) -> Result<Vec<u8>> {
    let output = command
        .output()
        .with_context(|| format!("starting {command:?}"))?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {said}");
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_is_one_again_after_a_raw_disk_was_there() {
        for program in ["qemu-img", "qemu-io"] {
            if Command::new(program).arg("--version").output().is_err() {
                return blkmq_testkit::skip(&format!("{program} is not installed (run `cargo xtask setup`)"));
            }
        }
        let files = Files::make(Scratch::new(), 16 << 20, &[Image::Chain(1)]).unwrap();
        let path = files.top(Image::Chain(1));
        let image = File::options().read(true).write(true).open(&path).unwrap();
        let len = image.metadata().unwrap().len();
        assert!(files.data().end <= len, "{:?} of {len}", files.data());
        let mut base = vec![0; files.bytes() as usize];
        let mut data = base.clone();
        File::open(files.base()).unwrap().read_exact(&mut base).unwrap();
        image.read_exact_at(&mut data, files.data().start).unwrap();
        assert!(data == base, "the disk's data is elsewhere");
        image.write_all_at(&vec![7; len as usize], 0).unwrap();
        let mut check = Command::new("qemu-img");
        check.args(["check", "-f", "qcow2"]).arg(&path);
        assert!(done(&mut check).is_err(), "it is an image without its tables");
        files.restore_tables().unwrap();
        done(&mut check).unwrap();
    }
}
