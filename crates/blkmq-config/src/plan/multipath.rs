//! Opens the disks that are paths of a multipath disk, and makes that one's drive of them. A path has no
//! queue of its own and is not exported; otherwise it is configured like any disk.

use std::collections::BTreeMap;
use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_drivers::driver::{OpenDisk, Purpose, Shape, Unshared};
use blkmq_drivers::multipath::{MultipathConfig, MultipathDevice, PathDevice};
use blkmq_host::device::Device;
use blkmq_host::{DiskEntry, Error};

use super::{OpenedDisk, disk_error};
use crate::disk::{DiskSpec, MultipathSource, Source};
use crate::paths::PathRef;

/// The disks that are paths, by their names.
pub(crate) struct Paths(BTreeMap<String, DiskSpec>);

/// A multipath disk whose paths have been opened.
pub(crate) struct OpenMultipath {
    paths: Vec<OpenPath>,
    config: MultipathConfig,
    shape: Shape,
}

/// A path that has been opened.
struct OpenPath {
    member: OpenedDisk,
    group: u8,
    throughput: u32,
}

impl Paths {
    /// Takes the paths out of the list of disks.
    pub(crate) fn take_from(disks: &mut Vec<DiskSpec>) -> Self {
        let named: Vec<String> = disks
            .iter()
            .filter_map(|disk| match &disk.source {
                Source::Multipath(source) => Some(source.groups.iter().flatten()),
                _ => None,
            })
            .flatten()
            .map(|path| path.name.clone())
            .collect();
        let is_path = |disk: &mut DiskSpec| named.contains(&disk.name);
        let paths = disks
            .extract_if(.., is_path)
            .map(|disk| (disk.name.clone(), disk));
        Self(paths.collect())
    }

    /// Checks that every path belongs to a disk that was opened.
    ///
    /// # Errors
    /// One does not: multipath disks that name each other, or themselves, belong to no disk.
    pub(crate) fn check_all_taken(&self) -> Result<(), Error> {
        match self.0.keys().next() {
            None => Ok(()),
            Some(name) => Err(disk_error(
                name,
                "it is a path of a disk that is a path itself, perhaps its own; a path is a null, ram, file or nbd disk",
            )),
        }
    }

    fn take(&mut self, name: &str, of: &str) -> Result<DiskSpec, Error> {
        let refuse = |problem: &str| Err(disk_error(of, format!("path {name} rejected: {problem}")));
        match self.0.remove(name) {
            None => refuse("there is no disk of that name, or it is a path already"),
            Some(disk) if matches!(disk.source, Source::Multipath(_)) => {
                refuse("it is a multipath disk itself; name its paths")
            }
            Some(disk) => {
                let checked = disk.source.driver().map_or(Ok(()), |config| config.check_path());
                match checked {
                    Err(problem) => refuse(problem),
                    Ok(()) if disk.queue.is_some() => {
                        refuse("a path has no queue of its own; take its queue= away")
                    }
                    Ok(()) => Ok(disk),
                }
            }
        }
    }
}

/// Opens the paths of a disk, and makes the disk from their properties.
pub(crate) fn open(
    entry: &DiskEntry,
    source: MultipathSource,
    paths: &mut Paths,
    purpose: Purpose,
) -> Result<OpenMultipath, Error> {
    let (mut open, mut left_out) = (Vec::new(), None);
    for (group, refs) in source.groups.into_iter().enumerate() {
        for PathRef { name, throughput } in refs {
            let spec = paths.take(&name, &entry.name)?;
            let is_remote = spec.source.driver().is_some_and(|config| config.is_remote());
            let member = match super::open(spec, entry.group, paths, purpose) {
                Ok((_, member)) => member,
                // A host must be able to start while a path is down.
                Err(error) if is_remote => {
                    left_out.get_or_insert((name, error));
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Err(problem) = member.opened.check_path() {
                let problem = format!("path {name} rejected: {problem}");
                return Err(disk_error(&entry.name, problem));
            }
            open.push(OpenPath {
                member,
                group: u8::try_from(group).unwrap_or(u8::MAX),
                throughput,
            });
        }
    }
    let Some(first) = open.first() else {
        return Err(match left_out {
            Some((_, error)) => error,
            None => disk_error(&entry.name, "has no path; name some, as in multipath=a+b"),
        });
    };
    if let Some((name, error)) = left_out {
        tracing::warn!(
            disk = entry.name,
            "disk {}: path {name} is left out until the next start, and others may be: {error}",
            entry.name
        );
    }
    let entries = || open.iter().map(|path| &path.member.entry);
    let shape = Shape {
        size: first.member.entry.size,
        block_size: entries().map(|entry| entry.block_size).max().unwrap_or(0),
        read_only: entries().any(|entry| entry.read_only),
    };
    Ok(OpenMultipath {
        paths: open,
        config: source.config,
        shape,
    })
}

impl OpenDisk for OpenMultipath {
    fn driver(&self) -> &'static str {
        "multipath"
    }

    fn shape(&self) -> Shape {
        self.shape
    }

    fn tags(&self) -> TagMode {
        TagMode::PerHctx(DEPTH)
    }

    fn share_queue(&self, _other: &dyn OpenDisk) -> Result<(), Unshared> {
        Err(Unshared {
            disks: "multipath disks",
            why: "each is a drive; take queue= away",
        })
    }

    fn join(
        self: Box<Self>,
        queue: &str,
        _others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        let path = |path: OpenPath| {
            let OpenedDisk { entry, opened } = path.member;
            // One tag more than the queue has, for probes.
            let drive = opened.join(&entry.name, Vec::new(), &[entry.size], depth + 1)?;
            Ok(PathDevice {
                group: path.group,
                throughput: path.throughput,
                ..PathDevice::new(entry.name, drive, entry.size)
            })
        };
        let paths = self.paths.into_iter().map(path).collect::<Result<_, Error>>()?;
        let drive = MultipathDevice::new(queue, &self.config, paths, depth);
        Ok(Arc::new(drive.map_err(|error| disk_error(queue, error))?))
    }
}

const DEPTH: u32 = 128;
