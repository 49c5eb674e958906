//! The io_uring of one reactor, shared among drivers and doors: each is a client, and completions go to
//! their client. `reactor` and `attach` own the ring, submit and wait; drivers and services push entries
//! through a [`RingClient`].
//!
//! Pushed entries reach the kernel with the next [`RingHandle::submit`] or [`RingHandle::wait`], so that a
//! batch, and at depth 1 even submission and waiting, cost one system call. The ring is made with
//! DEFER_TASKRUN: completions are posted only when its thread enters the kernel and asks for them.
//! [`RingHandle::reap`] does so whenever the kernel's taskrun flag says that there are completions to post.
//!
//! A ring for polled devices ([`RingHandle::new_polled`]) takes only reads and writes. Their completions are
//! not announced: the kernel polls the devices whenever it is entered, so each [`RingHandle::reap`] enters it
//! while entries are in flight.

mod restrict;
mod state;
mod sys;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::rc::Rc;

use blkmq_core::time::Nanos;
use io_uring::{IoUring, cqueue, opcode, squeue, types};

use self::state::{RingState, Wait};

/// A completion of a pushed entry, the only one or one of several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// As given to [`RingClient::push`].
    pub user: u64,
    /// What the operation returned: negative errno on error.
    pub result: i32,
    /// The kernel's `IORING_CQE_F_*`.
    pub flags: u32,
}

impl Completion {
    /// Says whether the same entry will complete again (multishot).
    pub fn has_more(&self) -> bool {
        cqueue::more(self.flags)
    }
}

/// The sizes of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RingConfig {
    /// Entries that can wait for submission, 1 to 32768; the kernel rounds up to a power of two. Further entries
    /// are not lost, but cost a system call. Default 512.
    pub entries: u32,
    /// Completions that can wait to be reaped. The kernel keeps further ones, but slowly. Default 4096.
    pub completions: u32,
    /// Slots for registered files. Default 256.
    pub files: u32,
    /// Largest number of kernel threads (io-wq workers) that carry out this thread's blocking operations: flushes,
    /// discards, I/O through the page cache and on filesystems without asynchronous I/O. There are as many as
    /// operations block at the moment, with 16 KiB of kernel memory each. All drives share them, so a drive that
    /// blocks for long must not use them up. Default 1024, for four drives that do not answer, with 256 requests
    /// each. (The kernel's own default is four for each CPU: one such drive blocked all others.)
    pub workers: u32,
    /// Whether the kernel refuses every operation that no driver and no door of this workspace uses, such as to open
    /// a file or to connect, for as long as the ring exists. Default false: other drivers may need more.
    pub is_restricted: bool,
}

impl Default for RingConfig {
    fn default() -> Self {
        Self {
            entries: 512,
            completions: 4096,
            files: 256,
            workers: 1024,
            is_restricted: false,
        }
    }
}

/// Largest user data of an entry: 48 bits; the other bits name the client.
pub const USER_MAX: u64 = (1 << CLIENT_SHIFT) - 1;

/// A reactor's ring. Cheap to clone; stays on the thread that made it.
#[derive(Clone)]
pub struct RingHandle(Rc<Ring>);

/// One user of a ring: a driver's hardware context or a door.
///
/// A dropped client forgets its completions, but its entries continue in the kernel. Before the drop, drain
/// the client ([`RingClient::in_flight`]), or keep the buffers alive by other means.
pub struct RingClient {
    ring: RingHandle,
    id: u16,
}

struct Ring {
    state: RefCell<RingState>,
    /// Entries pushed whose last completion has not been reaped.
    in_flight: Cell<u32>,
}

#[derive(Default)]
struct ClientState {
    completed: Vec<Completion>,
    /// Entries pushed whose last completion has not been reaped.
    in_flight: u32,
    is_open: bool,
    is_ready: bool,
}

impl RingHandle {
    /// Makes a ring for the calling thread.
    ///
    /// # Errors
    /// The kernel's error: `ENOSYS` or `EPERM` if io_uring is missing or forbidden, `EINVAL` for a
    /// kernel before 6.1 or a size out of range, `ENOMEM` if locked memory is limited.
    pub fn new(config: RingConfig) -> io::Result<Self> {
        Self::make(config, &mut IoUring::builder())
    }

    /// Makes a ring for the calling thread whose completions are found by polling devices (IOPOLL).
    ///
    /// # Errors
    /// As for [`Self::new`].
    pub fn new_polled(config: RingConfig) -> io::Result<Self> {
        Self::make(config, IoUring::builder().setup_iopoll())
    }

