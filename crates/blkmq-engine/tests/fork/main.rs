//! Tests what an engine is in a fork of its process: it belongs to the parent, which goes on.

mod sys;

use std::time::Duration;

use blkmq_engine::{Attached, Bio, Buffer, Disk, Engine, Error, Status};

use crate::sys::is_true_in_fork;

#[test]
fn fork_refuses_calls_and_drops_nothing_of_its_parents() {
    let engine = Engine::builder()
        .disk("name=d,null=1M,latency=50ms")
        .start()
        .unwrap();
    let disk = engine.disk("d").unwrap();
    let mut attached = engine.attach().unwrap();
    for cookie in 0..8 {
        attached
            .submit(&disk, Bio::read(0, Buffer::new(4096)), cookie)
            .unwrap();
    }
    let before = disk.read(0, Buffer::new(512));
    let mut held = Some((engine, disk, attached));
    let is_true = is_true_in_fork(|| {
        let (engine, disk, mut attached) = held.take().expect("the child has a copy");
        let is_refused = |result: Result<(), Error>| matches!(result, Err(Error::Forked { .. }));
        let sent = disk.read(0, Buffer::new(512)).wait();
        let is_right = is_refused(engine.attach().map(drop))
            && is_refused(engine.shutdown(Duration::ZERO))
            && engine.disks().is_empty()
            && sent.is_err_and(|error| error.status == Status::Shutdown)
            && attached.outstanding() == 0
            && is_refused(attached.event().map(drop))
            && ends_with_shutdown(&mut attached, &disk)
            && is_fit_for_another();
        drop(attached);
        drop(disk);
        drop(engine);
        is_right
    });
    assert!(is_true);
    let (engine, disk, mut attached) = held.take().expect("the parent has its own");
    let mut ended = Vec::new();
    while attached.outstanding() > 0 {
        attached.wait(&mut ended, None);
    }
    assert!(ended.len() == 8 && ended.iter().all(|completion| completion.status.is_ok()));
    before.wait().unwrap();
    disk.read(0, Buffer::new(512)).wait().unwrap();
    drop(attached);
    engine.shutdown(Duration::from_secs(10)).unwrap();
}

/// Whether I/O of the parent's attached thread ends at once, in both ways to do it.
fn ends_with_shutdown(attached: &mut Attached, disk: &Disk) -> bool {
    let run = attached.read(disk, 0, Buffer::new(512));
    let is_submitted = attached.submit(disk, Bio::read(0, Buffer::new(512)), 77).is_ok();
    let mut ended = Vec::new();
    attached.wait(&mut ended, None);
    let is_shutdown = |status| status == Status::Shutdown;
    run.is_err_and(|error| is_shutdown(error.status))
        && is_submitted
        && ended.len() == 1
        && ended[0].cookie == 77
        && is_shutdown(ended[0].status)
        && attached.wait(&mut ended, None) == 0
}

/// Whether the child can have an engine of its own.
fn is_fit_for_another() -> bool {
    let engine = Engine::builder().disk("name=d,ram=1M").start();
    let read = |engine: Engine| Ok(engine.disk("d")?.read(0, Buffer::new(512)).wait()?);
    engine.and_then(read).is_ok()
}
