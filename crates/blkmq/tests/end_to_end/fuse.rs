//! Tests whether a disk that is a regular file of this host behaves like a file and loses nothing: with
//! programs that use files, through kills, and while it is unmounted.

mod durability;
mod ends;
mod hidden;
pub(crate) mod loops;
mod memory;
mod rings;
mod shares;
mod upgrade;

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::fs::{FallocateFlags, OFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::process::Signal;

use crate::common::daemon::program;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, output_within, run};
use crate::common::{Daemon, Scratch};

/// A daemon that serves one disk as a file, which is unmounted in the end in any case.
pub(crate) struct Stage {
    daemon: Option<Daemon>,
    scratch: Scratch,
}

impl Stage {
    /// A disk in a file, with these additional keys; none, with a message, if nothing can be
    /// mounted.
    fn new(keys: &str) -> Option<Self> {
        Self::of_size(keys, DISK_BYTES)
    }

    fn of_size(keys: &str, bytes: u64) -> Option<Self> {
        let scratch = Scratch::new();
        let image = scratch.image("vm1.raw", bytes);
        Self::on(scratch, &format!("name=vm1,file={image}{keys}"))
    }

    /// Any disk; none, with a message, if nothing can be mounted.
    pub(crate) fn on(scratch: Scratch, disk: &str) -> Option<Self> {
        if !may_mount() {
            return None;
        }
        let mut stage = Self {
            daemon: None,
            scratch,
        };
        stage.serve(disk);
        Some(stage)
    }

    /// Starts a new daemon that serves a disk.
    fn serve(&mut self, disk: &str) {
        let control = format!("unix:{}", self.scratch.word("control.sock"));
        let words = ["--disk", disk, "--fuse", &self.word(), "--control", &control];
        let transport = ["--fuse-io-uring", rings::transport()];
        self.daemon = Some(Daemon::start(&[&words[..], &transport[..]].concat()));
    }

    fn daemon(&mut self) -> &mut Daemon {
        self.daemon.as_mut().expect("it serves")
    }

    /// Stops the daemon, so that its file answers no more.
    pub(crate) fn pause(&self) {
        self.daemon.as_ref().expect("it serves").pause();
    }

    pub(crate) fn go_on(&self) {
        self.daemon.as_ref().expect("it serves").signal(Signal::CONT);
    }

    fn stop(mut self) {
        self.daemon.take().expect("it serves").stop();
    }

    fn path(&self) -> PathBuf {
        self.scratch.path("disk")
    }

    /// The disk's path as an argument of a command.
    pub(crate) fn word(&self) -> String {
        self.scratch.word("disk")
    }

    /// Opens the disk for direct I/O.
    fn open(&self) -> File {
        self.open_at(&self.path())
    }

    fn open_at(&self, path: &Path) -> File {
        let mut options = File::options();
        options
            .read(true)
            .write(true)
            .custom_flags(OFlags::DIRECT.bits() as i32);
        options.open(path).expect("the disk opens")
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        self.daemon = None;
        let flags = rustix::mount::UnmountFlags::DETACH;
        // The latter is the path of a second disk, if a test has one.
        for path in [self.path(), self.scratch.path("other")] {
            while rustix::mount::unmount(&path, flags).is_ok() {}
        }
        let _ = std::fs::remove_file(self.path());
    }
}

/// Says whether this user can mount something here, with a message if not.
pub(crate) fn may_mount() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    let may = device.is_ok() && rustix::process::geteuid().is_root();
    if !may {
        blkmq_testkit::skip("only root mounts without a helper, and /dev/fuse has to be there");
    }
    may
}

#[test]
fn writes_of_dd_are_read_by_dd_and_are_in_the_image() {
    let Some(mut stage) = Stage::new("") else { return };
    if !installed(&["dd", "cmp"]) {
        return;
    }
    let noise = stage.scratch.noisy_image("noise", 24 << 20, 7);
    let (of, back) = (format!("of={}", stage.word()), stage.scratch.word("back"));
    run("dd", &[&format!("if={noise}"), &of, "bs=1M", "oflag=direct"]);
    // Blocks of another size than the disk's, from its middle.
    let odd = ["bs=777", "skip=5", "count=20000"];
    run(
        "dd",
        &[
            &[&*format!("if={}", stage.word()), &format!("of={back}")],
            &odd[..],
        ]
        .concat(),
    );
    let mut expected = vec![0; 777 * 20_000];
    File::open(&noise)
        .unwrap()
        .read_exact_at(&mut expected, 5 * 777)
        .unwrap();
    assert!(
        std::fs::read(&back).unwrap() == expected,
        "what was read is not what was written"
    );
    let (disk, image) = (stage.word(), stage.scratch.word("vm1.raw"));
    run("cmp", &["-n", "25165824", &disk, &noise]);
    stage.daemon.take().expect("it serves").stop();
    run("cmp", &["-n", "25165824", &image, &noise]);
}

