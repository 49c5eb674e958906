//! Tests of a hardware context onto an NBD server, with a server that each test plays itself.

use std::io::Read;
use std::sync::atomic::Ordering;
use std::time::Duration;

use blkmq_nbd::codec::reply::{write_data_head, write_hole_chunk, write_simple};
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{CommandFlags, ErrorCode, HeaderStyle};

use rustix::event::{PollFd, PollFlags, poll};

use super::rig::*;
use super::*;
use crate::testing::{cookie, flagged, lend, request, request_with};

#[test]
fn data_goes_both_ways_whatever_the_memory_looks_like() {
    for style in [
        HeaderStyle::Simple,
        HeaderStyle::Structured,
        HeaderStyle::Extended,
    ] {
        let server = Server::new(style, RICH);
        let (mut rig, mut client) = rig(&server, &[]);
        for len in [512, 4096, 65536, 1 << 20] {
            let content = pattern(len);
            let mut memory = content.clone();
            let third = len / 3;
            let (one, rest) = memory.split_at_mut(third);
            let (two, three) = rest.split_at_mut(1);
            let pieces = [lend(one), lend(two), lend(three)];
            let out = request_with(Op::Write, Flags::FUA, 0, 4096, &pieces);
            assert_eq!(rig.issue(0, &out), Issued::Queued);
            let server = std::thread::spawn(move || {
                let (header, data) = client.request();
                assert_eq!((header.command, header.offset), (Command::WRITE, 4096));
                let is_extended = style == HeaderStyle::Extended;
                let flags = CommandFlags::FUA.with_if(is_extended, CommandFlags::PAYLOAD_LEN);
                assert_eq!(header.flags, flags);
                client.reply(&header, &[]);
                let (header, _) = client.request();
                client.reply(&header, &data);
                (client, data)
            });
            assert_eq!(rig.wait(1), [(0, Status::Ok)]);
            memory.fill(0xee);
            let (one, rest) = memory.split_at_mut(third);
            let (two, three) = rest.split_at_mut(1);
            let pieces = [lend(one), lend(two), lend(three)];
            let back = request_with(Op::Read, Flags::NONE, 0, 4096, &pieces);
            rig.issue(1, &back);
            assert_eq!(rig.wait(1), [(1, Status::Ok)]);
            let (again, data) = server.join().unwrap();
            assert!(data == content && memory == content, "{style:?}, {len} bytes");
            client = again;
        }
    }
}

#[test]
fn full_table_is_answered_in_any_order_and_a_probe_fits_beside_it() {
    let server = Server::new(HeaderStyle::Structured, RICH);
    let (mut rig, mut client) = rig(&server, &[]);
    let mut memory = vec![vec![0xee; 16384]; DEPTH as usize + 1];
    for (tag, memory) in memory.iter_mut().enumerate() {
        let rq = read(tag as u64 * 16384, memory);
        let last = tag == DEPTH as usize;
        assert_eq!(
            rig.hctx.issue(&rq, cookie(tag as u32), last, rig.now),
            Issued::Queued
        );
    }
    let server = std::thread::spawn(move || {
        let mut headers: Vec<_> = (0..=DEPTH).map(|_| client.request().0).collect();
        headers.reverse();
        for header in headers {
            client.reply(&header, &[(header.offset / 16384) as u8; 16384]);
        }
    });
    let ends = rig.wait(DEPTH as usize + 1);
    server.join().unwrap();
    assert!(ends.iter().all(|(_, status)| status.is_ok()));
    for (tag, memory) in memory.iter().enumerate() {
        assert!(memory.iter().all(|byte| *byte == tag as u8), "tag {tag}");
    }
}

