//! Tests disks and queues that are added and removed while others are in use.

mod common;

use std::fs::File;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_drivers::file::{FileConfig, FileDevice, FileDisk};
use blkmq_drivers::null::NullConfig;
use blkmq_host::disk::{Disk, Use};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use blkmq_host::{Control, DiskEntry, Engine, EngineConfig, QueueId, QueueSpec};

use common::{engine, queue};

const SIZE: u64 = 4 << 20;
const SOON: Nanos = Nanos::from_millis(100);
const LONG: Nanos = Nanos::from_secs(20);

/// The counts of a user of a disk.
#[derive(Default)]
struct Counts {
    ended: AtomicU64,
    failed: AtomicU64,
}

/// Zeroes and flushes a disk until it is told to release it, if it obeys that.
struct User {
    disk: Disk,
    entered: Option<Use>,
    listens: bool,
    counts: Arc<Counts>,
    submitted: u64,
    is_over: bool,
}

impl User {
    fn submit(&mut self, cx: &mut Cx<'_>) {
        self.is_over |= self.listens && self.entered.as_ref().is_none_or(Use::is_to_end);
        while !self.is_over && cx.outstanding() < 8 {
            let (op, offset, len) = match self.submitted % 7 {
                0 => (Op::Flush, 0, 0),
                _ => (Op::WriteZeroes, self.submitted * 4096 % SIZE, 4096),
            };
            let bio = Bio {
                op,
                disk: self.disk.id,
                offset,
                len,
                ..Bio::default()
            };
            if cx.submit(self.disk.queue, bio).is_err() {
                return;
            }
            self.submitted += 1;
        }
    }
}

impl Service for User {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.entered = self.disk.users.enter(cx.waker());
        self.submit(cx);
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.counts.ended.fetch_add(1, Ordering::Relaxed);
        let has_failed = u64::from(!bio.status.is_ok());
        self.counts.failed.fetch_add(has_failed, Ordering::Relaxed);
        self.submit(cx);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn drain(&mut self, _cx: &mut Cx<'_>) {
        self.is_over = true;
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }
}

/// Uses a disk from a reactor.
fn use_disk(engine: &Engine, disk: &Disk, reactor: u16, listens: bool) -> Arc<Counts> {
    let counts = Arc::new(Counts::default());
    let user = User {
        disk: disk.clone(),
        entered: None,
        listens,
        counts: Arc::clone(&counts),
        submitted: 0,
        is_over: false,
    };
    engine.add_service(ReactorId(reactor), Box::new(move || Box::new(user)));
    counts
}

