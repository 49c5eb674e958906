//! Tests requests that follow the protocol, and their replies.

use blkmq_nbd::codec::ChunkFlags;
use blkmq_nbd::codec::reply::{ChunkHead, ChunkKind};

use super::*;
use crate::nbd::session::{Fault, Op};

const STYLES: [HeaderStyle; 3] = [
    HeaderStyle::Simple,
    HeaderStyle::Structured,
    HeaderStyle::Extended,
];

fn chunk(wire: &Wire) -> (ChunkHead, &[u8]) {
    match ReplyHead::parse(wire.session.style(), &wire.out)
        .unwrap()
        .unwrap()
    {
        (ReplyHead::Chunk(head), bytes) => (head, &wire.out[bytes..]),
        (simple, _) => panic!("{simple:?} is no chunk"),
    }
}

#[test]
fn every_command_reaches_the_disk_with_its_range_and_flags() {
    let all = [
        (Command::READ, Op::Read, CommandFlags::NONE),
        (Command::WRITE, Op::Write, CommandFlags::FUA),
        (Command::TRIM, Op::Trim, CommandFlags::FUA),
        (Command::CACHE, Op::Cache, CommandFlags::NONE),
        (
            Command::WRITE_ZEROES,
            Op::WriteZeroes,
            CommandFlags::NO_HOLE.with(CommandFlags::FAST_ZERO),
        ),
    ];
    for style in STYLES {
        let mut wire = Wire::selected(disk(), style);
        for (code, op, flags) in all {
            let begun = request(&wire.send(&command(style, code, flags, 4096, 8192)));
            assert_eq!(
                (begun.op, begun.cookie, begun.offset, begun.length),
                (op, 42, 4096, 8192)
            );
            assert!(begun.flags.contains(flags));
        }
        let flush = request(&wire.send(&command(style, Command::FLUSH, CommandFlags::NONE, 0, 0)));
        assert_eq!(flush.op, Op::Flush);
        assert_eq!(wire.session.replies().requests(), 6);
    }
}

#[test]
fn read_is_replied_to_by_one_head_in_front_of_its_data() {
    for (style, head_bytes) in STYLES.into_iter().zip([16, 28, 40]) {
        let mut wire = Wire::selected(disk(), style);
        let read = request(&wire.send(&command(style, Command::READ, CommandFlags::NONE, 512, 1024)));
        wire.session.replies().read(&read, &mut wire.out);
        assert_eq!(wire.out.len(), head_bytes);
        assert_eq!(
            (
                wire.session.replies().requests(),
                wire.session.replies().memory_bytes()
            ),
            (0, 1024)
        );
        wire.session.replies().read_sent(&read);
        assert_eq!(wire.session.replies().memory_bytes(), 0);
        wire.out.resize(head_bytes + 1024, 7);
        if style == HeaderStyle::Simple {
            continue;
        }
        let (head, payload) = chunk(&wire);
        assert_eq!((head.kind, head.cookie), (ChunkKind::OFFSET_DATA, 42));
        let data = &[7; 1024][..];
        assert_eq!(
            ChunkPayload::parse(head.kind, payload),
            Some(ChunkPayload::Data { offset: 512, data })
        );
    }
}

#[test]
fn read_of_zeroes_is_replied_to_by_a_hole_without_data() {
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        let mut wire = Wire::selected(disk(), style);
        let read = request(&wire.send(&command(style, Command::READ, CommandFlags::DF, 512, 1024)));
        let replies = wire.session.replies();
        assert!(replies.has_holes());
        replies.hole(&read, &mut wire.out);
        assert_eq!((replies.requests(), replies.memory_bytes()), (0, 0));
        let (head, payload) = chunk(&wire);
        assert_eq!((head.cookie, head.flags), (42, ChunkFlags::DONE));
        let hole = ChunkPayload::Hole {
            offset: 512,
            bytes: 1024,
        };
        assert_eq!(ChunkPayload::parse(head.kind, payload), Some(hole));
    }
    let mut wire = Wire::selected(disk(), HeaderStyle::Simple);
    assert!(!wire.session.replies().has_holes());
}

#[test]
fn failed_request_is_replied_to_with_an_error_and_a_message() {
    for style in STYLES {
        let mut wire = Wire::selected(disk(), style);
        let write = request(&wire.send(&command(style, Command::WRITE, CommandFlags::NONE, 0, 512)));
        wire.session
            .replies()
            .error(&write, ErrorCode::NoSpace, "vm1.raw: no room left", &mut wire.out);
        if style != HeaderStyle::Simple {
            assert!(wire.out.ends_with(b"vm1.raw: no room left"));
        }
        assert_eq!(wire.reply(), (42, ErrorCode::NoSpace.to_wire()));
        assert_eq!(wire.session.replies().memory_bytes(), 0);
    }
}

