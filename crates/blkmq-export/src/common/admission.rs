//! Decides who may connect: how many connections an address may have of all that there are descriptors for, and a group of those
//! of an address, so that whoever comes next, at another address or of another group, finds room. `listener` asks for each
//! client that it has accepted, `connection` when the client has selected a disk.
//!
//! While no more than half of all are open, an address may have as many as its own limit allows. Then it has a share of what
//! is free: free / (addresses that have some + 4), and at least 4. The groups at one address share what the address may have by
//! the same rule (as with memory, see `memory`). With one address, or one group at it, there is nobody to leave anything for.
//!
//! A client that has not selected a disk yet has no claim: where an address is full, the one that has negotiated longest makes
//! room for the one that comes. So clients that connect and say nothing keep nobody out, whatever their deadline. Few are on
//! their way out or in at a time; who comes meanwhile waits, where the kernel keeps clients that nobody has accepted.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_host::disk::Tenant;
use blkmq_host::service::Waker;

/// The connections of all addresses.
#[derive(Debug)]
pub struct Connections {
    max: u32,
    state: Mutex<State>,
}

/// How many connections one address has, and what became of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressStats {
    /// The address, as the operator knows it.
    pub name: String,
    /// Connections that are open.
    pub open: u32,
    /// Most that may be.
    pub max: u32,
    /// Those of them that have selected no disk yet.
    pub negotiating: u32,
    /// Connections that were closed at once, for want of room.
    pub refused: u64,
    /// Connections that had selected nothing yet and made room for others.
    pub displaced: u64,
}

/// What an address may have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLimits {
    /// The address, for reports.
    pub name: String,
    /// Connections at a time.
    pub connections_max: u32,
    /// Connections of one group at a time.
    pub group_connections_max: u32,
}

#[derive(Debug, Default)]
struct State {
    open: u32,
    /// Addresses that have connections.
    users: u32,
    addresses: Vec<Address>,
    /// Those that may be displaced, by address and age.
    negotiating: BTreeMap<(u32, u64), Negotiator>,
    next: u64,
    /// Displaced ones that are still open.
    leaving: u32,
    /// The listeners of addresses where somebody waits: each once, however often it has asked.
    listeners: BTreeMap<u32, Waker>,
}

#[derive(Debug)]
struct Address {
    limits: AddressLimits,
    /// How many groups have disks here.
    groups: u32,
    /// Nobody is let in any more.
    is_closed: bool,
    open: u32,
    /// Those of them that their reactors have not begun to serve.
    arriving: u32,
    /// Connections that have selected a disk, by its group; none with 0.
    selected: BTreeMap<Tenant, u32>,
    refused: u64,
    displaced: u64,
}

#[derive(Debug)]
struct Negotiator {
    is_displaced: Arc<AtomicBool>,
    waker: Waker,
}

/// One connection in the counts, for as long as it lives.
#[derive(Debug)]
pub(crate) struct Ticket {
    connections: Arc<Connections>,
    address: u32,
    number: u64,
    has_arrived: bool,
    /// It has to make room: set before its waker is used.
    is_displaced: Arc<AtomicBool>,
    group: Option<Tenant>,
}

/// Why a client that was accepted is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// There will be room for it, or it will be known that there is none: its listener is woken then.
    Yet,
    /// It is to be closed.
    AtAll(Refusal),
}

/// Why a connection is closed: what its address or its group has already, and whether that is its limit or its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    whose: &'static str,
    open: u32,
    is_limit: bool,
}

impl Connections {
    /// Makes the counts for at most `max` connections at a time.
    pub fn new(max: u32) -> Self {
        Self {
            max,
            state: Mutex::default(),
        }
    }

    /// What each address has, in the order in which they were opened.
    pub fn stats(&self) -> Vec<AddressStats> {
        let state = self.lock();
        let stats = |address: &Address| AddressStats {
            name: address.limits.name.clone(),
            open: address.open,
            max: address.limits.connections_max.min(self.max),
            negotiating: address.open - address.selected.values().sum::<u32>(),
            refused: address.refused,
            displaced: address.displaced,
        };
        let shown = |address: &&Address| !address.is_closed || address.open > 0;
        state.addresses.iter().filter(shown).map(stats).collect()
    }

    /// Adds an address where disks of so many groups are served. Returns its number.
    pub(crate) fn add_address(&self, limits: AddressLimits, groups: u32) -> u32 {
        let mut state = self.lock();
        let added = Address {
            limits,
            groups,
            is_closed: false,
            open: 0,
            arriving: 0,
            selected: BTreeMap::new(),
            refused: 0,
            displaced: 0,
        };
        let is_free = |address: &Address| address.is_closed && address.open == 0;
        let place = state.addresses.iter().position(is_free);
        let place = place.unwrap_or(state.addresses.len());
        match state.addresses.get_mut(place) {
            Some(address) => *address = added,
            None => state.addresses.push(added),
        }
        place as u32
    }

