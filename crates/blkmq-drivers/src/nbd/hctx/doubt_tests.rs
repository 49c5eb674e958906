//! Tests of what a flush reports of writes that a server may have lost: once to each hardware context.

use blkmq_host::device::{Allocation, Device};
use blkmq_nbd::codec::reply::write_simple;
use blkmq_nbd::codec::{ErrorCode, HeaderStyle};

use super::rig::{Client, RICH, Rig, SHARED, Server, device, pattern, rig, write};
use super::*;
use crate::nbd::{Ledger, NbdDevice};
use crate::testing::request;

/// Answers one request, with an error or none.
fn answer(mut client: Client, error: Option<ErrorCode>) -> std::thread::JoinHandle<Client> {
    std::thread::spawn(move || {
        let (header, _) = client.request();
        let mut out = Vec::new();
        write_simple(header.cookie, error, &mut out);
        client.send(&out);
        client
    })
}

/// Carries out one request that the server answers.
fn run(rig: &mut Rig, rq: &Request, client: Client, error: Option<ErrorCode>) -> (Status, Client) {
    let server = answer(client, error);
    assert_eq!(rig.issue(0, rq), Issued::Queued);
    let status = rig.wait(1)[0].1;
    (status, server.join().unwrap())
}

fn write_once(rig: &mut Rig, client: Client) -> Client {
    let mut memory = pattern(4096);
    let (status, client) = run(rig, &write(0, &mut memory), client, None);
    assert_eq!(status, Status::Ok);
    client
}

fn flush(rig: &mut Rig, client: Client) -> (Status, Client) {
    run(rig, &request(Op::Flush, 0, 0), client, None)
}

/// A drive with a context, and a connection, on each of two reactors.
fn two(server: &Server) -> (NbdDevice, [Rig; 2], [Client; 2]) {
    let config = server.config(&[("connections", "2"), ("reconnect", "30")]);
    let (device, first) = device(server, &config);
    device.hctxs(2, 2);
    let (one, mut other) = (Rig::new(&device, 0), Rig::new(&device, 1));
    let second = server.accept();
    other.wait_for_connections(1);
    (device, [one, other], [first, second])
}

#[test]
fn flush_tells_once_of_what_a_lost_connection_may_have_lost() {
    for flags in [RICH, SHARED] {
        let server = Server::new(HeaderStyle::Simple, flags);
        let (mut rig, client) = rig(&server, &[("reconnect", "30")]);
        drop(write_once(&mut rig, client));
        rig.wait_for_connections(0);
        let client = server.accept();
        rig.wait_for_connections(1);
        let (status, client) = flush(&mut rig, client);
        assert_eq!(status, Status::Medium, "{flags:?}: the server may be another one");
        let (status, _) = flush(&mut rig, client);
        assert_eq!(status, Status::Ok, "told once");
    }
}

#[test]
fn flush_that_was_under_way_with_a_lost_connection_tells_too() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[("reconnect", "30")]);
    let mut client = write_once(&mut rig, client);
    rig.issue(0, &request(Op::Flush, 0, 0));
    client.request();
    drop(client);
    rig.wait_for_connections(0);
    let server = answer(server.accept(), None);
    assert_eq!(rig.wait(1), [(0, Status::Medium)]);
    server.join().unwrap();
}

#[test]
fn flushed_write_is_not_in_doubt() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[("reconnect", "30")]);
    let client = write_once(&mut rig, client);
    let (status, client) = flush(&mut rig, client);
    assert_eq!(status, Status::Ok);
    drop(client);
    rig.wait_for_connections(0);
    let client = server.accept();
    rig.wait_for_connections(1);
    assert_eq!(flush(&mut rig, client).0, Status::Ok);
}

#[test]
fn server_that_has_no_flush_keeps_nothing_that_could_be_lost() {
    let server = Server::new(HeaderStyle::Simple, TransmissionFlags::HAS_FLAGS);
    let config = server.config(&[("reconnect", "30")]);
    let (device, client) = device(&server, &config);
    device.hctxs(1, 1);
    let mut rig = Rig::new(&device, 0);
    drop(write_once(&mut rig, client));
    rig.wait_for_connections(0);
    let _client = server.accept();
    rig.wait_for_connections(1);
    assert_eq!(device.losses(DiskId(0)).count, 0);
}

