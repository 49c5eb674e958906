//! The small parts that threads share: everything in the engine that needs an atomic lives here.
//!
//! `blkmq-core` forbids `unsafe` and builds on these types; nothing here knows of requests, clocks or system calls.
//! Each module decides one question between threads:
//!
//! | module | question it decides |
//! |---|---|
//! | [`spsc`] | how one thread hands items to one other thread |
//! | [`mpsc`] | how many threads hand items to one (a mailbox) |
//! | [`tag_bitmap`] | who owns which tag, and who waits for one |
//! | [`wake_flag`] | whether a sleeping reactor must be woken |
//! | [`run_work`] | whether a hardware context is to be run: now, later, once more, or not at all |
//! | [`gate`] | who may be inside an elevator, and who looks again |
//! | [`epoch_count`] | whether a frozen queue has drained |
//! | [`counter`] | how one thread counts and others read |
//! | [`lent`] | who may say that a driver can use a piece of memory |
//!
//! Every type is model-checked. The models run with
//! `RUSTFLAGS="--cfg loom" LOOM_MAX_PREEMPTIONS=2 cargo test -p blkmq-sync --release --lib loom`; a bound of 3 goes
//! deeper. The protocols that depend on a full fence or on a mark also keep a broken copy in which the model must
//! find the fault, so that a model which cannot fail is noticed.

mod atomic;
pub mod counter;
pub mod epoch_count;
pub mod gate;
pub mod lent;
pub mod mpsc;
mod padded;
pub mod run_work;
pub mod spsc;
pub mod tag_bitmap;
pub mod wake_flag;

pub use counter::Counter;
pub use epoch_count::{FreezeState, UsageShard};
pub use gate::{Gate, GateGuard};
pub use padded::CachePadded;
pub use run_work::{Delay, Kick, RunWork};
pub use tag_bitmap::TagBitmap;
pub use wake_flag::WakeFlag;
