//! Decides that a daemon which is changed over and over keeps nothing of what was, and that its clients do not notice.
//!
//! `BLKMQ_CHANGES=10000 cargo test -p blkmq --release --test end_to_end control::random` is the long form.

use std::time::{Duration, Instant};

use serde_json::json;

use super::{Stage, add, names, remove, set};
use crate::common::Daemon;
use crate::upgrade::load::Load;

#[test]
fn random_changes_beside_clients_leave_nothing_behind() {
    let changes: u64 = std::env::var("BLKMQ_CHANGES").map_or(600, |text| text.parse().expect("a number"));
    let stage = Stage::new(&[]);
    let load = Load::start(&stage.nbd(), "vm1", 2);
    let mut control = stage.control();
    for number in 0..4 {
        stage.scratch.image(&format!("d{number}.raw"), 1 << 20);
    }
    let mut seed = 1_u64;
    let mut draw = |limit: u64| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (seed >> 33) % limit
    };
    let mut refused = 0;
    let (mut settled, mut worst) = (None, Duration::ZERO);
    for number in 0..changes {
        if number == changes / 3 {
            settled = Some(costs(&stage.daemon));
            load.forget_slowest();
        }
        let disk = format!("d{}", draw(4));
        let start = Instant::now();
        let done = match draw(8) {
            0 | 1 => add(
                &mut control,
                "disk",
                &disk,
                &json!({"file": stage.scratch.word(&format!("{disk}.raw"))}),
            ),
            2 | 3 => remove(&mut control, "disk", &disk),
            4 => set(&mut control, "group", "/vm1", &json!({"weight": draw(1100)})),
            5 => set(
                &mut control,
                "disk",
                "vm1",
                &json!({"sched": SCHEDS[draw(4) as usize]}),
            ),
            6 => add(
                &mut control,
                "disk",
                &format!("r{}", draw(3)),
                &json!({"ram": "1M", "group": GROUPS[draw(3) as usize]}),
            ),
            _ => remove(&mut control, "disk", &format!("r{}", draw(3))),
        };
        worst = worst.max(start.elapsed());
        refused += u64::from(done.is_err());
    }
    for disk in names(&mut control).iter().filter(|name| *name != "vm1") {
        remove(&mut control, "disk", disk).expect("it can be removed");
    }
    let slowest = load.slowest();
    let done = load.stop();
    eprintln!(
        "{changes} changes beside {done} requests, {refused} refused; the slowest change {worst:?}, the slowest batch of 16 requests {slowest:?}"
    );
    assert!(
        refused > changes / 10 && refused < changes * 9 / 10,
        "{refused} of {changes} refused"
    );
    let (before, after) = (settled.expect("there are some"), costs(&stage.daemon));
    assert!(
        after.descriptors <= before.descriptors,
        "descriptors: {before:?}, {after:?}"
    );
    assert!(after.threads <= before.threads, "threads: {before:?}, {after:?}");
    assert!(
        after.memory_kib <= before.memory_kib * 5 / 4 + 2048,
        "memory: {before:?}, {after:?}"
    );
    stage.daemon.stop();
}

#[derive(Debug)]
struct Costs {
    descriptors: usize,
    threads: usize,
    memory_kib: u64,
}

fn costs(daemon: &Daemon) -> Costs {
    let list = |what: &str| {
        let dir = format!("/proc/{}/{what}", daemon.id());
        std::fs::read_dir(dir).expect("our own child's").flatten()
    };
    // The kernel's workers for a ring come and go.
    let is_own = |task: &std::fs::DirEntry| {
        std::fs::read_to_string(task.path().join("comm")).is_ok_and(|name| !name.starts_with("iou-"))
    };
    Costs {
        descriptors: list("fd").count(),
        threads: list("task").filter(is_own).count(),
        memory_kib: daemon.memory_kib(),
    }
}

const SCHEDS: [&str; 4] = ["bfq", "kyber", "mq-deadline", "cfq"];
const GROUPS: [&str; 3] = ["/x", "/y/z", "bad"];
