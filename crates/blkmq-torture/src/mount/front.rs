//! The filesystem as the kernel meets it: each request as `state` or `journal` answers it.

use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use fuser::{
    Errno, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig, LockOwner,
    OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyWrite,
    Request, TimeOrNow, WriteFlags,
};

use super::Cache;
use super::journal::Step;
use super::state::Shared;

/// The filesystem.
pub(super) struct Front(pub(super) Arc<Shared>);

impl Filesystem for Front {
    fn init(&mut self, _: &Request, config: &mut KernelConfig) -> io::Result<()> {
        if self.0.cache == Cache::Back {
            let added = config.add_capabilities(InitFlags::FUSE_WRITEBACK_CACHE);
            added.map_err(|_| io::Error::new(io::ErrorKind::Unsupported, "FUSE has no write-back here"))?;
        }
        Ok(())
    }

    fn lookup(&self, _: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let state = self.0.state();
        let node = state.journal.find(name).map(|file| state.node(file));
        drop(state);
        match node {
            Some(node) if parent == INodeNo::ROOT => self.enter(node, reply),
            _ => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, node: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        match self.0.attributes(node) {
            Ok(attributes) => reply.attr(&Duration::ZERO, &attributes),
            Err(error) => reply.error(error),
        }
    }

    /// Takes a new end; new times and owners, which nobody looks at, are ignored.
    fn setattr(
        &self,
        request: &Request,
        node: INodeNo,
        _mode: Option<u32>,
        _uid: Option<u32>,
        _gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        _mtime: Option<TimeOrNow>,
        _ctime: Option<std::time::SystemTime>,
        handle: Option<FileHandle>,
        _crtime: Option<std::time::SystemTime>,
        _chgtime: Option<std::time::SystemTime>,
        _bkuptime: Option<std::time::SystemTime>,
        _flags: Option<fuser::BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        match size.map_or(Ok(()), |size| self.0.set_end(node, size)) {
            Ok(()) => self.getattr(request, node, handle, reply),
            Err(error) => reply.error(error),
        }
    }

    fn create(
        &self,
        _: &Request,
        _: INodeNo,
        name: &OsStr,
        _mode: u32,
        _umask: u32,
        _: i32,
        reply: ReplyCreate,
    ) {
        let made = self.0.create(name);
        match made.and_then(|node| self.0.attributes(node)) {
            Ok(attributes) => {
                self.0.state().open += 1;
                let (handle, flags) = (FileHandle(0), self.open_flags());
                reply.created(&Duration::ZERO, &attributes, Generation(0), handle, flags);
            }
            Err(error) => reply.error(error),
        }
    }

    fn link(&self, _: &Request, node: INodeNo, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let mut state = self.0.state();
        let linked = match state.journal.find(name) {
            Some(_) => Err(Errno::EEXIST),
            None => state.file(node),
        };
        match linked {
            Ok(file) => {
                state.journal.add(Step::Link(name.to_owned(), file));
                drop(state);
                self.enter(node, reply);
            }
            Err(error) => reply.error(error),
        }
    }

    fn unlink(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let mut state = self.0.state();
        match state.journal.find(name) {
            Some(_) => {
                state.journal.add(Step::Unlink(name.to_owned()));
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        from: &OsStr,
        _: INodeNo,
        to: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        let mut state = self.0.state();
        let is_free = state.journal.find(to).is_none();
        match state.journal.find(from) {
            _ if flags.contains(RenameFlags::RENAME_EXCHANGE) => reply.error(Errno::EINVAL),
            Some(_) if flags.contains(RenameFlags::RENAME_NOREPLACE) && !is_free => {
                reply.error(Errno::EEXIST);
            }
            Some(file) => {
                state
                    .journal
                    .add(Step::Rename(from.to_owned(), to.to_owned(), file));
                reply.ok();
            }
            None => reply.error(Errno::ENOENT),
        }
    }

    /// All that happened to names is durable then.
    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.0.state().journal.commit();
        reply.ok();
    }

    fn open(&self, _: &Request, node: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        let mut state = self.0.state();
        if let Err(error) = state.file(node) {
            return reply.error(error);
        }
        state.open += 1;
        drop(state);
        reply.opened(FileHandle(0), self.open_flags());
    }

    fn release(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: OpenFlags,
        _: Option<LockOwner>,
        _: bool,
        reply: ReplyEmpty,
    ) {
        self.0.state().open -= 1;
        self.0.closed.notify_all();
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        bytes: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        match self.0.read(node, offset, bytes) {
            Ok(data) => reply.data(&data),
            Err(error) => reply.error(error),
        }
    }

    fn write(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        flags: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        // O_SYNC has the bit of O_DSYNC in it.
        match self.0.write(node, offset, data, flags.0 & libc::O_DSYNC != 0) {
            Ok(()) => reply.written(data.len() as u32),
            Err(error) => reply.error(error),
        }
    }

    /// The end of a descriptor makes nothing durable.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.ok();
    }

    fn fsync(&self, _: &Request, node: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        answer(self.0.sync(node), reply);
    }

    fn fallocate(
        &self,
        _: &Request,
        node: INodeNo,
        _: FileHandle,
        offset: u64,
        len: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        answer(
            match mode & !libc::FALLOC_FL_KEEP_SIZE {
                libc::FALLOC_FL_PUNCH_HOLE => self.0.zero(node, offset, len, true),
                libc::FALLOC_FL_ZERO_RANGE => self.0.zero(node, offset, len, false),
                _ => Err(Errno::EOPNOTSUPP),
            },
            reply,
        );
    }
}

impl Front {
    /// Answers with a file's node. Its name and its end are asked for each time, since they may be others by then.
    fn enter(&self, node: INodeNo, reply: ReplyEntry) {
        match self.0.attributes(node) {
            Ok(attributes) => reply.entry(&Duration::ZERO, &attributes, Generation(0)),
            Err(error) => reply.error(error),
        }
    }

    /// Without FOPEN_KEEP_CACHE the kernel drops what it has of the file.
    fn open_flags(&self) -> FopenFlags {
        match self.0.cache {
            Cache::Bypassed => FopenFlags::FOPEN_DIRECT_IO | FopenFlags::FOPEN_PARALLEL_DIRECT_WRITES,
            Cache::Through | Cache::Back => FopenFlags::empty(),
        }
    }
}

fn answer(result: Result<(), Errno>, reply: ReplyEmpty) {
    match result {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(error),
    }
}
