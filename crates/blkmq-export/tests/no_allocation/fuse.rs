//! The same on disks that are files: four threads read, write, flush and zero with direct I/O.

use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, CONNECTIONS_MAX, Common};
use blkmq_export::front_door::{self, DiskName, Given, Offer, Served};
use blkmq_export::keys::{Keys, Value};
use blkmq_host::engine::Engine;
use rustix::fs::{FallocateFlags, OFlags, fallocate};

use super::{TRIES, engine, sys};

/// Rounds of each thread.
pub(super) const ROUNDS: usize = 150;
const THREADS: usize = 4;
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const LONG: usize = 256 << 10;

/// Says whether a disk can be mounted here.
pub(super) fn may_mount() -> bool {
    let device = File::options().read(true).write(true).open("/dev/fuse");
    device.is_ok() && rustix::process::geteuid().is_root()
}

/// Enables FUSE over io_uring in the kernel. Returns the earlier setting, or none if it cannot be
/// set.
pub(super) fn switch_rings_on() -> Option<String> {
    let before = std::fs::read_to_string(SWITCH).ok()?;
    std::fs::write(SWITCH, "1").ok()?;
    Some(before)
}

/// Restores the earlier setting.
pub(super) fn switch_rings(to: &str) {
    std::fs::write(SWITCH, to.trim()).unwrap();
}

/// Counts the allocations while two disks are used.
pub(super) fn count(source: &str, elevator: &'static ElevatorType, dir: &Path, has_rings: bool) -> u64 {
    let engine = engine(source, elevator, dir);
    let common = Arc::new(Common::new(64 << 20, CONNECTIONS_MAX));
    let place = dir.join("{disk}.fuse");
    let served = serve(&engine, &place, &common, has_rings);
    let count = std::thread::scope(|scope| {
        let (barrier, is_over) = (Barrier::new(THREADS + 1), AtomicBool::new(false));
        let (barrier, is_over) = (Arc::new(barrier), Arc::new(is_over));
        for number in 0..THREADS {
            let (barrier, is_over) = (Arc::clone(&barrier), Arc::clone(&is_over));
            let file = open(&dir.join(["a.fuse", "b.fuse"][number % 2]));
            scope.spawn(move || run(&file, number, &barrier, &is_over));
        }
        let all = || {
            let before = sys::allocations();
            barrier.wait();
            barrier.wait();
            sys::allocations() - before
        };
        // Until buffers and lists have grown to what they need.
        all();
        let count = (0..TRIES).map(|_| all()).find(|count| *count == 0);
        is_over.store(true, Ordering::Relaxed);
        barrier.wait();
        count.unwrap_or(1)
    });
    served.iter().for_each(|served| served.close());
    engine.shutdown(Nanos::from_secs(10)).unwrap();
    count
}

fn serve(engine: &Engine, place: &Path, common: &Arc<Common>, has_rings: bool) -> Vec<Box<dyn Served>> {
    let door = front_door::find("fuse").expect("it is built in");
    let io_uring = Value::Text(if has_rings { "on" } else { "off" }.to_owned());
    let table = Keys::from_iter([("io_uring".to_owned(), io_uring)]);
    let place = place.display().to_string();
    let address = door
        .parse(&Given {
            table: &table,
            ..Given::new(&place)
        })
        .unwrap();
    let opened = address
        .open(
            &["a", "b"].map(|disk| DiskName { disk, group: "/" }),
            &common.handover,
        )
        .unwrap();
    let offer = Offer {
        disks: None,
        admitted: AddressLimits::default(),
        at: &*address,
    };
    let serve = opened
        .into_iter()
        .map(|one| one.serve(engine, offer.clone(), common));
    serve.collect::<Result<_, _>>().unwrap()
}

fn open(path: &PathBuf) -> File {
    let mut options = File::options();
    options
        .read(true)
        .write(true)
        .custom_flags(OFlags::DIRECT.bits() as i32);
    options.open(path).unwrap()
}

fn run(file: &File, number: usize, barrier: &Barrier, is_over: &AtomicBool) {
    let mut buffer = Box::new(Buffer([number as u8; LONG]));
    loop {
        barrier.wait();
        if is_over.load(Ordering::Relaxed) {
            return;
        }
        for round in 0..ROUNDS {
            use_once(file, (number * 8 + round % 8) as u64 * LONG as u64, &mut buffer.0);
        }
        barrier.wait();
    }
}

/// One of each operation that does not wait, in sizes that use a small buffer and a large one.
fn use_once(file: &File, at: u64, buffer: &mut [u8]) {
    for bytes in [4096, 12 << 10, buffer.len()] {
        file.write_all_at(&buffer[..bytes], at).unwrap();
        file.read_exact_at(&mut buffer[..bytes], at).unwrap();
    }
    file.sync_data().unwrap();
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    fallocate(file, punch, at, 8192).unwrap();
    fallocate(file, FallocateFlags::ZERO_RANGE, at + 8192, 4096).unwrap();
}

/// Requests of one round.
pub(super) const REQUESTS: usize = THREADS * ROUNDS * 9;

/// Aligned for direct I/O.
#[repr(align(4096))]
struct Buffer([u8; LONG]);
