//! One client: a program like dbench's on a filesystem laid out like XFS, as seen below the page cache.
//! `rig` runs it on a CPU and reports the completion of its I/O to it.
//!
//! ```text
//!   Write ─► Sync (sometimes) ─► Log ─► Read ─► Meta ─► think ─┬─► Write, `rounds` times
//!   (asynchronously, from two CPUs)                            └─► Done, once all writes have ended
//! ```

use blkmq_core::bio::{Bio, Data, Op};
use blkmq_core::time::{Instant, Nanos};

use crate::rng::{Ppm, Rng};

/// One client.
#[derive(Debug)]
pub(super) struct Program {
    id: usize,
    cpu: usize,
    cpus: usize,
    rng: Rng,
    phase: Phase,
    /// Rounds that are left.
    rounds: u32,
    /// Bytes written to its own files, which follow one another.
    written: u64,
    /// Where its next read begins.
    reading: u64,
    writes: u32,
    reads: u32,
}

/// The next action of a client.
#[derive(Debug)]
pub(super) enum Want {
    /// Submit these bios from this CPU, as one batch, and ask again.
    Submit(usize, Vec<Bio>),
    /// Ask again at that time.
    Sleep(Instant),
    /// Ask again when one of its bios has ended.
    Wait,
    /// It is done.
    Nothing,
}

#[derive(Clone, Copy, Debug)]
enum Phase {
    /// Writes the files' data to the disk in chunks, as write-back does. If it `is_paced`, the next
    /// chunk is being prepared.
    Write {
        chunks: u32,
        is_paced: bool,
    },
    /// Waits for its own data.
    Sync,
    /// Waits for the journal.
    Log,
    /// Reads a file from its start, with read-ahead. If it `is_paced`, the data is being used.
    Read {
        left: u32,
        is_paced: bool,
    },
    /// Reads directories and inodes one at a time.
    Meta {
        left: u32,
    },
    /// Waits until its own data is durable, and then ends.
    Finish,
    Done,
}

/// The filesystem's journal: one region for all clients, written sequentially.
#[derive(Debug, Default)]
pub(super) struct Log {
    head: u64,
}

impl Program {
    pub(super) fn new(id: usize, cpus: usize, rng: Rng) -> Self {
        let mut program = Self {
            id,
            cpu: id % cpus,
            cpus,
            rng,
            phase: Phase::Done,
            rounds: ROUNDS,
            written: 0,
            reading: 0,
            writes: 0,
            reads: 0,
        };
        program.begin_round();
        program
    }

    pub(super) fn is_done(&self) -> bool {
        matches!(self.phase, Phase::Done)
    }

    /// One of its bios has ended.
    pub(super) fn ended(&mut self, bio: &Bio) {
        if bio.op == Op::Read {
            self.reads -= 1;
        } else {
            self.writes -= 1;
        }
    }

    /// Returns its next action.
    pub(super) fn want(&mut self, now: Instant, log: &mut Log) -> Want {
        match self.phase {
            Phase::Write { chunks: 0, .. } => {
                self.phase = if self.rng.chance(SYNC) {
                    Phase::Sync
                } else {
                    self.read_phase()
                };
                self.want(now, log)
            }
            Phase::Write { chunks, is_paced } => self.write(chunks, is_paced, now),
            Phase::Sync if self.writes > 0 => Want::Wait,
            Phase::Sync => {
                self.phase = Phase::Log;
                self.writes += 1;
                let offset = LOG + log.head % LOG_BYTES;
                log.head += LOG_WRITE;
                Want::Submit(self.cpu, vec![self.bio(Op::Write, offset, LOG_WRITE)])
            }
            Phase::Log if self.writes > 0 => Want::Wait,
            Phase::Log => {
                self.phase = self.read_phase();
                self.want(now, log)
            }
            Phase::Read { left, is_paced } => self.read(left, is_paced, now, log),
            Phase::Meta { .. } if self.reads > 0 => Want::Wait,
            Phase::Meta { left: 0 } => self.think(now),
            Phase::Meta { left } => {
                self.phase = Phase::Meta { left: left - 1 };
                self.reads += 1;
                let offset = self.group() + self.rng.below(META_BYTES / BLOCK) * BLOCK;
                Want::Submit(self.cpu, vec![self.bio(Op::Read, offset, BLOCK)])
            }
            Phase::Finish if self.writes > 0 => Want::Wait,
            Phase::Finish => {
                self.phase = Phase::Done;
                Want::Nothing
            }
            Phase::Done => Want::Nothing,
        }
    }

