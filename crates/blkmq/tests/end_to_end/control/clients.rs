//! Tests clients of the control socket that misbehave, that are too many, or that subscribe.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use blkmq::control::client::Client as Control;
use serde_json::{Value, json};

use super::{LONG, Stage, add, names, remove};
use crate::common::nbd::Client;
use crate::common::pattern::BLOCK;
use crate::common::user::{as_member, as_user, can_switch};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;
#[test]
fn last_places_are_the_owners_whoever_else_may_read() {
    if !can_switch() {
        return;
    }
    let scratch = Scratch::new();
    std::fs::set_permissions(scratch.path("."), PermissionsExt::from_mode(0o755)).expect("our own");
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let text = format!(
        "[disk.vm1]\nram = \"1M\"\n[[export]]\nnbd = {nbd:?}\n[control]\nsocket = \"unix:{}\"\nreaders = \"@nogroup\"\n",
        scratch.word("control.sock")
    );
    std::fs::write(scratch.path("a.toml"), text).expect("the file can be written");
    let daemon = Daemon::start(&["-c", &scratch.word("a.toml")]);
    let connect = |user: u32| {
        as_member(user, &[NOGROUP], || {
            let mut control = Control::connect(&scratch.path("control.sock"))?;
            let disks = control.call("disk.list", &json!({}))?;
            assert_eq!(disks[0]["name"], "vm1");
            anyhow::Ok(control)
        })
    };
    // Nobody alone has all of the places.
    let mut crowd = Vec::new();
    for user in 65_000..65_012 {
        for _ in 0..8 {
            crowd.push(connect(user).expect("it is let in"));
        }
        let refused = connect(user).expect_err("the ninth").to_string();
        let part = match user {
            65_011 => "96 clients are connected already".to_owned(),
            _ => format!("8 clients of user {user} are connected already"),
        };
        assert!(refused.contains(&part), "{refused}");
    }
    for _ in 0..3 {
        let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
        control
            .call("daemon.version", &json!({}))
            .expect("the owner is let in");
    }
    let refused = as_user(65_000, || {
        let mut control = Control::connect(&scratch.path("control.sock"))?;
        control.call("daemon.version", &json!({}))
    });
    let refused = refused.expect_err("it is no member").to_string();
    assert!(refused.contains("neither in readers nor in tenants"), "{refused}");
    drop(crowd);
    daemon.stop();
}

#[test]
fn client_of_the_socket_that_misbehaves_costs_itself_alone() {
    let stage = Stage::new(&[]);
    let load = Load::start(&stage.nbd(), "vm1", 1);
    let path = stage.scratch.path("control.sock");
    let connect = || UnixStream::connect(&path).expect("it listens");
    // One that repeatedly sends requests and never reads the answers.
    let deaf = connect();
    let asks = std::thread::spawn(move || {
        let line = b"{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"statistics.get\"}\n";
        let mut deaf = deaf;
        while deaf.write_all(line).is_ok() {}
    });
    // Garbage, each line of which is answered, and a line without an end, which is refused.
    let mut garbage = connect();
    garbage
        .write_all(b"\xff\xfe\n[[[[\n{\"jsonrpc\":3}\n\n")
        .expect("it takes some");
    let mut answers = [0; 600];
    let len = garbage.read(&mut answers).expect("an answer");
    assert!(String::from_utf8_lossy(&answers[..len]).contains("-32700"));
    let endless = vec![b'x'; 1 << 20];
    while garbage.write_all(&endless).is_ok() {}
    // As many as are allowed, and more.
    let many: Vec<UnixStream> = (0..200).map(|_| connect()).collect();
    std::thread::sleep(Duration::from_millis(300));
    drop(many);
    let start = Instant::now();
    let mut control = loop {
        let answered = Control::connect(&path).and_then(|mut control| {
            control.call("daemon.version", &json!({}))?;
            Ok(control)
        });
        match answered {
            Ok(control) => break control,
            Err(error) => assert!(start.elapsed() < LONG, "{error}"),
        }
        std::thread::sleep(Duration::from_millis(20));
    };
    assert!(asks.join().is_ok(), "who does not read is hung up on");
    assert_eq!(names(&mut control), ["vm1"]);
    assert!(load.stop() > 0);
    stage.daemon.stop();
}

#[test]
fn refused_control_client_gets_the_reason_and_the_daemon_needs_no_name() {
    let stage = Stage::new(&[]);
    let path = stage.scratch.path("control.sock");
    let many: Vec<UnixStream> = (0..128)
        .map(|_| UnixStream::connect(&path).expect("room"))
        .collect();
    // They are accepted one after the other.
    std::thread::sleep(Duration::from_millis(200));
    for _ in 0..20 {
        let (code, said) = stage.ctl(&["set", "group", "/vm1", "weight=300"]);
        assert_eq!(code, 1, "{said}");
        let is_told = said.contains("128 clients are connected already") || said.contains("too many clients");
        assert!(is_told, "{said}");
    }
    drop(many);
    let start = Instant::now();
    let (code, said) = loop {
        let (code, said) = stage.ctl(&["set", "daemon", "shutdown_limit=7s"]);
        if code == 0 || start.elapsed() > LONG {
            break (code, said);
        }
    };
    assert_eq!(code, 0, "{said}");
    assert!(stage.ctl(&["dump"]).1.contains("shutdown_limit = \"7s\""));
    stage.daemon.stop();
}

