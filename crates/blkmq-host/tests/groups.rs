//! Tests groups of a running engine, by their paths: their caps, and who may change or remove them.
//! Real threads.

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use blkmq_core::bio::Bio;
use blkmq_core::group::{CapKind, Caps, GroupTree};
use blkmq_core::ids::GroupId;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_drivers::null::NullConfig;
use blkmq_host::{Attached, Engine, EngineConfig, Error, QueueId};
use common::{queue, read};

const Q: QueueId = QueueId(0);

fn spacious(reactors: usize, attached: usize, elevator: &'static ElevatorType) -> Engine {
    let mut spec = queue("q", NullConfig::bare(), elevator);
    spec.groups = GroupTree::new(8);
    Engine::start(EngineConfig {
        reactors,
        attached_max: attached,
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .expect("the engine starts")
}

/// Submits `count` reads of a group at once and waits for their ends.
fn run(attached: &mut Attached, group: GroupId, count: u64) {
    for cookie in 0..count {
        let bio = Bio {
            group,
            ..read(cookie)
        };
        assert!(attached.submit(Q, bio).is_ok(), "room for {count}");
    }
    let mut out = Vec::new();
    while (out.len() as u64) < count {
        let mut some = Vec::new();
        attached.wait(&mut some, None);
        out.append(&mut some);
    }
    assert!(out.iter().all(|bio| bio.status.is_ok()));
}

fn says<T>(result: Result<T, Error>, part: &str) {
    let error = result.err().expect("refused").to_string();
    assert!(error.contains(part), "{error}");
}

#[test]
fn capped_group_is_not_faster_than_its_cap_with_any_elevator_and_an_uncapped_one_is() {
    for elevator in sched::BUILT_IN {
        let engine = spacious(1, 1, elevator);
        let control = engine.control();
        let capped = control.make_group(Q, "/customers/a").unwrap();
        let free = control.make_group(Q, "/customers/b").unwrap();
        let caps = Caps::default().with(CapKind::Iops, 1000);
        control.set_group_caps(Q, "/customers/a", caps).unwrap();
        let mut attached = engine.attach().unwrap();
        let start = Instant::now();
        (0..20).for_each(|_| run(&mut attached, free, 200));
        let took = start.elapsed().as_millis();
        // The cap would make it 4 s.
        assert!(took < 2000, "{elevator}: 4000 I/Os without a cap took {took} ms");
        let start = Instant::now();
        run(&mut attached, capped, 40);
        let took = start.elapsed().as_millis();
        assert!(took >= 38, "{elevator}: 40 I/Os in {took} ms at 1000 a second");
        // Another thread removes the cap while some bios wait.
        control
            .set_group_caps(Q, "/customers/a", Caps::default().with(CapKind::ReadIops, 1))
            .unwrap();
        thread::scope(|scope| {
            scope.spawn(|| {
                thread::sleep(Duration::from_millis(20));
                control
                    .set_group_caps(Q, "/customers/a", Caps::default())
                    .unwrap();
            });
            run(&mut attached, capped, 40);
        });
        assert!(
            start.elapsed().as_secs() < 30,
            "{elevator}: the cap was not lifted"
        );
        drop(attached);
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    }
}

#[test]
fn groups_are_made_with_their_ancestors_moved_and_removed_by_path() {
    let engine = spacious(1, 0, sched::BFQ);
    let control = engine.control();
    let paths = || -> Vec<String> { control.groups(Q).into_iter().map(|(path, _)| path).collect() };
    let vm = control.make_group(Q, "/a/b/vm").unwrap();
    assert_eq!(paths(), ["/", "/a", "/a/b", "/a/b/vm"]);
    assert_eq!(control.make_group(Q, "/a/b/vm").unwrap(), vm);
    control.set_group_weight(Q, "/a/b/vm", 300).unwrap();
    assert_eq!(control.group(Q, "/a/b/vm").unwrap().weight, 300);
    says(control.remove_group(Q, "/a/b"), "cannot be removed");
    says(control.remove_group(Q, "/c"), "there are: /, /a, /a/b, /a/b/vm");
    says(
        control.set_group_weight(Q, "/a", 0),
        "group /a: weight 0 rejected: must be from 1 to 1000",
    );
    says(control.move_group(Q, "/a", "/a/b"), "part of it");
    says(control.make_group(Q, "a"), "must be /");
    assert_eq!(control.move_group(Q, "/a/b", "/").unwrap(), "/b");
    assert_eq!(paths(), ["/", "/a", "/b", "/b/vm"]);
    says(control.make_group(Q, "/1/2/3/4/5"), "all 8 groups are in use");
    assert_eq!(paths().len(), 4, "nothing is left of what could not be made");
    control.remove_group(Q, "/b/vm").unwrap();
    control.set_group_latency_target(Q, "/b", Some(Nanos(5))).unwrap();
    assert_eq!(control.group(Q, "/b").unwrap().latency_target, Some(Nanos(5)));
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn group_that_a_disk_is_accounted_to_stays() {
    let mut spec = queue("q", NullConfig::bare(), sched::NONE);
    spec.groups = GroupTree::flat(2);
    spec.group_paths = vec!["/".to_owned(), "/vm".to_owned()];
    spec.disks[0].group = GroupId(1);
    let engine = Engine::start(EngineConfig {
        queues: vec![spec],
        ..EngineConfig::default()
    })
    .unwrap();
    says(
        engine.control().remove_group(Q, "/vm"),
        "disk q is accounted to it",
    );
    assert_eq!(engine.control().groups(Q).len(), 2);
}

#[test]
fn groups_come_and_go_under_load_and_each_bio_ends_once() {
    let engine = spacious(2, 3, sched::NONE);
    let over = AtomicBool::new(false);
    thread::scope(|scope| {
        let load: Vec<_> = (0..3)
            .map(|_| {
                let engine = &engine;
                scope.spawn(move || {
                    let mut attached = engine.attach().unwrap();
                    // A bio of a group that does not exist ends with an error, so all accepted bios
                    // count.
                    let mut out = Vec::new();
                    let mut ended = 0;
                    for cookie in 0..30_000 {
                        let group = GroupId((cookie % 8) as u32);
                        let mut bio = Bio {
                            group,
                            ..read(cookie)
                        };
                        while let Err(back) = attached.submit(Q, bio) {
                            bio = back;
                            ended += attached.wait(&mut out, None);
                            out.clear();
                        }
                        ended += attached.poll(&mut out);
                        out.clear();
                    }
                    while attached.outstanding() > 0 {
                        ended += attached.wait(&mut out, None);
                        out.clear();
                    }
                    assert_eq!(ended, 30_000);
                })
            })
            .collect();
        let changes = scope.spawn(|| {
            let control = engine.control();
            let mut rounds = 0_u64;
            while rounds == 0 || !over.load(Ordering::Relaxed) {
                rounds += 1;
                let path = format!("/t{}/vm", rounds % 3);
                // The tree is full while I/O of removed groups is under way.
                if control.make_group(Q, &path).is_err() {
                    continue;
                }
                control
                    .set_group_caps(Q, &path, Caps::default().with(CapKind::Iops, 20_000 + rounds))
                    .unwrap();
                control
                    .set_group_weight(Q, &path, 1 + (rounds % 1000) as u16)
                    .unwrap();
                let moved = control.move_group(Q, &path, "/");
                control
                    .remove_group(Q, moved.as_deref().unwrap_or(&path))
                    .unwrap();
            }
            rounds
        });
        for thread in load {
            thread.join().unwrap();
        }
        over.store(true, Ordering::Relaxed);
        assert!(changes.join().unwrap() > 0);
    });
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}
