//! Where the capacity of a file comes from, which names its queue: the disk or the filesystem below it, as the kernel
//! tells in `/proc/self/mountinfo` and `/sys`. `open` asks, and `driver` tells the plan of queues.

use std::fs::File;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags, major, makedev, minor};

use super::disk::{Backing, filesystem};
use super::mountinfo::Mount;
use super::sys;

/// What a file lies on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place {
    /// The name of the queue of all disks there. Numbers have the form of `ls -l /dev` and `/proc/self/mountinfo`.
    pub(super) queue: String,
    /// The drives at the bottom, as numbers of whole disks; of other filesystems, their own numbers or names.
    pub(super) drives: Vec<String>,
}

impl Place {
    /// Finds out where a file or block device lies.
    pub(super) fn of(file: &File, backing: Backing) -> Self {
        match backing {
            Backing::Block(number) => System::running().on_device("dev", number),
            Backing::Filesystem(number) => of_file(file, number, LAYERS_MAX),
        }
    }
}

/// Where a file of the filesystem with this number lies. Filesystems that have numbers for their parts, or lie on
/// another one, have what they name below them.
fn of_file(file: &File, number: u64, layers: u32) -> Place {
    let system = System::running();
    match filesystem(file) {
        BTRFS => {
            if let Ok(id) = sys::btrfs_id(file) {
                return system.on_btrfs(&uuid(id));
            }
        }
        // Files of the layers have numbers of their own: the mount's is one for all.
        OVERLAY => {
            if let Some(mount) = mount_of(file) {
                let upper = mount.option("upperdir").filter(|_| layers > 0);
                let below = upper.and_then(|upper| {
                    let upper = File::open(upper_path(&upper)?).ok()?;
                    let number = rustix::fs::fstat(&upper).ok()?.st_dev;
                    Some(of_file(&upper, number, layers - 1))
                });
                let number = number_of(&mount.device).unwrap_or(number);
                return below.unwrap_or_else(|| system.on_device("fs", number));
            }
        }
        ZFS => {
            if let Some(mount) = mount_of(file) {
                return on_pool(&mount.source);
            }
        }
        _ => {}
    }
    system.on_device("fs", number)
}

/// The upper directory of an overlay, as it was given to the mount: a backslash makes the next letter literal. A relative
/// path is one from a directory that is not known.
fn upper_path(option: &str) -> Option<PathBuf> {
    let (mut path, mut letters) = (String::new(), option.chars());
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => path.extend(letters.next()),
            other => path.push(other),
        }
    }
    Some(PathBuf::from(path)).filter(|path| path.is_absolute())
}

/// The device number of the mount through which a file was opened: that of its whole filesystem.
pub(super) fn mounted_device(file: &File) -> Option<u64> {
    number_of(&mount_of(file)?.device)
}

/// The mount through which a file was opened.
fn mount_of(file: &File) -> Option<Mount> {
    let found = rustix::fs::statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
    let all = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    Mount::find(&all, found.stx_mnt_id)
}

/// All datasets of a ZFS pool share its drives.
fn on_pool(dataset: &str) -> Place {
    let pool = dataset.split('/').next().unwrap_or(dataset);
    let queue = format!("zfs-{pool}");
    Place {
        drives: vec![queue.clone()],
        queue,
    }
}

/// What the kernel tells of block devices.
struct System<'a> {
    sys: &'a Path,
}

impl System<'static> {
    fn running() -> Self {
        Self {
            sys: Path::new("/sys"),
        }
    }
}

