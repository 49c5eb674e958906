//! Who may connect: how many connections an address may have of all that there are
//! descriptors for, and how many of these a group may have, so that the next client, at another
//! address or of another group, finds room. `listener` asks for each client that it has accepted,
//! `connection` when the client has selected a disk.
//!
//! While no more than half of all are open, an address may have as many as its own limit allows.
//! Above half it has a share of what is free: free / (addresses that have some + 4), and at least 4.
//! The groups at one address share what the address may have by the same rule (as with memory, see
//! `memory`). With one address, or one group at it, the share is everything.
//!
//! A client that has not selected a disk yet has no claim: where an address is full, the client
//! that has negotiated longest is displaced by the next one. So clients that connect and stay
//! silent keep nobody out, whatever their deadline. Only a few may be arriving or leaving at a
//! time; new clients meanwhile wait in the kernel's backlog.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::qos::{SHARE_MIN, share_of_free};
use blkmq_host::disk::Tenant;
use blkmq_host::service::Waker;

use super::access::Allowed;

/// The connections of all addresses.
#[derive(Debug)]
pub struct Connections {
    max: u32,
    state: Mutex<State>,
}

/// The connections of one address: how many are open, and what became of others.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AddressStats {
    /// The address, as the operator writes it.
    pub name: String,
    /// Connections that are open.
    pub open: u32,
    /// Most connections at this moment.
    pub max: u32,
    /// Open connections that have selected no disk yet.
    pub negotiating: u32,
    /// Connections that were closed at once for lack of room.
    pub refused: u64,
    /// Connections that had selected no disk and were displaced by others.
    pub displaced: u64,
    /// Whether new connections are admitted.
    pub state: AddressState,
}

/// Whether new connections are admitted at an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AddressState {
    /// They are.
    #[default]
    Served,
    /// The address was removed; those who were connected stay.
    Closed,
    /// The mount or device is gone, which the address was opened for, although nobody has removed the address.
    Gone,
}

impl AddressState {
    /// Its name in reports.
    pub fn name(self) -> &'static str {
        match self {
            Self::Served => "served",
            Self::Closed => "closed",
            Self::Gone => "gone",
        }
    }
}

/// The limits of an address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AddressLimits {
    /// The address, for reports.
    pub name: String,
    /// Connections at a time.
    pub connections_max: u32,
    /// Connections of one group at a time.
    pub group_connections_max: u32,
    /// Who may connect to a unix socket.
    pub allowed: Allowed,
}

#[derive(Debug, Default)]
struct State {
    open: u32,
    /// Addresses that have connections.
    users: u32,
    addresses: Vec<Address>,
    /// Connections that may be displaced, by address and age.
    negotiating: BTreeMap<(u32, u64), Negotiator>,
    next: u64,
    /// The listeners of addresses with waiting clients, once each.
    listeners: BTreeMap<u32, Waker>,
}

#[derive(Debug)]
struct Address {
    limits: AddressLimits,
    /// How many groups have disks here.
    groups: u32,
    /// Nobody is admitted any more.
    is_closed: bool,
    /// The mount or device is gone, which the address was opened for.
    is_gone: bool,
    /// The number of the mount's filesystem, as the table of mounts has it: who has it open may keep it after it
    /// was unmounted.
    mounted: Option<String>,
    open: u32,
    /// Open connections that their reactors have not begun to serve.
    arriving: u32,
    /// Displaced connections that are still open.
    leaving: u32,
    /// Connections that have selected a disk, by its group; no entry is 0.
    selected: BTreeMap<Tenant, u32>,
    refused: u64,
    displaced: u64,
}

#[derive(Debug)]
struct Negotiator {
    is_displaced: Arc<AtomicBool>,
    waker: Waker,
}

