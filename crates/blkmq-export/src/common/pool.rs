//! The pool of regions that no request needs: they are kept for later requests of any connection, so that
//! under load nothing is mapped and unmapped. Mapping for each request of 32 MiB takes milliseconds, and
//! threads that serve wait for each other meanwhile: all mappings of a process share one lock.
//!
//! `Trimmer`, a service of one reactor, gives regions that were not needed for half a second back
//! to the system, a few at a time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use blkmq_core::bio::Bio;
use blkmq_core::time::Nanos;
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service, Waker};

use super::memory::MemoryBudget;
use super::sys::Chunk;

/// Regions that are free.
#[derive(Debug, Default)]
pub(crate) struct Pool {
    /// Memory that the regions take of the system: their touched pages.
    bytes: AtomicU64,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    chunks: Vec<Chunk>,
    /// The fewest regions in this period: that many were not needed in it.
    fewest: usize,
    /// How many more of those that were not needed in the last period are to be given back.
    surplus: usize,
    trimmer: Option<Waker>,
    /// The trimmer knows that there are regions.
    is_watched: bool,
}

impl Pool {
    /// Memory that the regions take of the system, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        // Relaxed: reading it late delays a trim a little.
        self.bytes.load(Ordering::Relaxed)
    }

    /// Takes as many as there are, at most `most`.
    pub(crate) fn take(&self, most: usize) -> Vec<Chunk> {
        if most == 0 || self.bytes() == 0 {
            return Vec::new();
        }
        let mut state = self.lock();
        let left = state.chunks.len().saturating_sub(most);
        self.split_off(&mut state, left)
    }

    /// Keeps some.
    pub(crate) fn put(&self, chunks: Vec<Chunk>) {
        let mut state = self.lock();
        // Relaxed: changed only under the lock.
        self.bytes.fetch_add(bytes_of(&chunks), Ordering::Relaxed);
        state.chunks.extend(chunks);
        let is_news = !state.chunks.is_empty() && !std::mem::replace(&mut state.is_watched, true);
        let trimmer = state.trimmer.clone().filter(|_| is_news);
        drop(state);
        if let Some(trimmer) = trimmer {
            trimmer.wake();
        }
    }

    /// Gives back some of what was not needed in the last period; when that is done, the next
    /// period begins. Returns when to trim again, if any regions are left.
    fn trim(&self) -> Option<Nanos> {
        let mut state = self.lock();
        if state.surplus == 0 {
            let all = state.chunks.len();
            state.surplus = std::mem::replace(&mut state.fewest, all);
        }
        let going = state.surplus.min(TRIMMED_AT_ONCE).min(state.chunks.len());
        let left = state.chunks.len() - going;
        state.surplus = if left == 0 { 0 } else { state.surplus - going };
        state.is_watched = left > 0;
        let pause = if state.surplus == 0 { PERIOD } else { PAUSE };
        let going = self.split_off(&mut state, left);
        drop(state);
        // Unmapped with the lock released.
        drop(going);
        (left > 0).then_some(pause)
    }

    fn split_off(&self, state: &mut State, left: usize) -> Vec<Chunk> {
        let chunks = state.chunks.split_off(left);
        state.fewest = state.fewest.min(left);
        self.bytes.fetch_sub(bytes_of(&chunks), Ordering::Relaxed);
        chunks
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn bytes_of(chunks: &[Chunk]) -> u64 {
    chunks.iter().map(|chunk| chunk.touched_bytes() as u64).sum()
}

/// Gives regions back that nobody needs.
pub(crate) struct Trimmer {
    memory: Arc<MemoryBudget>,
    is_over: bool,
}

impl Trimmer {
    pub(crate) fn new(memory: Arc<MemoryBudget>) -> Self {
        Self {
            memory,
            is_over: false,
        }
    }
}

impl Service for Trimmer {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.memory.pool().lock().trimmer = Some(cx.waker());
        cx.set_timer(cx.now() + PERIOD);
    }

    fn on_wake(&mut self, cx: &mut Cx<'_>) {
        cx.set_timer(cx.now() + PERIOD);
    }

    fn on_timer(&mut self, cx: &mut Cx<'_>) {
        if let Some(pause) = self.memory.pool().trim() {
            cx.set_timer(cx.now() + pause);
        }
    }

    fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

    fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

    fn drain(&mut self, cx: &mut Cx<'_>) {
        cx.clear_timer();
        self.is_over = true;
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }
}

/// How long a region is kept that is not needed.
const PERIOD: Nanos = Nanos::from_millis(500);
/// Regions unmapped in one turn, and the pause after it for others: unmapping one takes 20 to 50
/// µs.
const TRIMMED_AT_ONCE: usize = 8;
const PAUSE: Nanos = Nanos::from_millis(2);

#[cfg(test)]
mod tests {
    use super::super::sys::Region;
    use super::*;

    const CHUNK: usize = 8192;

    fn chunks(count: usize) -> Vec<Chunk> {
        let chunk = || {
            let region = Region::new(CHUNK).unwrap();
            drop(region.take(CHUNK).unwrap());
            region.into_chunk().unwrap()
        };
        (0..count).map(|_| chunk()).collect()
    }

    fn count(pool: &Pool) -> usize {
        assert_eq!(pool.bytes() as usize, pool.lock().chunks.len() * CHUNK);
        pool.lock().chunks.len()
    }

    #[test]
    fn memory_unneeded_for_a_period_goes_back_little_by_little() {
        let pool = Pool::default();
        pool.put(chunks(100));
        assert_eq!(
            (pool.trim(), count(&pool)),
            (Some(PERIOD), 100),
            "a period begins"
        );
        // Thirty of them are needed meanwhile.
        let needed = pool.take(30);
        pool.put(needed);
        let mut turns = 0;
        while pool.trim() == Some(PAUSE) {
            turns += 1;
        }
        assert_eq!((turns, count(&pool)), (70 / TRIMMED_AT_ONCE, 30));
        while pool.trim().is_some() {}
        assert_eq!(count(&pool), 0);
        assert_eq!(pool.take(5).len(), 0);
    }
}
