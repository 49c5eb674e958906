//! Decides the layers between dbench and the slow disk: an engine of 64 reactors, a FUSE file, a loop device,
//! XFS. All of them are in this process or the kernel, and are removed when the stage is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use blkmq_core::ids::GroupId;
use blkmq_core::queue::{Dispatch, TagMode};
use blkmq_core::sched::Kind;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, BYTES_MAX, CONNECTIONS_MAX, Common};
use blkmq_export::front_door::{self, Offer, Served};
use blkmq_export::handover::{Handover, Phase};
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
use blkmq_sim::scenario::clients::{CPUS, DISK_BYTES, DISK_DEPTH};
use blkmq_tls::Settings;

use super::dbench::{Filesystem, Side};
use super::disk::SlowDisk;
use crate::loop_device::{LoopDevice, run};
use crate::server::Scratch;

/// A filesystem on the slow disk. The order of its parts is that in which they go.
pub(super) struct Stage {
    mount: Mount,
    _device: LoopDevice,
    _door: Door,
    disk: SlowDisk,
    _dir: Scratch,
}

impl Stage {
    /// Makes a filesystem, which takes no time yet.
    ///
    /// # Errors
    /// What is missing: root, a program, loop devices, FUSE.
    pub(super) fn set_up(filesystem: Filesystem, side: Side, elevator: Kind) -> Result<Self> {
        let dir = Scratch::make()?;
        let queue = side.queue(elevator);
        let file = dir.join("disk");
        File::create_new(&file).context("making a file to be the disk")?;
        let disk = SlowDisk::start(DISK_BYTES, queue.hctxs, DISK_DEPTH)?;
        let door = Door::open(&disk, queue, &file).inspect_err(|_| disk.end())?;
        let device = LoopDevice::attach(&file, 512)?;
        device.block().choose(side.loop_scheduler(elevator))?;
        device.block().write("queue/rotational", "1")?;
        let (maker, options) = filesystem.maker();
        run(maker, &[options, &[device.block().path()]].concat())?;
        let mount = Mount::make(filesystem, device.block().path(), dir.join("mnt"))?;
        Ok(Self {
            mount,
            _device: device,
            _door: door,
            disk,
            _dir: dir,
        })
    }

    /// Where the filesystem is.
    pub(super) fn directory(&self) -> &Path {
        &self.mount.0
    }

    /// The disk below.
    pub(super) fn disk(&self) -> &SlowDisk {
        &self.disk
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        // What is left to be written costs no time.
        self.disk.take_time(false);
    }
}

/// How a side's queue is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    pub(super) elevator: Kind,
    pub(super) hctxs: u16,
    pub(super) dispatch: Dispatch,
}

/// The engine with its front door.
struct Door {
    served: Vec<Box<dyn Served>>,
    engine: Engine,
    disk: SlowDisk,
}

impl Door {
    fn open(disk: &SlowDisk, queue: Queue, file: &Path) -> Result<Self> {
        let handover = Arc::new(Handover::new(Phase::Serving));
        let fuse = front_door::find("fuse").context("this program has no FUSE")?;
        let address = fuse.parse(&file.to_string_lossy())?;
        let opened = address.open(&[DISK], &handover)?;
        let engine = Engine::start(EngineConfig {
            reactors: CPUS,
            queues: vec![spec(disk, queue)],
            ..EngineConfig::default()
        })?;
        let common = Arc::new(Common::taking_part(BYTES_MAX, CONNECTIONS_MAX, &handover));
        let tls = Settings::default();
        let offer = || Offer {
            disks: None,
            admitted: AddressLimits {
                name: file.display().to_string(),
                connections_max: CONNECTIONS_MAX,
                group_connections_max: CONNECTIONS_MAX,
            },
            tls: &tls,
            handshake_deadline: None,
            fuse_io_uring: None,
        };
        let mut door = Self {
            served: Vec::new(),
            engine,
            disk: disk.clone(),
        };
        for one in opened {
            let served = one.serve(&door.engine, offer(), &common);
            door.served
                .push(served.map_err(|error| anyhow!("FUSE at {}: {error}", file.display()))?);
        }
        Ok(door)
    }
}

impl Drop for Door {
    fn drop(&mut self) {
        self.served.iter().for_each(|served| served.close());
        if let Err(error) = self.engine.shutdown(SHUTDOWN_WITHIN) {
            eprintln!("the engine did not end: {error}");
        }
        self.disk.end();
    }
}

fn spec(disk: &SlowDisk, queue: Queue) -> QueueSpec {
    let mut spec = QueueSpec::new(DISK, Arc::new(disk.clone()));
    spec.disks.push(DiskEntry {
        name: DISK.into(),
        description: String::new(),
        size: DISK_BYTES,
        read_only: false,
        group: GroupId::default(),
        block_size: 512,
    });
    spec.tags = TagMode::PerHctx(DISK_DEPTH);
    spec.requests_per_reactor = 512;
    spec.elevator = queue.elevator;
    spec.dispatch = queue.dispatch;
    spec.hctxs = Some(queue.hctxs);
    spec
}

/// A mounted filesystem.
struct Mount(PathBuf);

impl Mount {
    fn make(filesystem: Filesystem, device: &str, at: PathBuf) -> Result<Self> {
        fs::create_dir(&at).with_context(|| format!("making {}", at.display()))?;
        let (name, options) = (filesystem.name(), filesystem.mounted_with());
        run(
            "mount",
            &["-t", name, "-o", options, device, &at.to_string_lossy()],
        )?;
        Ok(Self(at))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let start = Instant::now();
        // Processes that were killed let go of it a moment later.
        while let Err(error) = run("umount", &[&self.0.to_string_lossy()]) {
            if start.elapsed() > UNMOUNT_WITHIN {
                eprintln!("{error:#}");
                return;
            }
            sleep(Duration::from_millis(20));
        }
    }
}

const DISK: &str = "disk";
const SHUTDOWN_WITHIN: Nanos = Nanos::from_secs(10);
const UNMOUNT_WITHIN: Duration = Duration::from_secs(10);
