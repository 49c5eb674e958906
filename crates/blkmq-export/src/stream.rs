//! Front doors of one's own over unix sockets. A [`StreamProtocol`] says what bytes a request and a reply are;
//! [`StreamDoor`] does the rest as for the doors of this crate: it listens, admits clients, bounds their memory, waits for
//! earlier sessions of the disk, and hands clients over to another daemon.
//!
//! ```text
//!  socket ─► received bytes ─► StreamProtocol::decode ─► Request ─► queue
//!  socket ◄─ unsent bytes   ◄─ StreamProtocol::encode ◄─ its end  ◄─┘
//! ```
//! The clients of an address have its first disk, and the protocol keeps nothing of a client between two requests: one that
//! selects a disk or agrees on something needs a door of its own, as [`crate::front_door`] has them. A program of one's own
//! serves it (`examples/door-outside`); `blkmq serve` knows the doors of the registry alone.

mod client;

use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::ids::ReactorId;
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::service::ServiceFactory;

use self::client::Saved;
use crate::common::access;
use crate::common::listener::{Admitted, Listener, OpenAddress};
use crate::common::log::Log;
use crate::common::sessions::DiskSessions;
use crate::common::{self, Access, AddressError, Common, OpenError, Place, Socket, check_socket};
use crate::front_door::{Address, DiskName, FrontDoor, Given, Offer, Opened, ServeError, Served};
use crate::handover::{Handover, Registration, Restore};
use crate::keys::Key;

/// What the bytes of a protocol mean. Called on reactors: no function may block.
pub trait StreamProtocol: fmt::Debug + Send + Sync + 'static {
    /// The door's name, as [`FrontDoor::name`].
    fn name(&self) -> &'static str;

    /// One line for people, as [`FrontDoor::help`].
    fn help(&self) -> &'static str;

    /// Decodes the next request of a client of `disk`. `received` is what the client has sent since its last request, up
    /// to [`RECEIVED_MAX`] bytes. Called again with the same bytes when more have come, or while there is no memory for the
    /// request: nothing of a client is kept here. A range that is not one of the disk ends with [`Status::Invalid`].
    fn decode(&self, disk: &Disk, received: &[u8]) -> Decoded;

    /// Appends the reply to a request that has ended. `data` has the pieces of what a read that succeeded has read, and is
    /// empty otherwise. Replies are in the order in which requests end, which need not be that in which they came: where a
    /// client has several in flight, its reply tells which it answers ([`Request::cookie`]).
    fn encode(&self, request: &Request, status: Status, data: &[&[u8]], replies: &mut Vec<u8>);
}

/// What received bytes begin with.
#[derive(Debug)]
pub enum Decoded {
    /// Not a whole request.
    Incomplete,
    /// A request in so many bytes, one at least.
    Request(usize, Request),
    /// Something in so many bytes that needs no disk, such as a greeting or what is refused, and the reply.
    Reply(usize, Vec<u8>),
    /// Nothing of the protocol, and why: the client is disconnected when it has its replies.
    Malformed(&'static str),
}

/// A request of a client.
#[derive(Clone, Copy, Debug, Default)]
pub struct Request {
    /// The operation.
    pub op: Op,
    /// Its modifiers.
    pub flags: Flags,
    /// Its first byte on the disk.
    pub offset: u64,
    /// Its bytes on the disk: [`LEN_MAX`] at most where it moves data, or the client is disconnected; 0 for a flush.
    pub len: u64,
    /// Where the data of a write begins in the bytes of the request, which has all of it.
    pub data_at: usize,
    /// The client's mark, for the reply.
    pub cookie: u64,
}

/// A front door of a protocol.
#[derive(Debug)]
pub struct StreamDoor<P>(Arc<P>);

impl<P: StreamProtocol> StreamDoor<P> {
    /// Makes the door.
    pub fn new(protocol: P) -> Self {
        Self(Arc::new(protocol))
    }
}

impl<P: StreamProtocol> FrontDoor for StreamDoor<P> {
    fn name(&self) -> &'static str {
        self.0.name()
    }

    fn help(&self) -> &'static str {
        self.0.help()
    }

    fn keys(&self) -> &'static [&'static [Key]] {
        &[access::KEYS]
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let address = given.address.parse()?;
        if matches!(address, common::Address::Tcp(_) | common::Address::Localhost(_)) {
            let what = format!("address {address} rejected: must be a unix socket: nobody proves who he is");
            return Err(AddressError(what));
        }
        Ok(Box::new(At {
            access: Access::parse(given.keys, &address)?,
            address,
            protocol: Arc::clone(&self.0),
        }))
    }
}

/// An address, with its settings.
#[derive(Debug)]
struct At<P> {
    address: common::Address,
    access: Access,
    protocol: Arc<P>,
}

impl<P> fmt::Display for At<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.address.fmt(f)
    }
}

