//! Decides which disks are paths of another, and makes the drive of that one. A path has no queue of its own and is exported by
//! nobody; else it is configured as any disk.

use std::collections::BTreeMap;
use std::sync::Arc;

use blkmq_drivers::multipath::{MultipathConfig, MultipathDrive, PathDrive};
use blkmq_host::DiskEntry;
use blkmq_host::Error;

use super::{DiskSpec, Opened, Source, build_drive, disk_error};

/// A disk that is reached over others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultipathSource {
    /// The priority groups, the first one first.
    pub groups: Vec<Vec<PathRef>>,
    /// How paths are used.
    pub config: MultipathConfig,
}

/// A disk that is a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathRef {
    /// The disk's name.
    pub name: String,
    /// How much it carries in comparison with the others, 0 to 100.
    pub throughput: u32,
}

/// The disks that are paths, by their names.
pub(super) struct Paths(BTreeMap<String, DiskSpec>);

/// A path that has been opened.
pub(super) struct OpenPath {
    entry: DiskEntry,
    opened: Opened,
    group: u8,
    throughput: u32,
}

impl Paths {
    /// Takes the paths out of the list of disks.
    pub(super) fn take_from(disks: &mut Vec<DiskSpec>) -> Self {
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
    /// If one does not: multipath disks that name each other, or themselves, are nobody's.
    pub(super) fn check_all_taken(&self) -> Result<(), Error> {
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
            Some(DiskSpec {
                source: Source::Nbd(config),
                ..
            }) if !config.reconnect.is_zero() => {
                refuse("reconnect= would have its requests wait while other paths work; take it away")
            }
            Some(disk) if disk.queue.is_some() => {
                refuse("a path has no queue of its own; take its queue= away")
            }
            Some(disk) => Ok(disk),
        }
    }
}

/// Opens the paths of a disk, and makes the disk as they have it.
pub(super) fn open(
    entry: &mut DiskEntry,
    source: MultipathSource,
    paths: &mut Paths,
) -> Result<(Vec<OpenPath>, MultipathConfig), Error> {
    let (mut open, mut left_out) = (Vec::new(), None);
    for (group, refs) in source.groups.into_iter().enumerate() {
        for PathRef { name, throughput } in refs {
            let spec = paths.take(&name, &entry.name)?;
            let is_remote = matches!(spec.source, Source::Nbd(_));
            let member = match super::open(spec, entry.group, paths) {
                Ok((_, member)) => member,
                // A host must be able to start while a path is down.
                Err(error) if is_remote => {
                    left_out.get_or_insert((name, error));
                    continue;
                }
                Err(error) => return Err(error),
            };
            if let Opened::File(disk) = &member.opened
                && disk.direct().is_none()
            {
                return Err(disk_error(
                    &entry.name,
                    format!(
                        "path {name} rejected: it goes through the page cache, where other paths' writes are not seen; \
                         give it direct=on"
                    ),
                ));
            }
            open.push(OpenPath {
                entry: member.entry,
                opened: member.opened,
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
            "disk {}: path {name} is left out until the next start, and others may be: {error}",
            entry.name
        );
    }
    entry.size = first.entry.size;
    entry.read_only |= open.iter().any(|path| path.entry.read_only);
    let block = open.iter().map(|path| path.entry.block_size).max();
    entry.block_size = entry.block_size.max(block.unwrap_or(0));
    Ok((open, source.config))
}

/// Makes the drive, whose tags number at most `depth`.
pub(super) fn drive(
    name: &str,
    paths: Vec<OpenPath>,
    config: &MultipathConfig,
    depth: u32,
) -> Result<MultipathDrive, Error> {
    let path = |path: OpenPath| {
        let (name, size) = (path.entry.name.clone(), path.entry.size);
        // One tag more than the queue has: the probes'.
        let drive = build_drive(&name, vec![path.opened], &[size], depth + 1)?;
        Ok(PathDrive {
            group: path.group,
            throughput: path.throughput,
            ..PathDrive::new(name, Arc::clone(&drive), size)
        })
    };
    let paths = paths.into_iter().map(path).collect::<Result<_, Error>>()?;
    MultipathDrive::new(name, config, paths, depth).map_err(|error| disk_error(name, error))
}
