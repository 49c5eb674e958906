//! Tests that a driver can be added by an entry in the registry only: crates that do not know it
//! parse, plan and use its disks like those of the built-in drivers.

mod sys;
mod vector;

use blkmq_config::{Config, DiskSpec, Registries, plan};
use blkmq_core::bio::{Bio, Data, Op};
use blkmq_core::time::Nanos;
use blkmq_drivers::registry::Registry;
use blkmq_host::{Attached, Disk, Engine, EngineConfig};

fn registries() -> Registries {
    Registries {
        drivers: Registry::default().with(&vector::DRIVER),
        ..Registries::default()
    }
}

/// Does one I/O and waits for its end.
fn run(attached: &mut Attached, disk: &Disk, op: Op, offset: u64, memory: &mut [u8]) {
    let bio = Bio {
        disk: disk.id,
        op,
        offset,
        len: memory.len() as u64,
        data: Data::Flat(sys::lend(memory)),
        ..Bio::default()
    };
    attached.submit(disk.queue, bio).unwrap();
    let mut ended = Vec::new();
    assert_eq!(attached.wait(&mut ended, Some(Nanos::from_secs(30))), 1);
    assert!(ended[0].status.is_ok(), "{:?}", ended[0].status);
}

#[test]
fn disks_on_a_driver_that_was_added_are_configured_and_used_as_any() {
    let text =
        "[disk.one]\nvector = \"64K\"\nfill = 7\n[disk.two]\nvector = \"1M\"\n[disk.ram]\nram = \"1M\"";
    let config = Config::from_toml_with(text, &registries()).unwrap();
    config.check().unwrap();
    assert_eq!(config.disks[0].description, "disk in a vector");
    let plan = plan(&config).unwrap();
    let queues: Vec<_> = plan.queues.iter().map(|queue| queue.name.as_str()).collect();
    assert_eq!(queues, ["vectors", "ram"], "its disks share a queue");
    let engine = Engine::start(EngineConfig {
        attached_max: 1,
        queues: plan.queues,
        ..EngineConfig::default()
    });
    let engine = engine.unwrap();
    let (one, two) = (engine.disk("one").unwrap(), engine.disk("two").unwrap());
    assert_eq!((one.size, two.size), (64 << 10, 1 << 20));
    let mut attached = engine.attach().unwrap();
    let mut written: Vec<u8> = (0..8192).map(|at| at as u8).collect();
    run(&mut attached, &one, Op::Write, 4096, &mut written);
    let mut read = vec![0; 16384];
    run(&mut attached, &one, Op::Read, 0, &mut read);
    assert_eq!(read[..4096], [7; 4096]);
    assert_eq!(read[4096..12288], written);
    assert_eq!(read[12288..], [7; 4096]);
    run(&mut attached, &two, Op::Read, 0, &mut read);
    assert_eq!(read, [0; 16384], "the disks are apart");
    drop(attached);
    engine.shutdown(Nanos::from_secs(10)).unwrap();
}

#[test]
fn its_keys_are_refused_as_those_of_any_driver_and_it_is_listed() {
    for (text, part) in [
        (
            "name=a,vector=0",
            "vector=0 rejected: a disk has at least one block",
        ),
        ("name=a,vector=1M,fill=256", "fill=256 rejected: must be a byte"),
        (
            "name=a,vector=1M,color=red",
            "the vector driver has no such key; it has fill",
        ),
        ("name=a,vector=1M,ram=1M", "ram= and vector= exclude each other"),
        ("name=a", "nbd=URI, rbd=POOL/IMAGE, vector=SIZE, linear=DISKS"),
    ] {
        let error = DiskSpec::parse_with(text, &registries()).unwrap_err();
        let error = format!("{error:#}");
        assert!(
            error.contains("disk a") && error.contains(part),
            "{text}: {error}"
        );
    }
    let error = format!("{:#}", DiskSpec::parse("name=a,vector=1M").unwrap_err());
    assert!(error.contains("key vector is not known"), "not built in: {error}");
}