impl System<'_> {
    /// What lies on this device: a partition shares the queue of its disk.
    fn on_device(&self, kind: &str, number: u64) -> Place {
        let mut drives = Vec::new();
        self.add_drives(number, LAYERS_MAX, &mut drives);
        Place {
            queue: match self.disk_of(number) {
                Some(disk) => format!("dev-{}", text(disk)),
                None => format!("{kind}-{}", text(number)),
            },
            drives,
        }
    }

    fn on_btrfs(&self, id: &str) -> Place {
        let queue = format!("btrfs-{id}");
        let mut drives = Vec::new();
        for number in self.numbers_in(&format!("fs/btrfs/{id}/devices")) {
            self.add_drives(number, LAYERS_MAX, &mut drives);
        }
        if drives.is_empty() {
            drives.push(queue.clone());
        }
        Place { queue, drives }
    }

    /// The disk of a partition.
    fn disk_of(&self, number: u64) -> Option<u64> {
        let device = self.sys.join("dev/block").join(text(number));
        device.join("partition").exists().then_some(())?;
        number_in(&device.join("../dev"))
    }

    /// Adds the disks at the bottom of a device that may lie on others, as LVM's, dm-crypt's and md's do.
    fn add_drives(&self, number: u64, layers: u32, drives: &mut Vec<String>) {
        let number = self.disk_of(number).unwrap_or(number);
        let below = self.numbers_in(&format!("dev/block/{}/slaves", text(number)));
        if below.is_empty() || layers == 0 {
            let drive = text(number);
            if !drives.contains(&drive) {
                drives.push(drive);
            }
            return;
        }
        for number in below {
            self.add_drives(number, layers - 1, drives);
        }
    }

    /// The numbers of the devices in a directory.
    fn numbers_in(&self, directory: &str) -> Vec<u64> {
        let Ok(entries) = std::fs::read_dir(self.sys.join(directory)) else {
            return Vec::new();
        };
        let devices = entries.flatten().map(|entry| entry.path().join("dev"));
        let mut numbers: Vec<u64> = devices.filter_map(|path| number_in(&path)).collect();
        numbers.sort_unstable();
        numbers
    }
}

fn number_in(path: &Path) -> Option<u64> {
    number_of(std::fs::read_to_string(path).ok()?.trim())
}

fn number_of(text: &str) -> Option<u64> {
    let (major, minor) = text.split_once(':')?;
    Some(makedev(major.parse().ok()?, minor.parse().ok()?))
}

fn text(number: u64) -> String {
    format!("{}:{}", major(number), minor(number))
}

fn uuid(id: [u8; 16]) -> String {
    let id = u128::from_be_bytes(id);
    format!(
        "{:08x}-{:04x}-{:04x}-{:04x}-{:012x}",
        id >> 96,
        id >> 80 & 0xffff,
        id >> 64 & 0xffff,
        id >> 48 & 0xffff,
        id & 0xffff_ffff_ffff
    )
}

