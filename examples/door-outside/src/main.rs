//! Serves a disk through a front door that is not part of blkmq, and hands its client over to a second engine while it is
//! connected: `cargo run` here. Two daemons do the same with two processes, and send each other what is passed here.

mod zeroer;

use std::error::Error;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressLimits, Common};
use blkmq_export::front_door::{Address, FrontDoor, Given, Offer, Served};
use blkmq_export::handover::codec::Session;
use blkmq_export::handover::{Handover, Phase};
use blkmq_export::stream::StreamDoor;
use blkmq_host::engine::{Engine, EngineConfig};

fn main() -> Result<(), Box<dyn Error>> {
    let path = std::env::temp_dir().join(format!("blkmq-zeroer-{}", std::process::id()));
    let address = StreamDoor::new(zeroer::Zeroer).parse(&Given::new(&format!("unix:{}", path.display())))?;
    let outgoing = Daemon::start(&*address, Handover::new(Phase::Serving))?;
    let mut client = UnixStream::connect(&path)?;
    ask(&mut client, "the first engine")?;
    let incoming = hand_over(&*address, &outgoing)?;
    outgoing.engine.shutdown(TIME)?;
    ask(&mut client, "the second engine")?;
    ask(
        &mut UnixStream::connect(&path)?,
        "the second engine, as a new client",
    )?;
    incoming.served.iter().for_each(|served| served.close());
    drop(client);
    incoming.engine.shutdown(TIME)?;
    assert!(!path.exists(), "the second engine owned the path");
    Ok(())
}

/// Has a block zeroed that is there, and one that is not.
fn ask(client: &mut UnixStream, of: &str) -> Result<(), Box<dyn Error>> {
    client.set_read_timeout(Some(Duration::from_secs(10)))?;
    for (block, expected) in [(15, b'.'), (16, b'!')] {
        client.write_all(&[block])?;
        let mut answer = [0];
        client.read_exact(&mut answer)?;
        assert_eq!(answer[0], expected, "block {block} of 16");
    }
    println!("{of} has zeroed a block and refused another");
    Ok(())
}

fn hand_over(address: &dyn Address, outgoing: &Daemon) -> Result<Daemon, Box<dyn Error>> {
    let from = &outgoing.common.handover;
    from.suspend();
    from.wait_until_settled(Duration::from_secs(10))?;
    let to = Handover::new(Phase::Suspended);
    for (name, socket) in from.sockets()? {
        to.inherit(name, socket);
    }
    for (name, file) in from.paths() {
        to.inherit_path(name, file);
    }
    let incoming = Daemon::start(address, to)?;
    let to = &incoming.common.handover;
    for saved in from.take_saved() {
        let fds: Result<_, _> = saved.fds.iter().map(|fd| fd.try_clone()).collect();
        let session = Session {
            door: saved.door.to_owned(),
            address: saved.address,
            body: saved.body,
        };
        to.restore(&incoming.engine, ReactorId(0), &session, fds?)?;
    }
    to.wait_until_settled(Duration::from_secs(10))?;
    from.leave();
    to.resume();
    Ok(incoming)
}

struct Daemon {
    engine: Engine,
    common: Arc<Common>,
    served: Vec<Box<dyn Served>>,
}

impl Daemon {
    fn start(address: &dyn Address, handover: Handover) -> Result<Self, Box<dyn Error>> {
        let disks = vec![DiskSpec::parse("name=vm,ram=64K,block_size=4096")?];
        let plan = plan(&Config {
            disks,
            ..Config::default()
        })?;
        let engine = Engine::start(EngineConfig {
            queues: plan.queues,
            ..EngineConfig::default()
        })?;
        let common = Arc::new(Common::taking_part(32 << 20, 16, &Arc::new(handover)));
        let mut served = Vec::new();
        for opened in address.open(&[], &common.handover)? {
            let offer = Offer {
                disks: None,
                admitted: AddressLimits::default(),
                at: address,
            };
            served.push(opened.serve(&engine, offer, &common)?);
        }
        Ok(Self {
            engine,
            common,
            served,
        })
    }
}

const TIME: Nanos = Nanos::from_secs(10);
