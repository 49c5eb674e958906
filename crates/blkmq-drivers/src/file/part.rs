//! What a hardware context carries out at once: a whole request, or the part of one that lies together in one
//! file. A raw disk has whole requests only; `qcow2` cuts those of an image where its clusters lie apart.

use blkmq_core::bio::{Flags, Lent, Op};
use blkmq_core::ids::DiskId;
use blkmq_core::request::Request;

/// A request or a part of one, and where in which file it goes.
#[derive(Clone, Debug)]
pub(crate) struct Part<'a> {
    pub(crate) op: Op,
    pub(crate) flags: Flags,
    /// The file.
    pub(crate) disk: DiskId,
    /// First byte in the file.
    pub(crate) offset: u64,
    /// Bytes.
    pub(crate) len: u64,
    /// An elevator has given it out.
    pub(crate) is_ordered: bool,
    /// Bytes of `memory` before its own.
    pub(crate) skip: u64,
    pub(crate) memory: Pieces<'a>,
}

/// The memory of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Pieces<'a> {
    /// That of a request that is being issued.
    Of(&'a Request),
    /// That of one that was issued before.
    #[cfg_attr(
        not(feature = "qcow2"),
        expect(dead_code, reason = "only qcow2 issues one again")
    )]
    List(&'a [Lent]),
}

impl Pieces<'_> {
    /// Visits the pieces in order.
    pub(crate) fn for_each(self, mut visit: impl FnMut(Lent)) {
        match self {
            Self::Of(rq) => rq.for_each_piece(visit),
            Self::List(pieces) => pieces.iter().for_each(|piece| visit(*piece)),
        }
    }
}

impl<'a> Part<'a> {
    /// A whole request, on its own disk.
    #[inline]
    pub(crate) fn whole(rq: &'a Request) -> Self {
        Self {
            op: rq.op(),
            flags: rq.flags(),
            disk: rq.disk(),
            offset: rq.offset(),
            len: rq.len(),
            is_ordered: rq.is_ordered(),
            skip: 0,
            memory: Pieces::Of(rq),
        }
    }

    /// The piece of memory, if there is only one.
    #[inline]
    pub(super) fn single_piece(&self) -> Option<Lent> {
        let piece = match self.memory {
            Pieces::Of(rq) => rq.single_piece(),
            Pieces::List([piece]) => Some(*piece),
            Pieces::List(_) => None,
        }?;
        match self.skip == 0 && self.len == u64::from(piece.len()) {
            true => Some(piece),
            false => Some(piece.part(self.skip as u32, self.len as u32)),
        }
    }

    /// Visits the pieces of its memory in order.
    pub(crate) fn for_each_piece(&self, mut visit: impl FnMut(Lent)) {
        let (mut skip, mut left) = (self.skip, self.len);
        self.memory.for_each(|piece| {
            let len = u64::from(piece.len());
            let skipped = skip.min(len);
            skip -= skipped;
            let own = left.min(len - skipped);
            left -= own;
            if own > 0 {
                visit(piece.part(skipped as u32, own as u32));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::lend;

    #[test]
    fn parts_have_the_memory_of_their_bytes_and_no_other() {
        let mut memory = vec![0u8; 12288];
        let (first, second) = memory.split_at_mut(4096);
        let pieces = [lend(first), lend(second)];
        let lens = |skip, len| {
            let part = Part {
                op: Op::Read,
                flags: Flags::NONE,
                disk: DiskId(0),
                offset: 0,
                len,
                is_ordered: false,
                skip,
                memory: Pieces::List(&pieces),
            };
            let mut lens = Vec::new();
            part.for_each_piece(|piece| lens.push(piece.len()));
            lens
        };
        assert_eq!(lens(0, 12288), [4096, 8192]);
        assert_eq!(lens(512, 4096), [3584, 512]);
        assert_eq!(lens(4096, 8192), [8192]);
        assert_eq!(lens(8192, 4096), [4096]);
    }
}
