//! The measurements behind claims about speed, which anyone can repeat: load, latency, CPU, comparison. The
//! command `blkmq-lab bench` calls [`engine::main`] and [`nbd::main`]; both report through [`report`].
//!
//! Every bench has the same form: it names its points (`case`) and what is measured at them
//! (`side`), visits all of them once per round, so that sides alternate and a drift of the machine
//! affects all equally, and reports medians with spread.

pub mod args;
pub mod doors;
pub mod engine;
pub mod fairness;
pub mod histogram;
pub mod images;
mod interrupt;
pub mod library;
mod loop_device;
pub mod luks;
pub mod nbd;
pub mod observers;
pub mod poll;
pub mod programs;
pub mod rbd;
pub mod replay;
pub mod report;
pub mod rounds;
pub mod run_queue;
pub mod scale;
pub mod single_dispatch;
pub mod stack;
pub mod stats;
pub mod tls;

mod block_device;
mod facts;
mod fio;
mod offsets;
mod on_null;
mod output;
mod plot;
mod progress;
mod server;
mod svg;
mod sys;
mod table;
mod usage;
mod window;

pub use args::BenchArgs;
