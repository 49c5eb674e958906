//! The memory pieces for payload and received bytes: parts of slabs that are mapped once and stay. All
//! mappings of a process share one lock, so if each connection mapped and unmapped its own, reactors would
//! wait for each other wherever clients come and go.
//!
//! The content of a piece goes back to the system with the piece, except for the few latest pieces.
//! Those are reserved for the regions that are not accounted, since they may take memory for all of
//! their pages.

use std::io;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::memory::ALLOWANCE;
use super::sys::{Piece, map_slab};

/// Pieces that are free.
#[derive(Debug, Default)]
pub(crate) struct Arena(Mutex<Free>);

#[derive(Debug, Default)]
struct Free {
    /// They may hold old content, and take memory for it.
    used: Vec<Piece>,
    /// They take no memory, and read as zeroes.
    blank: Vec<Piece>,
}

/// The arena of the process.
pub(crate) static ARENA: Arena = Arena(Mutex::new(Free {
    used: Vec::new(),
    blank: Vec::new(),
}));

impl Arena {
    /// Takes a piece; a used one, unless it has to be blank. A used one may take memory for all its
    /// pages: it is for callers that may have that much.
    ///
    /// # Errors
    /// The system's error: it has no memory, or no more mappings.
    pub(crate) fn take(&self, is_blank: bool) -> io::Result<Piece> {
        let mut free = self.lock();
        let used = if is_blank { None } else { free.used.pop() };
        if let Some(piece) = used.or_else(|| free.blank.pop()) {
            return Ok(piece);
        }
        // With the lock held, so that callers that need memory at the same time map one slab.
        match map_slab(SLAB_PIECES) {
            Ok(slab) => free.blank.extend(slab),
            Err(error) => {
                let mut piece = free.used.pop().ok_or(error)?;
                piece.forget()?;
                return Ok(piece);
            }
        }
        Ok(free.blank.pop().expect("a slab has pieces"))
    }

    /// Takes a piece back.
    pub(crate) fn put(&self, mut piece: Piece) {
        let mut free = self.lock();
        if !piece.is_blank() && free.used.len() >= USED_MAX {
            drop(free);
            // Addresses that are locked in memory keep their content.
            let _ = piece.forget();
            free = self.lock();
        }
        if piece.is_blank() {
            free.blank.push(piece);
        } else {
            free.used.push(piece);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Free> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Bytes of a piece.
pub(crate) const PIECE_BYTES: usize = ALLOWANCE as usize;
/// Pieces of a slab: 16 MiB of addresses, of which only the used part takes memory.
const SLAB_PIECES: usize = 64;
/// Pieces that are kept as they are, 4 MiB at most.
const USED_MAX: usize = 16;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_used_again_and_blank_ones_hold_zeroes() {
        let arena = Arena::default();
        let mut pieces: Vec<Piece> = (0..2 * USED_MAX).map(|_| arena.take(false).unwrap()).collect();
        for mut piece in pieces.drain(..) {
            *piece.first() = 7;
            arena.put(piece);
        }
        let mut blank: Vec<Piece> = (0..SLAB_PIECES).map(|_| arena.take(true).unwrap()).collect();
        assert!(blank.iter_mut().all(|piece| *piece.first() == 0), "not blank");
        let mut used: Vec<Piece> = (0..USED_MAX).map(|_| arena.take(false).unwrap()).collect();
        assert!(
            used.iter_mut().all(|piece| *piece.first() == 7),
            "used ones go first"
        );
        // They were not touched since, but that does not make them blank.
        used.drain(..).for_each(|piece| arena.put(piece));
        let mut blank: Vec<Piece> = (0..SLAB_PIECES).map(|_| arena.take(true).unwrap()).collect();
        assert!(blank.iter_mut().all(|piece| *piece.first() == 0), "not blank");
        let mut used: Vec<Piece> = (0..USED_MAX).map(|_| arena.take(false).unwrap()).collect();
        assert!(
            used.iter_mut().all(|piece| *piece.first() == 7),
            "used ones are kept"
        );
        assert_eq!(
            *arena.take(false).unwrap().first(),
            0,
            "there are no more of them"
        );
    }
}
