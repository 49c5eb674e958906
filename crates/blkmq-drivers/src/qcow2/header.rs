//! The header of a qcow2 image, read from its first bytes: what the driver must know before the library opens
//! the image, and whether it may. `check` looks at the tables that the header names; `chain` opens the files.
//!
//! The format is that of `docs/interop/qcow2.rst` of QEMU. The library parses the header again; it has fewer
//! limits, ignores encryption, and knows no backing format of version 2.

use super::create::BaseFormat;

/// What a header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The logarithm of the size of a cluster, 9 to 21.
    pub cluster_bits: u32,
    /// Of the disk, in bytes.
    pub size: u64,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// Where the L1 table is, in bytes.
    pub l1_offset: u64,
    /// Where the refcount table is, in bytes.
    pub refcounts_offset: u64,
    /// Clusters of the refcount table.
    pub refcounts_clusters: u32,
    /// The logarithm of the bits of a refcount, at most 6.
    pub refcount_order: u32,
    /// Snapshots inside the image.
    pub snapshots: u32,
    /// Where their table is, in bytes.
    pub snapshots_offset: u64,
    /// The features that may be ignored: bit 0 is lazy refcounts.
    pub compatible: u64,
    /// The features that a writer that does not keep them clears: bit 0 is bitmaps, bit 1 a raw data file.
    pub autoclear: u64,
    /// The name of the backing file.
    pub backing: Option<String>,
    /// The format of the backing file.
    pub backing_format: Option<String>,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// Clusters have subclusters, each with a place of its own (`extended_l2`).
    pub has_subclusters: bool,
    /// The data are in a file of their own.
    pub has_data_file: bool,
    /// The name of that file.
    pub data_file: Option<String>,
    /// Where the extensions and names end: what follows in the first cluster is not used. In bytes.
    pub names_end: u64,
    /// Where the mark is that ends the extensions, in bytes; 0 if there is none.
    pub extensions_end: u64,
    /// What its extension says of bitmaps: to be believed if bit 0 of `autoclear` is set.
    pub bitmaps: Option<BitmapsExtension>,
}

/// What the extension of bitmaps says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BitmapsExtension {
    /// Where the extension begins, in bytes.
    pub place: u64,
    /// How many bitmaps there are.
    pub count: u32,
    /// Bytes of their directory.
    pub directory_len: u64,
    /// Where that is, in bytes.
    pub directory_offset: u64,
}

/// How the clusters of an image are compressed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Compression {
    /// Deflate, without a header.
    #[default]
    Deflate,
    /// Zstandard.
    Zstd,
}

/// Why an image is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// It is too short, or begins otherwise.
    #[error("it is no qcow2 image: serve a raw one with file=PATH")]
    Magic,
    /// A value is out of bounds.
    #[error("{what} {value} is rejected: {allowed}")]
    Value {
        /// Of what.
        what: &'static str,
        /// The value.
        value: u64,
        /// What it must be.
        allowed: &'static str,
    },
    /// It needs something that this driver does not have.
    #[error("{what}: {advice}")]
    Unsupported {
        /// What it has.
        what: &'static str,
        /// What to do.
        advice: &'static str,
    },
    /// A name is no text.
    #[error("the name of its {0} is no UTF-8 text")]
    Name(&'static str),
}

