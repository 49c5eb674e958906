//! Decides how much data one group may have moved in one turn of a reactor. Drives that end requests while they are issued (memory, the
//! page cache) copy all that one group asks for on the reactor's thread, and everybody else waits meanwhile. Kept by `reactor::core`,
//! asked by `service`.

use blkmq_core::ids::GroupId;

/// Bytes of large bios that each group has submitted in this turn.
#[derive(Debug, Default)]
pub(crate) struct Moved(Vec<(GroupId, u64)>);

impl Moved {
    /// A new turn begins.
    #[inline]
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    /// Takes note of a bio, unless its group has had enough: the first one of a turn goes, whatever its size.
    pub(crate) fn admit(&mut self, group: GroupId, bytes: u64) -> bool {
        let Some((_, moved)) = self.0.iter_mut().find(|(of, _)| *of == group) else {
            self.0.push((group, bytes));
            return true;
        };
        if *moved + bytes > BYTES_MAX && !cfg!(blkmq_mutant = "moved") {
            return false;
        }
        *moved += bytes;
        true
    }
}

/// About half a millisecond of copying to memory that is touched for the first time, a tenth of it otherwise.
const BYTES_MAX: u64 = 1 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_group_that_has_had_enough_holds_up_no_other_and_goes_on_in_the_next_turn() {
        let (flood, light) = (GroupId(1), GroupId(2));
        let mut moved = Moved::default();
        let admitted = (0..100).filter(|_| moved.admit(flood, MIB)).count();
        assert_eq!(admitted, 1);
        assert!(moved.admit(light, MIB), "of another group");
        assert!(!moved.admit(flood, MIB));
        moved.clear();
        assert!(moved.admit(flood, 32 * MIB), "the first one, whatever its size");
        assert!(!moved.admit(flood, 32 << 10));
    }
}
