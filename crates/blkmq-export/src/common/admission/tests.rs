//! Shows who is let in, who makes room, and who is told.

use std::sync::mpsc;

use blkmq_core::bio::Bio;
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

use super::*;

/// Admits one that arrives at once.
fn admit(connections: &Arc<Connections>, address: u32) -> Result<Ticket, NoRoom> {
    let mut ticket = connections.admit(address, || unreachable!("nobody is waited for"))?;
    connections.lock().addresses[address as usize].arriving -= 1;
    ticket.has_arrived = true;
    Ok(ticket)
}

fn connections(max: u32, addresses: u32, groups: u32) -> Arc<Connections> {
    let connections = Arc::new(Connections::new(max));
    for _ in 0..addresses {
        connections.add_address(AddressLimits::default(), groups);
    }
    connections
}

/// Lets a group connect to an address until it is refused.
fn flood(connections: &Arc<Connections>, address: u32, group: u32) -> Vec<Ticket> {
    let mut open = Vec::new();
    while let Ok(mut ticket) = admit(connections, address) {
        if ticket.select(Tenant(group)).is_err() {
            break;
        }
        open.push(ticket);
    }
    open
}

#[test]
fn whoever_comes_next_finds_a_share_at_its_address() {
    let connections = connections(1000, 20, 1);
    let open: Vec<Vec<Ticket>> = (0..20).map(|address| flood(&connections, address, 1)).collect();
    let counts: Vec<usize> = open.iter().map(Vec::len).collect();
    assert_eq!(counts[0], 500);
    assert!(counts.is_sorted_by(|a, b| a >= b), "{counts:?}");
    assert!(counts[1] >= 60 && counts[19] >= 4, "{counts:?}");
    drop(open);
    let all = connections.stats();
    assert!(all.iter().all(|address| address.open == 0 && address.refused > 0));
    assert_eq!(connections.lock().users, 0);
}

#[test]
fn whoever_comes_next_finds_a_share_of_its_address_for_its_group() {
    let connections = connections(1000, 1, 3);
    let first = flood(&connections, 0, 1);
    let second = flood(&connections, 0, 2);
    assert_eq!(first.len(), 500);
    assert!((50..150).contains(&second.len()), "{}", second.len());
    assert!(!flood(&connections, 0, 3).is_empty());
}

#[test]
fn one_group_at_one_address_may_have_all() {
    let connections = connections(1000, 1, 1);
    assert_eq!(flood(&connections, 0, 1).len(), 1000);
}

#[test]
fn limits_of_an_address_and_of_a_group_hold_and_are_told_apart() {
    let connections = Arc::new(Connections::new(1000));
    let limits = AddressLimits {
        connections_max: 3,
        group_connections_max: 2,
        ..AddressLimits::default()
    };
    connections.add_address(limits, 2);
    let held = flood(&connections, 0, 1);
    assert_eq!(held.len(), 2);
    let mut other = admit(&connections, 0).unwrap();
    let refusal = other.select(Tenant(1)).unwrap_err();
    assert_eq!(refusal.to_string(), "2 are open, the limit of this group");
    other.select(Tenant(2)).unwrap();
    let Err(NoRoom::AtAll(refusal)) = admit(&connections, 0) else {
        panic!("one more than there may be");
    };
    assert_eq!(refusal.to_string(), "3 are open, the limit of this address");
    assert_eq!(connections.stats()[0].refused, 3);
}
#[test]
fn listener_that_asks_again_and_again_is_woken_once() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let (sender, receiver) = mpsc::channel();
    engine.add_service(ReactorId(0), Box::new(move || Box::new(Woken(sender))));
    let waker = receiver.recv().unwrap();
    let connections = connections(1000, 1, 1);
    let ask = || connections.admit(0, || waker.clone());
    let mut arriving: Vec<Ticket> = (0..ARRIVING_MAX).map(|_| ask().unwrap()).collect();
    for _ in 0..100 {
        assert_eq!(ask().unwrap_err(), NoRoom::Yet);
    }
    assert_eq!(connections.lock().listeners.len(), 1);
    drop(arriving.pop());
    assert_eq!(connections.lock().listeners.len(), 0, "it is told");
    ask().unwrap();
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn displaced_clients_that_do_not_leave_keep_none_out_at_another_address() {
    let engine = Engine::start(EngineConfig::default()).unwrap();
    let (sender, receiver) = mpsc::channel();
    engine.add_service(ReactorId(0), Box::new(move || Box::new(Woken(sender))));
    let waker = receiver.recv().unwrap();
    let connections = Arc::new(Connections::new(1000));
    for _ in 0..2 {
        let limits = AddressLimits {
            connections_max: 40,
            ..AddressLimits::default()
        };
        connections.add_address(limits, 1);
    }
    // Silent clients, as many as there may be, and more that displace some.
    let crowd = |address| {
        let mut crowd = Vec::new();
        while let Ok(mut ticket) = connections.admit(address, || waker.clone()) {
            ticket.arrive(waker.clone());
            crowd.push(ticket);
        }
        crowd
    };
    let crowds = [0, 1].map(crowd);
    let counts = crowds.each_ref().map(|crowd| crowd.len() as u32);
    assert_eq!(counts, [40 + LEAVING_MAX; 2]);
    drop(crowds);
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn address_whose_filesystem_is_not_mounted_any_more_is_listed_as_gone() {
    let connections = connections(10, 2, 1);
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let device = table.lines().next().and_then(|line| line.split(' ').nth(2));
    connections.lock().addresses[0].mounted = device.map(str::to_owned);
    connections.lock().addresses[1].mounted = Some("0:4294967".to_owned());
    let states = connections.stats().into_iter().map(|stats| stats.state);
    let states: Vec<AddressState> = states.collect();
    assert_eq!(states, [AddressState::Served, AddressState::Gone]);
}

/// Sends its waker.
struct Woken(mpsc::Sender<Waker>);

impl Service for Woken {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.0.send(cx.waker()).unwrap();
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn drain(&mut self, _cx: &mut Cx<'_>) {}

    fn is_finished(&self) -> bool {
        true
    }
}

#[test]
fn address_whose_mount_is_gone_is_listed_as_gone_until_it_is_closed() {
    let connections = connections(10, 1, 1);
    let ticket = connections.readmit(0).expect("there is room");
    assert_eq!(connections.stats()[0].state, AddressState::Served);
    drop(ticket.of_address());
    let stats = connections.stats();
    assert_eq!((stats[0].state, stats[0].open), (AddressState::Gone, 0));
    connections.remove_address(0);
    assert!(connections.stats().is_empty());
    // The next one has its number.
    assert_eq!(connections.add_address(AddressLimits::default(), 1), 0);
    assert_eq!(connections.stats()[0].state, AddressState::Served);
    let _stays = connections.readmit(0).expect("there is room");
    connections.remove_address(0);
    assert_eq!(connections.stats()[0].state, AddressState::Closed);
}
