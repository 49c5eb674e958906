//! Encrypted disks of a running engine: they are added when their headers have been read through it, and
//! unlocked when a key comes. `engine::encrypted` has what they are.

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::time::Duration;

use blkmq_core::bio::{Bio, Data, Op, Status};
use blkmq_core::ids::{DiskId, ReactorId};

use super::Control;
use super::devices::take_number;
use crate::disk::{Disk, MAPPED, Users};
use crate::engine::encrypted::{EncryptedAllocation, EncryptedSpec, FIRST, SectorCipher, make};
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::encrypt::BounceMemory;
use crate::reactor::service::{Cx, Service};
use crate::reactor::shared::Order;
use crate::uring::ring::Completion;

impl Control {
    /// Adds an encrypted disk. For any thread but a reactor's, and for an engine without attached threads.
    ///
    /// # Errors
    /// If there is a disk of this name, or none below, or its data do not lie inside in whole blocks.
    pub fn add_encrypted(&self, spec: EncryptedSpec) -> Result<Disk, Error> {
        let mut next_number = self.changing()?;
        self.check_name(&spec.name)?;
        let disks = self.shared.disks();
        let (below, encrypted) = make(&spec, &disks, Arc::clone(&self.shared.encrypted_writes))?;
        let id = DiskId(FIRST + self.shared.encrypted().len() as u32);
        let tenant = self.shared.tenants.tenant("", spec.group, Some(&spec.group_path));
        let allocation = EncryptedAllocation {
            encrypted: Arc::clone(&encrypted),
            below: below.clone(),
        };
        let disk = Disk {
            serial: crate::disk::serial_of(&spec.name, spec.serial.as_deref()),
            export: spec.export.unwrap_or_else(|| spec.name.clone()),
            name: spec.name,
            description: spec.description,
            queue: MAPPED,
            id,
            size: encrypted.size,
            read_only: encrypted.read_only,
            block_size: encrypted.limits.logical_block,
            group: spec.group,
            tenant,
            limits: encrypted.limits.clone(),
            allocation: Arc::new(allocation),
            used_by: None,
            number: take_number(&mut next_number),
            users: Users::default(),
        };
        if encrypted.cipher().is_none() {
            // Nobody can use it until it is unlocked.
            disk.users.withdraw(true);
        }
        self.shared.on_reactors(|_| {
            let encrypted = Arc::clone(&encrypted);
            move |core: &mut ReactorCore| core.add_encrypted(encrypted)
        });
        self.shared.encrypted().push(Arc::clone(&encrypted));
        let mut all = disks.to_vec();
        for other in &mut all {
            if other.name == below.name {
                other.used_by = Some(disk.name.clone());
            }
        }
        all.push(disk.clone());
        self.shared.set_disks(all.into());
        Ok(disk)
    }

    /// Gives a locked disk its cipher.
    ///
    /// # Errors
    /// If there is no such disk, it is not encrypted, it was added without data, or it has its cipher already.
    pub fn unlock(&self, name: &str, cipher: Arc<dyn SectorCipher>) -> Result<(), Error> {
        let refuse = |why: &str| Error::Disk(format!("disk {name}: {why}"));
        let disks = self.shared.disks();
        let disk = disks.iter().find(|disk| disk.name == name);
        let disk = disk.ok_or_else(|| refuse("there is no such disk"))?;
        let index = disk.id.0.checked_sub(FIRST).filter(|_| disk.queue == MAPPED);
        let index = index.ok_or_else(|| refuse("is not encrypted by this daemon"))?;
        let encrypted = Arc::clone(&self.shared.encrypted()[index as usize]);
        if encrypted.size == 0 {
            return Err(refuse(
                "its header could not be used when this daemon started: start another one, with --take-over",
            ));
        }
        if !encrypted.unlock(cipher) {
            return Err(refuse("is not locked"));
        }
        disk.users.withdraw(false);
        Ok(())
    }
}

impl Control {
    /// Reads bytes of a disk through its queue. For any thread but a reactor's.
    ///
    /// # Errors
    /// [`io::ErrorKind::UnexpectedEof`] beyond the end; the error of the read; none after two minutes.
    pub fn read(&self, disk: &Disk, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let block = u64::from(disk.block_size);
        let (first, end) = (offset - offset % block, offset.saturating_add(bytes.len() as u64));
        if end > disk.current_size() {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let (answer, answered) = mpsc::sync_channel(1);
        let reader = Reader {
            memory: Some(BounceMemory::new((end.next_multiple_of(block) - first) as usize)),
            disk: disk.clone(),
            offset: first,
            len: end.next_multiple_of(block) - first,
            answer,
            state: ReadState::ToSubmit,
        };
        let factory = Box::new(move || Box::new(reader) as Box<dyn Service>);
        self.shared.order(ReactorId(0), Order::Add(factory));
        let (mut memory, status) = answered.recv_timeout(READ_MAX).map_err(|_| {
            io::Error::new(
                io::ErrorKind::TimedOut,
                "the drive does not answer, or the engine ends",
            )
        })?;
        if !status.is_ok() {
            return Err(io::Error::from_raw_os_error(status.errno()));
        }
        let skip = (offset - first) as usize;
        bytes.copy_from_slice(memory.bytes_mut(skip..skip + bytes.len()));
        Ok(())
    }
}

/// One read, as a service of a reactor.
struct Reader {
    /// Until it is sent to the thread that waits.
    memory: Option<BounceMemory>,
    disk: Disk,
    offset: u64,
    len: u64,
    answer: SyncSender<(BounceMemory, Status)>,
    state: ReadState,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ReadState {
    ToSubmit,
    UnderWay,
    Over,
}

impl Reader {
    fn submit(&mut self, cx: &mut Cx<'_>) {
        let (ReadState::ToSubmit, Some(memory)) = (self.state, &self.memory) else {
            return;
        };
        let bio = Bio {
            op: Op::Read,
            disk: self.disk.id,
            group: self.disk.group,
            offset: self.offset,
            len: self.len,
            data: Data::Flat(memory.lend(0..self.len as usize)),
            ..Bio::default()
        };
        if cx.submit(self.disk.queue, bio).is_ok() {
            self.state = ReadState::UnderWay;
        }
    }
}

impl Service for Reader {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn on_ring(&mut self, _: &mut Cx<'_>, _: &[Completion]) {}

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn on_end(&mut self, _: &mut Cx<'_>, bio: Bio) {
        self.state = ReadState::Over;
        if let Some(memory) = self.memory.take() {
            // The other thread may have given up.
            let _ = self.answer.try_send((memory, bio.status));
        }
    }

    fn drain(&mut self, _: &mut Cx<'_>) {
        if self.state == ReadState::ToSubmit {
            self.state = ReadState::Over;
        }
    }

    fn is_finished(&self) -> bool {
        self.state == ReadState::Over
    }
}

/// Longer than any drive takes that answers.
const READ_MAX: Duration = Duration::from_secs(120);
