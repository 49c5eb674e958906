//! A Ceph cluster for tests: a monitor and one OSD on the loopback, in a directory of their own, started
//! and ended by name or around the tests that need one.

mod cluster;
mod images;

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Result, ensure};

use self::cluster::{Cluster, Kind};
use crate::place::{cargo, target_dir};
use crate::skips;
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// The options of a cluster.
#[derive(Default)]
pub(crate) struct Wish {
    /// The directory of its files; by default below the build directory.
    pub(crate) directory: Option<PathBuf>,
    /// Its contents survive its OSD.
    pub(crate) bluestore: bool,
    /// Clients have to show a key.
    pub(crate) cephx: bool,
    /// After how many seconds it forgets a client that has an image open and says nothing.
    pub(crate) watch_s: Option<u64>,
}

/// Starts a cluster and leaves it running.
///
/// # Errors
/// If packages are missing, a cluster runs in this directory, or one of the daemons does not start.
pub(crate) fn start(steps: &mut Steps, wish: &Wish) -> Result<()> {
    let missing = missing();
    ensure!(missing.is_empty(), "{}", advice(&missing));
    let kind = Kind {
        bluestore: wish.bluestore,
        cephx: wish.cephx,
        watch_s: wish.watch_s.unwrap_or(WATCH_S),
    };
    let directory = directory(wish)?;
    let cluster = steps.time("a Ceph cluster", || Cluster::start(&directory, kind))?;
    cluster.leave();
    let conf = Cluster::conf_in(&directory);
    println!("    its configuration: {}", conf.display());
    println!("    an image: rbd -c {} create --size 1G rbd/vm1", conf.display());
    println!(
        "    tests: {VARIABLE}={} cargo test -p blkmq rbd::",
        directory.display()
    );
    println!("    its end: cargo xtask ceph --stop {}", directory.display());
    Ok(())
}

/// Ends the cluster of a directory, and removes its files.
///
/// # Errors
/// If one of its daemons does not end.
pub(crate) fn stop(wish: &Wish) -> Result<()> {
    let directory = directory(wish)?;
    let ended = cluster::stop(&directory)?;
    println!("{}: {ended} daemons have ended", directory.display());
    Ok(())
}

/// Runs the tests that need a cluster, on each kind of cluster.
///
/// # Errors
/// The first test that fails. If the machine lacks a requirement, the tests are skipped.
pub(crate) fn test(steps: &mut Steps, wish: &Wish) -> Result<()> {
    test_on(steps, wish, &KINDS)
}

/// As [`test()`], on the kind of cluster that covers more: its clients show keys, and its OSD can be
/// killed.
///
/// # Errors
/// As [`test()`].
pub(crate) fn test_short(steps: &mut Steps) -> Result<()> {
    test_on(steps, &Wish::default(), &KINDS[1..])
}

fn test_on(steps: &mut Steps, wish: &Wish, kinds: &[Kind]) -> Result<()> {
    let missing = missing();
    if !missing.is_empty() {
        steps.skip(NAME, &advice(&missing));
        return Ok(());
    }
    let program = steps.command_under_test()?;
    let directory = directory(wish)?;
    for &kind in kinds {
        let cluster = steps.time(&format!("a Ceph cluster, {kind}"), || {
            Cluster::start(&directory, kind)
        })?;
        // With the features of the whole workspace: the suite is built with them as well.
        let mut tests = cargo("test --workspace --test end_to_end rbd:: -- --test-threads=1");
        tests.env(VARIABLE, &directory).env("BLKMQ_BIN", &program);
        steps.run(&format!("tests on it, {kind}"), skips::listed(&mut tests)?)?;
        cluster.stop()?;
    }
    Ok(())
}

/// Starts two clusters, and has the release build report the cost of `count` of their images.
///
/// # Errors
/// If a cluster or the daemon does not start.
pub(crate) fn images(steps: &mut Steps, wish: &Wish, count: u64) -> Result<()> {
    let program = steps.command_under_test()?;
    let clusters = two_clusters(steps, wish)?;
    let directories = clusters.iter().map(Cluster::directory).collect::<Vec<_>>();
    images::measure(&program, &directories, count)?;
    clusters.into_iter().try_for_each(Cluster::stop)
}

