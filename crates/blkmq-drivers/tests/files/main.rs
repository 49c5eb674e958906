//! Tests I/O on a real file through an attached thread: the data, and that each request at depth 1
//! takes one system call. `polled` does the same for polling.

mod polled;
mod sys;

use std::path::PathBuf;

use blkmq_config::{Config, DiskSpec, plan};
use blkmq_core::bio::{Bio, Op};
use blkmq_core::poll::Wait;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_host::{Attached, Engine, EngineConfig, QueueId};
use sys::Page;

const PAGES: u64 = 256;

/// A file of random pages, which is removed after the test, and an engine on it.
struct Fixture {
    path: PathBuf,
    engine: Option<Engine>,
}

impl Fixture {
    fn new(name: &str, elevator: &'static ElevatorType, wait: Wait) -> Self {
        let path = std::env::temp_dir().join(format!("blkmq-{name}-{}", std::process::id()));
        std::fs::write(&path, vec![0; PAGES as usize * 4096]).unwrap();
        let disk = format!(
            "name=f,file={},block_size=4096,group=/,sched={elevator}",
            path.display()
        );
        let config = Config {
            disks: vec![DiskSpec::parse(&disk).unwrap()],
            ..Config::default()
        };
        let plan = plan(&config).unwrap();
        let engine = Engine::start(EngineConfig {
            attached_max: 2,
            wait,
            queues: plan.queues,
            ..EngineConfig::default()
        });
        Self {
            path,
            engine: Some(engine.unwrap()),
        }
    }

    fn engine(&self) -> &Engine {
        self.engine.as_ref().unwrap()
    }
}

impl Drop for Fixture {
    fn drop(&mut self) {
        self.engine
            .take()
            .unwrap()
            .shutdown(Nanos::from_secs(10))
            .unwrap();
        let _ = std::fs::remove_file(&self.path);
    }
}

fn bio(op: Op, page: u64, memory: &mut Page) -> Bio {
    Bio {
        op,
        offset: page * 4096,
        len: 4096,
        data: memory.data(),
        cookie: page,
        ..Bio::default()
    }
}

fn one(attached: &mut Attached, bio: Bio) {
    let mut out = Vec::with_capacity(1);
    attached.submit(QueueId(0), bio).unwrap();
    assert_eq!(attached.wait(&mut out, Some(Nanos::from_secs(30))), 1);
    assert!(out[0].status.is_ok(), "{:?}", out[0].status);
}

#[test]
fn writes_of_one_thread_are_read_by_another_through_either_elevator() {
    for elevator in sched::BUILT_IN {
        let fixture = Fixture::new(&format!("data-{elevator}"), elevator, Wait::Auto);
        let mut writer = fixture.engine().attach().unwrap();
        let mut pages: Vec<Page> = (0..PAGES).map(|page| Page::filled(page as u8 ^ 0x5a)).collect();
        let mut out = Vec::new();
        for (page, memory) in pages.iter_mut().enumerate() {
            writer
                .submit(QueueId(0), bio(Op::Write, page as u64, memory))
                .unwrap();
        }
        while writer.outstanding() > 0 {
            writer.wait(&mut out, None);
        }
        assert!(out.iter().all(|bio| bio.status.is_ok()));
        drop(writer);
        let mut reader = fixture.engine().attach().unwrap();
        for (page, memory) in pages.iter().enumerate() {
            let mut read = Page::filled(0);
            one(&mut reader, bio(Op::Read, page as u64, &mut read));
            assert_eq!(read.bytes(), memory.bytes(), "page {page} with {elevator}");
        }
    }
}

#[test]
fn at_depth_one_submitting_and_waiting_are_one_system_call() {
    let fixture = Fixture::new("enters", sched::NONE, Wait::Block);
    let mut attached = fixture.engine().attach().unwrap();
    let mut memory = Page::filled(0);
    one(&mut attached, bio(Op::Read, 0, &mut memory));
    let before = attached.system_calls();
    for page in 0..200 {
        one(&mut attached, bio(Op::Read, page, &mut memory));
    }
    let calls = attached.system_calls() - before;
    // A signal or a spurious wake-up may cost one more now and then.
    assert!((200..=210).contains(&calls), "{calls} system calls for 200 reads");
}
