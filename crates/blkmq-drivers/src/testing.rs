//! Makes requests for the drivers' tests, and checks their results. Tests only.

use blkmq_core::bio::{Bio, Data, Flags, Lent, Op};
use blkmq_core::ids::{Cookie, DiskId, ReactorId, Tag};
use blkmq_core::request::Request;

use super::sys;

/// Makes a bio without data.
pub(crate) fn bio(op: Op, offset: u64, len: u64) -> Bio {
    Bio {
        op,
        offset,
        len,
        ..Bio::default()
    }
}

/// Makes a request without data.
pub(crate) fn request(op: Op, offset: u64, len: u64) -> Box<Request> {
    Request::for_test(ReactorId(0), bio(op, offset, len), 0)
}

/// Makes a request without data, with flags.
pub(crate) fn flagged(op: Op, flags: Flags, offset: u64, len: u64) -> Box<Request> {
    let mut bio = bio(op, offset, len);
    bio.flags = flags;
    Request::for_test(ReactorId(0), bio, 0)
}

/// Makes a request for `disk` with these pieces of memory and flags.
pub(crate) fn request_with(op: Op, flags: Flags, disk: u32, offset: u64, pieces: &[Lent]) -> Box<Request> {
    let len = pieces.iter().map(|piece| u64::from(piece.len())).sum();
    let mut bio = bio(op, offset, len);
    bio.flags = flags;
    bio.disk = DiskId(disk);
    bio.data = match pieces {
        [one] => Data::Flat(*one),
        several => Data::List(several.into()),
    };
    Request::for_test(ReactorId(0), bio, 0)
}

/// Makes the cookie of a tag.
pub(crate) fn cookie(tag: u32) -> Cookie {
    Cookie::new(Tag(tag), 1)
}

/// Lends a buffer to a request. The test keeps the buffer, and does not use it, until the request
/// has ended.
pub(crate) fn lend(buffer: &mut [u8]) -> Lent {
    sys::lend_for_test(buffer)
}

/// A file of one test, removed with this value.
pub(crate) struct Scratch(std::path::PathBuf);

/// Makes a file of `len` bytes, all holes, whose name has `name` in it.
pub(crate) fn scratch_file(name: &str, len: u64) -> Scratch {
    scratch_file_in(&std::env::temp_dir(), name, len)
}

/// Makes such a file in a directory.
pub(crate) fn scratch_file_in(directory: &std::path::Path, name: &str, len: u64) -> Scratch {
    let path = directory.join(format!("blkmq-test-{}-{name}", std::process::id()));
    let file = std::fs::File::create(&path).expect("the directory can be written");
    file.set_len(len).expect("a sparse file can be made");
    Scratch(path)
}

impl std::ops::Deref for Scratch {
    type Target = std::path::Path;

    fn deref(&self) -> &std::path::Path {
        &self.0
    }
}

impl AsRef<std::ffi::OsStr> for Scratch {
    fn as_ref(&self) -> &std::ffi::OsStr {
        self.0.as_os_str()
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // The test may have removed it.
        let _ = std::fs::remove_file(&self.0);
    }
}

/// A filesystem of a test's own, unmounted with this value.
pub(crate) struct Mounted(pub(crate) std::path::PathBuf);

impl Mounted {
    /// Mounts a tmpfs of `size`, or says aloud why not.
    pub(crate) fn tmpfs(name: &str, size: &str) -> Option<Self> {
        Self::mount(name, &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs"])
    }

    /// Mounts the filesystem of this type that lies in `image`, or says aloud why not.
    pub(crate) fn loop_device(name: &str, kind: &str, image: &std::path::Path) -> Option<Self> {
        Self::mount(name, &["-t", kind, "-o", "loop", image.to_str()?])
    }

    /// Mounts what lies on a block device, or says aloud why not.
    pub(crate) fn device(name: &str, device: &str) -> Option<Self> {
        Self::mount(name, &[device])
    }

    /// Mounts with these arguments, or says aloud why not.
    pub(crate) fn mount(name: &str, options: &[&str]) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("blkmq-test-{}-{name}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        let mounted = std::process::Command::new("mount")
            .args(options)
            .arg(&path)
            .output();
        let this = Self(path);
        match mounted {
            Ok(output) if output.status.success() => Some(this),
            _ => {
                blkmq_testkit::skip(&format!("{options:?} cannot be mounted (it needs root)"));
                None
            }
        }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // If it was not mounted, there is nothing to unmount.
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .output();
        let _ = std::fs::remove_dir(&self.0);
    }
}
