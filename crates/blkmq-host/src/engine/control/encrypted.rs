//! Encrypted disks of a running engine: they are added when their headers have been read through it, and
//! unlocked when a key comes. `engine::encrypted` has what they are.

use std::io;
use std::sync::mpsc::{self, SyncSender};
use std::sync::{Arc, PoisonError};
use std::time::Duration;

use blkmq_core::bio::{Bio, Data, Op, Status};
use blkmq_core::ids::{DiskId, ReactorId};
use blkmq_core::time::Nanos;

use super::Control;
use super::devices::take_number;
use crate::disk::{Disk, MAPPED, QueueId, Use, Users};
use crate::engine::encrypted::{EncryptedAllocation, EncryptedSpec, FIRST, SectorCipher, make};
use crate::error::Error;
use crate::reactor::core::ReactorCore;
use crate::reactor::encrypt::BounceMemory;
use crate::reactor::service::{Cx, Service};
use crate::reactor::shared::Order;
use crate::uring::ring::Completion;

impl Control {
    /// Adds an encrypted disk. For any thread but a reactor's, and for an engine to which no thread is attached now: those
    /// that attach later have it. Nobody may use the disk below; whoever has looked for that one before finds it no more by its number.
    ///
    /// # Errors
    /// If there is a disk of this name, or none below, that one has users, or its data do not lie inside in whole
    /// blocks; nothing is changed then.
    pub fn add_encrypted(&self, spec: EncryptedSpec) -> Result<Disk, Error> {
        let changes = &self.shared.changes;
        let mut next_number = changes.lock().unwrap_or_else(PoisonError::into_inner);
        if self.shared.attached() > 0 {
            return Err(Error::Disk(format!(
                "disk {}: an encrypted disk can come only while no thread is attached",
                spec.name
            )));
        }
        self.check_name(&spec.name)?;
        let disks = self.shared.disks();
        let writers = Arc::clone(&self.shared.encrypted_writes);
        let (below, encrypted) = make(&spec, &disks, writers, |below| self.queues_of(below))?;
        if !below.users.withdraw_if_unused() {
            return Err(Error::Disk(has_clients(&spec.name, &below)));
        }
        let index = self.shared.free_encrypted();
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
            id: DiskId(FIRST + index as u32),
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
        self.shared.set_encrypted(index, Some(Arc::clone(&encrypted)));
        let used = |mut other: Disk| {
            if other.name == below.name {
                other.used_by = Some(disk.name.clone());
                other.number = take_number(&mut next_number);
            }
            other
        };
        let all: Vec<Disk> = disks.iter().cloned().map(used).chain([disk.clone()]).collect();
        self.shared.set_disks(all.into());
        // When each has taken it, a service that had found the disk below before has tried to use it.
        self.shared.on_reactors(|_| {
            let encrypted = Arc::clone(&encrypted);
            move |core: &mut ReactorCore| core.add_encrypted(index, encrypted)
        });
        below.users.withdraw(false);
        Ok(disk)
    }

    /// Checks that an encrypted disk can be added on a disk, as far as that one is concerned, unless its users change.
    ///
    /// # Errors
    /// If there is no such disk, or it has users. Others that lie on it are no matter here.
    pub fn check_below(&self, name: &str, below: &str) -> Result<Disk, Error> {
        let disks = self.shared.disks();
        let found = disks.iter().find(|disk| disk.name == below);
        let refuse = |why: String| Error::Disk(format!("disk {name}: {why}"));
        let found = found.ok_or_else(|| refuse(format!("there is no disk {below} for it to lie on")))?;
        match found.users.count() {
            0 => Ok(found.clone()),
            _ => Err(Error::Disk(has_clients(name, found))),
        }
    }

    /// Removes an encrypted disk from each thread, with its cipher. Says whether it did. Nobody uses it.
    pub(super) fn let_encrypted_go(&self, disk: &Disk, limit: Nanos) -> bool {
        let index = (disk.id.0 - FIRST) as usize;
        let has_gone = || {
            let remove = |_| move |core: &mut ReactorCore| core.remove_encrypted(index);
            let gone = self.shared.on_reactors(remove);
            gone.into_iter().all(|gone| gone)
        };
        let is_gone = self.wait_for(limit, has_gone);
        if is_gone {
            self.shared.set_encrypted(index, None);
        } else if let Some(encrypted) = self.shared.encrypted(index) {
            self.shared.on_reactors(|_| {
                let encrypted = Arc::clone(&encrypted);
                move |core: &mut ReactorCore| core.add_encrypted(index, encrypted)
            });
        }
        is_gone
    }

    /// The queues on which a disk's I/O goes.
    pub fn queues_of(&self, disk: &Disk) -> Vec<QueueId> {
        if disk.queue != MAPPED {
            return vec![disk.queue];
        }
        let index = disk.id.0.checked_sub(FIRST);
        let below = index.and_then(|index| self.shared.encrypted(index as usize));
        let (queue, id) = below.map_or((MAPPED, disk.id), |encrypted| encrypted.below);
        if queue != MAPPED {
            return vec![queue];
        }
        let table = &self.shared.mapped;
        let leaves = table.disks().get(id.index()).into_iter();
        let leaves = leaves.flat_map(|disk| disk.leaves());
        let mut queues: Vec<QueueId> = leaves
            .map(|leaf| QueueId(table.leaves()[leaf as usize].queue))
            .collect();
        queues.sort_unstable();
        queues.dedup();
        queues
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
        let encrypted = index.and_then(|index| self.shared.encrypted(index as usize));
        let encrypted = encrypted.ok_or_else(|| refuse("is not encrypted by this daemon"))?;
        if encrypted.size == 0 {
            return Err(refuse(
                "its header could not be used when this daemon started: when it is mended, remove the disk and add it again",
            ));
        }
        if !encrypted.unlock(cipher) {
            return Err(refuse("is not locked"));
        }
        disk.users.withdraw(false);
        Ok(())
    }
}

fn has_clients(name: &str, below: &Disk) -> String {
    let below = &below.name;
    format!("disk {name}: disk {below} has clients, which would write into its data: disconnect them first")
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
            of_disk: None,
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
    /// Keeps the disk from being removed meanwhile.
    of_disk: Option<Use>,
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

    fn end(&mut self, status: Status) {
        self.state = ReadState::Over;
        self.of_disk = None;
        if let Some(memory) = self.memory.take() {
            // The other thread may have given up.
            let _ = self.answer.try_send((memory, status));
        }
    }
}

impl Service for Reader {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.of_disk = self.disk.users.enter_as_part(cx.waker());
        match self.of_disk {
            Some(_) => self.submit(cx),
            // It is being removed.
            None => self.end(Status::Io),
        }
    }

    fn on_ring(&mut self, _: &mut Cx<'_>, _: &[Completion]) {}

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn on_end(&mut self, _: &mut Cx<'_>, bio: Bio) {
        self.end(bio.status);
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
