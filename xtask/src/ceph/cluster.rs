//! The components of a cluster for tests: one monitor, one OSD, a pool, a user for disks; its files, and
//! its end. All of it is in one directory, and listens only on the loopback.

use std::fmt;
use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use blkmq_testkit::tools::find;

/// The properties of a cluster.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    /// The OSD keeps its objects in a file that survives it; otherwise in memory.
    pub(super) bluestore: bool,
    /// Clients and daemons have to show a key.
    pub(super) cephx: bool,
    /// After how many seconds it forgets a client that has an image open and says nothing.
    pub(super) watch_s: u64,
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let store = if self.bluestore { "bluestore" } else { "memstore" };
        let keys = if self.cephx { "cephx" } else { "no keys" };
        write!(f, "{store}, {keys}")
    }
}

/// A running cluster; dropping it ends it.
pub(super) struct Cluster {
    directory: PathBuf,
}

impl Cluster {
    /// Starts a cluster in a directory, which is made if necessary; it must be empty or have the
    /// remains of an earlier cluster.
    pub(super) fn start(directory: &Path, kind: Kind) -> Result<Self> {
        ensure!(
            pids(directory).is_empty(),
            "a cluster runs in {0}; run: cargo xtask ceph --stop {0}",
            directory.display()
        );
        clear(directory)?;
        for name in ["mon", "osd"] {
            fs::create_dir_all(directory.join(name))?;
        }
        let cluster = Self {
            directory: directory.to_owned(),
        };
        let log = |error: anyhow::Error| error.context(cluster.last_words());
        cluster.start_monitor(kind).map_err(log)?;
        cluster.start_osd(kind).map_err(log)?;
        cluster.make_pool(kind).map_err(log)?;
        Ok(cluster)
    }

    /// Lets it run on.
    pub(super) fn leave(self) {
        std::mem::forget(self);
    }

    /// Ends it, and removes its files.
    pub(super) fn stop(self) -> Result<()> {
        stop(&self.directory)?;
        Ok(())
    }

    /// The directory of its files.
    pub(super) fn directory(&self) -> PathBuf {
        self.directory.clone()
    }

    /// Its configuration, for clients.
    pub(super) fn conf_in(directory: &Path) -> PathBuf {
        directory.join(CONF)
    }

    /// Makes an image of `mib` MiB, with data in every block of it.
    pub(super) fn fill_image(&self, name: &str, mib: u64) -> Result<()> {
        self.run("rbd", &format!("create --size {mib}M {name}"), &[])?;
        let pattern = "--io-size 1M --io-threads 4 --io-pattern seq";
        self.run(
            "rbd",
            &format!("bench {name} --io-type write {pattern} --io-total {mib}M"),
            &[],
        )
    }

    /// The process of its OSD.
    pub(super) fn osd(&self) -> Result<u32> {
        let file = self.directory.join("osd.0.pid");
        let pid = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
        Ok(pid.trim().parse()?)
    }

