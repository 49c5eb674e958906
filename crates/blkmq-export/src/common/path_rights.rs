//! The owner, group and mode of a socket's path, set on what was looked at: a path may be something else a moment later, and
//! a symbolic link in its place would have any file given away. `access` and the daemon's own sockets use it.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid, chmodat, chownat, fstat, open};

/// What a socket's path is to have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathRights {
    /// The number of a user; `None` leaves it as it is.
    pub owner: Option<u32>,
    /// The number of a group; `None` leaves it as it is.
    pub group: Option<u32>,
    /// The bits of access, such as 0o660.
    pub mode: u32,
}

impl PathRights {
    /// Those of a socket for the daemon's user alone.
    pub const OWN: Self = Self {
        owner: None,
        group: None,
        mode: 0o600,
    };

    /// Gives them to the socket at a path. A symbolic link is not followed.
    ///
    /// # Errors
    /// The system's error, or there is something else than a socket.
    pub fn give(self, path: &Path) -> io::Result<()> {
        let found = open(
            path,
            OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )?;
        if FileType::from_raw_mode(fstat(&found)?.st_mode) != FileType::Socket {
            let what = "there is no socket any more: somebody has put something else in its place";
            return Err(io::Error::other(what));
        }
        // Before the mode, which lets in the group that it has then.
        if self.owner.is_some() || self.group.is_some() {
            let (owner, group) = (self.owner.map(Uid::from_raw), self.group.map(Gid::from_raw));
            chownat(&found, "", owner, group, AtFlags::EMPTY_PATH)?;
        }
        let there = format!("/proc/self/fd/{}", found.as_raw_fd());
        Ok(chmodat(
            CWD,
            there,
            Mode::from_raw_mode(self.mode),
            AtFlags::empty(),
        )?)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
    use std::path::PathBuf;

    use super::*;
    use crate::common::listen_at;

    fn scratch(name: &str) -> PathBuf {
        let path = std::env::temp_dir().join(format!("blkmq-rights-{name}-{}", std::process::id()));
        let _ = fs::remove_file(&path);
        path
    }

    #[test]
    fn socket_gets_its_mode_and_what_a_link_in_its_place_names_does_not() {
        let (socket, file) = (scratch("socket"), scratch("file"));
        let listener = listen_at(&socket).unwrap();
        fs::write(&file, "secret").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        let rights = PathRights {
            owner: None,
            group: Some(rustix::process::getegid().as_raw()),
            mode: 0o666,
        };
        rights.give(&socket).unwrap();
        let mode = |path: &Path| fs::symlink_metadata(path).unwrap().mode() & 0o777;
        assert_eq!(mode(&socket), 0o666);
        fs::remove_file(&socket).unwrap();
        symlink(&file, &socket).unwrap();
        let refused = rights.give(&socket).unwrap_err();
        assert!(refused.to_string().contains("in its place"), "{refused}");
        rights.give(&file).unwrap_err();
        assert_eq!(mode(&file), 0o600);
        drop(listener);
        fs::remove_file(&socket).unwrap();
        fs::remove_file(&file).unwrap();
    }
}
