//! Tests a guest's disk from the daemon, by vhost-user-blk: the daemon runs beside the emulator, is
//! killed and started again while the guest writes and verifies, and the guest may notice only a pause.
//! Then the disk grows.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use anyhow::{Result, ensure};
use rustix::process::Signal;

use super::initrd::Initrd;
use super::machine::{self, Machine};
use super::packages::Place;
use super::{SUCCESS, is_said};

/// The formats of the virtqueues.
pub(super) const RINGS: [&str; 2] = ["packed=off", "packed=on"];

/// How much a test does.
#[derive(Clone, Copy, Debug)]
pub(super) struct Length {
    /// How often the daemon is killed.
    kills: u32,
    /// How many files each processor writes and verifies repeatedly, until the last kill.
    files: u32,
    /// The size of a file.
    megabytes: u32,
}

impl Length {
    pub(super) const FULL: Self = Self {
        kills: 3,
        files: 4,
        megabytes: 24,
    };
    /// For continuous integration.
    pub(super) const SHORT: Self = Self {
        kills: 1,
        files: 2,
        megabytes: 8,
    };
}

/// Boots a guest with a disk of the daemon, and has it make a file system, write, verify, discard
/// and check.
///
/// # Errors
/// If the guest finds anything wrong, or there is no guest.
pub(super) fn run(place: &Place, program: &Path, rings: &str, length: Length) -> Result<()> {
    let mut initrd = Initrd::new(place)?;
    for tool in ["mkfs.ext4", "e2fsck", "resize2fs"] {
        initrd.add_tool(tool)?;
    }
    initrd.add_module("virtio_blk", "")?;
    let script = SCRIPT
        .replace("SUCCESS", SUCCESS)
        .replace("KILLS", &numbers(length.kills))
        .replace("KILL", KILL)
        .replace("GROWN", &(GROWN_BYTES / 512).to_string())
        .replace("GROW", GROW)
        .replace("FILES", &length.files.to_string())
        .replace("MEGABYTES", &length.megabytes.to_string())
        .replace("QUEUES", &QUEUES.to_string());
    let initrd = initrd.pack(&script)?;
    let directory = place.file("virtual-disk");
    let _ = fs::remove_dir_all(&directory);
    fs::create_dir_all(&directory)?;
    let disk = directory.join("vm.raw");
    fs::File::create(&disk)?.set_len(DISK_BYTES)?;
    let file = format!("name=vm,file={},sched=bfq", disk.display());
    let mut daemon = Daemon::start(program, &directory, vec!["--disk".to_owned(), file])?;
    let (mut kills, mut failure) = (0, None);
    let said = machine::boot(Machine {
        place,
        initrd: &initrd,
        limit: TIME_MAX,
        words: &words(&directory.join("vm.sock"), rings),
        heard: &mut |line| {
            if line == KILL {
                kills += 1;
                failure = failure.take().or(daemon.start_again().err());
            } else if line == GROW {
                failure = failure.take().or(daemon.grow(&disk).err());
            }
        },
    })?;
    if let Some(error) = failure {
        return Err(error);
    }
    ensure!(is_said(&said, SUCCESS), "the guest did not say `{SUCCESS}`");
    println!("    the daemon was killed {kills} times");
    ensure!(
        kills == length.kills,
        "the guest said `{KILL}` {kills} times, not {}",
        length.kills
    );
    Ok(())
}

/// The words for a shell loop with `count` iterations.
fn numbers(count: u32) -> String {
    let numbers: Vec<_> = (1..=count).map(|number| number.to_string()).collect();
    numbers.join(" ")
}

/// The daemon; dropping it kills it.
pub(super) struct Daemon {
    program: PathBuf,
    directory: PathBuf,
    disks: Vec<String>,
    process: blkmq_testkit::Daemon,
}

impl Daemon {
    /// Starts a daemon with these disks, each of which has its socket in the directory.
    pub(super) fn start(program: &Path, directory: &Path, disks: Vec<String>) -> Result<Self> {
        Ok(Self {
            process: start(program, directory, &disks)?,
            disks,
            program: program.to_owned(),
            directory: directory.to_owned(),
        })
    }

    /// Kills the daemon, and starts the next one.
    fn start_again(&mut self) -> Result<()> {
        // It may have ended by itself, which the guest notices.
        if self.process.is_running() {
            self.process.kill();
        }
        self.process = start(&self.program, &self.directory, &self.disks)?;
        Ok(())
    }

