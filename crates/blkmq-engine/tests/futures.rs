//! Tests of I/O that a thread of the engine's does for others: futures on two executors, threads that block,
//! and what becomes of I/O whose caller or engine goes.

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::Duration;

use blkmq_engine::{Bio, Buffer, Disk, Engine, Io, IoError, Status};

fn engine(threads: usize) -> Engine {
    let engine = Engine::builder()
        .disk("name=ram,ram=1M,group=/a")
        .disk("name=slow,null=1G,latency=300us,group=/a")
        .disk("name=late,null=1G,latency=200ms,group=/a")
        .group("/a")
        .threads(threads);
    engine.start().unwrap()
}

/// Writes each block of a disk and reads it back, all at once for each step.
async fn write_and_read(disk: Disk) -> Result<(), IoError> {
    let blocks = || 0..disk.size() / 4096;
    let writes: Vec<Io> = blocks()
        .map(|block| disk.write(block * 4096, Buffer::from(&[block as u8; 4096][..])))
        .collect();
    for write in writes {
        write.await?;
    }
    disk.flush().await?;
    let reads: Vec<Io> = blocks()
        .map(|block| disk.read(block * 4096, Buffer::new(4096)))
        .collect();
    for (block, read) in blocks().zip(reads) {
        assert!(
            read.await?.iter().all(|&byte| byte == block as u8),
            "block {block}"
        );
    }
    disk.discard(0, disk.size()).await?;
    Ok(())
}

