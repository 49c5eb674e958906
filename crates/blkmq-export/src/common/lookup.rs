//! The look-up of allocation, which drives are asked for by threads of their own, since a filesystem may take
//! long to look up extents and io_uring has no call for it. One thread at a time asks a drive, so a drive
//! that does not answer does not keep others from being asked. Within a drive's line, groups take turns,
//! however much each has waiting. `connection` passes queries in and is woken when there are answers.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;

use blkmq_core::ids::DiskId;
use blkmq_host::device::{Allocation, Changed, Extent};
use blkmq_host::disk::{Disk, Tenant};
use blkmq_host::service::Waker;

use super::extents::in_blocks;

/// The threads that look up, and the queries that wait. Bounded by the requests that connections
/// may have under way.
#[derive(Debug)]
pub(crate) struct Lookups(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// There is a query, or there will be none any more.
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    queries: Drives<ExtentQuery>,
    threads: usize,
    idle: usize,
    /// A thread was needed and could not be made: those that there are may all wait for drives.
    lacks_thread: bool,
    is_over: bool,
}

/// The queries that wait, for each drive.
#[derive(Debug)]
struct Drives<T> {
    /// Drives that are being asked, or have queries waiting, by number.
    drives: BTreeMap<usize, Line<T>>,
    /// The drive whose turn was last.
    last: usize,
}

/// The queries that wait for a drive.
#[derive(Debug)]
struct Line<T> {
    turns: Turns<T>,
    /// A thread is asking the drive.
    is_asked: bool,
}

/// Lines of groups that take turns.
#[derive(Debug)]
struct Turns<T> {
    lines: BTreeMap<Tenant, VecDeque<T>>,
    /// The group whose turn was last.
    last: Tenant,
}

/// A connection's query.
pub(crate) struct ExtentQuery {
    /// The connection's number for the request.
    pub(crate) slot: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    /// Most extents that the answer may have, of each kind.
    pub(crate) max: usize,
    /// It asks what is allocated.
    pub(crate) has_allocation: bool,
    /// It asks what has changed as these bitmaps say.
    pub(crate) bitmaps: Vec<String>,
    disk: DiskId,
    /// The unit of the answer, in bytes.
    block: u32,
    group: Tenant,
    allocation: Arc<dyn Allocation>,
    replies: Arc<ExtentReplies>,
}

/// Where a connection finds its answers.
#[derive(Debug)]
pub(crate) struct ExtentReplies {
    answers: Mutex<Vec<ExtentReply>>,
    /// Nobody waits for the answers any more: they may be empty.
    is_gone: AtomicBool,
    waker: Waker,
}

/// The extents, for the request of a number.
#[derive(Debug)]
pub(crate) struct ExtentReply {
    pub(crate) slot: u32,
    pub(crate) extents: io::Result<Vec<Extent>>,
    /// What has changed, for each bitmap.
    pub(crate) changed: Vec<Vec<Changed>>,
}

impl Lookups {
    pub(crate) fn new() -> Self {
        Self(Arc::default())
    }

    /// Queues a query; its replies is woken when it is answered.
    pub(crate) fn ask(&self, query: ExtentQuery) {
        let mut state = self.0.lock();
        // The thread that asks this drive continues with the next query.
        if state.queries.push(query.drive(), query.group, query) || state.lacks_thread {
            self.0.call_thread(&mut state);
        }
    }
}

