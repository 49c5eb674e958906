//! Traces the steps of requests: each reactor records the events of its queues in a ring of its own. A
//! process that has the memory of the trace reads the rings. Threads of library users record nothing.

mod memory;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::ids::ReactorId;
use blkmq_core::trace::{Receiver, Sender};

use super::Control;
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::{Order, Shared};

/// A running trace; it ends when this is dropped.
pub struct Trace {
    shared: Arc<Shared>,
    memory: File,
}

impl Control {
    /// Starts a trace: from now on each reactor records the steps of all requests in its ring in [`Trace::memory`]. A full ring
    /// drops events and counts them. For any thread but a reactor's.
    ///
    /// # Errors
    /// Another trace is running, or there is not enough memory.
    pub fn trace(&self) -> Result<Trace, Error> {
        // Relaxed: a new trace reads nothing that the one before wrote.
        if self.shared.is_traced.swap(true, Ordering::Relaxed) {
            return Err(Error::Busy("a trace is being taken already".to_owned()));
        }
        let made = memory::make(self.shared.inboxes.len());
        let (memory, rings) = made.map_err(|cause| {
            self.shared.is_traced.store(false, Ordering::Relaxed);
            Error::Os {
                what: "memory for a trace".to_owned(),
                cause,
            }
        })?;
        let trace = Trace {
            shared: Arc::clone(&self.shared),
            memory,
        };
        for (id, ring) in trace.ids().zip(rings) {
            let sender = Sender::new(ring);
            trace.change(id, move |core| core.set_trace(Some(sender)));
        }
        Ok(trace)
    }
}

/// Maps the rings in [`Trace::memory`] of an engine in this process or another one.
///
/// # Errors
/// `memory` is not the memory of a trace of this version, or cannot be mapped.
pub fn receivers(memory: &File, reactors: usize) -> io::Result<Vec<Receiver>> {
    let rings = memory::map(memory, reactors)?;
    Ok(rings.into_iter().map(Receiver::new).collect())
}

impl Trace {
    /// The number of reactors, and so of rings.
    pub fn reactors(&self) -> usize {
        self.shared.inboxes.len()
    }

    /// The descriptor for [`receivers`].
    pub fn memory(&self) -> BorrowedFd<'_> {
        self.memory.as_fd()
    }

    fn ids(&self) -> impl Iterator<Item = ReactorId> + use<> {
        (0..self.reactors() as u16).map(ReactorId)
    }

    fn change(&self, reactor: ReactorId, change: impl FnOnce(&mut ReactorCore) + Send + 'static) {
        self.shared.order(reactor, Order::Change(Box::new(change)));
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        for id in self.ids() {
            self.change(id, |core| core.set_trace(None));
        }
        // A reactor that has not taken that order yet takes the next trace's behind it.
        self.shared.is_traced.store(false, Ordering::Relaxed);
    }
}
