//! The places for an image: filesystems and loop devices of a test's own, by the rows of `docs/operate/hosts.md`.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate};

use super::mapped::Filler;
use crate::common::Scratch;
use crate::common::tools::{installed, run, try_run};

/// Where a disk's image and its clone lie. Unmounted and detached with this value.
pub(super) struct Place {
    /// The image, or a block device with its content.
    pub(super) image: PathBuf,
    pub(super) clone: PathBuf,
    pub(super) is_read_only: bool,
    /// Whether the disk's own sectors are of 4096 bytes. A guest sends no smaller requests then.
    pub(super) has_large_sectors: bool,
    /// What shows that the disk's blocks were freed.
    pub(super) stored_in: Stored,
    /// Where a file can be made that takes all the room; none where the disk has its blocks already, or is no file.
    pub(super) fillable: Option<PathBuf>,
    /// What takes all the room of the disk's thin pool.
    pub(super) thin: Option<Filler>,
    /// How large a filesystem is made for it.
    filesystem_bytes: u64,
    /// What ends it, last first.
    ends: Vec<Vec<String>>,
}

impl Place {
    /// Makes the place of a row, with a disk of this content; none, aloud, if that is not possible here.
    pub(super) fn new(row: &str, scratch: &Scratch, content: &[u8]) -> Option<Self> {
        let mut place = Self {
            image: PathBuf::new(),
            clone: PathBuf::new(),
            is_read_only: false,
            has_large_sectors: false,
            stored_in: Stored::File(PathBuf::new()),
            fillable: None,
            thin: None,
            filesystem_bytes: LEAST_FILESYSTEM_BYTES.max(2 * content.len() as u64),
            ends: Vec::new(),
        };
        if !rustix::process::geteuid().is_root() {
            blkmq_testkit::skip("only root mounts filesystems");
            return None;
        }
        match row {
            "XFS" => place.filesystem(scratch, &["mkfs.xfs", "-q", "-f"], "512")?,
            "XFS on sectors of 4096" => place.filesystem(scratch, &["mkfs.xfs", "-q", "-f"], "4096")?,
            "ext4" => place.filesystem(scratch, &["mkfs.ext4", "-q", "-F"], "512")?,
            "ext4 on sectors of 4096" => place.filesystem(scratch, &["mkfs.ext4", "-q", "-F"], "4096")?,
            "btrfs" => place.subvolumes(scratch)?,
            "btrfs, NOCOW" => {
                place.subvolumes(scratch)?;
                // Files with and without copies cannot share blocks.
                for path in [&place.image, &place.clone] {
                    run("chattr", &["+C", word(path.parent()?)]);
                }
            }
            "tmpfs" => {
                let at = place.mount(scratch, "m", &["-t", "tmpfs", "-o", "size=64m", "tmpfs"])?;
                place.files(&at, &at);
            }
            "overlay" => {
                let lower = scratch.path("lower");
                std::fs::create_dir(&lower).unwrap();
                place.overlay(scratch, &lower)?;
            }
            "overlay over squashfs" => {
                let lower = place.packed(scratch, content)?;
                place.overlay(scratch, &lower)?;
                // The daemon opens what is packed, and has it copied up.
                return Some(place);
            }
            "squashfs, `ro=on`" => return place.squashfs(scratch, content),
            "a loop device" => return place.device(scratch, content, "512"),
            "a loop device with sectors of 4096" => return place.device(scratch, content, "4096"),
            "a thin volume" => return place.thin_volume(scratch, content),
            "dm-crypt" => return place.encrypted(scratch, content, ""),
            "dm-crypt with `allow_discards`" => return place.encrypted(scratch, content, "1 allow_discards"),
            "null_blk" => return place.null_blk(scratch, content, "0"),
            "null_blk with discard" => return place.null_blk(scratch, content, "1"),
            other => panic!("no such row: {other}"),
        }
        write_sparse(&place.image, content);
        Some(place)
    }

    /// Mounts a filesystem that a program makes on a loop device with such sectors.
    fn filesystem(&mut self, scratch: &Scratch, make: &[&str], sector: &str) -> Option<()> {
        let at = self.mounted(scratch, make, sector)?;
        self.files(&at, &at);
        Some(())
    }

    fn mounted(&mut self, scratch: &Scratch, make: &[&str], sector: &str) -> Option<PathBuf> {
        if !installed(&["losetup", "mount", make[0]]) {
            return None;
        }
        let device = self.loop_device(&scratch.image("filesystem", self.filesystem_bytes), sector)?;
        run(make[0], &[&make[1..], &[&*device]].concat());
        self.mount(scratch, "m", &[&device])
    }

    fn subvolumes(&mut self, scratch: &Scratch) -> Option<()> {
        let at = self.mounted(scratch, &["mkfs.btrfs", "-q"], "512")?;
        for name in ["a", "b"] {
            run("btrfs", &["subvolume", "create", word(&at.join(name))]);
        }
        self.files(&at.join("a"), &at.join("b"));
        Some(())
    }

