//! Tests that a daemon which is changed repeatedly keeps nothing of earlier states, and that its clients do
//! not notice.
//!
//! `BLKMQ_CHANGES=10000 cargo test -p blkmq --release --test end_to_end control::random` is the
//! long form; `BLKMQ_CHANGES_SEED` is the seed.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use blkmq_testkit::Random;
use serde_json::{Value, json};

use super::{Stage, add, names, remove, set};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;
use crate::vhost_user::{Driver, Ring};

#[test]
fn random_changes_beside_clients_leave_nothing_behind() {
    let number = |name, default| std::env::var(name).map_or(default, |text| text.parse().expect(name));
    let (changes, seed): (u64, u64) = (number("BLKMQ_CHANGES", 600), number("BLKMQ_CHANGES_SEED", 1));
    println!("again: BLKMQ_CHANGES={changes} BLKMQ_CHANGES_SEED={seed}");
    let stage = stage();
    let load = Load::start(&stage.nbd(), "vm1", 2);
    let mut driver = Driver::new(&stage.scratch.path("guest.vsock"), 1, Ring::SPLIT);
    driver.serve();
    let is_over = AtomicBool::new(false);
    let (mut settled, mut worst, mut refused) = (None, Duration::ZERO, 0);
    // The most of the first half: the allocator gives back in leaps what was freed, so memory rises
    // and falls by 20 MiB from change to change, without a trend.
    let mut memory_kib = 0;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                driver.step();
                std::thread::sleep(LOOK_TIME);
            }
        });
        // Set even if this thread panics, so that the other one ends.
        let _end = End(&is_over);
        let mut changer = Changer::new(&stage, seed);
        for number in 0..changes {
            if number < changes / 2 {
                memory_kib = memory_kib.max(stage.daemon.memory_kib());
            }
            if number == changes / 3 {
                settled = Some(costs(&stage.daemon));
                load.forget_slowest();
            }
            let start = Instant::now();
            refused += u64::from(changer.change().is_err());
            worst = worst.max(start.elapsed());
        }
        changer.undo();
    });
    let slowest = load.slowest();
    let done = load.stop_and_verify(&stage.scratch.path("vm1.raw"));
    driver.finish();
    driver.verify_image(&stage.scratch.path("guest.raw"));
    eprintln!(
        "{changes} changes beside {done} requests by NBD and {} of a guest, {refused} refused; the slowest change {worst:?}, the slowest \
         batch of 16 requests by NBD {slowest:?}",
        driver.ended()
    );
    assert!(driver.ended() > changes / 10, "no test of the guest");
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
        after.memory_kib <= memory_kib * 5 / 4 + 2048,
        "memory: {memory_kib} KiB, {after:?}"
    );
    stage.daemon.stop();
}

/// A daemon with a disk for NBD clients, one for a guest, and images for disks that are added and
/// removed.
fn stage() -> Stage {
    let scratch = Scratch::new();
    let guest = format!("name=guest,file={}", scratch.image("guest.raw", 1 << 20));
    let address = format!("unix:{}", scratch.word("{disk}.vsock"));
    for number in 0..FILES {
        scratch.image(&format!("d{number}.raw"), 1 << 20);
    }
    Stage::of(scratch, &["--disk", &guest, "--vhost-user", &address])
}

/// Sets the flag when it is dropped.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// The changes that are made to the daemon.
struct Changer<'a> {
    stage: &'a Stage,
    control: Control,
    /// The daemon's configuration at its start.
    first: String,
    random: Random,
}

impl<'a> Changer<'a> {
    fn new(stage: &'a Stage, seed: u64) -> Self {
        let mut control = stage.control();
        let first = control.call("config.get", &json!({})).expect("an answer");
        Self {
            stage,
            control,
            first: first["toml"].as_str().expect("a text").to_owned(),
            random: Random::new(seed),
        }
    }

    /// Makes one random change, which may be refused.
    fn change(&mut self) -> anyhow::Result<Value> {
        let kind = self.random.below(9);
        let (file, ram) = (
            format!("d{}", self.random.below(FILES)),
            format!("r{}", self.random.below(3)),
        );
        let group = self.random.one_of(&GROUPS);
        match kind {
            0 | 1 => {
                let image = self.stage.scratch.word(&format!("{file}.raw"));
                add(&mut self.control, "disk", &file, &json!({"file": image}))
            }
            2 | 3 => remove(&mut self.control, "disk", &file),
            4 => {
                let weight = self.random.below(1100);
                set(&mut self.control, "group", "/vm1", &json!({"weight": weight}))
            }
            5 => {
                let sched = self.random.one_of(&SCHEDS);
                set(&mut self.control, "disk", "vm1", &json!({"sched": sched}))
            }
            6 => add(
                &mut self.control,
                "disk",
                &ram,
                &json!({"ram": "1M", "group": group}),
            ),
            7 => remove(&mut self.control, "disk", &ram),
            _ => {
                let toml = self.configuration();
                self.control.call("config.apply", &json!({"toml": toml}))
            }
        }
    }

    /// The initial configuration with some more disks and groups, half of the time with an invalid
    /// one.
    fn configuration(&mut self) -> String {
        let mut text = self.first.clone();
        for number in 0..FILES {
            if self.random.below(2) == 0 {
                let image = self.stage.scratch.word(&format!("d{number}.raw"));
                text += &format!("[disk.d{number}]\nfile = {image:?}\n");
            }
        }
        for number in 0..3 {
            if self.random.below(2) == 0 {
                let group = self.random.one_of(&GROUPS[..2]);
                text += &format!("[disk.r{number}]\nram = \"1M\"\ngroup = {group:?}\n");
            }
        }
        let weight = self.random.below(1500);
        text += &format!(
            "[group.\"/x\"]\nweight = {weight}\n[group.\"/y\"]\niops = {}\n",
            1000 + weight
        );
        if self.random.below(4) == 0 {
            text += "[disk.late]\nfile = \"/nowhere/late\"\n";
        }
        text
    }

    /// Restores the initial state of the daemon.
    fn undo(mut self) {
        let whole = json!({"toml": self.first});
        self.control
            .call("config.apply", &whole)
            .expect("it was so before");
        assert_eq!(names(&mut self.control), ["guest", "vm1"]);
    }
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
    // The kernel starts and ends a ring's workers as it likes.
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
/// Images of disks that are added and removed.
const FILES: u64 = 4;
/// How often a guest polls.
const LOOK_TIME: Duration = Duration::from_micros(200);
