//! Decides how a Ceph cluster for tests is had: a monitor and one OSD on the loopback, in a directory of their own, started and ended
//! by name or around the tests that need one.

mod cluster;

use std::path::{Path, PathBuf};

use anyhow::{Result, ensure};

use self::cluster::{Cluster, Kind};
use crate::place::{cargo, find_tool, target_dir};
use crate::skips;
use crate::steps::Steps;

/// What is wanted of a cluster.
#[derive(Default)]
pub(crate) struct Wish {
    /// Where its files lie; by default below the build directory.
    pub(crate) directory: Option<PathBuf>,
    /// What it keeps outlives its OSD.
    pub(crate) bluestore: bool,
    /// Clients have to show a key.
    pub(crate) cephx: bool,
}

/// Starts a cluster and leaves it running.
///
/// # Errors
/// If the packages are missing, or one runs in this directory, or a daemon of it does not start.
pub(crate) fn start(steps: &mut Steps, wish: &Wish) -> Result<()> {
    let missing = missing();
    ensure!(missing.is_empty(), "{}", advice(&missing));
    let kind = Kind {
        bluestore: wish.bluestore,
        cephx: wish.cephx,
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
/// If a daemon of it does not end.
pub(crate) fn stop(wish: &Wish) -> Result<()> {
    let directory = directory(wish)?;
    let ended = cluster::stop(&directory)?;
    println!("{}: {ended} daemons have ended", directory.display());
    Ok(())
}

/// Runs the tests that need a cluster, on each kind of one.
///
/// # Errors
/// The first that fails. What a machine lacks is a reason to skip.
pub(crate) fn test(steps: &mut Steps, wish: &Wish) -> Result<()> {
    let missing = missing();
    if !missing.is_empty() {
        steps.skip(NAME, &advice(&missing));
        return Ok(());
    }
    let program = steps.command_under_test()?;
    let directory = directory(wish)?;
    for kind in KINDS {
        let cluster = steps.time(&format!("a Ceph cluster, {kind}"), || {
            Cluster::start(&directory, kind)
        })?;
        let mut tests = cargo("test -p blkmq --test end_to_end rbd:: -- --test-threads=1");
        tests.env(VARIABLE, &directory).env("BLKMQ_BIN", &program);
        steps.run(&format!("tests on it, {kind}"), skips::listed(&mut tests)?)?;
        cluster.stop()?;
    }
    Ok(())
}

fn directory(wish: &Wish) -> Result<PathBuf> {
    match &wish.directory {
        Some(directory) => Ok(std::path::absolute(directory)?),
        None => Ok(target_dir()?.join("ceph")),
    }
}

/// The Debian packages that are not installed.
fn missing() -> Vec<&'static str> {
    let tools = TOOLS.iter().filter(|(tool, _)| find_tool(tool).is_none());
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

const NAME: &str = "tests with a Ceph cluster";
/// Where the tests find the directory of the cluster.
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
/// Once as quick as it can be, and once with keys and a store that outlives its OSD.
const KINDS: [Kind; 2] = [
    Kind {
        bluestore: false,
        cephx: false,
    },
    Kind {
        bluestore: true,
        cephx: true,
    },
];
