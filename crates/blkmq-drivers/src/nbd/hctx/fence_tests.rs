//! Tests of changes that wait for the end of a lost session, with servers that each test plays itself.

use blkmq_host::device::Device;
use blkmq_nbd::codec::reply::write_simple;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ErrorCode, HeaderStyle};

use super::rig::{Client, Rig, SHARED, Server, device, pattern, read, rig, write};
use super::*;

fn server() -> Server {
    let mut server = Server::new(HeaderStyle::Simple, SHARED);
    server.instance = Some(7);
    server
}

/// Receives the next request, which is this one.
fn expect(client: &mut Client, command: Command, offset: u64) -> RequestHeader {
    let (header, _) = client.request();
    assert_eq!(header.command, command, "{header:?}");
    assert!(command == Command::FENCE || header.offset == offset, "{header:?}");
    header
}

/// Lets things happen until a request has come.
fn await_request(rig: &mut Rig, mut client: Client) -> (RequestHeader, Client) {
    let server = std::thread::spawn(move || (client.request().0, client));
    while !server.is_finished() {
        assert!(rig.turn().is_empty());
    }
    server.join().unwrap()
}

#[test]
fn repeated_write_waits_until_the_lost_session_is_fenced_and_nothing_else_does() {
    let server = server();
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let (mut one, mut two, mut three) = (pattern(4096), pattern(512), pattern(4096));
    let repeated = write(8192, &mut one);
    rig.issue(0, &repeated);
    expect(&mut client, Command::WRITE, 8192);
    drop(client);
    rig.wait_for_connections(0);
    let client = server.accept();
    rig.wait_for_connections(1);
    let (fence, mut client) = await_request(&mut rig, client);
    assert_eq!(fence.command, Command::FENCE);
    // What overlaps waits, too; a read and another range do not.
    let (overlapping, elsewhere) = (write(8704, &mut two), write(0, &mut three));
    rig.issue(1, &overlapping);
    rig.issue(2, &elsewhere);
    let mut memory = vec![0; 4096];
    let reading = read(8192, &mut memory);
    rig.issue(3, &reading);
    let header = expect(&mut client, Command::WRITE, 0);
    client.reply(&header, &[]);
    let header = expect(&mut client, Command::READ, 8192);
    client.reply(&header, &pattern(4096));
    assert_eq!(rig.wait(2), [(2, Status::Ok), (3, Status::Ok)]);
    client.reply(&fence, &[]);
    let (header, mut client) = await_request(&mut rig, client);
    assert_eq!((header.command, header.offset), (Command::WRITE, 8192));
    client.reply(&header, &[]);
    let header = expect(&mut client, Command::WRITE, 8704);
    client.reply(&header, &[]);
    assert_eq!(rig.wait(2), [(0, Status::Ok), (1, Status::Ok)]);
}

#[test]
fn write_that_failed_with_its_connection_is_fenced_before_the_next_in_its_range() {
    let server = server();
    let (mut rig, mut client) = rig(&server, &[]);
    let mut memory = pattern(4096);
    let rq = write(0, &mut memory);
    rig.issue(0, &rq);
    expect(&mut client, Command::WRITE, 0);
    drop(client);
    assert_eq!(rig.wait(1), [(0, Status::Transport)]);
    let client = server.accept();
    rig.wait_for_connections(1);
    rig.issue(0, &rq);
    let (fence, mut client) = await_request(&mut rig, client);
    assert_eq!(fence.command, Command::FENCE);
    client.reply(&fence, &[]);
    let (header, mut client) = await_request(&mut rig, client);
    assert_eq!(header.command, Command::WRITE);
    client.reply(&header, &[]);
    assert_eq!(rig.wait(1), [(0, Status::Ok)]);
}

