//! The scene of an attack: a daemon with disks of the tenant and of the attackers, in one of several
//! settings (an ordinary one, a log that cannot be written, little memory, another clock).

use std::fs::{self, File};
use std::io::{Read, Seek};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

use crate::daemon::Daemon;
use crate::mount::{Cache, Mount};
use anyhow::{Context, Result, bail, ensure};
use blkmq_testkit::Scratch;
use rustix::process::{Resource, Rlimit, prlimit};

use crate::siege::attack::{
    BIG, BIG_BYTES, BROKEN, CUT, CUT_BYTES, DISK_BYTES, EXTENTS, EXTENTS_BYTES, FULL, HOLES, HOLES_BYTES,
    LATE, PREY, PREY_BYTES, REMOTES, SLOW, Servers, Site,
};
use crate::siege::tenant::{self, GOOD, GOOD_BYTES, GUEST, GUEST_BYTES};
use crate::siege::vitals::data_bytes;
use crate::siege::wire::MARK;

/// How the daemon's environment differs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Setting {
    /// In nothing.
    Ordinary,
    /// Its log is on a full device (`/dev/full`).
    LogFull,
    /// Its log is a pipe that nobody reads.
    LogUnread,
    /// The smallest `nbd_memory` that is allowed.
    ShortMemory,
    /// CLOCK_MONOTONIC is thirty years ahead of the host's, in a time namespace.
    OtherClock,
}

/// What all daemons of a siege share: the tenant's image and the drives.
#[derive(Debug)]
pub struct Scene {
    program: PathBuf,
    /// Dropped before the scratch directory, which contains them.
    mounts: Option<[Mount; 3]>,
    /// Why there are no mounts.
    pub no_mounts: Option<String>,
    tcp: SocketAddr,
    servers: Servers,
    scratch: Scratch,
    /// On a filesystem in memory, if there is one, so that the tenant's latencies depend only on
    /// the daemon.
    images: Scratch,
}

/// A daemon under attack.
#[derive(Debug)]
pub struct Target {
    /// The daemon.
    pub daemon: Daemon,
    /// Its `nbd_memory`, in bytes.
    pub nbd_memory: u64,
    /// Where what it logs can be read, if it can.
    log: File,
}

impl Setting {
    /// All settings.
    pub const ALL: [Self; 5] = [
        Self::Ordinary,
        Self::LogFull,
        Self::LogUnread,
        Self::ShortMemory,
        Self::OtherClock,
    ];

    /// Returns its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Ordinary => "ordinary",
            Self::LogFull => "log-full",
            Self::LogUnread => "log-unread",
            Self::ShortMemory => "short-memory",
            Self::OtherClock => "other-clock",
        }
    }
}

impl Target {
    /// Returns everything in its log; of a pipe, what nobody has read, when it has ended.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn log(&self) -> Result<String> {
        let (mut bytes, mut log) = (Vec::new(), &self.log);
        // A pipe has no beginning to go back to.
        let _ = log.rewind();
        log.read_to_end(&mut bytes).context("the daemon's log")?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Returns the end of its log.
    pub fn last_words(&self) -> String {
        let text = self.log().unwrap_or_else(|error| format!("{error:#}"));
        let lines: Vec<&str> = text.lines().collect();
        lines[lines.len().saturating_sub(LINES_MAX)..].join("\n")
    }
}

impl Scene {
    /// Makes the images and filesystems.
    ///
    /// # Errors
    /// If they cannot be made.
    pub fn new(program: &Path) -> Result<Self> {
        let scratch = Scratch::new();
        let in_memory = Path::new(IN_MEMORY);
        let images = match in_memory.is_dir() {
            true => Scratch::below(in_memory),
            false => Scratch::new(),
        };
        let file = |name: &str, bytes: u64| -> Result<File> {
            let file = File::create(images.path(name)).context("making an image")?;
            file.set_len(bytes).context("making an image")?;
            Ok(file)
        };
        file(GOOD, GOOD_BYTES as u64)?;
        file(CUT, CUT_BYTES)?;
        // Where an extent costs something.
        File::create(scratch.path(EXTENTS))
            .and_then(|file| file.set_len(EXTENTS_BYTES))
            .context("making an image")?;
        let holes = file(HOLES, HOLES_BYTES)?;
        for offset in (0..HOLES_BYTES).step_by(8192) {
            holes.write_all_at(&[MARK; 4096], offset)?;
        }
        let mount = |name: &str| {
            let dir = scratch.path(name);
            fs::create_dir_all(&dir)?;
            Mount::new(&dir, DISK_BYTES, Cache::Bypassed)
        };
        let (mounts, no_mounts) = match mount(FULL).and_then(|full| Ok([full, mount(SLOW)?, mount(LATE)?])) {
            Ok(mounts) => (Some(mounts), None),
            Err(error) => (None, Some(error.to_string())),
        };
        Ok(Self {
            program: program.to_owned(),
            tcp: free_address()?,
            servers: Servers::start(scratch.path("servers.sock"))?,
            mounts,
            no_mounts,
            scratch,
            images,
        })
    }