    fn make(config: RingConfig, builder: &mut io_uring::Builder) -> io::Result<Self> {
        if config.is_restricted {
            builder.setup_r_disabled();
        }
        let uring = builder
            .setup_cqsize(config.completions.max(config.entries))
            .setup_clamp()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_taskrun_flag()
            .setup_submit_all()
            .build(config.entries)?;
        // Only the workers for files: no entry of ours waits for a peer.
        uring
            .submitter()
            .register_iowq_max_workers(&mut [config.workers, 0])?;
        if config.files > 0 {
            uring.submitter().register_files_sparse(config.files)?;
        }
        if config.is_restricted {
            restrict::restrict(&uring.submitter())?;
        }
        let state = RingState {
            backlog: VecDeque::new(),
            clients: Vec::new(),
            unused: Vec::new(),
            ready: Vec::new(),
            free_files: (0..config.files).rev().collect(),
            uring,
            enters: 0,
        };
        Ok(Self(Rc::new(Ring {
            state: RefCell::new(state),
            in_flight: Cell::new(0),
        })))
    }

    /// Opens a client.
    ///
    /// # Panics
    /// If 65536 clients are open or not yet drained.
    pub fn open_client(&self) -> RingClient {
        let mut state = self.0.state.borrow_mut();
        let id = state.unused.pop().unwrap_or_else(|| {
            let id = u16::try_from(state.clients.len()).expect("fewer than 65536 clients of one ring");
            state.clients.push(ClientState::default());
            id
        });
        state.clients[usize::from(id)].is_open = true;
        RingClient {
            ring: self.clone(),
            id,
        }
    }

    /// Submits all pushed entries to the kernel. Does not wait.
    pub fn submit(&self) {
        let mut state = self.0.state.borrow_mut();
        if state.has_unsubmitted() {
            state.enter(Wait::No);
        }
    }

    /// Says whether pushed entries are not submitted yet.
    pub fn has_unsubmitted(&self) -> bool {
        self.0.state.borrow_mut().has_unsubmitted()
    }

    /// Hands completions to the clients and returns their number. Enters the kernel only if it has announced
    /// completions that it has not posted, or must poll devices.
    pub fn reap(&self) -> usize {
        let mut state = self.0.state.borrow_mut();
        let mut reaped = state.distribute();
        if reaped.completions == 0 && state.must_enter(self.in_flight()) {
            state.enter(Wait::No);
            reaped = state.distribute();
        }
        self.0.in_flight.set(self.0.in_flight.get() - reaped.entries);
        reaped.completions
    }

    /// Says whether [`Self::reap`] would find completions.
    pub fn has_completed(&self) -> bool {
        let mut state = self.0.state.borrow_mut();
        !state.uring.completion().is_empty() || state.must_enter(self.in_flight())
    }

