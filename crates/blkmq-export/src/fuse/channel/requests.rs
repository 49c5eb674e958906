//! Decides what a request asks of the disk: an answer at once, a bio, or a question about what is allocated; and what is answered when
//! that has ended.

use std::io::IoSlice;

use blkmq_core::bio::{Bio, Flags, Op, Status};
use blkmq_host::disk::Disk;
use blkmq_host::service::Cx;

use super::super::protocol::{
    ANSWER_BYTES, Agreed, Call, Malformed, Range, Request, answer, init_answer, lseek_answer, open_answer,
    statfs_answer, write_answer,
};
use super::super::slots::{SLOTS, Work};
use super::Channel;
use crate::common::lookup::Question;

/// What a request comes to: a bio and what is done for it, an answer at once, or an errno.
type Begun = Result<(Bio, Work), End>;

/// An answer that needs no bio.
enum End {
    Errno(i32),
    /// All was done, with nothing.
    Read,
    Written(u32),
}

impl Channel {
    /// Does what a request asks for, with the slot into which its data was read.
    pub(super) fn begin(&mut self, cx: &mut Cx<'_>, slot: u16, request: &Result<Request, Malformed>) {
        let Request { unique, call } = match request {
            Ok(request) => *request,
            Err(error) => return self.break_off(cx, error),
        };
        let disk = &self.filesystem.disk;
        let begun = match call {
            Call::Read(range) => read(disk, range),
            Call::Write { range, is_durable } => write(disk, range, is_durable),
            Call::Fsync => Ok((bio(disk, Op::Flush, Flags::NONE, 0..0), Work::Flush)),
            Call::Fallocate { offset, len, mode } => zero(disk, offset, len, mode),
            Call::Lseek { offset, whence } => return self.seek(slot, unique, offset, whence),
            _ => return self.answer_at_once(cx, unique, call),
        };
        match begun {
            Ok((bio, work)) => {
                self.slots.take(slot, unique, work);
                self.submit(cx, slot, bio);
            }
            Err(End::Errno(errno)) => self.answer(unique, errno, &[]),
            Err(End::Read) => self.answer(unique, 0, &[]),
            Err(End::Written(len)) => self.answer(unique, 0, &write_answer(len)),
        }
    }

    fn answer_at_once(&mut self, cx: &mut Cx<'_>, unique: u64, call: Call) {
        let filesystem = &self.filesystem;
        match call {
            Call::Init(init) => match init_answer(&init, SLOTS) {
                Some(answer) => {
                    self.agreed = Agreed::on(&init);
                    self.answer(unique, 0, &answer);
                }
                None => {
                    self.answer(unique, libc::EPROTO, &[]);
                    let why = format_args!(
                        "the kernel speaks version {}.{}, 7.28 is needed",
                        init.major, init.minor
                    );
                    self.break_off(cx, &why);
                }
            },
            Call::GetAttr => self.answer(unique, 0, &filesystem.attributes().answer()),
            Call::SetAttr(wanted) => match filesystem.set_attributes(&wanted) {
                Ok(()) => self.answer(unique, 0, &filesystem.attributes().answer()),
                Err(errno) => self.answer(unique, errno, &[]),
            },
            Call::Open(flags) => match filesystem.open(flags) {
                Ok(()) => self.answer(unique, 0, &open_answer()),
                Err(errno) => self.answer(unique, errno, &[]),
            },
            Call::Release => {
                filesystem.release();
                self.answer(unique, 0, &[]);
            }
            Call::StatFs => {
                let block_size = filesystem.block_size().max(4096);
                let size = filesystem.disk.current_size();
                self.answer(unique, 0, &statfs_answer(size, block_size));
            }
            Call::Forget => {}
            Call::Destroy => self.answer(unique, 0, &[]),
            // That to an interrupt has the kernel send none: what was begun with the disk goes on to its end.
            _ => self.answer(unique, libc::ENOSYS, &[]),
        }
    }