fn wait_for(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(20), "{what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until more of a user's requests have ended.
fn goes_on(counts: &Counts) {
    let before = counts.ended.load(Ordering::Relaxed);
    wait_for("a user goes on", || {
        counts.ended.load(Ordering::Relaxed) > before + 50
    });
    assert_eq!(counts.failed.load(Ordering::Relaxed), 0);
}

/// A directory for images, which is removed when this is dropped.
struct Images(PathBuf);

impl Images {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("blkmq-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        Self(dir)
    }

    fn open(&self, name: &str) -> FileDisk {
        let path = self.0.join(name);
        File::create(&path).unwrap().set_len(SIZE).unwrap();
        let config = FileConfig {
            path,
            ..FileConfig::default()
        };
        FileDisk::open(&config).unwrap()
    }
}

impl Images {
    /// How many open descriptors of this process are of files in it.
    fn open_descriptors(&self) -> usize {
        let all = std::fs::read_dir("/proc/self/fd").unwrap().flatten();
        let of = all.filter_map(|fd| std::fs::read_link(fd.path()).ok());
        of.filter(|path| path.starts_with(&self.0)).count()
    }
}

impl Drop for Images {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn entry(name: &str) -> DiskEntry {
    DiskEntry {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        size: SIZE,
        read_only: false,
        group: GroupId(0),
        block_size: 4096,
    }
}

/// An engine with a queue of one disk in a file.
fn on_files(images: &Images, elevator: &'static ElevatorType) -> Engine {
    let device = FileDevice::new(vec![images.open("first")], 32).unwrap();
    let mut spec = QueueSpec::new("files", Arc::new(device));
    spec.elevator = elevator;
    spec.tags = blkmq_core::queue::TagMode::Shared(32);
    spec.disks.push(entry("first"));
    Engine::start(EngineConfig {
        reactors: 2,
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap()
}

fn add(control: &Control, images: &Images, name: &str) -> Disk {
    let opened = Box::new(images.open(name));
    control.add_disk(QueueId(0), entry(name), opened).unwrap()
}

#[test]
fn disks_come_and_go_on_a_queue_in_use() {
    for elevator in [sched::NONE, sched::MQ_DEADLINE, sched::BFQ] {
        let images = Images::new(&format!("come-and-go-{elevator}"));
        let engine = on_files(&images, elevator);
        let control = engine.control();
        let first = use_disk(&engine, &engine.disk("first").unwrap(), 0, true);
        goes_on(&first);
        let before = images.open_descriptors();
        for round in 0..6 {
            let names: Vec<String> = (0..=round).map(|number| format!("d{number}")).collect();
            let disks: Vec<Disk> = names.iter().map(|name| add(&control, &images, name)).collect();
            let users: Vec<_> = (0..)
                .zip(&disks)
                .map(|(number, disk)| use_disk(&engine, disk, number % 2, true))
                .collect();
            users.iter().for_each(|user| goes_on(user));
            for name in names.iter().rev() {
                control.remove_disk(name, LONG).unwrap();
            }
            assert_eq!(engine.disks().len(), 1);
            goes_on(&first);
        }
        assert_eq!(images.open_descriptors(), before, "of removed disks");
        engine.shutdown(LONG).unwrap();
    }
}

#[test]
fn disk_that_somebody_keeps_is_not_removed_and_serves_on() {
    let images = Images::new("kept");
    let engine = on_files(&images, sched::NONE);
    let control = engine.control();
    let disk = add(&control, &images, "second");
    let counts = use_disk(&engine, &disk, 1, false);
    goes_on(&counts);
    let error = control.remove_disk("second", SOON).unwrap_err().to_string();
    assert!(
        error.contains("disk second: 1 client has not let it go"),
        "{error}"
    );
    goes_on(&counts);
    assert!(engine.disk("second").is_some());
    engine.shutdown(LONG).unwrap();
}

#[test]
fn bio_for_a_removed_disk_is_refused() {
    let images = Images::new("removed");
    let engine = on_files(&images, sched::NONE);
    let control = engine.control();
    let disk = add(&control, &images, "second");
    control.remove_disk("second", LONG).unwrap();
    let counts = use_disk(&engine, &disk, 0, false);
    wait_for("requests end", || counts.failed.load(Ordering::Relaxed) > 8);
    engine.shutdown(LONG).unwrap();
    let (failed, ended) = (&counts.failed, &counts.ended);
    assert_eq!(failed.load(Ordering::Relaxed), ended.load(Ordering::Relaxed));
}

#[test]
fn names_twice_other_drivers_and_changes_beside_attached_threads_are_refused() {
    let images = Images::new("refused");
    let engine = on_files(&images, sched::NONE);
    let control = engine.control();
    let twice = control.add_disk(QueueId(0), entry("first"), Box::new(images.open("x")));
    assert!(twice.unwrap_err().to_string().contains("one of this name"));
    let foreign = control.add_disk(QueueId(0), entry("other"), Box::new(5));
    assert!(foreign.unwrap_err().to_string().contains("disks in files alone"));
    let gone = control.remove_disk("nobody", SOON);
    assert!(gone.unwrap_err().to_string().contains("no such disk"));
    assert_eq!(engine.disks().len(), 1);
    engine.shutdown(LONG).unwrap();

    let attached = common::engine(1, 1, NullConfig::bare(), sched::NONE);
    let refused = attached.control().ask_size("q", None).err();
    assert!(refused.is_some_and(|error| error.to_string().contains("attached")));
}

#[test]
fn queues_come_and_go_and_their_numbers_are_used_again() {
    let engine = engine(2, 0, NullConfig::bare(), sched::NONE);
    let control = engine.control();
    let first = use_disk(&engine, &engine.disk("q").unwrap(), 0, true);
    for round in 0..20 {
        let elevator = [sched::NONE, sched::BFQ, sched::KYBER][round % 3];
        let id = control
            .add_queue(queue("more", NullConfig::bare(), elevator))
            .unwrap();
        assert_eq!(id, QueueId(1));
        let twice = control.add_queue(queue("more", NullConfig::bare(), elevator));
        assert!(twice.unwrap_err().to_string().contains("one of this name"));
        let users = [0, 1].map(|reactor| use_disk(&engine, &engine.disk("more").unwrap(), reactor, true));
        users.iter().for_each(|user| goes_on(user));
        assert!(
            control
                .remove_queue(id)
                .unwrap_err()
                .to_string()
                .contains("has disks")
        );
        control.remove_disk("more", LONG).unwrap();
        control.remove_queue(id).unwrap();
        assert!(control.queue("more").is_err());
        goes_on(&first);
    }
    engine.shutdown(LONG).unwrap();
}

#[test]
fn queue_whose_drive_cannot_be_opened_leaves_nothing_behind() {
    let engine = engine(2, 0, NullConfig::bare(), sched::NONE);
    let control = engine.control();
    let null = NullConfig {
        setup_failure: Some(1),
        ..NullConfig::bare()
    };
    let error = control.add_queue(queue("bad", null, sched::NONE)).unwrap_err();
    assert!(error.to_string().contains("queue bad: "), "{error}");
    assert_eq!((control.queues().len(), engine.disks().len()), (1, 1));
    assert_eq!(
        control
            .add_queue(queue("good", NullConfig::bare(), sched::NONE))
            .unwrap(),
        QueueId(1)
    );
    engine.shutdown(LONG).unwrap();
}