#[test]
fn fio_finds_what_it_has_written_with_32_under_way() {
    let Some(stage) = Stage::new(",sched=bfq") else {
        return;
    };
    if !installed(&["fio"]) {
        return;
    }
    let file = format!("--filename={}", stage.word());
    let words = [
        "--name=verify",
        &file,
        "--size=32M",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=32",
        "--rw=randwrite",
        "--bsrange=4k-256k",
        "--bs_unaligned=0",
        "--verify=crc32c",
        "--verify_fatal=1",
        "--verify_state_save=0",
    ];
    run("fio", &words);
    stage.stop();
}

#[test]
fn hole_is_punched_found_and_read_as_zeroes() {
    let Some(stage) = Stage::new("") else { return };
    let file = stage.open();
    for number in 0..16 {
        file.write_all_at(&aligned(number).0, number * STEP).unwrap();
    }
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(&file, punch, 4 * STEP, 4 * STEP).unwrap();
    fallocate(&file, FallocateFlags::ZERO_RANGE, 8 * STEP, STEP).unwrap();
    let mut read = aligned(99);
    for number in 0..16 {
        file.read_exact_at(&mut read.0, number * STEP).unwrap();
        let is_zeroed = (4..9).contains(&number);
        let expected = if is_zeroed { [0; BLOCK] } else { aligned(number).0 };
        assert!(read.0 == expected, "block {number}");
    }
    assert_eq!(seek(&file, SeekFrom::Hole(0)), Ok(4 * STEP));
    let data = seek(&file, SeekFrom::Data(4 * STEP)).unwrap();
    assert!((8 * STEP..=9 * STEP).contains(&data), "{data}");
    assert_eq!(seek(&file, SeekFrom::Data(16 * STEP)), Err(Errno::NXIO));
    assert_eq!(seek(&file, SeekFrom::End(0)), Ok(DISK_BYTES));
    drop(file);
    stage.stop();
}

#[test]
fn operation_that_a_disk_lacks_is_refused_by_name() {
    let Some(stage) = Stage::new("") else { return };
    let file = stage.open();
    let errno = |done: io::Result<()>| done.expect_err("refused").raw_os_error();
    let named = |errno: Errno| Some(errno.raw_os_error());
    let buffered = File::options().write(true).open(stage.path()).unwrap();
    assert_eq!(errno(buffered.write_all_at(&[1; 100], 0)), named(Errno::INVAL));
    assert_eq!(
        errno(file.write_all_at(&aligned(0).0, DISK_BYTES)),
        named(Errno::NOSPC)
    );
    assert_eq!(errno(file.set_len(STEP)), named(Errno::INVAL));
    let grows = fallocate(&file, FallocateFlags::ZERO_RANGE, DISK_BYTES - STEP, 2 * STEP);
    assert_eq!(grows, Err(Errno::NOSPC));
    let kept = fallocate(&file, FallocateFlags::empty(), 0, STEP);
    assert_eq!(kept, Err(Errno::OPNOTSUPP));
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    assert_eq!(
        errno(std::fs::set_permissions(stage.path(), mode)),
        named(Errno::PERM)
    );
    drop((file, buffered));
    stage.stop();
}

#[test]
fn size_is_the_disks_whoever_empties_the_file_or_writes_across_its_end() {
    let Some(stage) = Stage::new("") else { return };
    let mut options = File::options();
    let emptied = options.write(true).truncate(true).open(stage.path()).unwrap();
    assert_eq!(emptied.metadata().unwrap().len(), DISK_BYTES);
    let file = stage.open();
    let mut across = Box::new(Aligned([7; 2 * BLOCK]));
    let last = DISK_BYTES - STEP;
    assert_eq!(file.write_at(&across.0, last).unwrap(), BLOCK);
    assert_eq!(file.read_at(&mut across.0, last).unwrap(), BLOCK);
    assert_eq!(file.read_at(&mut across.0, DISK_BYTES).unwrap(), 0);
    // From here on the kernel caches the size for a second.
    assert_eq!(file.metadata().unwrap().len(), DISK_BYTES);
    let known = Instant::now();
    let control = format!("unix:{}", stage.scratch.word("control.sock"));
    let mut grow = Command::new(program());
    grow.args(["ctl", "--socket", &control, "resize", "vm1", "96M"]);
    assert!(grow.status().expect("it starts").success());
    // The reactor tells the kernel in its next turn, before the cached size is a second old.
    while file.metadata().unwrap().len() != 96 << 20 {
        assert!(
            known.elapsed() < Duration::from_millis(900),
            "the size is as it was"
        );
        std::thread::sleep(Duration::from_millis(1));
    }
    drop((emptied, file));
    stage.stop();
}

#[test]
fn read_only_disk_can_be_read_and_nothing_else() {
    let Some(stage) = Stage::new(",ro=on") else { return };
    let opened = File::options().write(true).open(stage.path());
    assert_eq!(
        opened.map(drop).unwrap_err().kind(),
        io::ErrorKind::ReadOnlyFilesystem
    );
    let mut byte = [1];
    File::open(stage.path()).unwrap().read_exact(&mut byte).unwrap();
    assert_eq!(byte, [0]);
    stage.stop();
}

