//! Decides how the steps of requests are traced: each reactor tells all of its queues' in a ring of its own, which whoever has the
//! memory of the trace empties, here or in another process. Threads of library users tell nothing.

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

/// A trace that is being taken, until this is dropped.
pub struct Trace {
    shared: Arc<Shared>,
    memory: File,
}

impl Control {
    /// Has the steps of all requests told from now on, each reactor's in a ring of its own in [`Trace::memory`]. A reactor drops, and
    /// counts there, what it has no room for. For any thread but a reactor's.
    ///
    /// # Errors
    /// If somebody takes a trace already, or there is no memory.
    pub fn trace(&self) -> Result<Trace, Error> {
        let made = memory::make(self.shared.inboxes.len());
        let (memory, rings) = made.map_err(|source| Error::Os {
            what: "memory for a trace".to_owned(),
            source,
        })?;
        // Relaxed: whoever has it set has nothing to see of the one before.
        if self.shared.is_traced.swap(true, Ordering::Relaxed) {
            return Err(Error::Busy("a trace is being taken already".to_owned()));
        }
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

/// Finds what the reactors tell, in [`Trace::memory`] of an engine in this process or another one.
///
/// # Errors
/// If it is no such memory, or cannot be mapped.
pub fn receivers(memory: &File, reactors: usize) -> io::Result<Vec<Receiver>> {
    let rings = memory::map(memory, reactors)?;
    Ok(rings.into_iter().map(Receiver::new).collect())
}

impl Trace {
    /// How many reactors tell something.
    pub fn reactors(&self) -> usize {
        self.shared.inboxes.len()
    }

    /// What gives [`receivers`] access to what is told.
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
