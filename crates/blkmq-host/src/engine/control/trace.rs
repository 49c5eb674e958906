//! Decides how the steps of requests are traced: each reactor tells all of its queues' into a buffer of its own, which whoever asked for
//! the trace empties. Threads of library users tell nothing.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use blkmq_core::ids::ReactorId;
use blkmq_core::trace::{self, Event, Receiver};

use super::Control;
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::shared::{Order, Shared};

/// A trace that is being taken, until this is dropped.
pub struct Trace {
    shared: Arc<Shared>,
    receivers: Vec<(ReactorId, Receiver)>,
}

impl Control {
    /// Has the steps of all requests told from now on. Each reactor has room for at least `events_min` (48 bytes each), and drops what it
    /// has no room for; so empty it often, by [`Trace::drain`]. For any thread but a reactor's.
    ///
    /// # Errors
    /// If somebody takes a trace already.
    pub fn trace(&self, events_min: usize) -> Result<Trace, Error> {
        // Relaxed: whoever has it set has nothing to see of the one before.
        if self.shared.is_traced.swap(true, Ordering::Relaxed) {
            return Err(Error::Busy("a trace is being taken already".to_owned()));
        }
        let mut trace = Trace {
            shared: Arc::clone(&self.shared),
            receivers: Vec::new(),
        };
        for id in (0..self.shared.inboxes.len() as u16).map(ReactorId) {
            let (sender, receiver) = trace::buffer(events_min);
            trace.receivers.push((id, receiver));
            trace.change(id, move |core| core.set_trace(Some(sender)));
        }
        Ok(trace)
    }
}

impl Trace {
    /// How many reactors tell something.
    pub fn reactors(&self) -> usize {
        self.receivers.len()
    }

    /// Hands over what reactors have told, in the order of each reactor's events. Returns how many events that were.
    pub fn drain(&mut self, mut take: impl FnMut(ReactorId, Event)) -> usize {
        let each = self.receivers.iter_mut();
        each.map(|(id, receiver)| receiver.drain(|event| take(*id, event)))
            .sum()
    }

    /// Hands over how many events found no room since this was asked last, of each reactor that had any.
    pub fn take_dropped(&mut self, mut take: impl FnMut(ReactorId, u64)) {
        for (id, receiver) in &mut self.receivers {
            match receiver.take_dropped() {
                0 => {}
                dropped => take(*id, dropped),
            }
        }
    }

    fn change(&self, reactor: ReactorId, change: impl FnOnce(&mut ReactorCore) + Send + 'static) {
        self.shared.order(reactor, Order::Change(Box::new(change)));
    }
}

impl Drop for Trace {
    fn drop(&mut self) {
        for (id, _) in &self.receivers {
            self.change(*id, |core| core.set_trace(None));
        }
        // A reactor that has not taken that order yet takes the next trace's behind it.
        self.shared.is_traced.store(false, Ordering::Relaxed);
    }
}
