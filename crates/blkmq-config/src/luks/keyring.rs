//! The encrypted disks of an engine, with their keys: their opening when it starts, and by a passphrase later. The
//! parent module has what their configuration says.

use std::cell::Cell;
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
use blkmq_luks::{Header, LuksError, Payload, ReadAt, Secret, VolumeKey, Xts, secret};

use super::LuksSource;
use crate::disk::{DiskSpec, Source};

/// An encrypted disk of a plan, to be added when the engine runs.
#[derive(Clone, Debug)]
pub struct PlannedLuks {
    pub(crate) spec: DiskSpec,
    pub(crate) source: LuksSource,
    pub(crate) group: GroupId,
}

/// The encrypted disks of an engine, with the keys of those that are open, in locked memory: another daemon that
/// takes over needs them.
#[derive(Debug, Default)]
pub struct Keyring {
    disks: Mutex<BTreeMap<String, Known>>,
    /// Keys that another daemon has handed over, until the disks are opened.
    handed: Mutex<BTreeMap<String, VolumeKey>>,
    /// Passphrases that came otherwise than `key=` can have them read, such as what commands have printed, until the disks
    /// are opened.
    passphrases: Mutex<BTreeMap<String, Result<Secret>>>,
}

/// What is known of an encrypted disk that an engine has, had until now, or is to have.
#[derive(Debug, Default)]
pub struct Known {
    /// Where its data are; none if its header cannot be used.
    payload: Option<Payload>,
    found: Found,
    /// Its key, if it is not locked.
    key: Option<VolumeKey>,
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
        lock(&self.handed).insert(disk, key);
    }

    /// The disks that are open, and their keys.
    ///
    /// # Errors
    /// If there is no locked memory for copies.
    pub fn keys(&self) -> Result<Vec<(String, VolumeKey)>, LuksError> {
        let disks = lock(&self.disks);
        let open = disks
            .iter()
            .filter_map(|(disk, known)| Some((disk, known.key.as_ref()?)));
        open.map(|(disk, key)| Ok((disk.clone(), key.copy()?))).collect()
    }

    /// Puts in a disk's passphrase that comes otherwise than `key=` can have it read, as what its command has printed; or
    /// why it does not come.
    pub fn set_passphrase(&self, disk: String, passphrase: Result<Secret>) {
        lock(&self.passphrases).insert(disk, passphrase);
    }

    /// What was found when a disk was added; nothing of a disk that is not encrypted, or whose header cannot be opened.
    pub fn found(&self, disk: &str) -> Found {
        lock(&self.disks)
            .get(disk)
            .map(|known| known.found)
            .unwrap_or_default()
    }

    /// Adds the encrypted disks of a plan to an engine, in order. One that cannot be opened is added locked; the
    /// others serve. Keys that were handed over for disks that are not among them are wiped. Blocks for as long as
    /// the drives and the key slots take.
    ///
    /// # Errors
    /// A disk that cannot be added, or cannot be opened although its key was handed over, with its name.
    pub fn open_all(&self, control: &Control, planned: Vec<PlannedLuks>) -> Result<()> {
        let mut handed = std::mem::take(&mut *lock(&self.handed));
        let mut passphrases = std::mem::take(&mut *lock(&self.passphrases));
        for one in planned {
            let context = format!("disk {}", one.spec.name);
            let given = Given {
                key: handed.remove(&one.spec.name),
                passphrase: passphrases.remove(&one.spec.name),
            };
            self.open(control, one, given).context(context)?;
        }
        Ok(())
    }

    /// The same for an engine that nobody uses yet, and where nobody can unlock a disk: each has a key, and opens.
    ///
    /// # Errors
    /// A disk that does not open, with its name.
    pub fn open_each(&self, control: &Control, planned: &[PlannedLuks]) -> Result<()> {
        let mut passphrases = std::mem::take(&mut *lock(&self.passphrases));
        if let Some(other) = passphrases
            .keys()
            .find(|name| !planned.iter().any(|one| one.spec.name == **name))
        {
            bail!("disk {other}: has a key, and there is no encrypted disk (luks=) of this name");
        }
        for one in planned {
            let name = &one.spec.name;
            let given = Given {
                key: None,
                passphrase: passphrases.remove(name),
            };
            let found = Known::find(control, &one.spec, &one.source, given);
            let opened = found.and_then(|(known, opened)| opened.map(|()| known));
            let known = opened.with_context(|| format!("disk {name}"))?;
            if known.key.is_none() {
                bail!("disk {name}: has no key: set key= to a file, or give its passphrase to the builder");
            }
            self.add(control, one, known)?;
        }
        Ok(())
    }

    fn open(&self, control: &Control, planned: PlannedLuks, given: Given) -> Result<()> {
        let name = planned.spec.name.clone();
        let was_open = given.key.is_some();
        let (mut known, mut problem) = match Known::find(control, &planned.spec, &planned.source, given) {
            Ok((known, opened)) => (known, opened.err()),
            Err(error) => (Known::default(), Some(error)),
        };
        if let Err(error) = known.cipher() {
            (known.key, problem) = (None, Some(error));
        }
        if let Err(error) = known.add(control, &planned) {
            (known.payload, known.key) = (None, None);
            known.add(control, &planned)?;
            let why = error.to_string();
            let why = why.strip_prefix(&format!("disk {name}: ")).unwrap_or(&why);
            problem = Some(anyhow!("{why}"));
        }
        let (is_usable, is_open) = (known.payload.is_some(), known.key.is_some());
        lock(&self.disks).insert(name.clone(), known);
        let unlock = format!("blkmq ctl unlock {name} opens it");
        match problem {
            None if is_open => {}
            None => tracing::info!(
                disk = name,
                "disk {name}: is locked, since it has no key=; {unlock}"
            ),
            Some(error) if was_open => return Err(error.context("it is open in the running daemon")),
            Some(error) if is_usable => {
                tracing::error!(disk = name, "disk {name}: stays locked: {error:#}; {unlock}")
            }
            Some(error) => tracing::error!(
                disk = name,
                "disk {name}: stays locked while this daemon runs: {error:#}"
            ),
        }
        Ok(())
    }

    /// Adds a disk of which all is known to a running engine.
    ///
    /// # Errors
    /// As for [`Control::add_encrypted`].
    pub(crate) fn add(&self, control: &Control, planned: &PlannedLuks, known: Known) -> Result<Disk> {
        let disk = known.add(control, planned)?;
        lock(&self.disks).insert(disk.name.clone(), known);
        Ok(disk)
    }

    /// Forgets a disk that the engine has no more. Returns what was known of it: its key is wiped with that.
    pub fn remove(&self, disk: &str) -> Option<Known> {
        lock(&self.disks).remove(disk)
    }

    /// Opens a disk of a running engine with what [`Opened::find`] has found. For one change of the disks at a time.
    ///
    /// # Errors
    /// It is another disk by now, it is not locked, its header could not be used when it was added, or is another file by
    /// now.
    pub fn unlock(&self, control: &Control, opened: Opened) -> Result<()> {
        let name = &opened.disk;
        let disks = control.disks();
        let is_same = |disk: &Disk| disk.name == *name && disk.number == opened.number;
        if !disks.iter().any(is_same) {
            bail!("disk {name}: it was removed meanwhile");
        }
        if self.found(name).header != opened.header {
            bail!(
                "disk {name}: its header= is another file than when this daemon started, which has where its data begin: put that \
                 one back, or start the daemon again"
            );
        }
        control.unlock(name, opened.cipher)?;
        if let Some(known) = lock(&self.disks).get_mut(name) {
            known.key = Some(opened.key);
        }
        Ok(())
    }
}