    fn start_monitor(&self, kind: Kind) -> Result<()> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let (id, map) = (id.trim(), self.word("monmap"));
        fs::write(self.directory.join(CONF), self.conf(id, port, kind))?;
        let keys = "--create-keyring --gen-key";
        let monitor = self.word("mon.keyring");
        self.run(
            "ceph-authtool",
            &format!("{monitor} {keys} -n mon. --cap mon"),
            &["allow *"],
        )?;
        let admin = format!("{} {keys} -n client.admin --cap mon", self.word("admin.keyring"));
        let all = "allow *";
        self.run(
            "ceph-authtool",
            &admin,
            &[all, "--cap", "osd", all, "--cap", "mgr", all],
        )?;
        let import = format!("{monitor} --import-keyring {}", self.word("admin.keyring"));
        self.run("ceph-authtool", &import, &[])?;
        let address = format!("[v2:127.0.0.1:{port}]");
        self.run(
            "monmaptool",
            &format!("--create --fsid {id} --addv a {address} {map}"),
            &[],
        )?;
        self.run(
            "ceph-mon",
            &format!("--mkfs -i a --monmap {map} --keyring {monitor}"),
            &[],
        )?;
        self.run("ceph-mon", "-i a", &[])
    }

    fn start_osd(&self, kind: Kind) -> Result<()> {
        let id = fs::read_to_string("/proc/sys/kernel/random/uuid")?;
        let id = id.trim();
        self.run("ceph", &format!("osd new {id}"), &[])?;
        if kind.cephx {
            let keyring = self.word("osd/keyring");
            let rights = ["mon", "allow profile osd", "osd", "allow *", "-o", &keyring];
            self.run("ceph", "auth get-or-create osd.0", &rights)?;
        }
        self.run("ceph-osd", &format!("--mkfs -i 0 --osd-uuid {id}"), &[])?;
        self.run("ceph-osd", "-i 0", &[])
    }

    /// A pool `rbd`, and the user `client.blkmq`, who may use only this pool.
    fn make_pool(&self, kind: Kind) -> Result<()> {
        self.run("ceph", "osd pool create rbd 8", &[])?;
        self.run("rbd", "pool init rbd", &[])?;
        if kind.cephx {
            let keyring = self.word("blkmq.keyring");
            let rights = [
                "mon",
                "profile rbd",
                "osd",
                "profile rbd pool=rbd",
                "-o",
                &keyring,
            ];
            self.run("ceph", "auth get-or-create client.blkmq", &rights)?;
        }
        Ok(())
    }

    /// Runs one of Ceph's programs, with this cluster's configuration.
    fn run(&self, program: &str, words: &str, more: &[&str]) -> Result<()> {
        let path = find(program).with_context(|| format!("{program} is not installed"))?;
        let mut command = Command::new(path);
        command.args(words.split_whitespace()).args(more);
        command.arg("-c").arg(self.directory.join(CONF));
        // The daemons that it starts continue to run, and would keep a pipe of our output open.
        let mut log = fs::File::options();
        let log = log
            .create(true)
            .append(true)
            .open(self.directory.join("commands.log"))?;
        command.stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let mut child = command.spawn().with_context(|| format!("starting {program}"))?;
        let end = Instant::now() + COMMAND_MAX;
        loop {
            match child.try_wait()? {
                Some(status) if status.success() => return Ok(()),
                Some(status) => bail!("{program} {words}: {status}"),
                None if Instant::now() > end => {
                    child.kill()?;
                    child.wait()?;
                    bail!("{program} {words}: not done after {COMMAND_MAX:?}");
                }
                None => thread::sleep(PAUSE),
            }
        }
    }

    /// The last output of the programs.
    fn last_words(&self) -> String {
        let said = fs::read_to_string(self.directory.join("commands.log")).unwrap_or_default();
        let lines: Vec<&str> = said.lines().collect();
        let last = &lines[lines.len().saturating_sub(10)..];
        format!("the cluster's programs said last:\n{}", last.join("\n"))
    }

    fn word(&self, name: &str) -> String {
        self.directory.join(name).display().to_string()
    }

    fn conf(&self, id: &str, port: u16, kind: Kind) -> String {
        let keys = if kind.cephx { "cephx" } else { "none" };
        let store = if kind.bluestore { "bluestore" } else { "memstore" };
        CONFIGURATION
            .replace("IDENTITY", id)
            .replace("PORT", &port.to_string())
            .replace("KEYS", keys)
            .replace("STORE", store)
            .replace("WATCH", &kind.watch_s.to_string())
            .replace("DIRECTORY", &self.directory.display().to_string())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // An earlier error is the one to report.
        let _ = end_daemons(&self.directory);
    }
}

/// Ends the cluster of a directory and removes its files. Returns how many daemons there were.
pub(super) fn stop(directory: &Path) -> Result<usize> {
    let ended = end_daemons(directory)?;
    clear(directory)?;
    Ok(ended)
}

