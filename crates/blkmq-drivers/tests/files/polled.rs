//! Tests that a polled disk keeps its data while polling is switched under load, and that its
//! device is polled (IOPOLL) where possible. It uses a file on this machine; with
//! `BLKMQ_POLLED_DEVICE` also a block device with poll queues (as in `cargo xtask guest`), whose
//! content is lost.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use blkmq_core::bio::{Bio, Flags, Op};
use blkmq_core::ids::GroupId;
use blkmq_core::poll::Wait;
use blkmq_core::time::Nanos;
use blkmq_drivers::file::{FileConfig, FileDevice, FileDisk};
use blkmq_host::{Attached, DiskEntry, Engine, EngineConfig, QueueId, QueueSpec};

use crate::sys::Page;

const Q: QueueId = QueueId(0);
/// Pages of each thread, and how many of them are under way at once.
const PAGES: u64 = 128;
const DEPTH: u32 = 16;
const THREADS: u64 = 2;
/// How many times each thread writes and reads all of its pages.
const ROUNDS: u64 = 12;

/// What the test writes to.
struct Target {
    path: PathBuf,
    is_scratch: bool,
}

impl Target {
    fn choose(name: &str) -> Self {
        if let Some(path) = std::env::var_os("BLKMQ_POLLED_DEVICE") {
            return Self {
                path: path.into(),
                is_scratch: false,
            };
        }
        let path = std::env::temp_dir().join(format!("blkmq-polled-{name}-{}", std::process::id()));
        let file = std::fs::File::create(&path).unwrap();
        file.set_len(THREADS * PAGES * 4096).unwrap();
        Self {
            path,
            is_scratch: true,
        }
    }

