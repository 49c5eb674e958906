//! The buffers of a request for a driver that copies data itself: sinks and sources that cannot outlive
//! the visit.

pub use crate::sys::{Sink, Source, for_each_sink, for_each_source};
