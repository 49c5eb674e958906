//! An I/O under way at a thread of the engine's: a future for its caller, a promise for `client`, which keeps
//! it.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

use blkmq_core::bio::Status;

use crate::buffer::Buffer;
use crate::error::{IoError, result_of};

/// An I/O that was submitted: a future for any executor, or [`Io::wait`] for a thread that blocks.
///
/// It is under way whether it is polled or not. If it is dropped, the I/O still ends, and its buffer is freed
/// then.
#[must_use = "the buffer and the error of the I/O come from it"]
pub struct Io(Arc<Shared>);

/// The engine's end of an I/O. A drop reports [`Status::Shutdown`].
pub(crate) struct Promise(Option<Receiver>);

/// Who is told of the end.
enum Receiver {
    Io(Arc<Shared>),
    Call(Box<dyn FnOnce(Result<Buffer, IoError>) + Send>),
}

#[derive(Default)]
struct Shared(Mutex<State>);

/// ```text
///     UnderWay ── end ──> Ended ── poll ──> Taken
/// ```
enum State {
    /// Who is woken at the end.
    UnderWay(Option<Waker>),
    Ended(Result<Buffer, IoError>),
    Taken,
}

impl Default for State {
    fn default() -> Self {
        Self::UnderWay(None)
    }
}

impl Io {
    pub(crate) fn new() -> (Self, Promise) {
        let shared = Arc::new(Shared::default());
        (Self(Arc::clone(&shared)), Promise(Some(Receiver::Io(shared))))
    }

    /// Blocks until the I/O has ended, and returns its buffer; one without bytes for operations without data.
    ///
    /// # Errors
    /// The disk's, or [`Status::Shutdown`].
    pub fn wait(mut self) -> Result<Buffer, IoError> {
        let waker = Waker::from(Arc::new(Unpark(thread::current())));
        let mut cx = Context::from_waker(&waker);
        loop {
            match Pin::new(&mut self).poll(&mut cx) {
                Poll::Ready(result) => return result,
                Poll::Pending => thread::park(),
            }
        }
    }
}

impl Future for Io {
    type Output = Result<Buffer, IoError>;

    /// # Panics
    /// If it is polled after it was ready.
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut state = self.0.lock();
        match &mut *state {
            State::UnderWay(waker) => {
                match waker {
                    Some(waker) => waker.clone_from(cx.waker()),
                    None => *waker = Some(cx.waker().clone()),
                }
                Poll::Pending
            }
            State::Ended(_) => match std::mem::replace(&mut *state, State::Taken) {
                State::Ended(result) => Poll::Ready(result),
                _ => unreachable!("just seen"),
            },
            State::Taken => panic!("an I/O is polled again after it has ended"),
        }
    }
}

impl Promise {
    /// One whose end is a call.
    pub(crate) fn calling(end: impl FnOnce(Result<Buffer, IoError>) + Send + 'static) -> Self {
        Self(Some(Receiver::Call(Box::new(end))))
    }

    pub(crate) fn end(mut self, status: Status, buffer: Buffer) {
        self.complete(result_of(status, buffer));
    }

    /// Calls the user's code, on the engine's thread: its panic must not end everybody's I/O.
    fn complete(&mut self, result: Result<Buffer, IoError>) {
        let Some(receiver) = self.0.take() else {
            return;
        };
        let told = catch_unwind(AssertUnwindSafe(|| match receiver {
            Receiver::Io(shared) => shared.end(result),
            Receiver::Call(end) => end(result),
        }));
        if told.is_err() {
            tracing::error!(
                "a waker or a callback of the library's user has panicked; what waits for it may hang"
            );
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.complete(result_of(Status::Shutdown, Buffer::default()));
    }
}

impl Shared {
    fn end(&self, result: Result<Buffer, IoError>) {
        let ended = std::mem::replace(&mut *self.lock(), State::Ended(result));
        if let State::UnderWay(Some(waker)) = ended {
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Io {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self.0.lock() {
            State::UnderWay(_) => "Io under way",
            State::Ended(_) => "Io that has ended",
            State::Taken => "Io that was taken",
        })
    }
}

/// Wakes a thread that waits.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
