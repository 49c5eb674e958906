//! A scene that is played through a front door: `blkmq serve` as a process of its own, with one queue, and a disk
//! and a group for each tenant; or two such processes, if the drive is another server's disk.

use std::fmt::Write;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blkmq_core::sched::ElevatorType;

use super::super::images::Images;
use super::super::processes::{self, Process, Visit};
use super::super::scene::{Scene, Tenant};
use super::super::{Client, Door};
use crate::args::Plan;
use crate::server::Running;
use crate::usage::Usage;
use blkmq_testkit::Scratch;

/// How the daemon is started.
pub(super) struct Server {
    pub(super) program: PathBuf,
    pub(super) reactors: u16,
    pub(super) door: Door,
    pub(super) client: Client,
}

/// How the daemon schedules.
pub(super) struct Schedule {
    pub(super) kind: &'static ElevatorType,
    /// Bytes per second that each tenant may have at most.
    pub(super) caps: Option<Vec<u64>>,
}

/// Where the tenants' disks are.
pub(super) enum Drive<'a> {
    /// An image each.
    Images(&'a Images),
    /// Equal parts of the first image: what another server has of it, too.
    Parts(&'a Images),
    /// Parts of one disk of another server, whose disk is the first image.
    Nbd(&'a Images),
    /// A null disk each, with these keys.
    Model(&'a str),
}

impl Server {
    /// Plays a scene, with a client for each tenant. The daemon runs for this scene only.
    ///
    /// # Errors
    /// If the daemon does not start, or a client fails; the error contains the daemon's output.
    pub(super) fn play(
        &self,
        scene: &Scene,
        schedule: &Schedule,
        drive: &Drive<'_>,
        plan: &Plan,
    ) -> Result<Visit> {
        let (disks, _other) = match drive {
            Drive::Images(images) => (on_images(scene, images, IMAGES_MAX), None),
            Drive::Parts(images) => (on_images(scene, images, 1), None),
            Drive::Model(keys) => (on_model(scene, keys), None),
            Drive::Nbd(images) => {
                let other = self.start(&remote(images))?;
                (on_nbd(scene, images.each_bytes(), other.place()), Some(other))
            }
        };
        let ours = self.start(&format!("{disks}{}", shared(scene, schedule, self.reactors)))?;
        let process = |place: usize, _: &Tenant| self.process(&ours, place);
        let usage = || Usage::of(ours.pid()).unwrap_or_default();
        processes::play(scene, plan, process, usage).with_context(|| ours.last_words())
    }

    /// The client of the tenant at `place`.
    fn process(&self, ours: &Running, place: usize) -> Result<Process> {
        let (disk, socket) = (disk(place), ours.place());
        if self.client == Client::Fio {
            let uri = format!("--uri=nbd+unix:///{disk}?socket={}", socket.display());
            return Ok(Process::Fio {
                command: Command::new("fio"),
                // fio accepts an engine's option only after the engine's name.
                target: vec!["--ioengine=nbd".into(), uri],
            });
        }
        let mut command = Command::new(std::env::current_exe().context("finding this program")?);
        command.arg("client");
        match self.door {
            Door::Nbd => command.arg("--nbd").arg(socket).args(["--export", &disk]),
            Door::VhostUser => command.arg("--vhost-user").arg(ours.dir().path(&disk)),
        };
        Ok(Process::Own(command))
    }

    /// Says whether it knows the sandbox: it may be an older build.
    fn has_sandbox(&self) -> bool {
        let help = Command::new(&self.program).args(["serve", "--help"]).output();
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--sandbox"))
    }

    /// Starts it with this configuration, to which only the addresses are added. It always has one for NBD, where it
    /// greets when it serves.
    fn start(&self, config: &str) -> Result<Running> {
        let dir = Scratch::new();
        let (file, socket) = (dir.path("blkmq.toml"), dir.path("s"));
        let mut config = format!(
            "{config}[[export]]\nnbd = {}\n",
            text(&format!("unix:{}", socket.display()))
        );
        if self.door == Door::VhostUser {
            let sockets = text(&format!("unix:{}", dir.path("{disk}").display()));
            let _ = write!(config, "[[export]]\nvhost-user = {sockets}\n");
        }
        fs::write(&file, config).with_context(|| format!("writing {}", file.display()))?;
        let mut command = Command::new(&self.program);
        command.args(["serve", "-c"]).arg(&file);
        if self.has_sandbox() {
            // Who is in one may not open the descriptors of another process, which the images are.
            command.args(["--sandbox", "off"]);
        }
        Running::start(command, dir, socket)
    }
}

/// How many images a scene needs: of many tenants the last share one.
pub(super) fn images_of(scene: &Scene) -> usize {
    scene.tenants().len().min(IMAGES_MAX)
}

/// The disks of the tenants, an image each; where there are more tenants than images may be, the rest have equal parts of
/// the last image.
fn on_images(scene: &Scene, images: &Images, images_max: usize) -> String {
    let mut config = String::new();
    let direct = if images.is_direct() { "on" } else { "auto" };
    let file = |place: usize, name: &str| {
        let file = text(&images.path(place).to_string_lossy());
        format!("[disk.{name}]\nfile = {file}\ndirect = \"{direct}\"\nqueue = \"{QUEUE}\"\n")
    };
    let tenants = scene.tenants().len();
    let own = if tenants > images_max {
        images_max - 1
    } else {
        tenants
    };
    for place in 0..own {
        let name = disk(place);
        let _ = writeln!(config, "{}group = \"/{name}\"", file(place, &name));
    }
    if own < tenants {
        config += &file(own, REMOTE);
        config += &parts(own..tenants, images.each_bytes());
    }
    config
}

/// The disks of the tenants on a modelled drive.
fn on_model(scene: &Scene, keys: &str) -> String {
    let mut config = String::new();
    for place in 0..scene.tenants().len() {
        let name = disk(place);
        let _ = write!(
            config,
            "[disk.{name}]\nnull = \"1G\"\n{keys}group = \"/{name}\"\nqueue = \"{QUEUE}\"\n"
        );
    }
    config
}

/// The disks of the tenants, equal parts of another server's.
fn on_nbd(scene: &Scene, bytes: u64, socket: &Path) -> String {
    let uri = text(&format!("nbd+unix:///{REMOTE}?socket={}", socket.display()));
    let parts = parts(0..scene.tenants().len(), bytes);
    format!("[disk.{REMOTE}]\nnbd = {uri}\nqueue = \"{QUEUE}\"\n{parts}")
}

/// Disks that are equal parts of a disk of so many bytes.
fn parts(places: Range<usize>, bytes: u64) -> String {
    let part = part(bytes, places.len());
    let part_of = |(index, place): (u64, usize)| {
        let (name, start) = (disk(place), index * part);
        format!("[disk.{name}]\nlinear = \"{REMOTE}:{start}:{part}\"\ngroup = \"/{name}\"\n")
    };
    (0..).zip(places).map(part_of).collect()
}

/// Bytes of each of so many equal parts of a disk.
pub(super) fn part(bytes: u64, count: usize) -> u64 {
    bytes / count as u64 / PART * PART
}

/// The other server's disk, without a scheduler.
fn remote(images: &Images) -> String {
    let file = text(&images.path(0).to_string_lossy());
    format!("[disk.{REMOTE}]\nfile = {file}\n")
}

/// The queue and the groups.
fn shared(scene: &Scene, schedule: &Schedule, reactors: u16) -> String {
    let kind = schedule.kind;
    let mut config = format!("[daemon]\nreactors = {reactors}\n[queue.{QUEUE}]\nsched = \"{kind}\"\n");
    for (place, tenant) in scene.tenants().iter().enumerate() {
        let weight = scene.weight(tenant);
        let _ = write!(config, "[group.\"/{}\"]\nweight = {weight}\n", disk(place));
        if let Some(caps) = &schedule.caps {
            let _ = writeln!(config, "bps = \"{}\"", caps[place]);
        }
    }
    config
}

/// The name of a tenant's disk, and of its group.
fn disk(place: usize) -> String {
    format!("t{place}")
}

/// A text as a TOML string.
fn text(words: &str) -> String {
    format!("\"{}\"", words.replace('\\', "\\\\").replace('"', "\\\""))
}

const QUEUE: &str = "q";
/// The disk that others are parts of.
const REMOTE: &str = "remote";
/// A scene has the largest number of images where a light tenant has one beside eight floods.
const IMAGES_MAX: usize = 9;
/// Parts begin at multiples of this number of bytes.
const PART: u64 = 64 << 10;

#[cfg(test)]
mod tests {
    use super::super::super::spec;
    use blkmq_core::sched;

    use super::*;

    #[test]
    fn every_tenant_has_a_group_of_its_weight() {
        let scene = spec::parse("1:4:4k,10:4:4k").unwrap();
        let schedule = |caps| Schedule {
            kind: sched::BFQ,
            caps,
        };
        assert_eq!(
            shared(&scene, &schedule(None), 2),
            "[daemon]\nreactors = 2\n[queue.q]\nsched = \"bfq\"\n\
             [group.\"/t0\"]\nweight = 100\n[group.\"/t1\"]\nweight = 1000\n"
        );
        let capped = shared(&scene, &schedule(Some(vec![1 << 20, 5 << 20])), 2);
        assert!(capped.ends_with("weight = 1000\nbps = \"5242880\"\n"), "{capped}");
    }

    #[test]
    fn parts_of_another_servers_disk_do_not_overlap() {
        let scene = spec::parse("1:4:4k,1:4:4k,1:4:4k").unwrap();
        let config = on_nbd(&scene, 10 << 20, Path::new("/x/s"));
        for part in [
            "remote:0:3473408",
            "remote:3473408:3473408",
            "remote:6946816:3473408",
        ] {
            assert!(config.contains(&format!("linear = \"{part}\"")), "{config}");
        }
    }

    #[test]
    fn tenants_beside_the_kernels_have_parts_of_one_image() {
        let scene = spec::parse("1:4:4k,1:4:4k").unwrap();
        let mut images = Images::in_dirs(&[std::env::temp_dir()], 2 << 20).unwrap();
        images.fill(1).unwrap();
        let config = on_images(&scene, &images, 1);
        assert_eq!(config.matches("file = ").count(), 1, "{config}");
        assert_eq!(part(2 << 20, 2), 1 << 20);
        for linear in ["remote:0:1048576", "remote:1048576:1048576"] {
            assert!(config.contains(&format!("linear = \"{linear}\"")), "{config}");
        }
    }

    #[test]
    fn text_survives_quotes_and_backslashes() {
        assert_eq!(text(r#"a"b\c"#), r#""a\"b\\c""#);
    }
}