impl Header {
    /// Reads a header from the first bytes of an image: its first cluster, or 64 KiB of it.
    ///
    /// # Errors
    /// It is no header, or one of an image that cannot be served.
    pub fn parse(first: &[u8]) -> Result<Self, HeaderError> {
        let bytes = Bytes(first);
        if bytes.u32(0) != Some(MAGIC) || first.len() < V2_BYTES {
            return Err(HeaderError::Magic);
        }
        let u32_at = |at| bytes.u32(at).unwrap_or(0);
        let u64_at = |at| bytes.u64(at).unwrap_or(0);
        let version = u32_at(4);
        let cluster_bits = u32_at(20);
        within("version", version.into(), 2..=3, "must be 2 or 3")?;
        within(
            "cluster size 2^",
            cluster_bits.into(),
            9..=21,
            "must be 2^9 to 2^21 bytes",
        )?;
        let cluster = 1u64 << cluster_bits;
        if u32_at(32) != 0 {
            return unsupported("it is encrypted", "decrypt it with `qemu-img convert`");
        }
        let is_v3 = version == 3;
        if is_v3 && first.len() < V3_BYTES {
            return Err(HeaderError::Magic);
        }
        let v3 = |at| if is_v3 { u64_at(at) } else { 0 };
        let (incompatible, compatible, autoclear) = (v3(72), v3(80), v3(88));
        let (order, end) = if is_v3 {
            (u32_at(96), u32_at(100))
        } else {
            (4, V2_BYTES as u32)
        };
        check_features(incompatible)?;
        if incompatible & SUBCLUSTERS != 0 {
            let allowed = "must be at least 2^14 bytes in an image with subclusters";
            within("cluster size 2^", cluster_bits.into(), 14..=21, allowed)?;
        }
        within("refcount order", order.into(), 0..=6, "must be 0 to 6")?;
        if is_v3 {
            within(
                "header length",
                end.into(),
                V3_BYTES as u64..=cluster,
                "must be 104 bytes to a cluster",
            )?;
        }
        let mut header = Self {
            version,
            cluster_bits,
            size: u64_at(24),
            l1_entries: u32_at(36),
            l1_offset: u64_at(40),
            refcounts_offset: u64_at(48),
            refcounts_clusters: u32_at(56),
            refcount_order: order,
            snapshots: u32_at(60),
            snapshots_offset: u64_at(64),
            compatible,
            autoclear,
            backing: None,
            backing_format: None,
            compression: compression(&bytes, incompatible, end)?,
            has_subclusters: incompatible & SUBCLUSTERS != 0,
            has_data_file: incompatible & DATA_FILE != 0,
            data_file: None,
            names_end: end.into(),
            extensions_end: 0,
            bitmaps: None,
        };
        header.check_sizes()?;
        header.read_extensions(&bytes, end as usize)?;
        header.read_backing(&bytes, u64_at(8), u32_at(16))?;
        Ok(header)
    }

    /// The header of a new image, and its bytes: its refcount table is in the second cluster, a block behind it, and an L1
    /// table in the fourth. If that has no room for the size, the disk is as large as it has, and is to grow.
    pub(super) fn new_image(
        size: u64,
        (cluster, has_subclusters): (u32, bool),
        base: Option<(String, BaseFormat)>,
    ) -> (Vec<u8>, Self) {
        let cluster_bits = cluster.trailing_zeros();
        let cluster = u64::from(cluster);
        let mut header = Self {
            version: 3,
            cluster_bits,
            size,
            l1_entries: 0,
            l1_offset: 3 * cluster,
            refcounts_offset: cluster,
            refcounts_clusters: 1,
            refcount_order: 4,
            snapshots: 0,
            snapshots_offset: 0,
            compatible: 0,
            autoclear: 0,
            backing: None,
            backing_format: None,
            compression: Compression::Deflate,
            has_subclusters,
            has_data_file: false,
            data_file: None,
            names_end: 0,
            extensions_end: 0,
            bitmaps: None,
        };
        let entries = header.l1_needed(size).min(cluster / 8);
        header.l1_entries = entries as u32;
        header.size = size.min(entries.saturating_mul(header.l2_span()));
        if let Some((name, format)) = base {
            header.backing = Some(name);
            header.backing_format = Some(format.name().to_owned());
        }
        (header.bytes(), header)
    }

