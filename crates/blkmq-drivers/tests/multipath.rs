//! Tests multipath drives in a running engine: requests are spread over paths, continue when some
//! fail, and wait or fail when there is none.

use std::sync::Arc;
use std::time::{Duration, Instant};

use blkmq_core::bio::{Bio, Op, Status};
use blkmq_drivers::multipath::{
    Detours, MultipathConfig, MultipathDevice, NoPath, PathDevice, PathState, PathStats, Selector,
};
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::{Attached, Disk, DiskEntry, Engine, EngineConfig, QueueSpec};

const SIZE: u64 = 1 << 30;
const DEPTH: u32 = 32;

fn null(config: &NullConfig) -> Arc<NullDevice> {
    Arc::new(NullDevice::new(config.clone(), &[SIZE]).unwrap())
}

/// An engine with one multipath disk, `m`, and the drive below it.
fn start(
    config: &MultipathConfig,
    paths: Vec<PathDevice>,
    reactors: usize,
) -> (Engine, Arc<MultipathDevice>) {
    let device = Arc::new(MultipathDevice::new("m", config, paths, DEPTH).unwrap());
    let mut queue = QueueSpec::new("m", Arc::clone(&device) as _);
    queue.tags = blkmq_core::queue::TagMode::PerHctx(DEPTH);
    queue.disks.push(DiskEntry {
        name: "m".into(),
        description: String::new(),
        serial: None,
        export: None,
        size: SIZE,
        read_only: false,
        block_size: 512,
        group: Default::default(),
    });
    let config = EngineConfig {
        reactors,
        attached_max: 1,
        queues: vec![queue],
        ..EngineConfig::default()
    };
    (Engine::start(config).unwrap(), device)
}

fn paths(count: usize, config: &NullConfig) -> Vec<PathDevice> {
    let names = ["a", "b", "c", "d"];
    names[..count]
        .iter()
        .map(|name| PathDevice::new(*name, null(config), SIZE))
        .collect()
}

fn submit(attached: &mut Attached, disk: &Disk, count: u64) {
    for at in 0..count {
        let bio = Bio {
            op: Op::Read,
            offset: at * 8192,
            len: 4096,
            cookie: at,
            disk: disk.id,
            ..Bio::default()
        };
        attached.submit(disk.queue, bio).unwrap();
    }
    attached.unplug();
}

/// Waits until `count` bios have ended, and returns their statuses.
fn ended(attached: &mut Attached, count: usize) -> Vec<Status> {
    let mut out = Vec::new();
    let mut all = Vec::new();
    while all.len() < count {
        attached.wait(&mut out, Some(blkmq_core::time::Nanos::from_secs(20)));
        assert!(!out.is_empty(), "nothing has ended within 20 s");
        all.extend(out.drain(..).map(|bio| bio.status));
    }
    all
}

fn at_rest(device: &MultipathDevice) -> Vec<PathStats> {
    let paths = device.paths();
    for path in &paths {
        assert_eq!(
            (path.in_flight, path.in_flight_bytes),
            (0, 0),
            "path {} at rest",
            path.name
        );
    }
    paths
}

#[test]
fn requests_take_turns_on_all_paths_and_every_end_is_counted() {
    for timer in [false, true] {
        let config = NullConfig {
            latency: blkmq_core::time::Nanos::from_micros(if timer { 50 } else { 0 }),
            ..NullConfig::default()
        };
        for selector in Selector::ALL {
            let multipath = MultipathConfig {
                selector,
                ..MultipathConfig::default()
            };
            let (engine, device) = start(&multipath, paths(4, &config), 1);
            let mut attached = engine.attach().unwrap();
            let disk = attached.disk("m").unwrap().clone();
            for _ in 0..50 {
                submit(&mut attached, &disk, 20);
                assert!(ended(&mut attached, 20).iter().all(|status| status.is_ok()));
            }
            let paths = at_rest(&device);
            assert_eq!(paths.iter().map(|path| path.ios).sum::<u64>(), 1000, "{selector}");
            assert_eq!(paths.iter().map(|path| path.bytes).sum::<u64>(), 1000 * 4096);
            if matches!(
                selector,
                Selector::RoundRobin | Selector::QueueLength | Selector::ServiceTime
            ) {
                assert!(paths.iter().all(|path| path.ios == 250), "{selector}: {paths:?}");
            }
            drop(attached);
        }
    }
}