    /// Makes the image larger, and has the daemon notice.
    fn grow(&mut self, image: &Path) -> Result<()> {
        fs::File::options()
            .write(true)
            .open(image)?
            .set_len(GROWN_BYTES)?;
        ensure!(self.process.is_running(), "the daemon is gone");
        self.process.signal(Signal::HUP);
        Ok(())
    }
}

/// Starts a daemon, and waits until it is ready.
fn start(program: &Path, directory: &Path, disks: &[String]) -> Result<blkmq_testkit::Daemon> {
    let sockets = directory.join("{disk}.sock");
    let mut command = Command::new(program);
    command
        .arg("serve")
        .args(disks)
        .args(["--vhost-user", &format!("unix:{}", sockets.display())]);
    blkmq_testkit::Daemon::try_spawn(command, Stdio::inherit())
}

/// Arguments of the emulator that attach a disk of the daemon.
pub(super) fn words(socket: &Path, rings: &str) -> Vec<String> {
    let socket = socket.display();
    let words = format!(
        "-object memory-backend-memfd,id=mem,size={MEMORY},share=on -machine memory-backend=mem \
         -chardev socket,id=vm,path={socket},reconnect-ms=100 \
         -device vhost-user-blk-pci,chardev=vm,num-queues={QUEUES},{rings}"
    );
    words.split_whitespace().map(str::to_owned).collect()
}

const QUEUES: u32 = 2;
/// The memory that [`machine`] gives a guest.
const MEMORY: &str = "1024M";
const DISK_BYTES: u64 = 512 << 20;
const TIME_MAX: Duration = Duration::from_secs(150);
/// The line with which the guest requests a kill of the daemon.
const KILL: &str = "kill the daemon";
/// The line with which it requests that its disk grow; and the new size.
const GROW: &str = "make the disk larger";
const GROWN_BYTES: u64 = 640 << 20;
/// Both processors write and verify, so both queues are used. One file is verified against the
/// disk, not the cache.
const SCRIPT: &str = "\
export PATH=/bin:/tmp/bin
busybox mkdir /tmp/bin; busybox --install -s /tmp/bin
fail() { echo \"wrong: $1\"; poweroff -f; sleep 60; }
echo \"Linux $(uname -r), vda of $(cat /sys/block/vda/size) sectors, queues: $(ls /sys/block/vda/mq | tr '\\n' ' ')\"
test $(ls /sys/block/vda/mq | wc -l) = QUEUES || fail queues
mkfs.ext4 -q /dev/vda || fail mkfs.ext4
mount -t ext4 -o discard /dev/vda /mnt || fail mount
dd if=/dev/urandom of=/tmp/content bs=1M count=MEGABYTES 2>/dev/null
sum=$(md5sum < /tmp/content)
load() {
  turn=0
  while test $turn -lt FILES || ! test -e /tmp/killed; do
    file=/mnt/$1.$((turn % FILES))
    taskset $1 dd if=/tmp/content of=$file bs=64k conv=fsync 2>/dev/null || fail write
    taskset $1 dd if=$file iflag=direct bs=64k 2>/tmp/err.$1 | md5sum > /tmp/sum.$1
    test \"$(cat /tmp/sum.$1)\" = \"$sum\" || fail \"content of $file: $(cat /tmp/err.$1)\"
    turn=$((turn + 1))
  done
}
load 1 & load 2 &
for kill in KILLS; do sleep 1; echo KILL; done
sleep 1; touch /tmp/killed
wait
sync; echo 3 > /proc/sys/vm/drop_caches
for file in /mnt/[12].*; do test \"$(md5sum < $file)\" = \"$sum\" || fail \"$file\"; done
echo GROW
for second in 1 2 3 4 5 6 7 8 9 10; do test $(cat /sys/block/vda/size) = GROWN && break; sleep 1; done
test $(cat /sys/block/vda/size) = GROWN || fail growing
resize2fs /dev/vda || fail resize2fs
test $(df -m /mnt | tail -1 | awk '{print $2}') -gt 520 || fail resize2fs
rm /mnt/1.* && fstrim -v /mnt || fail fstrim
umount /mnt && e2fsck -fn /dev/vda || fail e2fsck
cat /proc/interrupts | grep virtio | grep req
echo SUCCESS
";
