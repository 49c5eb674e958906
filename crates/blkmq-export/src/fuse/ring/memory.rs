//! The memory of the rings of a mount, if it has any, and for how many requests. All of it is there, and
//! touched, before the mount is.

use std::io;
use std::sync::Once;

use super::super::protocol::RING_DATA_BYTES_MAX;
use super::processors;
use crate::common::command_ring::CommandRing;
use crate::common::sys::{Buffer, Chunk};
use crate::common::touched::touched;

/// The state of FUSE over io_uring in the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Switch {
    On,
    Off,
    /// The kernel does not have it.
    Missing,
}

/// The parts of the rings of one mount, allocated by a thread that may block.
pub(in super::super) struct RingMemory(Vec<OfReactor>);

/// The parts of one reactor's ring.
pub(super) struct OfReactor {
    ring: CommandRing,
    /// The processors whose queues it has.
    processors: Vec<usize>,
    chunks: Vec<(u16, Chunk)>,
}

impl Switch {
    /// Asks the kernel.
    fn now() -> Self {
        match std::fs::read_to_string(SWITCH) {
            Ok(text) if matches!(text.trim(), "Y" | "1") => Self::On,
            Ok(_) => Self::Off,
            Err(_) => Self::Missing,
        }
    }
}

impl RingMemory {
    /// The memory where rings are wanted (`Some(true)`), not wanted (`Some(false)`), or used if the
    /// kernel has them enabled. May block.
    ///
    /// # Errors
    /// Why rings cannot be used, if they are wanted.
    pub(in super::super) fn get(
        is_wanted: Option<bool>,
        block_size: u32,
        reactors: usize,
    ) -> Result<Option<Self>, String> {
        static SAID: Once = Once::new();
        let say = |what: &str| SAID.call_once(|| tracing::info!("fuse: {what}; /dev/fuse is used"));
        let failed = |error: io::Error| format!("[fuse] io_uring=on rejected: no rings can be made: {error}");
        match (is_wanted, Switch::now()) {
            (Some(false), _) => Ok(None),
            (Some(true), Switch::On) => Self::new(block_size, reactors).map(Some).map_err(failed),
            (Some(true), Switch::Off) => Err(format!("[fuse] io_uring=on rejected: {SWITCHED_OFF}")),
            (Some(true), Switch::Missing) => Err(format!("[fuse] io_uring=on rejected: {MISSING}")),
            (None, Switch::On) => Ok(Self::new(block_size, reactors)
                .inspect_err(|error| say(&format!("no rings can be made: {error}")))
                .ok()),
            (None, Switch::Off) => {
                say(SWITCHED_OFF);
                Ok(None)
            }
            (None, Switch::Missing) => {
                say(MISSING);
                Ok(None)
            }
        }
    }

    fn new(block_size: u32, reactors: usize) -> io::Result<Self> {
        let queues = queues()?;
        let parts = (0..reactors.min(queues)).map(|reactor| {
            let processors: Vec<usize> = (reactor..queues).step_by(reactors).collect();
            OfReactor::new(processors, entries_of_queue(queues), block_size)
        });
        parts.collect::<io::Result<_>>().map(Self)
    }

    /// By reactor.
    pub(super) fn into_parts(self) -> impl Iterator<Item = OfReactor> {
        self.0.into_iter()
    }
}

impl OfReactor {
    fn new(processors: Vec<usize>, entries_of_queue: usize, block_size: u32) -> io::Result<Self> {
        // A read that is not aligned to blocks covers up to two more than it asks for.
        let bytes = HEADER_BYTES + RING_DATA_BYTES_MAX + 2 * block_size as usize;
        let queues = processors.iter().map(|queue| *queue as u16);
        let entries = queues.flat_map(|queue| std::iter::repeat_n(queue, entries_of_queue));
        let chunks: Vec<_> = entries
            .map(|queue| Ok((queue, touched(bytes)?)))
            .collect::<io::Result<_>>()?;
        Ok(Self {
            ring: CommandRing::new(chunks.len() as u32)?,
            processors,
            chunks,
        })
    }

    /// The ring, the processors, and each entry's queue and memory.
    pub(super) fn into_buffers(self) -> (CommandRing, Vec<usize>, impl Iterator<Item = (u16, Buffer)>) {
        let buffers = self.chunks.into_iter().map(|(queue, chunk)| {
            let region = chunk.into_region();
            let bytes = region.bytes();
            (queue, region.take(bytes).expect("the whole of it"))
        });
        (self.ring, self.processors, buffers)
    }
}

/// The kernel has a queue for each processor that there can be.
fn queues() -> io::Result<usize> {
    let possible = std::fs::read_to_string(POSSIBLE)?;
    let count = processors::count(&possible).filter(|count| (1..=usize::from(u16::MAX)).contains(count));
    count.ok_or_else(|| io::Error::other(format!("{POSSIBLE} has {possible:?}")))
}

/// A number in all, but at least some for each queue where there are many processors: a queue has
/// at most as many requests under way as entries.
fn entries_of_queue(queues: usize) -> usize {
    (ENTRIES / queues).max(ENTRIES_OF_QUEUE_MIN)
}

/// Bytes before an entry's data, which needs a page of its own for direct I/O.
pub(super) const HEADER_BYTES: usize = 4096;
const ENTRIES: usize = 128;
const ENTRIES_OF_QUEUE_MIN: usize = 8;
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
const POSSIBLE: &str = "/sys/devices/system/cpu/possible";
const SWITCHED_OFF: &str =
    "FUSE over io_uring is switched off in the kernel: echo 1 > /sys/module/fuse/parameters/enable_uring";
const MISSING: &str = "this kernel has no FUSE over io_uring: Linux 6.14 has, with CONFIG_FUSE_IO_URING";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_in_all_or_for_each_processor() {
        assert_eq!(
            (1..=4).map(entries_of_queue).collect::<Vec<_>>(),
            [128, 64, 42, 32]
        );
        assert_eq!(entries_of_queue(16), 8);
        assert_eq!(entries_of_queue(512), 8);
    }

    #[test]
    fn queues_are_dealt_to_reactors_in_turn() {
        let part = OfReactor::new(vec![1, 3], 2, 512).unwrap();
        let (_ring, processors, buffers) = part.into_buffers();
        assert_eq!(processors, [1, 3]);
        let buffers: Vec<_> = buffers.collect();
        assert_eq!(
            buffers.iter().map(|(queue, _)| *queue).collect::<Vec<_>>(),
            [1, 1, 3, 3]
        );
        assert!(
            buffers
                .iter()
                .all(|(_, buffer)| buffer.capacity() >= HEADER_BYTES + RING_DATA_BYTES_MAX)
        );
    }
}
