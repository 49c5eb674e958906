//! The layers between dbench and the slow disk: an engine of 64 reactors, a block device (ublk's, or a loop
//! device on a FUSE file), XFS or ext4. All of them are in this process or the kernel, and are removed when
//! the stage is dropped.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use blkmq_core::ids::GroupId;
use blkmq_core::queue::{Dispatch, TagMode};
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, BYTES_MAX, CONNECTIONS_MAX, Common};
use blkmq_export::front_door::{self, DiskName, Given, Offer, Served};
use blkmq_export::handover::{Handover, Phase};
use blkmq_host::engine::{DiskEntry, Engine, EngineConfig, QueueSpec};
use blkmq_sim::scenario::clients::{CPUS, DISK_BYTES, DISK_DEPTH};

use super::dbench::{Door, Filesystem, Side};
use super::disk::SlowDisk;
use crate::block_device::BlockDevice;
use crate::loop_device::{LoopDevice, run};
use blkmq_testkit::Scratch;

/// A filesystem on the slow disk. Its fields are dropped in this order.
pub(super) struct Stage {
    mount: Mount,
    _loop_device: Option<LoopDevice>,
    _server: Server,
    disk: SlowDisk,
    _dir: Scratch,
}

impl Stage {
    /// Makes a filesystem; the disk takes no time yet.
    ///
    /// # Errors
    /// The missing requirement: root, a program, loop devices, FUSE or ublk.
    pub(super) fn set_up(
        door: Door,
        filesystem: Filesystem,
        side: Side,
        elevator: &'static ElevatorType,
    ) -> Result<Self> {
        let dir = Scratch::new();
        let queue = side.queue(elevator);
        let disk = SlowDisk::start(DISK_BYTES, queue.hctxs, DISK_DEPTH)?;
        let open =
            |door, address: &str| Server::open(door, address, &disk, queue).inspect_err(|_| disk.end());
        let (server, loop_device) = match door {
            Door::Fuse => {
                let file = dir.path("disk");
                File::create_new(&file).context("making a file to be the disk")?;
                let server = open("fuse", &file.to_string_lossy())?;
                (server, Some(LoopDevice::attach(&file, 512)?))
            }
            Door::Ublk => (open("ublk", "auto")?, None),
        };
        let device = match &loop_device {
            Some(device) => device.block(),
            None => &server.device()?,
        };
        device.choose(side.kernel_scheduler(elevator))?;
        device.write("queue/rotational", "1")?;
        let (maker, options) = filesystem.maker();
        run(maker, &[options, &[device.path()]].concat())?;
        let mount = Mount::make(filesystem, device.path(), dir.path("mnt"))?;
        Ok(Self {
            mount,
            _loop_device: loop_device,
            _server: server,
            disk,
            _dir: dir,
        })
    }

    /// Where the filesystem is mounted.
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
        // The remaining writes take no time.
        self.disk.take_time(false);
    }
}

/// The configuration of a side's queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct Queue {
    pub(super) elevator: &'static ElevatorType,
    pub(super) hctxs: u16,
    pub(super) dispatch: Dispatch,
}

/// The engine with its front door.
struct Server {
    served: Vec<Box<dyn Served>>,
    engine: Engine,
    disk: SlowDisk,
}

impl Server {
    fn open(door: &str, address: &str, disk: &SlowDisk, queue: Queue) -> Result<Self> {
        let handover = Arc::new(Handover::new(Phase::Serving));
        let front_door = front_door::find(door).with_context(|| format!("this program has no {door}"))?;
        let address = front_door.parse(&Given::new(address))?;
        let opened = address.open(
            &[DiskName {
                disk: DISK,
                group: "/",
            }],
            &handover,
        )?;
        let engine = Engine::start(EngineConfig {
            reactors: CPUS,
            queues: vec![spec(disk, queue)],
            ..EngineConfig::default()
        })?;
        let common = Arc::new(Common::taking_part(BYTES_MAX, CONNECTIONS_MAX, &handover));
        let offer = || Offer {
            disks: None,
            admitted: AddressLimits {
                name: address.to_string(),
                connections_max: CONNECTIONS_MAX,
                group_connections_max: CONNECTIONS_MAX,
                ..AddressLimits::default()
            },
            at: &*address,
        };
        let mut server = Self {
            served: Vec::new(),
            engine,
            disk: disk.clone(),
        };
        for one in opened {
            let served = one.serve(&server.engine, offer(), &common);
            server
                .served
                .push(served.map_err(|error| anyhow!("{door} at {address}: {error}"))?);
        }
        Ok(server)
    }

    /// The block device that the front door has made.
    fn device(&self) -> Result<BlockDevice> {
        let lines = self.served.iter().filter_map(|served| served.client_line());
        let mut paths = lines.filter_map(|line| Some(line.strip_prefix("device: ")?.to_owned()));
        let path = paths.next().context("ublk names no device")?;
        Ok(BlockDevice::new(path))
    }
}

impl Drop for Server {
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
        serial: None,
        export: None,
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
        // Killed processes close their files a moment later.
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
