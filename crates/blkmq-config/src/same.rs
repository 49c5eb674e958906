//! The comparison of a disk that is served with what another configuration has under its name: one
//! for changes of a running daemon ([`crate::diff`]) and for another daemon that takes over.

use std::fmt;

use blkmq_host::device::FileId;

use crate::disk::{DiskSpec, Source};

/// A disk, and what is known of its data.
#[derive(Clone, Copy, Debug)]
pub struct Data<'a> {
    /// Its source with its keys.
    pub spec: &'a DiskSpec,
    /// Bytes that are served, where they may have become more than the configuration has.
    pub size: Option<u64>,
    /// The files that contain it; `None` where it stays open, or lies on other disks.
    pub files: Option<&'a [FileId]>,
}

/// Why two disks do not have the same data, as far as can be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Differ {
    /// The source, one of its keys, or the size.
    Source,
    /// The keys are the same, and the file that they name is not.
    File,
}

impl fmt::Display for Differ {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Source => "another source, other keys of it or another size",
            Self::File => "another file at the same path, or none",
        })
    }
}

impl std::error::Error for Differ {}

/// Checks that clients of a disk find the same data in `later`. Members of mapped disks, and paths,
/// are compared by their names: they are disks of their own.
///
/// # Errors
/// How the two differ.
pub fn check_data(served: Data<'_>, later: Data<'_>) -> Result<(), Differ> {
    let grown = || match (&served.spec.source, &later.spec.source, served.size) {
        (Source::Driver(was), Source::Driver(is), Some(size)) => was.serves_as(size, &**is),
        // The key opens the same data, wherever it is kept.
        (Source::Luks(was), Source::Luks(is), _) => was.has_data_of(is),
        _ => false,
    };
    if served.spec.source != later.spec.source && !grown() {
        return Err(Differ::Source);
    }
    match (served.files, later.files) {
        (Some(was), Some(is)) if !are_same(was, is) => Err(Differ::File),
        _ => Ok(()),
    }
}

/// Paths may be found in any order.
fn are_same(one: &[FileId], other: &[FileId]) -> bool {
    one.len() == other.len() && one.iter().all(|file| other.contains(file))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(was: (&str, &[u64]), is: (&str, Option<&[u64]>)) -> Result<(), Differ> {
        let [one, other] = [was.0, is.0].map(|keys| DiskSpec::parse(&format!("name=a,{keys}")).unwrap());
        let files = |inodes: &[u64]| -> Vec<FileId> {
            let file = |inode: &u64| FileId {
                device: 1,
                inode: *inode,
            };
            inodes.iter().map(file).collect()
        };
        let (was, is) = (files(was.1), is.1.map(files));
        let served = Data {
            spec: &one,
            size: Some(2 << 20),
            files: Some(&was),
        };
        let later = Data {
            spec: &other,
            size: None,
            files: is.as_deref(),
        };
        check_data(served, later)
    }

    #[test]
    fn data_differ_by_source_keys_size_and_file() {
        for (was, is, wanted) in [
            (("file=a", &[1][..]), ("file=a", Some(&[1][..])), Ok(())),
            (("file=a", &[1]), ("file=a", None), Ok(())),
            (("file=a", &[1]), ("file=a,size=1M,sched=bfq", Some(&[1])), Ok(())),
            (
                ("file=a", &[1]),
                ("file=a,size=3M", Some(&[1])),
                Err(Differ::Source),
            ),
            (
                ("file=a,size=1M", &[1]),
                ("file=a,size=1M,create=on", None),
                Ok(()),
            ),
            (("file=a", &[1]), ("file=b", Some(&[1])), Err(Differ::Source)),
            (
                ("file=a", &[1]),
                ("file=a,direct=off", Some(&[1])),
                Err(Differ::Source),
            ),
            (("file=a", &[1]), ("file=a", Some(&[2])), Err(Differ::File)),
            (("file=a", &[1]), ("file=a", Some(&[])), Err(Differ::File)),
            (
                ("striped=b+c,chunk=64K", &[]),
                ("striped=c+b,chunk=64K", None),
                Err(Differ::Source),
            ),
            (
                ("multipath=b+c", &[1, 2]),
                ("multipath=b+c", Some(&[2, 1])),
                Ok(()),
            ),
        ] {
            assert_eq!(check(was, is), wanted, "{was:?} {is:?}");
        }
    }
}