#[test]
fn full_read_asks_for_one_more_turn_and_for_no_further_poll() {
    let server = Server::new(HeaderStyle::Simple, RICH);
    let (mut rig, mut client) = rig(&server, &[]);
    rustix::net::sockopt::set_socket_send_buffer_size(&client.stream, 1 << 20).unwrap();
    let mut memory = vec![vec![0; 8192]; DEPTH as usize + 1];
    for (tag, memory) in (0..).zip(&mut memory) {
        rig.issue(tag, &read(u64::from(tag) * 8192, memory));
    }
    let mut headers: Vec<_> = (0..=DEPTH).map(|_| client.request().0).collect();
    let replies = |client: &mut Client, headers: &[RequestHeader]| {
        let mut out = Vec::new();
        for header in headers {
            write_simple(header.cookie, None, &mut out);
            out.extend_from_slice(&[1; 8192]);
        }
        client.send(&out);
    };
    replies(&mut client, &headers.drain(..17).collect::<Vec<_>>());
    // A header, and 15 times the rest of a reply and the next header.
    let first = rig.turn();
    assert_eq!(first.len(), 15);
    for done in &first {
        let tag = done.cookie.tag().0;
        rig.issue(tag, &read(u64::from(tag) * 8192, &mut memory[tag as usize]));
    }
    headers.extend((0..first.len()).map(|_| client.request().0));
    // With what is left of the first, more than two receive that are called in one turn.
    replies(&mut client, &headers);
    let second = rig.turn().len();
    // The polls of the mailbox and of the socket, and the turn.
    assert_eq!(rig.hctx.ring_client.in_flight(), 3);
    rig.wait(headers.len() + 2 - second);
    assert!(rig.turn().is_empty());
    assert_eq!(rig.hctx.ring_client.in_flight(), 2);
}

#[test]
fn data_read_for_nobody_is_thrown_away() {
    let server = Server::new(HeaderStyle::Simple, RICH);
    let (mut rig, mut client) = rig(&server, &[]);
    rig.issue(0, &request(Op::Read, 0, 1 << 20));
    let mut memory = vec![0; 4096];
    rig.issue(1, &read(0, &mut memory));
    let server = std::thread::spawn(move || {
        for byte in [1, 2] {
            let (header, _) = client.request();
            client.reply(&header, &vec![byte; header.length as usize]);
        }
    });
    assert_eq!(rig.wait(2), [(0, Status::Ok), (1, Status::Ok)]);
    server.join().unwrap();
    assert_eq!(memory, [2; 4096]);
}

#[test]
fn each_operation_is_the_protocols_and_errors_are_the_engines() {
    let fast = RICH.with(TransmissionFlags::SEND_FAST_ZERO);
    let server = Server::new(HeaderStyle::Simple, fast);
    let (mut rig, mut client) = rig(&server, &[]);
    let zeroes = flagged(
        Op::WriteZeroes,
        Flags::NO_UNMAP.with(Flags::FAST_ONLY).with(Flags::FUA),
        0,
        4096,
    );
    let all = CommandFlags::NO_HOLE
        .with(CommandFlags::FAST_ZERO)
        .with(CommandFlags::FUA);
    for (rq, command, flags, error, status) in [
        (
            request(Op::Flush, 0, 0),
            Command::FLUSH,
            CommandFlags::NONE,
            ErrorCode::Io,
            Status::Medium,
        ),
        (
            request(Op::Discard, 512, 512),
            Command::TRIM,
            CommandFlags::NONE,
            ErrorCode::NoSpace,
            Status::NoSpace,
        ),
        (
            zeroes,
            Command::WRITE_ZEROES,
            all,
            ErrorCode::NotSupported,
            Status::NotSupported,
        ),
        (
            request(Op::Read, 0, 512),
            Command::READ,
            CommandFlags::NONE,
            ErrorCode::Overflow,
            Status::Invalid,
        ),
    ] {
        rig.issue(3, &rq);
        let (header, _) = client.request();
        assert_eq!(
            (header.command, header.flags, header.length),
            (command, flags, rq.len())
        );
        let mut out = Vec::new();
        write_simple(header.cookie, Some(error), &mut out);
        client.send(&out);
        assert_eq!(rig.wait(1), [(3, status)]);
    }
}

#[test]
fn operation_that_the_server_lacks_is_not_sent() {
    let server = Server::new(HeaderStyle::Simple, TransmissionFlags::HAS_FLAGS);
    let (mut rig, _client) = rig(&server, &[]);
    assert_eq!(rig.issue(0, &request(Op::Flush, 0, 0)), Issued::Done(Status::Ok));
    let zeroes = flagged(Op::WriteZeroes, Flags::FAST_ONLY, 0, 4096);
    assert_eq!(rig.issue(0, &zeroes), Issued::Done(Status::NotSupported));
}

#[test]
fn without_reconnect_a_lost_connection_fails_its_requests_and_all_until_it_is_back() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[]);
    let mut memory = vec![0; 4096];
    rig.issue(0, &read(0, &mut memory));
    rig.issue(1, &request(Op::Flush, 0, 0));
    drop(client);
    assert_eq!(rig.wait(2), [(0, Status::Transport), (1, Status::Transport)]);
    assert_eq!(
        rig.issue(0, &read(0, &mut memory)),
        Issued::Done(Status::Transport)
    );
    let mut client = server.accept();
    rig.wait_for_connections(1);
    rig.issue(0, &read(0, &mut memory));
    let (header, _) = client.request();
    client.reply(&header, &[9; 4096]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
}

