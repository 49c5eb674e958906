//! Replies as servers may send them, and as they must not, against the client's parser.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;
use crate::codec::reply::{
    write_chunk_head, write_data_head, write_error_chunk, write_hole_chunk, write_simple,
};

const STYLES: [HeaderStyle; 3] = [
    HeaderStyle::Simple,
    HeaderStyle::Structured,
    HeaderStyle::Extended,
];

/// Requests and what became of them. The number of a request is its cookie.
#[derive(Default)]
struct Ledger {
    asked: BTreeMap<u32, (Asked, Cover, Vec<u8>, Option<ErrorCode>)>,
    ended: Vec<(u32, Vec<u8>, Option<ErrorCode>)>,
}

impl Ledger {
    fn ask(&mut self, request: u32, reads: bool, offset: u64, len: u64) {
        let memory = vec![0xee; if reads { len as usize } else { 0 }];
        let asked = Asked { reads, offset, len };
        self.asked.insert(request, (asked, Cover::NEW, memory, None));
    }
}

impl Book for Ledger {
    fn find(&mut self, cookie: u64) -> Result<(u32, Asked), Fault> {
        let request = u32::try_from(cookie).map_err(|_| Fault::Cookie(cookie))?;
        let found = self.asked.get(&request).ok_or(Fault::Cookie(cookie))?;
        Ok((request, found.0))
    }

    fn cover(&mut self, request: u32) -> &mut Cover {
        &mut self.asked.get_mut(&request).unwrap().1
    }

    fn put(&mut self, request: u32, at: u64, data: &[u8]) {
        let memory = &mut self.asked.get_mut(&request).unwrap().2;
        memory[at as usize..at as usize + data.len()].copy_from_slice(data);
    }

    fn put_zeroes(&mut self, request: u32, at: u64, len: u64) {
        self.put(request, at, &vec![0; len as usize]);
    }

    fn fail(&mut self, request: u32, error: ErrorCode, _: &str) {
        self.asked.get_mut(&request).unwrap().3.get_or_insert(error);
    }

    fn end(&mut self, request: u32) {
        let (_, _, memory, error) = self.asked.remove(&request).unwrap();
        self.ended.push((request, memory, error));
    }
}

/// Feeds a stream in pieces; every other pending piece of data goes past the parser.
fn feed(style: HeaderStyle, stream: &[u8], step: usize, ledger: &mut Ledger) -> Result<(), Fault> {
    let mut replies = Replies::new(style);
    let (mut waiting, mut at, mut turn) = (Vec::new(), 0, 0);
    while at < stream.len() {
        turn += 1;
        if let Some(pending) = replies.pending().filter(|_| turn % 2 == 0) {
            assert!(waiting.is_empty(), "data behind what was not taken");
            let now = (pending.left as usize).min(stream.len() - at).min(step);
            ledger.put(pending.request, pending.at, &stream[at..at + now]);
            replies.took(now as u64, ledger)?;
            at += now;
            continue;
        }
        let now = step.min(stream.len() - at);
        waiting.extend_from_slice(&stream[at..at + now]);
        at += now;
        let taken = replies.receive(&waiting, ledger)?;
        waiting.drain(..taken);
        assert!(waiting.len() < RECEIVE_BYTES_MIN, "a message that never fits");
    }
    Ok(())
}

fn chunk(style: HeaderStyle, cookie: u64, kind: ChunkKind, done: bool, payload: &[u8], out: &mut Vec<u8>) {
    let head = ChunkHead {
        cookie,
        offset: 0,
        payload_bytes: payload.len() as u64,
        kind,
        flags: ChunkFlags::NONE.with_if(done, ChunkFlags::DONE),
    };
    write_chunk_head(style, &head, out);
    out.extend_from_slice(payload);
}

fn data(style: HeaderStyle, cookie: u64, offset: u64, done: bool, data: &[u8], out: &mut Vec<u8>) {
    let payload = [&offset.to_be_bytes()[..], data].concat();
    chunk(style, cookie, ChunkKind::OFFSET_DATA, done, &payload, out);
}

/// What becomes of a read of 8 bytes at 100 with cookie 1 when the server sends this.
fn read_of_eight(style: HeaderStyle, stream: &[u8]) -> Result<Ledger, Fault> {
    let mut ledger = Ledger::default();
    ledger.ask(1, true, 100, 8);
    ledger.ask(2, false, 0, 4096);
    feed(style, stream, 4096, &mut ledger).map(|()| ledger)
}