/// An executor of its own: it parks its thread between polls.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(Thread);
    impl Wake for Unpark {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let mut future = pin!(future);
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    loop {
        match future.as_mut().poll(&mut Context::from_waker(&waker)) {
            Poll::Ready(value) => return value,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn futures_end_on_a_bare_executor() {
    let engine = engine(1);
    block_on(write_and_read(engine.disk("ram").unwrap())).unwrap();
    assert_eq!(engine.statistics("/a").unwrap().read.ios, 256);
}

#[test]
fn futures_end_on_tokio_whose_threads_share_a_disk() {
    let engine = engine(2);
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .build()
        .unwrap();
    let slow = engine.disk("slow").unwrap();
    let tasks: Vec<_> = (0..64)
        .map(|n| {
            let disk = slow.clone();
            runtime.spawn(async move { disk.read(n * 4096, Buffer::new(4096)).await })
        })
        .collect();
    runtime
        .block_on(write_and_read(engine.disk("ram").unwrap()))
        .unwrap();
    for task in tasks {
        assert_eq!(runtime.block_on(task).unwrap().unwrap().len(), 4096);
    }
}

#[test]
fn threads_wait_for_their_io_and_get_its_error() {
    let engine = engine(1);
    let disk = engine.disk("ram").unwrap();
    thread::scope(|scope| {
        for n in 0..4 {
            let disk = &disk;
            scope.spawn(move || {
                disk.write(n * 512, Buffer::from(&[n as u8; 512][..]))
                    .wait()
                    .unwrap();
                assert_eq!(disk.read(n * 512, Buffer::new(512)).wait().unwrap()[511], n as u8);
            });
        }
    });
    let error = disk.read(disk.size(), Buffer::new(512)).wait().unwrap_err();
    assert_eq!((error.status, error.buffer.len()), (Status::Invalid, 512));
}

#[test]
fn more_io_than_there_is_room_for_waits_and_ends() {
    let engine = engine(1);
    let disk = engine.disk("slow").unwrap();
    let reads: Vec<Io> = (0..20_000)
        .map(|n| disk.read(n * 512, Buffer::new(512)))
        .collect();
    for read in reads {
        read.wait().unwrap();
    }
    assert_eq!(engine.statistics("/a").unwrap().read.ios, 20_000);
}

#[test]
fn buffer_dropped_in_flight_is_kept_until_its_io_has_ended() {
    let engine = engine(1);
    let (late, ram) = (engine.disk("late").unwrap(), engine.disk("ram").unwrap());
    let mut io = pin!(late.read(0, Buffer::new(4096)));
    let is_pending = block_on(poll_fn(|cx| Poll::Ready(io.as_mut().poll(cx).is_pending())));
    assert!(is_pending);
    for _ in 0..100 {
        drop(late.read(0, Buffer::new(64 << 10)));
        drop(ram.write(0, Buffer::from(&[9; 4096][..])));
    }
    drop(late);
    assert_eq!(
        ram.read(0, Buffer::new(4096)).wait().unwrap()[4095],
        9,
        "a write goes on"
    );
    block_on(io).unwrap();
    engine.shutdown(Duration::from_secs(10)).unwrap();
    assert_eq!(engine.statistics("/a").unwrap().read.ios, 102);
}

#[test]
fn engine_dropped_with_io_under_way_finishes_it_and_refuses_more() {
    let engine = engine(1);
    let disk = engine.disk("late").unwrap();
    let unused = engine.disk("ram").unwrap();
    let reads: Vec<Io> = (0..100).map(|n| disk.read(n * 4096, Buffer::new(4096))).collect();
    drop(engine);
    for read in reads {
        read.wait().unwrap();
    }
    for disk in [disk, unused] {
        let error = disk.submit(Bio::write(0, Buffer::new(512))).wait().unwrap_err();
        assert_eq!((error.status, error.buffer.len()), (Status::Shutdown, 512));
    }
}

#[test]
fn io_that_is_sent_while_the_engine_shuts_down_ends() {
    for _ in 0..20 {
        let engine = engine(2);
        let disks = ["ram", "slow", "late"].map(|name| engine.disk(name).unwrap());
        thread::scope(|scope| {
            for disk in &disks {
                scope.spawn(|| {
                    let status = |io: Io| io.wait().map_or_else(|error| error.status, |_| Status::Ok);
                    while status(disk.read(0, Buffer::new(512))) == Status::Ok {}
                    assert_eq!(status(disk.flush()), Status::Shutdown);
                });
            }
            engine.shutdown(Duration::from_secs(10)).unwrap();
        });
    }
}

#[test]
fn waker_that_panics_harms_no_other_io() {
    struct Panic(AtomicU32);
    impl Wake for Panic {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
            panic!("the test's own: a waker panics");
        }
    }
    let engine = engine(1);
    let disk = engine.disk("late").unwrap();
    let panic = Arc::new(Panic(AtomicU32::new(0)));
    let waker = Waker::from(Arc::clone(&panic));
    let mut io = pin!(disk.read(0, Buffer::new(512)));
    assert!(io.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    disk.read(0, Buffer::new(512)).wait().unwrap();
    assert_eq!(panic.0.load(Ordering::Relaxed), 1);
    block_on(io).unwrap();
}

#[test]
fn callback_comes_once_and_its_panic_harms_no_other_io() {
    let engine = engine(1);
    let disk = engine.disk("ram").unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    for n in 0..100 {
        let tell = tell.clone();
        let write = Bio::write(n * 4096, Buffer::from(&[n as u8; 4096][..]));
        disk.submit_with(write, move |result| {
            assert!(n % 10 != 3, "the test's own: a callback panics");
            tell.send((n, result.unwrap().len())).unwrap();
        });
    }
    drop(tell);
    let mut ended: Vec<_> = told.iter().collect();
    ended.sort_unstable();
    let expected = (0..100).filter(|n| n % 10 != 3).map(|n| (n, 4096));
    assert!(ended.into_iter().eq(expected), "{engine:?}");
    for n in [3, 4] {
        assert_eq!(
            disk.read(n * 4096, Buffer::new(512)).wait().unwrap()[511],
            n as u8
        );
    }
}

#[test]
fn callback_comes_at_once_with_the_buffer_when_the_engine_has_ended() {
    let engine = engine(1);
    let disk = engine.disk("ram").unwrap();
    engine.shutdown(Duration::from_secs(10)).unwrap();
    let (tell, told) = std::sync::mpsc::channel();
    disk.submit_with(Bio::read(0, Buffer::new(512)), move |result| {
        let error = result.unwrap_err();
        tell.send((error.status, error.buffer.len())).unwrap();
    });
    assert_eq!(told.try_recv(), Ok((Status::Shutdown, 512)));
}
