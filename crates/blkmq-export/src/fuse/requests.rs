//! What a request asks of the disk: an answer at once, a bio, or a query about allocation; and what is
//! answered when the bio or the query has ended.

use std::fmt;
use std::sync::Arc;

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_host::disk::Disk;
use blkmq_host::service::Cx;

use super::filesystem::FileSystem;
use super::protocol::{
    Agreed, Call, Init, Malformed, Range, Request, init_answer, lseek_answer, open_answer, statfs_answer,
    write_answer,
};
use super::slots::{SLOTS, Work};
use crate::common::lookup::{ExtentQuery, ExtentReplies};

/// A transport by which requests come from the kernel and answers go back.
pub(super) trait Transport {
    /// The request in this slot is under way from here on, with this work.
    fn take(&mut self, slot: u16, unique: u64, work: Work);

    /// The request in a slot.
    fn request(&self, slot: u16) -> (u64, Work);

    /// Changes the work of a slot.
    fn set_work(&mut self, slot: u16, work: Work);

    /// Lends the memory that a read of `bytes` bytes fills.
    fn lend_for_read(&mut self, slot: u16, bytes: usize) -> Data;

    /// Lends the first bytes of a write's data.
    fn lend_write(&mut self, slot: u16, bytes: usize) -> Data;

    /// The bio to which the memory was lent has ended.
    fn take_back(&mut self, slot: u16);

    /// Answers the request that came in this slot: with an errno of Linux, or with data.
    fn answer(&mut self, slot: u16, unique: u64, errno: i32, data: &[u8]);

    /// Answers a read with `len` bytes of the data, from `before` on.
    fn answer_read(&mut self, slot: u16, unique: u64, before: usize, len: usize);

    /// The request of a slot that was taken has been answered.
    fn put(&mut self, slot: u16);

    /// Returns whether no request is under way.
    fn is_idle(&self) -> bool;
}

/// The requests of one channel.
pub(super) struct Requests<T> {
    pub(super) filesystem: Arc<FileSystem>,
    pub(super) transport: T,
    /// What was negotiated with the kernel, if that happened here.
    pub(super) agreed: Option<Agreed>,
    /// FUSE over io_uring is negotiated if the kernel offers it.
    pub(super) wants_ring: bool,
    extent_replies: Option<Arc<ExtentReplies>>,
}

/// Why the kernel's bytes cannot be decoded any further.
#[derive(Debug)]
pub(super) enum Broken {
    Malformed(Malformed),
    Version(Init),
}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(malformed) => malformed.fmt(f),
            Self::Version(Init { major, minor, .. }) => {
                write!(f, "the kernel speaks version {major}.{minor}, 7.28 is needed")
            }
        }
    }
}

/// What a request becomes: a bio with its work, an answer at once, or an errno.
type Begun = Result<(Bio, Work), End>;

/// An answer that needs no bio.
enum End {
    Errno(i32),
    /// A read of no bytes.
    Read,
    Written(u32),
}

impl<T: Transport> Requests<T> {
    pub(super) fn new(filesystem: Arc<FileSystem>, transport: T) -> Self {
        Self {
            filesystem,
            transport,
            agreed: None,
            wants_ring: false,
            extent_replies: None,
        }
    }

    /// The channel is on its reactor now.
    pub(super) fn start(&mut self, cx: &Cx<'_>) {
        self.filesystem.join(cx.waker());
        self.extent_replies = Some(Arc::new(ExtentReplies::new(cx.waker())));
    }

    /// Handles a request, whose data lies in the slot. Returns the bio that it needs, if it needs one.
    ///
    /// # Errors
    /// The request, or all that follows, cannot be decoded.
    pub(super) fn begin(
        &mut self,
        slot: u16,
        request: Result<Request, Malformed>,
    ) -> Result<Option<Bio>, Broken> {
        let Request { unique, call } = request.map_err(Broken::Malformed)?;
        let disk = &self.filesystem.disk;
        let begun = match call {
            Call::Read(range) => read(disk, range),
            Call::Write { range, is_durable } => write(disk, range, is_durable),
            Call::Fsync => Ok((bio(disk, Op::Flush, Flags::NONE, 0..0), Work::Flush)),
            Call::Fallocate { offset, len, mode } => zero(disk, offset, len, mode),
            Call::Lseek { offset, whence } => {
                self.seek(slot, unique, offset, whence);
                return Ok(None);
            }
            _ => {
                self.answer_at_once(slot, unique, call)?;
                return Ok(None);
            }
        };
        let answered = &mut self.transport;
        match begun {
            Ok((bio, work)) => {
                self.transport.take(slot, unique, work);
                return Ok(Some(self.lend(slot, bio)));
            }
            Err(End::Errno(errno)) => answered.answer(slot, unique, errno, &[]),
            Err(End::Read) => answered.answer(slot, unique, 0, &[]),
            Err(End::Written(len)) => answered.answer(slot, unique, 0, &write_answer(len)),
        }
        Ok(None)
    }