    /// Entries pushed, through all clients, whose last completion has not been reaped.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        self.0.in_flight.get()
    }

    /// Submits pushed entries and blocks, in the same system call, until an entry has completed or `timeout` is
    /// over. Returns at once if there are completions already. [`Self::reap`] hands completions to the clients.
    pub fn wait(&self, timeout: Option<Nanos>) {
        let wait = Wait::Until {
            timeout,
            is_for_io: true,
        };
        self.0.state.borrow_mut().enter(wait);
    }

    /// Like [`Self::wait`], for a reactor that waits for no drive: from Linux 6.15 on, the kernel then does not
    /// count the time as waiting for I/O. Otherwise an idle host would show I/O pressure, since the wake-up event
    /// is always watched.
    pub fn sleep(&self, timeout: Option<Nanos>) {
        let wait = Wait::Until {
            timeout,
            is_for_io: false,
        };
        self.0.state.borrow_mut().enter(wait);
    }

    /// Limits the kernel threads for blocking operations (see [`RingConfig::workers`]) to `workers` from here on.
    /// Existing threads end, all but one, when they have been idle for a while.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn limit_workers(&self, workers: u32) -> io::Result<()> {
        let state = self.0.state.borrow();
        state
            .uring
            .submitter()
            .register_iowq_max_workers(&mut [workers, 0])
    }

    /// Has the kernel add to `event`, an eventfd, whenever it posts completions or defers them. Once for a ring.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn register_event(&self, event: BorrowedFd<'_>) -> io::Result<()> {
        let state = self.0.state.borrow();
        state.uring.submitter().register_eventfd(event.as_raw_fd())
    }

    /// How often the kernel has been entered to submit, reap or wait.
    pub fn enters(&self) -> u64 {
        self.0.state.borrow().enters
    }

    /// Appends the ids of the clients that got completions since the last call.
    pub fn take_ready(&self, into: &mut Vec<u16>) {
        let state = &mut *self.0.state.borrow_mut();
        for id in state.ready.drain(..) {
            state.clients[usize::from(id)].is_ready = false;
            into.push(id);
        }
    }

    /// Registers a file, which saves a reference count per operation. Returns its slot, for `types::Fixed`.
    ///
    /// # Errors
    /// `ENFILE` if all slots are used, or the kernel's error.
    pub fn register_file(&self, fd: RawFd) -> io::Result<u32> {
        let mut state = self.0.state.borrow_mut();
        let slot = state
            .free_files
            .pop()
            .ok_or(io::Error::from_raw_os_error(libc::ENFILE))?;
        let registered = state.uring.submitter().register_files_update(slot, &[fd]);
        if let Err(error) = registered {
            state.free_files.push(slot);
            return Err(error);
        }
        Ok(slot)
    }

    /// Frees a slot of [`Self::register_file`].
    pub fn unregister_file(&self, slot: u32) {
        let mut state = self.0.state.borrow_mut();
        // Emptying a slot that exists cannot fail; if it did, the slot would merely not be used again.
        if state.uring.submitter().register_files_update(slot, &[-1]).is_ok() {
            state.free_files.push(slot);
        }
    }

    fn push(&self, client: u16, entry: squeue::Entry, user: u64) {
        assert!(
            user <= USER_MAX,
            "user data {user:#x} of a ring entry needs more than 48 bits"
        );
        let mut state = self.0.state.borrow_mut();
        let entry = entry.user_data(u64::from(client) << CLIENT_SHIFT | user);
        state.clients[usize::from(client)].in_flight += 1;
        state.queue(entry);
        self.0.in_flight.set(self.0.in_flight.get() + 1);
    }
}

impl RingClient {
    /// The client's number, as [`RingHandle::take_ready`] reports it.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// The ring.
    pub fn ring(&self) -> &RingHandle {
        &self.ring
    }

    /// Appends the completions since the last call.
    pub fn take(&self, into: &mut Vec<Completion>) {
        let mut state = self.ring.0.state.borrow_mut();
        into.append(&mut state.clients[usize::from(self.id)].completed);
    }

    /// Makes room for so many completions between two calls of [`Self::take`]: up to there, none makes a list grow.
    pub fn reserve(&self, completions: usize) {
        let mut state = self.ring.0.state.borrow_mut();
        state.clients[usize::from(self.id)].completed.reserve(completions);
    }

    /// Says whether [`Self::take`] would find completions.
    pub fn has_completed(&self) -> bool {
        let state = self.ring.0.state.borrow();
        !state.clients[usize::from(self.id)].completed.is_empty()
    }

    /// How many entries were pushed whose last completion has not been reaped by the ring.
    pub fn in_flight(&self) -> u32 {
        self.ring.0.state.borrow().clients[usize::from(self.id)].in_flight
    }

    /// Completes once, or again and again, when `fd` becomes ready for `events` (`libc::POLLIN`…).
    pub fn push_poll(&self, fd: RawFd, events: i16, multishot: bool, user: u64) {
        let entry = opcode::PollAdd::new(types::Fd(fd), events as u32).multi(multishot);
        self.ring.push(self.id, entry.build(), user);
    }

    /// Cancels this client's entry with user data `target`; both complete.
    pub fn push_cancel(&self, target: u64, user: u64) {
        let target = u64::from(self.id) << CLIENT_SHIFT | target;
        self.ring
            .push(self.id, opcode::AsyncCancel::new(target).build(), user);
    }

    /// Completes after about a second.
    pub fn push_heartbeat(&self, user: u64) {
        let entry = opcode::Timeout::new(std::ptr::from_ref(&HEARTBEAT_TIMESPEC)).build();
        self.ring.push(self.id, entry, user);
    }

    /// Does nothing and completes.
    pub fn push_nop(&self, user: u64) {
        self.ring.push(self.id, opcode::Nop::new().build(), user);
    }

    /// Does nothing and completes, in a kernel thread for blocking operations, so that there is one.
    pub fn push_nop_for_worker(&self, user: u64) {
        let entry = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
        self.ring.push(self.id, entry, user);
    }
}

