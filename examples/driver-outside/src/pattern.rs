//! A driver: disks whose blocks of 512 bytes hold their own numbers, again and again. It has what a driver needs, and
//! no more: an entry for the registry, a disk as configured, a device, and its hardware contexts.

use std::io;
use std::sync::Arc;

use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::queue::TagMode;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_drivers::driver::{Attributes, DiskRequest, Driver, DriverConfig, OpenDisk, OpenError, Shape};
use blkmq_drivers::keys::Pairs;
use blkmq_drivers::memory::for_each_sink;
use blkmq_host::Error;
use blkmq_host::device::{Allocation, Device, Extent};
use blkmq_host::ring::RingHandle;
use blkmq_host::value::ConfigError;

/// The driver's entry for the registry.
pub(crate) static DRIVER: Driver = Driver {
    name: "pattern",
    value: "SIZE",
    help: "blocks that hold their own numbers; read-only",
    keys: &[],
    parse: |pairs: &mut Pairs, _: &DiskRequest<'_>| -> Result<Arc<dyn DriverConfig>, ConfigError> {
        Ok(Arc::new(Pattern(pairs.take_size(DRIVER.name)?)))
    },
};

/// A disk of so many bytes; open, it is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pattern(u64);

impl DriverConfig for Pattern {
    fn driver(&self) -> &'static str {
        DRIVER.name
    }

    fn describe(&self) -> &'static str {
        "numbered blocks"
    }

    fn open(&self, _attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        Ok(Box::new(*self))
    }
}

impl OpenDisk for Pattern {
    fn driver(&self) -> &'static str {
        DRIVER.name
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.0,
            block_size: BLOCK as u32,
            read_only: true,
        }
    }

    /// Each disk has a queue of its own: they share nothing.
    fn device(&self) -> Option<String> {
        None
    }

    fn tags(&self) -> TagMode {
        TagMode::PerHctx(16)
    }

    fn join(
        self: Box<Self>,
        _queue: &str,
        _others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        _depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        Ok(Arc::new(*self))
    }
}

impl Device for Pattern {
    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn open_hctx(&self, _ring: &RingHandle, _hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(*self))
    }
}

impl Allocation for Pattern {
    fn extents(&self, _: DiskId, _: u64, len: u64, _: usize, out: &mut Vec<Extent>) -> io::Result<()> {
        out.push(Extent::data(len));
        Ok(())
    }
}

impl HctxDriver for Pattern {
    fn issue(&mut self, rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        if rq.op() == Op::Read {
            let first = rq.offset() / BLOCK;
            let numbers = (first..first + rq.len() / BLOCK).flat_map(|block| [block; BLOCK as usize / 8]);
            let content: Vec<u8> = numbers.flat_map(u64::to_le_bytes).collect();
            let mut left = &content[..];
            for_each_sink(rq, |mut sink| {
                let (now, later) = left.split_at(sink.left());
                sink.put(now);
                left = later;
            });
        }
        Issued::Done(Status::Ok)
    }

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}
}

const BLOCK: u64 = 512;