impl<P: StreamProtocol> Address for At<P> {
    fn access(&self) -> Option<&Access> {
        Some(&self.access)
    }

    fn places(&self, _: &[DiskName<'_>]) -> Vec<Place> {
        Place::of_socket(&self.address)
    }

    fn check_places(&self, _: &[DiskName<'_>]) -> Result<(), OpenError> {
        check_socket(&self.address).map_err(|error| error.of(&format!("export {self}")))
    }

    fn open(&self, _: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        let opened = common::open(&self.address, handover)?.into_iter();
        self.access.apply(&self.address)?;
        let listening = |socket| -> Box<dyn Opened> {
            Box::new(Listening {
                socket,
                protocol: Arc::clone(&self.protocol),
            })
        };
        Ok(opened.map(listening).collect())
    }
}

/// A socket of an address.
struct Listening<P> {
    socket: Socket,
    protocol: Arc<P>,
}

impl<P: StreamProtocol> Opened for Listening<P> {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        Some(format!(
            "{}: {} at {}",
            disk.name,
            self.protocol.name(),
            self.socket.address()
        ))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        what: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        let Self { socket, protocol } = *self;
        if matches!(socket, Socket::Tcp(_)) {
            return Err(ServeError(
                "a TCP socket of systemd: nobody proves who he is there".into(),
            ));
        }
        let wrong = |error: std::io::Error| ServeError(error.into());
        let disk = first(&engine.disks(), &what);
        let number = common.connections.add_address(what.admitted, 1);
        let door = Arc::new(Door {
            log: Arc::new(Log::new(protocol.name())),
            protocol,
            disk: Mutex::new(disk),
            address: socket.address(),
            sessions: common.of_door(),
            common: Arc::clone(common),
        });
        let (name, log) = (door.log.door(), Arc::clone(&door.log));
        common
            .handover
            .add_door(name, &socket, restorer(&door, number))
            .map_err(wrong)?;
        let connecting = Arc::clone(&door);
        let connect = move |admitted| service(admitted, &connecting, Saved::default());
        let listener = Listener::new(socket, common, number, &log, Box::new(connect)).map_err(wrong)?;
        let address = listener.address();
        engine.add_service(ReactorId(0), Box::new(move || Box::new(listener)));
        common.trim(engine);
        Ok(Box::new(ServedAddress { door, address }))
    }
}

/// What the clients of an address share.
#[derive(Debug)]
struct Door<P> {
    protocol: Arc<P>,
    /// What new clients get.
    disk: Mutex<Option<Disk>>,
    common: Arc<Common>,
    sessions: Arc<DiskSessions>,
    log: Arc<Log>,
    address: String,
}

impl<P> Door<P> {
    fn disk(&self) -> MutexGuard<'_, Option<Disk>> {
        self.disk.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct ServedAddress<P> {
    door: Arc<Door<P>>,
    address: OpenAddress,
}

impl<P: StreamProtocol> Served for ServedAddress<P> {
    fn offer(&self, disks: &[Disk], what: Offer<'_>) -> Result<(), ServeError> {
        *self.door.disk() = first(disks, &what);
        self.address.set_limits(what.admitted, 1);
        Ok(())
    }

    fn close(&self) {
        self.address.close();
    }
}

/// The first of the disks that an address serves.
fn first(disks: &[Disk], what: &Offer<'_>) -> Option<Disk> {
    let is_served = |disk: &&Disk| match what.disks {
        Some(names) => names.contains(&disk.name),
        None => disk.used_by.is_none(),
    };
    disks.iter().find(is_served).cloned()
}

fn service<P: StreamProtocol>(admitted: Admitted, door: &Arc<Door<P>>, saved: Saved) -> ServiceFactory {
    let door = Arc::clone(door);
    Box::new(move || Box::new(client::client(admitted, door, saved)))
}

/// What makes a client of the state that another daemon saved. The door holds what is handed over, hence the weak reference.
fn restorer<P: StreamProtocol>(door: &Arc<Door<P>>, number: u32) -> Restore {
    let door = Arc::downgrade(door);
    Arc::new(move |body, fds| {
        let door = door.upgrade().ok_or("nobody listens there any more")?;
        let [socket] = <[_; 1]>::try_from(fds).map_err(|_| "one descriptor is needed")?;
        let readmitted = door.common.connections.readmit(number);
        let admitted = Admitted {
            socket,
            is_tcp: false,
            ticket: readmitted.map_err(|refusal| refusal.to_string())?,
            member: Registration::new(&door.common.handover),
        };
        Ok(service(admitted, &door, Saved::parse(body)?))
    })
}

/// How many bytes of a client wait to be decoded at most: a longer request ends it.
pub const RECEIVED_MAX: usize = LEN_MAX as usize + (64 << 10);
/// The longest request that moves data, in bytes.
pub const LEN_MAX: u64 = 1 << 20;
