//! A service whose bio was refused is offered room again, whatever was short (requests, frames of a mapped
//! disk, areas of an encrypted one), also where bios end while others are issued and no event follows.

mod common;

use std::cell::Cell;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::{GroupId, ReactorId};
use blkmq_core::mapper::table::MapKind;
use blkmq_core::sched;
use blkmq_drivers::null::NullConfig;
use blkmq_host::encrypted::{EncryptedData, EncryptedSpec, SectorCipher};
use blkmq_host::mapped::{MapConfig, MappedSpec, Member};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};
use blkmq_host::{Engine, EngineConfig};
use common::queue;

/// Submits its bios, the rest of them only when it is offered room, as front doors do.
struct Patient {
    disk: &'static str,
    waiting: VecDeque<Bio>,
    ended: Sender<u64>,
    is_draining: bool,
}

impl Patient {
    fn submit(&mut self, cx: &mut Cx<'_>) {
        let disk = cx.disk(self.disk).expect("a disk of the engine");
        while let Some(bio) = self.waiting.pop_front() {
            let bio = Bio {
                disk: disk.id,
                group: disk.group,
                ..bio
            };
            if let Err(bio) = cx.submit(disk.queue, bio) {
                return self.waiting.push_front(bio);
            }
        }
    }
}

impl Service for Patient {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
        assert!(!self.waiting.is_empty(), "{}: everything has room", self.disk);
    }

    fn on_ring(&mut self, _: &mut Cx<'_>, _: &[Completion]) {}

    fn on_end(&mut self, _: &mut Cx<'_>, bio: Bio) {
        assert!(bio.status.is_ok(), "{:?}", bio.status);
        // The test may have ended already.
        let _ = self.ended.send(bio.cookie);
    }

    fn on_room(&mut self, cx: &mut Cx<'_>) {
        self.submit(cx);
    }

    fn drain(&mut self, _: &mut Cx<'_>) {
        self.is_draining = true;
        self.waiting.clear();
    }

    fn is_finished(&self) -> bool {
        self.is_draining
    }
}

/// Asserts that bios one behind the other, more than there is room for, all end.
fn all_end(engine: &Engine, disk: &'static str, op: Op) {
    let (ended, ends) = channel();
    let bio = |cookie| Bio {
        op,
        offset: cookie * 4096,
        len: 4096,
        cookie,
        ..Bio::default()
    };
    let service = Patient {
        disk,
        waiting: (0..BIOS).map(bio).collect(),
        ended,
        is_draining: false,
    };
    engine.add_service(ReactorId(0), Box::new(move || Box::new(service)));
    for seen in 0..BIOS {
        let end = ends.recv_timeout(Duration::from_secs(10));
        assert!(end.is_ok(), "{disk}: {seen} of {BIOS} bios have ended");
    }
}

#[test]
fn refused_bio_is_taken_when_requests_are_free_that_ended_while_they_were_issued() {
    let mut spec = queue("q", NullConfig::bare(), sched::NONE);
    spec.requests_per_reactor = 2;
    let engine = Engine::start(EngineConfig {
        queues: vec![spec],
        ..EngineConfig::default()
    });
    all_end(&engine.unwrap(), "q", Op::Read);
}

#[test]
fn refused_bio_is_taken_when_frames_of_a_mapped_disk_are_free() {
    let mut spec = queue("q", NullConfig::bare(), sched::NONE);
    // Four frames, while bios that are merged have one request together.
    spec.requests_per_reactor = 2;
    let member = Member {
        disk: "q".to_owned(),
        start: 0,
        len: None,
    };
    let mapped = MappedSpec {
        name: "linear".to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        map: MapConfig {
            kind: MapKind::Linear,
            members: vec![member],
        },
        read_only: false,
        block_size: None,
        group: GroupId(0),
    };
    let engine = Engine::start(EngineConfig {
        queues: vec![spec],
        mapped: vec![mapped],
        ..EngineConfig::default()
    });
    all_end(&engine.unwrap(), "linear", Op::Read);
}

#[test]
fn refused_write_is_taken_when_areas_of_an_encrypted_disk_are_free() {
    let engine = Engine::start(EngineConfig {
        queues: vec![queue("q", NullConfig::bare(), sched::NONE)],
        ..EngineConfig::default()
    });
    let engine = engine.unwrap();
    let spec = EncryptedSpec {
        name: "encrypted".to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        below: "q".to_owned(),
        data: Some(EncryptedData {
            start: 0,
            size: None,
            sector: 4096,
        }),
        read_only: false,
        block_size: None,
        discard: false,
        group: GroupId(0),
        group_path: "/".to_owned(),
        cipher: Some(Arc::new(Identity)),
    };
    engine.control().add_encrypted(spec).unwrap();
    all_end(&engine, "encrypted", Op::WriteZeroes);
}

/// A cipher that changes nothing.
struct Identity;

impl SectorCipher for Identity {
    fn encrypt(&self, _: u64, _: &mut [u8]) {}

    fn decrypt(&self, _: u64, _: &mut [u8]) {}

    fn encrypt_from(&self, _: u64, from: &[Cell<u8>], into: &mut [u8]) {
        into.iter_mut()
            .zip(from)
            .for_each(|(into, from)| *into = from.get());
    }

    fn decrypt_shared(&self, _: u64, _: &[Cell<u8>]) {}
}

const BIOS: u64 = 200;
