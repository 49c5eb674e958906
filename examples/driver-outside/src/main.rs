//! Reads a disk on a driver that is not part of blkmq: `cargo run` here. A configuration names such a driver like any
//! other.

mod pattern;

use blkmq_config::Registries;
use blkmq_drivers::registry::Registry;
use blkmq_engine::{Buffer, Engine, Error, Status};

fn main() -> Result<(), Error> {
    let engine = Engine::builder()
        .registries(Registries {
            drivers: Registry::default().with(&pattern::DRIVER),
            ..Registries::default()
        })
        .disk("name=numbers,pattern=1M,group=/tenant")
        .group("/tenant,weight=300")
        .scheduler("bfq")
        .start()?;
    let disk = engine.disk("numbers")?;
    let mut attached = engine.attach()?;
    let read = attached.read(&disk, 5 * 512, Buffer::new(1024))?;
    assert!(read.starts_with(&5_u64.to_le_bytes()) && read[512..].starts_with(&6_u64.to_le_bytes()));
    let refused = attached.write(&disk, 0, read).expect_err("it cannot be written");
    assert_eq!(refused.status, Status::ReadOnly);
    println!("blocks 5 and 6 of {disk:?} hold their numbers");
    println!("/tenant: {:?}", engine.statistics("/tenant")?.read);
    Ok(())
}
