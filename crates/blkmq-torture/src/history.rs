//! The history of a disk's sectors: what each may hold, and what it must, from all that was sent to it
//! since what is known to be durable. [`crate::load`] tells it what was sent, answered and read; a crash
//! asks it last.
//!
//! Of changes of one sector never two are under way, so they have an order, in which they were sent:
//!
//! ```text
//!  durable ─ … ─ answered ─ … ─ latest
//!     └──────────── after a crash ──┘
//!                   └─ when read ───┘
//! ```
//!
//! A flush that was acknowledged moves `durable` up to what had been answered before the flush was sent, and an acknowledged
//! FUA to that change itself. A discard gives zeroes or leaves what was there, so it moves neither.

use std::collections::BTreeSet;
use std::fmt;
use std::ops::Range;

use crate::load::Allowed;
use crate::medium::SECTOR_BYTES;

/// What is known of a disk.
#[derive(Debug)]
pub struct History {
    sectors: Vec<Sector>,
    /// Sectors that may hold more than one thing.
    uncertain: BTreeSet<usize>,
    /// Counts what happens: requests sent and answered.
    now: u64,
}

/// The number of a change, from 1; 0 is a sector that was never written.
pub type Change = u64;

/// How a sector is changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// To data of its own: [`content`].
    Write,
    /// To zeroes.
    Zero,
    /// To zeroes, or not at all.
    Discard,
}

/// What is wrong with a sector.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// What it holds was there once, and something later has to be.
    Lost(String),
    /// What it holds was never written there.
    Foreign(String),
}

#[derive(Debug)]
struct Sector {
    /// What it may hold, the oldest first: what is durable, and everything behind.
    versions: Vec<Version>,
    is_busy: bool,
}

#[derive(Clone, Copy, Debug)]
struct Version {
    change: Change,
    kind: Kind,
    /// When it was answered, without an error.
    answered: Option<u64>,
}

impl History {
    /// Makes the history of a disk of zeroes.
    pub fn new(sectors: usize) -> Self {
        let sector = || Sector {
            versions: vec![Version::UNWRITTEN],
            is_busy: false,
        };
        Self {
            sectors: (0..sectors).map(|_| sector()).collect(),
            uncertain: BTreeSet::new(),
            now: 0,
        }
    }

    /// Returns how many sectors there are.
    pub fn sectors(&self) -> usize {
        self.sectors.len()
    }

    /// Returns how many sectors may hold more than one thing after a crash.
    pub fn uncertain(&self) -> usize {
        self.uncertain.len()
    }

    /// Says whether something is under way on a sector of the range.
    pub fn is_busy(&self, range: Range<usize>) -> bool {
        self.sectors[range].iter().any(|sector| sector.is_busy)
    }

    /// Notes that a read of the range is sent: nothing else may use it until [`History::read_ended`].
    pub fn read_sent(&mut self, range: Range<usize>) {
        self.set_busy(range, true);
    }

    /// Checks what was read. Where the page cache may have lost what was answered, and not yet told, that may be as old as what is durable.
    ///
    /// # Errors
    /// The first sector that holds what it may not.
    pub fn read_ended(&mut self, range: Range<usize>, data: &[u8], allowed: Allowed) -> Result<(), Wrong> {
        self.set_busy(range.clone(), false);
        if allowed.lost_clusters {
            return Ok(());
        }
        for (index, found) in range.zip(data.chunks(SECTOR_BYTES)) {
            let sector = &self.sectors[index];
            let from = match allowed.stale_reads {
                true => 0,
                false => sector.answered(self.now),
            };
            sector.find(index, from, found)?;
        }
        Ok(())
    }

    /// Notes that a change of the range is sent, and numbers it.
    pub fn change_sent(&mut self, range: Range<usize>, kind: Kind) -> Change {
        self.now += 1;
        self.set_busy(range.clone(), true);
        for sector in &mut self.sectors[range.clone()] {
            sector.versions.push(Version {
                change: self.now,
                kind,
                answered: None,
            });
        }
        self.uncertain.extend(range);
        self.now
    }