#[test]
fn enotsup_is_kept_for_fast_zeroing() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Simple);
    for (flags, told) in [
        (CommandFlags::FAST_ZERO, ErrorCode::NotSupported),
        (CommandFlags::NONE, ErrorCode::Invalid),
    ] {
        let zero = command(HeaderStyle::Simple, Command::WRITE_ZEROES, flags, 0, 512);
        let begun = request(&wire.send(&zero));
        wire.session
            .replies()
            .error(&begun, ErrorCode::NotSupported, "", &mut wire.out);
        assert_eq!(wire.reply(), (42, told.to_wire()));
    }
}

fn status(style: HeaderStyle, flags: CommandFlags, known: &[(u64, ExtentState)]) -> Vec<(u64, ExtentState)> {
    let mut export = disk();
    export.size_bytes = 1 << 43;
    let mut wire = Wire::selected(export, style);
    let begun = request(&wire.send(&command(style, Command::BLOCK_STATUS, flags, 4096, 8192)));
    let known: Vec<Extent> = known
        .iter()
        .map(|&(bytes, state)| Extent { bytes, state })
        .collect();
    wire.session
        .replies()
        .block_status(&begun, Some(&known), &[], &mut wire.out);
    let (head, payload) = chunk(&wire);
    let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(head.kind, payload) else {
        panic!("no status: {head:?}")
    };
    assert_eq!(status.context, 1);
    status
        .extents()
        .map(|extent| (extent.bytes, extent.state))
        .collect()
}

#[test]
fn block_status_shows_runs_up_to_the_first_that_covers_the_range() {
    let (hole, data) = (ExtentState::HOLE.with(ExtentState::ZERO), ExtentState::NONE);
    let known = [(4096, data), (0, hole), (1 << 40, hole), (4096, data)];
    let none = CommandFlags::NONE;
    assert_eq!(
        status(HeaderStyle::Extended, none, &known),
        [(4096, data), (1 << 40, hole)]
    );
    let cut = u64::from(u32::MAX - 511);
    assert_eq!(
        status(HeaderStyle::Structured, none, &known),
        [(4096, data), (cut, hole)]
    );
}

#[test]
fn block_status_with_req_one_shows_one_run_no_longer_than_asked() {
    let hole = ExtentState::HOLE;
    for style in [HeaderStyle::Structured, HeaderStyle::Extended] {
        let shown = status(
            style,
            CommandFlags::REQ_ONE,
            &[(1 << 40, hole), (4096, ExtentState::NONE)],
        );
        assert_eq!(shown, [(8192, hole)]);
    }
}

#[test]
fn block_status_of_a_disk_that_knows_nothing_reads_as_allocated() {
    assert_eq!(
        status(HeaderStyle::Structured, CommandFlags::NONE, &[]),
        [(8192, ExtentState::NONE)]
    );
}

#[test]
fn block_status_never_reaches_beyond_the_export() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Extended);
    let ask = command(
        HeaderStyle::Extended,
        Command::BLOCK_STATUS,
        CommandFlags::NONE,
        MIB - 512,
        512,
    );
    let begun = request(&wire.send(&ask));
    let run = Extent {
        bytes: u64::MAX,
        state: ExtentState::ZERO,
    };
    wire.session
        .replies()
        .block_status(&begun, Some(&[run, run]), &[], &mut wire.out);
    let (head, payload) = chunk(&wire);
    let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(head.kind, payload) else {
        panic!("{head:?}")
    };
    assert_eq!(
        status.extents().collect::<Vec<_>>(),
        [Extent { bytes: 512, ..run }]
    );
}

#[test]
fn lengths_beyond_32_bits_pass_with_extended_headers() {
    let mut export = disk();
    export.size_bytes = 1 << 50;
    let mut wire = Wire::selected(export, HeaderStyle::Extended);
    for code in [
        Command::TRIM,
        Command::WRITE_ZEROES,
        Command::CACHE,
        Command::BLOCK_STATUS,
    ] {
        let begun = request(&wire.send(&command(
            HeaderStyle::Extended,
            code,
            CommandFlags::NONE,
            0,
            1 << 49,
        )));
        assert_eq!(begun.length, 1 << 49);
    }
}