/// Ends the daemons by their pid files, the OSD first. A stopped one is continued, so that it can
/// end.
fn end_daemons(directory: &Path) -> Result<usize> {
    let pids = pids(directory);
    for pid in &pids {
        signal("TERM", *pid)?;
        signal("CONT", *pid)?;
        let end = Instant::now() + END_MAX;
        while is_ours(*pid, directory) {
            if Instant::now() > end {
                signal("KILL", *pid)?;
            }
            ensure!(
                Instant::now() < end + END_MAX,
                "process {pid} of the cluster does not end"
            );
            thread::sleep(PAUSE);
        }
    }
    Ok(pids.len())
}

/// The running daemons, by their pid files. A file may be left from a daemon that has ended, and
/// another process may have its number.
fn pids(directory: &Path) -> Vec<u32> {
    let pid = |name| {
        let text = fs::read_to_string(directory.join(name)).ok()?;
        text.trim().parse().ok().filter(|pid| is_ours(*pid, directory))
    };
    ["osd.0.pid", "mon.a.pid"].into_iter().filter_map(pid).collect()
}

/// Says whether a process was started with the configuration of this directory.
fn is_ours(pid: u32, directory: &Path) -> bool {
    let Ok(words) = fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let conf = Cluster::conf_in(directory);
    let conf = conf.as_os_str().as_encoded_bytes();
    words.split(|byte| *byte == 0).any(|word| word == conf)
}

pub(super) fn signal(name: &str, pid: u32) -> Result<()> {
    let program = find("kill").context("kill is not installed")?;
    let mut command = Command::new(program);
    command.args([format!("-{name}"), pid.to_string()]);
    // It fails if the process has just ended, as it should.
    command.stderr(Stdio::null()).status()?;
    Ok(())
}

/// Removes the files of a cluster that has ended, and no others.
fn clear(directory: &Path) -> Result<()> {
    if !directory.exists() {
        return Ok(());
    }
    let is_empty = fs::read_dir(directory)?.next().is_none();
    ensure!(
        is_empty || directory.join(CONF).is_file(),
        "{} has files that are none of a cluster's: name another directory",
        directory.display()
    );
    fs::remove_dir_all(directory).with_context(|| format!("removing {}", directory.display()))
}

const CONF: &str = "ceph.conf";
const COMMAND_MAX: Duration = Duration::from_secs(60);
const END_MAX: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(20);
/// There is no manager, since nothing here needs one. A single OSD that was stopped for longer
/// than the grace of heartbeats would serve no client afterwards, since its lease for reads would
/// have expired; so the grace is long. A monitor refuses a disk of which less than 5 % is free,
/// however much that is; it needs some MiB, so it is configured not to check.
const CONFIGURATION: &str = "\
[global]
fsid = IDENTITY
mon host = v2:127.0.0.1:PORT/0
public network = 127.0.0.0/8
auth cluster required = KEYS
auth service required = KEYS
auth client required = KEYS
auth allow insecure global id reclaim = false
run dir = DIRECTORY
admin socket =
osd heartbeat grace = 600
log file = DIRECTORY/$name.log
pid file = DIRECTORY/$name.pid
[client]
log file =
pid file =
[client.admin]
keyring = DIRECTORY/admin.keyring
[client.blkmq]
keyring = DIRECTORY/blkmq.keyring
[mon]
mon data = DIRECTORY/mon
mon cluster log file = DIRECTORY/cluster.log
mon data avail warn = 0
mon data avail crit = 0
mon allow pool size one = true
mon warn on pool no redundancy = false
osd pool default size = 1
osd pool default min size = 1
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
[osd]
osd data = DIRECTORY/osd
keyring = DIRECTORY/osd/keyring
osd objectstore = STORE
osd client watch timeout = WATCH
memstore device bytes = 1073741824
bluestore block size = 4294967296
bluestore block create = true
";
