//! Decides how a driver that copies data itself accesses a request's buffers: by sinks and sources
//! that cannot outlive the visit.

pub use crate::sys::{Sink, Source, for_each_sink, for_each_source};
