//! The encrypted disks of an engine, with their keys: their opening when it starts, and by a passphrase later. The
//! parent module has what their configuration says.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail};
use blkmq_core::ids::GroupId;
use blkmq_host::Control;
use blkmq_host::device::FileId;
use blkmq_host::disk::Disk;
use blkmq_host::encrypted::{EncryptedData, EncryptedSpec, SectorCipher};
use blkmq_host::found::open_file_or_device;
use blkmq_luks::{Header, LuksError, ReadAt, Secret, VolumeKey, Xts, secret};

use super::LuksSource;
use crate::disk::{DiskSpec, Source};

/// An encrypted disk of a plan, to be added when the engine runs.
#[derive(Clone, Debug)]
pub struct PlannedLuks {
    pub(crate) spec: DiskSpec,
    pub(crate) source: LuksSource,
    pub(crate) group: GroupId,
}

/// The keys of the disks that are open, in locked memory: another daemon that takes over needs them.
#[derive(Debug, Default)]
pub struct Keyring {
    keys: Mutex<BTreeMap<String, VolumeKey>>,
    /// What the commands of disks have printed, until these are opened.
    printed: Mutex<BTreeMap<String, Result<Secret>>>,
    /// What was found when disks were added.
    found: Mutex<BTreeMap<String, Found>>,
}

/// What was found when an encrypted disk was added.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// The file that has its header, if the disk below does not, as it was opened.
    pub header: Option<FileId>,
    /// The key that another daemon had handed over does not fit its header.
    pub has_other_key: bool,
}

impl Keyring {
    /// Puts a key in that another daemon has handed over.
    pub fn insert(&self, disk: String, key: VolumeKey) {
        self.lock().insert(disk, key);
    }

    /// The disks and their keys.
    ///
    /// # Errors
    /// If there is no locked memory for copies.
    pub fn keys(&self) -> Result<Vec<(String, VolumeKey)>, LuksError> {
        let keys = self.lock();
        let copies = keys.iter().map(|(disk, key)| Ok((disk.clone(), key.copy()?)));
        copies.collect()
    }

    /// Puts in what a disk's command has printed, or why it has not.
    pub fn set_printed(&self, disk: String, passphrase: Result<Secret>) {
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        printed.insert(disk, passphrase);
    }

    /// What was found when a disk was added; nothing of a disk that is not encrypted, or whose header cannot be opened.
    pub fn found(&self, disk: &str) -> Found {
        self.lock_found().get(disk).copied().unwrap_or_default()
    }

    /// Adds the encrypted disks of a plan to an engine, in order. One that cannot be opened is added locked; the
    /// others serve. Keys that were handed over for disks that are not among them are wiped. Blocks for as long as
    /// the drives and the key slots take.
    ///
    /// # Errors
    /// A disk that cannot be added, or cannot be opened although its key was handed over, with its name.
    pub fn open_all(&self, control: &Control, planned: Vec<PlannedLuks>) -> Result<()> {
        let mut handed = std::mem::take(&mut *self.lock());
        let mut printed = self.printed.lock().unwrap_or_else(PoisonError::into_inner);
        let mut printed = std::mem::take(&mut *printed);
        for one in planned {
            let context = format!("disk {}", one.spec.name);
            let given = Given {
                key: handed.remove(&one.spec.name),
                printed: printed.remove(&one.spec.name),
            };
            self.open(control, one, given).context(context)?;
        }
        Ok(())
    }

