//! Decides which disks share a queue: those that share a drive's capacity, unless told otherwise.
//! Configuration comes in as [`DiskSpec`]s, the drives are opened here, and `engine` starts what comes out.
//!
//! Files on the same filesystem compete for the same device, so they share a queue, and one elevator sees all
//! of their tenants; a block device is a drive of its own; ram and null disks have nothing in common with
//! each other. `queue=` overrides all of this, within one kind of drive.

mod multipath;

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use blkmq_core::ids::GroupId;
use blkmq_core::poll::Policy;
use blkmq_core::queue::TagMode;
use blkmq_core::sched::Kind;
use blkmq_core::time::Nanos;
use blkmq_drivers::file::{Device, FileConfig, FileDisk, FileDrive};
use blkmq_drivers::multipath::MultipathConfig;
use blkmq_drivers::nbd::{NbdConfig, NbdDisk, NbdDrive};
use blkmq_drivers::null::{NullConfig, NullDrive};
use blkmq_drivers::ram::{RamConfig, RamDrive};
use blkmq_host::Error;
use blkmq_host::drive::Drive;
use blkmq_host::group_spec::{self, GroupSpec};
use blkmq_host::mapped::{MapConfig, MappedSpec};
use blkmq_host::{DiskEntry, QueueSpec};

pub use self::multipath::{MultipathSource, PathRef};
use self::multipath::{OpenPath, Paths};

/// A disk as it is configured.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    /// Its name, unique in the engine.
    pub name: String,
    /// What it is, for people. May be empty.
    pub description: String,
    /// Where its data is.
    pub source: Source,
    /// Bytes. Required, except for a file that exists.
    pub size: Option<u64>,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Smallest unit of addresses and lengths, in bytes. Default: what the drive needs, 512 at least.
    pub block_size: Option<u32>,
    /// The queue it shall lie on, by name. Default: the one of its drive.
    pub queue: Option<String>,
    /// The group its I/O is accounted to, a path such as `/customers/a`. Default: the root, `/`.
    pub group: Option<String>,
}

/// Where a disk's data is.
#[derive(Clone, Debug)]
pub enum Source {
    /// Nowhere.
    Null(NullConfig),
    /// In this process's memory.
    Ram(RamConfig),
    /// In a file or on a block device.
    File(FileConfig),
    /// On an NBD server.
    Nbd(NbdConfig),
    /// On the other side of several paths, which are disks themselves.
    Multipath(MultipathSource),
    /// On other disks.
    Mapped(MapConfig),
}

/// How a queue is to be; for those that are not configured by name, the default.
#[derive(Clone, Debug)]
pub struct QueueSettings {
    /// The elevator to begin with. Default none.
    pub elevator: Kind,
    /// Requests in flight at the drive, 1 to 65536: for files, and null disks with `shared_tags`, over all threads, else for each. Default 256
    /// for files, 128 for ram and nbd, as many as the drive takes for null.
    pub depth: Option<u32>,
    /// Hardware contexts; see [`QueueSpec::hctxs`]. Default one per thread.
    pub hctxs: Option<u16>,
    /// Requests of each thread under way, 1 to 65536. What waits beyond them has no elevator's care. Default
    /// 1024 for files, 256 else.
    pub requests_per_reactor: Option<u32>,
    /// How long a request may be with the driver. Default 30 s.
    pub timeout: Nanos,
    /// Whether neighbouring bios are merged. Default true.
    pub merges: bool,
    /// Whether the drive is polled; see [`QueueSpec::io_poll`]. Default: as is usual for the drive.
    pub io_poll: Option<bool>,
    /// How requests of a polled drive are slept for.
    pub poll_policy: Policy,
}

impl Default for QueueSettings {
    fn default() -> Self {
        Self {
            elevator: Kind::None,
            depth: None,
            hctxs: None,
            requests_per_reactor: None,
            timeout: Nanos::from_secs(30),
            merges: true,
            io_poll: None,
            poll_policy: Policy::default(),
        }
    }
}

/// What came out: what to start, and the groups by their ids.
pub struct Plan {
    /// The queues with their drives, open.
    pub queues: Vec<QueueSpec>,
    /// The disks that lie on other disks.
    pub mapped: Vec<MappedSpec>,
    /// The paths of all groups; the index is the [`GroupId`]. The first is the root.
    pub groups: Vec<String>,
}

