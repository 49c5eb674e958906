//! The entries of an image's tables, as the format has them: what an entry of an L2 table says, and the refcounts
//! in a block. `docs/interop/qcow2.rst` of QEMU describes them.

use std::io;
use std::ops::Range;

use super::super::header::{Compression, Header};
use super::table::Table;

/// What the meaning of an entry depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qcow2) struct Format {
    pub(in crate::qcow2) cluster_bits: u32,
    refcount_order: u32,
    has_zeroes: bool,
    compression: Compression,
    pub(super) has_subclusters: bool,
    pub(super) has_data_file: bool,
}

/// An entry of an L2 table.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) word: u64,
    /// Of each subcluster, whether it is there (the lower half), and whether it reads as zeroes.
    pub(super) subclusters: u64,
}

/// Where a cluster or a subcluster is, as its entry says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qcow2) enum Place {
    /// Not in this image: what is below shows.
    Below,
    /// It reads as zeroes. A cluster at byte `spare` may be kept for it.
    Zero { spare: Option<u64> },
    /// At this byte of the file that has the data. It may be written if nobody else has it (`is_own`).
    Data { host: u64, is_own: bool },
    /// Compressed.
    Packed(Packed),
}

/// A compressed cluster: it ends before `host + len`, in bytes of the image's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::qcow2) struct Packed {
    pub(in crate::qcow2) host: u64,
    pub(in crate::qcow2) len: u64,
    pub(in crate::qcow2) compression: Compression,
}

impl Format {
    pub(super) fn of(header: &Header) -> Self {
        Self {
            cluster_bits: header.cluster_bits,
            refcount_order: header.refcount_order,
            has_zeroes: header.version >= 3,
            compression: header.compression,
            has_subclusters: header.has_subclusters,
            has_data_file: header.has_data_file,
        }
    }

    /// Bytes of a cluster.
    pub(in crate::qcow2) fn cluster(self) -> u64 {
        1 << self.cluster_bits
    }

    /// The logarithm of the bytes that have a place of their own.
    pub(super) fn unit_bits(self) -> u32 {
        self.cluster_bits - if self.has_subclusters { 5 } else { 0 }
    }

    /// Those in a cluster.
    pub(super) fn units(self) -> u64 {
        1 << (self.cluster_bits - self.unit_bits())
    }

    /// Entries of an L2 table.
    pub(super) fn l2_entries(self) -> u64 {
        self.cluster() / if self.has_subclusters { 16 } else { 8 }
    }

    /// An entry of an L2 table.
    pub(super) fn entry(self, table: &Table, index: u64) -> Entry {
        match self.has_subclusters {
            true => Entry {
                word: table.entry(2 * index),
                subclusters: table.entry(2 * index + 1),
            },
            false => Entry {
                word: table.entry(index),
                subclusters: 0,
            },
        }
    }

    /// Sets an entry of an L2 table.
    pub(super) fn set_entry(self, table: &mut Table, index: u64, entry: Entry) {
        match self.has_subclusters {
            true => {
                table.set_entry(2 * index, entry.word);
                table.set_entry(2 * index + 1, entry.subclusters);
            }
            false => table.set_entry(index, entry.word),
        }
    }

    /// The entry of a cluster that reads as zeroes and has no space, or keeps that of `word`.
    pub(super) fn zero_entry(self, word: u64) -> Entry {
        match self.has_subclusters {
            true => Entry {
                word,
                subclusters: ALL << 32,
            },
            false => Entry {
                word: word | ZERO,
                subclusters: 0,
            },
        }
    }

    /// The byte of the cluster that an entry has for itself, if there is one, whatever it is used for.
    pub(super) fn own_host(self, entry: Entry) -> Option<u64> {
        let word = entry.word;
        let is_own = word & COPIED != 0 && (word & PACKED == 0 || self.has_data_file);
        let host = word & L2_OFFSET;
        (is_own && (host != 0 || self.has_data_file)).then_some(host)
    }

    /// Refcounts in a block.
    pub(super) fn per_block(self) -> u64 {
        (self.cluster() * 8) >> self.refcount_order
    }

