//! New images, alone or on a base. `blkmq image create` makes them.

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::chain::{self, named, system};
use super::error::ImageError;
use super::header::{Header, SIZE_FIELD};
use super::tables::Tables;
use super::transfer;
use crate::driver::Purpose;
use crate::file::{Direct, FileConfig, FileDisk};

/// The format of a base.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BaseFormat {
    /// The disk as it is.
    Raw,
    /// An image of this format.
    Qcow2,
}

impl BaseFormat {
    /// Its name, as images have it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// What a new image is to be.
#[derive(Clone, Debug)]
pub struct NewImage {
    /// Where. There must be nothing yet.
    pub path: PathBuf,
    /// Bytes of the disk. Default: those of the base.
    pub size: Option<u64>,
    /// Bytes of a cluster, a power of two from 512 to 2 MiB. Default 64 KiB.
    pub cluster: Option<u32>,
    /// Clusters have 32 subclusters each, with a place of their own (`extended_l2`): a first write copies less of the base.
    /// Clusters have 16 KiB at least then.
    pub has_subclusters: bool,
    /// What it lies on.
    pub base: Option<(PathBuf, BaseFormat)>,
}

impl NewImage {
    /// Makes the image, durable. Returns the size of its disk in bytes. Blocks.
    ///
    /// # Errors
    /// Something is there, its base cannot be used, or the values are not allowed. Then nothing is left behind.
    pub fn create(&self) -> Result<u64, ImageError> {
        let base = self
            .base
            .as_ref()
            .map(|(path, format)| self.look_at_base(path, *format))
            .transpose()?;
        let size = match (self.size, &base) {
            (Some(size), _) => size,
            (None, Some((_, size))) => *size,
            (None, None) => return Err(self.refuse("size", "", "give one, or a base")),
        };
        let cluster = self.cluster.unwrap_or(CLUSTER);
        if size == 0 || !size.is_multiple_of(512) {
            return Err(self.refuse("size", &size.to_string(), "it must be a multiple of 512 bytes"));
        }
        if !cluster.is_power_of_two() || !(512..=2 << 20).contains(&cluster) {
            return Err(self.refuse(
                "cluster size",
                &cluster.to_string(),
                "it must be a power of two from 512 to 2 MiB",
            ));
        }
        if self.has_subclusters && cluster < SUBCLUSTERED_MIN {
            return Err(self.refuse(
                "cluster size",
                &cluster.to_string(),
                "with subclusters it must be at least 16 KiB",
            ));
        }
        let entry = if self.has_subclusters { 16 } else { 8 };
        let span = u64::from(cluster) * (u64::from(cluster) / entry);
        if size.div_ceil(span) > super::header::L1_ENTRIES_MAX {
            return Err(self.refuse(
                "size",
                &size.to_string(),
                "clusters are too small for it: make them larger",
            ));
        }
        let options = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .clone();
        options
            .open(&self.path)
            .map_err(|source| system(&self.path, "create it", source))?;
        let made = self.format(size, cluster, base.map(|(name, _)| name));
        if made.is_err() {
            // The first error is the one to report.
            let _ = std::fs::remove_file(&self.path);
        }
        made.map(|()| size)
    }

    fn format(&self, size: u64, cluster: u32, base: Option<String>) -> Result<(), ImageError> {
        let config = FileConfig {
            path: self.path.clone(),
            direct: Direct::Off,
            ..FileConfig::default()
        };
        let disk = Arc::new(FileDisk::open_part(Purpose::Serve, &config)?);
        let cannot = |source| system(&self.path, "format it", source);
        let base = base.zip(self.base.as_ref().map(|(_, format)| *format));
        let (first, header) = Header::new_image(size, (cluster, self.has_subclusters), base);
        if first.len() > cluster as usize {
            let name = header.backing.unwrap_or_default();
            return Err(self.refuse(
                "base",
                &name,
                "its name is too long for the first cluster: make clusters larger",
            ));
        }
        disk.set_end(u64::from(cluster) * CLUSTERS).map_err(cannot)?;
        let counts = [[0u8, 1]; CLUSTERS as usize].concat();
        let block = header.refcounts_offset + u64::from(cluster);
        for (at, bytes) in [
            (0, &first[..]),
            (header.refcounts_offset, &block.to_be_bytes()),
            (block, &counts),
        ] {
            transfer::write(&disk, at, bytes).map_err(cannot)?;
        }
        if header.size < size {
            let grow = || {
                let tables = Tables::open(&disk, None, &header)?;
                tables.grow(size)?;
                tables.flush()?;
                tables.write_header(SIZE_FIELD, &size.to_be_bytes())
            };
            grow().map_err(cannot)?;
        }
        disk.sync().map_err(cannot)
    }

    /// Opens the base for a look. Returns its name for the header, and the size of its disk.
    fn look_at_base(&self, path: &Path, format: BaseFormat) -> Result<(String, u64), ImageError> {
        let config = FileConfig {
            path: path.to_owned(),
            read_only: true,
            direct: Direct::Off,
            unlocked: true,
            ..FileConfig::default()
        };
        let disk = FileDisk::open_part(Purpose::Check, &config)?;
        let size = match format {
            BaseFormat::Qcow2 => chain::read_header(&disk)?.size,
            BaseFormat::Raw => disk
                .end()
                .map_err(|source| system(path, "measure it", source))?
                .next_multiple_of(512),
        };
        let name = self.name_of(path)?;
        if name.len() > NAME_MAX {
            return Err(self.refuse("base", &name, "its name is too long for the header"));
        }
        Ok((name, size))
    }

    /// The name of a base as the image has it: relative if it is in its directory or below, so that both can move.
    fn name_of(&self, path: &Path) -> Result<String, ImageError> {
        let base = path
            .canonicalize()
            .map_err(|source| system(path, "find it", source))?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = parent.unwrap_or(Path::new("."));
        let directory = directory
            .canonicalize()
            .map_err(|source| system(directory, "find it", source))?;
        let name = base.strip_prefix(&directory).unwrap_or(&base);
        let text = name
            .to_str()
            .ok_or_else(|| self.refuse("base", &path.to_string_lossy(), "its name is no text"))?;
        // A name with a colon would be an address.
        Ok(
            match text.split('/').next().is_some_and(|first| first.contains(':')) {
                true => format!("./{text}"),
                false => text.to_owned(),
            },
        )
    }

    fn refuse(&self, what: &'static str, value: &str, why: &str) -> ImageError {
        named(&self.path, what, value, why.to_owned())
    }
}

/// Clusters of a new image: those of its header, refcounts and tables.
const CLUSTERS: u64 = 4;
/// The smallest cluster whose subclusters have a sector each.
const SUBCLUSTERED_MIN: u32 = 16 << 10;
/// The default of QEMU, too.
const CLUSTER: u32 = 64 << 10;
/// The header has a limit of its own, of a cluster for everything.
pub(super) const NAME_MAX: usize = 1023;
