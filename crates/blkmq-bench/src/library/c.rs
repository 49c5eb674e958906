//! The side through C: the shared library, loaded as a C program has it loaded, so that nothing is inlined.

use std::ffi::CString;

use anyhow::{Context, Result, ensure};
use blkmq_engine::Buffer;

use super::sys::{Api, Completion, Handles, Io};
use super::{BLOCK, Side};
use crate::offsets::Offsets;

/// The functions of `blkmq.h` on an open queue.
pub(super) struct C {
    /// Closed first: what is under way uses the buffers.
    handles: Handles,
    offsets: Offsets,
    idle: Vec<usize>,
    room: Vec<Completion>,
    buffers: Vec<Buffer>,
    /// As many as there can be, submitted by one call; none if each has its own.
    together: Option<Vec<Io>>,
}

impl C {
    /// Opens the disk `d` that is described as for `--disk`. I/Os are submitted by a call each, or `together`.
    pub(super) fn open(disk: &str, depth: usize, together: bool) -> Result<Box<dyn Side>> {
        let api = Api::load()?;
        let pairs = disk.split(',').filter_map(|pair| pair.split_once('='));
        let keys: Vec<String> = pairs
            .filter(|(key, _)| *key != "name")
            .map(|(key, value)| format!("{key} = \"{value}\""))
            .collect();
        let config = CString::new(format!("[disk.d]\n{}\n", keys.join("\n"))).context("a text")?;
        let handles = Handles::open(api, &config)?;
        Ok(Box::new(Self {
            offsets: Offsets::new(handles.disk_size(), BLOCK as u64, true, 1),
            handles,
            idle: (0..depth).collect(),
            room: (0..depth).map(|_| Completion::default()).collect(),
            buffers: (0..depth).map(|_| Buffer::new(BLOCK)).collect(),
            together: together.then(|| {
                let read = |_| Io::read(0, BLOCK as u64, std::ptr::null_mut(), 0);
                (0..depth).map(read).collect()
            }),
        }))
    }
}

impl Side for C {
    fn batch(&mut self) -> Result<u64> {
        let mut count = 0;
        while let Some(slot) = self.idle.pop() {
            let data = self.buffers[slot].as_mut_ptr();
            let offset = self.offsets.next();
            if let Some(together) = &mut self.together {
                together[count].read_again(offset, data.cast(), slot);
                count += 1;
                continue;
            }
            let io = Io::read(offset, BLOCK as u64, data.cast(), slot);
            let code = self.handles.submit(&io);
            ensure!(code == 0, "blkmq_queue_submit: {code}");
        }
        if let Some(together) = &mut self.together {
            let taken = self.handles.submit_many(&together[..count]);
            ensure!(taken == count as i32, "blkmq_queue_submit_many: {taken}");
        }
        let count = self.handles.wait(&mut self.room);
        let ended = usize::try_from(count)
            .ok()
            .with_context(|| format!("blkmq_queue_wait: {count}"))?;
        for completion in &self.room[..ended] {
            ensure!(completion.code == 0, "a read ended with {}", completion.code);
            self.idle.push(completion.user);
        }
        Ok(ended as u64)
    }
}
