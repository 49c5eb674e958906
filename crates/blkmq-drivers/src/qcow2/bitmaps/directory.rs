//! The directory of an image's bitmaps, as the format has it: an entry for each, with its name and where its table is.
//! `stored` reads and writes it; `docs/interop/qcow2.rst` of QEMU describes it.

use std::collections::BTreeSet;

/// An entry of the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Where the table of the bitmap is, in bytes, and how many entries of 8 bytes it has.
    pub(super) table_offset: u64,
    pub(super) table_entries: u32,
    pub(super) flags: u32,
    pub(super) kind: u8,
    pub(super) granularity_bits: u8,
    pub(super) name: Vec<u8>,
    /// What no version of the format has given a meaning.
    pub(super) extra: Vec<u8>,
}

/// Reads a directory of `count` entries, and nothing else. `None` if that is not what it is.
pub(super) fn parse(mut bytes: &[u8], count: u32) -> Option<Vec<Entry>> {
    let mut entries = Vec::new();
    let mut names = BTreeSet::new();
    for _ in 0..count {
        let (entry, len) = Entry::parse(bytes)?;
        bytes = &bytes[len..];
        if !names.insert(entry.name.clone()) {
            return None;
        }
        entries.push(entry);
    }
    bytes.is_empty().then_some(entries)
}

/// The bytes of a directory.
pub(super) fn bytes<'a>(entries: impl Iterator<Item = &'a Entry>) -> Vec<u8> {
    let mut bytes = Vec::new();
    entries.for_each(|entry| entry.append_to(&mut bytes));
    bytes
}

impl Entry {
    /// Reads an entry. Returns its length, too.
    fn parse(bytes: &[u8]) -> Option<(Self, usize)> {
        let head: &[u8; HEAD_BYTES] = bytes.get(..HEAD_BYTES)?.try_into().ok()?;
        let u32_at = |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let name_len = usize::from(u16::from_be_bytes([head[18], head[19]]));
        let extra_len = u32_at(20) as usize;
        let name_at = HEAD_BYTES.checked_add(extra_len)?;
        let end = name_at.checked_add(name_len)?;
        let len = end.checked_next_multiple_of(8)?;
        let rest = bytes.get(..len)?;
        let entry = Self {
            table_offset: u64::from(u32_at(0)) << 32 | u64::from(u32_at(4)),
            table_entries: u32_at(8),
            flags: u32_at(12),
            kind: head[16],
            granularity_bits: head[17],
            name: rest[name_at..end].to_vec(),
            extra: rest[HEAD_BYTES..name_at].to_vec(),
        };
        let is_sound = name_len > 0 && entry.flags & !FLAGS == 0 && rest[end..].iter().all(|byte| *byte == 0);
        is_sound.then_some((entry, len))
    }

    fn append_to(&self, bytes: &mut Vec<u8>) {
        bytes.extend_from_slice(&self.table_offset.to_be_bytes());
        bytes.extend_from_slice(&self.table_entries.to_be_bytes());
        bytes.extend_from_slice(&self.flags.to_be_bytes());
        bytes.extend_from_slice(&[self.kind, self.granularity_bits]);
        bytes.extend_from_slice(&(self.name.len() as u16).to_be_bytes());
        bytes.extend_from_slice(&(self.extra.len() as u32).to_be_bytes());
        bytes.extend_from_slice(&self.extra);
        bytes.extend_from_slice(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }

    /// Returns whether what the file has of it may be missing changes.
    pub(super) fn is_in_use(&self) -> bool {
        self.flags & IN_USE != 0
    }

    /// Returns whether it has to have all changes of the disk.
    pub(super) fn is_auto(&self) -> bool {
        self.flags & AUTO != 0
    }

    /// Returns whether its bits mean what this driver takes them for.
    pub(super) fn is_known(&self) -> bool {
        let has_unknown = !self.extra.is_empty() && self.flags & EXTRA_COMPATIBLE == 0;
        self.kind == DIRTY && !has_unknown && GRANULARITY_BITS.contains(&u32::from(self.granularity_bits))
    }
}

/// The kind of bitmaps that have a bit for each part of the disk that has changed.
pub(super) const DIRTY: u8 = 1;
/// The flag of a bitmap that is used: the file is behind it.
pub(super) const IN_USE: u32 = 1;
/// That of one which all changes of the disk have to be in.
pub(super) const AUTO: u32 = 2;
/// That of one which can be used by those who do not know its extra data.
const EXTRA_COMPATIBLE: u32 = 4;
const FLAGS: u32 = IN_USE | AUTO | EXTRA_COMPATIBLE;
/// Bytes of an entry before its extra data and its name.
const HEAD_BYTES: usize = 24;
/// The logarithm of the bytes that a bit stands for: what QEMU takes.
pub(super) const GRANULARITY_BITS: std::ops::RangeInclusive<u32> = 9..=31;

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, extra: &[u8]) -> Entry {
        Entry {
            table_offset: 0x5_0001_0000,
            table_entries: 7,
            flags: AUTO,
            kind: DIRTY,
            granularity_bits: 16,
            name: name.as_bytes().to_vec(),
            extra: extra.to_vec(),
        }
    }

    #[test]
    fn directory_is_read_as_it_was_written_and_refused_wherever_it_is_cut() {
        let entries = [entry("monday", &[]), entry("a", &[1, 2, 3])];
        let written = bytes(entries.iter());
        assert_eq!(
            (written.len(), written[24..30].to_vec()),
            (64, b"monday".to_vec())
        );
        assert_eq!(parse(&written, 2).unwrap(), entries);
        for cut in 0..written.len() {
            assert_eq!(parse(&written[..cut], 2), None, "cut at {cut}");
        }
        assert_eq!(parse(&written, 1), None, "more follows");
        assert_eq!(parse(&written, 3), None, "fewer are there");
    }

    #[test]
    fn directory_with_what_the_format_does_not_have_is_refused() {
        let change = |at: usize, value: u8| {
            let mut written = bytes([entry("monday", &[])].iter());
            written[at] = value;
            parse(&written, 1)
        };
        assert!(change(31, 0).is_some());
        assert_eq!(change(31, 1), None, "padding");
        assert_eq!(change(15, 8), None, "a flag");
        assert_eq!(change(20, 255), None, "extra data without end");
        let twice = [entry("a", &[]), entry("a", &[])];
        assert_eq!(parse(&bytes(twice.iter()), 2), None, "a name twice");
        assert!(!entry("a", &[1]).is_known() && entry("a", &[]).is_known());
    }
}
