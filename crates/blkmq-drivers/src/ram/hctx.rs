//! A hardware context of a ram drive: the reactor that issues a request executes it on memory at once.

use std::sync::Arc;

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::Cookie;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;

use crate::store::{self, Store};

/// One hardware context of a ram drive.
pub(super) struct RamHctx {
    disks: Arc<[Store]>,
}

impl RamHctx {
    pub(super) fn new(disks: Arc<[Store]>) -> Self {
        Self { disks }
    }

    fn run(&self, rq: &Request) -> Status {
        let Some(disk) = self.disks.get(rq.disk().index()) else {
            return Status::Invalid;
        };
        match rq.op() {
            Op::Read => store::read_request(disk, rq),
            Op::Write => store::write_request(disk, rq),
            Op::Flush => Status::Ok,
            Op::Discard => discard(disk, rq),
            Op::WriteZeroes if !rq.flags().has(Flags::NO_UNMAP) => discard(disk, rq),
            // Zeroes that must have memory behind them are written like data.
            Op::WriteZeroes if rq.flags().has(Flags::FAST_ONLY) => Status::NotSupported,
            Op::WriteZeroes => store::status(disk.write_zeroes(rq.offset(), rq.len())),
        }
    }
}

fn discard(disk: &Store, rq: &Request) -> Status {
    disk.discard(rq.offset(), rq.len());
    Status::Ok
}

impl HctxDriver for RamHctx {
    fn issue(&mut self, rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        Issued::Done(self.run(rq))
    }

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{cookie, flagged, lend, request, request_with};

    fn run(hctx: &mut RamHctx, rq: &Request) -> Status {
        match hctx.issue(rq, cookie(0), true, Instant(0)) {
            Issued::Done(status) => status,
            other => panic!("{other:?}"),
        }
    }

    fn two_disks() -> (RamHctx, RamHctx) {
        let disks: Arc<[Store]> = [1u64 << 20, 1 << 20]
            .map(|size| Store::new(size, false))
            .into_iter()
            .collect();
        (RamHctx::new(Arc::clone(&disks)), RamHctx::new(disks))
    }

    #[test]
    fn one_context_reads_from_pieces_what_the_other_wrote_from_pieces() {
        let (mut one, mut other) = two_disks();
        let mut first: Vec<u8> = (0..1536u32).map(|i| i as u8).collect();
        let mut second = vec![200u8; 2560];
        let pieces = [lend(&mut first), lend(&mut second)];
        let wrote = run(&mut one, &request_with(Op::Write, Flags::NONE, 1, 8192, &pieces));
        assert_eq!(wrote, Status::Ok);
        // Pieces at odd addresses and of other lengths than those of the write.
        let mut memory = vec![1u8; 4097];
        let (head, tail) = memory[1..].split_at_mut(1024);
        let pieces = [lend(head), lend(tail)];
        let read = run(&mut other, &request_with(Op::Read, Flags::NONE, 1, 8192, &pieces));
        assert_eq!(read, Status::Ok);
        assert_eq!(memory[1..1537], first);
        assert_eq!(memory[1537..], second);
        let mut elsewhere = vec![1u8; 4096];
        run(
            &mut other,
            &request_with(Op::Read, Flags::NONE, 0, 8192, &[lend(&mut elsewhere)]),
        );
        assert!(elsewhere.iter().all(|byte| *byte == 0), "disk 0 was not written");
    }

    #[test]
    fn zeroing_keeps_memory_only_if_asked_to() {
        let (mut hctx, _) = two_disks();
        let mut ones = vec![1u8; 8192];
        run(
            &mut hctx,
            &request_with(Op::Write, Flags::NONE, 0, 0, &[lend(&mut ones)]),
        );
        let zero = |flags| flagged(Op::WriteZeroes, flags, 0, 8192);
        let fast_kept = Flags::NO_UNMAP.with(Flags::FAST_ONLY);
        assert_eq!(run(&mut hctx, &zero(fast_kept)), Status::NotSupported);
        assert_eq!(hctx.disks[0].present_bytes(), 8192);
        assert_eq!(run(&mut hctx, &zero(Flags::NO_UNMAP)), Status::Ok);
        assert_eq!(hctx.disks[0].present_bytes(), 8192);
        assert_eq!(run(&mut hctx, &zero(Flags::FAST_ONLY)), Status::Ok);
        assert_eq!(hctx.disks[0].present_bytes(), 0);
    }

    #[test]
    fn write_without_data_and_a_disk_that_is_not_there_are_invalid() {
        let (mut hctx, _) = two_disks();
        assert_eq!(run(&mut hctx, &request(Op::Write, 0, 4096)), Status::Invalid);
        assert_eq!(
            run(&mut hctx, &request_with(Op::Flush, Flags::NONE, 2, 0, &[])),
            Status::Invalid
        );
    }
}
