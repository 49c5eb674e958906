//! The multi-queue block layer as a library: disks with a scheduler that shares their drives among groups by
//! weight, in one's own process and without a daemon.
//!
//! ```
//! use blkmq_engine::{Buffer, Engine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::env::temp_dir().join("image.raw");
//! # let path = path.with_file_name(format!("blkmq-doc-{}.raw", std::process::id()));
//! std::fs::write(&path, vec![7; 1 << 20])?;
//! // A file that two tenants share, one with three times the weight of the other.
//! let engine = Engine::builder()
//!     .disk(&format!("name=image,file={}", path.display()))
//!     .group("/batch,weight=100")
//!     .group("/live,weight=300")
//!     .scheduler("bfq")
//!     .start()?;
//! let live = engine.disk_in_group("image", "/live")?;
//!
//! // This thread takes part: it submits, issues and reaps by itself.
//! let mut attached = engine.attach()?;
//! let mut block = attached.read(&live, 8192, Buffer::new(4096))?;
//! assert!(block.iter().all(|&byte| byte == 7));
//! block.fill(8);
//! attached.write(&live, 8192, block)?;
//! attached.flush(&live)?;
//! println!("{:?}", engine.statistics("/live")?.read);
//! # assert_eq!(engine.statistics("/live")?.read.bytes, 4096);
//! # std::fs::remove_file(&path)?;
//! # Ok(())
//! # }
//! ```
//!
//! In `Cargo.toml` it is a path, `blkmq-engine = { path = "blkmq/crates/blkmq-engine" }`. A disk is written as for
//! `blkmq serve --disk`: `name=NAME`, where it lies (`file=PATH`, which exists and has whole blocks, `qcow2=PATH`,
//! `ram=SIZE`, `null=SIZE`, `nbd=URI`, `rbd=POOL/IMAGE`; or on parts of other disks, `linear=DISK:OFFSET:LENGTH`; or encrypted on one, `luks=DISK`), and
//! keys such as `read_only=on` and `group=/batch`, to which its I/O is accounted otherwise. Disks in files of one drive
//! share a queue, and so their scheduler; only `bfq` shares by weight. Offsets and lengths are multiples of
//! [`Disk::block_size`].
//!
//! Each thread that does I/O by itself attaches. To keep a drive busy, it [submits](Attached::submit) many bios, each
//! with a number of its own, and [waits](Attached::wait) for their ends, which come in any order:
//!
//! ```
//! use blkmq_engine::{Bio, Buffer, Engine, Error};
//!
//! /// A tenant, on a thread of its own: reads all of a disk with 32 reads in flight.
//! fn read_all(engine: &Engine, disk: &str, group: &str) -> Result<(), Error> {
//!     let disk = engine.disk_in_group(disk, group)?;
//!     let mut attached = engine.attach()?;
//!     let mut offsets = (0..disk.size()).step_by(4096);
//!     for offset in offsets.by_ref().take(32) {
//!         let read = Bio::read(offset, Buffer::new(4096));
//!         attached.submit(&disk, read, offset).expect("room for 32 reads");
//!     }
//!     let mut ended = Vec::new();
//!     // Nothing ends when nothing is under way any more.
//!     while attached.wait(&mut ended, None) > 0 {
//!         for read in ended.drain(..) {
//!             println!("at {}: {:?}", read.cookie, read.status);
//!             let block = read.into_result()?;
//!             // The bytes are in `block`, which then serves for the next read.
//!             if let Some(next) = offsets.next() {
//!                 attached.submit(&disk, Bio::read(next, block), next).expect("one has ended");
//!             }
//!         }
//!     }
//!     Ok(())
//! }
//! # let engine = Engine::builder().disk("name=image,ram=1M").group("/batch").group("/live").start().unwrap();
//! # std::thread::scope(|scope| {
//! #     for group in ["/batch", "/live"] {
//! #         let engine = &engine;
//! #         scope.spawn(move || read_all(engine, "image", group).unwrap());
//! #     }
//! # });
//! # assert_eq!(engine.statistics("/live").unwrap().read.ios, 256);
//! ```
//!
//! Threads that do not attach hand their I/O to one of the engine's, and wait or await its end:
//!
//! ```
//! # async fn copy(disk: blkmq_engine::Disk) -> Result<(), blkmq_engine::IoError> {
//! let block = disk.read(0, blkmq_engine::Buffer::new(4096)).await?;
//! disk.write(4096, block).await?;
//! disk.flush().await?;
//! # Ok(())
//! # }
//! # let engine = blkmq_engine::Engine::builder().disk("name=d,ram=1M").start().unwrap();
//! # let mut task = std::pin::pin!(copy(engine.disk("d").unwrap()));
//! # let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
//! # while task.as_mut().poll(&mut cx)?.is_pending() {}
//! # Ok::<(), blkmq_engine::IoError>(())
//! ```
//!
//! An encrypted disk lies on another one, whose header `cryptsetup luksFormat` has written; its passphrase is in a file
//! (`key=PATH`), or the caller has it:
//!
//! ```
//! use blkmq_engine::{Buffer, Engine};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let image = std::env::temp_dir().join(format!("blkmq-doc-{}.luks", std::process::id()));
//! # let image = image.display();
//! # let format = format!("truncate -s 32M {image} && printf 'a passphrase' | cryptsetup luksFormat --batch-mode \
//! #     --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file - {image}");
//! # if !std::process::Command::new("sh").args(["-c", &format]).status()?.success() {
//! #     println!("skipped: needs cryptsetup");
//! #     return Ok(());
//! # }
//! # let passphrase = || b"a passphrase".to_vec();
//! let engine = Engine::builder()
//!     .disk(&format!("name=raw,file={image}"))
//!     .disk("name=vm1,luks=raw")
//!     .key("vm1", &passphrase())
//!     .start()?;
//! let vm1 = engine.disk("vm1")?;
//! vm1.write(0, Buffer::from(&[7; 4096][..])).wait()?;
//! assert!(vm1.read(0, Buffer::new(4096)).wait()?.iter().all(|&byte| byte == 7));
//! # std::fs::remove_file(image.to_string())?;
//! # Ok(())
//! # }
//! ```
//!
//! | type | what it is |
//! |---|---|
//! | [`Engine`], [`Builder`] | the queues and the threads of an engine; groups and their statistics |
//! | [`Disk`] | a disk of it, whose I/O is accounted to a group |
//! | [`Attached`], [`Completion`] | a thread that does its own I/O: one at a time, or many at once |
//! | [`Io`] | an I/O under way that another thread does: to await with any executor, or to wait for |
//! | [`Bio`], [`Buffer`] | one operation, and the memory that it owns while it is under way |
//! | [`Error`], [`IoError`] | why an engine does not start; how an I/O failed |
//!
//! # Memory
//! A [`Bio`] owns its [`Buffer`]; the engine has both until the I/O has ended, and then returns the buffer. So
//! memory cannot be read, changed or freed while a drive uses it, and callers need no `unsafe`. If the
//! engine cannot end an I/O, its memory is leaked instead of freed.
//!
//! # What is stable
//! The items of this crate, and the texts of disks and groups. All other crates are internal.
#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))]

mod attached;
mod bio;
mod buffer;
mod builder;
mod changes;
mod client;
mod disk;
mod engine;
mod error;
mod io;
mod loans;
mod statistics;
mod sys;

pub use attached::{Attached, Completion, RawBio};
pub use bio::Bio;
pub use blkmq_core::bio::{Class, Op, Prio, Status};
pub use buffer::Buffer;
pub use builder::Builder;
pub use disk::Disk;
pub use engine::Engine;
pub use error::{Error, IoError};
pub use io::Io;
pub use statistics::{Count, Statistics};
