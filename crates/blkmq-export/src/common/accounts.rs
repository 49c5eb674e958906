//! The numbers of users and groups by their names, as this host knows them: files, directories of a network, whatever
//! the system's name service has. `access` asks for those of sockets, and the command for the readers of its own.

mod sys;

/// What names an account in a configuration, for an error about one that names nobody.
pub const ALLOWED: &str = if cfg!(target_feature = "crt-static") {
    "a number, or a name in /etc/passwd or /etc/group (a static program looks nowhere else)"
} else {
    "a number, or a name that this host knows"
};

/// In a static program, has names of accounts and hosts looked up in files and by DNS alone, whatever
/// `/etc/nsswitch.conf` says: the host's modules for it are made for the C library of the host, and would be loaded
/// beside another. Other programs look names up as the host is configured. To be called while the program has one
/// thread.
pub fn restrict_static_program() {
    #[cfg(target_feature = "crt-static")]
    sys::restrict_sources();
}

/// The number of a user. May block for as long as the system's name service takes.
pub fn user(name: &str) -> Option<u32> {
    sys::user(name)
}

/// The number of a group. May block as [`user`].
pub fn group(name: &str) -> Option<u32> {
    sys::group(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn account_is_found_by_its_name_and_no_other_is() {
        assert_eq!((user("root"), group("root")), (Some(0), Some(0)));
        assert_eq!((user("no-such-user"), group("no such group")), (None, None));
        assert_eq!((user("a\0b"), group("")), (None, None));
    }
}
