//! The table of bios under way: the loan of each one's buffer, and who gets its end. `client` has one.

use blkmq_core::bio::{self, Status};

use crate::buffer::Buffer;
use crate::sys::Loan;

/// Loans by the cookies of their bios. Places are used again, so it grows to the most bios at once.
pub(crate) struct Loans<T> {
    places: Vec<Option<(Loan, T)>>,
    free: Vec<usize>,
}

impl<T> Loans<T> {
    pub(crate) const fn new() -> Self {
        Self {
            places: Vec::new(),
            free: Vec::new(),
        }
    }

    /// The cookie of the next one that is added.
    #[inline]
    pub(crate) fn next(&self) -> u64 {
        self.free.last().copied().unwrap_or(self.places.len()) as u64
    }

    #[inline]
    pub(crate) fn add(&mut self, loan: Loan, owner: T) {
        match self.free.pop() {
            Some(place) => self.places[place] = Some((loan, owner)),
            None => self.places.push(Some((loan, owner))),
        }
    }

    /// Says whether no bio is under way.
    pub(crate) fn is_empty(&self) -> bool {
        self.free.len() == self.places.len()
    }

    /// Takes an ended bio's owner, status and buffer.
    ///
    /// # Panics
    /// If it is not under way.
    #[inline]
    pub(crate) fn end(&mut self, ended: bio::Bio) -> (T, Status, Buffer) {
        let place = ended.cookie as usize;
        let (loan, owner) = self.places[place].take().expect("a bio ends once");
        self.free.push(place);
        let status = ended.status;
        (owner, status, loan.end(ended))
    }
}
