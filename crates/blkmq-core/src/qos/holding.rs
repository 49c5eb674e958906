//! The share of a scarce resource that one user may hold: requests of a reactor (`sw_ctx`), sequences of
//! `flush`, memory for payload. `share` does the same for the tags of a drive, which are freed soon.
//!
//! Pieces that a user holds cannot be taken back, and may be returned very late (for example, with a cap of
//! one I/O per second). So the share is one of the *free* pieces: free / (users + 4), and at least 4. However
//! much earlier users hold, a new user finds a quarter of the rest, and users with equal demand end with
//! equal holdings. (The share of the free memory is after Choudhury and Hahne, "Dynamic Queue Length
//! Thresholds for Shared-Memory Packet Switches", 1998; there it is a fixed multiple. Divided by the users,
//! the k-th user that never returns anything leaves 3 / (k + 3), not a k-th power.)

use super::{SHARE_MIN, share_of_free};

/// How many pieces each user holds.
#[derive(Debug)]
pub(crate) struct DynamicThreshold {
    held: Box<[u32]>,
    /// Users that hold pieces.
    users: u32,
}

impl DynamicThreshold {
    /// None of `users` users holds a piece; for fewer than two users there are no shares.
    pub(crate) fn new(users: usize) -> Self {
        Self {
            held: vec![0; if users > 1 { users } else { 0 }].into(),
            users: 0,
        }
    }

    /// Pieces, of `pieces` in total, are short while no more than this many are free.
    pub(crate) fn short_at(&self, pieces: usize) -> usize {
        if self.held.is_empty() { 0 } else { pieces / 2 }
    }

    /// Says whether a user may take one more piece while `free` are free and pieces are short.
    pub(crate) fn may_take(&self, user: u32, free: usize) -> bool {
        let Some(&held) = self.held.get(user as usize) else {
            return free > 0;
        };
        free > 0 && held < share(free, self.users as usize)
    }

    /// A user takes a piece.
    pub(crate) fn take(&mut self, user: u32) {
        if let Some(held) = self.held.get_mut(user as usize) {
            self.users += u32::from(*held == 0);
            *held += 1;
        }
    }

    /// A user returns a piece.
    pub(crate) fn give(&mut self, user: u32) {
        if let Some(held) = self.held.get_mut(user as usize) {
            *held -= 1;
            self.users -= u32::from(*held == 0);
        }
    }

    /// Says whether no user holds a piece.
    pub(crate) fn is_empty(&self) -> bool {
        self.users == 0
    }
}

/// How many pieces a user may hold while `free` are free and `users` users hold some.
pub(crate) fn share(free: usize, users: usize) -> u32 {
    u32::try_from(share_of_free(free as u64, users as u64))
        .unwrap_or(u32::MAX)
        .max(SHARE_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a user take all pieces that it may; returns the number of free pieces then.
    fn fill(holdings: &mut DynamicThreshold, user: u32, mut free: usize) -> usize {
        while holdings.may_take(user, free) {
            holdings.take(user);
            free -= 1;
        }
        free
    }

    #[test]
    fn newcomer_after_thirty_users_that_return_nothing_finds_its_share() {
        let mut holdings = DynamicThreshold::new(32);
        let mut free = 2048;
        for user in 0..31 {
            let before = free;
            free = fill(&mut holdings, user, free);
            assert!(
                before - free >= 4,
                "user {user} gets {} of {before}",
                before - free
            );
        }
        assert!(free >= 128, "{free} left");
    }

    #[test]
    fn users_of_equal_appetite_end_with_the_same_whoever_came_first() {
        let mut holdings = DynamicThreshold::new(8);
        let mut free = fill(&mut holdings, 0, 2048);
        for round in 0..4000 {
            // Returned pieces go to any user that may have them.
            for user in 0..4 {
                free = fill(&mut holdings, (user + round) % 4, free);
            }
            let back = round % 4;
            if holdings.held[back as usize] > 0 {
                holdings.give(back);
                free += 1;
            }
        }
        let (least, most) = (holdings.held[..4].iter().min(), holdings.held[..4].iter().max());
        let (least, most) = (least.unwrap(), most.unwrap());
        assert!(most - least <= most / 8, "from {least} to {most}");
    }

    #[test]
    fn one_user_alone_has_no_share() {
        let mut holdings = DynamicThreshold::new(1);
        assert_eq!((holdings.short_at(64), fill(&mut holdings, 0, 0)), (0, 0));
        assert!((1..64).all(|free| holdings.may_take(0, free)));
    }

    #[test]
    fn few_pieces_are_given_to_the_last() {
        let mut holdings = DynamicThreshold::new(2);
        assert_eq!(fill(&mut holdings, 0, 8), 4);
        assert_eq!(fill(&mut holdings, 1, 4), 0);
        (0..2).for_each(|user| (0..4).for_each(|_| holdings.give(user)));
        assert!(holdings.is_empty());
    }
}