    /// Returns what the attackers know of the daemon.
    pub fn site(&self, target: &Target) -> Site<'_> {
        Site {
            socket: target.daemon.socket().to_owned(),
            tcp: self.tcp,
            vhost_user: self.path(VHOST_USER),
            pid: target.daemon.pid(),
            program: self.program.clone(),
            control: self.path(CONTROL),
            cut: self.images.path(CUT),
            cutting: Mutex::default(),
            extents: self.path(EXTENTS),
            mounts: self.mounts.as_ref(),
            servers: &self.servers,
            place: AtomicU64::new(0),
        }
    }

    /// Starts a daemon and fills its disks, so that their memory does not count as growth.
    ///
    /// # Errors
    /// If it does not start, or this machine lacks what the setting needs: [`Unavailable`].
    pub fn start(&self, setting: Setting) -> Result<Target> {
        let nbd_memory = match setting {
            Setting::ShortMemory => NBD_MEMORY_MIN,
            _ => NBD_MEMORY,
        };
        let (config, socket) = (self.path("siege.toml"), self.path("nbd.sock"));
        fs::write(&config, self.config(&socket, nbd_memory)).context("writing the configuration")?;
        let mut command = match setting {
            Setting::OtherClock => in_other_clock(&self.program)?,
            _ => Command::new(&self.program),
        };
        command
            .arg("serve")
            .arg("-c")
            .arg(&config)
            .env("RUST_BACKTRACE", "1");
        let (writer, log) = self.log(setting)?;
        let daemon = Daemon::spawn(command, &socket, writer)?;
        tenant::fill(&socket, PREY, PREY_BYTES, |_| [MARK; 512])?;
        limit_memory(&daemon)?;
        if setting == Setting::OtherClock {
            let of = |pid: &str| fs::read_link(format!("/proc/{pid}/ns/time"));
            let daemons = daemon.pid().as_raw_nonzero().to_string();
            ensure!(
                of(&daemons)? != of("self")?,
                Unavailable("the daemon is not in a time namespace of its own".to_owned())
            );
        }
        Ok(Target {
            daemon,
            nbd_memory,
            log,
        })
    }

    /// Returns where the daemon's log goes, and a file from which it can be read, if it can.
    fn log(&self, setting: Setting) -> Result<(Stdio, File)> {
        Ok(match setting {
            Setting::LogFull => {
                let full = File::options().write(true).open(FULL_DEVICE);
                let nothing = File::open(NO_DEVICE).context(NO_DEVICE)?;
                (full.context(FULL_DEVICE)?.into(), nothing)
            }
            Setting::LogUnread => {
                // The reader stays open: without it, writing would fail instead of blocking.
                let (reader, writer) = rustix::pipe::pipe().context("making a pipe")?;
                (writer.into(), File::from(reader))
            }
            _ => {
                let path = self.path("daemon.log");
                let log = File::create(&path).context("making the daemon's log")?;
                (log.into(), File::open(path).context("the daemon's log")?)
            }
        })
    }

    fn config(&self, socket: &Path, nbd_memory: u64) -> String {
        let image = |name: &str| self.images.path(name).display().to_string();
        let mut text = format!(
            r#"[daemon]
reactors = 2
shutdown_limit = "10s"

[control]
socket = "unix:{}"

[nbd]
memory = {nbd_memory}
handshake_deadline = "2s"

[disk.{GOOD}]
file = "{}"
block_size = 512
group = "/tenant"
queue = "tenants"

[queue.tenants]
sched = "bfq"

[disk.{EXTENTS}]
file = "{}"
queue = "tenants"
group = "/hostile/extents"

[disk.{GUEST}]
ram = {GUEST_BYTES}
group = "/tenant"

[disk.{PREY}]
ram = {PREY_BYTES}
group = "/hostile/prey"

[disk.{BIG}]
null = {BIG_BYTES}
group = "/hostile/big"

[disk.{BROKEN}]
null = {DISK_BYTES}
bad = "0-{}"
timeout_rate = 0.002
queue = "broken"
group = "/hostile/broken"

[queue.broken]
timeout = "1s"

[disk.{CUT}]
file = "{}"
block_size = 512
queue = "cut"
group = "/hostile/cut"

[disk.{HOLES}]
file = "{}"
queue = "holes"
group = "/hostile/holes"

[[export]]
nbd = "unix:{}"
connections = {CONNECTIONS_MAX}

[[export]]
nbd = "tcp:{}"
disks = ["{PREY}", "{BIG}", "{HOLES}"]

[[export]]
vhost-user = "unix:{}"
disks = ["{BIG}"]
"#,
            self.path(CONTROL).display(),
            image(GOOD),
            self.path(EXTENTS).display(),
            DISK_BYTES / 2,
            image(CUT),
            image(HOLES),
            socket.display(),
            self.tcp,
            self.path(VHOST_USER).display(),
        );
        let mounts = self.mounts.iter().flatten();
        for ((name, queue), mount) in [(FULL, FULL), (SLOW, SLOW), (LATE, "tenants")]
            .into_iter()
            .zip(mounts)
        {
            let image = mount.image().display().to_string();
            text += &format!(
                "\n[disk.{name}]\nfile = \"{image}\"\nblock_size = 512\ngroup = \"/hostile/{name}\"\nqueue = \"{queue}\"\n"
            );
        }
        for (name, reconnect) in REMOTES.into_iter().zip(["0s", "0s", "2s", "2s"]) {
            let socket = self.servers.path().display();
            text += &format!(
                "\n[disk.{name}]\nnbd = \"nbd+unix:///{name}?socket={socket}\"\nconnections = 4\ntimeout = \"1s\"\n\
                 connect_timeout = \"1s\"\nreconnect = \"{reconnect}\"\ngroup = \"/hostile/{name}\"\n"
            );
        }
        text
    }

    fn path(&self, name: &str) -> PathBuf {
        self.scratch.path(name)
    }
}