    /// The bytes of a header of version 3 without a data file, behind which its extensions and the name of its base are.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; V3_BYTES];
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(0, &MAGIC.to_be_bytes());
        put(4, &self.version.to_be_bytes());
        put(20, &self.cluster_bits.to_be_bytes());
        put(SIZE_FIELD as usize, &self.size.to_be_bytes());
        put(36, &self.l1_entries.to_be_bytes());
        put(40, &self.l1_offset.to_be_bytes());
        put(48, &self.refcounts_offset.to_be_bytes());
        put(56, &self.refcounts_clusters.to_be_bytes());
        let incompatible = if self.has_subclusters { SUBCLUSTERS } else { 0 };
        put(72, &incompatible.to_be_bytes());
        put(96, &self.refcount_order.to_be_bytes());
        put(100, &(V3_BYTES as u32).to_be_bytes());
        if let Some(format) = &self.backing_format {
            bytes.extend_from_slice(&BACKING_FORMAT.to_be_bytes());
            bytes.extend_from_slice(&(format.len() as u32).to_be_bytes());
            bytes.extend_from_slice(format.as_bytes());
            bytes.resize(bytes.len().next_multiple_of(8), 0);
        }
        // No more extensions.
        bytes.extend_from_slice(&[0; 8]);
        if let Some(name) = &self.backing {
            let place = bytes.len() as u64;
            bytes[8..16].copy_from_slice(&place.to_be_bytes());
            bytes[16..20].copy_from_slice(&(name.len() as u32).to_be_bytes());
            bytes.extend_from_slice(name.as_bytes());
        }
        bytes
    }

    /// Bytes of a cluster.
    pub fn cluster(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk for which one L2 table has the entries.
    pub fn l2_span(&self) -> u64 {
        1 << (2 * self.cluster_bits - if self.has_subclusters { 4 } else { 3 })
    }

    /// The logarithm of the bytes that have a place of their own: a subcluster, or else a cluster.
    pub fn unit_bits(&self) -> u32 {
        self.cluster_bits - if self.has_subclusters { 5 } else { 0 }
    }

    /// The entries that an L1 table needs for a disk of `size` bytes.
    pub fn l1_needed(&self, size: u64) -> u64 {
        size.div_ceil(self.l2_span())
    }

    fn check_sizes(&self) -> Result<(), HeaderError> {
        let cluster = self.cluster();
        within("disk size", self.size, 1..=SIZE_MAX, "must be 1 byte to 64 PiB")?;
        within(
            "L1 table of entries",
            self.l1_entries.into(),
            0..=L1_ENTRIES_MAX,
            "must be at most 4194304",
        )?;
        within(
            "L1 table of entries",
            self.l1_entries.into(),
            self.l1_needed(self.size)..=L1_ENTRIES_MAX,
            "must be enough for the size of the disk",
        )?;
        let refcounts = u64::from(self.refcounts_clusters) * cluster;
        within(
            "refcount table of bytes",
            refcounts,
            cluster..=REFCOUNTS_MAX.max(cluster),
            "must be at most 8 MiB",
        )?;
        within(
            "count of snapshots",
            self.snapshots.into(),
            0..=65536,
            "must be at most 65536",
        )?;
        for (what, offset) in [
            ("L1 table at", self.l1_offset),
            ("refcount table at", self.refcounts_offset),
        ] {
            let is_missing = offset == 0 || offset >= OFFSET_MAX;
            if is_missing || !offset.is_multiple_of(cluster) {
                let allowed = "must be at the beginning of a cluster, and not of the first";
                return Err(HeaderError::Value {
                    what,
                    value: offset,
                    allowed,
                });
            }
        }
        Ok(())
    }

    /// Reads the extensions, which follow the header of version 2 as well.
    fn read_extensions(&mut self, bytes: &Bytes<'_>, mut at: usize) -> Result<(), HeaderError> {
        // Each has at least 8 bytes, so this ends.
        while let (Some(kind), Some(len)) = (bytes.u32(at), bytes.u32(at + 4)) {
            let Some(data) = bytes.slice(at + 8, len as usize) else {
                break;
            };
            self.names_end = (at + 8 + data.len()) as u64;
            match kind {
                0 => {
                    self.extensions_end = at as u64;
                    return Ok(());
                }
                BACKING_FORMAT => self.backing_format = Some(text(data, "backing format")?),
                DATA_FILE_NAME => self.data_file = Some(text(data, "data file")?),
                BITMAPS => self.bitmaps = BitmapsExtension::parse(at as u64, &Bytes(data)),
                _ => {}
            }
            at += 8 + (len as usize).next_multiple_of(8);
        }
        // Version 2 may have none, and then anything may follow.
        match self.version {
            2 => Ok(()),
            _ => Err(HeaderError::Value {
                what: "header extension at",
                value: at as u64,
                allowed: "extensions must end in the first cluster",
            }),
        }
    }

    fn read_backing(&mut self, bytes: &Bytes<'_>, offset: u64, len: u32) -> Result<(), HeaderError> {
        if offset == 0 || len == 0 {
            return Ok(());
        }
        within(
            "length of the backing file's name",
            len.into(),
            1..=1023,
            "must be at most 1023",
        )?;
        let name = usize::try_from(offset)
            .ok()
            .and_then(|offset| bytes.slice(offset, len as usize));
        let Some(name) = name else {
            return Err(HeaderError::Value {
                what: "name of the backing file at",
                value: offset,
                allowed: "must be in the first cluster",
            });
        };
        self.backing = Some(text(name, "backing file")?);
        self.names_end = self.names_end.max(offset + u64::from(len));
        Ok(())
    }
}

impl BitmapsExtension {
    fn parse(place: u64, data: &Bytes<'_>) -> Option<Self> {
        Some(Self {
            place,
            count: data.u32(0)?,
            directory_len: data.u64(8)?,
            directory_offset: data.u64(16)?,
        })
    }

