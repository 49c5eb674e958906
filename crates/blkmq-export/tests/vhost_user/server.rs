//! The server of these tests: an engine of two reactors in this process, with one disk in memory behind the
//! front door.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::time::Nanos;
use blkmq_export::client_settings::Client;
use blkmq_export::common::{AddressLimits, Common};
use blkmq_export::front_door::{self, DiskName, Given, Offer};
use blkmq_host::disk::Disk;
use blkmq_host::engine::{Engine, EngineConfig};

pub(crate) struct Server {
    engine: Engine,
    pub(crate) path: PathBuf,
}

impl Server {
    pub(crate) fn start() -> Self {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("blkmq-vhost-{}-{number}", std::process::id());
        let pattern = std::env::temp_dir().join(format!("{name}-{{disk}}"));
        let disk = DiskSpec::parse(&format!(
            "name=vm,serial=disk-serial-20-bytes,ram={DISK_BYTES},block_size=512"
        ))
        .unwrap();
        let plan = plan(&Config {
            disks: vec![disk],
            ..Config::default()
        });
        let plan = plan.unwrap();
        let config = EngineConfig {
            queues: plan.queues,
            reactors: 2,
            ..EngineConfig::default()
        };
        let engine = Engine::start(config).unwrap();
        let common = Arc::new(Common::new(32 << 20, 16));
        let door = front_door::find("vhost_user").expect("it is built");
        let address = door
            .parse(&Given::new(&format!("unix:{}", pattern.display())))
            .unwrap();
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
            let vm = engine.disk("vm").unwrap();
            let line = opened.client_line(&vm).expect("its own disk");
            let path = pattern.to_string_lossy().replace("{disk}", "vm");
            assert_eq!(line, format!("vhost-user: disk vm at unix:{path}"));
            for client in Client::ALL {
                let settings = address.client_settings(client, &vm, "/vm");
                let is_of_nbd = matches!(client, Client::NbdClient | Client::Uri);
                assert_eq!(settings.is_none(), is_of_nbd, "{client}");
                assert!(settings.is_none_or(|text| text.contains(&path)), "{client}");
            }
            let other = Disk {
                name: "other".to_owned(),
                ..vm
            };
            assert_eq!(opened.client_line(&other), None);
            let offer = Offer {
                disks: None,
                admitted: AddressLimits::default(),
                at: &*address,
            };
            opened.serve(&engine, offer, &common).unwrap();
        }
        let path = std::env::temp_dir().join(format!("{name}-vm"));
        Self { engine, path }
    }

    pub(crate) fn end(self) {
        self.engine.shutdown(Nanos::from_secs(10)).unwrap();
        assert!(!self.path.exists(), "the socket is removed at the end");
    }
}

pub(crate) const DISK_BYTES: u64 = 16 << 20;
