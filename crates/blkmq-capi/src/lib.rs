//! The C interface of the library: `include/blkmq.h` declares what [`sys`] defines, and `blkmq_engine` does.
//!
//! Every function catches panics, checks its arguments as far as C allows, and reports a [`Code`]; the thread's
//! last text says more. Nothing here has rules of its own.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod code;
mod failure;
mod json;
pub mod sys;

pub use code::Code;
