//! Tests that disks get the right queues, with real files where files are meant.

use std::path::Path;
use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_drivers::multipath::MultipathDevice;
use blkmq_drivers::null::{NullConfig, NullDisk};
use blkmq_testkit::Scratch;

use super::*;

fn disk(text: &str) -> DiskSpec {
    DiskSpec::parse(text).unwrap()
}

fn null(name: &str) -> DiskSpec {
    disk(&format!("name={name},null=1M,group=/"))
}

fn file(name: &str, directory: &Path) -> DiskSpec {
    disk(&format!(
        "name={name},file={}/{name},size=1M,create=on",
        directory.display()
    ))
}

fn on(queue: &str, mut spec: DiskSpec) -> DiskSpec {
    spec.queue = Some(queue.to_owned());
    spec
}

fn plan_of(disks: Vec<DiskSpec>) -> anyhow::Result<Plan> {
    plan(&Config {
        disks,
        ..Config::default()
    })
}

fn planned(disks: Vec<DiskSpec>) -> Result<Vec<(String, Vec<String>)>, String> {
    let plan = plan_of(disks).map_err(|error| error.to_string())?;
    let names = |queue: QueueSpec| {
        (
            queue.name,
            queue.disks.into_iter().map(|disk| disk.name).collect(),
        )
    };
    Ok(plan.queues.into_iter().map(names).collect())
}

#[test]
fn files_on_one_filesystem_share_a_queue_unless_told_otherwise() {
    let scratch = Scratch::new();
    let disks = ["a", "b", "c"].map(|name| file(name, scratch.dir()));
    let [a, b, c] = disks;
    let queues = planned(vec![a, on("own", b), c]).unwrap();
    assert_eq!(queues.len(), 2);
    assert!(queues[0].0.starts_with("fs-"), "{queues:?}");
    assert_eq!(queues[0].1, ["a", "c"]);
    assert_eq!(queues[1], ("own".to_owned(), vec!["b".to_owned()]));
}

#[test]
fn null_and_ram_disks_have_their_own_queues_unless_joined() {
    let ram = disk("name=m,ram=1M");
    let queues = planned(vec![null("x"), on("q", null("y")), ram, on("q", null("z"))]).unwrap();
    let names: Vec<&str> = queues.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names, ["x", "q", "m"]);
    assert_eq!(queues[1].1, ["y", "z"]);
}

#[test]
fn drives_of_different_kinds_cannot_share_a_queue() {
    let ram = disk("name=m,ram=1M");
    let error = planned(vec![on("q", null("x")), on("q", ram)]).unwrap_err();
    assert!(
        error.contains("queue q") && error.contains("x (null)") && error.contains("m (ram)"),
        "{error}"
    );
    let slow = disk("name=y,null=1M,latency=10us");
    let error = planned(vec![on("q", null("x")), on("q", slow)]).unwrap_err();
    assert!(error.contains("null disks x and y"), "{error}");
}

#[test]
fn null_disks_share_their_tags_if_asked_to() {
    let shared = |name| disk(&format!("name={name},null=1M,shared_tags=on,depth=64,queue=host"));
    let disks = vec![shared("a"), shared("b"), null("c")];
    let plan = plan_of(disks).unwrap();
    assert_eq!(plan.queues[0].disks.len(), 2);
    assert_eq!(plan.queues[0].tags, TagMode::Shared(64));
    assert_eq!(plan.queues[1].tags, TagMode::PerHctx(1024));
    let error = planned(vec![shared("a"), on("host", null("b"))]).unwrap_err();
    assert!(error.contains("null disks a and b"), "{error}");
}

#[test]
fn disk_without_a_size_is_named() {
    let mut disk = null("x");
    disk.source = Source::Driver(Arc::new(NullDisk {
        size: 0,
        config: NullConfig::default(),
    }));
    assert_eq!(planned(vec![disk]).unwrap_err(), "disk x: has no size; set size=");
}

#[test]
fn settings_of_a_queue_without_disks_are_an_error_that_lists_the_queues() {
    let config = Config {
        disks: vec![on("fast", null("x"))],
        queues: [("fsat".to_owned(), QueueSettings::default())].into(),
        ..Config::default()
    };
    let error = plan(&config).err().unwrap();
    assert_eq!(
        error.to_string(),
        "queue fsat: no disk lies on it; the queues are: fast"
    );
}