    fn open(&self, control: &Control, planned: PlannedLuks, given: Given) -> Result<()> {
        let PlannedLuks { spec, source, group } = planned;
        let (name, was_open) = (spec.name.clone(), given.key.is_some());
        let (data, mut opened) = self.open_source(control, &name, &source, given);
        let mut is_usable = data.is_some();
        let cipher = opened.as_ref().ok().and_then(Option::as_ref);
        let added = EncryptedSpec {
            name: spec.name,
            description: spec.description,
            serial: spec.serial,
            export: spec.export,
            below: source.below,
            data,
            read_only: spec.read_only,
            block_size: spec.block_size,
            discard: source.discard,
            group,
            group_path: spec.group,
            cipher: cipher.map(|opened| Arc::clone(&opened.cipher)),
        };
        let unusable = EncryptedSpec {
            data: None,
            cipher: None,
            ..added.clone()
        };
        if let Err(error) = control.add_encrypted(added) {
            control.add_encrypted(unusable)?;
            let why = error.to_string();
            let why = why.strip_prefix(&format!("disk {name}: ")).unwrap_or(&why);
            (opened, is_usable) = (Err(anyhow!("{why}")), false);
        }
        let unlock = format!("blkmq ctl unlock {name} opens it");
        match opened {
            Ok(Some(opened)) => self.insert(name, opened.key),
            Ok(None) => tracing::info!("disk {name}: is locked, since it has no key=; {unlock}"),
            Err(error) if was_open => return Err(error.context("it is open in the running daemon")),
            Err(error) if is_usable => tracing::error!("disk {name}: stays locked: {error:#}; {unlock}"),
            Err(error) => tracing::error!("disk {name}: stays locked while this daemon runs: {error:#}"),
        }
        Ok(())
    }

    /// Opens a disk of a running engine with what [`Opened::find`] has found.
    ///
    /// # Errors
    /// It is not locked, its header could not be used when it was added, or is another file by now.
    pub fn unlock(&self, control: &Control, opened: Opened) -> Result<()> {
        if self.found(&opened.disk).header != opened.header {
            bail!(
                "disk {}: its header= is another file than when this daemon started, which has where its data begin: put that \
                 one back, or start the daemon again",
                opened.disk
            );
        }
        control.unlock(&opened.disk, opened.cipher)?;
        self.insert(opened.disk, opened.key);
        Ok(())
    }