#[test]
fn replies_arrive_whole_however_the_stream_is_cut() {
    for style in STYLES {
        let content: Vec<u8> = (0..=255).collect();
        let mut stream = Vec::new();
        for cookie in [3, 1] {
            match style {
                HeaderStyle::Simple => write_simple(cookie, None, &mut stream),
                _ => write_data_head(style, cookie, 4096, 4096, 256, &mut stream),
            }
            stream.extend_from_slice(&content);
        }
        write_simple_or_none(style, 2, &mut stream);
        for step in [1, 3, 16, 20, 33, 100, 5000] {
            let mut ledger = Ledger::default();
            ledger.ask(1, true, 4096, 256);
            ledger.ask(2, false, 0, 1 << 20);
            ledger.ask(3, true, 4096, 256);
            feed(style, &stream, step, &mut ledger).unwrap();
            let expected = [
                (3, content.clone(), None),
                (1, content.clone(), None),
                (2, vec![], None),
            ];
            assert_eq!(ledger.ended, expected, "{style:?} cut every {step} bytes");
        }
    }
}

fn write_simple_or_none(style: HeaderStyle, cookie: u64, stream: &mut Vec<u8>) {
    match style {
        HeaderStyle::Simple => write_simple(cookie, None, stream),
        _ => chunk(style, cookie, ChunkKind::NONE, true, &[], stream),
    }
}

#[test]
fn data_and_holes_may_come_in_any_order_and_between_others() {
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        let mut stream = Vec::new();
        data(style, 1, 106, false, &[7, 8], &mut stream);
        chunk(style, 2, ChunkKind::NONE, true, &[], &mut stream);
        data(style, 1, 100, false, &[1, 2], &mut stream);
        write_hole_chunk(style, 1, 102, 4, &mut stream);
        let ledger = read_of_eight(style, &stream).unwrap();
        let expected = [(2, vec![], None), (1, vec![1, 2, 0, 0, 0, 0, 7, 8], None)];
        assert_eq!(ledger.ended, expected);
    }
}

#[test]
fn error_ends_a_read_of_which_parts_have_come() {
    let style = HeaderStyle::Structured;
    let mut stream = Vec::new();
    data(style, 1, 100, false, &[1, 2], &mut stream);
    write_error_chunk(
        style,
        1,
        100,
        ErrorCode::Io,
        "the platter is scratched",
        &mut stream,
    );
    let ledger = read_of_eight(style, &stream).unwrap();
    assert_eq!(ledger.ended[0].2, Some(ErrorCode::Io));
    let at_offset = [&5u32.to_be_bytes()[..], &[0, 1, b'x'], &104u64.to_be_bytes()].concat();
    stream.clear();
    chunk(style, 1, ChunkKind::ERROR_OFFSET, false, &at_offset, &mut stream);
    chunk(style, 1, ChunkKind::NONE, true, &[], &mut stream);
    let ledger = read_of_eight(style, &stream).unwrap();
    assert_eq!(ledger.ended[0].2, Some(ErrorCode::Io));
    let mut simple = Vec::new();
    write_simple(1, Some(ErrorCode::NoSpace), &mut simple);
    let ledger = read_of_eight(HeaderStyle::Simple, &simple).unwrap();
    assert_eq!(ledger.ended[0].2, Some(ErrorCode::NoSpace));
}