/// Opens the drives of `disks` and puts each disk on a queue, in order. `settings` are those of queues with a
/// name; a name for which no disk came is an error, since it is most likely misspelt.
///
/// # Errors
/// The first thing that cannot be: a name given twice, a size that is missing, a file that cannot be served,
/// drives of different kinds on one queue.
pub fn plan(
    mut disks: Vec<DiskSpec>,
    settings: &BTreeMap<String, QueueSettings>,
    default: &QueueSettings,
) -> Result<Plan, Error> {
    let mut paths = vec!["/".to_owned()];
    let mut ways = Paths::take_from(&mut disks);
    let mut members: Vec<(String, Vec<Member>)> = Vec::new();
    let mut mapped = Vec::new();
    for spec in disks {
        let path = spec.group.as_deref().unwrap_or("/");
        group_spec::check_path(path)?;
        let group = group_spec::number_of(&mut paths, path);
        let (queue, member) = match spec.source {
            Source::Mapped(_) => {
                mapped.push(mapped_disk(spec, group)?);
                continue;
            }
            _ => open(spec, group, &mut ways)?,
        };
        match members.iter_mut().find(|(name, _)| *name == queue) {
            Some((_, list)) => list.push(member),
            None => members.push((queue, vec![member])),
        }
    }
    ways.check_all_taken()?;
    if let Some(unused) = settings
        .keys()
        .find(|name| !members.iter().any(|(queue, _)| queue == *name))
    {
        let known: Vec<&str> = members.iter().map(|(name, _)| name.as_str()).collect();
        let known = known.join(", ");
        return Err(Error::Disk(format!(
            "queue {unused}: no disk lies on it; the queues are: {known}"
        )));
    }
    let count = members.len();
    let build = |(name, list): (String, Vec<Member>)| {
        let settings = settings.get(&name).unwrap_or(default);
        join(name, list, settings, count)
    };
    let queues = members.into_iter().map(build).collect::<Result<_, Error>>()?;
    let mut plan = Plan {
        queues,
        mapped,
        groups: paths,
    };
    plan.set_groups(&[])?;
    Ok(plan)
}

impl Plan {
    /// Gives groups their weights, caps and latency targets, on every queue. Those that no disk names are made, too.
    ///
    /// # Errors
    /// What cannot be, with the group's path: a path given twice, nesting that is too deep, a cap that is too small for
    /// the drive.
    pub fn set_groups(&mut self, specs: &[GroupSpec]) -> Result<(), Error> {
        for (at, spec) in specs.iter().enumerate() {
            group_spec::check_path(&spec.path)?;
            if specs[..at].iter().any(|other| other.path == spec.path) {
                let path = &spec.path;
                return Err(Error::Disk(format!("group {path}: it is given twice; keep one")));
            }
            group_spec::number_of(&mut self.groups, &spec.path);
        }
        for queue in &mut self.queues {
            queue.groups = group_spec::tree_of(&self.groups, specs, &queue.drive.limits())?;
            queue.group_paths = self.groups.clone();
        }
        Ok(())
    }
}

/// A disk that has been opened and waits for the others of its queue.
struct Member {
    entry: DiskEntry,
    opened: Opened,
}

enum Opened {
    Null(NullConfig),
    Ram(RamConfig),
    File(FileDisk),
    Nbd(Box<NbdDisk>),
    Multipath(Vec<OpenPath>, MultipathConfig),
}

impl Opened {
    fn kind(&self) -> &'static str {
        match self {
            Self::Null(_) => "null",
            Self::Ram(_) => "ram",
            Self::File(_) => "file",
            Self::Nbd(_) => "nbd",
            Self::Multipath(..) => "multipath",
        }
    }
}

