//! Measures what an attached thread costs per I/O on a null disk that completes inline.
//!
//! Question: how many 4 KiB random reads can one thread do, the generator of the load included, at depths 1
//! to 256, alone or beside others, and through mapped disks? Run it with
//! `cargo run --release -p blkmq-host --example null_iops [ELEVATOR [THREADS [KIB]]]`; `blkmq-lab bench engine` is the full
//! bench. The disks take turns: a null disk, and a linear and a striped one over four of the same queue, in chunks of
//! 64 KiB. Reads have KIB, 4 by default.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::GroupId;
use blkmq_core::mapper::table::MapKind;
use blkmq_core::sched;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::mapped::{MapConfig, MappedSpec, Member};
use blkmq_host::{Attached, DiskEntry, Engine, EngineConfig, QueueSpec};

fn main() {
    let mut args = std::env::args().skip(1);
    let elevator = args
        .next()
        .and_then(|name| sched::Registry::default().get(&name))
        .unwrap_or_default();
    let threads: usize = args.next().and_then(|count| count.parse().ok()).unwrap_or(1);
    let kib: u64 = args.next().and_then(|kib| kib.parse().ok()).unwrap_or(4);
    let device = NullDevice::new(NullConfig::bare(), &[SIZE; 4]).expect("a null drive");
    let mut spec = QueueSpec::new("null", Arc::new(device));
    spec.elevator = elevator;
    spec.requests_per_reactor = 1024;
    spec.disks.extend(["null", "b", "c", "d"].map(|name| DiskEntry {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        size: SIZE,
        read_only: false,
        group: GroupId(0),
        block_size: 512,
    }));
    let linear = over_all(MapKind::Linear, Some(1 << 30));
    let striped = over_all(MapKind::Striped { chunk: 64 << 10 }, None);
    let config = EngineConfig {
        attached_max: threads,
        queues: vec![spec],
        mapped: vec![mapped("linear", linear), mapped("striped", striped)],
        ..EngineConfig::default()
    };
    let engine = Engine::start(config).expect("an engine");
    for depth in [1, 16, 64, 256] {
        let mut rates = DISKS.map(|_| Vec::new());
        for _ in 0..ROUNDS {
            for (name, rates) in DISKS.iter().zip(&mut rates) {
                std::thread::scope(|scope| {
                    let one = || run(&mut engine.attach().expect("a handle"), name, depth, kib << 10);
                    let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
                    rates.extend(
                        running
                            .into_iter()
                            .map(|thread| thread.join().expect("a submitter")),
                    );
                });
            }
        }
        for (name, rates) in DISKS.iter().zip(rates) {
            let best = rates.iter().copied().fold(0.0, f64::max);
            println!(
                "{elevator} depth {depth}, {name}: best {best:.2} M I/Os per second of CPU, all {rates:.2?}"
            );
        }
    }
}

/// A mapped disk over a part of each null disk: the first `len` bytes, or all behind the first GiB, so that no part is in two.
fn over_all(kind: MapKind, len: Option<u64>) -> MapConfig {
    let member = |disk: &str| Member {
        disk: disk.to_owned(),
        start: if len.is_some() { 0 } else { 1 << 30 },
        len,
    };
    MapConfig {
        kind,
        members: ["null", "b", "c", "d"].map(member).into(),
    }
}

fn mapped(name: &str, map: MapConfig) -> MappedSpec {
    MappedSpec {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        map,
        read_only: false,
        block_size: None,
        group: GroupId(0),
    }
}

/// Keeps `depth` reads of a disk under way for a moment. Returns millions of them per second of this thread's CPU
/// time, so that other load on the machine matters less.
fn run(attached: &mut Attached, disk: &str, depth: u32, len: u64) -> f64 {
    let (queue, id, size) = {
        let disk = attached.disk(disk).expect("it is there");
        (disk.queue, disk.id, disk.size)
    };
    let mut out: Vec<Bio> = Vec::with_capacity(depth as usize);
    let (mut position, mut ended) = (1u64, 0u64);
    let (start, cpu_before) = (Instant::now(), cpu_ns());
    while start.elapsed() < Duration::from_millis(250) {
        for _ in 0..CHECK_EVERY {
            while attached.outstanding() < depth {
                position = position.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let read = Bio {
                    op: Op::Read,
                    disk: id,
                    offset: (position >> 33) % (size / len) * len,
                    len,
                    ..Bio::default()
                };
                attached.submit(queue, read).expect("room for a read");
            }
            ended += attached.poll(&mut out) as u64;
            out.clear();
        }
    }
    ended as f64 / (cpu_ns() - cpu_before) as f64 * 1e3
}

fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

const SIZE: u64 = 1 << 34;
const CHECK_EVERY: u32 = 64;
const DISKS: [&str; 3] = ["null", "linear", "striped"];
const ROUNDS: u32 = 4;