#[test]
fn without_a_path_requests_wait_until_one_is_back_or_fail_when_told_to() {
    let multipath = MultipathConfig {
        no_path: NoPath::Queue,
        ..MultipathConfig::default()
    };
    let (engine, device) = start(&multipath, paths(2, &NullConfig::default()), 1);
    let mut attached = engine.attach().unwrap();
    let disk = attached.disk("m").unwrap().clone();
    device.fail_path("a").unwrap();
    submit(&mut attached, &disk, 4);
    assert!(ended(&mut attached, 4).iter().all(|status| status.is_ok()));
    device.fail_path("b").unwrap();
    assert!(device.groups().has_no_path);
    submit(&mut attached, &disk, 4);
    let mut out = Vec::new();
    attached.wait(&mut out, Some(blkmq_core::time::Nanos::from_millis(50)));
    assert!(out.is_empty(), "held: {out:?}");
    device.reinstate_path("b").unwrap();
    assert!(ended(&mut attached, 4).iter().all(|status| status.is_ok()));
    device.fail_path("b").unwrap();
    submit(&mut attached, &disk, 4);
    attached.wait(&mut out, Some(blkmq_core::time::Nanos::from_millis(20)));
    assert!(out.is_empty(), "held: {out:?}");
    let told = Instant::now();
    device.set_no_path(NoPath::Fail);
    assert_eq!(ended(&mut attached, 4), [Status::Transport; 4]);
    assert!(
        told.elapsed() < Duration::from_millis(100),
        "{:?}",
        told.elapsed()
    );
    let paths = at_rest(&device);
    assert_eq!([paths[0].state, paths[1].state], [PathState::Disabled; 2]);
}

#[test]
fn each_detour_brings_every_request_back_once() {
    let timer = NullConfig {
        latency: blkmq_core::time::Nanos::from_micros(20),
        ..NullConfig::default()
    };
    for config in [NullConfig::default(), timer] {
        let (engine, device) = start(&MultipathConfig::default(), paths(2, &config), 1);
        let control = engine.control();
        let queue = control.queue("m").unwrap();
        let mut attached = engine.attach().unwrap();
        let disk = attached.disk("m").unwrap().clone();
        let mut ios = 0;
        for bits in (0..16).rev() {
            let detours = Detours {
                insert: bits & 1 != 0,
                complete: bits & 2 != 0,
                run: bits & 4 != 0,
                issue: bits & 8 != 0,
            };
            MultipathDevice::of_queue(&control, queue)
                .unwrap()
                .set_detours(detours);
            for round in 0..20 {
                submit(&mut attached, &disk, 12);
                if round == 10 {
                    // Changed while requests are under way.
                    device.set_detours(Detours {
                        run: detours.run,
                        ..Detours::ALL
                    });
                }
                assert!(
                    ended(&mut attached, 12).iter().all(|status| status.is_ok()),
                    "{detours:?}"
                );
                ios += 12;
            }
            let paths = at_rest(&device);
            assert_eq!(paths.iter().map(|path| path.ios).sum::<u64>(), ios, "{detours:?}");
        }
        // Without a path a detoured request also waits, and fails when configured to.
        device.set_detours(Detours::ALL);
        device.set_no_path(NoPath::Queue);
        ["a", "b"].iter().for_each(|path| device.fail_path(path).unwrap());
        submit(&mut attached, &disk, 4);
        let mut out = Vec::new();
        attached.wait(&mut out, Some(blkmq_core::time::Nanos::from_millis(20)));
        assert!(out.is_empty(), "held: {out:?}");
        device.set_no_path(NoPath::Fail);
        assert_eq!(ended(&mut attached, 4), [Status::Transport; 4]);
        drop(attached);
    }
}

#[test]
fn paths_come_and_go_while_requests_run() {
    let config = NullConfig {
        latency: blkmq_core::time::Nanos::from_micros(20),
        ..NullConfig::default()
    };
    let (engine, device) = start(&MultipathConfig::default(), paths(1, &config), 2);
    let mut attached = engine.attach().unwrap();
    let disk = attached.disk("m").unwrap().clone();
    for round in 0..60 {
        submit(&mut attached, &disk, 16);
        let name = format!("x{round}");
        device
            .add_path(PathDevice::new(name.clone(), null(&config), SIZE))
            .unwrap();
        assert!(ended(&mut attached, 16).iter().all(|status| status.is_ok()));
        submit(&mut attached, &disk, 16);
        device.remove_path(&name).unwrap();
        assert!(ended(&mut attached, 16).iter().all(|status| status.is_ok()));
    }
    let error = device.remove_path("a").unwrap_err().to_string();
    assert!(error.contains("the last path"), "{error}");
    let small = Arc::new(NullDevice::new(NullConfig::default(), &[4096]).unwrap());
    let error = device
        .add_path(PathDevice::new("s", small, 4096))
        .unwrap_err()
        .to_string();
    assert!(error.contains("path s has 4096 bytes"), "{error}");
    drop(attached);
    drop(engine);
    at_rest(&device);
}