#[test]
fn statistics_are_told_to_who_has_subscribed() {
    let stage = Stage::new(&[]);
    let mut client = Client::connect(&stage.nbd(), "vm1").expect("it is served");
    let mut control = stage.control();
    control
        .call("subscribe", &json!({"interval_ms": 100}))
        .expect("an answer");
    let reads = |told: &Value| {
        told.pointer("/params/queues/0/groups/0/read/ios")
            .and_then(Value::as_u64)
    };
    for wanted in 1..4 {
        client.read(0, BLOCK).expect("a read");
        let start = Instant::now();
        while reads(&control.next_line().expect("it is told")) != Some(wanted) {
            assert!(start.elapsed() < LONG, "{wanted} reads");
        }
    }
    let refused = control.call("subscribe", &json!({"interval_ms": 1}));
    assert!(refused.expect_err("too often").to_string().contains("from 100"));
    control.call("unsubscribe", &json!({})).expect("an answer");
    stage.daemon.stop();
}

#[test]
fn subscriber_to_changes_gets_queues_that_did_something() {
    let stage = Stage::new(&["--disk", "name=vm2,ram=1M"]);
    let mut client = Client::connect(&stage.nbd(), "vm2").expect("it is served");
    let mut control = stage.control();
    control
        .call("subscribe", &json!({"interval_ms": 100, "changed": true}))
        .expect("an answer");
    let mut next = || control.next_line().expect("it is told")["params"].take();
    let queues = |told: &Value| told["queues"].as_array().expect("queues").len();
    let first = next();
    assert_eq!((queues(&first), first.get("is_partial")), (2, None));
    let start = Instant::now();
    while queues(&next()) > 0 {
        assert!(start.elapsed() < LONG, "queues that do nothing");
    }
    client.read(0, BLOCK).expect("a read");
    let told = loop {
        let told = next();
        assert_eq!(told["is_partial"], true);
        if queues(&told) > 0 && told.pointer("/queues/0/groups/0/read/ios").is_some() {
            break told;
        }
        assert!(start.elapsed() < LONG, "a read that is not told");
    };
    assert_eq!(told.pointer("/queues/0/name"), Some(&"vm2".into()));
    assert_eq!(told.pointer("/queues/0/groups/0/read/ios"), Some(&1.into()));
    add(&mut stage.control(), "disk", "vm3", &json!({"ram": "1M"})).expect("one more");
    let start = Instant::now();
    while queues(&next()) != 3 {
        assert!(start.elapsed() < LONG, "a queue that is not told");
    }
    stage.daemon.stop();
}

#[test]
fn subscriber_knows_all_queues_and_the_last_count_of_each() {
    let stage = Stage::new(&["--disk", "name=vm2,ram=1M"]);
    let mut client = Client::connect(&stage.nbd(), "vm2").expect("it is served");
    let mut control = stage.control();
    control.follow(Duration::from_millis(100)).expect("an answer");
    for wanted in 1..4 {
        // Some of them come when the counts are final, others before.
        std::thread::sleep(Duration::from_millis(600) * (wanted as u32 - 1));
        client.read(0, BLOCK).expect("a read");
        let start = Instant::now();
        loop {
            let told = control.next_statistics().expect("it is told");
            let names: Vec<&str> = told.queues.iter().map(|queue| queue.name.as_str()).collect();
            assert_eq!(names.len(), 2, "{names:?}");
            let mut of_vm2 = told.queues.iter().filter(|queue| queue.name == "vm2");
            let groups = &of_vm2.next().expect("its queue").groups;
            if groups.first().is_some_and(|group| group.read.ios == wanted) {
                break;
            }
            assert!(start.elapsed() < LONG, "{wanted} reads");
        }
    }
    stage.daemon.stop();
}

#[test]
fn statistics_are_told_while_queues_come_and_go() {
    let scratch = Scratch::new();
    let metrics = format!("unix:{}", scratch.word("metrics.sock"));
    let path = scratch.path("metrics.sock");
    let stage = Stage::of(scratch, &["--metrics", &metrics]);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let readers: Vec<_> = ["statistics.get", "group.list", "queue.list"]
            .map(|method| {
                let (mut control, is_over) = (stage.control(), &is_over);
                scope.spawn(move || {
                    while !is_over.load(Ordering::Relaxed) {
                        control.call(method, &json!({}))?;
                    }
                    anyhow::Ok(())
                })
            })
            .into();
        let (path, is_over_too) = (&path, &is_over);
        let scraper = scope.spawn(move || {
            while !is_over_too.load(Ordering::Relaxed) {
                let text = crate::metrics::text(path);
                assert!(text.contains("blkmq_disk_size_bytes{disk=\"vm1\"}"), "{text}");
            }
        });
        let mut control = stage.control();
        for _ in 0..300 {
            add(&mut control, "disk", "comes", &json!({"ram": "64K"})).expect("it comes");
            remove(&mut control, "disk", "comes").expect("it goes");
        }
        is_over.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().expect("no panic").expect("each is answered");
        }
        scraper.join().expect("each scrape has its answer");
    });
    assert!(
        !stage.daemon.said().contains("panicked"),
        "{}",
        stage.daemon.said()
    );
    stage.daemon.stop();
}

/// The group of Debian that has no members.
const NOGROUP: u32 = 65534;