#[test]
fn fence_that_is_lost_with_its_connection_goes_over_the_next() {
    let server = server();
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let mut memory = pattern(4096);
    let rq = write(0, &mut memory);
    rig.issue(0, &rq);
    expect(&mut client, Command::WRITE, 0);
    drop(client);
    rig.wait_for_connections(0);
    let mut numbers = Vec::new();
    for _ in 0..2 {
        let client = server.accept();
        rig.wait_for_connections(1);
        let (fence, client) = await_request(&mut rig, client);
        numbers.push((fence.command, fence.offset));
        drop(client);
        rig.wait_for_connections(0);
    }
    assert_eq!(numbers[0], numbers[1]);
    assert_eq!(numbers[0].0, Command::FENCE);
}

#[test]
fn server_that_was_started_again_has_nothing_to_fence() {
    let mut server = server();
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let mut memory = pattern(4096);
    let rq = write(0, &mut memory);
    rig.issue(0, &rq);
    expect(&mut client, Command::WRITE, 0);
    drop(client);
    rig.wait_for_connections(0);
    server.instance = Some(8);
    let client = server.accept();
    rig.wait_for_connections(1);
    let (header, _client) = await_request(&mut rig, client);
    assert_eq!(header.command, Command::WRITE);
}

#[test]
fn server_that_refuses_to_fence_is_done_without() {
    let server = server();
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let mut memory = pattern(4096);
    let rq = write(0, &mut memory);
    rig.issue(0, &rq);
    expect(&mut client, Command::WRITE, 0);
    drop(client);
    rig.wait_for_connections(0);
    let client = server.accept();
    rig.wait_for_connections(1);
    let (fence, mut client) = await_request(&mut rig, client);
    let mut out = Vec::new();
    write_simple(fence.cookie, Some(ErrorCode::Invalid), &mut out);
    client.send(&out);
    let (header, _client) = await_request(&mut rig, client);
    assert_eq!(header.command, Command::WRITE);
}

#[test]
fn write_that_waits_in_vain_for_a_fence_ends_when_it_is_late_twice() {
    let server = server();
    let (mut rig, mut client) = rig(&server, &[("reconnect", "30")]);
    let mut memory = pattern(4096);
    let rq = write(0, &mut memory);
    rig.issue(0, &rq);
    expect(&mut client, Command::WRITE, 0);
    drop(client);
    rig.wait_for_connections(0);
    let client = server.accept();
    rig.wait_for_connections(1);
    let (_, _silent) = await_request(&mut rig, client);
    assert_eq!(rig.timed_out(0), TimedOut::Wait);
    assert_eq!(rig.connections(), 0, "the connection of the fence is given up");
    let client = server.accept();
    rig.wait_for_connections(1);
    let (_, _silent) = await_request(&mut rig, client);
    assert_eq!(rig.timed_out(0), TimedOut::Ended);
    assert!(rig.turn().is_empty());
}

#[test]
fn session_is_fenced_over_a_connection_of_another_context() {
    let server = server();
    let config = server.config(&[("connections", "2")]);
    let (device, mut first) = device(&server, &config);
    device.hctxs(2, 2);
    let (mut one, mut other) = (Rig::new(&device, 0), Rig::new(&device, 1));
    let second = server.accept();
    other.wait_for_connections(1);
    let (mut memory, mut again) = (pattern(4096), pattern(4096));
    let rq = write(0, &mut memory);
    one.issue(0, &rq);
    expect(&mut first, Command::WRITE, 0);
    drop(first);
    assert_eq!(one.wait(1), [(0, Status::Transport)]);
    let rq = write(0, &mut again);
    other.issue(0, &rq);
    let (fence, mut second) = await_request(&mut other, second);
    assert_eq!(fence.command, Command::FENCE);
    second.reply(&fence, &[]);
    let (header, mut second) = await_request(&mut other, second);
    assert_eq!(header.command, Command::WRITE);
    second.reply(&header, &[]);
    assert_eq!(other.wait(1), [(0, Status::Ok)]);
}
