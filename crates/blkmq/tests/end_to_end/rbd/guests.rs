//! Tests whether virtual machines can use disks in a cluster like any others: every operation, growth under a
//! guest, and load that continues when the OSD or the daemon is stopped or killed.

use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::cluster::{Ceph, Image};
use crate::common::nbd::Client as Nbd;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};
use crate::vhost_user::{Driver, RECORD_BYTES, Ring, attached, blk_cases, send_record};
use blkmq_testkit::vhost_user::FrontEnd as Guest;

/// A daemon with an image behind both front doors.
struct Stage<'a> {
    scratch: Scratch,
    ceph: &'a Ceph,
    image: Image<'a>,
}

impl<'a> Stage<'a> {
    fn new(ceph: &'a Ceph, name: &'static str, size: &str) -> Self {
        let (scratch, image) = (Scratch::new(), ceph.image(name, size));
        Self { scratch, ceph, image }
    }

    fn start(&self) -> Daemon {
        let disk = self.ceph.disk("vm", self.image.name, "");
        let guests = format!("unix:{}", self.scratch.word("{disk}.sock"));
        let nbd = format!("unix:{}", self.scratch.word("nbd.sock"));
        Daemon::start(&["--disk", &disk, "--vhost-user", &guests, "--nbd", &nbd])
    }

    fn guest(&self) -> PathBuf {
        self.scratch.path("vm.sock")
    }

    fn nbd(&self) -> Nbd {
        Nbd::connect(&self.scratch.path("nbd.sock"), "vm").expect("it is served")
    }

    /// Compares Ceph's image with what a driver wrote last.
    fn verify(&self, driver: &Driver) {
        self.ceph
            .export(self.image.name, &self.scratch.word("exported.raw"));
        driver.verify_image(&self.scratch.path("exported.raw"));
    }
}

#[test]
fn client_of_others_finds_its_data_in_a_cluster() {
    let Some(ceph) = Ceph::find() else { return };
    let stage = Stage::new(&ceph, "attached", "16M");
    let daemon = stage.start();
    attached::find_data(&stage.guest(), DISK_BYTES);
    daemon.stop();
}

#[test]
fn cases_of_qemus_test_pass_on_a_cluster() {
    let Some(ceph) = Ceph::find() else { return };
    let stage = Stage::new(&ceph, "cases", "16M");
    let daemon = stage.start();
    blk_cases::discards_and_zeroing(&stage.guest(), DISK_BYTES);
    blk_cases::table_of_its_own(&stage.guest());
    daemon.stop();
    let stage = Stage::new(&ceph, "plugged", "16M");
    let daemon = stage.start();
    blk_cases::plug_and_unplug(&stage.guest());
    daemon.stop();
}

#[test]
fn size_of_an_object_is_what_guests_are_told_is_best_and_can_be_discarded() {
    let Some(ceph) = Ceph::find() else { return };
    let scratch = Scratch::new();
    let image = ceph.image_with("objects", "16M", &["--object-size", "1M"]);
    let stage = Stage {
        scratch,
        ceph: &ceph,
        image,
    };
    let daemon = stage.start();
    let mut guest = Guest::connect(&stage.guest());
    // Offset, bytes, flags, and room for the answer.
    let mut asked = [0_u32, 60, 0].map(u32::to_ne_bytes).concat();
    asked.extend([0; 60]);
    guest.send(GET_CONFIG, &asked, &[]);
    let space = guest.reply().split_off(12);
    let word = |at: usize| u32::from_le_bytes(space[at..at + 4].try_into().expect("four bytes"));
    let (blocks, optimal, discard) = (word(20), word(28), word(44));
    assert_eq!((blocks * optimal, 512 * discard), (1 << 20, 1 << 20));
    drop(guest);
    if installed(&["nbdinfo"]) {
        // NBD's preferred block is the smallest that is not slower for its size, which is smaller
        // than an object.
        let info = run("nbdinfo", &["--json", &daemon.uri("vm")]).stdout;
        let info: serde_json::Value = serde_json::from_str(&info).expect("JSON");
        assert_eq!(info["exports"][0]["block_size_preferred"], 4096, "{info}");
    }
    daemon.stop();
}