    fn answer_at_once(&mut self, slot: u16, unique: u64, call: Call) -> Result<(), Broken> {
        let filesystem = &self.filesystem;
        let transport = &mut self.transport;
        let mut answer = |errno, data: &[u8]| transport.answer(slot, unique, errno, data);
        match call {
            Call::Init(init) => match Agreed::on(&init, self.wants_ring) {
                Some(agreed) => {
                    self.agreed = Some(agreed);
                    answer(0, &init_answer(&init, &agreed, SLOTS));
                }
                None => {
                    answer(libc::EPROTO, &[]);
                    return Err(Broken::Version(init));
                }
            },
            Call::GetAttr => answer(0, &filesystem.attributes().answer()),
            Call::SetAttr(wanted) => match filesystem.set_attributes(&wanted) {
                Ok(()) => answer(0, &filesystem.attributes().answer()),
                Err(errno) => answer(errno, &[]),
            },
            Call::Open(flags) => match filesystem.open(flags) {
                Ok(()) => answer(0, &open_answer()),
                Err(errno) => answer(errno, &[]),
            },
            Call::Release => {
                filesystem.release();
                answer(0, &[]);
            }
            Call::StatFs => {
                let block_size = filesystem.block_size().max(4096);
                let size = filesystem.disk.current_size();
                answer(0, &statfs_answer(size, block_size));
            }
            Call::Forget => {}
            Call::Destroy => answer(0, &[]),
            // This answer to an interrupt makes the kernel send no more: what the disk has begun
            // runs to its end.
            _ => answer(libc::ENOSYS, &[]),
        }
        Ok(())
    }

    /// Lends a bio the memory of its slot.
    fn lend(&mut self, index: u16, mut bio: Bio) -> Bio {
        match bio.op {
            Op::Read => bio.data = self.transport.lend_for_read(index, bio.len as usize),
            Op::Write => bio.data = self.transport.lend_write(index, bio.len as usize),
            _ => {}
        }
        bio.cookie = index.into();
        bio
    }

    /// Answers the request of a bio that has ended.
    pub(super) fn finish(&mut self, bio: Bio) {
        let slot = bio.cookie as u16;
        let status = bio.status;
        drop(bio);
        let transport = &mut self.transport;
        transport.take_back(slot);
        let (unique, work) = transport.request(slot);
        match (work, status) {
            (Work::Flush, status) => {
                let status = self.filesystem.end_flush(status);
                transport.answer(slot, unique, status.errno(), &[]);
            }
            (_, status) if !status.is_ok() => transport.answer(slot, unique, errno_of(status), &[]),
            (Work::Read { before, len }, _) => {
                transport.answer_read(slot, unique, before as usize, len as usize);
            }
            (Work::Write { len }, _) => transport.answer(slot, unique, 0, &write_answer(len)),
            _ => transport.answer(slot, unique, 0, &[]),
        }
        transport.put(slot);
    }

    /// Starts the search for the start of data or of a hole.
    fn seek(&mut self, slot: u16, unique: u64, from: u64, whence: u32) {
        let is_for_data = match whence as i32 {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return self.transport.answer(slot, unique, libc::EINVAL, &[]),
        };
        if from >= self.filesystem.disk.current_size() {
            return self.transport.answer(slot, unique, libc::ENXIO, &[]);
        }
        self.transport
            .take(slot, unique, Work::Seek { from, is_for_data });
        self.ask(slot, from);
    }

    fn ask(&self, slot: u16, from: u64) {
        let extent_replies = self.extent_replies.as_ref().expect("made when it began");
        let disk = &self.filesystem.disk;
        let left = disk.current_size() - from;
        let query = ExtentQuery::new(disk, slot.into(), (from, left), EXTENTS_MAX, extent_replies);
        self.filesystem.common.lookups.ask(query);
    }