/// Most filesystems or devices one above the other that are followed. Overlays have at most two.
const LAYERS_MAX: u32 = 8;
/// The magic numbers of btrfs, overlayfs and ZFS, as in statfs(2).
const BTRFS: u64 = 0x9123_683e;
const OVERLAY: u64 = 0x794c_7630;
const ZFS: u64 = 0x2fc1_2fc1;

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::process::Command;

    use super::*;
    use crate::driver::OpenDisk;
    use crate::file::{FileConfig, FileDisk};
    use crate::testing::{Mounted, scratch_file, scratch_file_in};

    /// A directory in the form of `/sys`, removed with this value.
    struct Sys(PathBuf);

    impl Sys {
        /// Devices by name and number, a partition inside its disk's directory, and which lies on which.
        fn new(name: &str, devices: &[(&str, &str)], below: &[(&str, &str)]) -> Self {
            let root = std::env::temp_dir().join(format!("blkmq-sys-{}-{name}", std::process::id()));
            std::fs::create_dir_all(root.join("dev/block")).unwrap();
            let place = |name: &str| root.join("devices").join(name);
            for (name, number) in devices {
                std::fs::create_dir_all(place(name).join("slaves")).unwrap();
                std::fs::write(place(name).join("dev"), format!("{number}\n")).unwrap();
                if name.contains('/') {
                    std::fs::write(place(name).join("partition"), "1\n").unwrap();
                }
                symlink(place(name), root.join("dev/block").join(number)).unwrap();
            }
            for (upper, lower) in below {
                let at = match upper.starts_with("fs/") {
                    true => root.join(upper),
                    false => place(upper).join("slaves"),
                };
                std::fs::create_dir_all(&at).unwrap();
                symlink(place(lower), at.join(lower.replace('/', "-"))).unwrap();
            }
            Self(root)
        }

        fn system(&self) -> System<'_> {
            System { sys: &self.0 }
        }
    }

    impl Drop for Sys {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn place(queue: &str, drives: &[&str]) -> Place {
        Place {
            queue: queue.to_owned(),
            drives: drives.iter().map(|&drive| drive.to_owned()).collect(),
        }
    }

    #[test]
    fn partitions_share_the_queue_of_their_disk_and_a_whole_device_has_its_own() {
        let sys = Sys::new(
            "partitions",
            &[
                ("sda", "8:0"),
                ("sda/sda1", "8:1"),
                ("sda/sda2", "8:2"),
                ("vda", "254:0"),
            ],
            &[],
        );
        let on = |kind, number| sys.system().on_device(kind, number_of(number).unwrap());
        assert_eq!(on("fs", "8:1"), place("dev-8:0", &["8:0"]));
        assert_eq!(on("dev", "8:2"), place("dev-8:0", &["8:0"]));
        assert_eq!(on("dev", "8:0"), place("dev-8:0", &["8:0"]));
        assert_eq!(on("fs", "254:0"), place("fs-254:0", &["254:0"]));
        assert_eq!(
            on("fs", "0:45"),
            place("fs-0:45", &["0:45"]),
            "no block device, as NFS"
        );
    }

    #[test]
    fn drives_of_volumes_are_the_disks_at_the_bottom() {
        let sys = Sys::new(
            "volumes",
            &[
                ("sda", "8:0"),
                ("sda/sda1", "8:1"),
                ("sdb", "8:16"),
                ("dm-0", "253:0"),
                ("dm-1", "253:1"),
            ],
            &[
                ("dm-0", "sda/sda1"),
                ("dm-0", "sdb"),
                ("dm-1", "dm-0"),
                ("fs/btrfs/1-2/devices", "dm-1"),
            ],
        );
        let number = number_of("253:1").unwrap();
        assert_eq!(
            sys.system().on_device("dev", number),
            place("dev-253:1", &["8:0", "8:16"])
        );
        assert_eq!(sys.system().on_btrfs("1-2"), place("btrfs-1-2", &["8:0", "8:16"]));
        assert_eq!(
            sys.system().on_btrfs("3"),
            place("btrfs-3", &["btrfs-3"]),
            "unknown to /sys"
        );
        assert_eq!(on_pool("tank/vms/a"), place("zfs-tank", &["zfs-tank"]));
    }

    #[test]
    fn uuid_has_the_form_of_btrfs() {
        let id = std::array::from_fn(|at| at as u8 * 16 + 1);
        assert_eq!(uuid(id), "01112131-4151-6171-8191-a1b1c1d1e1f1");
    }

    #[test]
    fn upper_directory_has_no_escapes_and_is_not_relative() {
        assert_eq!(upper_path("/a\\,b\\\\c"), Some("/a,b\\c".into()));
        assert_eq!(upper_path("a"), None);
    }

    /// The queue of a new file in a directory.
    fn queue_in(directory: &Path) -> String {
        let path = scratch_file_in(directory, "placed", 1 << 20);
        let config = FileConfig {
            path: path.to_owned(),
            ..FileConfig::default()
        };
        OpenDisk::device(&FileDisk::open(&config).unwrap()).unwrap()
    }

    #[test]
    fn subvolumes_of_one_btrfs_share_a_queue() {
        let image = scratch_file("btrfs-image", 256 << 20);
        let has_run = |program: &str, args: &[&str]| {
            let output = Command::new(program).args(args).output();
            output.is_ok_and(|output| output.status.success())
        };
        if !has_run("mkfs.btrfs", &["-q", image.to_str().unwrap()]) {
            blkmq_testkit::skip("no btrfs can be made (it needs mkfs.btrfs)");
            return;
        }
        let Some(btrfs) = Mounted::loop_device("subvolumes", "btrfs", &image) else {
            return;
        };
        let parts = ["a", "b"].map(|name| btrfs.0.join(name));
        for part in &parts {
            assert!(has_run("btrfs", &["subvolume", "create", part.to_str().unwrap()]));
        }
        let [a, b] = parts.each_ref().map(|part| queue_in(part));
        assert!(a.starts_with("btrfs-") && a.len() == "btrfs-".len() + 36, "{a}");
        assert_eq!(a, b);
    }

    #[test]
    fn overlay_and_bind_mount_share_the_queue_of_the_filesystem_below() {
        let Some(tmpfs) = Mounted::tmpfs("below", "16m") else {
            return;
        };
        let [lower, upper, work] = ["lower", "my upper,x", "work"].map(|name| tmpfs.0.join(name));
        for directory in [&lower, &upper, &work] {
            std::fs::create_dir(directory).unwrap();
        }
        let below = queue_in(&tmpfs.0);
        let Some(bound) = Mounted::mount("bound", &["--bind", lower.to_str().unwrap()]) else {
            return;
        };
        assert_eq!(queue_in(&bound.0), below);
        let layers = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display().to_string().replace(',', "\\,"),
            work.display()
        );
        let Some(overlay) = Mounted::mount("over", &["-t", "overlay", "-o", &layers, "overlay"]) else {
            return;
        };
        assert_eq!(queue_in(&overlay.0), below);
    }
}
