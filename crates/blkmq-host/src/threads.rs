//! Threads that may do more than the one that asks for them. A thread inherits the filter of system calls of the one
//! that starts it, so a confined reactor has a thread that opens or connects started by another one.

use std::io;
use std::sync::OnceLock;
use std::sync::mpsc::{Sender, channel};
use std::thread::{Builder, JoinHandle};

use crate::engine::control::is_reactor;

/// Starts a thread. On a reactor the [starter](start_starter) does so, if there is one: the reactor waits for the
/// system's call of another thread instead of its own.
///
/// # Errors
/// The thread cannot be started.
pub fn spawn(name: &str, work: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let starter = STARTER.get().filter(|_| is_reactor());
    let Some(starter) = starter else {
        return Builder::new().name(name.to_owned()).spawn(work);
    };
    let (answer, started) = channel();
    let order = Order {
        name: name.to_owned(),
        work: Box::new(work),
        answer,
    };
    let over = |_| io::Error::other("the thread that starts others has ended");
    starter.send(order).map_err(|_| over(()))?;
    started.recv().map_err(|_| over(()))?
}

/// Makes the thread that starts threads for reactors, which inherits what its caller may do. Later calls change
/// nothing.
///
/// # Errors
/// There can be no thread.
pub fn start_starter() -> io::Result<()> {
    if STARTER.get().is_some() {
        return Ok(());
    }
    let (sender, orders) = channel::<Order>();
    let start = move || {
        for Order { name, work, answer } in orders {
            let _ = answer.send(Builder::new().name(name).spawn(work));
        }
    };
    // First: a starter that could not be made is made by a later call.
    Builder::new().name("starter".to_owned()).spawn(start)?;
    // If another call was faster, this sender goes, and its thread ends.
    let _ = STARTER.set(sender);
    Ok(())
}

/// A thread to be started.
struct Order {
    name: String,
    work: Box<dyn FnOnce() + Send>,
    answer: Sender<io::Result<JoinHandle<()>>>,
}

static STARTER: OnceLock<Sender<Order>> = OnceLock::new();

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::thread::{self, current};

    use super::*;
    use crate::engine::control::mark_reactor;

    #[test]
    fn thread_for_a_reactor_is_started_and_named() {
        start_starter().unwrap();
        start_starter().unwrap();
        for on_reactor in [false, true] {
            let (tell, told) = channel();
            let asking = thread::spawn(move || {
                if on_reactor {
                    mark_reactor();
                }
                let work = move || tell.send(current().name().map(str::to_owned)).unwrap();
                spawn("worker", work).unwrap().join().unwrap();
            });
            asking.join().unwrap();
            assert_eq!(told.recv().unwrap().as_deref(), Some("worker"));
        }
    }
}