    /// Answers with what the searches found.
    pub(super) fn take_answers(&mut self) {
        let Some(extent_replies) = self.extent_replies.clone() else {
            return;
        };
        for found in extent_replies.take() {
            let slot = found.slot as u16;
            let (unique, Work::Seek { from, is_for_data }) = self.transport.request(slot) else {
                continue;
            };
            let size = self.filesystem.disk.current_size();
            let Ok(extents) = &found.extents else {
                self.transport.answer(slot, unique, libc::EIO, &[]);
                self.transport.put(slot);
                continue;
            };
            let mut at = from;
            let is_found = extents.iter().any(|extent| {
                let is_wanted = extent.zero != is_for_data;
                at += if is_wanted { 0 } else { extent.len };
                is_wanted
            });
            if !is_found && at > from && at < size {
                let work = Work::Seek {
                    from: at,
                    is_for_data,
                };
                self.transport.set_work(slot, work);
                self.ask(slot, at);
                continue;
            }
            match is_found || !is_for_data {
                true => self
                    .transport
                    .answer(slot, unique, 0, &lseek_answer(at.min(size))),
                false => self.transport.answer(slot, unique, libc::ENXIO, &[]),
            }
            self.transport.put(slot);
        }
    }

    /// Nobody waits for the running searches any more.
    pub(super) fn give_up(&self) {
        if let Some(extent_replies) = &self.extent_replies {
            extent_replies.give_up();
        }
    }
}

/// A read: of all blocks that the range touches.
fn read(disk: &Disk, range: Range) -> Begun {
    let size = disk.current_size();
    let end = (range.offset + u64::from(range.len)).min(size);
    if range.offset >= end {
        return Err(End::Read);
    }
    let block = u64::from(disk.block_size);
    let start = range.offset / block * block;
    let blocks = start..end.next_multiple_of(block).min(size);
    let work = Work::Read {
        before: (range.offset - start) as u32,
        len: (end - range.offset) as u32,
    };
    Ok((bio(disk, Op::Read, Flags::NONE, blocks), work))
}

/// A write: of whole blocks, up to the disk's end.
fn write(disk: &Disk, range: Range, is_durable: bool) -> Begun {
    let size = disk.current_size();
    if disk.read_only {
        return Err(End::Errno(libc::EROFS));
    }
    let end = (range.offset + u64::from(range.len)).min(size);
    let block = u64::from(disk.block_size);
    if !range.offset.is_multiple_of(block) || !end.is_multiple_of(block) {
        return Err(End::Errno(libc::EINVAL));
    }
    if range.len == 0 {
        return Err(End::Written(0));
    }
    if range.offset >= end {
        return Err(End::Errno(libc::ENOSPC));
    }
    let flags = if is_durable { Flags::FUA } else { Flags::NONE };
    let len = (end - range.offset) as u32;
    Ok((
        bio(disk, Op::Write, flags, range.offset..end),
        Work::Write { len },
    ))
}

/// A range to be freed, or zeroed: of whole blocks, unless the drive takes any. Allocation in advance cannot be promised here.
fn zero(disk: &Disk, offset: u64, len: u64, mode: u32) -> Begun {
    let (keeps_size, mode) = (
        mode as i32 & libc::FALLOC_FL_KEEP_SIZE != 0,
        mode as i32 & !libc::FALLOC_FL_KEEP_SIZE,
    );
    let flags = match mode {
        libc::FALLOC_FL_PUNCH_HOLE => Flags::NONE,
        libc::FALLOC_FL_ZERO_RANGE => Flags::NO_UNMAP,
        _ => return Err(End::Errno(libc::EOPNOTSUPP)),
    };
    if disk.read_only {
        return Err(End::Errno(libc::EROFS));
    }
    let size = disk.current_size();
    let end = offset.checked_add(len).ok_or(End::Errno(libc::EFBIG))?;
    if end > size && !keeps_size {
        return Err(End::Errno(libc::ENOSPC));
    }
    let end = end.min(size);
    let block = u64::from(disk.block_size);
    let is_whole = offset.is_multiple_of(block) && end.is_multiple_of(block);
    if !is_whole && !disk.limits.any_alignment {
        return Err(End::Errno(libc::EINVAL));
    }
    if offset >= end {
        return Err(End::Read);
    }
    Ok((bio(disk, Op::WriteZeroes, flags, offset..end), Work::Zero))
}

fn bio(disk: &Disk, op: Op, flags: Flags, range: std::ops::Range<u64>) -> Bio {
    Bio {
        op,
        flags,
        disk: disk.id,
        group: disk.group,
        offset: range.start,
        len: range.end - range.start,
        ..Bio::default()
    }
}

/// A read-only disk is a read-only filesystem here.
fn errno_of(status: Status) -> i32 {
    match status {
        Status::ReadOnly => libc::EROFS,
        other => other.errno(),
    }
}

/// Extents asked for at a time.
const EXTENTS_MAX: usize = 128;
