//! Tests that a front door is one implementation of a trait: this one has a few lines, and is
//! served as the daemon serves those of the registry. In its protocol a client sends the number of
//! a block, one byte; the block is zeroed, and the answer is `.` or `!`.

use std::fmt;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::bio::{Bio, Op};
use blkmq_core::ids::ReactorId;
use blkmq_core::time::Nanos;
use blkmq_export::common::{AddressError, AddressLimits, Common, OpenError, Place};
use blkmq_export::front_door::{Address, DiskName, FrontDoor, Given, Offer, Opened, ServeError, Served};
use blkmq_export::handover::Handover;
use blkmq_host::disk::Disk;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_host::ring::Completion;
use blkmq_host::service::{Cx, Service};

/// The front door's protocol.
struct Zeroer;

impl FrontDoor for Zeroer {
    fn name(&self) -> &'static str {
        "zeroer"
    }

    fn help(&self) -> &'static str {
        "Zero blocks of the first disk for the one client at the unix socket ADDRESS"
    }

    fn parse(&self, given: &Given<'_>) -> Result<Box<dyn Address>, AddressError> {
        let text = given.address;
        match text.starts_with('/') {
            true => Ok(Box::new(At(text.into()))),
            false => Err(AddressError(format!("address {text:?} rejected: must be a path"))),
        }
    }
}

#[derive(Debug)]
struct At(PathBuf);

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.display().fmt(f)
    }
}

impl Address for At {
    fn places(&self, _disks: &[DiskName<'_>]) -> Vec<Place> {
        vec![Place::of_path(&self.0)]
    }

    fn open(&self, _disks: &[DiskName<'_>], _: &Handover) -> Result<Vec<Box<dyn Opened>>, OpenError> {
        let listener = UnixListener::bind(&self.0).expect("a path that is free");
        Ok(vec![Box::new(Listening(listener))])
    }
}

struct Listening(UnixListener);

impl Opened for Listening {
    fn client_line(&self, disk: &Disk) -> Option<String> {
        let at = self.0.local_addr().expect("it is bound");
        Some(format!("zeroer of {} at {at:?}", disk.name))
    }

    fn serve(
        self: Box<Self>,
        engine: &Engine,
        _: Offer<'_>,
        _: &Arc<Common>,
    ) -> Result<Box<dyn Served>, ServeError> {
        self.0
            .set_nonblocking(true)
            .map_err(|error| ServeError(error.into()))?;
        let client = Client {
            listener: self.0,
            stream: None,
            disk: engine.disks()[0].clone(),
            is_over: false,
        };
        engine.add_service(ReactorId(0), Box::new(move || Box::new(client)));
        Ok(Box::new(OneClient))
    }
}

/// It has one client and one disk, so it need not share with others.
struct OneClient;

impl Served for OneClient {
    fn offer(&self, _disks: &[Disk], _what: Offer<'_>) -> Result<(), ServeError> {
        Ok(())
    }

    fn close(&self) {}
}

/// The client, once it has connected.
struct Client {
    listener: UnixListener,
    stream: Option<UnixStream>,
    disk: Disk,
    is_over: bool,
}

impl Client {
    fn poll(&self, cx: &Cx<'_>) {
        let fd = match &self.stream {
            Some(stream) => stream.as_raw_fd(),
            None => self.listener.as_raw_fd(),
        };
        cx.ring_client().push_poll(fd, libc::POLLIN, false, 0);
    }
}

impl Service for Client {
    fn start(&mut self, cx: &mut Cx<'_>) {
        self.poll(cx);
    }

    fn on_ring(&mut self, cx: &mut Cx<'_>, _completed: &[Completion]) {
        let Some(stream) = &mut self.stream else {
            if let Ok((stream, _)) = self.listener.accept() {
                stream.set_nonblocking(true).expect("a socket");
                self.stream = Some(stream);
            }
            return self.poll(cx);
        };
        let mut number = [0];
        if stream.read(&mut number).unwrap_or(0) == 0 {
            self.is_over = true;
            return;
        }
        let block = u64::from(self.disk.block_size);
        let bio = Bio {
            op: Op::WriteZeroes,
            offset: u64::from(number[0]) * block,
            len: block,
            disk: self.disk.id,
            group: self.disk.group,
            ..Bio::default()
        };
        cx.submit(self.disk.queue, bio).expect("room for one bio");
    }

    fn on_end(&mut self, cx: &mut Cx<'_>, bio: Bio) {
        let answer = if bio.status.is_ok() { b"." } else { b"!" };
        let stream = self.stream.as_mut().expect("a client has asked");
        self.is_over = stream.write(answer).is_err();
        self.poll(cx);
    }

    fn drain(&mut self, cx: &mut Cx<'_>) {
        self.is_over = true;
        cx.ring_client().push_cancel(0, 1);
    }

    fn is_finished(&self) -> bool {
        self.is_over
    }
}

#[test]
fn front_door_needs_nothing_but_the_trait() {
    let path = std::env::temp_dir().join(format!("blkmq-zeroer-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    let door: &dyn FrontDoor = &Zeroer;
    assert!(door.parse(&Given::new("nowhere")).is_err());
    let address = door.parse(&Given::new(&path.to_string_lossy())).unwrap();

    let disk = DiskSpec::parse("name=vm,ram=64K,block_size=4096").unwrap();
    let plan = plan(&Config {
        disks: vec![disk],
        ..Config::default()
    });
    let plan = plan.unwrap();
    let config = EngineConfig {
        queues: plan.queues,
        ..EngineConfig::default()
    };
    let engine = Engine::start(config).unwrap();
    let common = Arc::new(Common::new(32 << 20, 1));
    let vm = engine.disk("vm").unwrap();
    for opened in address
        .open(
            &[DiskName {
                disk: "vm",
                group: "/vm",
            }],
            &common.handover,
        )
        .unwrap()
    {
        assert!(
            opened
                .client_line(&vm)
                .is_some_and(|line| line.starts_with("zeroer of vm at"))
        );
        let offer = Offer {
            disks: None,
            admitted: AddressLimits::default(),
            at: &*address,
        };
        opened.serve(&engine, offer, &common).unwrap();
    }

    let mut client = UnixStream::connect(&path).unwrap();
    for (block, expected) in [(0, b'.'), (15, b'.'), (16, b'!')] {
        client.write_all(&[block]).unwrap();
        let mut answer = [0];
        client.read_exact(&mut answer).unwrap();
        assert_eq!(answer[0], expected, "block {block} of 16");
    }
    drop(client);
    engine.shutdown(Nanos::from_secs(10)).unwrap();
    std::fs::remove_file(&path).unwrap();
}
