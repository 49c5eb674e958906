//! Decides nothing: measures what an attached thread costs per I/O on a null disk that completes inline.
//!
//! Question: how many 4 KiB random reads can one thread do, the generator of the load included, at depths 1
//! to 256, alone or beside others? Run it with
//! `cargo run --release -p blkmq-host --example null_iops [ELEVATOR [THREADS]]`; `blkmq bench engine` is the full
//! bench.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::GroupId;
use blkmq_core::sched::Kind;
use blkmq_host::driver::null::{NullConfig, NullDrive};
use blkmq_host::{Attached, DiskEntry, Engine, EngineConfig, QueueId, QueueSpec};

fn main() {
    let mut args = std::env::args().skip(1);
    let elevator = args
        .next()
        .and_then(|name| Kind::by_name(&name))
        .unwrap_or_default();
    let threads: usize = args.next().and_then(|count| count.parse().ok()).unwrap_or(1);
    let drive = NullDrive::new(NullConfig::bare(), &[SIZE]).expect("a null drive");
    let mut spec = QueueSpec::new("null", Arc::new(drive));
    spec.elevator = elevator;
    spec.requests_per_reactor = 1024;
    spec.disks.push(DiskEntry {
        name: "null".to_owned(),
        description: String::new(),
        size: SIZE,
        read_only: false,
        group: GroupId(0),
        block_size: 512,
    });
    let config = EngineConfig {
        attached_max: threads,
        queues: vec![spec],
        ..EngineConfig::default()
    };
    let engine = Engine::start(config).expect("an engine");
    for depth in [1, 16, 64, 256] {
        let rates: Vec<f64> = std::thread::scope(|scope| {
            let one = || {
                (0..5)
                    .map(|_| run(&mut engine.attach().expect("a seat"), depth))
                    .collect::<Vec<_>>()
            };
            let running: Vec<_> = (0..threads).map(|_| scope.spawn(one)).collect();
            running
                .into_iter()
                .flat_map(|thread| thread.join().expect("a submitter"))
                .collect()
        });
        let best = rates.iter().copied().fold(0.0, f64::max);
        println!("{elevator} depth {depth}: best {best:.1} M I/Os per second of CPU, all {rates:.1?}");
    }
}

/// Keeps `depth` reads under way for half a second. Returns millions of them per second of this thread's CPU
/// time, so that other load on the machine matters less.
fn run(attached: &mut Attached, depth: u32) -> f64 {
    let mut out: Vec<Bio> = Vec::with_capacity(depth as usize);
    let (mut position, mut ended) = (1u64, 0u64);
    let (start, cpu_before) = (Instant::now(), cpu_ns());
    while start.elapsed() < Duration::from_millis(500) {
        for _ in 0..CHECK_EVERY {
            while attached.outstanding() < depth {
                position = position.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                let read = Bio {
                    op: Op::Read,
                    offset: (position >> 33) % (SIZE / 4096) * 4096,
                    len: 4096,
                    ..Bio::default()
                };
                attached.submit(QueueId(0), read).expect("room for a read");
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