    /// What an entry of an L2 table says of a unit of its cluster: 0 if that has no subclusters.
    ///
    /// # Errors
    /// It points into a cluster.
    pub(super) fn place(self, of: Entry, unit: u64) -> io::Result<Place> {
        let entry = of.word;
        if entry & PACKED != 0 && !self.has_data_file {
            let shift = 62 - (self.cluster_bits - 8);
            let host = entry & ((1 << shift) - 1);
            let sectors = ((entry & (PACKED - 1)) >> shift) + 1;
            let len = sectors * 512 - host % 512;
            return Ok(Place::Packed(Packed {
                host,
                len,
                compression: self.compression,
            }));
        }
        let host = entry & L2_OFFSET;
        if !host.is_multiple_of(self.cluster()) {
            return Err(corrupt(format!("an entry {entry:#x} points into a cluster")));
        }
        let is_own = entry & COPIED != 0;
        let is_there = host != 0 || self.has_data_file && is_own;
        if self.has_subclusters {
            let host = host + (unit << self.unit_bits());
            return match ((of.subclusters >> unit) & 1, (of.subclusters >> 32 >> unit) & 1) {
                (1, 0) if is_there => Ok(Place::Data { host, is_own }),
                (0, 1) => Ok(Place::Zero {
                    spare: (is_there && is_own).then_some(host),
                }),
                (0, _) => Ok(Place::Below),
                _ => Err(corrupt(format!("an entry {of:x?} contradicts itself"))),
            };
        }
        Ok(match is_there {
            _ if self.has_zeroes && entry & ZERO != 0 => Place::Zero {
                spare: (is_there && is_own).then_some(host),
            },
            true => Place::Data { host, is_own },
            false => Place::Below,
        })
    }

    /// The entry of a cluster at a byte that nobody else has.
    pub(super) fn data_entry(self, host: u64) -> u64 {
        host | COPIED
    }

    /// The clusters of the image's file that an entry uses.
    pub(super) fn used(self, entry: Entry) -> Range<u64> {
        let (bits, entry) = (self.cluster_bits, entry.word);
        if self.has_data_file {
            return 0..0;
        }
        let of_cluster = Entry {
            word: entry,
            subclusters: 0,
        };
        match self.place(of_cluster, 0) {
            Ok(Place::Packed(packed)) => packed.host >> bits..((packed.host + packed.len - 1) >> bits) + 1,
            Ok(_) if entry & L2_OFFSET != 0 => {
                let first = (entry & L2_OFFSET) >> bits;
                first..first + 1
            }
            _ => 0..0,
        }
    }

    /// A refcount of a block.
    pub(super) fn refcount(self, block: &[u8], index: u64) -> u64 {
        let bits = 1u64 << self.refcount_order;
        if bits < 8 {
            let byte = block[(index * bits / 8) as usize];
            return u64::from(byte) >> (index * bits % 8) & ((1 << bits) - 1);
        }
        let bytes = self.bytes_of_refcount(index);
        block[bytes]
            .iter()
            .fold(0, |value, byte| value << 8 | u64::from(*byte))
    }

    /// Sets a refcount of a block, which has room for it.
    pub(super) fn set_refcount(self, block: &mut [u8], index: u64, value: u64) {
        let bits = 1u64 << self.refcount_order;
        if bits < 8 {
            let shift = index * bits % 8;
            let byte = &mut block[(index * bits / 8) as usize];
            let mask = ((1u64 << bits) - 1) << shift;
            *byte = (*byte & !(mask as u8)) | (value << shift) as u8;
            return;
        }
        let bytes = self.bytes_of_refcount(index);
        let len = bytes.len();
        block[bytes].copy_from_slice(&value.to_be_bytes()[8 - len..]);
    }

    /// The bytes of a block that have a refcount.
    pub(super) fn bytes_of_refcount(self, index: u64) -> Range<usize> {
        let bits = 1u64 << self.refcount_order;
        let first = (index * bits / 8) as usize;
        first..first + (bits as usize).div_ceil(8)
    }
}

