//! The history of a run: its facts are folded into one digest by which two runs are compared. The last
//! facts are kept for the report of a failure; `--trace` prints all.

use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

use blkmq_core::bio::{Flags, Op, Status};
use blkmq_core::ids::{DiskId, GroupId, HctxId, ReactorId, Tag};
use blkmq_core::sched::ElevatorType;
use blkmq_core::time::Instant;

/// One fact of a history.
#[derive(Clone, Copy, Debug, Hash)]
#[expect(
    missing_docs,
    reason = "the names of the fields say it, and `--trace` prints them"
)]
pub enum Fact {
    /// A client gave a bio to its reactor.
    Submit {
        reactor: ReactorId,
        token: u64,
        op: Op,
        flags: Flags,
        disk: DiskId,
        offset: u64,
        len: u64,
    },
    /// The core refused the bio: too many wait.
    Refused { reactor: ReactorId, token: u64 },
    /// A bio came back.
    End {
        reactor: ReactorId,
        token: u64,
        status: Status,
    },
    /// The drive was given a request.
    Issue {
        hctx: HctxId,
        tag: Tag,
        op: Op,
        disk: DiskId,
        offset: u64,
        len: u64,
        bios: u32,
        answer: Answer,
    },
    /// The drive reported an end.
    Done {
        hctx: HctxId,
        tag: Tag,
        generation: u32,
        status: Status,
    },
    /// The core told the drive that a request has timed out.
    TimedOut { hctx: HctxId, tag: Tag, ended: bool },
    /// A reactor went to sleep, until `until` if there is one.
    Sleep { reactor: ReactorId, until: Option<u64> },
    /// A reactor was woken.
    Wake { reactor: ReactorId },
    /// An attached thread stopped looking.
    Away { reactor: ReactorId, until: u64 },
    /// The control thread froze the queue, or ended the freeze.
    Freeze { begin: bool },
    /// The control thread quiesced the queue, or ended the quiesce.
    Quiesce { begin: bool },
    /// The queue was found drained, or quiesced.
    Still { frozen: bool },
    /// The elevator was switched.
    Switch { to: &'static ElevatorType },
    /// The depth was changed.
    Depth { to: u32 },
    /// A group was made, weighted, capped, moved or removed, or that change was refused.
    Group {
        change: GroupChange,
        group: GroupId,
        done: bool,
    },
    /// The power failed; the drive keeps what is durable.
    PowerCut,
}

/// A change of a group.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq)]
pub enum GroupChange {
    /// Made below the named one.
    Create,
    /// Given another weight.
    Weigh,
    /// Given caps, or none.
    Cap,
    /// Given a latency target, or none.
    Target,
    /// Made part of another.
    Move,
    /// Removed.
    Remove,
}

/// What the drive answered to an issue.
#[derive(Clone, Copy, Debug, Hash)]
pub enum Answer {
    /// Taken.
    Queued,
    /// Done at once.
    Done(Status),
    /// No resource.
    Resource,
    /// No device resource.
    DeviceResource,
}

/// The history of one run.
#[derive(Debug, Default)]
pub struct History {
    digest: Digest,
    facts: u64,
    last: VecDeque<(Instant, Fact)>,
    trace: bool,
}

impl History {
    /// Starts a history; `trace` prints every fact as it is added.
    pub fn new(trace: bool) -> Self {
        Self {
            trace,
            ..Self::default()
        }
    }

    /// Adds a fact.
    pub fn note(&mut self, now: Instant, fact: Fact) {
        now.hash(&mut self.digest);
        fact.hash(&mut self.digest);
        self.facts += 1;
        if self.trace {
            println!("{}", line(now, &fact));
        }
        if self.last.len() == Self::KEPT {
            self.last.pop_front();
        }
        self.last.push_back((now, fact));
    }

    /// Returns the digest of all facts so far.
    pub fn digest(&self) -> u64 {
        self.digest.finish()
    }

    /// Returns how many facts there are.
    pub fn len(&self) -> u64 {
        self.facts
    }

    /// Says whether there are no facts.
    pub fn is_empty(&self) -> bool {
        self.facts == 0
    }

    /// Returns the last facts, one a line.
    pub fn tail(&self) -> String {
        self.last
            .iter()
            .map(|(now, fact)| line(*now, fact) + "\n")
            .collect()
    }

    const KEPT: usize = 40;
}

fn line(now: Instant, fact: &Fact) -> String {
    format!("{:>12} ns  {fact:?}", now.0)
}

/// A 64-bit fold by multiplication and rotation. It is not for hash tables: it only ensures that
/// equal histories have equal digests.
#[derive(Debug, Default)]
struct Digest(u64);

impl Digest {
    fn fold(&mut self, word: u64) {
        self.0 = (self.0 ^ word)
            .wrapping_mul(0x9e37_79b9_7f4a_7c15)
            .rotate_left(29);
    }
}

impl Hasher for Digest {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for chunk in bytes.chunks(8) {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            self.fold(u64::from_le_bytes(word));
        }
    }

    fn write_u64(&mut self, word: u64) {
        self.fold(word);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digest_depends_on_facts_times_and_order() {
        let of = |facts: &[(u64, u16)]| {
            let mut history = History::new(false);
            for &(at, id) in facts {
                history.note(
                    Instant(at),
                    Fact::Wake {
                        reactor: ReactorId(id),
                    },
                );
            }
            history.digest()
        };
        assert_eq!(of(&[(1, 2), (3, 4)]), of(&[(1, 2), (3, 4)]));
        assert_ne!(of(&[(1, 2), (3, 4)]), of(&[(3, 4), (1, 2)]));
        assert_ne!(of(&[(1, 2)]), of(&[(1, 3)]));
        assert_ne!(of(&[(1, 2)]), of(&[(2, 2)]));
    }
}
