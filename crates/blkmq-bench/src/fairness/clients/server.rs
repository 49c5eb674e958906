//! A scene that is played over NBD: `blkmq serve` as a process of its own, with one queue, and a disk and a
//! group for each tenant; or two such processes, if the drive is another server's disk.

use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use blkmq_core::sched::ElevatorType;

use super::super::images::Images;
use super::super::processes::{self, Process, Visit};
use super::super::scene::{Scene, Tenant};
use crate::args::Plan;
use crate::server::{Running, Scratch};
use crate::usage::Usage;

/// How the daemon is started.
pub(super) struct Server {
    pub(super) program: PathBuf,
    pub(super) reactors: u16,
}

/// Where the tenants' disks are.
pub(super) enum Drive<'a> {
    /// An image each.
    Images(&'a Images),
    /// Parts of one disk of another server, whose disk is the first image.
    Nbd(&'a Images),
    /// A null disk each, with these keys.
    Model(&'a str),
}

impl Server {
    /// Plays a scene under an elevator, with an fio for each tenant. The daemon runs for this scene
    /// only.
    ///
    /// # Errors
    /// If the daemon does not start, or a client fails; the error contains the daemon's output.
    pub(super) fn play(
        &self,
        scene: &Scene,
        kind: &'static ElevatorType,
        drive: &Drive<'_>,
        plan: &Plan,
    ) -> Result<Visit> {
        let (disks, _other) = match drive {
            Drive::Images(images) => (on_images(scene, images), None),
            Drive::Model(keys) => (on_model(scene, keys), None),
            Drive::Nbd(images) => {
                let other = self.start(&remote(images))?;
                (on_nbd(scene, images.each_bytes(), other.place()), Some(other))
            }
        };
        let ours = self.start(&format!("{disks}{}", shared(scene, kind, self.reactors)))?;
        let process = |place: usize, _: &Tenant| {
            Ok(Process {
                command: Command::new("fio"),
                // fio accepts an engine's option only after the engine's name.
                target: vec![
                    "--ioengine=nbd".into(),
                    format!(
                        "--uri=nbd+unix:///{}?socket={}",
                        disk(place),
                        ours.place().display()
                    ),
                ],
            })
        };
        let usage = || Usage::of(ours.pid()).unwrap_or_default();
        processes::play(scene, plan, process, usage).with_context(|| ours.last_words())
    }

    /// Says whether it knows the sandbox: it may be an older build.
    fn has_sandbox(&self) -> bool {
        let help = Command::new(&self.program).args(["serve", "--help"]).output();
        help.is_ok_and(|help| String::from_utf8_lossy(&help.stdout).contains("--sandbox"))
    }

    /// Starts it with this configuration, to which only the address is added.
    fn start(&self, config: &str) -> Result<Running> {
        let dir = Scratch::make()?;
        let (file, socket) = (dir.join("blkmq.toml"), dir.join("s"));
        let config = format!(
            "{config}[[export]]\nnbd = {}\n",
            text(&format!("unix:{}", socket.display()))
        );
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

/// The disks of the tenants, an image each.
fn on_images(scene: &Scene, images: &Images) -> String {
    let mut config = String::new();
    let direct = if images.is_direct() { "on" } else { "auto" };
    for place in 0..scene.tenants().len() {
        let file = text(&images.path(place).to_string_lossy());
        let _ = write!(
            config,
            "[disk.{}]\nfile = {file}\ndirect = \"{direct}\"\ngroup = \"/{}\"\nqueue = \"{QUEUE}\"\n",
            disk(place),
            disk(place),
        );
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
    let mut config = format!("[disk.{REMOTE}]\nnbd = {uri}\nqueue = \"{QUEUE}\"\n");
    let tenants = scene.tenants().len() as u64;
    let part = bytes / tenants / PART * PART;
    for place in 0..tenants {
        let _ = write!(
            config,
            "[disk.{}]\nlinear = \"{REMOTE}:{}:{part}\"\ngroup = \"/{}\"\n",
            disk(place as usize),
            place * part,
            disk(place as usize),
        );
    }
    config
}

/// The other server's disk, without a scheduler.
fn remote(images: &Images) -> String {
    let file = text(&images.path(0).to_string_lossy());
    format!("[disk.{REMOTE}]\nfile = {file}\n")
}

/// The queue and the groups.
fn shared(scene: &Scene, kind: &'static ElevatorType, reactors: u16) -> String {
    let mut config = format!("[daemon]\nreactors = {reactors}\n[queue.{QUEUE}]\nsched = \"{kind}\"\n");
    for (place, tenant) in scene.tenants().iter().enumerate() {
        let weight = scene.weight(tenant);
        let _ = write!(config, "[group.\"/{}\"]\nweight = {weight}\n", disk(place));
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
const REMOTE: &str = "remote";
/// Parts begin at multiples of this number of bytes.
const PART: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::super::super::spec;
    use blkmq_core::sched;

    use super::*;

    #[test]
    fn every_tenant_has_a_group_of_its_weight() {
        let scene = spec::parse("1:4:4k,10:4:4k").unwrap();
        assert_eq!(
            shared(&scene, sched::BFQ, 2),
            "[daemon]\nreactors = 2\n[queue.q]\nsched = \"bfq\"\n\
             [group.\"/t0\"]\nweight = 100\n[group.\"/t1\"]\nweight = 1000\n"
        );
    }

    #[test]
    fn parts_of_another_servers_disk_do_not_overlap() {
        let scene = spec::parse("1:4:4k,1:4:4k,1:4:4k").unwrap();
        let config = on_nbd(&scene, 10 << 20, Path::new("/x/s"));
        for part in [
            "remote:0:3145728",
            "remote:3145728:3145728",
            "remote:6291456:3145728",
        ] {
            assert!(config.contains(&format!("linear = \"{part}\"")), "{config}");
        }
    }

    #[test]
    fn a_text_survives_quotes_and_backslashes() {
        assert_eq!(text(r#"a"b\c"#), r#""a\"b\\c""#);
    }
}