#[test]
fn connection_at_its_request_limit_is_busy_until_a_reply() {
    let limits = Limits {
        requests_max: 2,
        ..Limits::default()
    };
    let mut wire = Wire::selected_with(disk(), HeaderStyle::Simple, limits);
    let reads = command(HeaderStyle::Simple, Command::READ, CommandFlags::NONE, 0, 512).repeat(3);
    let events = wire.send(&reads);
    let [Event::Request(first), Event::Request(_), Event::Busy] = events[..] else {
        panic!("{events:?}")
    };
    wire.session.replies().read(&first, &mut wire.out);
    assert!(matches!(wire.send(&[])[..], [Event::Request(_), Event::NeedMore]));
}

#[test]
fn memory_counts_until_the_data_was_sent_and_a_disconnect_passes_it() {
    let limits = Limits {
        payload_bytes_max: 64 << 10,
        memory_bytes_max: 100 << 10,
        ..Limits::default()
    };
    let mut wire = Wire::selected_with(disk(), HeaderStyle::Simple, limits);
    let read = command(
        HeaderStyle::Simple,
        Command::READ,
        CommandFlags::NONE,
        0,
        64 << 10,
    );
    let first = request(&wire.send(&read));
    assert_eq!(wire.send(&read), [Event::Busy]);
    wire.session.replies().read(&first, &mut wire.out);
    assert_eq!(wire.send(&[]), [Event::Busy]);
    wire.session.replies().read_sent(&first);
    request(&wire.send(&[]));
    let disconnect = command(HeaderStyle::Simple, Command::DISC, CommandFlags::NONE, 0, 0);
    assert_eq!(wire.send(&disconnect), [Event::Disconnect]);
}

#[test]
fn requests_begun_before_a_disconnect_are_still_replied_to() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Structured);
    let mut bytes = command(HeaderStyle::Structured, Command::TRIM, CommandFlags::NONE, 0, 512);
    bytes.extend(command(
        HeaderStyle::Structured,
        Command::DISC,
        CommandFlags::NONE,
        0,
        0,
    ));
    let events = wire.send(&bytes);
    let [Event::Request(trim), Event::Disconnect] = events[..] else {
        panic!("{events:?}")
    };
    wire.session.replies().ok(&trim, &mut wire.out);
    assert_eq!(wire.reply(), (42, 0));
    assert_eq!(wire.send(&[0; 100]), [Event::NeedMore]);
    assert!(wire.out.is_empty() && wire.unread.is_empty());
}

#[test]
fn server_that_shuts_down_refuses_new_requests_and_finishes_old_ones() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Structured);
    let read = command(HeaderStyle::Structured, Command::READ, CommandFlags::NONE, 0, 512);
    let old = request(&wire.send(&read));
    wire.session.shut_down();
    let late = refused(&wire.send(&read));
    assert_eq!(
        (late.fault, late.error),
        (Fault::ShuttingDown, ErrorCode::Shutdown)
    );
    assert_eq!(wire.reply(), (42, ErrorCode::Shutdown.to_wire()));
    let flush = command(HeaderStyle::Structured, Command::FLUSH, CommandFlags::NONE, 0, 0);
    assert_eq!(refused(&wire.send(&flush)).fault, Fault::ShuttingDown);
    wire.out.clear();
    wire.session
        .replies()
        .error(&old, ErrorCode::Io, "gone", &mut wire.out);
    assert_eq!(wire.reply(), (42, ErrorCode::Io.to_wire()));
}

#[test]
#[should_panic(expected = "payload of a write was not taken")]
fn caller_that_forgets_a_payload_is_stopped() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Simple);
    let write = header(HeaderStyle::Simple, Command::WRITE, CommandFlags::NONE, 0, 512);
    let step = wire.session.receive(&write, &mut wire.out);
    assert!(matches!(step.event, Event::Write(_)));
    wire.session.receive(&[], &mut wire.out);
}

#[test]
#[should_panic(expected = "a reply without a request")]
fn caller_that_replies_twice_is_stopped() {
    let mut wire = Wire::selected(disk(), HeaderStyle::Simple);
    let flush = request(&wire.send(&command(
        HeaderStyle::Simple,
        Command::FLUSH,
        CommandFlags::NONE,
        0,
        0,
    )));
    wire.session.replies().ok(&flush, &mut wire.out);
    wire.session.replies().ok(&flush, &mut wire.out);
}
