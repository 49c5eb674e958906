//! The record of what is in flight: memory that the front end keeps, in which a [device](super) that comes after a kill
//! finds the requests that it must do again. `inflight` and `packed_inflight` have its contents.

use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use super::super::codec::InflightSpec;
use super::super::config_space::QUEUES_MAX;
use super::super::inflight;
use super::super::sys::{Mapping, Window};
use super::super::virtqueue::Layout;
use super::{Answer, Device, RING_SIZE_MAX, Refusal};

impl Device {
    /// Takes memory that the front end has kept, or was given by [`make`].
    pub(super) fn set_record(&mut self, spec: InflightSpec, fd: &OwnedFd) -> Result<(), Refusal> {
        check_record(&spec)?;
        let bytes = self.layout(spec.queue_size).record_bytes() * u64::from(spec.queues);
        if spec.bytes < bytes {
            return Err(Refusal::Value {
                what: "bytes of the record of what is in flight",
                value: spec.bytes,
                allowed: "too few for its rings",
            });
        }
        let packed = Layout {
            is_packed: true,
            ..self.layout(spec.queue_size)
        };
        // A ring of either kind fits; nobody needs more.
        let most = packed.record_bytes() * u64::from(spec.queues);
        let mapping = Mapping::of_file(fd, spec.offset, spec.bytes.min(most.max(bytes)))?;
        self.inflight = Some((Arc::new(mapping), spec));
        Ok(())
    }

    /// The in-flight record of a ring, if the front end keeps one that has room for it.
    pub(super) fn record(&self, index: usize, layout: Layout) -> Option<Window> {
        let (mapping, spec) = self.inflight.as_ref()?;
        if index >= usize::from(spec.queues) || layout.size > spec.queue_size {
            return None;
        }
        let size = spec.queue_size;
        let bytes = Layout { size, ..layout }.record_bytes() as usize;
        Window::new(mapping, index * bytes, bytes, 8)
    }

    /// Nothing is in flight any more: a record that is given again starts empty.
    pub(super) fn forget_record(&mut self) {
        let Some(queue_size) = self.inflight.as_ref().map(|(_, spec)| spec.queue_size) else {
            return;
        };
        let layout = self.layout(queue_size);
        let records = (0..usize::from(QUEUES_MAX)).map_while(|index| self.record(index, layout));
        records.for_each(|record| inflight::forget(&record));
        self.inflight = None;
    }
}

/// Makes memory for in-flight records, which the front end keeps.
pub(super) fn make(asked: InflightSpec, layout: Layout) -> Result<Answer, Refusal> {
    check_record(&asked)?;
    let bytes = layout.record_bytes() * u64::from(asked.queues);
    let fd = memfd_create("blkmq-inflight", MemfdFlags::CLOEXEC).map_err(io::Error::from)?;
    ftruncate(&fd, bytes).map_err(io::Error::from)?;
    let spec = InflightSpec {
        bytes,
        offset: 0,
        ..asked
    };
    Ok(Answer::Inflight(spec, fd))
}

/// Checks that an in-flight region has room for possible rings only.
fn check_record(spec: &InflightSpec) -> Result<(), Refusal> {
    if !(1..=QUEUES_MAX).contains(&spec.queues) {
        return Err(Refusal::Value {
            what: "rings of the record of what is in flight",
            value: spec.queues.into(),
            allowed: "there are 1 to 64",
        });
    }
    if u32::from(spec.queue_size) > RING_SIZE_MAX {
        return Err(Refusal::Value {
            what: "ring size of the record of what is in flight",
            value: spec.queue_size.into(),
            allowed: "1024 is the largest",
        });
    }
    Ok(())
}
