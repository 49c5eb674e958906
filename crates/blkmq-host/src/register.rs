//! The numbers of tenants: one for each group's path, on whichever queue its disks lie, and never reused
//! for another path. `engine` calls it when disks are added; front doors share their places and their
//! memory by this number.

use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

use blkmq_core::ids::GroupId;

/// The owner of a disk: a group by its path, over all queues. The number of a group ([`GroupId`]) belongs to
/// one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant(pub u32);

/// All present and past tenants.
#[derive(Debug, Default)]
pub(crate) struct Register(Mutex<BTreeMap<String, Tenant>>);

impl Register {
    /// The tenant of a queue's group; a group without a path is identified by its number there.
    pub(crate) fn tenant(&self, queue: &str, group: GroupId, path: Option<&str>) -> Tenant {
        match path {
            Some(path) => self.of_path(path.to_owned()),
            None => self.of_path(format!("{queue}#{}", group.0)),
        }
    }

    fn of_path(&self, path: String) -> Tenant {
        // Nothing under the lock can panic.
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Tenant(known.len() as u32);
        *known.entry(path).or_insert(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tenant_is_a_path_on_whichever_queue() {
        let register = Register::default();
        let of = |queue, group, path| register.tenant(queue, GroupId(group), path);
        let a = of("q", 1, Some("/a"));
        assert_eq!(of("r", 7, Some("/a")), a);
        let others = [of("r", 1, Some("/b")), of("q", 1, None), of("r", 1, None)];
        assert!(others.iter().all(|other| *other != a));
        assert!(others[0] != others[1] && others[1] != others[2]);
        assert_eq!(of("q", 9, Some("/a")), a, "and it stays");
    }
}
