//! Tests of an attached thread that waits in an event loop of its own.

use std::time::{Duration, Instant};

use blkmq_engine::{Attached, Bio, Buffer, Engine};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// Waits as an event loop does. Says whether the event was there.
fn wait(attached: &mut Attached) -> bool {
    let event = attached.event().unwrap();
    let at_most = attached.prepare_to_wait().unwrap_or(LIMIT).min(LIMIT);
    let at_most = Timespec::try_from(at_most).unwrap();
    let mut fds = [PollFd::new(&event, PollFlags::IN)];
    poll(&mut fds, Some(&at_most)).unwrap() > 0
}

#[test]
fn event_loop_gets_each_completion_on_files_timers_and_schedulers() {
    let path = std::env::temp_dir().join(format!("blkmq-event-{}.raw", std::process::id()));
    std::fs::write(&path, vec![7; 1 << 20]).unwrap();
    let file = format!("name=d,file={}", path.display());
    for (disk, scheduler) in [
        (file.as_str(), "none"),
        (file.as_str(), "bfq"),
        ("name=d,null=1M,latency=500us", "none"),
        ("name=d,null=1M,latency=500us", "mq-deadline"),
        ("name=d,ram=1M", "bfq"),
    ] {
        let engine = Engine::builder().disk(disk).scheduler(scheduler).start().unwrap();
        let disk = engine.disk("d").unwrap();
        let mut attached = engine.attach().unwrap();
        let (mut ended, mut count, mut sent) = (Vec::new(), 0, 0);
        let begin = Instant::now();
        while count < READS {
            while sent < READS && attached.outstanding() < 8 {
                let read = Bio::read(sent % 256 * 4096, Buffer::new(4096));
                attached.submit(&disk, read, sent).unwrap();
                sent += 1;
            }
            wait(&mut attached);
            attached.poll(&mut ended);
            for completion in ended.drain(..) {
                assert!(completion.into_result().is_ok());
                count += 1;
            }
        }
        let took = begin.elapsed();
        assert!(
            took < LIMIT,
            "an event was missed on {disk:?} with {scheduler}: {took:?}"
        );
    }
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn event_tells_of_ends_at_other_threads() {
    // One hardware context: the attached thread's requests are done by the engine's own thread.
    let engine = Engine::builder()
        .disk("name=a,null=1M,latency=2ms,queue=q")
        .toml("[queue.q]\nsched = \"bfq\"\ndepth = 1\n")
        .start();
    let engine = engine.unwrap();
    let disk = engine.disk("a").unwrap();
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let mut attached = engine.attach().unwrap();
                let mut ended = Vec::new();
                for cookie in 0..50 {
                    attached
                        .submit(&disk, Bio::read(0, Buffer::new(512)), cookie)
                        .unwrap();
                    let begin = Instant::now();
                    while attached.poll(&mut ended) == 0 {
                        wait(&mut attached);
                    }
                    assert!(begin.elapsed() < LIMIT / 2, "{:?}", begin.elapsed());
                    ended.clear();
                }
            });
        }
    });
}

#[test]
fn thread_that_leaves_its_event_loop_gives_its_place_to_another() {
    let engine = Engine::builder()
        .disk("name=a,null=1M,latency=200us")
        .attached_max(1)
        .start()
        .unwrap();
    let disk = engine.disk("a").unwrap();
    for _ in 0..20 {
        let mut attached = engine.attach().unwrap();
        attached.read(&disk, 0, Buffer::new(512)).unwrap();
        attached.event().unwrap();
        attached.prepare_to_wait();
    }
}

const READS: u64 = 400;
/// Longer than any wait without a lost event.
const LIMIT: Duration = Duration::from_secs(5);
