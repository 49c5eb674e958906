//! Decides what a driver that copies data itself sees of a request's buffers: sinks and sources that cannot outlive the visit.

pub use crate::sys::{Sink, Source, for_each_sink, for_each_source};