    /// An address is closed: another one may have its number when all of its connections are gone.
    pub(crate) fn remove_address(&self, address: u32) {
        let mut state = self.lock();
        state.addresses[address as usize].is_closed = true;
        state.listeners.remove(&address);
    }

    /// What an address may have has changed; so many groups have disks there. Those who are there stay.
    pub(crate) fn set_limits(&self, address: u32, limits: AddressLimits, groups: u32) {
        let mut state = self.lock();
        let address = &mut state.addresses[address as usize];
        (address.limits, address.groups) = (limits, groups);
    }

    /// Counts a connection that was accepted; another may have to make room for it. `listener` is woken if it has to wait.
    ///
    /// # Errors
    /// If there is no room yet, or none and nobody to make any.
    pub(crate) fn admit(
        self: &Arc<Self>,
        address: u32,
        listener: impl FnOnce() -> Waker,
    ) -> Result<Ticket, NoRoom> {
        let mut state = self.lock();
        let displaced = match state.make_room_at(self.max, address) {
            Ok(displaced) => displaced,
            Err(no_room) => {
                match no_room {
                    NoRoom::Yet => {
                        state.listeners.entry(address).or_insert_with(listener);
                    }
                    NoRoom::AtAll(_) => state.addresses[address as usize].refused += 1,
                }
                return Err(no_room);
            }
        };
        let ticket = self.count(&mut state, address);
        drop(state);
        wake_all(displaced);
        Ok(ticket)
    }

    /// Counts a connection that another daemon had admitted: only what there are descriptors for bounds it.
    ///
    /// # Errors
    /// If there are no more.
    pub(crate) fn readmit(self: &Arc<Self>, address: u32) -> Result<Ticket, Refusal> {
        let mut state = self.lock();
        if state.open >= self.max {
            return Err(Refusal {
                whose: "daemon",
                open: state.open,
                is_limit: true,
            });
        }
        Ok(self.count(&mut state, address))
    }

    fn count(self: &Arc<Self>, state: &mut State, address: u32) -> Ticket {
        state.open += 1;
        let of = &mut state.addresses[address as usize];
        of.open += 1;
        of.arriving += 1;
        let is_first = of.open == 1;
        state.users += u32::from(is_first);
        state.next += 1;
        Ticket {
            connections: Arc::clone(self),
            address,
            number: state.next,
            has_arrived: false,
            is_displaced: Arc::default(),
            group: None,
        }
    }

    /// Has some make room that have selected nothing yet: the system is out of descriptors.
    pub(crate) fn displace_some(&self) {
        let mut state = self.lock();
        let addresses = 0..state.addresses.len() as u32;
        let most = addresses.max_by_key(|&address| state.of(address).count());
        let displaced: Vec<Waker> = most
            .map(|address| std::iter::from_fn(|| state.displace(address)).collect())
            .unwrap_or_default();
        drop(state);
        wake_all(displaced);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // Counts that a panic left behind are as good as any.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Sees to it that an address may have one more. Returns whom to wake: who makes room for it.
    fn make_room_at(&mut self, max: u32, address: u32) -> Result<Option<Waker>, NoRoom> {
        if self.addresses[address as usize].arriving >= ARRIVING_MAX {
            return Err(NoRoom::Yet);
        }
        let Err(refusal) = self.room_at(max, address) else {
            return Ok(None);
        };
        if let Some(displaced) = self.displace(address) {
            return Ok(Some(displaced));
        }
        // Those who arrive will select something, or can be displaced; so can others, when fewer are on their way out.
        let is_arriving = self.addresses[address as usize].arriving > 0;
        if is_arriving || self.of(address).next().is_some() {
            return Err(NoRoom::Yet);
        }
        Err(NoRoom::AtAll(refusal))
    }

    /// Says whether an address may have one more.
    fn room_at(&self, max: u32, address: u32) -> Result<(), Refusal> {
        let of = &self.addresses[address as usize];
        let refusal = |is_limit| Refusal {
            whose: "address",
            open: of.open,
            is_limit,
        };
        let free = max.saturating_sub(self.open);
        if of.open >= of.limits.connections_max || (free == 0 && self.addresses.len() == 1) {
            return Err(refusal(true));
        }
        let may = self.addresses.len() == 1 || self.open < max / 2 || of.open < share(free, self.users);
        if free > 0 && may {
            Ok(())
        } else {
            Err(refusal(false))
        }
    }

    /// Says whether a connection of an address, which is counted there already, may be one of a group.
    fn room_for(&self, max: u32, address: u32, group: Tenant) -> Result<(), Refusal> {
        let of = &self.addresses[address as usize];
        let held = of.selected.get(&group).copied().unwrap_or(0);
        let refusal = |is_limit| Refusal {
            whose: "group",
            open: held,
            is_limit,
        };
        if held >= of.limits.group_connections_max {
            return Err(refusal(true));
        }
        let all = if self.addresses.len() == 1 { max } else { max / 2 };
        let all = all.min(of.limits.connections_max);
        let open: u32 = of.selected.values().sum();
        let free = all.saturating_sub(open);
        if of.groups == 1 || open < all / 2 || held < share(free, of.selected.len() as u32) {
            Ok(())
        } else {
            Err(refusal(false))
        }
    }

    fn of(&self, address: u32) -> impl Iterator<Item = (&(u32, u64), &Negotiator)> {
        let all = (address, 0)..=(address, u64::MAX);
        let is_wanted = !cfg!(blkmq_mutant = "silent_clients");
        self.negotiating.range(all).filter(move |_| is_wanted)
    }

    /// Has the one of an address that negotiates longest make room. Not too many at a time: they are open until their reactors close them.
    /// Returns whom to wake for it.
    fn displace(&mut self, address: u32) -> Option<Waker> {
        if self.leaving >= LEAVING_MAX {
            return None;
        }
        let (&key, _) = self.of(address).next()?;
        let oldest = self.negotiating.remove(&key).expect("it was found there");
        // Release: pairs with the Acquire of the connection, which looks when it is woken.
        oldest.is_displaced.store(true, Ordering::Release);
        self.leaving += 1;
        self.addresses[address as usize].displaced += 1;
        Some(oldest.waker)
    }
}

impl Ticket {
    /// The connection lives on its reactor, and may be told to make room with `waker`.
    pub(crate) fn arrive(&mut self, waker: Waker) {
        let is_displaced = Arc::clone(&self.is_displaced);
        let negotiator = Negotiator { is_displaced, waker };
        self.has_arrived = true;
        let mut state = self.connections.lock();
        state.addresses[self.address as usize].arriving -= 1;
        state.negotiating.insert((self.address, self.number), negotiator);
        let listeners = std::mem::take(&mut state.listeners);
        drop(state);
        wake_all(listeners.into_values());
    }

