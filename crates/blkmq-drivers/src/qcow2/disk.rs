//! An image that is open and waits for the others of its queue, and how it is opened. `driver` opens it from its
//! keys; a drive of files takes it like one of its own.

use std::sync::Arc;

use blkmq_core::queue::TagMode;
use blkmq_host::Error;
use blkmq_host::device::Device;

use super::bitmaps;
use super::chain::{self, Access, Base, system};
use super::check;
use super::config::{BaseCache, Qcow2Config};
use super::error::ImageError;
use super::header::{AUTOCLEAR_BITMAPS, Header};
use super::image::{Image, Parts};
use super::rules::Rules;
use crate::driver::{OpenDisk, Purpose, Shape};
use crate::file::{Direct, FileConfig, FileDevice, FileDisk};

/// An open image.
#[derive(Debug)]
pub struct ImageDisk {
    pub(crate) image: Arc<Image>,
}

impl ImageDisk {
    /// Opens and checks an image and its bases. Blocks for some system calls and reads.
    ///
    /// # Errors
    /// See [`ImageError`].
    pub fn open(config: &Qcow2Config) -> Result<Self, ImageError> {
        Self::open_for(Purpose::Serve, config)
    }

    /// The same, for a purpose.
    pub(super) fn open_for(purpose: Purpose, config: &Qcow2Config) -> Result<Self, ImageError> {
        let rules = Rules::new(&config.path, &config.directories, config.chain_max.into())?;
        let (top, header, own) = open_own(purpose, config)?;
        let beside = chain::open_beside(&top, &header, &rules, &own, purpose)?;
        let access = Access {
            purpose,
            direct: match config.base_cache {
                BaseCache::Page => Direct::Off,
                BaseCache::Direct => Direct::Auto,
            },
            unlocked: config.unlocked,
        };
        let id = top
            .id
            .ok_or_else(|| system(&config.path, "identify it", std::io::ErrorKind::NotFound.into()))?;
        let base = chain::open_base(&top, &header, &rules, access, &mut vec![id])?;
        Ok(Self::of(config, header, top, beside, base))
    }

    /// Opens an image that was just made on what is open.
    pub(super) fn open_on(config: &Qcow2Config, base: Option<Arc<Base>>) -> Result<Self, ImageError> {
        let (top, header, _) = open_own(Purpose::Serve, config)?;
        Ok(Self::of(config, header, top, None, base))
    }

    fn of(
        config: &Qcow2Config,
        header: Header,
        top: FileDisk,
        beside: Option<Arc<FileDisk>>,
        base: Option<Arc<Base>>,
    ) -> Self {
        if header.autoclear & !AUTOCLEAR_BITMAPS != 0 && !config.read_only {
            tracing::warn!(
                "image {:?}: its promise that the data file is a raw image ends with the first request",
                config.path
            );
        }
        let found_bitmaps = bitmaps::names(&top, &header, top.has_inherited_lock());
        let image = Image::new(Parts {
            header,
            block_size: config.block_size.unwrap_or(top.block_size()),
            top: Arc::new(top),
            beside,
            base,
            config: config.clone(),
            found_bitmaps,
        });
        Self {
            image: Arc::new(image),
        }
    }

    /// The file on whose filesystem its data is.
    fn own(&self) -> &Arc<FileDisk> {
        &self.image.files()[usize::from(self.image.data_file())]
    }
}

/// Opens and checks the image's own file. Returns how it was opened, too.
fn open_own(purpose: Purpose, config: &Qcow2Config) -> Result<(FileDisk, Header, FileConfig), ImageError> {
    let mut own = FileConfig {
        path: config.path.clone(),
        read_only: config.read_only,
        block_size: config.block_size,
        direct: config.direct,
        unlocked: config.unlocked,
        ..FileConfig::default()
    };
    let mut top = FileDisk::open_part(purpose, &own)?;
    let header = chain::read_header(&top)?;
    if 1 << header.unit_bits() < u64::from(top.range()).max(PAGE) && top.is_direct() {
        // Clusters and tables of one block would be changed past and through each other.
        top.use_page_cache();
        own.direct = Direct::Off;
    }
    if !top.has_inherited_lock() {
        // Otherwise another daemon still writes, and has checked it.
        check::tables(&top, &header)?;
    }
    let block_size = config.block_size.unwrap_or(top.block_size());
    if !header.size.is_multiple_of(block_size.into()) {
        return Err(ImageError::Ragged {
            path: config.path.clone(),
            size: header.size,
            block: block_size,
        });
    }
    Ok((top, header, own))
}

impl OpenDisk for ImageDisk {
    /// The drive is one of files.
    fn driver(&self) -> &'static str {
        "file"
    }

    fn shape(&self) -> Shape {
        Shape {
            size: self.image.size(),
            block_size: self.image.block_size,
            read_only: self.image.read_only,
        }
    }

    fn device(&self) -> Option<String> {
        self.own().device_name()
    }

    fn tags(&self) -> TagMode {
        self.own().tags()
    }

    fn check_path(&self) -> Result<(), &'static str> {
        Err("an image has one writer, and so one path")
    }

    fn join(
        self: Box<Self>,
        queue: &str,
        others: Vec<Box<dyn OpenDisk>>,
        _sizes: &[u64],
        depth: u32,
    ) -> Result<Arc<dyn Device>, Error> {
        FileDevice::join(queue, self, others, depth)
    }
}

/// Smaller clusters share pages.
const PAGE: u64 = 4096;