    /// Notes that the latest change of a range was answered.
    pub fn change_ended(&mut self, range: Range<usize>, is_done: bool, is_durable: bool) {
        self.now += 1;
        self.set_busy(range.clone(), false);
        if !is_done {
            return;
        }
        for sector in &mut self.sectors[range.clone()] {
            sector.versions.last_mut().expect("it was sent").answered = Some(self.now);
        }
        for index in range {
            // A discard that is durable may be durable in having done nothing.
            let latest = self.sectors[index].versions.last().expect("it was sent");
            if is_durable && latest.kind != Kind::Discard {
                self.make_durable(index, self.now + 1);
            }
        }
    }

    /// Notes that a flush is sent, and returns when.
    pub fn flush_sent(&mut self) -> u64 {
        self.now += 1;
        self.now
    }

    /// Notes that a flush which was sent at that time was acknowledged.
    pub fn flush_ended(&mut self, sent: u64) {
        for index in std::mem::take(&mut self.uncertain) {
            self.make_durable(index, sent);
        }
    }

    /// Takes what a crash has left of the whole disk: it must be allowed, and then it is what is durable.
    ///
    /// # Errors
    /// The first sector that holds what it may not.
    pub fn crashed(&mut self, data: &[u8]) -> Result<(), Wrong> {
        assert_eq!(data.len(), self.sectors.len() * SECTOR_BYTES, "the whole disk");
        for (index, found) in data.chunks(SECTOR_BYTES).enumerate() {
            let sector = &mut self.sectors[index];
            let at = sector.find(index, 0, found)?;
            let version = sector.versions[at];
            sector.versions = vec![Version {
                kind: if version.kind == Kind::Discard {
                    Kind::Zero
                } else {
                    version.kind
                },
                answered: Some(self.now),
                ..version
            }];
            sector.is_busy = false;
        }
        self.uncertain.clear();
        Ok(())
    }

    fn set_busy(&mut self, range: Range<usize>, is_busy: bool) {
        for sector in &mut self.sectors[range] {
            sector.is_busy = is_busy;
        }
    }

    /// What was answered before `time` is durable.
    fn make_durable(&mut self, index: usize, time: u64) {
        let versions = &mut self.sectors[index].versions;
        let at = last_answered(versions, time);
        versions.drain(..at);
        if versions.len() > 1 {
            self.uncertain.insert(index);
        } else {
            self.uncertain.remove(&index);
        }
    }
}

impl Sector {
    fn answered(&self, now: u64) -> usize {
        last_answered(&self.versions, now + 1)
    }

    /// Returns the version that was found, which must not be older than the one at `from`.
    fn find(&self, index: usize, from: usize, found: &[u8]) -> Result<usize, Wrong> {
        let is_found = |version: &Version| version.content(index)[..] == *found;
        if let Some(at) = self.versions[from..].iter().rposition(is_found) {
            return Ok(from + at);
        }
        let wanted: Vec<String> = self.versions[from..].iter().map(Version::to_string).collect();
        let wanted = wanted.join(" or ");
        if found.iter().all(|byte| *byte == 0) {
            return Err(Wrong::Lost(format!(
                "sector {index} holds zeroes, wanted {wanted}"
            )));
        }
        let words =
            [0, 1, 2].map(|word| u64::from_le_bytes(found[word * 8..][..8].try_into().expect("eight bytes")));
        if content(index, words[2])[..] == *found {
            return Err(Wrong::Lost(format!(
                "sector {index} holds change {}, wanted {wanted}",
                words[2]
            )));
        }
        Err(Wrong::Foreign(format!(
            "sector {index} holds what was never written there, wanted {wanted}; it begins with {words:#x?}"
        )))
    }
}

impl Version {
    const UNWRITTEN: Self = Self {
        change: 0,
        kind: Kind::Zero,
        answered: Some(0),
    };

    fn content(&self, index: usize) -> [u8; SECTOR_BYTES] {
        match self.kind {
            Kind::Write => content(index, self.change),
            Kind::Zero | Kind::Discard => [0; SECTOR_BYTES],
        }
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            Kind::Write => write!(f, "change {}", self.change),
            Kind::Zero => write!(f, "zeroes (change {})", self.change),
            Kind::Discard => write!(f, "zeroes (discard {})", self.change),
        }
    }
}