/// Takes a disk that lies on others. Which those are is looked up when the engine starts.
fn mapped_disk(spec: DiskSpec, group: GroupId) -> Result<MappedSpec, Error> {
    if let Some(queue) = &spec.queue {
        let problem =
            format!("queue={queue} rejected: it has no queue of its own; set queue= in its members");
        return Err(disk_error(&spec.name, problem));
    }
    if let Some(size) = spec.size {
        let problem = format!(
            "size {size} rejected: it is as large as its members; give them ranges, as in a:0:{size}"
        );
        return Err(disk_error(&spec.name, problem));
    }
    let Source::Mapped(map) = spec.source else {
        unreachable!("the caller has looked")
    };
    Ok(MappedSpec {
        name: spec.name,
        description: spec.description,
        map,
        read_only: spec.read_only,
        block_size: spec.block_size,
        group,
    })
}

/// Opens a disk, and its paths if it has some. Returns the name of its queue, too.
fn open(spec: DiskSpec, group: GroupId, ways: &mut Paths) -> Result<(String, Member), Error> {
    let mut entry = DiskEntry {
        name: spec.name,
        description: spec.description,
        size: spec.size.unwrap_or(0),
        read_only: spec.read_only,
        block_size: spec.block_size.unwrap_or(BLOCK_MIN),
        group,
    };
    let (queue, opened) = match spec.source {
        Source::Null(config) => (entry.name.clone(), Opened::Null(config)),
        Source::Ram(config) => (entry.name.clone(), Opened::Ram(config)),
        Source::File(mut config) => {
            config.read_only |= spec.read_only;
            config.size = config.size.or(spec.size);
            config.block_size = config.block_size.or(spec.block_size);
            let disk = FileDisk::open(&config).map_err(|error| disk_error(&entry.name, error))?;
            entry.size = disk.size();
            entry.block_size = disk.block_size();
            entry.read_only = disk.is_read_only();
            (device_name(disk.device()), Opened::File(disk))
        }
        Source::Nbd(mut config) => {
            config.read_only |= spec.read_only;
            let disk = NbdDisk::open(&config).map_err(|error| disk_error(&entry.name, error))?;
            entry.size = disk.size();
            entry.block_size = entry.block_size.max(disk.block_size());
            entry.read_only = disk.is_read_only();
            (entry.name.clone(), Opened::Nbd(Box::new(disk)))
        }
        Source::Multipath(source) => {
            let (paths, config) = multipath::open(&mut entry, source, ways)?;
            (entry.name.clone(), Opened::Multipath(paths, config))
        }
        Source::Mapped(_) => {
            return Err(disk_error(
                &entry.name,
                "cannot be a path, since it lies on other disks: name a drive's disk",
            ));
        }
    };
    if entry.size == 0 {
        return Err(disk_error(&entry.name, "has no size; set size="));
    }
    Ok((spec.queue.unwrap_or(queue), Member { entry, opened }))
}

/// Makes the drive of one queue from its disks.
fn join(
    name: String,
    list: Vec<Member>,
    settings: &QueueSettings,
    queues: usize,
) -> Result<QueueSpec, Error> {
    check_kinds(&name, &list)?;
    let (entries, opened): (Vec<DiskEntry>, Vec<Opened>) = list
        .into_iter()
        .map(|member| (member.entry, member.opened))
        .unzip();
    let sizes: Vec<u64> = entries.iter().map(|entry| entry.size).collect();
    let (depth, is_shared) = match &opened[0] {
        Opened::Null(config) => (config.depth, config.shared_tags),
        Opened::Ram(_) => (DEPTH_RAM, false),
        Opened::File(_) => (DEPTH_FILE, true),
        Opened::Nbd(_) => (DEPTH_NBD, false),
        Opened::Multipath(..) => (DEPTH_MULTIPATH, false),
    };
    let depth = settings.depth.unwrap_or(depth);
    let tags = if is_shared {
        TagMode::Shared(depth)
    } else {
        TagMode::PerHctx(depth)
    };
    let requests = requests_default(queues);
    let drive = build_drive(&name, opened, &sizes, depth)?;
    let mut spec = QueueSpec::new(name, drive);
    spec.disks = entries;
    spec.tags = tags;
    spec.elevator = settings.elevator;
    spec.hctxs = settings.hctxs;
    spec.requests_per_reactor = settings.requests_per_reactor.unwrap_or(requests);
    spec.timeout = settings.timeout;
    spec.merges = settings.merges;
    spec.io_poll = settings.io_poll;
    spec.poll_policy = settings.poll_policy;
    spec.is_polled()?;
    Ok(spec)
}