    /// Its data, as the header has it behind the type and the length.
    pub(super) fn data(&self) -> [u8; BITMAPS_BYTES] {
        let mut data = [0; BITMAPS_BYTES];
        data[..4].copy_from_slice(&self.count.to_be_bytes());
        data[8..16].copy_from_slice(&self.directory_len.to_be_bytes());
        data[16..].copy_from_slice(&self.directory_offset.to_be_bytes());
        data
    }
}

fn check_features(incompatible: u64) -> Result<(), HeaderError> {
    let (what, advice) = match incompatible & !(DATA_FILE | COMPRESSION | SUBCLUSTERS) {
        0 => return Ok(()),
        bits if bits & 1 != 0 => (
            "its refcounts are out of date, since a writer with lazy refcounts was killed",
            "repair it with `qemu-img check -r all`",
        ),
        bits if bits & 2 != 0 => (
            "it is marked as corrupt",
            "repair it with `qemu-img check -r all`",
        ),
        _ => (
            "it has a feature that is not known",
            "convert it with `qemu-img convert -O qcow2`",
        ),
    };
    unsupported(what, advice)
}

/// How clusters are compressed: a feature says that it is not deflate, and a field behind the oldest header how.
fn compression(bytes: &Bytes<'_>, incompatible: u64, header_len: u32) -> Result<Compression, HeaderError> {
    if incompatible & COMPRESSION == 0 {
        return Ok(Compression::Deflate);
    }
    match bytes.slice(V3_BYTES, 1) {
        Some([1]) if header_len as usize > V3_BYTES => Ok(Compression::Zstd),
        _ => unsupported(
            "its compression is neither deflate nor zstd",
            "convert it with `qemu-img convert -O qcow2`",
        ),
    }
}

fn unsupported<T>(what: &'static str, advice: &'static str) -> Result<T, HeaderError> {
    Err(HeaderError::Unsupported { what, advice })
}

fn within(
    what: &'static str,
    value: u64,
    range: std::ops::RangeInclusive<u64>,
    allowed: &'static str,
) -> Result<(), HeaderError> {
    match range.contains(&value) {
        true => Ok(()),
        false => Err(HeaderError::Value { what, value, allowed }),
    }
}

fn text(bytes: &[u8], of: &'static str) -> Result<String, HeaderError> {
    let text = str::from_utf8(bytes).map_err(|_| HeaderError::Name(of))?;
    match text.contains('\0') {
        true => Err(HeaderError::Name(of)),
        false => Ok(text.to_owned()),
    }
}

/// Bytes with numbers in network byte order.
struct Bytes<'a>(&'a [u8]);

impl<'a> Bytes<'a> {
    fn slice(&self, at: usize, len: usize) -> Option<&'a [u8]> {
        self.0.get(at..at.checked_add(len)?)
    }

    fn u32(&self, at: usize) -> Option<u32> {
        Some(u32::from_be_bytes(self.slice(at, 4)?.try_into().ok()?))
    }

    fn u64(&self, at: usize) -> Option<u64> {
        Some(u64::from_be_bytes(self.slice(at, 8)?.try_into().ok()?))
    }
}

/// Bytes that [`Header::parse`] looks at, at most.
pub(super) const HEADER_BYTES: usize = 64 << 10;
/// Where the place and the length of the name of the backing file are, in bytes.
pub(super) const BACKING_FIELD: u64 = 8;
/// Where the size of the disk is, in bytes.
pub(super) const SIZE_FIELD: u64 = 24;
/// Where the features are that a writer clears that does not keep them.
pub(super) const AUTOCLEAR_FIELD: u64 = 88;
/// `QFI\xfb`.
const MAGIC: u32 = 0x5146_49fb;
const V2_BYTES: usize = 72;
const V3_BYTES: usize = 104;
/// The bit of incompatible features that says that the data are in another file.
const DATA_FILE: u64 = 4;
/// The one that says that clusters are not compressed by deflate.
const COMPRESSION: u64 = 8;
/// The one that says that entries of L2 tables are longer, and have a place for each 32nd of a cluster.
const SUBCLUSTERS: u64 = 16;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE_NAME: u32 = 0x4441_5441;
/// The type of the extension of bitmaps, and the bytes of its data.
pub(super) const BITMAPS: u32 = 0x2385_2875;
pub(super) const BITMAPS_BYTES: usize = 24;
/// The bit of the features of `AUTOCLEAR_FIELD` that says that the bitmaps are right.
pub(super) const AUTOCLEAR_BITMAPS: u64 = 1;
/// 64 PiB, what the tables can address.
const SIZE_MAX: u64 = 1 << 56;
const OFFSET_MAX: u64 = 1 << 56;
/// The limits of QEMU: 32 MiB and 8 MiB.
pub(super) const L1_ENTRIES_MAX: u64 = (32 << 20) / 8;
pub(super) const REFCOUNTS_MAX: u64 = 8 << 20;