/// Returns the latest version that was answered before `time` and is certain to be there, 0 if there is none.
fn last_answered(versions: &[Version], time: u64) -> usize {
    let is_answered = |version: &Version| {
        version.kind != Kind::Discard && version.answered.is_some_and(|answered| answered < time)
    };
    versions.iter().rposition(is_answered).unwrap_or(0)
}

/// Returns the data that a change writes to a sector: its place and number, and what follows from them.
pub fn content(index: usize, change: Change) -> [u8; SECTOR_BYTES] {
    let mut bytes = [0; SECTOR_BYTES];
    let mut word = MARK ^ (index as u64) << 40 ^ change << 8;
    for (at, place) in bytes.chunks_exact_mut(8).enumerate() {
        let value = match at {
            0 => MARK,
            1 => index as u64,
            2 => change,
            _ => {
                word = word
                    .wrapping_mul(0x5851_f42d_4c95_7f2d)
                    .wrapping_add(0x1405_7b7e_f767_814f);
                word
            }
        };
        place.copy_from_slice(&value.to_le_bytes());
    }
    bytes
}

const MARK: u64 = 0x6b63_6f6c_6220_7571;

#[cfg(test)]
mod tests {
    use super::*;

    fn changed(history: &mut History, kind: Kind, is_forced: bool) -> Change {
        let change = history.change_sent(0..1, kind);
        history.change_ended(0..1, true, is_forced);
        change
    }

    /// Says for each of the contents whether a crash may leave it.
    fn may_be<const N: usize>(build: impl Fn() -> History, found: [[u8; SECTOR_BYTES]; N]) -> [bool; N] {
        found.map(|found| build().crashed(&found).is_ok())
    }

    #[test]
    fn before_a_flush_anything_that_was_sent_may_be_there() {
        let build = || {
            let mut history = History::new(1);
            changed(&mut history, Kind::Write, false);
            history
        };
        let found = [[0; 512], content(0, 1), content(0, 7), content(1, 1)];
        assert_eq!(may_be(build, found), [true, true, false, false]);
    }

    #[test]
    fn flush_covers_what_was_answered_before_it_was_sent() {
        let build = |is_in_time: bool| {
            let mut history = History::new(1);
            let mut sent = history.flush_sent();
            assert_eq!(changed(&mut history, Kind::Write, false), 2);
            if is_in_time {
                sent = history.flush_sent();
            }
            history.flush_ended(sent);
            history
        };
        let found = [[0; 512], content(0, 2)];
        assert_eq!(may_be(|| build(true), found), [false, true]);
        assert_eq!(may_be(|| build(false), found), [true, true]);
    }

    #[test]
    fn forced_write_is_durable_and_one_that_failed_may_be_there_or_not() {
        let build = || {
            let mut history = History::new(1);
            assert_eq!(changed(&mut history, Kind::Write, true), 1);
            history.change_sent(0..1, Kind::Write);
            history.change_ended(0..1, false, true);
            history
        };
        assert_eq!(
            may_be(build, [[0; 512], content(0, 1), content(0, 3)]),
            [false, true, true]
        );
    }

    #[test]
    fn discard_proves_nothing_even_if_it_was_forced() {
        let build = || {
            let mut history = History::new(1);
            changed(&mut history, Kind::Write, false);
            changed(&mut history, Kind::Discard, true);
            history
        };
        assert_eq!(may_be(build, [[0; 512], content(0, 1)]), [true, true]);
    }

    #[test]
    fn read_sees_the_latest_answered_change_and_what_a_crash_left_stays() {
        let mut history = History::new(1);
        changed(&mut history, Kind::Write, false);
        let latest = changed(&mut history, Kind::Write, false);
        assert!(matches!(
            history.read_ended(0..1, &content(0, 1), Allowed::NOTHING),
            Err(Wrong::Lost(_))
        ));
        assert_eq!(
            history.read_ended(0..1, &content(0, latest), Allowed::NOTHING),
            Ok(())
        );
        assert_eq!(history.crashed(&content(0, 1)), Ok(()));
        assert!(matches!(
            history.crashed(&content(0, latest)),
            Err(Wrong::Lost(_))
        ));
    }

    #[test]
    fn data_of_another_place_is_not_ours() {
        let mut history = History::new(1);
        let wrong = history.crashed(&content(1, 1));
        assert!(matches!(wrong, Err(Wrong::Foreign(_))), "{wrong:?}");
    }
}
