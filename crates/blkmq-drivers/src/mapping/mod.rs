//! Decides where memory comes from that the kernel accesses while a request is under way: from
//! mappings of its own.

mod sys;

pub(crate) use sys::Mapping;