impl Drop for Lookups {
    fn drop(&mut self) {
        self.0.lock().is_over = true;
        self.0.changed.notify_all();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Nothing that can panic runs under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes or starts a thread for a query, if the number of threads allows it.
    fn call_thread(self: &Arc<Self>, state: &mut State) {
        if state.idle > 0 {
            self.changed.notify_one();
        } else if state.threads < THREADS {
            self.add_thread(state);
        }
    }

    fn add_thread(self: &Arc<Self>, state: &mut State) {
        let shared = Arc::clone(self);
        let made = thread::Builder::new()
            .name("lookup".to_owned())
            .spawn(move || shared.serve());
        state.lacks_thread = made.is_err();
        match made {
            Ok(_) => state.threads += 1,
            // A present thread may suffice; the next query tries again, whatever drive it is for.
            Err(_) if state.threads > 0 => {}
            Err(error) => {
                while let Some((drive, query)) = state.queries.next() {
                    state.queries.answered(drive);
                    let error = io::Error::new(error.kind(), "there can be no thread for it");
                    query.answer(Err(error), Vec::new());
                }
            }
        }
    }

    /// Answers queries until there will be none.
    fn serve(self: &Arc<Self>) {
        give_way();
        let mut asked = None;
        while let Some((drive, query)) = self.wait_for_query(asked) {
            asked = Some(drive);
            let (mut extents, mut changed) = (Vec::new(), Vec::new());
            let found = if query.replies.is_gone.load(Ordering::Relaxed) {
                Ok(())
            } else {
                // A panic would leave the drive asked, and its connections waiting, for ever.
                // Nothing of ours is half-changed then: the extents are dropped.
                catch_unwind(AssertUnwindSafe(|| query.look_up(&mut extents, &mut changed)))
                    .unwrap_or_else(|_| Err(io::Error::other("the look-up panicked")))
            };
            query.answer(found.map(|()| extents), changed);
            // Niceness is not enough: a running thread keeps the processor for a slice of some
            // milliseconds, even if another one wakes.
            thread::yield_now();
        }
    }

    /// Waits for a query, and returns it with its drive; the drive `asked` before has answered.
    /// `None` if this thread is to end.
    fn wait_for_query(self: &Arc<Self>, asked: Option<usize>) -> Option<(usize, ExtentQuery)> {
        let mut state = self.lock();
        if let Some(drive) = asked {
            state.queries.answered(drive);
        }
        loop {
            if let Some(next) = state.queries.next() {
                // A thread that was woken for two drives would take one query.
                if state.queries.first_free().is_some() {
                    self.call_thread(&mut state);
                }
                return Some(next);
            }
            if state.is_over || state.idle == THREADS_IDLE {
                state.threads -= 1;
                return None;
            }
            state.idle += 1;
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.idle -= 1;
        }
    }
}

impl<T> Drives<T> {
    /// Returns whether it is the first query for this drive.
    fn push(&mut self, drive: usize, group: Tenant, one: T) -> bool {
        let mut is_first = false;
        let line = self.drives.entry(drive).or_insert_with(|| {
            is_first = true;
            Line {
                turns: Turns::default(),
                is_asked: false,
            }
        });
        line.turns.push(group, one);
        is_first
    }

    /// The next drive with queries that no thread asks.
    fn first_free(&self) -> Option<usize> {
        let behind = self.last.wrapping_add(1);
        let all = self.drives.range(behind..).chain(self.drives.range(..behind));
        all.filter(|(_, line)| !line.is_asked)
            .map(|(&drive, _)| drive)
            .next()
    }

    /// The next query for that drive, and the drive's number.
    fn next(&mut self) -> Option<(usize, T)> {
        let drive = self.first_free()?;
        let line = self.drives.get_mut(&drive)?;
        let one = line.turns.next()?;
        line.is_asked = true;
        self.last = drive;
        Some((drive, one))
    }

    /// No thread asks this drive any more.
    fn answered(&mut self, drive: usize) {
        if let Entry::Occupied(mut line) = self.drives.entry(drive) {
            line.get_mut().is_asked = false;
            if line.get().turns.lines.is_empty() {
                line.remove();
            }
        }
    }
}

impl<T> Default for Drives<T> {
    fn default() -> Self {
        Self {
            drives: BTreeMap::new(),
            last: usize::MAX,
        }
    }
}

impl<T> Turns<T> {
    fn push(&mut self, group: Tenant, one: T) {
        self.lines.entry(group).or_default().push_back(one);
    }