#[test]
fn queue_has_the_groups_of_its_disks_alone_as_they_are_configured() {
    let in_group = |mut disk: DiskSpec, group: &str| {
        disk.group = group.to_owned();
        disk
    };
    let disks = vec![
        null("r"),
        in_group(null("a"), "/x"),
        in_group(null("b"), "/y/z"),
        in_group(on("r", null("c")), "/x"),
    ];
    let config = Config {
        disks,
        groups: vec![
            group::parse("/nobody,weight=7").unwrap(),
            group::parse("/y,weight=300").unwrap(),
        ],
        ..Config::default()
    };
    let paths = |plan: &Plan, number: usize| plan.queues[number].group_paths.clone();
    let ids = |plan: &Plan, number: usize| -> Vec<u32> {
        plan.queues[number]
            .disks
            .iter()
            .map(|disk| disk.group.0)
            .collect()
    };
    let sparse = plan(&config).unwrap();
    assert_eq!(paths(&sparse, 0), ["/", "/x"]);
    assert_eq!(paths(&sparse, 1), ["/", "/x"]);
    assert_eq!(paths(&sparse, 2), ["/", "/y", "/y/z"]);
    assert_eq!(
        [0, 1, 2].map(|number| ids(&sparse, number)),
        [vec![0, 1], vec![1], vec![2]]
    );
    assert_eq!(sparse.queues[2].groups.get(GroupId(1)).unwrap().weight, 300);

    let all = plan_with_all_groups(&config).unwrap();
    for number in 0..3 {
        assert_eq!(paths(&all, number), ["/", "/x", "/y", "/y/z", "/nobody"]);
    }
    assert_eq!(
        [0, 1, 2].map(|number| ids(&all, number)),
        [vec![0, 1], vec![1], vec![3]]
    );
}

#[test]
fn group_of_a_mapped_disk_has_one_number_on_all_queues() {
    let disks = [
        "name=b,null=1M,group=/b",
        "name=a,null=1M,group=/a",
        "name=l,linear=a,group=/m/l",
    ];
    let plan = plan_of(disks.map(disk).to_vec()).unwrap();
    let l = plan.mapped[0].group;
    for queue in &plan.queues {
        assert_eq!(queue.group_paths[l.index()], "/m/l");
        assert_eq!(
            queue.group_paths[queue.disks[0].group.index()],
            format!("/{}", queue.name)
        );
    }
}

fn multipath(name: &str, paths: &[&str]) -> DiskSpec {
    disk(&format!("name={name},multipath={}", paths.join("+")))
}

#[test]
fn path_through_the_page_cache_is_refused() {
    let scratch = Scratch::new();
    let path = |direct| {
        let path = scratch.dir().join(direct);
        disk(&format!(
            "name=f,file={},size=1M,create=on,direct={direct}",
            path.display()
        ))
    };
    let error = planned(vec![path("off"), null("a"), multipath("m", &["a", "f"])]).unwrap_err();
    assert!(
        error.contains("disk m: path f rejected: it goes through the page cache"),
        "{error}"
    );
    match planned(vec![path("on"), null("a"), multipath("m", &["a", "f"])]) {
        Ok(_) => {}
        Err(error) if error.contains("direct=on rejected") => {
            blkmq_testkit::skip("the filesystem of temporary files has no direct I/O");
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn path_is_a_drive_and_no_multipath_disk_vanishes() {
    let refused = |disks: Vec<DiskSpec>| plan_of(disks).err().expect("refused").to_string();
    let of_itself = vec![null("a"), multipath("m", &["a", "m"])];
    let of_each_other = vec![null("a"), multipath("m", &["n"]), multipath("n", &["a", "m"])];
    for error in [refused(of_itself), refused(of_each_other)] {
        assert!(
            error.contains("a path of a disk that is a path itself"),
            "{error}"
        );
    }
    let stacked = vec![null("a"), multipath("m", &["a"]), multipath("n", &["m"])];
    let error = refused(stacked);
    assert!(error.contains("m rejected"), "{error}");
    let waits = vec![
        null("a"),
        disk("name=l,nbd=nbd+unix:///?socket=/nowhere,reconnect=60"),
        multipath("m", &["a", "l"]),
    ];
    let error = refused(waits);
    assert!(error.contains("path l rejected: reconnect="), "{error}");
}

#[test]
fn server_that_is_down_at_the_start_is_left_out_unless_it_is_the_only_path() {
    let gone = || disk("name=l,nbd=nbd+unix:///?socket=/nowhere");
    let some = plan_of(vec![null("a"), gone(), multipath("m", &["l", "a"])]).unwrap();
    assert_eq!(some.queues.len(), 1);
    let drive = MultipathDevice::of(&*some.queues[0].device).expect("a multipath drive");
    assert_eq!(drive.paths().len(), 1);
    let error = plan_of(vec![gone(), multipath("m", &["l"])])
        .err()
        .expect("refused");
    assert!(error.to_string().contains("/nowhere"), "{error}");
}

#[test]
fn disks_that_lie_on_each_other_alone_make_no_queue() {
    let plan = plan_of(vec![disk("name=a,linear=b"), disk("name=b,linear=a")]).unwrap();
    assert_eq!((plan.queues.len(), plan.mapped.len()), (0, 2));
}