/// One connection in the counts, as long as it exists.
#[derive(Debug)]
pub(crate) struct Ticket {
    connections: Arc<Connections>,
    address: u32,
    number: u64,
    has_arrived: bool,
    /// The connection has to make room: set before its waker is used.
    is_displaced: Arc<AtomicBool>,
    group: Option<Tenant>,
    /// Its address serves nobody when the connection has ended.
    is_the_address: bool,
}

/// Why a client that was accepted is not served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoRoom {
    /// Room is about to become free, or to be found lacking: then the listener is woken.
    Yet,
    /// The client's connection is to be closed.
    AtAll(Refusal),
}

/// Why a connection is closed: how many its address or its group has, and whether that is the limit
/// or the share.
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

    /// The counts of each address, in the order in which the addresses were opened.
    pub fn stats(&self) -> Vec<AddressStats> {
        let mounted = self.mounted();
        let is_unmounted = |address: &Address| {
            let mounted = mounted.as_ref().zip(address.mounted.as_ref());
            mounted.is_some_and(|(all, device)| !all.contains(device))
        };
        let state = self.lock();
        let stats = |address: &Address| AddressStats {
            name: address.limits.name.clone(),
            open: address.open,
            max: address.limits.connections_max.min(self.max),
            negotiating: address.open - address.selected.values().sum::<u32>(),
            refused: address.refused,
            displaced: address.displaced,
            state: match address {
                Address { is_closed: true, .. } => AddressState::Closed,
                Address { is_gone: true, .. } => AddressState::Gone,
                address if is_unmounted(address) => AddressState::Gone,
                _ => AddressState::Served,
            },
        };
        let shown = |address: &&Address| !address.is_closed || address.open > 0;
        state.addresses.iter().filter(shown).map(stats).collect()
    }

    /// The numbers of all mounted filesystems, if an address has one and the table can be read.
    fn mounted(&self) -> Option<BTreeSet<String>> {
        let is_wanted = self
            .lock()
            .addresses
            .iter()
            .any(|address| address.mounted.is_some());
        let table = is_wanted.then(|| std::fs::read_to_string("/proc/self/mountinfo").ok())??;
        let devices = table.lines().filter_map(|line| line.split(' ').nth(2));
        Some(devices.map(str::to_owned).collect())
    }

    /// Notes that an address is a mount, with the number of its filesystem.
    #[cfg(feature = "fuse")]
    pub(crate) fn set_mounted(&self, address: u32, device: String) {
        self.lock().addresses[address as usize].mounted = Some(device);
    }

    /// Adds an address where disks of `groups` groups are served. Returns its number.
    pub(crate) fn add_address(&self, limits: AddressLimits, groups: u32) -> u32 {
        let mut state = self.lock();
        let added = Address {
            limits,
            groups,
            is_closed: false,
            is_gone: false,
            mounted: None,
            open: 0,
            arriving: 0,
            leaving: 0,
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

    /// Closes an address: another one may have its number when all of its connections are gone.
    pub(crate) fn remove_address(&self, address: u32) {
        let mut state = self.lock();
        state.addresses[address as usize].is_closed = true;
        state.listeners.remove(&address);
    }

    /// Changes the limits of an address; disks of `groups` groups are served there. Present
    /// connections stay.
    pub(crate) fn set_limits(&self, address: u32, limits: AddressLimits, groups: u32) {
        let mut state = self.lock();
        let address = &mut state.addresses[address as usize];
        (address.limits, address.groups) = (limits, groups);
    }

    /// Who may connect to an address.
    pub(crate) fn allowed(&self, address: u32) -> Allowed {
        self.lock().addresses[address as usize].limits.allowed.clone()
    }

    /// Counts a client that may not connect.
    pub(crate) fn note_refused(&self, address: u32) {
        self.lock().addresses[address as usize].refused += 1;
    }

    /// Counts a connection that was accepted; another one may be displaced for it. `listener` is
    /// woken if it has to wait.
    ///
    /// # Errors
    /// There is no room yet, or none and nobody to displace.
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

    /// Counts a connection that another daemon had admitted: only the number of descriptors bounds
    /// it.
    ///
    /// # Errors
    /// There are no more descriptors.
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
            is_the_address: false,
        }
    }

    /// Displaces some connections without a disk: the system is out of descriptors.
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
        // Counts that a panic left behind are consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Makes room for one more at an address, if it can. Returns the waker of the connection to
    /// displace.
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
        // Arriving connections will select a disk, or can be displaced later; so can others, when
        // fewer are leaving.
        let is_arriving = self.addresses[address as usize].arriving > 0;
        if is_arriving || self.of(address).next().is_some() {
            return Err(NoRoom::Yet);
        }
        Err(NoRoom::AtAll(refusal))
    }

    /// Checks that an address may have one more.
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

    /// Checks that a connection of an address, which is counted there already, may be one of a
    /// group.
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
        self.negotiating.range(all)
    }

    /// Displaces the connection of an address that has negotiated longest. Limited in number at a
    /// time: displaced connections stay open until their reactors close them. Returns the waker to
    /// use.
    fn displace(&mut self, address: u32) -> Option<Waker> {
        if self.addresses[address as usize].leaving >= LEAVING_MAX {
            return None;
        }
        let (&key, _) = self.of(address).next()?;
        let oldest = self.negotiating.remove(&key).expect("it was found there");
        // Release: pairs with the Acquire of the connection, which reads it when it is woken.
        oldest.is_displaced.store(true, Ordering::Release);
        let of = &mut self.addresses[address as usize];
        of.leaving += 1;
        of.displaced += 1;
        Some(oldest.waker)
    }
}