/// Starts two clusters with images, and runs `blkmq-lab bench rbd` on them with the options `words`.
///
/// # Errors
/// If a cluster does not start, or the bench fails.
pub(crate) fn bench(steps: &mut Steps, wish: &Wish, words: &[String]) -> Result<()> {
    let lab = steps.program("blkmq-lab")?;
    steps.run(
        "release build of the fio engine",
        &mut cargo("build --release -p blkmq-fio"),
    )?;
    let clusters = two_clusters(steps, wish)?;
    let [first, second] = &clusters;
    first.fill_image("bench", BENCH_MIB)?;
    for number in 1..=3 {
        first.fill_image(&format!("bench-{number}"), TENANT_MIB)?;
    }
    second.fill_image("bench", TENANT_MIB)?;
    let mut bench = Command::new(lab);
    bench
        .args(["bench", "rbd", "--conf"])
        .arg(Cluster::conf_in(&first.directory()));
    bench
        .arg("--engine")
        .arg(target_dir()?.join("release/libblkmq_fio.so"));
    bench
        .arg("--other-conf")
        .arg(Cluster::conf_in(&second.directory()));
    bench
        .args(["--other-osd", &second.osd()?.to_string()])
        .args(words);
    let status = bench.status()?;
    ensure!(status.success(), "blkmq-lab bench rbd: {status}");
    clusters.into_iter().try_for_each(Cluster::stop)
}

/// Two clusters of the quick kind.
fn two_clusters(steps: &mut Steps, wish: &Wish) -> Result<[Cluster; 2]> {
    let missing = missing();
    ensure!(missing.is_empty(), "{}", advice(&missing));
    let directory = directory(wish)?;
    let kind = Kind {
        bluestore: wish.bluestore,
        cephx: wish.cephx,
        watch_s: wish.watch_s.unwrap_or(WATCH_S),
    };
    let mut start = |name: &str| {
        let directory = directory.join(name);
        steps.time("a Ceph cluster", || Cluster::start(&directory, kind))
    };
    Ok([start("first")?, start("second")?])
}

fn directory(wish: &Wish) -> Result<PathBuf> {
    match &wish.directory {
        Some(directory) => Ok(std::path::absolute(directory)?),
        None => Ok(target_dir()?.join("ceph")),
    }
}

/// The Debian packages that are not installed.
fn missing() -> Vec<&'static str> {
    let tools = TOOLS.iter().filter(|(tool, _)| find(tool).is_none());
    let mut missing: Vec<_> = tools.map(|(_, package)| *package).collect();
    let directories = ["/usr/lib", "/usr/lib64", "/usr/local/lib"].map(Path::new);
    let triple = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
    let mut all = directories.into_iter().chain([Path::new(&triple)]);
    if !all.any(|directory| directory.join("librbd.so.1").exists()) {
        missing.push("librbd1");
    }
    missing.dedup();
    missing
}

fn advice(missing: &[&str]) -> String {
    let packages = missing.join(" ");
    format!("not installed: {packages}; run: apt-get install --no-install-recommends {packages}")
}

/// Sizes of the image that is measured alone and of each tenant's: a cluster of the quick kind has
/// 1 GiB in all.
const BENCH_MIB: u64 = 256;
const TENANT_MIB: u64 = 128;
const NAME: &str = "tests with a Ceph cluster";
/// Tells the tests the directory of the cluster.
const VARIABLE: &str = "BLKMQ_CEPH";
/// Programs of a cluster and the packages that have them.
const TOOLS: [(&str, &str); 6] = [
    ("ceph-mon", "ceph-mon"),
    ("monmaptool", "ceph-mon"),
    ("ceph-osd", "ceph-osd"),
    ("ceph", "ceph-common"),
    ("ceph-authtool", "ceph-common"),
    ("rbd", "ceph-common"),
];
/// Shorter than Ceph's own, 30 s, so that tests with a killed daemon need not wait.
const WATCH_S: u64 = 10;
/// One kind that is as quick as possible, and one with keys and a store that survives its OSD.
const KINDS: [Kind; 2] = [
    Kind {
        bluestore: false,
        cephx: false,
        watch_s: WATCH_S,
    },
    Kind {
        bluestore: true,
        cephx: true,
        watch_s: WATCH_S,
    },
];
