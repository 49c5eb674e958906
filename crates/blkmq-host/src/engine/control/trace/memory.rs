//! The memory of a trace: the engine creates it, and a process that gets its descriptor maps it. The
//! memory holds a ring of [`blkmq_core::trace`] for each reactor, one after the other. Its size is
//! sealed, so no process can truncate it while another one uses it.

mod sys;

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blkmq_sync::shared_ring::{Memory, words_of};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};

use self::sys::Mapping;

/// Creates the rings of so many reactors, and the file that other processes map.
pub(super) fn make(reactors: usize) -> io::Result<(File, Vec<Arc<dyn Memory>>)> {
    let file = memfd_create("blkmq-trace", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    ftruncate(&file, bytes_of(reactors))?;
    fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    let file = File::from(file);
    let rings = map(&file, reactors)?;
    Ok((file, rings))
}

/// Maps the rings of so many reactors.
pub(super) fn map(file: &File, reactors: usize) -> io::Result<Vec<Arc<dyn Memory>>> {
    let (is, should_be) = (fstat(file)?.st_size as u64, bytes_of(reactors));
    if is != should_be {
        let what = format!("it has {is} bytes, not {should_be}: the daemon is of another version");
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let mapping = Arc::new(Mapping::new(file, should_be as usize)?);
    let ring = |number| {
        let mapping = Arc::clone(&mapping);
        Arc::new(Part { mapping, number }) as Arc<dyn Memory>
    };
    Ok((0..reactors).map(ring).collect())
}

/// The ring of one reactor.
struct Part {
    mapping: Arc<Mapping>,
    number: usize,
}

impl Memory for Part {
    #[inline]
    fn words(&self) -> &[AtomicU64] {
        &self.mapping.words()[self.number * RING_WORDS..][..RING_WORDS]
    }
}

fn bytes_of(reactors: usize) -> u64 {
    (reactors * RING_WORDS * size_of::<u64>()) as u64
}

/// Events that a reactor has room for: 20 ms of two million requests a second. They take 4 MiB.
const EVENTS: usize = 1 << 17;
const RING_WORDS: usize = words_of(EVENTS);

#[cfg(test)]
mod tests {
    use blkmq_sync::shared_ring::{Consumer, Producer};

    use super::*;

    #[test]
    fn order_in_one_mapping_is_read_in_another_and_nobody_can_shorten_it() {
        let (file, rings) = make(2).expect("memory");
        let theirs = map(&file, 2).expect("the same memory");
        for (number, (ours, theirs)) in rings.into_iter().zip(theirs).enumerate() {
            let record = [number as u64, 1, 2, 3];
            Producer::new(ours).push(record);
            let mut all = Vec::new();
            let keep = |record| {
                all.push(record);
                Ok::<_, ()>(())
            };
            assert_eq!(Consumer::new(theirs).drain(keep), Ok(1));
            assert_eq!(all, [record]);
        }
        assert!(file.set_len(0).is_err() && file.set_len(1 << 30).is_err());
        assert!(map(&file, 3).is_err(), "rings that are not there");
    }
}