    /// Mounts an overlay of this directory and one on ext4.
    fn overlay(&mut self, scratch: &Scratch, lower: &Path) -> Option<()> {
        let below = self.mounted(scratch, &["mkfs.ext4", "-q", "-F"], "512")?;
        let [upper, work] = ["upper", "work"].map(|name| below.join(name));
        for directory in [&upper, &work] {
            std::fs::create_dir(directory).unwrap();
        }
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            word(lower),
            word(&upper),
            word(&work)
        );
        let at = self.mount(scratch, "o", &["-t", "overlay", "-o", &layers, "overlay"])?;
        self.files(&at, &at);
        Some(())
    }

    fn squashfs(mut self, scratch: &Scratch, content: &[u8]) -> Option<Self> {
        let at = self.packed(scratch, content)?;
        self.files(&at, &scratch.path(""));
        (self.is_read_only, self.fillable) = (true, None);
        Some(self)
    }

    /// Mounts a squashfs with the image.
    fn packed(&mut self, scratch: &Scratch, content: &[u8]) -> Option<PathBuf> {
        if !installed(&["mksquashfs"]) {
            return None;
        }
        let (tree, packed) = (scratch.path("tree"), scratch.word("packed"));
        std::fs::create_dir(&tree).unwrap();
        write_sparse(&tree.join(IMAGE), content);
        run("mksquashfs", &[word(&tree), &packed, "-quiet", "-no-progress"]);
        self.mount(scratch, "p", &["-t", "squashfs", "-o", "loop,ro", &packed])
    }

    fn device(mut self, scratch: &Scratch, content: &[u8], sector: &str) -> Option<Self> {
        let below = scratch.image("below", content.len() as u64);
        write_sparse(Path::new(&below), content);
        self.image = self.loop_device(&below, sector)?.into();
        self.clone = scratch.path("clone.raw");
        self.stored_in = Stored::File(below.into());
        self.has_large_sectors = sector != "512";
        Some(self)
    }

    fn files(&mut self, at: &Path, clones: &Path) {
        self.image = at.join(IMAGE);
        self.clone = clones.join("clone.raw");
        self.stored_in = Stored::File(self.image.clone());
        self.fillable = Some(at.join("filler"));
    }

    pub(super) fn loop_device(&mut self, file: &str, sector: &str) -> Option<String> {
        let said = try_run("losetup", &["--find", "--show", "--sector-size", sector, file]);
        if !said.success {
            blkmq_testkit::skip(&format!("no loop device: {}", said.stderr));
            return None;
        }
        let device = said.stdout.trim().to_owned();
        self.at_end(&["losetup", "--detach", &device]);
        Some(device)
    }

    fn mount(&mut self, scratch: &Scratch, name: &str, words: &[&str]) -> Option<PathBuf> {
        let at = scratch.path(name);
        std::fs::create_dir(&at).unwrap();
        let said = try_run("mount", &[words, &[word(&at)]].concat());
        if !said.success {
            blkmq_testkit::skip(&format!("{words:?} cannot be mounted: {}", said.stderr));
            return None;
        }
        self.at_end(&["umount", "--lazy", word(&at)]);
        Some(at)
    }

    /// Whether others can take the room that the disk needs.
    pub(super) fn is_bounded(&self) -> bool {
        self.fillable.is_some() || self.thin.is_some()
    }

    /// Takes all the room that the disk could have.
    pub(super) fn fill(&self) {
        if let Some(file) = &self.fillable {
            fill(file);
        }
        if let Some(thin) = &self.thin {
            thin.fill();
        }
    }

    /// Gives the room back.
    pub(super) fn give_back(&self) {
        if let Some(file) = &self.fillable {
            std::fs::remove_file(file).unwrap();
        }
        if let Some(thin) = &self.thin {
            thin.give_back();
        }
    }

    /// Runs a command when this ends, before those that were given earlier.
    pub(super) fn at_end(&mut self, words: &[&str]) {
        self.ends
            .push(words.iter().map(|&word| word.to_owned()).collect());
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        for words in self.ends.iter().rev() {
            // A failure shows by what is left; a second panic would end all tests.
            let _ = try_run(&words[0], &words[1..]);
        }
    }
}

/// What shows that a disk's blocks were freed.
pub(super) enum Stored {
    /// A file that has fewer blocks then.
    File(PathBuf),
    /// The statistics of a block device that counts its discards.
    Discarded(PathBuf),
}

impl Stored {
    /// How many sectors were freed since `before`, which the same has returned.
    pub(super) fn freed_since(&self, before: u64) -> u64 {
        let now = self.sectors();
        match self {
            Self::File(_) => before.saturating_sub(now),
            Self::Discarded(_) => now - before,
        }
    }

    /// The sectors that are stored, or that were discarded.
    pub(super) fn sectors(&self) -> u64 {
        match self {
            Self::File(path) => std::fs::metadata(path).unwrap().blocks(),
            Self::Discarded(path) => {
                let text = std::fs::read_to_string(path).unwrap();
                let sectors = text.split_whitespace().nth(DISCARD_SECTORS);
                sectors.and_then(|number| number.parse().ok()).expect("a number")
            }
        }
    }
}

/// Makes a file of this content, with holes for blocks of zeroes; or writes it to a new block device.
pub(super) fn write_sparse(path: &Path, content: &[u8]) {
    let file = File::create(path).unwrap();
    if file.metadata().unwrap().is_file() {
        file.set_len(content.len() as u64).unwrap();
    }
    for (number, block) in (0..).zip(content.chunks(4096)) {
        if block.iter().any(|&byte| byte != 0) {
            file.write_all_at(block, number * 4096).unwrap();
        }
    }
    file.sync_all().unwrap();
}

/// Makes a file that takes all the room of its filesystem.
fn fill(path: &Path) {
    let (file, mut end) = (File::create(path).unwrap(), 0);
    for shift in (12..=28).rev() {
        while fallocate(&file, FallocateFlags::empty(), end, 1 << shift).is_ok() {
            end += 1 << shift;
        }
    }
    file.sync_all().unwrap();
    assert!(end > 0, "{}: nothing could be filled", path.display());
}

pub(super) fn word(path: &Path) -> &str {
    path.to_str().expect("a path of the tests")
}

const IMAGE: &str = "disk.raw";
/// The place of a number in a block device's statistics (`Documentation/block/stat.rst`).
const DISCARD_SECTORS: usize = 13;
/// The smallest XFS has 300 MiB.
const LEAST_FILESYSTEM_BYTES: u64 = 320 << 20;