#[test]
fn end_of_a_connection_is_noticed_together_with_a_reply() {
    for style in [HeaderStyle::Simple, HeaderStyle::Extended] {
        let server = Server::new(style, RICH);
        let (mut rig, mut client) = rig(&server, &[]);
        let mut memory = vec![0; 4096];
        // From now on the poll is armed: what follows is one wake-up.
        assert!(rig.turn().is_empty());
        rig.issue(0, &read(0, &mut memory));
        let (header, _) = client.request();
        client.reply(&header, &pattern(4096));
        drop(client);
        assert_eq!(rig.wait(1), [(0, Status::Ok)]);
        rig.wait_for_connections(0);
    }
}

#[test]
fn with_reconnect_requests_wait_and_are_sent_again() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let content = pattern(8192);
    let mut memory = content.clone();
    rig.issue(0, &write(0, &mut memory));
    let mut other = vec![0xee; 4096];
    rig.issue(1, &read(4096, &mut other));
    let (written, _) = client.request();
    // Half a reply, and no more.
    let (header, _) = client.request();
    let mut out = Vec::new();
    write_simple(header.cookie, None, &mut out);
    out.extend_from_slice(&[1; 2000]);
    client.send(&out);
    drop(client);
    assert!((0..3).all(|_| rig.turn().is_empty()));
    rig.issue(2, &request(Op::Flush, 0, 0));
    let mut client = server.accept();
    let server = std::thread::spawn(move || {
        let mut seen = Vec::new();
        for _ in 0..3 {
            let (header, data) = client.request();
            seen.push((header.command, header.cookie, data.clone()));
            let reads = header.command == Command::READ;
            client.reply(&header, if reads { &[7; 4096] } else { &[] });
        }
        (seen, client)
    });
    assert_eq!(rig.wait(3), [(0, Status::Ok), (1, Status::Ok), (2, Status::Ok)]);
    let (seen, _client) = server.join().unwrap();
    assert_eq!(seen[0], (Command::WRITE, written.cookie, content));
    assert_eq!(seen[2].0, Command::FLUSH);
    assert_eq!(other, [7; 4096]);
}

#[test]
fn requests_wait_no_longer_than_they_are_told_to() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[("reconnect", "10")]);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    drop((client, server));
    rig.wait_for_connections(0);
    assert_eq!(rig.hctx.next_event(), Some(rig.now + Nanos::from_secs(10)));
    assert_eq!(rig.hctx.timed_out(cookie(0)), TimedOut::Wait);
    rig.now = rig.now + Nanos::from_secs(10);
    assert_eq!(rig.wait(1), [(0, Status::Transport)]);
    assert_eq!(
        rig.issue(0, &request(Op::Discard, 0, 4096)),
        Issued::Done(Status::Transport)
    );
}

#[test]
fn server_that_breaks_the_protocol_costs_its_connection_alone() {
    type Bad = fn(&RequestHeader) -> Vec<u8>;
    let cases: [Bad; 4] = [
        |_| vec![0x47; 16],
        |header| {
            let mut out = Vec::new();
            write_simple(header.cookie ^ 1 << 33, None, &mut out);
            out
        },
        |header| {
            let mut out = Vec::new();
            let len = 8192;
            write_data_head(HeaderStyle::Structured, header.cookie, 0, 0, len, &mut out);
            out
        },
        |header| {
            let mut out = Vec::new();
            write_hole_chunk(HeaderStyle::Structured, header.cookie, 0, 512, &mut out);
            out
        },
    ];
    for bad in cases {
        let server = Server::new(HeaderStyle::Structured, SHARED);
        let (mut rig, mut client) = rig(&server, &[]);
        let mut memory = vec![0; 4096];
        rig.issue(0, &read(0, &mut memory));
        let (header, _) = client.request();
        let answer = bad(&header);
        client.send(&answer);
        assert_eq!(rig.wait(1), [(0, Status::Transport)]);
        assert_eq!(rig.hctx.connections(), 0);
        // It has been closed on the other side, too.
        assert_eq!(client.stream.read(&mut [0; 100]).unwrap(), 0);
        let mut client = server.accept();
        rig.wait_for_connections(1);
        rig.issue(0, &read(0, &mut memory));
        let (header, _) = client.request();
        client.reply(&header, &[3; 4096]);
        assert_eq!(rig.wait(1), [(0, Status::Ok)]);
    }
}