impl Ticket {
    /// The connection is on its reactor; `waker` is used if it is displaced.
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

    /// Returns whether the connection has to make room for another.
    pub(crate) fn is_displaced(&self) -> bool {
        // Acquire: pairs with the Release in `displace`.
        self.is_displaced.load(Ordering::Acquire)
    }

    /// Records that the client has selected a disk of a group.
    ///
    /// # Errors
    /// The group may have no more connections here.
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

    /// Records that the client selected a disk of a group before this daemon took over: it stays,
    /// whatever the group may have.
    pub(crate) fn reselect(&mut self, group: Tenant) {
        let connections = Arc::clone(&self.connections);
        self.count_selected(&mut connections.lock(), group);
    }

    /// The ticket of a mount or device: when that is gone, its address stays, and serves nobody.
    #[cfg(any(feature = "fuse", feature = "ublk", test))]
    pub(crate) fn of_address(mut self) -> Self {
        self.is_the_address = true;
        self
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
        state.open -= 1;
        let of = &mut state.addresses[self.address as usize];
        of.open -= 1;
        of.is_gone |= self.is_the_address;
        of.leaving -= u32::from(self.is_displaced());
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

/// Uses wakers with no lock held: a woken reactor may run at once and want the lock.
fn wake_all(all: impl IntoIterator<Item = Waker>) {
    all.into_iter().for_each(|waker| waker.wake());
}

/// The share of one of `users` when `free` are free.
fn share(free: u32, users: u32) -> u32 {
    (share_of_free(free.into(), users.into()) as u32).max(SHARE_MIN)
}

/// Most connections of one address that may be leaving at a time: each still has its descriptor, beyond
/// all limits.
pub const LEAVING_MAX: u32 = 4;
/// Most connections of one address that may be accepted before their reactors have begun to serve
/// them.
const ARRIVING_MAX: u32 = 8;
/// Clients that one address serves at a time, by default.
pub const CONNECTIONS_MAX: u32 = 4096;

impl Default for AddressLimits {
    fn default() -> Self {
        Self {
            name: String::new(),
            connections_max: CONNECTIONS_MAX,
            group_connections_max: u32::MAX,
            allowed: Allowed::default(),
        }
    }
}

#[cfg(test)]
mod tests;
