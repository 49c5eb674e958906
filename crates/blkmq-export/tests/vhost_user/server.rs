//! An engine of two reactors in this process, with one disk in memory behind the front door.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use blkmq_config::plan::{DiskSpec, QueueSettings, Source, plan};
use blkmq_core::time::Nanos;
use blkmq_drivers::ram::RamConfig;
use blkmq_export::common::{AddressLimits, Common};
use blkmq_export::front_door::{self, Offer};
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
        let disk = DiskSpec {
            name: "vm".to_owned(),
            description: String::new(),
            source: Source::Ram(RamConfig::default()),
            size: Some(DISK_BYTES),
            read_only: false,
            block_size: Some(512),
            queue: None,
            group: None,
        };
        let plan = plan(vec![disk], &BTreeMap::new(), &QueueSettings::default()).unwrap();
        let config = EngineConfig {
            queues: plan.queues,
            reactors: 2,
            ..EngineConfig::default()
        };
        let engine = Engine::start(config).unwrap();
        let common = Arc::new(Common::new(32 << 20, 16));
        let door = front_door::find("vhost_user").expect("it is built");
        let address = door.parse(&format!("unix:{}", pattern.display())).unwrap();
        for opened in address.open(&["vm"]).unwrap() {
            let line = opened.client_line("vm").expect("its own disk");
            assert!(
                line.contains(&format!("path={}", pattern.display()).replace("{disk}", "vm")),
                "{line}"
            );
            assert_eq!(opened.client_line("other"), None);
            let offer = Offer {
                disks: None,
                admitted: AddressLimits::default(),
                handshake_deadline: Duration::from_secs(10),
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
