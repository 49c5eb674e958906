//! The numbers of users and groups by their names, as this host knows them: files, directories of a network, whatever
//! the system's name service has. `access` asks for those of sockets, and the command for the readers of its own.

mod sys;

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
