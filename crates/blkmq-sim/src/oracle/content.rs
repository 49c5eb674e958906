//! The contents that a block may have: now, for a read, and after a power cut. It knows the writes and
//! flushes of the clients, and nothing of the engine or the drive. A write may take effect at any moment
//! from its submission to its end, and a write that fails may have done part of its work. So a block has
//! a set of possible contents. A write leaves the set of contents that a read may return when another
//! write, submitted after its end, has succeeded. It leaves the set of contents possible after a power
//! cut when that other write is durable: by FUA, by a drive without a cache, or by a successful flush
//! submitted after its end.

use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use blkmq_core::bio::Op;
use blkmq_core::ids::DiskId;

use crate::images::Images;

/// A moment in the order of submissions and ends.
pub(super) type Tick = u64;

/// Returns what block `index` of the buffer of write `token` contains; different for every block
/// ever written.
pub fn content_of(token: u64, index: u32) -> u64 {
    token << 16 | u64::from(index)
}

/// All blocks of the drives.
#[derive(Debug)]
pub(super) struct Content {
    blocks: Vec<Block>,
    writes: BTreeMap<u64, Written>,
    /// Writes that ended well and are not known to be durable, per disk, by their ends.
    volatile: Vec<VecDeque<(Tick, u64)>>,
    /// Blocks whose set for a power cut has shrunk since the last check.
    narrowed: Vec<u32>,
}

#[derive(Debug)]
struct Block {
    versions: Vec<Version>,
    /// When the last bio that may zero the block was submitted.
    zeroed: Tick,
}

#[derive(Clone, Debug)]
struct Version {
    token: u64,
    value: u64,
    /// `UNENDED` while it is under way.
    ended: Tick,
    /// A read that starts now cannot return it.
    overwritten: bool,
}

#[derive(Debug)]
struct Written {
    op: Op,
    /// In the order of its buffer.
    blocks: Rc<[u32]>,
    submitted: Tick,
}

/// The contents that a read may return: per block the set at its submission; later writes are
/// looked up.
#[derive(Debug, Default)]
pub(super) struct Snapshot {
    values: Vec<(u32, u64)>,
    taken: Tick,
}

const UNENDED: Tick = Tick::MAX;

impl Content {
    pub(super) fn new(blocks: u32, disks: usize) -> Self {
        Self {
            blocks: (0..blocks).map(|_| Block::known(0)).collect(),
            writes: BTreeMap::new(),
            volatile: vec![VecDeque::new(); disks],
            narrowed: Vec::new(),
        }
    }

    /// Records the submission of a bio that changes `blocks`.
    pub(super) fn write_submitted(&mut self, token: u64, op: Op, blocks: Rc<[u32]>, now: Tick) {
        for (index, block) in blocks.iter().enumerate() {
            let block = &mut self.blocks[*block as usize];
            let zeroes = op != Op::Write;
            if zeroes {
                block.zeroed = now;
            }
            block.versions.push(Version {
                token,
                value: if zeroes {
                    0
                } else {
                    content_of(token, index as u32)
                },
                ended: UNENDED,
                overwritten: false,
            });
        }
        let submitted = now;
        self.writes.insert(
            token,
            Written {
                op,
                blocks,
                submitted,
            },
        );
    }

    /// Undoes that: the bio was refused.
    pub(super) fn withdraw(&mut self, token: u64) {
        if let Some(written) = self.writes.remove(&token) {
            for block in &*written.blocks {
                self.blocks[*block as usize].versions.retain(|v| v.token != token);
            }
        }
    }

    /// Records the end of a write; `durable` if its end implies that it is durable.
    pub(super) fn write_ended(&mut self, token: u64, ok: bool, durable: bool, disk: DiskId, now: Tick) {
        let written = &self.writes[&token];
        let overwrites = ok && written.op != Op::Discard;
        let submitted = written.submitted;
        for block in &*written.blocks {
            for version in &mut self.blocks[*block as usize].versions {
                if version.token == token {
                    version.ended = now;
                }
                version.overwritten |= overwrites && version.ended < submitted;
            }
        }
        if overwrites && durable {
            self.now_durable(token);
        } else if overwrites {
            self.volatile[disk.index()].push_back((now, token));
        }
    }

    /// Records a flush: what ended on `disk` before `submitted` is durable.
    pub(super) fn flushed(&mut self, disk: DiskId, submitted: Tick) {
        while let Some(&(ended, token)) = self.volatile[disk.index()].front() {
            if ended > submitted {
                return;
            }
            self.volatile[disk.index()].pop_front();
            self.now_durable(token);
        }
    }

    fn now_durable(&mut self, token: u64) {
        let Written {
            blocks, submitted, ..
        } = &self.writes[&token];
        for &block in &**blocks {
            let versions = &mut self.blocks[block as usize].versions;
            // A later durable write may have removed it.
            if versions.iter().any(|v| v.token == token) {
                versions.retain(|v| v.ended >= *submitted);
                self.narrowed.push(block);
            }
        }
    }

    /// Returns what a read of `blocks` submitted now may return, as far as is known yet.
    pub(super) fn snapshot(&self, blocks: &[u32], taken: Tick) -> Snapshot {
        let mut values = Vec::new();
        for (index, block) in blocks.iter().enumerate() {
            let live = self.blocks[*block as usize].versions.iter();
            values.extend(live.filter(|v| !v.overwritten).map(|v| (index as u32, v.value)));
        }
        Snapshot { values, taken }
    }

