//! Tests that an idle engine uses no CPU time. It is a binary of its own, since it measures the
//! whole process.

mod common;

use std::time::Duration;

use blkmq_core::sched;
use blkmq_drivers::null::NullConfig;
use blkmq_host::{Engine, EngineConfig};

#[test]
fn idle_engine_with_a_hundred_disks_uses_no_processor_time() {
    let queues = (0..100)
        .map(|disk| {
            let elevator = sched::BUILT_IN[disk % sched::BUILT_IN.len()];
            let null = NullConfig {
                // Every other disk is polled: with nothing in flight that must cost nothing,
                // either.
                poll_queues: (disk % 2) as u16 * 2,
                ..NullConfig::default()
            };
            let mut spec = common::queue(&format!("q{disk}"), null, elevator);
            spec.requests_per_reactor = 16;
            spec
        })
        .collect();
    let engine = Engine::start(EngineConfig {
        reactors: 2,
        queues,
        ..EngineConfig::default()
    })
    .unwrap();
    std::thread::sleep(Duration::from_millis(100));
    let before = cpu_ns();
    std::thread::sleep(Duration::from_secs(2));
    let used_us = (cpu_ns() - before) / 1000;
    // 0.1 % of a core; a reactor that spins, or wakes a thousand times a second, uses far more.
    assert!(
        used_us <= 2000,
        "{used_us} µs of processor time in 2 s of idleness"
    );
    drop(engine);
}

fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