/// All subclusters of a cluster.
pub(super) const ALL: u64 = 0xffff_ffff;

pub(super) fn corrupt(what: String) -> io::Error {
    io::Error::new(
        io::ErrorKind::InvalidData,
        format!("the image is corrupt: {what}"),
    )
}

/// Bit 63 of an entry: the refcount of what it points to is 1.
pub(in crate::qcow2) const COPIED: u64 = 1 << 63;
/// Bit 62: the cluster is compressed.
pub(in crate::qcow2) const PACKED: u64 = 1 << 62;
/// Bit 0, since version 3: the cluster reads as zeroes.
pub(in crate::qcow2) const ZERO: u64 = 1;
/// Bits 9 to 55: where the cluster is.
pub(in crate::qcow2) const L2_OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

#[cfg(test)]
mod tests {
    use super::*;

    fn format(refcount_order: u32) -> Format {
        Format {
            cluster_bits: 16,
            refcount_order,
            has_zeroes: true,
            compression: Compression::Deflate,
            has_subclusters: false,
            has_data_file: false,
        }
    }

    #[test]
    fn refcounts_of_all_widths_are_read_and_set_without_their_neighbours() {
        for order in 0..=6 {
            let format = format(order);
            let most = match order {
                6 => u64::MAX,
                _ => (1 << (1 << order)) - 1,
            };
            let mut block = vec![0; 64];
            for index in 0..8 {
                format.set_refcount(&mut block, index, index.min(most));
            }
            format.set_refcount(&mut block, 3, most);
            let found: Vec<u64> = (0..8).map(|index| format.refcount(&block, index)).collect();
            let mut wanted: Vec<u64> = (0..8).map(|index: u64| index.min(most)).collect();
            wanted[3] = most;
            assert_eq!(found, wanted, "order {order}");
        }
    }

    #[test]
    fn entries_say_where_a_cluster_is() {
        let format = format(4);
        let entry = |word| Entry { word, subclusters: 0 };
        let place = |word| format.place(entry(word), 0);
        assert_eq!(place(0).unwrap(), Place::Below);
        assert_eq!(place(ZERO).unwrap(), Place::Zero { spare: None });
        let data = |is_own| Place::Data {
            host: 0x50000,
            is_own,
        };
        assert_eq!(place(0x50000).unwrap(), data(false));
        assert_eq!(place(format.data_entry(0x50000)).unwrap(), data(true));
        assert_eq!(
            place(0x50000 | COPIED | ZERO).unwrap(),
            Place::Zero { spare: Some(0x50000) }
        );
        assert!(place(0x50200).is_err());
        // Three sectors from byte 0x5ff00 on.
        let packed = PACKED | 2 << 54 | 0x5ff00;
        let found = Packed {
            host: 0x5ff00,
            len: 1280,
            compression: Compression::Deflate,
        };
        assert_eq!(place(packed).unwrap(), Place::Packed(found));
        assert_eq!(
            (format.used(entry(packed)), format.used(entry(0x50001))),
            (5..7, 5..6)
        );
    }

    #[test]
    fn entries_with_subclusters_say_where_each_is() {
        let format = Format {
            has_subclusters: true,
            ..format(4)
        };
        let entry = Entry {
            word: 0x50000 | COPIED,
            subclusters: 0b10 | 0b100 << 32,
        };
        let [below, data, zero] = [0, 1, 2].map(|unit| format.place(entry, unit).unwrap());
        assert_eq!(below, Place::Below);
        assert_eq!(
            data,
            Place::Data {
                host: 0x50800,
                is_own: true
            }
        );
        assert_eq!(zero, Place::Zero { spare: Some(0x51000) });
        let both = Entry {
            subclusters: 1 | 1 << 32,
            ..entry
        };
        let missing = Entry {
            word: 0,
            subclusters: 1,
        };
        assert!(format.place(both, 0).is_err() && format.place(missing, 0).is_err());
        assert_eq!((format.used(both), format.own_host(entry)), (5..6, Some(0x50000)));
    }
}