#[test]
fn disk_may_take_the_place_of_its_own_image() {
    if !may_mount() {
        return;
    }
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    let image = stage.scratch.image("disk", DISK_BYTES);
    stage.serve(&format!("name=vm1,file={image}"));
    stage.open().write_all_at(&aligned(3).0, 3 * STEP).unwrap();
    stage.daemon.take().expect("it serves").stop();
    let mut read = [0; BLOCK];
    let image = File::open(stage.path()).unwrap();
    image.read_exact_at(&mut read, 3 * STEP).unwrap();
    assert!(read == aligned(3).0, "the image has what was written to the disk");
}

#[test]
fn drive_that_does_not_answer_at_a_hangup_holds_up_neither_changes_nor_the_end() {
    let Some(mut far) = Stage::new("") else { return };
    let scratch = Scratch::new();
    let (image, control) = (far.word(), format!("unix:{}", scratch.word("control.sock")));
    let disks = [format!("name=far,file={image}"), "name=near,ram=1M".to_owned()];
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let words = [
        "--disk",
        &disks[0],
        "--disk",
        &disks[1],
        "--nbd",
        &nbd,
        "--control",
        &control,
    ];
    let mut daemon = Daemon::start(&words);
    let ctl = |words: &[&str]| {
        let mut command = Command::new(program());
        command.args(["ctl", "--socket", &control]).args(words);
        output_within(&mut command, Duration::from_secs(10))
    };
    far.daemon().pause();
    // The kernel uses the cached size for a while without a request.
    let start = Instant::now();
    while !asks(&daemon) {
        daemon.signal(Signal::HUP);
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "the drive is not asked: no test"
        );
        std::thread::sleep(Duration::from_millis(100));
    }
    let output = ctl(&["add", "disk", "more", "ram=1M"]);
    assert!(output.status.success(), "{output:?}");
    daemon.signal(Signal::TERM);
    let is_seen = daemon.wait_for(Duration::from_secs(10), |line| line.contains("shutting down"));
    far.daemon().signal(Signal::CONT);
    assert!(is_seen, "{}", daemon.said());
    assert!(
        daemon.ended_within(Duration::from_secs(20)).success(),
        "{}",
        daemon.said()
    );
    far.stop();
}

/// Whether a thread of the daemon waits for an answer about a file.
fn asks(daemon: &Daemon) -> bool {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", daemon.id())).expect("our own child");
    let mut waits = tasks.filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("wchan")).ok());
    waits.any(|at| at.contains("request_wait_answer"))
}

#[test]
fn address_that_is_no_file_or_is_in_use_is_refused() {
    let Some(stage) = Stage::new("") else { return };
    let refused = |path: &str| {
        let words = [
            "serve",
            "--disk",
            "name=b,ram=1M",
            "--control",
            "none",
            "--fuse",
            path,
        ];
        let said = Command::new(program()).args(words).output().expect("it starts");
        assert!(!said.status.success());
        String::from_utf8_lossy(&said.stderr).into_owned()
    };
    let said = refused(&stage.word());
    assert!(said.contains("another daemon serves there"), "{said}");
    let said = refused("/tmp");
    assert!(said.contains("something else than a regular file"), "{said}");
    let said = refused("/nowhere/disk");
    assert!(said.contains("its directory cannot be found"), "{said}");
    let said = refused("/tmp/");
    assert!(said.contains("fuse needs the path of a file"), "{said}");
    stage.stop();
}

#[test]
fn two_disks_at_one_file_are_refused_however_it_is_written() {
    let scratch = Scratch::new();
    let (first, again) = (scratch.word("disk"), scratch.word("./disk"));
    for other in [&first, &again] {
        let words = ["serve", "--check", "--disk", "name=a,ram=1M", "--control", "none"];
        let mut command = Command::new(program());
        command.args(words).args(["--fuse", &first, "--fuse", other]);
        let output = command.output().expect("it starts");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(
            !output.status.success() && said.contains("is taken twice"),
            "{other}: {said}"
        );
    }
}

/// A block that contains its place, aligned for direct I/O.
fn aligned(number: u64) -> Box<Aligned> {
    aligned_of(number, 1)
}

/// The same with another generation.
fn aligned_of(number: u64, generation: u64) -> Box<Aligned> {
    let mut aligned = Box::new(Aligned([0; BLOCK]));
    aligned.0.copy_from_slice(&block(number, generation));
    aligned
}

/// Aligned for direct I/O.
#[repr(align(4096))]
struct Aligned<const BYTES: usize = BLOCK>([u8; BYTES]);

const DISK_BYTES: u64 = 64 << 20;
/// The size of a block, as an offset.
const STEP: u64 = BLOCK as u64;
