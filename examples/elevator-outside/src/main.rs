//! Reads two disks through a queue whose elevator is not part of blkmq: `cargo run` here. A configuration names
//! such an elevator like any other (`blkmq_config::Registries`).

mod alternate;

use std::sync::Arc;

use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::GroupId;
use blkmq_core::sched::Registry;
use blkmq_core::time::Nanos;
use blkmq_drivers::null::{NullConfig, NullDevice};
use blkmq_host::{DiskEntry, Engine, EngineConfig, QueueSpec};

use crate::alternate::ALTERNATE;

fn main() {
    let registry = Registry::default().with(&ALTERNATE);
    let device = NullDevice::new(NullConfig::bare(), &[SIZE; 2]).expect("a null drive");
    let mut queue = QueueSpec::new("null", Arc::new(device));
    queue.elevator = registry.choose("alternate").expect("it is listed");
    queue.disks.extend(["a", "b"].map(disk));
    let engine = Engine::start(EngineConfig {
        attached_max: 1,
        queues: vec![queue],
        ..EngineConfig::default()
    });
    let engine = engine.expect("an engine");
    let mut attached = engine.attach().expect("a handle");
    for name in ["a", "b"] {
        let disk = engine.disk(name).expect("it is there");
        let read = Bio {
            op: Op::Read,
            disk: disk.id,
            len: 4096,
            ..Bio::default()
        };
        attached.submit(disk.queue, read).expect("room for a read");
        let mut ended = Vec::new();
        attached.wait(&mut ended, Some(Nanos::from_secs(30)));
        assert!(ended.len() == 1 && ended[0].status.is_ok(), "{ended:?}");
        let control = engine.control();
        let elevator = control.core(disk.queue).expect("its queue").elevator();
        println!("read 4096 bytes of {name} through {elevator}: {}", elevator.help);
    }
    drop(attached);
    engine
        .shutdown(Nanos::from_secs(10))
        .expect("nothing is under way");
}

fn disk(name: &str) -> DiskEntry {
    DiskEntry {
        name: name.to_owned(),
        description: String::new(),
        serial: None,
        export: None,
        size: SIZE,
        read_only: false,
        group: GroupId(0),
        block_size: 512,
    }
}

const SIZE: u64 = 1 << 20;
