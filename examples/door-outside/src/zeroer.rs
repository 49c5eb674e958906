//! A front door: a client sends the number of a block, one byte; the block of the first disk is zeroed, and the answer is
//! `.` or `!`. What a door has beside its bytes is `StreamDoor`'s: sockets, admission, memory, and the hand-over.

use blkmq_core::bio::{Op, Status};
use blkmq_export::stream::{Decoded, Request, StreamProtocol};
use blkmq_host::disk::Disk;

/// The protocol.
#[derive(Debug)]
pub struct Zeroer;

impl StreamProtocol for Zeroer {
    fn name(&self) -> &'static str {
        "zeroer"
    }

    fn help(&self) -> &'static str {
        "Zero blocks of the first disk for clients of the unix socket ADDRESS"
    }

    fn decode(&self, disk: &Disk, received: &[u8]) -> Decoded {
        let Some(number) = received.first() else {
            return Decoded::Incomplete;
        };
        let len = disk.block_size.into();
        let zeroes = Request {
            op: Op::WriteZeroes,
            offset: u64::from(*number) * len,
            len,
            ..Request::default()
        };
        Decoded::Request(1, zeroes)
    }

    fn encode(&self, _: &Request, status: Status, _: &[&[u8]], replies: &mut Vec<u8>) {
        replies.push(if status.is_ok() { b'.' } else { b'!' });
    }
}
