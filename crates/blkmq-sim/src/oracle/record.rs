//! Follows a bio and checks its course: submitted once, issued in parts that do not overlap, completed
//! once, with a status that the drive's answers explain. It also has the bios' buffers, so that none is
//! touched after its bio has completed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use blkmq_core::bio::{Bio, Data, Op, Status};
use blkmq_core::group::ROOT;
use blkmq_core::ids::{GroupId, ReactorId};

use super::content::{Snapshot, Tick};
use super::part_ends::PartEnds;
use super::wire::{Busy, Piece};

/// The bios under way.
#[derive(Debug, Default)]
pub(super) struct BioRecords {
    by_token: BTreeMap<u64, BioRecord>,
    /// A bio may be moved to another group while it is under way.
    groups_change: bool,
    /// Ends arrive in the order in which they are reported.
    one_reactor: bool,
}

/// One bio under way.
#[derive(Debug)]
pub(super) struct BioRecord {
    pub(super) bio: Bio,
    /// Its blocks, in the order of its buffer.
    pub(super) blocks: Rc<[u32]>,
    /// Which of its parts have ended, and which error came first.
    pub(super) part_ends: PartEnds,
    pub(super) reactor: ReactorId,
    pub(super) submitted: Tick,
    /// The result of `Limits::check_bio`, with which an invalid bio ends; such a bio must never be
    /// issued.
    pub(super) verdict: Result<(), Status>,
    /// Bytes that the drive has reported as done.
    pub(super) done: u64,
    /// Bytes at the drive.
    pub(super) in_flight: u64,
    /// The errors that the drive reported for parts of it: a set of status numbers.
    pub(super) errors: u32,
    /// Its buffer, one number per block.
    pub(super) buffer: Vec<u64>,
    pub(super) snapshot: Snapshot,
}

impl BioRecord {
    /// Adds an error to those with which the bio may end.
    pub(super) fn failed(&mut self, status: Status) {
        self.errors |= 1 << status as u8;
    }

    /// Says whether the bio may end with `status`, if flushes of its disk failed with
    /// `flush_errors` meanwhile.
    fn explains(&self, status: Status, flush_errors: u32) -> bool {
        if let Err(verdict) = self.verdict {
            return status == verdict && self.done == 0;
        }
        if status.is_ok() {
            return self.done == self.bio.len && self.errors == 0;
        }
        (self.errors | flush_errors) & (1 << status as u8) != 0
    }
}

impl BioRecords {
    pub(super) fn new(groups_change: bool, one_reactor: bool) -> Self {
        Self {
            by_token: BTreeMap::new(),
            groups_change,
            one_reactor,
        }
    }

    pub(super) fn start(&mut self, token: u64, record: BioRecord) -> Result<(), String> {
        match self.by_token.insert(token, record) {
            None => Ok(()),
            Some(_) => Err(format!("bio {token} submitted twice")),
        }
    }

    pub(super) fn get(&mut self, token: u64) -> Result<&mut BioRecord, String> {
        self.by_token
            .get_mut(&token)
            .ok_or_else(|| format!("bio {token} is not under way"))
    }

    pub(super) fn remove(&mut self, token: u64) {
        self.by_token.remove(&token);
    }

    pub(super) fn len(&self) -> usize {
        self.by_token.len()
    }

    pub(super) fn tokens(&self) -> Vec<u64> {
        self.by_token.keys().copied().take(8).collect()
    }

    /// Returns the largest number of requests that the bios of each reactor can need, with blocks
    /// of `block` bytes.
    pub(super) fn parts_max(&self, block: u64) -> BTreeMap<ReactorId, u64> {
        let mut parts_max = BTreeMap::new();
        for record in self.by_token.values() {
            *parts_max.entry(record.reactor).or_default() += record.bio.len.div_ceil(block).max(1);
        }
        parts_max
    }

    /// Says whether a flush may be under way.
    pub(super) fn any_depends_on_flush(&self) -> bool {
        self.by_token.values().any(|record| depends_on_flush(&record.bio))
    }

    /// The group of a request at the drive.
    pub(super) fn group_of(&self, busy: &Busy) -> Option<GroupId> {
        let piece = busy.pieces.first()?;
        self.by_token
            .get(&piece.token)
            .map(|record| self.counts_in(record))
    }

    /// The group in which a bio is counted. Where groups come and go, nobody here knows it: all are one.
    fn counts_in(&self, record: &BioRecord) -> GroupId {
        if self.groups_change {
            ROOT
        } else {
            record.bio.group
        }
    }

    /// Returns a bio of a reactor and group for which `counts` is true that waits only for room at the drive:
    /// it depends on no flush, and no part of it has been issued.
    pub(super) fn waiting_for_room(&self, counts: impl Fn(ReactorId, GroupId) -> bool) -> Option<u64> {
        let waits = |record: &BioRecord| {
            let untouched = record.done == 0 && record.in_flight == 0 && record.errors == 0;
            untouched && record.verdict.is_ok() && !depends_on_flush(&record.bio)
        };
        let mut records = self.by_token.iter();
        let found =
            records.find(|(_, record)| waits(record) && counts(record.reactor, self.counts_in(record)));
        found.map(|(&token, _)| token)
    }