/// The reason why this machine cannot provide a setting, which is then skipped.
#[derive(Debug)]
pub struct Unavailable(pub String);

impl std::error::Error for Unavailable {}

impl std::fmt::Display for Unavailable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

/// A command that runs the program with CLOCK_MONOTONIC and CLOCK_BOOTTIME far ahead.
fn in_other_clock(program: &Path) -> Result<Command> {
    let words = ["--time", "--monotonic", AHEAD_S, "--boottime", AHEAD_S];
    let tried = Command::new("unshare").args(words).arg("true").output();
    match tried {
        Ok(output) if output.status.success() => {}
        Ok(output) => bail!(Unavailable(
            String::from_utf8_lossy(&output.stderr).trim().to_owned()
        )),
        Err(error) => bail!(Unavailable(format!("unshare: {error}"))),
    }
    let mut command = Command::new("unshare");
    command.args(words).arg(program);
    Ok(command)
}

/// Limits the daemon's memory to far more than it may use, so that a daemon that ignores its own
/// limits does not exhaust the host's memory.
fn limit_memory(daemon: &Daemon) -> Result<()> {
    let limit = data_bytes(daemon.pid())? + DATA_BYTES_MAX;
    let limit = Rlimit {
        current: Some(limit),
        maximum: Some(limit),
    };
    prlimit(Some(daemon.pid()), Resource::Data, limit).context("limiting the daemon's memory")?;
    Ok(())
}

fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind(("127.0.0.1", 0)).context("finding a free port")?;
    Ok(listener.local_addr()?)
}

/// Lines of the log that an error shows.
const LINES_MAX: usize = 40;
const NBD_MEMORY: u64 = 128 << 20;
const NBD_MEMORY_MIN: u64 = 32 << 20;
/// Fewer than the crowd attempts, so that some are refused.
const CONNECTIONS_MAX: u64 = 2000;
const DATA_BYTES_MAX: u64 = 2 << 30;
/// How long a daemon may take to end.
pub const END_TIME_MAX: Duration = Duration::from_secs(20);
const VHOST_USER: &str = "vhost.sock";
const CONTROL: &str = "control.sock";
const IN_MEMORY: &str = "/dev/shm";
const FULL_DEVICE: &str = "/dev/full";
const NO_DEVICE: &str = "/dev/null";
const AHEAD_S: &str = "946080000";