    /// The first in the line of the next group.
    fn next(&mut self) -> Option<T> {
        let behind = Tenant(self.last.0.wrapping_add(1));
        let found = match self.lines.range_mut(behind..).next() {
            None => self.lines.iter_mut().next(),
            found => found,
        };
        let (&group, line) = found?;
        let one = line.pop_front();
        if line.is_empty() {
            self.lines.remove(&group);
        }
        self.last = group;
        one
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self {
            lines: BTreeMap::new(),
            last: Tenant(u32::MAX),
        }
    }
}

impl ExtentQuery {
    /// Asks for the extents of a range of a disk.
    pub(crate) fn new(
        disk: &Disk,
        slot: u32,
        range: (u64, u64),
        max: usize,
        replies: &Arc<ExtentReplies>,
    ) -> Self {
        Self {
            slot,
            offset: range.0,
            len: range.1,
            max,
            has_allocation: true,
            bitmaps: Vec::new(),
            disk: disk.id,
            block: disk.block_size,
            group: disk.tenant,
            allocation: Arc::clone(&disk.allocation),
            replies: Arc::clone(replies),
        }
    }

    /// The drive, as a number: the address of the object that is asked, which stays as long as a
    /// query is here.
    fn drive(&self) -> usize {
        Arc::as_ptr(&self.allocation).addr()
    }

    fn look_up(&self, extents: &mut Vec<Extent>, changed: &mut Vec<Vec<Changed>>) -> io::Result<()> {
        let Self { offset, len, max, .. } = *self;
        let end = offset.saturating_add(len);
        if self.has_allocation {
            self.allocation.extents(self.disk, offset, len, max, extents)?;
            *extents = in_blocks(extents, offset, end, self.block);
        }
        for name in &self.bitmaps {
            let mut runs = Vec::new();
            let found = self
                .allocation
                .changed(self.disk, name, offset..end, max, &mut runs);
            found.map_err(|error| io::Error::new(error.kind(), format!("bitmap {name}: {error}")))?;
            changed.push(runs);
        }
        Ok(())
    }

    fn answer(self, extents: io::Result<Vec<Extent>>, changed: Vec<Vec<Changed>>) {
        let answer = ExtentReply {
            slot: self.slot,
            extents,
            changed,
        };
        let is_first = {
            let mut answers = self.replies.lock();
            answers.push(answer);
            answers.len() == 1
        };
        if is_first {
            self.replies.waker.wake();
        }
    }
}

impl ExtentReplies {
    pub(crate) fn new(waker: Waker) -> Self {
        Self {
            answers: Mutex::default(),
            is_gone: AtomicBool::new(false),
            waker,
        }
    }

    /// Takes the answers that have arrived. Queries that were begun are answered even if nobody
    /// waits any more.
    pub(crate) fn take(&self) -> Vec<ExtentReply> {
        std::mem::take(&mut *self.lock())
    }

    /// The client is gone: waiting queries are not looked up.
    pub(crate) fn give_up(&self) {
        // Relaxed: reading it late costs one look-up.
        self.is_gone.store(true, Ordering::Relaxed);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<ExtentReply>> {
        self.answers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for ExtentQuery {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "ExtentQuery about {} bytes at {} of disk {}",
            self.len, self.offset, self.disk
        )
    }
}

/// Lowers the priority of these threads below the threads that serve. If the system refuses, they
/// share as usual.
pub(crate) fn give_way() {
    let _ = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICENESS);
}

/// Most threads: as many drives may hang before others are delayed.
const THREADS: usize = 16;
/// Threads that stay without queries.
const THREADS_IDLE: usize = 2;
/// Niceness of these threads, above that of the threads that serve.
const NICENESS: i32 = 10;

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use blkmq_core::bio::Bio;
    use blkmq_core::ids::ReactorId;
    use blkmq_core::time::Nanos;
    use blkmq_host::engine::{Engine, EngineConfig};
    use blkmq_host::ring::Completion;
    use blkmq_host::service::{Cx, Service};