    /// Returns a bio of a reactor of which some bytes are done and some are at the drives.
    pub(super) fn half_done(&self, reactor: ReactorId) -> Option<Bio> {
        let is_half =
            |record: &&BioRecord| record.reactor == reactor && record.done > 0 && record.in_flight > 0;
        self.by_token
            .values()
            .find(is_half)
            .map(|record| record.bio.clone())
    }

    /// Returns the writes under way that carry data.
    pub(super) fn writes(&self) -> impl Iterator<Item = &BioRecord> {
        let records = self.by_token.values();
        records.filter(|record| record.bio.op == Op::Write && record.verdict.is_ok())
    }

    pub(super) fn clear(&mut self) {
        self.by_token.clear();
    }

    /// Ends a bio, and checks that it is the one that was submitted and that its status is explained.
    pub(super) fn end(
        &mut self,
        reactor: ReactorId,
        ended: &Bio,
        flush_errors: impl Fn(&BioRecord) -> u32,
    ) -> Result<BioRecord, String> {
        let token = ended.cookie;
        let record = self
            .by_token
            .remove(&token)
            .ok_or_else(|| format!("bio {token} ended ({:?}) but is not under way", ended.status))?;
        if record.reactor != reactor {
            return Err(format!(
                "bio {token} of reactor {} ended at {reactor}",
                record.reactor
            ));
        }
        if !same(&record.bio, ended) || ended.group != record.bio.group && !self.groups_change {
            return Err(format!("bio {token} came back changed: {ended:?}"));
        }
        if record.in_flight > 0 {
            return Err(format!(
                "bio {token} ended with {} bytes at the drive",
                record.in_flight
            ));
        }
        if !record.explains(ended.status, flush_errors(&record)) {
            return Err(format!(
                "bio {token} ended with {:?}: {} of {} bytes done, errors {:#x}, expected {:?}: {ended:?}",
                ended.status, record.done, record.bio.len, record.errors, record.verdict
            ));
        }
        // The error of a flush that the bio depends on belongs to none of its parts.
        let first = record.part_ends.first_error();
        if self.one_reactor
            && !depends_on_flush(ended)
            && let Some(first) = first.filter(|first| *first != ended.status)
        {
            return Err(format!(
                "bio {token} ended with {:?}, but the first error of its parts was {first:?}",
                ended.status
            ));
        }
        Ok(record)
    }

    /// Records that a part of a bio is issued for blocks of the drives. Checks that the bio has
    /// this part, and that it is neither issued nor done.
    pub(super) fn part_issued(
        &mut self,
        part: &Bio,
        mut blocks: Range<u32>,
        block: u64,
    ) -> Result<(), String> {
        let token = token_of(part).ok_or("a part without its token was issued")?;
        let groups_change = self.groups_change;
        let record = self.get(token)?;
        let whole = &record.bio;
        let is_group = part.group == whole.group || groups_change;
        let inside = if part.op.has_data() {
            let index = (part.skip / block) as usize;
            let expected = record.blocks.get(index..index + blocks.len());
            expected.is_some_and(|expected| blocks.eq(expected.iter().copied()))
        } else {
            blocks.all(|block| record.blocks.contains(&block))
        };
        if part.op != whole.op || !is_group || !inside {
            return Err(format!("issued {part:?}, which is no part of {whole:?}"));
        }
        if let Err(verdict) = record.verdict {
            return Err(format!(
                "bio {token} was issued, but had to be refused with {verdict:?}"
            ));
        }
        record.in_flight += part.len;
        if record.done + record.in_flight > whole.len {
            return Err(format!("parts of bio {token} were issued twice: {part:?}"));
        }
        Ok(())
    }

    /// Records that a part has left the drive, with or without its end.
    pub(super) fn part_left(
        &mut self,
        piece: &Piece,
        status: Option<Status>,
        block: u32,
    ) -> Result<(), String> {
        let (record, bytes) = (self.get(piece.token)?, piece.bytes);
        record.in_flight -= bytes;
        let status = status.filter(|status| *status != Status::Requeue);
        if let Some(status) = status
            && record.bio.op.has_data()
        {
            let blocks = |bytes: u64| (bytes / u64::from(block)) as usize;
            let all = record.blocks.len();
            record
                .part_ends
                .reported(blocks(piece.skip), blocks(bytes), all, status);
        }
        match status {
            None => {}
            Some(Status::Ok) => record.done += bytes,
            Some(error) => record.failed(error),
        }
        Ok(())
    }
}

/// Returns the token that a bio or a part of it carries.
pub(super) fn token_of(bio: &Bio) -> Option<u64> {
    match bio.data {
        Data::Token(token) => Some(token),
        _ => None,
    }
}

fn same(a: &Bio, b: &Bio) -> bool {
    let range = |bio: &Bio| (bio.op, bio.disk, bio.offset, bio.len, bio.skip);
    let own = |bio: &Bio| (bio.prio, bio.client, bio.cookie, token_of(bio));
    range(a) == range(b) && own(a) == own(b)
}

/// Says whether a bio of this kind can fail because of a flush.
pub(super) fn depends_on_flush(bio: &Bio) -> bool {
    use blkmq_core::bio::Flags;
    bio.op == Op::Flush || bio.flags.has_any(Flags::FUA.with(Flags::PREFLUSH))
}