    /// Checks what a successful read returned.
    pub(super) fn check_read(
        &self,
        token: u64,
        blocks: &[u32],
        buffer: &[u64],
        seen: &Snapshot,
    ) -> Result<(), String> {
        for (index, (&value, &block)) in buffer.iter().zip(blocks).enumerate() {
            if !seen.values.contains(&(index as u32, value)) && !self.is_later(seen.taken, block, value) {
                return Err(format!(
                    "read {token} returned {} for block {block}; it may be {:?}",
                    name(value),
                    seen.names(index as u32)
                ));
            }
        }
        Ok(())
    }

    /// Says whether a bio submitted after `then` may have put `value` into `block`.
    fn is_later(&self, then: Tick, block: u32, value: u64) -> bool {
        if value == 0 {
            return self.blocks[block as usize].zeroed > then;
        }
        let writer = value >> 16;
        let index = (value & 0xffff) as usize;
        self.writes
            .get(&writer)
            .is_some_and(|w| w.submitted > then && w.op == Op::Write && w.blocks.get(index) == Some(&block))
    }

    /// Checks what a power cut now would leave on a drive, wherever that may have changed since the
    /// last check.
    pub(super) fn check_durable(&mut self, images: &mut Images) -> Result<(), String> {
        let on_drive = images.blocks();
        let narrowed = self.narrowed.extract_if(.., |block| on_drive.contains(block));
        for block in images.take_changed().into_iter().chain(narrowed) {
            let value = images.durable(block);
            let versions = &self.blocks[block as usize].versions;
            if !versions.iter().any(|v| v.value == value) {
                let may: Vec<String> = versions.iter().map(|v| name(v.value)).collect();
                return Err(format!(
                    "a power cut now would leave {} in block {block}; it may be {may:?}",
                    name(value)
                ));
            }
        }
        Ok(())
    }

    /// Records a power cut: the drive's content is known from here on, and nothing is under way.
    pub(super) fn power_cut(&mut self, images: &Images) {
        for number in images.blocks() {
            self.blocks[number as usize] = Block::known(images.durable(number));
        }
        self.volatile.iter_mut().for_each(VecDeque::clear);
    }
}

impl Block {
    fn known(value: u64) -> Self {
        let version = Version {
            token: 0,
            value,
            ended: 0,
            overwritten: false,
        };
        Self {
            versions: vec![version],
            zeroed: 0,
        }
    }
}

impl Snapshot {
    fn names(&self, index: u32) -> Vec<String> {
        let of_block = self.values.iter().filter(|(i, _)| *i == index);
        of_block.map(|&(_, value)| name(value)).collect()
    }
}

/// The name of a content in a report.
pub(super) fn name(value: u64) -> String {
    match value {
        0 => "zeroes".to_owned(),
        super::UNREAD => "nothing".to_owned(),
        _ => format!("block {} of bio {}", value & 0xffff, value >> 16),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DiskId = DiskId(0);

    fn content() -> Content {
        Content::new(8, 1)
    }

    fn check(content: &Content, reader: u64, snapshot: &Snapshot, value: u64) -> bool {
        content.check_read(reader, &[0], &[value], snapshot).is_ok()
    }

    #[test]
    fn read_may_see_any_write_that_is_under_way_and_no_overwritten_one() {
        let mut content = content();
        content.write_submitted(1, Op::Write, [0].into(), 1);
        content.write_ended(1, true, false, DISK, 2);
        content.write_submitted(2, Op::Write, [0].into(), 3);
        let seen = content.snapshot(&[0], 4);
        content.write_submitted(4, Op::Write, [0].into(), 5);
        for (value, allowed) in [
            (0, false),
            (content_of(1, 0), true),
            (content_of(2, 0), true),
            (content_of(4, 0), true),
            (content_of(4, 1), false),
        ] {
            assert_eq!(check(&content, 3, &seen, value), allowed, "{}", name(value));
        }
    }

    #[test]
    fn failed_write_overwrites_nothing_for_sure() {
        let mut content = content();
        content.write_submitted(1, Op::Write, [0].into(), 1);
        content.write_ended(1, false, false, DISK, 2);
        let seen = content.snapshot(&[0], 3);
        assert!(check(&content, 2, &seen, 0));
        assert!(check(&content, 2, &seen, content_of(1, 0)));
    }

    #[test]
    fn flush_binds_what_ended_before_it_was_submitted_and_nothing_else() {
        let mut content = content();
        let mut images = Images::new(0..8);
        content.write_submitted(1, Op::Write, [0].into(), 1);
        content.write_ended(1, true, false, DISK, 2);
        content.write_submitted(2, Op::Write, [1].into(), 3);
        content.write_ended(2, true, false, DISK, 5);
        content.flushed(DISK, 4);
        let error = content.check_durable(&mut images).unwrap_err();
        assert!(error.contains("block 0;"), "{error}");
        images.write(0, content_of(1, 0), true);
        content.narrowed.push(1);
        assert_eq!(content.check_durable(&mut images), Ok(()));
    }

    #[test]
    fn durable_write_may_be_followed_by_a_later_one_but_not_by_an_earlier() {
        let mut content = content();
        let mut images = Images::new(0..8);
        content.write_submitted(1, Op::Write, [0].into(), 1);
        content.write_ended(1, true, false, DISK, 2);
        content.write_submitted(2, Op::Write, [0].into(), 3);
        content.write_ended(2, true, true, DISK, 4);
        content.write_submitted(3, Op::Write, [0].into(), 5);
        images.write(0, content_of(3, 0), true);
        assert_eq!(content.check_durable(&mut images), Ok(()));
        images.write(0, content_of(1, 0), true);
        assert!(content.check_durable(&mut images).is_err());
    }
}
