//! The fio engine: a shared library that fio loads, in which every job (a thread of fio) attaches to one
//! engine with all the jobs' disks.
//!
//! ```text
//! fio --thread --ioengine=external:target/release/libblkmq_fio.so --disk=null=1T --name=a --rw=randread --iodepth=64
//! ```
//!
//! `sys` implements fio's binary interface and is the only file with `unsafe`; `shared_engine`
//! makes the engine from the options of all jobs; `job` is one job's I/O. See
//! `docs/commands/fio.md`.

mod job;
mod shared_engine;
mod sys;