    use super::*;

    #[test]
    fn drive_whose_look_up_panics_costs_an_answer_and_is_asked_again() {
        let engine = Engine::start(EngineConfig::default()).unwrap();
        let (wakes, woken) = mpsc::channel();
        let is_over = false;
        engine.add_service(ReactorId(0), Box::new(move || Box::new(Woken { wakes, is_over })));
        let replies = Arc::new(ExtentReplies::new(woken.recv().unwrap().expect("its waker")));
        let allocation: Arc<dyn Allocation> = Arc::new(PanicsAtZero);
        let lookups = Lookups::new();
        let mut answers = Vec::new();
        for offset in [0, 512] {
            lookups.ask(ExtentQuery {
                slot: 0,
                offset,
                len: 512,
                max: 1,
                has_allocation: true,
                bitmaps: Vec::new(),
                disk: DiskId(0),
                block: 512,
                group: Tenant(0),
                allocation: Arc::clone(&allocation),
                replies: Arc::clone(&replies),
            });
            let answered = woken.recv_timeout(std::time::Duration::from_secs(20));
            assert!(answered.is_ok(), "no answer about {offset}");
            answers.extend(replies.take().into_iter().map(|answer| answer.extents.is_ok()));
        }
        assert_eq!(answers, [false, true]);
        drop(replies);
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    }

    struct PanicsAtZero;

    impl Allocation for PanicsAtZero {
        fn extents(
            &self,
            _disk: DiskId,
            offset: u64,
            _len: u64,
            _max: usize,
            _out: &mut Vec<Extent>,
        ) -> io::Result<()> {
            assert_ne!(offset, 0, "as the test wants it");
            Ok(())
        }
    }

    /// Sends its waker, then that it was woken.
    struct Woken {
        wakes: mpsc::Sender<Option<Waker>>,
        is_over: bool,
    }

    impl Service for Woken {
        fn start(&mut self, cx: &mut Cx<'_>) {
            self.wakes.send(Some(cx.waker())).unwrap();
        }

        fn on_ring(&mut self, _cx: &mut Cx<'_>, _completed: &[Completion]) {}

        fn on_end(&mut self, _cx: &mut Cx<'_>, _bio: Bio) {}

        fn on_wake(&mut self, _cx: &mut Cx<'_>) {
            self.wakes.send(None).unwrap();
        }

        fn drain(&mut self, _cx: &mut Cx<'_>) {
            self.is_over = true;
        }

        fn is_finished(&self) -> bool {
            self.is_over
        }
    }

    #[test]
    fn drive_is_asked_by_one_thread_at_a_time_and_others_meanwhile() {
        let mut drives = Drives::default();
        for (drive, number) in [(1, 10), (1, 11), (5, 50), (1, 12)] {
            drives.push(drive, Tenant(0), number);
        }
        assert_eq!((drives.next(), drives.next()), (Some((1, 10)), Some((5, 50))));
        assert_eq!(drives.next(), None, "both are asked");
        drives.answered(5);
        assert_eq!(drives.next(), None, "the other one is still asked");
        drives.answered(1);
        assert_eq!(drives.next(), Some((1, 11)));
        drives.answered(1);
        assert_eq!(drives.next(), Some((1, 12)));
        drives.answered(1);
        assert!(drives.drives.is_empty());
    }

    fn order(groups: &[u32]) -> Vec<u32> {
        let mut turns = Turns::default();
        for &group in groups {
            turns.push(Tenant(group), group);
        }
        std::iter::from_fn(|| turns.next()).collect()
    }

    #[test]
    fn groups_take_turns_whatever_each_has_waiting() {
        assert_eq!(order(&[7, 7, 7, 3, 9, 3]), [3, 7, 9, 3, 7, 7]);
    }

    #[test]
    fn group_of_the_largest_number_is_followed_by_the_first() {
        assert_eq!(order(&[u32::MAX, 0, u32::MAX]), [0, u32::MAX, u32::MAX]);
    }
}