    fn submit(&mut self, cx: &mut Cx<'_>, index: u16, mut bio: Bio) {
        match bio.op {
            Op::Read => bio.data = self.slots.lend_for_read(index, bio.len as usize),
            Op::Write => bio.data = self.slots.lend_write(index, bio.len as usize),
            _ => {}
        }
        bio.cookie = index.into();
        if let Err(bio) = cx.submit(self.filesystem.disk.queue, bio) {
            self.refused.push_back(bio);
        }
    }

    /// Answers what a bio was made for that has ended.
    pub(super) fn finish(&mut self, bio: Bio) {
        let index = bio.cookie as u16;
        let status = bio.status;
        drop(bio);
        let slot = self.slots.get_mut(index);
        slot.take_back();
        let (unique, work) = (slot.unique, slot.work);
        match (work, status) {
            (Work::Flush, status) => {
                let status = self.filesystem.end_flush(status);
                self.answer(unique, status.errno(), &[]);
            }
            (_, status) if !status.is_ok() => self.answer(unique, errno_of(status), &[]),
            (Work::Read { before, len }, _) => self.answer_read(index, unique, before, len),
            (Work::Write { len }, _) => self.answer(unique, 0, &write_answer(len)),
            _ => self.answer(unique, 0, &[]),
        }
        self.slots.put(index);
    }

    fn answer_read(&mut self, index: u16, unique: u64, before: u32, len: u32) {
        let (from, len) = (before as usize, len as usize);
        let header: [u8; ANSWER_BYTES] = answer(unique, 0, len);
        let data = &self.slots.get_mut(index).read_data()[from..from + len];
        let sent = rustix::io::writev(&self.device, &[IoSlice::new(&header), IoSlice::new(data)]);
        self.note_sent(sent);
    }

    /// Has it found out where data or a hole begins.
    fn seek(&mut self, slot: u16, unique: u64, from: u64, whence: u32) {
        let is_for_data = match whence as i32 {
            libc::SEEK_DATA => true,
            libc::SEEK_HOLE => false,
            _ => return self.answer(unique, libc::EINVAL, &[]),
        };
        if from >= self.filesystem.disk.current_size() {
            return self.answer(unique, libc::ENXIO, &[]);
        }
        self.slots.take(slot, unique, Work::Seek { from, is_for_data });
        self.ask(slot, from);
    }

    fn ask(&self, slot: u16, from: u64) {
        let asker = self.asker.as_ref().expect("made when it began");
        let disk = &self.filesystem.disk;
        let left = disk.current_size() - from;
        let question = Question::new(disk, slot.into(), (from, left), EXTENTS_MAX, asker);
        self.filesystem.common.lookups.ask(question);
    }

    /// Takes what was found out.
    pub(super) fn take_answers(&mut self, cx: &mut Cx<'_>) {
        let Some(asker) = self.asker.clone() else { return };
        for found in asker.take() {
            let index = found.slot as u16;
            let slot = self.slots.get_mut(index);
            let (unique, Work::Seek { from, is_for_data }) = (slot.unique, slot.work) else {
                continue;
            };
            let size = self.filesystem.disk.current_size();
            let extents = match &found.extents {
                Ok(extents) => extents,
                Err(_) => {
                    self.answer(unique, libc::EIO, &[]);
                    self.slots.put(index);
                    continue;
                }
            };
            let mut at = from;
            let is_found = extents.iter().any(|extent| {
                let is_wanted = extent.zero != is_for_data;
                at += if is_wanted { 0 } else { extent.len };
                is_wanted
            });
            if !is_found && at > from && at < size {
                self.slots.get_mut(index).work = Work::Seek {
                    from: at,
                    is_for_data,
                };
                self.ask(index, at);
                continue;
            }
            match is_found || !is_for_data {
                true => self.answer(unique, 0, &lseek_answer(at.min(size))),
                false => self.answer(unique, libc::ENXIO, &[]),
            }
            self.slots.put(index);
        }
        if std::mem::take(&mut self.is_short) {
            self.come_again(cx);
        }
    }
}

/// A read: of all blocks that have a part of it.
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

/// A range to be freed, or filled with zeroes: of whole blocks. To set space aside is what nobody can promise here.
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
    if !offset.is_multiple_of(block) || !end.is_multiple_of(block) {
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

/// Extents that are asked for at a time.
const EXTENTS_MAX: usize = 128;