impl Known {
    /// Reads the header of a disk, and finds its key, if one is configured or given. Blocks for as long as the drive and
    /// the key slots take.
    ///
    /// # Errors
    /// The header cannot be used; within, why there is no key.
    fn find(
        control: &Control,
        spec: &DiskSpec,
        source: &LuksSource,
        given: Given,
    ) -> Result<(Self, Result<()>)> {
        let (header, mut place) = open_header(control, source)?;
        if let Some(warning) = &header.warning {
            tracing::warn!(disk = spec.name, "disk {}: {warning}", spec.name);
        }
        let mut known = Self {
            payload: Some(header.payload),
            found: Found {
                header: place.file_id(),
                has_other_key: given
                    .key
                    .as_ref()
                    .is_some_and(|key| header.check_key(key).is_err()),
            },
            key: None,
        };
        let key = find_key(given, source, &header, &mut place);
        let opened = key.map(|key| known.key = key);
        Ok((known, opened))
    }

    /// The same for a disk that is to be added to a running engine, which must open if it has a key.
    ///
    /// # Errors
    /// The header cannot be used, or the key does not open it.
    pub fn find_for(control: &Control, spec: &DiskSpec, source: &LuksSource) -> Result<Self> {
        let given = Given {
            key: None,
            passphrase: None,
        };
        let (known, opened) = Self::find(control, spec, source, given)?;
        opened.map(|()| known)
    }