#[cfg(test)]
mod tests {
    use super::*;

    /// A header of version 3 of a disk of 1 GiB with clusters of 64 KiB.
    fn sample() -> Vec<u8> {
        let mut bytes = vec![0u8; 4096];
        bytes[..4].copy_from_slice(&MAGIC.to_be_bytes());
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(4, &3u32.to_be_bytes());
        put(20, &16u32.to_be_bytes());
        put(24, &(1u64 << 30).to_be_bytes());
        put(36, &2u32.to_be_bytes());
        put(40, &0x30000u64.to_be_bytes());
        put(48, &0x10000u64.to_be_bytes());
        put(56, &1u32.to_be_bytes());
        put(96, &4u32.to_be_bytes());
        put(100, &104u32.to_be_bytes());
        bytes
    }

    fn with(at: usize, value: &[u8]) -> String {
        let mut bytes = sample();
        bytes[at..at + value.len()].copy_from_slice(value);
        Header::parse(&bytes).unwrap_err().to_string()
    }

    #[test]
    fn header_of_an_image_is_read_with_its_names() {
        let mut bytes = sample();
        bytes[104..112].copy_from_slice(&[0xe2, 0x79, 0x2a, 0xca, 0, 0, 0, 5]);
        bytes[112..117].copy_from_slice(b"qcow2");
        bytes[200..208].copy_from_slice(b"base.img");
        bytes[8..16].copy_from_slice(&200u64.to_be_bytes());
        bytes[16..20].copy_from_slice(&8u32.to_be_bytes());
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.backing.as_deref(), Some("base.img"));
        assert_eq!(header.backing_format.as_deref(), Some("qcow2"));
        assert_eq!(
            (header.size, header.cluster(), header.l2_span()),
            (1 << 30, 65536, 512 << 20)
        );
    }

    #[test]
    fn headers_of_images_that_cannot_be_served_say_why() {
        assert!(with(0, b"QFI!").contains("no qcow2 image"));
        assert!(with(4, &4u32.to_be_bytes()).contains("version 4 is rejected: must be 2 or 3"));
        assert!(with(20, &63u32.to_be_bytes()).contains("2^9 to 2^21"));
        assert!(with(20, &u32::MAX.to_be_bytes()).contains("2^9 to 2^21"));
        assert!(with(24, &u64::MAX.to_be_bytes()).contains("disk size"));
        assert!(with(24, &(1u64 << 40).to_be_bytes()).contains("enough for the size"));
        assert!(with(32, &1u32.to_be_bytes()).contains("encrypted"));
        assert!(with(36, &u32::MAX.to_be_bytes()).contains("at most 4194304"));
        assert!(with(40, &0x30200u64.to_be_bytes()).contains("L1 table at"));
        assert!(with(56, &u32::MAX.to_be_bytes()).contains("at most 8 MiB"));
        assert!(with(72, &1u64.to_be_bytes()).contains("qemu-img check -r all"));
        let with_subclusters = |bits: u32| {
            let mut bytes = sample();
            bytes[20..24].copy_from_slice(&bits.to_be_bytes());
            bytes[36..40].copy_from_slice(&64u32.to_be_bytes());
            bytes[72..80].copy_from_slice(&16u64.to_be_bytes());
            Header::parse(&bytes).map(|header| (header.l2_span(), header.unit_bits()))
        };
        assert_eq!(with_subclusters(14), Ok((16 << 20, 9)));
        let refused = with_subclusters(13).unwrap_err().to_string();
        assert!(refused.contains("2^14"), "{refused}");
        assert!(with(72, &8u64.to_be_bytes()).contains("neither deflate nor zstd"));
        assert!(with(72, &(1u64 << 40).to_be_bytes()).contains("not known"));
        assert!(with(96, &7u32.to_be_bytes()).contains("refcount order"));
        assert!(with(100, &u32::MAX.to_be_bytes()).contains("header length"));
        assert!(with(104, &[1, 2, 3, 4, 0xff, 0xff, 0xff, 0xff]).contains("extensions must end"));
    }
}
