//! The table of what a client may select: the exports, their names and what each of them can do.
//! [`super::session`] answers from the table; the socket layer finds the disk by the export's id.

use std::sync::Arc;

use blkmq_nbd::codec::{HeaderStyle, STRING_BYTES_MAX, TransmissionFlags};

/// Names an export to the code that owns the disks; unique within a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExportId(pub u32);

/// What an export can do. The default is a writable disk with everything but `rotational` and `any_alignment`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Nothing that changes data is accepted.
    pub read_only: bool,
    /// Flushes are accepted.
    pub flush: bool,
    /// Writes can be made durable one by one.
    pub fua: bool,
    /// The medium rotates.
    pub rotational: bool,
    /// Ranges can be discarded.
    pub trim: bool,
    /// Ranges can be zeroed without a payload.
    pub write_zeroes: bool,
    /// The disk can say at once that zeroing would be slow.
    pub fast_zero: bool,
    /// Ranges can be read ahead.
    pub cache: bool,
    /// A flush on one connection covers the writes completed on all of them.
    pub multi_conn: bool,
    /// Offsets and lengths need not be multiples of the block size.
    pub any_alignment: bool,
    /// The disk knows what is allocated (`base:allocation`).
    pub block_status: bool,
}

impl Default for Features {
    fn default() -> Self {
        Features {
            read_only: false,
            flush: true,
            fua: true,
            rotational: false,
            trim: true,
            write_zeroes: true,
            fast_zero: true,
            cache: true,
            multi_conn: true,
            any_alignment: false,
            block_status: true,
        }
    }
}

/// One thing a client can select.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// The id for the owner of the disks.
    pub id: ExportId,
    /// At most 4096 bytes without NUL.
    pub name: String,
    /// The disk's name, by which clients' certificates are permitted. Default: the export's.
    pub disk: String,
    /// For people; at most 4096 bytes without NUL, may be empty.
    pub description: String,
    /// Bytes of the export; a multiple of `block_min_bytes`.
    pub size_bytes: u64,
    /// Smallest unit of offset and length: a power of two from 1 to 65536.
    pub block_min_bytes: u32,
    /// Unit at which requests are efficient: a power of two, at least 512 and `block_min_bytes`.
    pub block_preferred_bytes: u32,
    /// What it can do.
    pub features: Features,
    /// The bitmaps of its disk.
    pub bitmaps: Bitmaps,
}

/// The bitmaps of a disk, which come and go: whoever offers it is asked when a client asks. Clones ask the same.
#[derive(Clone, Default)]
pub struct Bitmaps(Option<Arc<Names>>);

type Names = dyn Fn() -> Vec<String> + Send + Sync;

impl Bitmaps {
    /// Those of which this returns the names, and does not block.
    pub fn of(names: impl Fn() -> Vec<String> + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(names)))
    }

    /// The names that there are now, as far as the protocol can have them.
    pub(super) fn names(&self) -> Vec<String> {
        let names = self.0.as_ref().map_or_else(Vec::new, |names| names());
        let fits = |name: &String| name.len() <= BITMAP_NAME_MAX && !name.contains('\0');
        names.into_iter().filter(fits).collect()
    }
}

impl PartialEq for Bitmaps {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (None, None) => true,
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }
}

impl Eq for Bitmaps {}

impl std::fmt::Debug for Bitmaps {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.names()).finish()
    }
}

/// Longest name of a bitmap, in bytes, as of the format of images.
const BITMAP_NAME_MAX: usize = 1023;

impl Export {
    /// An export of `size_bytes` with blocks of 1 (minimum) and 4096 (preferred) bytes and the default features.
    pub fn new(id: ExportId, name: impl Into<String>, size_bytes: u64) -> Export {
        let name = name.into();
        Export {
            id,
            disk: name.clone(),
            name,
            description: String::new(),
            size_bytes,
            block_min_bytes: 1,
            block_preferred_bytes: 4096,
            features: Features::default(),
            bitmaps: Bitmaps::default(),
        }
    }

    /// The flags told to a client that negotiated `style`.
    pub fn transmission_flags(&self, style: HeaderStyle) -> TransmissionFlags {
        let can = self.features;
        let write_zeroes = can.write_zeroes && !can.read_only;
        TransmissionFlags::HAS_FLAGS
            .with_if(can.read_only, TransmissionFlags::READ_ONLY)
            .with_if(can.flush, TransmissionFlags::SEND_FLUSH)
            .with_if(can.fua && !can.read_only, TransmissionFlags::SEND_FUA)
            .with_if(can.rotational, TransmissionFlags::ROTATIONAL)
            .with_if(can.trim && !can.read_only, TransmissionFlags::SEND_TRIM)
            .with_if(write_zeroes, TransmissionFlags::SEND_WRITE_ZEROES)
            .with_if(write_zeroes && can.fast_zero, TransmissionFlags::SEND_FAST_ZERO)
            .with_if(style >= HeaderStyle::Structured, TransmissionFlags::SEND_DF)
            .with_if(can.multi_conn, TransmissionFlags::CAN_MULTI_CONN)
            .with_if(can.cache, TransmissionFlags::SEND_CACHE)
    }