#[test]
fn reply_that_does_not_fit_ends_the_connection() {
    type Case = (&'static str, fn(HeaderStyle, &mut Vec<u8>));
    let cases: [Case; 14] = [
        ("magic number", |_, out| out.extend_from_slice(&[0x47; 40])),
        ("not made (cookie 0x9)", |style, out| {
            chunk(style, 9, ChunkKind::NONE, true, &[], out)
        }),
        ("not made (cookie 0x100000001)", |style, out| {
            chunk(style, 1 << 32 | 1, ChunkKind::NONE, true, &[], out);
        }),
        ("not asked for", |style, out| {
            data(style, 1, 99, true, &[0; 8], out)
        }),
        ("not asked for", |style, out| {
            data(style, 1, 100, true, &[0; 9], out)
        }),
        ("not asked for", |style, out| {
            data(style, 1, u64::MAX, true, &[0; 8], out)
        }),
        ("not asked for", |style, out| data(style, 1, 100, true, &[], out)),
        ("not asked for", |style, out| {
            data(style, 2, 0, true, &[0; 8], out)
        }),
        ("the same data twice", |style, out| {
            data(style, 1, 100, false, &[0; 4], out);
            data(style, 1, 103, true, &[0; 4], out);
        }),
        ("less data", |style, out| data(style, 1, 100, true, &[0; 7], out)),
        ("less data", |style, out| {
            chunk(style, 1, ChunkKind::NONE, true, &[], out)
        }),
        ("does not end its reply", |style, out| {
            chunk(style, 1, ChunkKind::NONE, false, &[], out)
        }),
        ("kind that was not asked for", |style, out| {
            chunk(style, 1, ChunkKind::BLOCK_STATUS, true, &[0; 12], out);
        }),
        ("longer than its kind allows", |style, out| {
            chunk(style, 1, ChunkKind::ERROR, true, &[0; ERROR_BYTES_MAX + 1], out);
        }),
    ];
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        for (words, send) in &cases {
            let mut stream = Vec::new();
            send(style, &mut stream);
            let fault = read_of_eight(style, &stream).err().map(|fault| fault.to_string());
            assert!(
                fault.as_ref().is_some_and(|fault| fault.contains(words)),
                "{words}: {fault:?}"
            );
        }
    }
}

#[test]
fn read_is_not_answered_in_the_simple_way_where_chunks_are_agreed() {
    let mut stream = Vec::new();
    write_simple(2, None, &mut stream);
    assert_eq!(
        read_of_eight(HeaderStyle::Structured, &stream)
            .unwrap()
            .ended
            .len(),
        1
    );
    write_simple(1, None, &mut stream);
    assert!(read_of_eight(HeaderStyle::Structured, &stream).is_err());
}

#[test]
fn errors_without_end_are_a_fault() {
    let mut stream = Vec::new();
    for _ in 0..100 {
        chunk(
            HeaderStyle::Structured,
            1,
            ChunkKind::ERROR,
            false,
            &[0, 0, 0, 5, 0, 0],
            &mut stream,
        );
    }
    let fault = read_of_eight(HeaderStyle::Structured, &stream).err();
    assert_eq!(fault, Some(Fault::Misfit("more errors than fit one reply")));
}

proptest! {
    #[test]
    fn whatever_a_server_sends_ends_each_request_at_most_once(
        stream in prop::collection::vec(any::<u8>(), 0..200),
        valid in 0..3usize,
        step in 1..50usize,
        style in 0..3usize,
    ) {
        let style = STYLES[style];
        let mut full = Vec::new();
        for cookie in 1..=valid as u64 {
            match style {
                HeaderStyle::Simple => write_simple(cookie, None, &mut full),
                _ => write_data_head(style, cookie, 0, 0, 8, &mut full),
            }
            full.extend_from_slice(&[5; 8]);
        }
        full.extend_from_slice(&stream);
        let mut ledger = Ledger::default();
        (1..4).for_each(|request| ledger.ask(request, true, 0, 8));
        let _ = feed(style, &full, step, &mut ledger);
        prop_assert!(ledger.ended.len() >= valid && ledger.ended.len() + ledger.asked.len() == 3);
    }

    #[test]
    fn chunks_of_any_cut_and_order_make_the_read(
        cuts in prop::collection::btree_set(1..99u64, 0..12), seed: u64, step in 1..200usize,
    ) {
        let style = HeaderStyle::Structured;
        let content: Vec<u8> = (1..=100).collect();
        let mut edges: Vec<u64> = cuts.into_iter().collect();
        edges.insert(0, 0);
        edges.push(100);
        let mut parts: Vec<_> = edges.windows(2).map(|edge| edge[0]..edge[1]).collect();
        parts.sort_by_key(|part| (part.start + 1).wrapping_mul(seed | 1));
        let mut stream = Vec::new();
        for part in &parts {
            data(style, 1, 1000 + part.start, false, &content[part.start as usize..part.end as usize], &mut stream);
        }
        chunk(style, 1, ChunkKind::NONE, true, &[], &mut stream);
        let mut ledger = Ledger::default();
        ledger.ask(1, true, 1000, 100);
        feed(style, &stream, step, &mut ledger).unwrap();
        prop_assert_eq!(&ledger.ended, &[(1, content, None)]);
    }
}
