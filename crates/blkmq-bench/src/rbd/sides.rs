//! The programs that do the I/O on an image: fio in process, by our engine and by its own; and servers behind
//! NBD, with fio as client.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{BLOCK_BYTES, RbdArgs};
use crate::args::Plan;
use crate::engine::Pattern;
use crate::fio;
use crate::rounds::Sample;
use crate::server::{Running, daemon};
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// fio, with an engine that does the I/O in its process.
pub(super) enum Client {
    /// With ours, from this library.
    Ours(PathBuf),
    /// With its own.
    Fio,
    /// The same without librbd's cache of writes, which ours does not use.
    FioUncached,
}

impl Client {
    pub(super) const fn name(&self) -> &'static str {
        match self {
            Self::Ours(_) => "ours",
            Self::Fio => "fio",
            Self::FioUncached => "fio-uncached",
        }
    }

    pub(super) fn measure(&self, args: &RbdArgs, rw: Pattern, depth: u32, plan: &Plan) -> Result<Sample> {
        let dir = Scratch::new();
        let mut conf = args.conf.clone();
        if matches!(self, Self::FioUncached) {
            let text = std::fs::read_to_string(&args.conf)
                .with_context(|| format!("reading {}", args.conf.display()))?;
            conf = dir.path("ceph.conf");
            std::fs::write(&conf, text + "\n[client]\nrbd cache = false\n")?;
        }
        let mut command = Command::new("fio");
        command.env("CEPH_CONF", conf);
        let own = match self {
            Self::Ours(library) => vec![
                "--thread".to_owned(),
                format!("--ioengine=external:{}", library.display()),
                format!("--disk={}", args.disk("bench", &args.image)),
            ],
            Self::Fio | Self::FioUncached => {
                let (pool, image) = args.parts();
                vec![
                    "--ioengine=rbd".to_owned(),
                    format!("--clientname={}", args.id),
                    format!("--pool={pool}"),
                    format!("--rbdname={image}"),
                ]
            }
        };
        let options = [own, load(rw, depth)].concat();
        let before = Usage::of_ended_children()?;
        let sample = fio::run_as(command, &options, Duration::ZERO, plan.window)?;
        let used = Usage::of_ended_children()? - before;
        // librbd's threads do most of it, and fio's own figure is of its jobs.
        Ok(Sample {
            usage: Usage {
                cpu_ns: used.cpu_ns,
                ..sample.usage
            },
            ..sample
        })
    }
}

/// A server of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Ours,
    QemuNbd,
    QemuStorageDaemon,
}

impl Server {
    pub(super) const ALL: [Self; 3] = [Self::Ours, Self::QemuNbd, Self::QemuStorageDaemon];

    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Ours => "ours",
            Self::QemuNbd => "qemu-nbd",
            Self::QemuStorageDaemon => "qemu-storage-daemon",
        }
    }

    pub(super) fn start(self, args: &RbdArgs) -> Result<Running> {
        let dir = Scratch::new();
        let socket = dir.path("s");
        Running::start(self.command(args, &socket)?, dir, socket)
    }

    fn command(self, args: &RbdArgs, socket: &Path) -> Result<Command> {
        let (socket, conf, id) = (socket.display(), args.conf.display(), &args.id);
        let (pool, image) = args.parts();
        let mut command;
        match self {
            Self::Ours => {
                command = ours()?;
                command
                    .args(["--disk", &args.disk("bench", &args.image)])
                    .args(["--nbd", &format!("unix:{socket}")]);
            }
            Self::QemuNbd => {
                command = Command::new("qemu-nbd");
                command
                    .args(["-t", "-f", "raw", "-x", "bench", "--cache=none", "-k"])
                    .args([
                        &socket.to_string(),
                        &format!("rbd:{pool}/{image}:id={id}:conf={conf}"),
                    ]);
            }
            Self::QemuStorageDaemon => {
                let disk = format!(
                    "driver=rbd,node-name=n,pool={pool},image={image},conf={conf},user={id},cache.direct=on"
                );
                command = Command::new("qemu-storage-daemon");
                command
                    .args(["--blockdev", &disk])
                    .args(["--nbd-server", &format!("addr.type=unix,addr.path={socket}")])
                    .args(["--export", "type=nbd,id=e,node-name=n,name=bench,writable=on"]);
            }
        }
        Ok(command)
    }

    pub(super) fn measure(self, args: &RbdArgs, rw: Pattern, depth: u32, plan: &Plan) -> Result<Sample> {
        let running = self.start(args)?;
        let options = [through_nbd("bench", running.place()), load(rw, depth)].concat();
        let before = Usage::of(running.pid())?;
        let sample = fio::run(&options, Duration::ZERO, plan.window).with_context(|| running.last_words())?;
        let used = Usage::of(running.pid())? - before;
        Ok(Sample {
            client: Some(sample.usage),
            usage: used,
            ..sample
        })
    }
}

/// `blkmq serve`, not yet started.
pub(super) fn ours() -> Result<Command> {
    let mut command = Command::new(daemon()?);
    command.args(["serve", "--control", "none"]);
    Ok(command)
}

/// fio's options for a disk that is served at a socket.
pub(super) fn through_nbd(disk: &str, socket: &Path) -> Vec<String> {
    // The engine's option exists only once the engine is named.
    vec![
        "--ioengine=nbd".to_owned(),
        format!("--uri=nbd+unix:///{disk}?socket={}", socket.display()),
    ]
}

fn load(rw: Pattern, depth: u32) -> Vec<String> {
    vec![
        format!("--rw={}", rw.name()),
        format!("--bs={BLOCK_BYTES}"),
        format!("--iodepth={depth}"),
    ]
}