impl Drop for RingClient {
    fn drop(&mut self) {
        let mut state = self.ring.0.state.borrow_mut();
        let client = &mut state.clients[usize::from(self.id)];
        client.is_open = false;
        client.completed.clear();
        if client.is_unused() {
            state.unused.push(self.id);
        }
    }
}

impl ClientState {
    /// A client's number is reused when no completion of its former client can come any more.
    fn is_unused(&self) -> bool {
        !self.is_open && self.in_flight == 0
    }
}

/// How often a thread with I/O in flight checks distant alarms.
pub(crate) const HEARTBEAT: Nanos = Nanos::from_secs(1);
/// The same for the kernel, which reads it when the entry is submitted.
static HEARTBEAT_TIMESPEC: types::Timespec = types::Timespec::new().sec(1);

/// Where the client's number begins in an entry's user data.
const CLIENT_SHIFT: u32 = 48;

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(entries: u32) -> RingHandle {
        let config = RingConfig {
            entries,
            ..RingConfig::default()
        };
        RingHandle::new(config).expect("io_uring is available")
    }

    fn completed(client: &RingClient) -> Vec<u64> {
        let mut done = Vec::new();
        client.take(&mut done);
        done.iter().map(|done| done.user).collect()
    }

    #[test]
    fn each_client_gets_its_own_completions() {
        let ring = ring(8);
        let (one, two) = (ring.open_client(), ring.open_client());
        one.push_nop(1);
        two.push_nop(2);
        two.push_nop(USER_MAX);
        ring.wait(None);
        assert_eq!(ring.reap(), 3);
        let mut ready = Vec::new();
        ring.take_ready(&mut ready);
        assert_eq!(ready, [one.id(), two.id()]);
        assert_eq!((completed(&one), completed(&two)), (vec![1], vec![2, USER_MAX]));
        assert_eq!(two.in_flight(), 0);
    }

    #[test]
    fn more_entries_than_the_queue_holds_are_submitted_in_between() {
        let ring = ring(4);
        let client = ring.open_client();
        for user in 0..1000 {
            client.push_nop(user);
        }
        let mut seen = Vec::new();
        while seen.len() < 1000 {
            ring.wait(None);
            ring.reap();
            seen.extend(completed(&client));
        }
        assert_eq!(seen, (0..1000).collect::<Vec<_>>());
        assert!(!ring.has_unsubmitted());
    }

    #[test]
    fn waiting_ends_when_its_time_is_over() {
        let ring = ring(4);
        let before = std::time::Instant::now();
        ring.sleep(Some(Nanos::from_millis(20)));
        assert!(before.elapsed().as_millis() >= 20, "{:?}", before.elapsed());
        assert_eq!(ring.reap(), 0);
    }

    #[test]
    fn number_of_a_dropped_port_is_used_again_only_when_its_entries_are_done() {
        let ring = ring(4);
        let first = ring.open_client();
        let id = first.id();
        first.push_nop(7);
        drop(first);
        let second = ring.open_client();
        assert_ne!(second.id(), id);
        ring.wait(None);
        ring.reap();
        let third = ring.open_client();
        assert_eq!(third.id(), id);
        assert_eq!(completed(&third), []);
    }

    #[test]
    fn numbers_of_ports_are_used_again_however_they_come_and_go() {
        let ring = ring(8);
        let mut open = std::collections::VecDeque::new();
        for round in 0..10_000 {
            let client = ring.open_client();
            assert!(
                open.iter().all(|other: &RingClient| other.id() != client.id()),
                "given out twice"
            );
            if round % 3 == 0 {
                client.push_nop(round);
            }
            open.push_back(client);
            if open.len() == 3 {
                open.pop_front();
            }
            if round % 5 == 0 {
                ring.submit();
                ring.reap();
            }
        }
        let used = ring.0.state.borrow().clients.len();
        assert!(used <= 8, "{used} numbers for 3 clients at a time");
    }

    #[test]
    fn spinning_sees_a_completion_that_the_kernel_has_deferred() {
        let ring = ring(4);
        let client = ring.open_client();
        let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::NONBLOCK).unwrap();
        client.push_poll(std::os::fd::AsRawFd::as_raw_fd(&event), libc::POLLIN, true, 3);
        ring.submit();
        assert_eq!(ring.reap(), 0);
        for _ in 0..3 {
            rustix::io::write(&event, &1u64.to_ne_bytes()).unwrap();
            let mut reaped = 0;
            while reaped == 0 {
                reaped = ring.reap();
            }
            assert_eq!(completed(&client), [3]);
        }
        assert_eq!(client.in_flight(), 1);
    }
}
