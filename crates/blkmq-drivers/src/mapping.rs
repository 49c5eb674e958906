//! Memory that the kernel accesses while a request is under way, in mappings of its own.

mod sys;

pub(crate) use sys::Mapping;