    /// Says whether its device has poll queues.
    fn has_poll_queues(&self) -> bool {
        let meta = std::fs::metadata(&self.path).unwrap();
        let number = if meta.file_type().is_block_device() {
            meta.rdev()
        } else {
            meta.dev()
        };
        let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
        let device = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
        let said = ["queue/io_poll", "../queue/io_poll"]
            .iter()
            .find_map(|place| std::fs::read_to_string(device.join(place)).ok());
        said.is_some_and(|said| said.trim() != "0")
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        if self.is_scratch {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn start(path: &Path, wait: Wait, io_poll: bool) -> (Engine, Arc<FileDevice>) {
    let config = FileConfig {
        path: path.to_owned(),
        ..FileConfig::default()
    };
    let disk = FileDisk::open(&config).unwrap();
    let entry = DiskEntry {
        name: "polled".to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        size: disk.size(),
        read_only: false,
        group: GroupId(0),
        block_size: disk.block_size(),
    };
    let device = Arc::new(FileDevice::new(vec![disk], 128).unwrap());
    let mut spec = QueueSpec::new("q", device.clone());
    spec.disks.push(entry);
    spec.io_poll = Some(io_poll);
    let engine = Engine::start(EngineConfig {
        attached_max: THREADS as usize,
        wait,
        queues: vec![spec],
        ..EngineConfig::default()
    });
    (engine.unwrap(), device)
}

/// Does `op` on all pages of a thread, many at a time, in an order that depends on the round.
fn carry_out(attached: &mut Attached, op: Op, thread: u64, round: u64, pages: &mut [Page]) {
    let mut out = Vec::new();
    for at in 0..PAGES {
        let page = (at * 37 + round * 11) % PAGES;
        let flags = if op == Op::Write && at % 32 == 0 {
            Flags::FUA
        } else {
            Flags::NONE
        };
        let bio = Bio {
            op,
            flags,
            offset: (thread * PAGES + page) * 4096,
            len: 4096,
            data: pages[page as usize].data(),
            cookie: page,
            ..Bio::default()
        };
        attached.submit(Q, bio).unwrap();
        while attached.outstanding() >= DEPTH {
            wait(attached, &mut out);
        }
    }
    while attached.outstanding() > 0 {
        wait(attached, &mut out);
    }
    assert_eq!(out.len() as u64, PAGES);
    assert!(out.iter().all(|bio| bio.status.is_ok()), "{op:?}, round {round}");
}

fn wait(attached: &mut Attached, out: &mut Vec<Bio>) {
    let ended = attached.wait(out, Some(Nanos::from_secs(20)));
    assert!(ended > 0, "{} requests never ended", attached.outstanding());
}

/// Writes, flushes, and verifies what was written.
fn verify(attached: &mut Attached, thread: u64, round: u64) {
    let byte = |page: u64| (page * 7 + round * 31 + thread) as u8;
    let mut pages: Vec<Page> = (0..PAGES).map(|page| Page::filled(byte(page))).collect();
    carry_out(attached, Op::Write, thread, round, &mut pages);
    let flush = Bio {
        op: Op::Flush,
        ..Bio::default()
    };
    attached.submit(Q, flush).unwrap();
    wait(attached, &mut Vec::new());
    let mut seen: Vec<Page> = (0..PAGES).map(|_| Page::filled(!0)).collect();
    carry_out(attached, Op::Read, thread, round, &mut seen);
    for (page, (seen, written)) in seen.iter().zip(&pages).enumerate() {
        assert!(
            seen.bytes() == written.bytes(),
            "page {page} of thread {thread}, round {round}"
        );
    }
}

#[test]
fn polled_disk_keeps_its_data_while_polling_is_switched_under_load() {
    let target = Target::choose("switched");
    for mode in Wait::ALL {
        let (engine, device) = start(&target.path, mode, false);
        let working = AtomicBool::new(true);
        thread::scope(|scope| {
            let threads: Vec<_> = (0..THREADS)
                .map(|thread| {
                    let engine = &engine;
                    scope.spawn(move || {
                        let mut attached = engine.attach().unwrap();
                        (0..ROUNDS).for_each(|round| verify(&mut attached, thread, round));
                    })
                })
                .collect();
            let control = engine.control();
            let working = &working;
            scope.spawn(move || {
                for turn in 0u64.. {
                    control.set_io_poll(Q, turn % 2 == 0).unwrap();
                    thread::sleep(Duration::from_micros(300 + turn % 7 * 200));
                    if !working.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
            let ended: Vec<_> = threads.into_iter().map(thread::ScopedJoinHandle::join).collect();
            working.store(false, Ordering::Relaxed);
            assert!(ended.iter().all(Result::is_ok), "wait={mode}");
        });
        let (polled, all) = (device.ended_polled(), THREADS * ROUNDS * PAGES * 2);
        assert_eq!(
            polled > 0,
            target.has_poll_queues(),
            "{polled} of {all} were polled"
        );
        assert!(polled < all, "all of {all} were polled");
        engine.shutdown(Nanos::from_secs(20)).unwrap();
    }
}

#[test]
fn device_is_polled_if_it_can_be_and_polling_is_on() {
    let target = Target::choose("counted");
    let can_be = target.has_poll_queues();
    assert!(
        can_be || target.is_scratch,
        "{:?} has no poll queues",
        target.path
    );
    let (engine, device) = start(&target.path, Wait::Auto, true);
    let control = engine.control();
    let mut attached = engine.attach().unwrap();
    verify(&mut attached, 0, 1);
    let polled = device.ended_polled();
    let how = control.describe_polling(Q).expect("it is polled");
    eprintln!("{how}");
    // One in 32 writes has FUA, which is never polled; neither is the flush.
    let expected = if can_be { 2 * PAGES - PAGES / 32 } else { 0 };
    assert_eq!(polled, expected, "{how}");
    assert_eq!(how.contains("the ring is looked at"), !can_be, "{how}");
    control.set_io_poll(Q, false).unwrap();
    verify(&mut attached, 0, 2);
    verify(&mut attached, 0, 3);
    let late = device.ended_polled() - polled;
    assert!(
        late <= PAGES,
        "{late} requests were polled after it was switched off"
    );
    assert_eq!(control.describe_polling(Q), None);
    control.set_io_poll(Q, true).unwrap();
    verify(&mut attached, 0, 4);
    verify(&mut attached, 0, 5);
    assert_eq!(device.ended_polled() - polled > late, can_be);
    drop(attached);
    engine.shutdown(Nanos::from_secs(20)).unwrap();
}
