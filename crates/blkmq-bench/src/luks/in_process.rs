//! The way of a request without a door: one thread that takes part, on a null drive that completes inline.

use std::cell::Cell;
use std::sync::Arc;

use anyhow::Result;
use blkmq_core::ids::GroupId;
use blkmq_core::sched;
use blkmq_host::encrypted::{EncryptedData, EncryptedSpec, SectorCipher};
use blkmq_luks::{Xts, secret};

use super::{BLOCK, DEPTH, SECTOR_OF_DISKS, key};
use crate::args::Plan;
use crate::engine::device::{DISK, DeviceArg, MAPPED};
use crate::engine::{self, Job, Pattern};
use crate::rounds::Sample;

/// Loads a plain disk, or an encrypted one over it.
///
/// # Errors
/// If the engine does not start, or an I/O fails.
pub(super) fn measure(is_encrypted: bool, rw: Pattern, plan: &Plan) -> Result<Sample> {
    let engine = DeviceArg::Null.start(sched::NONE, 1, DEPTH, true)?;
    if is_encrypted {
        engine.control().add_encrypted(EncryptedSpec {
            name: MAPPED.into(),
            description: String::new(),
            serial: None,
            export: None,
            below: DISK.into(),
            data: Some(EncryptedData {
                start: 0,
                size: None,
                sector: SECTOR_OF_DISKS,
            }),
            read_only: false,
            block_size: None,
            discard: false,
            group: GroupId(0),
            group_path: "/".into(),
            cipher: Some(Arc::new(Cipher(Xts::new(&key(), SECTOR_OF_DISKS)?))),
        })?;
    }
    let job = Job {
        op: rw.op(),
        block_bytes: BLOCK,
        depth: DEPTH,
        random: rw.is_random(),
        sample_every: 2,
    };
    engine::load_attached(engine, job, 1, plan)
}

/// As the daemon has it.
struct Cipher(Xts);

impl SectorCipher for Cipher {
    fn encrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.0.encrypt(offset / 512, bytes);
    }

    fn decrypt(&self, offset: u64, bytes: &mut [u8]) {
        self.0.decrypt(offset / 512, bytes);
    }

    fn encrypt_from(&self, offset: u64, from: &[Cell<u8>], into: &mut [u8]) {
        self.0.encrypt_from(offset / 512, from, into);
    }

    fn decrypt_shared(&self, offset: u64, bytes: &[Cell<u8>]) {
        self.0.decrypt_shared(offset / 512, bytes);
    }

    fn wipe_stack(&self) {
        secret::wipe_stack_of_sectors();
    }
}