#[test]
fn guest_is_told_that_its_image_has_grown_and_writes_at_the_new_end() {
    let Some(ceph) = Ceph::find() else { return };
    let stage = Stage::new(&ceph, "grows-under-a-guest", "16M");
    let daemon = stage.start();
    let mut guest = Guest::connect(&stage.guest());
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(LONG)).expect("a time limit");
    guest.send(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    guest.start();
    let mut there = stage.nbd();
    // Still beyond the end.
    let last = 2 * DISK_BYTES - BLOCK as u64;
    guest.request(0, OUT, last / 512);
    guest.offer(&[0]);
    assert_eq!((guest.used(1), guest.status(0)), (vec![0], 1));
    ceph.rbd(&["resize", "--no-progress", "--size", "32M", stage.image.name]);
    let mut message = [0; 12];
    (&ours).read_exact(&mut message).expect("the guest is told");
    assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    guest.request(3, OUT, last / 512);
    guest.offer(&[0, 3]);
    assert_eq!((guest.used(2), guest.status(3)), (vec![0, 3], 0));
    assert_eq!(guest.ask(GET_STATUS, &[]), 0);
    // An NBD client that was connected has the old end, and no error before it; a new client has
    // the new end.
    assert!(there.read(DISK_BYTES - BLOCK as u64, BLOCK).is_ok() && there.read(last, BLOCK).is_err());
    let mut newcomer = stage.nbd();
    assert_eq!(newcomer.size(), 2 * DISK_BYTES);
    newcomer
        .write(last, &block(1, 1))
        .expect("a write at the new end");
    drop(guest);
    daemon.stop();
}

#[test]
fn guest_goes_on_under_load_when_the_osd_was_stopped_or_killed() {
    let Some(ceph) = Ceph::find() else { return };
    let stage = Stage::new(&ceph, "faulty-osd", "16M");
    let daemon = stage.start();
    let mut driver = Driver::new(&stage.guest(), 1, Ring::SPLIT);
    driver.serve();
    for _ in 0..2 {
        driver.load_until(Instant::now() + Duration::from_millis(500));
        let stopped = ceph.stop_osd();
        // Answers of the OSD from before may still arrive.
        driver.load_until(Instant::now() + Duration::from_millis(500));
        let before = driver.ended();
        driver.load_until(Instant::now() + Duration::from_secs(2));
        assert_eq!(driver.ended(), before, "somebody else answers");
        drop(stopped);
        load_until_something_ends(&mut driver);
        if ceph.outlives_its_osd() {
            std::thread::scope(|scope| {
                scope.spawn(|| ceph.kill_and_start_osd(Duration::from_millis(500)));
                driver.load_until(Instant::now() + Duration::from_secs(1));
            });
            load_until_something_ends(&mut driver);
        }
    }
    driver.finish();
    daemon.stop();
    stage.verify(&driver);
}

#[test]
fn guest_goes_on_under_load_when_another_daemon_has_taken_the_lock_of_a_killed_one() {
    let Some(ceph) = Ceph::find() else { return };
    let stage = Stage::new(&ceph, "killed-under-load", "16M");
    let record = memfd_create("record", MemfdFlags::CLOEXEC).expect("memory");
    ftruncate(&record, RECORD_BYTES).expect("memory");
    let mut daemon = stage.start();
    let mut driver = Driver::new(&stage.guest(), 2, Ring::PACKED);
    let mut left = 0;
    for _ in 0..KILLS {
        send_record(&driver.client, &record);
        driver.client.start_at(driver.base());
        driver.load_until(Instant::now() + Duration::from_millis(300));
        daemon.kill();
        driver.take_ended();
        left += driver.in_flight();
        daemon = stage.start();
        driver.client.connect_again(&stage.guest());
    }
    send_record(&driver.client, &record);
    driver.client.start_at(driver.base());
    driver.finish();
    daemon.stop();
    stage.verify(&driver);
    println!(
        "{KILLS} kills, {left} requests in flight at them, {} requests",
        driver.ended()
    );
    assert!(left > 0, "no kill met a request in flight");
}

fn load_until_something_ends(driver: &mut Driver) {
    let (before, start) = (driver.ended(), Instant::now());
    while driver.ended() == before {
        assert!(start.elapsed() < LONG, "it does not go on");
        driver.load_until(Instant::now() + Duration::from_millis(50));
    }
}

const DISK_BYTES: u64 = 16 << 20;
/// Each takes the time after which the cluster forgets a daemon.
const KILLS: usize = 2;
const OUT: u32 = 1;
const GET_CONFIG: u32 = 24;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_STATUS: u32 = 40;
const LONG: Duration = Duration::from_secs(60);
