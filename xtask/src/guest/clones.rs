//! Tests disks that are laid over one image of a system, by vhost-user-blk: a guest has its root on one and keeps what it
//! writes over a reboot; then it ends, the disk is reset, and the next one finds the system as it was. A second disk on the
//! same image keeps what it has.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use blkmq_testkit::tools::find;

use super::initrd::Initrd;
use super::machine::{self, Machine};
use super::packages::Place;
use super::virtual_disk::{self, Daemon, RINGS};
use super::{SUCCESS, is_said};
use crate::steps::run_shown;

pub(super) const TEST: &str = "clones";

/// Boots guests three times from a disk on an image.
///
/// # Errors
/// If the guest finds anything wrong, an image is not sound afterwards, or there is no guest.
pub(super) fn run(place: &Place, program: &Path) -> Result<()> {
    let directory = place.file(TEST);
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    let mut initrd = Initrd::new(place)?;
    initrd.add_module("virtio_blk", "")?;
    initrd.add_module("ext4", "")?;
    let base = make_base(&initrd, program, &directory)?;
    let initrd = initrd.pack(BOOT)?;

    let control = format!("unix:{}", directory.join("control.sock").display());
    // A daemon begins with a disk, and its sandbox has the directory because of that.
    let spare = format!("name=spare,file={}", directory.join("base.raw").display());
    let first = ["--disk", &spare, "--control", &control];
    let daemon = Daemon::start(program, &directory, first.map(str::to_owned).to_vec())?;
    let ctl = |words: &[&str]| {
        let mut command = Command::new(program);
        run_shown(command.args(["ctl", "--socket", &control]).args(words))
    };
    let images = ["vm", "other"].map(|name| (name, directory.join(format!("{name}.qcow2"))));
    for (name, image) in &images {
        ctl(&["clone", &text(&base), name, &text(image)])?;
    }
    let mut words = virtual_disk::words(&directory.join("vm.sock"), RINGS[1]);
    let other = directory.join("other.sock");
    let more = format!(
        "-chardev socket,id=other,path={} -device vhost-user-blk-pci,chardev=other -action reboot=reset",
        other.display()
    );
    words.extend(more.split_whitespace().map(str::to_owned));
    let boot = |heard: &mut dyn FnMut(&str)| {
        machine::boot(Machine {
            place,
            initrd: &initrd,
            limit: TIME_MAX,
            words: &words,
            heard,
        })
    };
    let mut refusals = 0;
    boot(&mut |line| {
        if line == RESET {
            // A guest that has a disk would find other data.
            refusals += u32::from(ctl(&["reset", "vm"]).is_err());
        }
    })?;
    ensure!(
        refusals == 1,
        "a disk is reset below a guest, or the guest has not come to its end"
    );
    ctl(&["reset", "vm"])?;
    let said = boot(&mut |_| ())?;
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    drop(daemon);
    for (_, image) in &images {
        run_shown(Command::new(program).args(["image", "check"]).arg(image))?;
    }
    Ok(())
}

/// Makes an image of a system: a shell, a script that is its first process, and a file of noise.
fn make_base(initrd: &Initrd<'_>, program: &Path, directory: &Path) -> Result<PathBuf> {
    let tree = directory.join("tree");
    for name in ["bin", "dev", "proc", "sbin", "tmp"] {
        fs::create_dir_all(tree.join(name))?;
    }
    fs::copy(initrd.path("bin/busybox"), tree.join("bin/busybox"))?;
    let script = SYSTEM.replace("SUCCESS", SUCCESS).replace("RESET", RESET);
    let init = tree.join("sbin/init");
    fs::write(&init, script)?;
    fs::set_permissions(init, fs::Permissions::from_mode(0o755))?;
    let noise = "head -c 32M /dev/urandom > noise && md5sum noise > noise.md5";
    run_shown(Command::new("sh").args(["-c", noise]).current_dir(&tree))?;
    let (raw, base) = (directory.join("base.raw"), directory.join("base.qcow2"));
    fs::File::create(&raw)?.set_len(DISK_BYTES)?;
    let maker = find("mkfs.ext4").context("mkfs.ext4 is not installed; run: cargo xtask setup")?;
    let mut maker = Command::new(maker);
    run_shown(maker.args(["-q", "-d"]).args([&tree, &raw]))?;
    run_shown(
        Command::new(program)
            .args(["image", "convert"])
            .args([&raw, &base]),
    )?;
    fs::set_permissions(&base, fs::Permissions::from_mode(0o444))?;
    Ok(base)
}

fn text(path: &Path) -> String {
    path.display().to_string()
}

const DISK_BYTES: u64 = 144 << 20;
const TIME_MAX: Duration = Duration::from_secs(150);
/// The line with which the guest has its disk reset, which is refused while it has it.
const RESET: &str = "try to reset the disk";
const BOOT: &str = "\
busybox mount -t ext4 /dev/vda /mnt || busybox poweroff -f
exec busybox switch_root /mnt /sbin/init
";
/// The disk that is not reset counts the boots.
const SYSTEM: &str = "\
#!/bin/busybox sh
export PATH=/bin:/tmp/bin
busybox mount -t proc proc /proc
busybox mount -t devtmpfs devtmpfs /dev
busybox mount -t tmpfs tmpfs /tmp
busybox mkdir /tmp/bin /tmp/other; busybox --install -s /tmp/bin
fail() { echo \"wrong: $1\"; poweroff -f; sleep 60; }
mount -t ext4 /dev/vdb /tmp/other || fail 'mount of the other disk'
turn=$(cat /tmp/other/turn 2>/dev/null || echo 0)
echo \"boot $turn, root: $(grep ' / ext4' /proc/mounts)\"
cd /
md5sum -c noise.md5 || fail \"the system's file\"
(cd /tmp/other && md5sum -c noise.md5) || fail \"the system's file on the other disk\"
case $turn in
0)
  test -e /mine && fail 'a new disk has something'
  dd if=/dev/urandom of=/mine bs=1M count=16 conv=fsync 2>/dev/null || fail write
  md5sum mine > mine.md5
  cp noise noise.copy || fail copy
  cp mine mine.md5 /tmp/other || fail 'copy to the other disk'
  ;;
1)
  md5sum -c mine.md5 || fail 'what was written before the reboot'
  cmp noise noise.copy || fail 'a copy of the system'
  ;;
2)
  test -e /mine && fail 'the disk has what it had before the reset'
  test -e /noise.copy && fail 'the disk has a copy that it had before the reset'
  echo SUCCESS
  poweroff -f
  ;;
esac
(cd /tmp/other && md5sum -c mine.md5) || fail 'what the other disk has'
echo $((turn + 1)) > /tmp/other/turn
umount /tmp/other && mount -o remount,ro / || fail 'the end'
sync
if test $turn = 1; then
  echo RESET
  sleep 2
  poweroff -f
fi
reboot -f
sleep 60
";
