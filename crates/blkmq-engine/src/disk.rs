//! A disk of an engine, as its users see it. `engine` finds it; `attached` does I/O on it by itself, and other
//! threads through `client`.

use std::fmt;
use std::sync::{Arc, OnceLock, Weak};

use blkmq_core::bio::Status;

use crate::bio::Bio;
use crate::buffer::Buffer;
use crate::client::Client;
use crate::engine::Running;
use crate::error::IoError;
use crate::io::{Io, Promise};
use crate::sys::forks;

/// A disk whose I/O is accounted to a group. Cheap to clone; for any thread.
///
/// Its own methods hand I/O to a thread of the engine's, which costs two hand-overs between threads for each
/// batch; an [`Attached`](crate::Attached) thread does it by itself. They never block, and each [`Io`] can be
/// awaited or waited for. The caller bounds how many are under way.
///
/// It keeps neither its engine alive nor its disk: I/O that is submitted after the engine's end, or after the disk was
/// [removed](crate::Engine::remove_disk), ends with [`Status::Shutdown`].
#[derive(Clone)]
pub struct Disk {
    host: blkmq_host::Disk,
    way: Arc<Way>,
}

/// The way to a thread of the engine's, which is made at the first I/O.
struct Way {
    engine: Weak<Running>,
    /// Forks that were counted when it was found.
    forks: u32,
    client: OnceLock<Option<Client>>,
}

impl Disk {
    pub(crate) fn new(host: blkmq_host::Disk, engine: Weak<Running>) -> Self {
        let way = Way {
            engine,
            forks: forks(),
            client: OnceLock::new(),
        };
        let way = Arc::new(way);
        Self { host, way }
    }

    /// Whether it is a disk of this engine.
    #[inline]
    pub(crate) fn is_of(&self, engine: *const Running) -> bool {
        Weak::as_ptr(&self.way.engine) == engine
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.host.name
    }

    /// Its present size in bytes; it may grow.
    pub fn size(&self) -> u64 {
        self.host.current_size()
    }

    /// The smallest unit of offsets and lengths, in bytes: a power of two from 512 to 65536.
    pub fn block_size(&self) -> u32 {
        self.host.block_size
    }

    /// Whether writes, discards and zeroing end with [`Status::ReadOnly`].
    pub fn is_read_only(&self) -> bool {
        self.host.read_only
    }

    /// Fills the buffer from `offset`.
    pub fn read(&self, offset: u64, buffer: Buffer) -> Io {
        self.submit(Bio::read(offset, buffer))
    }

    /// Stores the buffer at `offset`.
    pub fn write(&self, offset: u64, buffer: Buffer) -> Io {
        self.submit(Bio::write(offset, buffer))
    }

    /// Makes all writes durable that have ended.
    pub fn flush(&self) -> Io {
        self.submit(Bio::flush())
    }

    /// Tells the disk that the content is no longer needed.
    pub fn discard(&self, offset: u64, len: u64) -> Io {
        self.submit(Bio::discard(offset, len))
    }

    /// Does one I/O. In a fork of the engine's process, and after the engine's end, it ends with
    /// [`Status::Shutdown`].
    pub fn submit(&self, bio: Bio) -> Io {
        let (io, promise) = Io::new();
        self.send(bio, promise);
        io
    }

    /// Does one I/O, and calls `end` with its buffer, on a thread of the engine's. The call must not block, since
    /// the thread does the I/O of others; it may submit more. If it panics, that is logged, and harms no other I/O.
    ///
    /// Where [`Self::submit`] ends with [`Status::Shutdown`] the call comes, too: on the caller's thread, before
    /// this returns, if the engine had ended by then.
    pub fn submit_with(&self, bio: Bio, end: impl FnOnce(Result<Buffer, IoError>) + Send + 'static) {
        self.send(bio, Promise::calling(end));
    }

    fn send(&self, bio: Bio, promise: Promise) {
        let way = &*self.way;
        let open = || Running::open_client(&way.engine, &self.host);
        // A fork has a copy of the client, but nobody at its other end.
        let client = (way.forks == forks()).then(|| way.client.get_or_init(open).as_ref());
        match client.flatten() {
            Some(client) => client.send(bio, promise),
            None => promise.end(Status::Shutdown, bio.into_buffer()),
        }
    }

    pub(crate) fn host(&self) -> &blkmq_host::Disk {
        &self.host
    }
}

impl fmt::Debug for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Disk {} of {} bytes", self.name(), self.size())
    }
}