/// Makes a drive of disks that are open, for tags below `depth`.
fn build_drive(
    name: &str,
    mut opened: Vec<Opened>,
    sizes: &[u64],
    depth: u32,
) -> Result<Arc<dyn Drive>, Error> {
    let drive: Arc<dyn Drive> = match opened.remove(0) {
        Opened::Null(config) => {
            Arc::new(NullDrive::new(config, sizes).map_err(|error| queue_error(name, error))?)
        }
        Opened::Ram(config) => Arc::new(RamDrive::new(&config, sizes)),
        Opened::File(first) => {
            let rest = opened.into_iter().filter_map(file_of);
            let disks = std::iter::once(first).chain(rest).collect();
            Arc::new(FileDrive::new(disks, depth).map_err(|error| queue_error(name, error))?)
        }
        Opened::Nbd(disk) => Arc::new(NbdDrive::new(*disk, depth)),
        Opened::Multipath(paths, config) => Arc::new(multipath::drive(name, paths, &config, depth)?),
    };
    Ok(drive)
}

/// One queue has one kind of drive, with one configuration.
fn check_kinds(queue: &str, list: &[Member]) -> Result<(), Error> {
    let first = &list[0];
    for other in &list[1..] {
        let (one, two) = (&first.entry.name, &other.entry.name);
        if first.opened.kind() != other.opened.kind() {
            let kinds = (first.opened.kind(), other.opened.kind());
            let problem = format!(
                "disks {one} ({}) and {two} ({}) cannot share it: a queue has one kind of drive; give one another queue=",
                kinds.0, kinds.1
            );
            return Err(queue_error(queue, problem));
        }
        if let Opened::Nbd(_) = first.opened {
            let problem = format!(
                "disks {one} and {two} cannot share it: a disk on an NBD server has a queue of its own; give one another \
                 queue="
            );
            return Err(queue_error(queue, problem));
        }
        if matches!(first.opened, Opened::Multipath(..)) {
            let problem =
                format!("multipath disks {one} and {two} cannot share it: each is a drive; take queue= away");
            return Err(queue_error(queue, problem));
        }
        if let (Opened::Null(a), Opened::Null(b)) = (&first.opened, &other.opened)
            && a != b
        {
            let problem =
                format!("null disks {one} and {two} cannot share it: their other keys must be the same");
            return Err(queue_error(queue, problem));
        }
    }
    Ok(())
}

fn file_of(opened: Opened) -> Option<FileDisk> {
    match opened {
        Opened::File(disk) => Some(disk),
        _ => None,
    }
}

/// The name of the queue of a device, as `ls -l /dev` and `/proc/self/mountinfo` number it.
fn device_name(device: Device) -> String {
    let (kind, number) = match device {
        Device::Filesystem(number) => ("fs", number),
        Device::Block(number) => ("dev", number),
    };
    format!(
        "{kind}-{}:{}",
        rustix::fs::major(number),
        rustix::fs::minor(number)
    )
}

fn disk_error(name: &str, problem: impl ToString) -> Error {
    Error::Disk(format!("disk {name}: {}", problem.to_string()))
}

fn queue_error(name: &str, problem: impl ToString) -> Error {
    Error::Drive {
        queue: name.to_owned(),
        source: io::Error::other(problem.to_string()),
    }
}

/// Requests of each reactor at each of `queues` queues. What is held for a cap, or waits behind a neighbour, keeps its request.
fn requests_default(queues: usize) -> u32 {
    let reactors = std::thread::available_parallelism().map_or(1, usize::from);
    (REQUESTS_ALL / (reactors * queues)).clamp(REQUESTS_MIN, REQUESTS_MAX) as u32
}

const BLOCK_MIN: u32 = 512;
const DEPTH_RAM: u32 = 128;
const DEPTH_NBD: u32 = 128;
const DEPTH_FILE: u32 = 256;
const DEPTH_MULTIPATH: u32 = 128;
/// Requests of all reactors at all queues together, and the bounds for one at one: room for 16 connections with all that they may have in flight, as
/// long as memory for the lists between many reactors allows it.
const REQUESTS_ALL: usize = 65_536;
const REQUESTS_MIN: usize = 128;
const REQUESTS_MAX: usize = 4096;

#[cfg(test)]
mod tests;