#[test]
fn server_that_says_it_is_leaving_has_not_done_it() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    let (header, _) = client.request();
    let mut out = Vec::new();
    write_simple(header.cookie, Some(ErrorCode::Shutdown), &mut out);
    client.send(&out);
    rig.wait_for_connections(0);
    let mut client = server.accept();
    rig.wait_for_connections(1);
    let (header, _) = client.request();
    client.reply(&header, &[]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
}

#[test]
fn no_answer_in_time_costs_the_connection() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[("timeout", "2")]);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    rig.now = rig.now + Nanos::from_secs(3);
    assert_eq!(rig.wait(1), [(0, Status::Transport)]);
    drop(client);
    let _client = server.accept();
    rig.wait_for_connections(1);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    assert_eq!(rig.hctx.timed_out(cookie(0)), TimedOut::Ended);
    assert_eq!(rig.hctx.connections(), 0);
}

#[test]
fn request_that_is_late_on_two_connections_ends() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut client) = rig(&server, &[("timeout", "2"), ("reconnect", "30")]);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    client.request();
    rig.now = rig.now + Nanos::from_secs(3);
    rig.wait_for_connections(0);
    let mut second = server.accept();
    rig.wait_for_connections(1);
    second.request();
    rig.now = rig.now + Nanos::from_secs(3);
    assert_eq!(rig.wait(1), [(0, Status::Timeout)]);
}

#[test]
fn server_that_has_another_size_is_not_taken_back() {
    let mut server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[("reconnect", "30")]);
    server.size = 8 << 20;
    rig.issue(0, &request(Op::Discard, 0, 4096));
    drop(client);
    rig.wait_for_connections(0);
    // It comes, learns, and goes without a request.
    let mut other = server.accept();
    assert_eq!(other.stream.read(&mut [0; 100]).unwrap(), 0);
    assert!((0..3).all(|_| rig.turn().is_empty()));
    assert_eq!(rig.hctx.connections(), 0);
    server.size = 4 << 20;
    let mut client = server.accept();
    rig.wait_for_connections(1);
    let (header, _) = client.request();
    client.reply(&header, &[]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
}

#[test]
fn requests_that_one_connection_loses_go_through_another() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, mut first) = rig(&server, &[("connections", "2"), ("reconnect", "30")]);
    let mut second = server.accept();
    rig.wait_for_connections(2);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    rig.issue(1, &request(Op::Discard, 4096, 4096));
    assert_eq!(first.request().0.offset, 0);
    assert_eq!(second.request().0.offset, 4096);
    drop(first);
    let server = std::thread::spawn(move || {
        let mut third = second.request().0;
        second.reply(&third, &[]);
        third.cookie = cookie(1).raw();
        second.reply(&third, &[]);
        second
    });
    assert_eq!(rig.wait(2), [(0, Status::Ok), (1, Status::Ok)]);
    server.join().unwrap();
}

#[test]
fn server_that_throws_everybody_out_is_not_run_at() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[]);
    drop(client);
    let begin = std::time::Instant::now();
    for _ in 0..3 {
        rig.wait_for_connections(0);
        let client = server.accept();
        rig.wait_for_connections(1);
        drop(client);
    }
    // 50, 100 and 200 ms.
    assert!(
        begin.elapsed() >= Duration::from_millis(350),
        "{:?}",
        begin.elapsed()
    );
}

#[test]
fn thread_that_connects_again_and_cannot_be_made_is_tried_later() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[]);
    let reconnector = Arc::clone(&rig.hctx.shared.reconnector);
    reconnector.has_no_threads.store(true, Ordering::Relaxed);
    drop(client);
    rig.wait_for_connections(0);
    assert!((0..10).all(|_| rig.turn().is_empty()));
    reconnector.has_no_threads.store(false, Ordering::Relaxed);
    let mut comes = [PollFd::new(&server.listener, PollFlags::IN)];
    let is_there = (0..500).any(|_| {
        rig.turn();
        poll(&mut comes, Some(&rustix::time::Timespec::default())).unwrap() > 0
    });
    assert!(is_there, "nobody connects again");
    let mut client = server.accept();
    rig.wait_for_connections(1);
    rig.issue(0, &request(Op::Discard, 0, 4096));
    let (header, _) = client.request();
    client.reply(&header, &[]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
}

#[test]
fn context_that_ends_says_goodbye() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (rig, mut client) = rig(&server, &[]);
    drop(rig);
    assert_eq!(client.request().0.command, Command::DISC);
    assert_eq!(client.stream.read(&mut [0; 1]).unwrap(), 0);
}
