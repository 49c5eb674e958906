//! A front door, with its hand-over to another daemon. A client sends the number of a block, one byte; the block of the
//! first disk is zeroed, and the answer is `.` or `!`.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::ReactorId;
use blkmq_export::common::{self, AddressError, Common, OpenError, Place, Socket};
use blkmq_export::front_door::{Address, DiskName, FrontDoor, Given, Offer, Opened, ServeError, Served};
use blkmq_export::handover::{Handover, Phase, Registration, Saved};
use blkmq_host::disk::Disk;
use blkmq_host::engine::Engine;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, ServiceFactory};

/// The front door.
pub struct Zeroer;

impl FrontDoor for Zeroer {
    fn name(&self) -> &'static str {
        NAME
    }

    fn help(&self) -> &'static str {
        "Zero blocks of the first disk for clients of the unix socket ADDRESS"
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        Ok(Box::new(At(given.address.parse()?)))
    }
}

#[derive(Debug)]
struct At(common::Address);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Address for At {
    fn places(&self, _: &[DiskName<'_>]) -> Vec<Place> {
        Place::of_socket(&self.0)
    }

    fn open(&self, _: &[DiskName<'_>], handover: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        let sockets = common::open(&self.0, handover)?.into_iter();
        Ok(sockets
            .map(|socket| Box::new(Open(socket)) as Box<dyn Opened>)
            .collect())
    }
}

struct Open(Socket);

impl Opened for Open {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        Some(format!("zeroer of {} at {}", disk.name, self.0.address()))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        _: Offer<'_>,
        common: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        let (disk, address) = (engine.disks()[0].clone(), self.0.address());
        let handover = Arc::clone(&common.handover);
        let door = Arc::new(Door {
            disk,
            address,
            handover,
        });
        let successor = Arc::clone(&door);
        let restore = move |_: &[u8], mut fds: Vec<OwnedFd>| {
            let stream = fds.pop().ok_or("a client without its socket")?;
            Ok(successor.service(End::Client(stream.into())))
        };
        let added = common.handover.add_door(NAME, &self.0, Arc::new(restore));
        added.map_err(|error| ServeError(error.into()))?;
        engine.add_service(ReactorId(0), door.service(End::Listener(self.0)));
        Ok(Box::new(Serves(door)))
    }
}

/// What the services of an address share.
struct Door {
    disk: Disk,
    address: String,
    handover: Arc<Handover>,
}

struct Serves(Arc<Door>);

impl Served for Serves {
    fn offer(&self, _: &[Disk], _: Offer<'_>) -> Result<(), ServeError> {
        Ok(())
    }

    fn close(&self) {
        self.0.handover.remove_door(NAME, &self.0.address);
    }
}

impl Door {
    fn service(self: &Arc<Self>, end: End) -> ServiceFactory {
        let (door, registration) = (Arc::clone(self), Registration::new(&self.handover));
        Box::new(move || {
            Box::new(Serving {
                door,
                registration,
                end,
                is_polled: false,
                is_busy: false,
                is_over: false,
            })
        })
    }
}

enum End {
    Listener(Socket),
    Client(UnixStream),
}

/// A listener or a client, on its reactor.
struct Serving {
    door: Arc<Door>,
    registration: Registration,
    end: End,
    /// Its descriptor is polled.
    is_polled: bool,
    /// A bio is in flight.
    is_busy: bool,
    is_over: bool,
}

impl Serving {
    /// Takes more, or does what the phase of the hand-over asks for.
    fn go_on(&mut self, cx: &mut Cx<'_>) {
        match (self.registration.phase(), &mut self.end) {
            _ if self.is_busy || self.is_over => {}
            (Phase::Serving, end) => {
                let fd = match end {
                    End::Listener(socket) => {
                        if self.door.handover.is_inherited(&self.door.address) {
                            socket.own(self.door.handover.file_of(&self.door.address));
                        }
                        socket.as_fd().as_raw_fd()
                    }
                    End::Client(stream) => stream.as_raw_fd(),
                };
                if !std::mem::replace(&mut self.is_polled, true) {
                    cx.ring_client().push_poll(fd, libc::POLLIN, false, POLL);
                }
            }
            // Once: a later report would take the place of this one.
            (Phase::Suspended, _) if self.registration.has_settled() => {}
            (Phase::Suspended, End::Client(stream)) => {
                let socket = stream.as_fd().try_clone_to_owned();
                self.registration.settle(socket.ok().map(|socket| Saved {
                    door: NAME,
                    address: self.door.address.clone(),
                    body: Vec::new(),
                    fds: vec![Arc::new(socket)],
                }));
            }
            (Phase::Suspended, End::Listener(_)) => self.registration.settle(None),
            (Phase::Gone, end) => {
                if let End::Listener(socket) = end {
                    socket.disown();
                }
                self.drain(cx);
            }
        }
    }
}

impl Service for Serving {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.registration.arrive(cx.waker());
        self.go_on(cx);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        self.go_on(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, completed: &[Completion]) {
        self.is_polled &= completed.iter().all(|one| one.user != POLL);
        if self.registration.phase() == Phase::Serving && !self.is_over {
            match &mut self.end {
                End::Listener(Socket::Unix(listener, _)) => {
                    if let Ok((stream, _)) = listener.accept() {
                        cx.spawn_on(cx.reactor(), self.door.service(End::Client(stream)));
                    }
                }
                End::Listener(Socket::Tcp(_)) => self.is_over = true,
                End::Client(stream) => {
                    let mut number = [0];
                    self.is_busy = stream.read(&mut number).is_ok_and(|bytes| bytes > 0);
                    self.is_over = !self.is_busy;
                    if self.is_busy {
                        let len = self.door.disk.block_size.into();
                        let bio = Bio {
                            op: Op::WriteZeroes,
                            offset: u64::from(number[0]) * len,
                            len,
                            disk: self.door.disk.id,
                            group: self.door.disk.group,
                            ..Bio::default()
                        };
                        cx.submit(self.door.disk.queue, bio).expect("room for one bio");
                    }
                }
            }
        }
        self.go_on(cx);
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        self.is_busy = false;
        if let End::Client(stream) = &mut self.end {
            let answer = if bio.status.is_ok() { b"." } else { b"!" };
            self.is_over |= stream.write_all(answer).is_err();
        }
        self.go_on(cx);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.is_over = true;
        cx.ring_client().push_cancel(POLL, POLL + 1);
    }

    fn is_finished(&self) -> bool {
        self.is_over && !self.is_busy
    }
}

const NAME: &str = "zeroer";
/// The entry of the ring that polls.
const POLL: u64 = 0;