    fn begin_round(&mut self) {
        self.phase = Phase::Write {
            chunks: self.rng.from_to(2, 8) as u32,
            is_paced: true,
        };
    }

    fn read_phase(&mut self) -> Phase {
        let files = self.written / FILE;
        self.reading = self.rng.below(files.max(1)) * FILE;
        Phase::Read {
            left: self.rng.from_to(4, 16) as u32,
            is_paced: true,
        }
    }

    /// A chunk of neighbouring bios, every other one from the CPU of a write-back worker.
    fn write(&mut self, chunks: u32, is_paced: bool, now: Instant) -> Want {
        if self.writes > DIRTY_MAX {
            return Want::Wait;
        }
        if !is_paced {
            self.phase = Phase::Write {
                chunks,
                is_paced: true,
            };
            return Want::Sleep(now + self.pace());
        }
        self.phase = Phase::Write {
            chunks: chunks - 1,
            is_paced: false,
        };
        let cpu = if chunks.is_multiple_of(2) {
            self.cpu
        } else {
            (self.cpu + self.cpus / 2) % self.cpus
        };
        let bios = (0..CHUNK).map(|_| {
            let offset = self.files() + self.written % FILES_BYTES;
            self.written += EXTENT;
            self.bio(Op::Write, offset, EXTENT)
        });
        let bios: Vec<Bio> = bios.collect();
        self.writes += bios.len() as u32;
        Want::Submit(cpu, bios)
    }

    fn read(&mut self, left: u32, is_paced: bool, now: Instant, log: &mut Log) -> Want {
        if left == 0 {
            self.phase = Phase::Meta {
                left: self.rng.from_to(0, 3) as u32,
            };
            return self.want(now, log);
        }
        if self.reads >= READ_AHEAD {
            return Want::Wait;
        }
        if !is_paced {
            self.phase = Phase::Read { left, is_paced: true };
            return Want::Sleep(now + self.pace());
        }
        self.phase = Phase::Read {
            left: left - 1,
            is_paced: false,
        };
        self.reads += 1;
        let offset = self.files() + self.reading % FILES_BYTES;
        self.reading += EXTENT;
        Want::Submit(self.cpu, vec![self.bio(Op::Read, offset, EXTENT)])
    }

    /// The time to fill or to use the memory of some I/O.
    fn pace(&mut self) -> Nanos {
        Nanos(self.rng.from_to(10_000, 60_000))
    }

    /// Thinks, and continues on a CPU that the system chooses.
    fn think(&mut self, now: Instant) -> Want {
        self.rounds -= 1;
        if self.rounds == 0 {
            self.phase = Phase::Finish;
            return Want::Sleep(now);
        }
        self.begin_round();
        if self.rng.chance(MIGRATE) {
            self.cpu = self.rng.below(self.cpus as u64) as usize;
        }
        Want::Sleep(now + Nanos(self.rng.below(THINK_MAX.0)))
    }

    fn bio(&self, op: Op, offset: u64, len: u64) -> Bio {
        Bio {
            op,
            offset,
            len,
            client: self.id as u32,
            data: Data::Token(self.id as u64),
            ..Bio::default()
        }
    }

    /// Its allocation group; clients are spread over the groups.
    fn group(&self) -> u64 {
        (self.id % GROUPS) as u64 * (DISK_BYTES / GROUPS as u64)
    }

    /// The place of its own files in the group.
    fn files(&self) -> u64 {
        self.group() + META_BYTES + (self.id / GROUPS) as u64 * FILES_BYTES
    }
}

/// The disk's size.
pub const DISK_BYTES: u64 = 512 << 30;
const GROUPS: usize = 4;
/// Directories and inodes of a group, at its start.
const META_BYTES: u64 = 1 << 30;
/// The journal: in the middle of the disk, at the end of a group.
const LOG: u64 = DISK_BYTES / 2 - LOG_BYTES;
const LOG_BYTES: u64 = 1 << 30;
const LOG_WRITE: u64 = 8 << 10;
/// A client's files.
const FILES_BYTES: u64 = 256 << 20;
const FILE: u64 = 1 << 20;
const EXTENT: u64 = 32 << 10;
const BLOCK: u64 = 4 << 10;
/// Bios in a chunk of write-back.
const CHUNK: u32 = 4;
/// With more writes under way a client waits, as it does for dirty pages.
const DIRTY_MAX: u32 = 32;
const READ_AHEAD: u32 = 2;
const ROUNDS: u32 = 6;
const SYNC: Ppm = Ppm::percent(30);
const MIGRATE: Ppm = Ppm::percent(10);
const THINK_MAX: Nanos = Nanos::from_millis(8);
