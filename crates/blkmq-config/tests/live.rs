//! Tests that configured disks can be added to a running engine and removed from it.

use blkmq_config::{Config, live, plan};
use blkmq_core::time::Nanos;
use blkmq_host::{Engine, EngineConfig};
use blkmq_testkit::Scratch;

const LONG: Nanos = Nanos::from_secs(20);

/// A directory for images.
struct Images(Scratch);

impl Images {
    fn new() -> Self {
        Self(Scratch::new())
    }

    /// A configuration with these disks, in which FILE stands for a file with the disk's name, and
    /// these groups.
    fn config(&self, disks: &[&str], groups: &[&str]) -> Config {
        let disks = disks.iter().map(|text| {
            let name = text.split(',').next().unwrap().strip_prefix("name=").unwrap();
            let file = format!("file={}/{name},size=1M,create=on", self.0.dir().display());
            blkmq_config::DiskSpec::parse(&text.replace("FILE", &file)).unwrap()
        });
        Config {
            disks: disks.collect(),
            groups: groups
                .iter()
                .map(|text| blkmq_config::group::parse(text).unwrap())
                .collect(),
            reactors: Some(2),
            ..Config::default()
        }
    }
}

fn start(config: &Config) -> Engine {
    let plan = plan(config).unwrap();
    Engine::start(EngineConfig {
        reactors: 2,
        queues: plan.queues,
        mapped: plan.mapped,
        ..EngineConfig::default()
    })
    .unwrap()
}

fn queues(engine: &Engine) -> Vec<String> {
    let queues = engine.control().queues();
    queues.iter().map(|(_, queue)| queue.name().to_owned()).collect()
}

#[test]
fn files_of_one_filesystem_join_its_queue_with_their_groups_and_leave_it() {
    let images = Images::new();
    let engine = start(&images.config(&["name=a,FILE,sched=bfq"], &[]));
    let control = engine.control();
    let (queue, only) = (engine.disk("a").unwrap().queue, queues(&engine));
    let config = images.config(
        &["name=a,FILE,sched=bfq", "name=b,FILE,group=/customers/b"],
        &["/customers,weight=300", "/customers/b,iops=5000"],
    );
    let disk = live::add_disk(&control, &config, "b").unwrap();
    assert_eq!((disk.queue, queues(&engine)), (queue, only.clone()));
    assert_eq!(control.group_path(queue, disk.group).unwrap(), "/customers/b");
    assert_eq!(control.group(queue, "/customers").unwrap().weight, 300);
    assert!(!control.group(queue, "/customers/b").unwrap().caps.is_none());

    // A queue has only the groups of its disks, even if others are configured.
    live::remove_disk(&control, "b", LONG).unwrap();
    assert_eq!(control.groups(queue).len(), 2, "the root and a's");
    assert_eq!(engine.disks().len(), 1);

    // The last disk takes the queue with it; a new queue has the configured groups.
    live::remove_disk(&control, "a", LONG).unwrap();
    assert_eq!(queues(&engine), [""; 0]);
    let again = images.config(&["name=c,FILE,sched=mq-deadline"], &["/c,weight=7"]);
    let disk = live::add_disk(&control, &again, "c").unwrap();
    assert_eq!((queues(&engine), control.groups(disk.queue).len()), (only, 2));
    assert_eq!(control.group(disk.queue, "/c").unwrap().weight, 7);
    assert_eq!(control.core(disk.queue).unwrap().elevator().name, "mq-deadline");
    engine.shutdown(LONG).unwrap();
}

#[test]
fn six_hundred_disks_with_groups_of_their_own_join_one_queue() {
    let images = Images::new();
    let engine = start(&images.config(&["name=first,FILE,sched=bfq"], &[]));
    let control = engine.control();
    let names: Vec<String> = (0..600).map(|number| format!("name=d{number},FILE")).collect();
    let texts: Vec<&str> = names.iter().map(String::as_str).collect();
    let config = images.config(&texts, &[]);
    for number in 0..600 {
        live::add_disk(&control, &config, &format!("d{number}")).unwrap();
    }
    let queue = engine.disk("d599").unwrap().queue;
    assert_eq!((engine.disks().len(), control.groups(queue).len()), (601, 602));
    for number in 0..600 {
        live::remove_disk(&control, &format!("d{number}"), LONG).unwrap();
    }
    assert_eq!((engine.disks().len(), control.groups(queue).len()), (1, 2));
    engine.shutdown(LONG).unwrap();
}

