//! A driver outside of the crate: disks in plain vectors, filled with one byte at first. It has
//! what a driver needs, and no more: an entry for the registry, keys, and a drive.

use std::io;
use std::sync::{Arc, Mutex, PoisonError};

use blkmq_core::bio::{Op, Status};
use blkmq_core::driver::{Done, HctxDriver, Issued};
use blkmq_core::ids::{Cookie, DiskId, HctxId};
use blkmq_core::limits::Limits;
use blkmq_core::queue::TagMode;
use blkmq_core::request::Request;
use blkmq_core::time::Instant;
use blkmq_drivers::driver::{
    Attributes, BLOCK_MIN, DiskRequest, Driver, DriverConfig, Key, OpenDisk, OpenError, Shape, into_disk,
};
use blkmq_drivers::keys::Pairs;
use blkmq_drivers::memory::{for_each_sink, for_each_source};
use blkmq_host::Error;
use blkmq_host::device::{Allocation, Device, Extent};
use blkmq_host::ring::RingHandle;
use blkmq_host::value::{self, ConfigError};

/// The driver's entry for the registry.
pub(crate) static DRIVER: Driver = Driver {
    name: "vector",
    value: "SIZE",
    help: "a vector in memory",
    keys: &[Key {
        name: "fill",
        default: "0",
        help: "the byte that it is filled with at first",
    }],
    parse,
};

/// A disk as configured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct VectorDisk {
    size: u64,
    fill: u8,
}

fn parse(pairs: &mut Pairs, _request: &DiskRequest<'_>) -> Result<Arc<dyn DriverConfig>, ConfigError> {
    let (size, mut fill) = (pairs.take_size(DRIVER.name)?, 0);
    pairs.set_all(|key, text| {
        if key != "fill" {
            return Err(ConfigError::UnknownKey {
                driver: DRIVER.name,
                key: key.to_owned(),
                known: "fill",
            });
        }
        fill = value::whole(key, text, 0..=255, "a byte, 0 to 255")?;
        Ok(())
    })?;
    Ok(Arc::new(VectorDisk { size, fill }))
}

impl DriverConfig for VectorDisk {
    fn driver(&self) -> &'static str {
        DRIVER.name
    }

    fn describe(&self) -> &'static str {
        "disk in a vector"
    }

    fn open(&self, _attributes: &Attributes) -> Result<Box<dyn OpenDisk>, OpenError> {
        Ok(Box::new(*self))
    }
}

impl OpenDisk for VectorDisk {
    fn driver(&self) -> &'static str {
        DRIVER.name
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.size,
            block_size: BLOCK_MIN,
            read_only: false,
        }
    }

    /// All disks use the same memory, and so share a queue.
    fn device(&self) -> Option<String> {
        Some("vectors".to_owned())
    }

    fn tags(&self) -> TagMode {
        TagMode::PerHctx(16)
    }

    fn join(
        self: Box<Self>,
        _queue: &str,
        others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        _depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        let others = others.into_iter().filter_map(into_disk::<Self>);
        let disks = std::iter::once(self).chain(others);
        let disks = disks.map(|disk| Mutex::new(vec![disk.fill; disk.size as usize]));
        Ok(Arc::new(VectorDevice(disks.collect())))
    }
}

/// The disks of one queue.
#[derive(Clone)]
struct VectorDevice(Arc<[Mutex<Vec<u8>>]>);

impl Device for VectorDevice {
    fn limits(&self) -> Limits {
        Limits::default()
    }

    fn open_hctx(&self, _ring: &RingHandle, _hctx: HctxId) -> io::Result<Box<dyn HctxDriver>> {
        Ok(Box::new(self.clone()))
    }
}

impl Allocation for VectorDevice {
    fn extents(
        &self,
        _disk: DiskId,
        _offset: u64,
        len: u64,
        _max: usize,
        out: &mut Vec<Extent>,
    ) -> io::Result<()> {
        out.push(Extent::data(len));
        Ok(())
    }
}

impl HctxDriver for VectorDevice {
    fn issue(&mut self, rq: &Request, _cookie: Cookie, _last: bool, _now: Instant) -> Issued {
        let disk = &self.0[rq.disk().index()];
        let mut bytes = disk.lock().unwrap_or_else(PoisonError::into_inner);
        let range = rq.offset() as usize..(rq.offset() + rq.len()) as usize;
        let mut at = range.start;
        match rq.op() {
            Op::Read => for_each_sink(rq, |mut sink| {
                let piece = at..at + sink.left();
                at = piece.end;
                sink.put(&bytes[piece]);
            }),
            Op::Write => for_each_source(rq, |mut source| {
                let piece = at..at + source.left();
                at = piece.end;
                source.take(&mut bytes[piece]);
            }),
            Op::Flush => {}
            Op::Discard | Op::WriteZeroes => bytes[range].fill(0),
        }
        Issued::Done(Status::Ok)
    }

    fn reap(&mut self, _now: Instant, _done: &mut Vec<Done>) {}
}