    /// The cipher of its sectors, if it is not locked.
    fn cipher(&self) -> Result<Option<Arc<dyn SectorCipher>>> {
        match (&self.payload, &self.key) {
            (Some(payload), Some(key)) => cipher(payload, key).map(Some),
            _ => Ok(None),
        }
    }

    fn add(&self, control: &Control, planned: &PlannedLuks) -> Result<Disk> {
        let PlannedLuks { spec, source, group } = planned.clone();
        let cipher = self.cipher()?;
        let data = self.payload.map(|payload| EncryptedData {
            start: payload.offset,
            size: payload.size,
            sector: payload.sector,
        });
        let added = control.add_encrypted(EncryptedSpec {
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
            cipher,
        });
        Ok(added?)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What a disk has got of its key beside its configuration.
struct Given {
    /// The key that another daemon has handed over.
    key: Option<VolumeKey>,
    /// A passphrase that is used in place of what is configured.
    passphrase: Option<Result<Secret>>,
}

/// The key of a disk that was found, and its cipher.
pub struct Opened {
    disk: String,
    /// The disk's, as it was then.
    number: u32,
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
            let disks = control.disks();
            let disk = disks.iter().find(|disk| disk.name == *name);
            let number = disk.context("there is no such disk")?.number;
            let (header, mut place) = open_header(control, source)?;
            let key = header.unlock(passphrase, &mut place)?;
            Ok(Self {
                disk: name.clone(),
                number,
                header: place.file_id(),
                cipher: cipher(&header.payload, &key)?,
                key,
            })
        };
        found().with_context(|| format!("disk {name}"))
    }
}

fn cipher(payload: &Payload, key: &VolumeKey) -> Result<Arc<dyn SectorCipher>> {
    Ok(Arc::new(LuksCipher {
        xts: Xts::new(key.bytes(), payload.sector)?,
        first_sector: payload.first_sector,
    }))
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
    let passphrase = match (given.passphrase, &source.key) {
        (None, None) => return Ok(None),
        (Some(given), None) => given?,
        (given, Some(from)) => given
            .unwrap_or_else(|| from.read())
            .with_context(|| format!("key {from}"))?,
    };
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

impl LuksCipher {
    /// The number of the sector at an offset of the disk.
    fn number(&self, offset: u64) -> u64 {
        self.first_sector.wrapping_add(offset / SECTOR)
    }
}

impl SectorCipher for LuksCipher {
    fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.xts.encrypt(self.number(offset), bytes);
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.xts.decrypt(self.number(offset), bytes);
    }

    fn encrypt_from(&self, offset: u64, from: &[Cell<u8>], into: &mut [u8]) {
        self.xts.encrypt_from(self.number(offset), from, into);
    }

    fn decrypt_shared(&self, offset: u64, bytes: &[Cell<u8>]) {
        self.xts.decrypt_shared(self.number(offset), bytes);
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
            "disk {}: encrypted disks are served by blkmq serve and by the library, and not here",
            one.spec.name
        ),
    }
}

/// The unit of sector numbers, in bytes.
const SECTOR: u64 = 512;
