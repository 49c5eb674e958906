//! The data transfer of a command: it changes the images and the clients' memory, and records which
//! blocks a later flush must make durable. The drive calls it at the start or at the end of a command's
//! service.

use blkmq_core::bio::{Op, Status};

use super::fault::Mutation;
use super::{Command, Drive, Memory, Part};
use crate::images::Lot;
use crate::rng::Ppm;

impl Drive {
    /// Moves a command's data. If the command fails, only some of its blocks are moved.
    pub(super) fn move_data(&mut self, command: &mut Command, memory: &mut dyn Memory) {
        let share = match command.plan.status {
            Status::Ok if !command.plan.lost => Self::ALL_BLOCKS,
            _ => Ppm::percent(50),
        };
        if command.op == Op::Flush {
            self.flush(command);
            return;
        }
        if self.mutated(Mutation::DropsWrite) && command.op == Op::Write && self.rng.chance(Ppm::percent(5)) {
            return;
        }
        for part in &command.parts {
            self.move_part(command.op, part, command.through, share, memory);
        }
        if self.mutated(Mutation::SwapsBlocks) && command.op == Op::Write {
            self.swap_blocks(command);
        }
    }

    pub(super) fn move_part(
        &mut self,
        op: Op,
        part: &Part,
        through: bool,
        share: Ppm,
        memory: &mut dyn Memory,
    ) {
        let mut lot = Lot::new(share, self.physical);
        let first = self.images.blocks().start;
        for n in 0..part.count {
            let (block, index) = (part.block + n, part.index + n);
            if share < Self::ALL_BLOCKS && !lot.takes(block - first, &mut self.rng) {
                continue;
            }
            match op {
                Op::Read => {
                    let content = self.read_block(block);
                    memory.store(part.token, index, content);
                }
                Op::Write => {
                    let content = memory.load(part.token, index);
                    self.images.write(block, content, through);
                }
                Op::WriteZeroes => self.images.write(block, 0, through),
                // A drive may leave a discarded block as it is.
                Op::Discard if self.rng.chance(Ppm::percent(80)) => self.images.write(block, 0, through),
                Op::Discard | Op::Flush => {}
            }
        }
    }

    /// Records that a command's end has been reported, so that a later flush must make durable what
    /// it wrote.
    pub(super) fn report(&mut self, command: &Command) {
        if command.plan.status == Status::Ok && command.op.is_write() {
            for part in &command.parts {
                (part.block..part.block + part.count).for_each(|block| self.images.reported(block));
            }
        }
    }

    fn flush(&mut self, command: &mut Command) {
        let owed = std::mem::take(&mut command.owed);
        if command.plan.status != Status::Ok || self.mutated(Mutation::FlushPersistsNothing) {
            return;
        }
        for (block, cell) in owed {
            self.images.persist(block, cell);
        }
    }

    fn read_block(&mut self, block: u32) -> u64 {
        if self.mutated(Mutation::ReadsOldData) && self.rng.chance(Ppm::percent(5)) {
            return self.images.durable(block);
        }
        self.images.live(block)
    }

    fn swap_blocks(&mut self, command: &Command) {
        let Some(part) = command.parts.iter().find(|part| part.count >= 2) else {
            return;
        };
        let (a, b) = (self.images.live(part.block), self.images.live(part.block + 1));
        self.images.write(part.block, b, command.through);
        self.images.write(part.block + 1, a, command.through);
    }

    const ALL_BLOCKS: Ppm = Ppm(1_000_000);
}
