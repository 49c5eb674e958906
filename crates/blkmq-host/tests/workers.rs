//! Tests that the kernel has no more threads for operations that would block than configured.

use blkmq_host::ring::{RingConfig, RingHandle};

#[test]
fn limit_of_one_worker_is_kept_whatever_waits_for_it() {
    let ring = RingHandle::new(RingConfig::default()).expect("io_uring is available");
    ring.limit_workers(1).expect("the kernel takes it");
    let client = ring.open_client();
    (0..ENTRIES).for_each(|user| client.push_nop_for_worker(user));
    let mut ended = Vec::new();
    while ended.len() < ENTRIES as usize {
        ring.wait(None);
        ring.reap();
        client.take(&mut ended);
    }
    // The kernel names its workers like this, and keeps the last one.
    let name = format!("iou-wrk-{}", rustix::thread::gettid());
    let tasks = std::fs::read_dir("/proc/self/task").expect("there are some");
    let names = tasks
        .flatten()
        .flat_map(|task| std::fs::read_to_string(task.path().join("comm")));
    assert_eq!(names.filter(|found| found.trim() == name).count(), 1);
}

const ENTRIES: u64 = 64;