#[test]
fn loss_of_one_contexts_writes_is_reported_by_every_context() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (device, [mut one, mut other], [first, second]) = two(&server);
    drop(write_once(&mut one, first));
    drop(second);
    one.wait_for_connections(0);
    other.wait_for_connections(0);
    let mut clients = Vec::new();
    for rig in [&mut one, &mut other] {
        clients.push(server.accept());
        for _ in 0..10 {
            rig.turn();
        }
    }
    one.wait_for_connections(1);
    other.wait_for_connections(1);
    assert_eq!(device.losses(DiskId(0)).count, 1);
    // Which connection is whose was the thread's to say; either answers.
    let servers: Vec<_> = clients
        .into_iter()
        .map(|mut client| {
            std::thread::spawn(move || {
                for _ in 0..2 {
                    let (header, _) = client.request();
                    client.reply(&header, &[]);
                }
            })
        })
        .collect();
    for expected in [Status::Medium, Status::Ok] {
        for rig in [&mut other, &mut one] {
            rig.issue(0, &request(Op::Flush, 0, 0));
            assert_eq!(rig.wait(1), [(0, expected)]);
        }
    }
    servers.into_iter().for_each(|server| server.join().unwrap());
}

#[test]
fn connection_that_was_there_all_the_time_leads_to_the_server_that_has_it() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (_drive, [mut one, mut other], [first, second]) = two(&server);
    drop(write_once(&mut one, first));
    one.wait_for_connections(0);
    let (status, _second) = flush(&mut other, second);
    assert_eq!(
        status,
        Status::Ok,
        "it covers what went over others (CAN_MULTI_CONN)"
    );
    let client = server.accept();
    one.wait_for_connections(1);
    assert_eq!(flush(&mut one, client).0, Status::Ok);
}

#[test]
fn after_a_flush_that_the_server_failed_every_other_context_tells_of_it() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (_drive, [mut one, mut other], [first, second]) = two(&server);
    let (status, first) = run(&mut one, &request(Op::Flush, 0, 0), first, Some(ErrorCode::Io));
    assert_eq!(status, Status::Medium);
    let (status, second) = flush(&mut other, second);
    assert_eq!(
        status,
        Status::Medium,
        "the server calls it good, and has forgotten"
    );
    assert_eq!(flush(&mut one, first).0, Status::Ok, "told already");
    assert_eq!(flush(&mut other, second).0, Status::Ok);
}

#[test]
fn fua_write_that_failed_may_have_taken_the_news_of_a_loss_along() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let (mut rig, client) = rig(&server, &[]);
    let mut memory = pattern(4096);
    let forced =
        crate::testing::request_with(Op::Write, Flags::FUA, 0, 0, &[crate::testing::lend(&mut memory)]);
    let (status, client) = run(&mut rig, &forced, client, Some(ErrorCode::Io));
    assert_eq!(status, Status::Io);
    let (status, client) = flush(&mut rig, client);
    assert_eq!(status, Status::Medium);
    assert_eq!(flush(&mut rig, client).0, Status::Ok);
}

#[test]
fn paths_to_the_same_storage_tell_of_what_went_over_another() {
    let server = Server::new(HeaderStyle::Simple, SHARED);
    let ledger = Arc::new(Ledger::default());
    let config = server.config(&[("connections", "1")]);
    let mut paths = [0, 1].map(|_| {
        let (device, client) = device(&server, &config);
        assert!(device.keep_ledger(&ledger), "a flush on one covers the others");
        device.hctxs(1, 1);
        (Rig::new(&device, 0), Some(client))
    });
    let [(one, first), (other, second)] = &mut paths;
    *first = Some(write_once(one, first.take().unwrap()));
    // The server lives: the other path leads to it all the time.
    *first = None;
    one.wait_for_connections(0);
    *first = Some(server.accept());
    one.wait_for_connections(1);
    let (status, client) = flush(other, second.take().unwrap());
    assert_eq!(status, Status::Ok);
    // It goes away, and so do both.
    drop((write_once(one, first.take().unwrap()), client));
    one.wait_for_connections(0);
    other.wait_for_connections(0);
    let client = server.accept();
    for _ in 0..10 {
        one.turn();
        other.turn();
    }
    let late = server.accept();
    one.wait_for_connections(1);
    other.wait_for_connections(1);
    let servers = [client, late].map(|client| answer(client, None));
    for rig in [other, one] {
        assert_eq!(rig.issue(0, &request(Op::Flush, 0, 0)), Issued::Queued);
        assert_eq!(rig.wait(1), [(0, Status::Medium)]);
    }
    servers
        .into_iter()
        .for_each(|server| drop(server.join().unwrap()));
}