    /// Where the data of a disk are, if its header can be used; and its key, if it has one.
    fn open_source(
        &self,
        control: &Control,
        name: &str,
        source: &LuksSource,
        given: Given,
    ) -> (Option<EncryptedData>, Result<Option<Opened>>) {
        let (header, mut place) = match open_header(control, source) {
            Ok(read) => read,
            Err(error) => return (None, Err(error)),
        };
        if let Some(warning) = &header.warning {
            tracing::warn!("disk {name}: {warning}");
        }
        let data = EncryptedData {
            start: header.payload.offset,
            size: header.payload.size,
            sector: header.payload.sector,
        };
        let found = Found {
            header: place.file_id(),
            has_other_key: given
                .key
                .as_ref()
                .is_some_and(|key| header.check_key(key).is_err()),
        };
        self.lock_found().insert(name.to_owned(), found);
        let key = find_key(given, source, &header, &mut place);
        let opened = key.and_then(|key| key.map(|key| Opened::new(name, &header, &place, key)).transpose());
        (Some(data), opened)
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, VolumeKey>> {
        self.keys.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_found(&self) -> MutexGuard<'_, BTreeMap<String, Found>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What a disk has got of its key beside its configuration.
struct Given {
    /// The key that another daemon has handed over.
    key: Option<VolumeKey>,
    /// What its command has printed.
    printed: Option<Result<Secret>>,
}

/// The key of a disk that was found, and its cipher.
pub struct Opened {
    disk: String,
    /// The file that has the header, if the disk below does not.
    header: Option<FileId>,
    key: VolumeKey,
    cipher: Arc<dyn SectorCipher>,
}

impl Opened {
    /// Finds the key of a disk of a running engine with a passphrase. Blocks as [`Keyring::open_all`].
    ///
    /// # Errors
    /// There is no such disk, its header cannot be used, or no slot opens.
    pub fn find(control: &Control, spec: &DiskSpec, passphrase: &Secret) -> Result<Self> {
        let name = &spec.name;
        let Source::Luks(source) = &spec.source else {
            bail!("disk {name}: is not encrypted by this daemon");
        };
        let found = || -> Result<Self> {
            let (header, mut place) = open_header(control, source)?;
            let key = header.unlock(passphrase, &mut place)?;
            Self::new(name, &header, &place, key)
        };
        found().with_context(|| format!("disk {name}"))
    }

    fn new(disk: &str, header: &Header, place: &HeaderPlace<'_>, key: VolumeKey) -> Result<Self> {
        let cipher = LuksCipher {
            xts: Xts::new(key.bytes(), header.payload.sector)?,
            first_sector: header.payload.first_sector,
        };
        Ok(Self {
            disk: disk.to_owned(),
            header: place.file_id(),
            key,
            cipher: Arc::new(cipher),
        })
    }
}

/// Reads the header of a disk. Returns where it is, too.
fn open_header<'a>(control: &'a Control, source: &LuksSource) -> Result<(Header, HeaderPlace<'a>)> {
    let mut place = HeaderPlace::of(control, source)?;
    Ok((Header::read(&mut place)?, place))
}

/// The volume key: handed over, or by the configured passphrase. `None` if nothing is configured.
fn find_key(
    given: Given,
    source: &LuksSource,
    header: &Header,
    place: &mut HeaderPlace<'_>,
) -> Result<Option<VolumeKey>> {
    if let Some(key) = given.key.filter(|key| header.check_key(key).is_ok()) {
        return Ok(Some(key));
    }
    let Some(from) = &source.key else {
        return Ok(None);
    };
    let passphrase = given.printed.unwrap_or_else(|| from.read());
    let passphrase = passphrase.with_context(|| format!("key {from}"))?;
    Ok(Some(header.unlock(&passphrase, place)?))
}

/// Where a header is.
enum HeaderPlace<'a> {
    File(File),
    Disk(&'a Control, Box<Disk>),
}

impl<'a> HeaderPlace<'a> {
    fn of(control: &'a Control, source: &LuksSource) -> Result<Self> {
        if let Some(path) = &source.header {
            let file = open_file_or_device(path).with_context(|| format!("header {}", path.display()))?;
            return Ok(Self::File(file));
        }
        let disks = control.disks();
        let below = disks.iter().find(|disk| disk.name == source.below);
        let below = below.with_context(|| format!("there is no disk {} for it to lie on", source.below))?;
        Ok(Self::Disk(control, Box::new(below.clone())))
    }
}

impl HeaderPlace<'_> {
    /// The file, if it is one of its own.
    fn file_id(&self) -> Option<FileId> {
        match self {
            Self::File(file) => file.metadata().ok().as_ref().map(FileId::of),
            Self::Disk(..) => None,
        }
    }
}

impl ReadAt for HeaderPlace<'_> {
    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        match self {
            Self::File(file) => file.read_at(offset, bytes),
            Self::Disk(control, disk) => control.read(disk, offset, bytes),
        }
    }
}

/// The cipher of a disk's sectors, by their places on the disk.
struct LuksCipher {
    xts: Xts,
    first_sector: u64,
}

impl SectorCipher for LuksCipher {
    fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.xts
            .encrypt(self.first_sector.wrapping_add(offset / SECTOR), bytes);
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.xts
            .decrypt(self.first_sector.wrapping_add(offset / SECTOR), bytes);
    }

    fn wipe_stack(&self) {
        secret::wipe_stack_of_sectors();
    }
}

/// Refuses encrypted disks where nobody opens them.
///
/// # Errors
/// There is one.
pub fn refuse(planned: &[PlannedLuks]) -> Result<()> {
    match planned.first() {
        None => Ok(()),
        Some(one) => bail!(
            "disk {}: encrypted disks are served by blkmq serve alone",
            one.spec.name
        ),
    }
}

/// The unit of sector numbers, in bytes.
const SECTOR: u64 = 512;
