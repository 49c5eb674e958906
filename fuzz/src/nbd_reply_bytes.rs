//! Bytes of a server against the NBD driver's parser of replies.
//!
//! The first two bytes choose the style of the replies and the size of the pieces the stream arrives in; the rest is the
//! stream. Broken would be: a panic, a request that ends twice, data out of its place, an answer that is called whole and is
//! not, or a message that is waited for though no buffer holds it.

use blkmq_nbd::codec::{ErrorCode, HeaderStyle};
use blkmq_nbd::cover::Cover;
use blkmq_nbd::replies::{Asked, Book, Fault, RECEIVE_BYTES_MIN, Replies};

/// A request, what was written of its answer, and whether it has failed or ended.
struct Request {
    asked: Asked,
    cover: Cover,
    written: Vec<bool>,
    has_failed: bool,
    has_ended: bool,
}

/// Requests by cookie: 0 and 1 read 64 bytes at 1000, 2 reads 4096 at 0, 3 and 4 have no data.
struct Requests(Vec<Request>);

impl Requests {
    fn new() -> Self {
        let ranges = [
            (true, 1000, 64),
            (true, 1000, 64),
            (true, 0, 4096),
            (false, 0, 0),
            (false, 9, 9),
        ];
        let request = |(reads, offset, len): (bool, u64, u64)| Request {
            asked: Asked { reads, offset, len },
            cover: Cover::NEW,
            written: vec![false; len as usize],
            has_failed: false,
            has_ended: false,
        };
        Self(ranges.map(request).into())
    }

    fn write(&mut self, request: u32, at: u64, len: usize) {
        let request = &mut self.0[request as usize];
        assert!(request.asked.reads && !request.has_ended, "data for nobody");
        for byte in &mut request.written[at as usize..at as usize + len] {
            assert!(!std::mem::replace(byte, true), "a byte is written twice");
        }
    }
}

impl Book for Requests {
    fn find(&mut self, cookie: u64) -> Result<(u32, Asked), Fault> {
        let number = usize::try_from(cookie).unwrap_or(usize::MAX);
        let request = self.0.get(number).filter(|request| !request.has_ended);
        let request = request.ok_or(Fault::Cookie(cookie))?;
        Ok((cookie as u32, request.asked))
    }

    fn cover(&mut self, request: u32) -> &mut Cover {
        &mut self.0[request as usize].cover
    }

    fn put(&mut self, request: u32, at: u64, data: &[u8]) {
        self.write(request, at, data.len());
    }

    fn put_zeroes(&mut self, request: u32, at: u64, len: u64) {
        self.write(request, at, len as usize);
    }

    fn fail(&mut self, request: u32, _: ErrorCode, _: &str) {
        self.0[request as usize].has_failed = true;
    }

    fn end(&mut self, request: u32) {
        let request = &mut self.0[request as usize];
        assert!(
            !std::mem::replace(&mut request.has_ended, true),
            "a request ends twice"
        );
        let is_whole = !request.asked.reads || request.written.iter().all(|written| *written);
        assert!(
            is_whole || request.has_failed,
            "a request ends well and is not whole"
        );
    }
}

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Some((&[style, piece], stream)) = data.split_first_chunk() else {
        return;
    };
    let style = match style & 3 {
        0 => HeaderStyle::Simple,
        1 => HeaderStyle::Structured,
        _ => HeaderStyle::Extended,
    };
    let (mut replies, mut requests) = (Replies::new(style), Requests::new());
    // A fault ends the connection, as it does in the driver.
    let _ = receive(&mut replies, &mut requests, stream, usize::from(piece) + 1);
}

/// Feeds the stream, every other pending piece of data past the parser.
fn receive(replies: &mut Replies, requests: &mut Requests, stream: &[u8], piece: usize) -> Result<(), Fault> {
    let mut waiting = Vec::new();
    for (turn, bytes) in stream.chunks(piece).enumerate() {
        let mut rest = bytes;
        if let Some(data) = replies.pending().filter(|_| turn % 2 == 0) {
            assert!(waiting.is_empty(), "bytes before pending data");
            let now = rest.len().min(data.left as usize);
            requests.write(data.request, data.at, now);
            replies.took(now as u64, requests)?;
            rest = &rest[now..];
        }
        waiting.extend_from_slice(rest);
        let taken = replies.receive(&waiting, requests)?;
        waiting.drain(..taken);
        assert!(waiting.len() < RECEIVE_BYTES_MIN, "a message that never fits");
    }
    Ok(())
}