#[test]
fn disk_that_cannot_join_is_refused_by_name_and_changes_nothing() {
    let images = Images::new();
    let engine = start(&images.config(&["name=a,FILE,queue=files,sched=bfq", "name=r,ram=1M"], &[]));
    let control = engine.control();
    let before = (
        queues(&engine),
        control.groups(engine.disk("a").unwrap().queue).len(),
    );
    for (disk, parts) in [
        (
            "name=b,FILE,queue=files,sched=none".to_owned(),
            ["disk b: sched=none rejected", "has sched=bfq"],
        ),
        (
            "name=b,ram=1M,queue=files".to_owned(),
            ["disk b", "disks in files alone"],
        ),
        ("name=b,ram=1M,queue=r".to_owned(), ["disk b", "can have no more"]),
        ("name=b,linear=a".to_owned(), ["disk b", "while the daemon runs"]),
        ("name=b,file=/nowhere/b".to_owned(), ["disk b", "/nowhere/b"]),
        ("name=a,ram=1M,queue=x".to_owned(), ["disk a", "one of this name"]),
    ] {
        let config = images.config(&[&disk], &[]);
        let name = &config.disks[0].name;
        let error = format!("{:#}", live::add_disk(&control, &config, name).unwrap_err());
        assert!(parts.iter().all(|part| error.contains(part)), "{disk}: {error}");
        let after = (
            queues(&engine),
            control.groups(engine.disk("a").unwrap().queue).len(),
        );
        assert_eq!((after, engine.disks().len()), (before.clone(), 2), "{disk}");
    }
    engine.shutdown(LONG).unwrap();
}

#[test]
fn depth_that_is_no_longer_asked_for_is_the_default_again() {
    let images = Images::new();
    let config = |settings: &str| {
        let mut config = images.config(&["name=a,ram=1M"], &[]);
        config.queues = Config::from_toml(settings).unwrap().queues;
        config
    };
    let wish = |config: &Config| plan::settings::wish(config, "a", ["a"].into_iter()).unwrap();
    let (few, many, none) = (
        config("[queue.a]\ndepth = 16"),
        config("[queue.a]\ndepth = 100"),
        config(""),
    );
    let engine = start(&few);
    let control = engine.control();
    let queue = engine.disk("a").unwrap().queue;
    let core = control.core(queue).unwrap();
    assert_eq!((core.depth(), core.depth_max()), (16, 128));
    live::set_queue(&control, queue, &wish(&few), &wish(&many)).unwrap();
    assert_eq!(core.depth(), 100);
    live::set_queue(&control, queue, &wish(&many), &wish(&none)).unwrap();
    assert_eq!(core.depth(), 128);
    assert_eq!(
        start(&none).control().core(queue).unwrap().depth(),
        128,
        "as at a start"
    );
}

#[test]
fn polling_of_a_drive_that_cannot_be_polled_is_refused_before_anything_is_done() {
    let images = Images::new();
    let wish = |settings: &str| {
        let mut config = images.config(&["name=a,ram=1M"], &[]);
        config.queues = Config::from_toml(settings).unwrap().queues;
        plan::settings::wish(&config, "a", ["a"].into_iter()).unwrap()
    };
    let engine = start(&images.config(&["name=a,ram=1M"], &[]));
    let control = engine.control();
    let queue = engine.disk("a").unwrap().queue;
    let was = wish("");
    for (keys, refused) in [
        ("io_poll = true", Some("io_poll on rejected")),
        ("io_poll_delay = 0", Some("io_poll_delay 0 rejected")),
        ("io_poll = false", None),
        ("io_poll_delay = \"auto\"", None),
    ] {
        let is = wish(&format!("[queue.a]\nsched = \"kyber\"\n{keys}"));
        let checked = live::check_queue(&control, queue, &was, &is);
        let said = checked.err().map(|error| error.to_string());
        match (refused, &said) {
            (None, None) => live::set_queue(&control, queue, &was, &is).expect("it was checked"),
            (Some(reason), Some(said)) if said.contains(reason) => {}
            _ => panic!("{keys}: {said:?}"),
        }
    }
    engine.shutdown(LONG).unwrap();
}

#[test]
fn tunables_are_checked_with_the_scheduler_that_the_queue_would_have() {
    let images = Images::new();
    let wish = |settings: &str| {
        let mut config = images.config(&["name=a,ram=1M"], &[]);
        config.queues = Config::from_toml(settings).unwrap().queues;
        let wish = plan::settings::wish(&config, "a", ["a"].into_iter());
        wish.err().map(|error| format!("{error:#}"))
    };
    for (keys, refused) in [
        ("sched = \"bfq\"\ntunables = { slice_idle = 0 }", None),
        (
            "sched = \"kyber\"\ntunables = { slice_idle = 0 }",
            Some("queue a: kyber has no tunable slice_idle"),
        ),
        (
            "tunables = { slice_idle = 0 }",
            Some("queue a: none has no tunable slice_idle"),
        ),
        (
            "sched = \"kyber\"\ntunables = { read_lat_nsec = 1 }",
            Some("queue a: read_lat_nsec 1 rejected: must be from 1000 to 1000000000000"),
        ),
    ] {
        assert_eq!(wish(&format!("[queue.a]\n{keys}")).as_deref(), refused, "{keys}");
    }
}
