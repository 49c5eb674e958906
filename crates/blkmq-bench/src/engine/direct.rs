//! The I/O of which the instruction counts are: a 4 KiB random read at depth 64 on null drives, through an
//! attached thread. `examples/in_process.rs` does each way under callgrind.
//!
//! | way | what it is |
//! |---|---|
//! | `direct` | no elevator, on a drive that completes inline |
//! | `depth-1` | the same with one I/O at a time |
//! | `polled` | the same on a drive whose completions are polled for |
//! | `linear`, `striped` | on a mapped disk over two halves of the inline drive's, in chunks of 64 KiB if striped |
//! | an elevator's name | through that, on the inline drive |
//! | a selector's name | on multipath over four inline drives |

use std::io;
use std::sync::Arc;

use anyhow::{Result, bail};
use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::mapper::table::MapKind;
use blkmq_core::request::Request;
use blkmq_core::sched;
use blkmq_core::time::Instant;
use blkmq_drivers::multipath::{MultipathConfig, MultipathDevice, PathDevice, Selector};
use blkmq_drivers::null::{Completion, NullConfig, NullDevice};
use blkmq_host::device::{Allocation, Extent};
use blkmq_host::device::{Device, Polling};
use blkmq_host::ring::RingHandle;

use super::device::{self, NULL_BYTES, Opened};
use super::load::{Job, Load};

/// Does `count` I/Os (or up to one batch more) in the way of this name, and returns their number. A
/// parked thread remains.
///
/// # Errors
/// If there is no such way, the engine does not start or an I/O ends with an error.
pub fn run(way: &str, count: u64) -> Result<u64> {
    let (mut drive, mut elevator, mut map, mut depth) = (null(None)?, sched::NONE, None, DEPTH);
    match way {
        "direct" => {}
        "depth-1" => depth = 1,
        "polled" => drive = null(Some(Completion::Deferred))?,
        "linear" => map = Some(MapKind::Linear),
        "striped" => map = Some(MapKind::Striped { chunk: CHUNK }),
        _ if let Some(kind) = sched::Registry::default().get(way) => elevator = kind,
        _ if let Ok(selector) = way.parse() => drive = multipath(selector)?,
        _ => bail!("no way is named {way}"),
    }
    let opened = Opened {
        drive: Arc::new(ParkedReactor(drive)),
        size: NULL_BYTES,
        block_size: 512,
        read_only: true,
        merges: true,
        map,
    };
    let engine = device::start(opened, elevator, 1, depth)?;
    let job = Job {
        op: Op::Read,
        block_bytes: 4096,
        depth,
        random: true,
        sample_every: 1,
    };
    let disk = device::loaded(&engine, 0)?;
    let done = Load::new(engine.attach()?, &disk, job, 0).run_count(count)?;
    // A shutdown would wait for the parked reactor.
    std::mem::forget(engine);
    Ok(done)
}

fn null(completion: Option<Completion>) -> Result<Arc<dyn Device>> {
    let config = NullConfig {
        completion,
        poll_queues: if completion.is_some() {
            u16::from(u8::MAX >> 1)
        } else {
            0
        },
        ..NullConfig::bare()
    };
    Ok(Arc::new(NullDevice::new(config, &[NULL_BYTES])?))
}

fn multipath(selector: Selector) -> Result<Arc<dyn Device>> {
    let path = |number: usize| Ok(PathDevice::new(format!("p{number}"), null(None)?, NULL_BYTES));
    let paths = (0..PATHS).map(path).collect::<Result<_>>()?;
    let config = MultipathConfig {
        selector,
        ..MultipathConfig::default()
    };
    let drive = MultipathDevice::new("bench", &config, paths, DEPTH_MAX)?;
    Ok(Arc::new(drive))
}

/// A drive whose first hardware context parks its thread for ever.
///
/// The engine's own reactor has no work here, and would block in its ring. Callgrind runs one
/// thread at a time and does not know that waiting in a ring blocks, so the reactor would keep all
/// other threads from running. It knows parking.
pub(super) struct ParkedReactor(pub(super) Arc<dyn Device>);

impl Device for ParkedReactor {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn polling(&self) -> Polling {
        self.0.polling()
    }

    fn open_hctx(&self, ring: &RingHandle, hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        if hctx == HctxId(0) {
            return Ok(Box::new(Parked));
        }
        self.0.open_hctx(ring, hctx)
    }
}

impl Allocation for ParkedReactor {
    fn extents(
        &self,
        disk: DiskId,
        offset: u64,
        len: u64,
        max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        self.0.extents(disk, offset, len, max, out)
    }
}

/// The driver side of the parked reactor, which is asked for its next event before the reactor
/// first blocks.
struct Parked;

impl HctxDriver for Parked {
    fn issue(&mut self, _rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        Issued::Done(Status::Io)
    }

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}

    fn next_event(&self) -> Option<Instant> {
        loop {
            std::thread::park();
        }
    }
}

const DEPTH: u32 = 64;
const PATHS: usize = 4;
const CHUNK: u64 = 64 << 10;
/// Not less than the tags that the engine gives the queue.
const DEPTH_MAX: u32 = 4096;
