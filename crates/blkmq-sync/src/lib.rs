//! The small parts that threads share: everything in the engine that needs an atomic lives here.
//!
//! `blkmq-core` forbids `unsafe` and builds on these types; nothing here knows of requests, clocks or system
//! calls. Each module decides one question between threads:
//!
//! | module | question it decides |
//! |---|---|
//! | [`spsc`] | how one thread hands items to one other thread |
//! | [`shared_ring`] | how one thread hands records to another process |
//! | [`mpsc`] | how many threads hand items to one (a mailbox) |
//! | [`tag_bitmap`] | who owns which tag, and who waits for one |
//! | [`wake_flag`] | whether a sleeping reactor must be woken |
//! | [`run_work`] | whether a hardware context must run: now, later, once more, or not at all |
//! | [`gate`] | who may be inside an elevator, and who looks again |
//! | [`epoch_count`] | whether a frozen queue has drained |
//! | [`counter`] | how one thread counts and others read |
//! | [`prefetch`] | how a line of another core's cache is fetched ahead of its use |
//! | [`lent`] | who may say that a driver can use a piece of memory |
//!
//! Every type is model-checked, with at most two preemptions unless `LOOM_MAX_PREEMPTIONS` says otherwise:
//! `RUSTFLAGS="--cfg loom" cargo test -p blkmq-sync --release --lib loom`. Each protocol that depends on a
//! fence or on a mark also has a faulty version in which the model must find the fault, so that a model that
//! cannot fail is noticed. `cargo run --release -p blkmq-sync --example cost` prints the cost of each
//! operation.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod atomic;
mod barrier;
pub mod counter;
pub mod epoch_count;
pub mod gate;
pub mod lent;
#[cfg(all(test, loom))]
mod model;
pub mod mpsc;
mod padded;
pub mod prefetch;
mod published;
pub mod run_work;
pub mod shared_ring;
pub mod spsc;
pub mod tag_bitmap;
pub mod wake_flag;

pub use counter::Counter;
pub use epoch_count::{FreezeState, UsageShard};
pub use gate::{Gate, GateGuard};
pub use padded::CachePadded;
pub use published::Published;
pub use run_work::{Delay, Kick, RunWork};
pub use tag_bitmap::TagBitmap;
pub use wake_flag::WakeFlag;
