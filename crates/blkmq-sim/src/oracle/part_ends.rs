//! The error with which a bio of a mapped disk must complete: that of the first part that failed.
//! `record` asks for it.
//!
//! A part has certainly ended when all its blocks are reported. After an error the rest of a part
//! may never be sent, so if another part has failed and is not reported whole, it is unknown which
//! one ended first.

use blkmq_core::bio::Status;

/// The parts of one bio.
#[derive(Debug)]
pub(super) struct PartEnds {
    /// The block of the bio at which each begins.
    cuts: Vec<usize>,
    /// For each part, how many of its blocks are reported, and its first error.
    seen: Vec<(usize, Status)>,
    first: First,
}

#[derive(Clone, Copy, Debug)]
enum First {
    None,
    Known(Status),
    Unknown,
}

impl PartEnds {
    /// Parts that begin at these blocks of the bio.
    pub(super) fn new(cuts: Vec<usize>) -> Self {
        Self {
            seen: vec![(0, Status::Ok); cuts.len()],
            cuts,
            first: First::None,
        }
    }

    /// Returns the blocks of the bio at which its parts begin.
    pub(super) fn cuts(&self) -> &[usize] {
        &self.cuts
    }

    /// Records that the drive has reported some blocks of a bio of `all` blocks.
    pub(super) fn reported(&mut self, first: usize, blocks: usize, all: usize, status: Status) {
        let number = self.cuts.partition_point(|cut| *cut <= first) - 1;
        let (count, error) = &mut self.seen[number];
        *count += blocks;
        *error = error.and(status);
        let error = *error;
        if error.is_ok() || !matches!(self.first, First::None) || !self.is_whole(number, all) {
            return;
        }
        let failed = |&number: &usize| !self.seen[number].1.is_ok();
        let mut failed = (0..self.cuts.len()).filter(failed);
        self.first = match failed.all(|number| self.is_whole(number, all)) {
            true => First::Known(error),
            false => First::Unknown,
        };
    }

    /// Returns the error with which the bio must end, if it is known.
    pub(super) fn first_error(&self) -> Option<Status> {
        match self.first {
            First::Known(status) => Some(status),
            First::None | First::Unknown => None,
        }
    }

    fn is_whole(&self, number: usize, all: usize) -> bool {
        let end = self.cuts.get(number + 1).copied().unwrap_or(all);
        self.seen[number].0 == end - self.cuts[number]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn part_that_is_whole_first_decides() {
        let mut ends = PartEnds::new(vec![0, 4]);
        ends.reported(0, 4, 6, Status::Ok);
        assert_eq!(ends.first_error(), None);
        ends.reported(4, 2, 6, Status::Medium);
        assert_eq!(ends.first_error(), Some(Status::Medium));
    }

    #[test]
    fn part_that_failed_and_is_not_whole_may_have_ended_first() {
        let mut ends = PartEnds::new(vec![0, 4]);
        ends.reported(0, 2, 6, Status::Transport);
        ends.reported(4, 2, 6, Status::Medium);
        assert_eq!(ends.first_error(), None);
    }
}