    fn check(&self) -> Result<(), ExportError> {
        let fault = |problem: String| {
            Err(ExportError {
                name: self.name.clone(),
                problem,
            })
        };
        for (what, text) in [("name", &self.name), ("description", &self.description)] {
            if text.len() > STRING_BYTES_MAX || text.contains('\0') {
                return fault(format!(
                    "the {what} must have at most {STRING_BYTES_MAX} bytes and no NUL"
                ));
            }
        }
        let (min, preferred) = (self.block_min_bytes, self.block_preferred_bytes);
        if !min.is_power_of_two() || min > 1 << 16 {
            return fault(format!("block size {min} must be a power of two from 1 to 65536"));
        }
        if !preferred.is_power_of_two() || preferred < min.max(512) {
            let least = min.max(512);
            return fault(format!(
                "preferred block size {preferred} must be a power of two from {least} up"
            ));
        }
        if !self.size_bytes.is_multiple_of(u64::from(min)) {
            return fault(format!(
                "size {} must be a multiple of its block size {min}",
                self.size_bytes
            ));
        }
        Ok(())
    }
}

/// The exports of a server at one moment; a change makes a new table for the connections to come.
#[derive(Clone, Debug, Default)]
pub struct ExportTable {
    exports: Vec<Arc<Export>>,
    /// The instance of the server that offers them; `None` where sessions cannot be named.
    pub instance: Option<u64>,
}

impl ExportTable {
    /// A table of `exports`, listed in this order.
    ///
    /// # Errors
    /// An export breaks a rule of its fields, or a name or id occurs twice.
    pub fn new(exports: impl IntoIterator<Item = Export>) -> Result<ExportTable, ExportError> {
        let mut table = ExportTable::default();
        for export in exports {
            export.check()?;
            if table
                .exports
                .iter()
                .any(|other| other.name == export.name || other.id == export.id)
            {
                let problem = format!("its name or id {} is taken by another export", export.id.0);
                return Err(ExportError {
                    name: export.name,
                    problem,
                });
            }
            table.exports.push(Arc::new(export));
        }
        Ok(table)
    }

    /// The export that `name` selects. The empty name selects the default export: the one with the
    /// empty name, or else the only one.
    pub fn find(&self, name: &str) -> Option<&Arc<Export>> {
        let named = self.exports.iter().find(|export| export.name == name);
        match (named, name, self.exports.as_slice()) {
            (None, "", [only]) => Some(only),
            _ => named,
        }
    }

    /// The same table without the exports whose disks are not wanted.
    #[must_use]
    pub fn only(&self, is_wanted: impl Fn(&str) -> bool) -> ExportTable {
        let wanted = self.exports.iter().filter(|export| is_wanted(&export.disk));
        ExportTable {
            exports: wanted.cloned().collect(),
            instance: self.instance,
        }
    }

    /// All exports in the order of listing.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Export>> {
        self.exports.iter()
    }
}

/// An export that cannot be offered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("NBD export '{name}' rejected: {problem}")]
pub struct ExportError {
    /// The export's name.
    pub name: String,
    /// What is wrong, with value and limit.
    pub problem: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_name_means_the_only_export_but_never_one_of_several() {
        let one = ExportTable::new([Export::new(ExportId(1), "vm1", 4096)]).unwrap();
        assert_eq!(one.find("").unwrap().name, "vm1");
        let two = [
            Export::new(ExportId(1), "vm1", 4096),
            Export::new(ExportId(2), "vm2", 4096),
        ];
        assert!(ExportTable::new(two).unwrap().find("").is_none());
        let named = [
            Export::new(ExportId(1), "vm1", 4096),
            Export::new(ExportId(2), "", 4096),
        ];
        assert_eq!(ExportTable::new(named).unwrap().find("").unwrap().id, ExportId(2));
    }

    #[test]
    fn export_that_breaks_a_rule_is_rejected_with_name_value_and_limit() {
        let rejected = |change: fn(&mut Export)| {
            let mut export = Export::new(ExportId(1), "vm1", 1 << 20);
            change(&mut export);
            ExportTable::new([export]).unwrap_err().to_string()
        };
        assert_eq!(
            rejected(|export| export.block_min_bytes = 768),
            "NBD export 'vm1' rejected: block size 768 must be a power of two from 1 to 65536"
        );
        assert!(rejected(|export| export.block_preferred_bytes = 256).contains("from 512 up"));
        assert!(rejected(|export| export.name = "a\0".into()).contains("no NUL"));
        let odd = |export: &mut Export| (export.size_bytes, export.block_min_bytes) = (1000, 512);
        assert!(rejected(odd).contains("size 1000 must be a multiple of its block size 512"));
    }

    #[test]
    fn name_cannot_stand_for_two_exports() {
        let twice = [
            Export::new(ExportId(1), "vm1", 0),
            Export::new(ExportId(2), "vm1", 0),
        ];
        assert!(ExportTable::new(twice).unwrap_err().to_string().contains("taken"));
    }

    #[test]
    fn read_only_export_offers_nothing_that_writes() {
        let mut export = Export::new(ExportId(1), "vm1", 4096);
        export.features.read_only = true;
        let flags = export.transmission_flags(HeaderStyle::Extended);
        assert!(flags.contains(TransmissionFlags::READ_ONLY) && flags.contains(TransmissionFlags::SEND_DF));
        for writing in [
            TransmissionFlags::SEND_FUA,
            TransmissionFlags::SEND_TRIM,
            TransmissionFlags::SEND_WRITE_ZEROES,
            TransmissionFlags::SEND_FAST_ZERO,
        ] {
            assert!(!flags.contains(writing), "{writing:?} in {flags:?}");
        }
    }
}
