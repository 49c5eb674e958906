//! The kernel's table of mounts, which says what is mounted at a path: a question to the file itself would go
//! to the daemon that serves it, which may be this one, or hang.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

/// A mount, as the table lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// The number of its filesystem, such as `0:55`; unique while it is mounted.
    pub(super) device: String,
    /// The type of its filesystem.
    pub(super) kind: String,
}

impl Entry {
    /// Returns whether a daemon serves the mount.
    pub(super) fn is_fuse(&self) -> bool {
        self.kind == "fuse" || self.kind.starts_with("fuse.")
    }
}

/// What is mounted at a path, the topmost of several. The path has no symbolic links in it.
///
/// # Errors
/// The system's error.
pub(super) fn at(path: &Path) -> io::Result<Option<Entry>> {
    Ok(find(&std::fs::read("/proc/self/mountinfo")?, path))
}

/// Where a mount is now: the directories of its path may have been moved. `None` if it is nowhere.
///
/// # Errors
/// The system's error.
pub(super) fn path_of(entry: &Entry) -> io::Result<Option<PathBuf>> {
    Ok(find_path(&std::fs::read("/proc/self/mountinfo")?, entry))
}

fn find_path(table: &[u8], wanted: &Entry) -> Option<PathBuf> {
    table.split(|byte| *byte == b'\n').find_map(|line| {
        let path = unescaped(line.split(|byte| *byte == b' ').nth(4)?);
        let path = PathBuf::from(OsString::from_vec(path));
        (entry(line, &path).as_ref() == Some(wanted)).then_some(path)
    })
}

/// Returns whether this process has something open on the mount at a path, without a question to
/// the mount itself.
///
/// # Errors
/// The system's error.
pub(super) fn is_used_by_us(path: &Path) -> io::Result<bool> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    let Some(number) = number(&table, path) else {
        return Ok(false);
    };
    let line = [b"mnt_id:\t", number].concat();
    for descriptor in std::fs::read_dir("/proc/self/fdinfo")? {
        // A descriptor that is closed meanwhile is not open.
        let facts = std::fs::read(descriptor?.path()).unwrap_or_default();
        if facts.split(|byte| *byte == b'\n').any(|fact| fact == line) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns whether a table has a mount of the filesystem with this number.
pub(super) fn has_device(table: &[u8], device: &str) -> bool {
    let mut lines = table.split(|byte| *byte == b'\n');
    lines.any(|line| line.split(|byte| *byte == b' ').nth(2) == Some(device.as_bytes()))
}

/// Returns whether mounts in a directory are passed on to other mount namespaces.
///
/// # Errors
/// The system's error.
pub(super) fn is_shared(directory: &Path) -> io::Result<bool> {
    let table = std::fs::read("/proc/self/mountinfo")?;
    Ok(is_shared_in(&table, &directory.canonicalize()?))
}

fn is_shared_in(table: &[u8], directory: &Path) -> bool {
    let of = |path: &Path| {
        let mut lines = table.split(|byte| *byte == b'\n');
        lines.rfind(|line| entry(line, path).is_some())
    };
    let Some(line) = directory.ancestors().find_map(of) else {
        return false;
    };
    // Between the options and the separator are tags.
    let mut tags = line.split(|byte| *byte == b' ').skip(6);
    tags.by_ref()
        .take_while(|tag| *tag != b"-")
        .any(|tag| tag.starts_with(b"shared:"))
}

/// The number of the topmost mount at a path, as the kernel reports it to this process.
fn number<'a>(table: &'a [u8], path: &Path) -> Option<&'a [u8]> {
    let lines = table.split(|byte| *byte == b'\n');
    let mut there = lines.filter(|line| entry(line, path).is_some());
    there.next_back()?.split(|byte| *byte == b' ').next()
}

fn find(table: &[u8], path: &Path) -> Option<Entry> {
    let lines = table.split(|byte| *byte == b'\n');
    lines.filter_map(|line| entry(line, path)).next_back()
}

/// The mount in a line, if it is at that path: number, parent, device, root, path, options, further
/// ones, `-`, type.
fn entry(line: &[u8], path: &Path) -> Option<Entry> {
    let mut words = line.split(|byte| *byte == b' ');
    let device = words.nth(2)?;
    if unescaped(words.nth(1)?) != path.as_os_str().as_bytes() {
        return None;
    }
    words.find(|word| *word == b"-")?;
    let text = |word| String::from_utf8_lossy(word).into_owned();
    Some(Entry {
        device: text(device),
        kind: text(words.next()?),
    })
}

/// Decodes a path, in which blanks and backslashes are a backslash and three octal digits.
fn unescaped(word: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(word.len());
    let mut rest = word;
    while let Some((&first, behind)) = rest.split_first() {
        let digits = behind.first_chunk::<3>().filter(|_| first == b'\\');
        let value = digits.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 8).ok());
        bytes.push(value.unwrap_or(first));
        rest = if value.is_some() { &behind[3..] } else { behind };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[u8] = b"\
24 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw
90 24 0:55 / /srv/my\\040disk rw,nosuid shared:9 master:2 - fuse.blkmq blkmq rw,user_id=0
91 24 0:60 / /srv/other rw - fuse blkmq rw
92 90 0:61 / /srv/my\\040disk rw - tmpfs none rw
";

    #[test]
    fn topmost_mount_of_a_path_is_found_by_its_name() {
        let found =
            |path: &str| find(TABLE, Path::new(path)).map(|entry| (entry.device.clone(), entry.is_fuse()));
        assert_eq!(found("/srv/my disk"), Some(("0:61".into(), false)));
        assert_eq!(found("/srv/other"), Some(("0:60".into(), true)));
        assert_eq!(found("/"), Some(("254:1".into(), false)));
        assert_eq!(found("/srv"), None);
        assert_eq!(number(TABLE, Path::new("/srv/my disk")), Some(&b"92"[..]));
        let entry = Entry {
            device: "0:55".into(),
            kind: "fuse.blkmq".into(),
        };
        assert_eq!(find_path(TABLE, &entry), Some("/srv/my disk".into()));
        let other = Entry {
            kind: "fuse".into(),
            ..entry
        };
        assert_eq!(find_path(TABLE, &other), None);
        assert_eq!(number(TABLE, Path::new("/srv")), None);
    }

    #[test]
    fn mount_that_passes_others_on_is_that_of_the_directory() {
        let is_shared = |path: &str| is_shared_in(TABLE, Path::new(path));
        assert!(is_shared("/") && is_shared("/srv/images"));
        assert!(!is_shared("/srv/other/below"));
        assert!(has_device(TABLE, "0:60") && !has_device(TABLE, "0:6"));
    }

    #[test]
    fn descriptor_of_this_process_is_found_by_its_mount() {
        let _open = std::fs::File::open("/proc/self/maps").unwrap();
        assert!(is_used_by_us(Path::new("/proc")).unwrap());
        assert!(!is_used_by_us(Path::new("/nowhere")).unwrap());
    }

    #[test]
    fn backslash_that_begins_no_number_stays() {
        assert_eq!(unescaped(b"a\\040b\\134\\09"), b"a b\\\\09");
    }
}