    /// Says whether it has to make room for another.
    pub(crate) fn is_displaced(&self) -> bool {
        // Acquire: pairs with the Release in `displace`.
        self.is_displaced.load(Ordering::Acquire)
    }

    /// The client has selected a disk of a group.
    ///
    /// # Errors
    /// If the group may have no more connections here.
    pub(crate) fn select(&mut self, group: Tenant) -> Result<(), Refusal> {
        let connections = Arc::clone(&self.connections);
        let mut state = connections.lock();
        let room = state.room_for(self.connections.max, self.address, group);
        if let Err(refusal) = room {
            state.addresses[self.address as usize].refused += 1;
            return Err(refusal);
        }
        self.count_selected(&mut state, group);
        Ok(())
    }

    /// The client had selected a disk of a group before this daemon took over: it stays, whatever the group may have.
    pub(crate) fn reselect(&mut self, group: Tenant) {
        let connections = Arc::clone(&self.connections);
        self.count_selected(&mut connections.lock(), group);
    }

    fn count_selected(&mut self, state: &mut State, group: Tenant) {
        let of = &mut state.addresses[self.address as usize];
        *of.selected.entry(group).or_default() += 1;
        self.group = Some(group);
        state.negotiating.remove(&(self.address, self.number));
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        let mut state = self.connections.lock();
        state.negotiating.remove(&(self.address, self.number));
        state.leaving -= u32::from(self.is_displaced());
        state.open -= 1;
        let of = &mut state.addresses[self.address as usize];
        of.open -= 1;
        of.arriving -= u32::from(!self.has_arrived);
        if let Some(group) = self.group
            && let Some(held) = of.selected.get_mut(&group)
        {
            *held -= 1;
            if *held == 0 {
                of.selected.remove(&group);
            }
        }
        let is_last = of.open == 0;
        state.users -= u32::from(is_last);
        let listeners = std::mem::take(&mut state.listeners);
        drop(state);
        wake_all(listeners.into_values());
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { whose, open, .. } = self;
        match self.is_limit {
            true => write!(f, "{open} are open, the limit of this {whose}"),
            false => write!(
                f,
                "{open} are open, this {whose}'s share while connections are short"
            ),
        }
    }
}

/// Wakes them, with no lock held: who is woken may run at once, in our place, and want it.
fn wake_all(all: impl IntoIterator<Item = Waker>) {
    all.into_iter().for_each(|waker| waker.wake());
}

/// What one of `users` may have while so many are free.
fn share(free: u32, users: u32) -> u32 {
    (free / (users + ROOM_FOR)).max(SHARE_MIN)
}

/// For so many more there is always room.
const ROOM_FOR: u32 = 4;
const SHARE_MIN: u32 = 4;
/// How many may be on their way out at a time: each still has its descriptor, beyond all limits.
pub const LEAVING_MAX: u32 = 16;
/// How many of one address may be accepted before their reactors have begun to serve them.
const ARRIVING_MAX: u32 = 8;
/// How many clients one address serves at a time, by default.
pub const CONNECTIONS_MAX: u32 = 4096;

impl Default for AddressLimits {
    fn default() -> Self {
        Self {
            name: String::new(),
            connections_max: CONNECTIONS_MAX,
            group_connections_max: u32::MAX,
        }
    }
}

#[cfg(test)]
mod tests;
