//! Tests of disks that come and go while an engine runs.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;
use std::time::{Duration, Instant};

use blkmq_engine::{Attached, Bio, Buffer, Disk, Engine, Status};
use blkmq_testkit::Scratch;

const LONG: Duration = Duration::from_secs(20);

fn engine(disks: &[&str]) -> Engine {
    let builder = Engine::builder().group("/a,weight=300").scheduler("bfq");
    let builder = disks.iter().fold(builder, |builder, disk| builder.disk(disk));
    builder.start().unwrap()
}

/// A file of 1 MiB, as a disk is described.
fn file(scratch: &Scratch, name: &str) -> String {
    let path = scratch.dir().join(name);
    std::fs::write(&path, vec![3; 1 << 20]).unwrap();
    format!("name={name},file={}", path.display())
}

/// Keeps reads under way until it is told to end; returns how many ended well.
fn read_on(attached: &mut Attached, disk: &Disk, end: &AtomicBool) -> u64 {
    let (mut good, mut ended) = (0, Vec::new());
    while !end.load(Ordering::Relaxed) || attached.outstanding() > 0 {
        while !end.load(Ordering::Relaxed) && attached.outstanding() < 32 {
            attached.submit(disk, Bio::read(0, Buffer::new(4096)), 0).unwrap();
        }
        attached.wait(&mut ended, Some(Duration::from_millis(10)));
        for one in ended.drain(..) {
            one.into_result().unwrap();
            good += 1;
        }
    }
    good
}

fn status(attached: &mut Attached, disk: &Disk) -> Status {
    let read = attached.read(disk, 0, Buffer::new(4096));
    read.map_or_else(|error| error.status, |_| Status::Ok)
}

#[test]
fn disks_that_come_serve_all_threads_while_others_have_io_under_way() {
    let scratch = Scratch::new();
    let first = file(&scratch, "first");
    let engine = engine(&["name=slow,null=1G,latency=300us,completion=timer", &first]);
    let (end, met) = (AtomicBool::new(false), Barrier::new(3));
    thread::scope(|scope| {
        for number in 0..2 {
            let (engine, end, met) = (&engine, &end, &met);
            scope.spawn(move || {
                let mut attached = engine.attach().unwrap();
                let slow = engine.disk("slow").unwrap();
                for cookie in 0..16 {
                    attached
                        .submit(&slow, Bio::read(0, Buffer::new(4096)), cookie)
                        .unwrap();
                }
                met.wait();
                // Disks come.
                met.wait();
                for name in ["new", "second", "third"] {
                    let disk = engine.disk_in_group(name, "/a").unwrap();
                    let data = Buffer::from(&[number + 1; 4096][..]);
                    let offset = 4096 * u64::from(number);
                    attached.write(&disk, offset, data).unwrap();
                    let back = attached.read(&disk, offset, Buffer::new(4096)).unwrap();
                    assert!(back.iter().all(|&byte| byte == number + 1), "{name}");
                }
                assert!(read_on(&mut attached, &slow, end) > 0);
            });
        }
        met.wait();
        // One gets a queue, the other joins that of its drive.
        let new = engine.add_disk("name=new,ram=1M,group=/late").unwrap();
        engine.add_disk(&file(&scratch, "second")).unwrap();
        // This thread attaches later than the others.
        let third = file(&scratch, "third");
        let path = third.split_once("file=").unwrap().1.to_owned();
        let toml = format!("[disk.third]\nfile = {path:?}\n[group.\"/b\"]\nweight = 7\n");
        assert_eq!(engine.add_toml(&toml).unwrap(), ["third"]);
        let mut attached = engine.attach().unwrap();
        assert_eq!(status(&mut attached, &new), Status::Ok);
        met.wait();
        thread::sleep(Duration::from_millis(50));
        end.store(true, Ordering::Relaxed);
    });
    assert_eq!(engine.disks(), ["slow", "first", "new", "second", "third"]);
    // Disks and groups that came are as those of the start.
    let statistics = engine.statistics("/a").unwrap();
    assert_eq!((statistics.write.ios, statistics.write.errors), (6, 0));
    assert_eq!(engine.statistics("/late").unwrap().read.ios, 1);
    engine.disk_in_group("first", "/late").unwrap();
    engine.disk_in_group("third", "/b").unwrap();
    let data = engine
        .disk("third")
        .unwrap()
        .read(0, Buffer::new(512))
        .wait()
        .unwrap();
    assert_eq!(data[0], 1);
}

#[test]
fn disk_that_goes_ends_its_io_first_and_its_handles_are_refused_for_ever() {
    let scratch = Scratch::new();
    let texts = [file(&scratch, "one"), file(&scratch, "two")];
    let engine = engine(&[
        "name=d,null=1G,latency=20ms,completion=timer",
        &texts[0],
        &texts[1],
    ]);
    let met = Barrier::new(2);
    thread::scope(|scope| {
        let (engine, met) = (&engine, &met);
        scope.spawn(move || {
            let mut attached = engine.attach().unwrap();
            let handles = ["d", "one"].map(|name| engine.disk(name).unwrap());
            let mut ended = Vec::new();
            for disk in &handles {
                for cookie in 0..200 {
                    attached
                        .submit(disk, Bio::read(0, Buffer::new(4096)), cookie)
                        .unwrap();
                }
            }
            met.wait();
            while attached.outstanding() > 0 {
                attached.wait(&mut ended, None);
            }
            assert!(ended.len() == 400 && ended.iter().all(|one| one.status == Status::Ok));
            // The disks have gone, and other ones of their names have come.
            while !engine.disks().iter().any(|name| name == "again") {
                attached.wait(&mut ended, None);
                thread::yield_now();
            }
            for disk in &handles {
                assert_eq!(status(&mut attached, disk), Status::Shutdown);
                let error = disk.read(0, Buffer::new(4096)).wait().unwrap_err();
                assert_eq!((error.status, error.buffer.len()), (Status::Shutdown, 4096));
            }
            for name in ["d", "one", "two"] {
                assert_eq!(status(&mut attached, &engine.disk(name).unwrap()), Status::Ok);
            }
            assert_eq!(status(&mut attached, &engine.disk("again").unwrap()), Status::Ok);
        });
        let sent = engine.disk("one").unwrap().read(0, Buffer::new(4096));
        met.wait();
        engine.remove_disk("d", LONG).unwrap();
        engine.remove_disk("one", LONG).unwrap();
        sent.wait().unwrap();
        assert_eq!(engine.disks(), ["two"]);
        assert!(
            engine
                .remove_disk("one", LONG)
                .unwrap_err()
                .to_string()
                .contains("one")
        );
        // Where a queue has gone, a thread that attaches finds the others in their places.
        let mut late = engine.attach().unwrap();
        assert_eq!(status(&mut late, &engine.disk("two").unwrap()), Status::Ok);
        engine.add_disk(&texts[0]).unwrap();
        engine.add_disk("name=d,ram=1M").unwrap();
        engine.add_disk("name=again,ram=1M").unwrap();
        assert_eq!(status(&mut late, &engine.disk("d").unwrap()), Status::Ok);
    });
}

#[test]
fn drive_of_a_disk_that_has_gone_is_free_for_others() {
    let scratch = Scratch::new();
    let text = file(&scratch, "image");
    let engine = engine(&[&text]);
    let mut attached = engine.attach().unwrap();
    let disk = engine.disk("image").unwrap();
    assert_eq!(status(&mut attached, &disk), Status::Ok);
    let other = || Engine::builder().disk(&text).start();
    assert!(other().is_err(), "the image is locked");
    attached.remove_disk("image", LONG).unwrap();
    let other = other().unwrap();
    assert_eq!(status(&mut attached, &disk), Status::Shutdown);
    drop(other);
    engine.add_disk(&text).unwrap();
    assert_eq!(status(&mut attached, &engine.disk("image").unwrap()), Status::Ok);
}

#[test]
fn attached_thread_removes_a_disk_with_io_of_its_own_under_way() {
    let engine = engine(&["name=d,null=1G,latency=5ms,completion=timer", "name=e,ram=1M"]);
    let (d, e) = (engine.disk("d").unwrap(), engine.disk("e").unwrap());
    let mut attached = engine.attach().unwrap();
    for cookie in 0..100 {
        attached
            .submit(&d, Bio::read(0, Buffer::new(4096)), cookie)
            .unwrap();
    }
    let error = engine.remove_disk("d", LONG).unwrap_err().to_string();
    assert!(error.contains("this thread is attached"), "{error}");
    attached.remove_disk("d", LONG).unwrap();
    let mut ended = Vec::new();
    while attached.outstanding() > 0 {
        attached.wait(&mut ended, None);
    }
    assert_eq!(ended.len(), 100);
    assert!(ended.iter().all(|one| one.status == Status::Ok));
    assert_eq!(status(&mut attached, &d), Status::Shutdown);
    assert_eq!(status(&mut attached, &e), Status::Ok);
    // A single thread can do all of it.
    let d = engine.add_disk("name=d,ram=1M").unwrap();
    assert_eq!(status(&mut attached, &d), Status::Ok);
}

#[test]
fn disk_stays_if_an_attached_thread_does_not_come_back() {
    let engine = engine(&["name=d,ram=1M"]);
    let (met, stay) = (Arc::new(Barrier::new(2)), Arc::new(Barrier::new(2)));
    let other = {
        let (engine, met, stay) = (engine.clone(), Arc::clone(&met), Arc::clone(&stay));
        thread::spawn(move || {
            let mut attached = engine.attach().unwrap();
            let disk = engine.disk("d").unwrap();
            met.wait();
            // Something else keeps it busy.
            stay.wait();
            status(&mut attached, &disk)
        })
    };
    met.wait();
    let start = Instant::now();
    let error = engine.remove_disk("d", Duration::from_millis(100)).unwrap_err();
    assert!(start.elapsed() < Duration::from_secs(10));
    assert!(error.to_string().contains("has not come back"), "{error}");
    assert_eq!(engine.disks(), ["d"]);
    stay.wait();
    assert_eq!(other.join().unwrap(), Status::Ok, "it is served on");
    engine.remove_disk("d", LONG).unwrap();
    assert_eq!(engine.disks(), [""; 0]);
}

#[test]
fn threads_that_sleep_are_woken_for_a_removal() {
    let engine = engine(&["name=d,ram=1M", "name=hang,null=1G,latency=3s,completion=timer"]);
    let end = AtomicBool::new(false);
    let met = Barrier::new(3);
    thread::scope(|scope| {
        let (engine, end, met) = (&engine, &end, &met);
        // One in the engine's wait, one in an event loop of its own.
        for own_loop in [false, true] {
            scope.spawn(move || {
                let mut attached = engine.attach().unwrap();
                let hang = engine.disk("hang").unwrap();
                let mut ended = Vec::new();
                attached
                    .submit(&hang, Bio::read(0, Buffer::new(4096)), 0)
                    .unwrap();
                met.wait();
                while !end.load(Ordering::Relaxed) {
                    if own_loop {
                        wait_for_event(&mut attached);
                        attached.poll(&mut ended);
                    } else {
                        attached.wait(&mut ended, Some(Duration::from_secs(2)));
                    }
                }
            });
        }
        met.wait();
        thread::sleep(Duration::from_millis(100));
        let start = Instant::now();
        let removed = engine.remove_disk("d", LONG);
        let took = start.elapsed();
        end.store(true, Ordering::Relaxed);
        removed.unwrap();
        assert!(took < Duration::from_secs(1), "{took:?}");
    });
}

fn wait_for_event(attached: &mut Attached) {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let event = attached.event().unwrap();
    let at_most = attached.prepare_to_wait().unwrap_or(Duration::from_secs(2));
    let at_most = at_most.min(Duration::from_secs(2));
    let timeout = Timespec {
        tv_sec: at_most.as_secs() as i64,
        tv_nsec: i64::from(at_most.subsec_nanos()),
    };
    poll(&mut [PollFd::new(&event, PollFlags::IN)], Some(&timeout)).unwrap();
}

#[test]
fn disk_that_cannot_come_is_named_and_changes_nothing() {
    let engine = engine(&["name=d,ram=1M"]);
    let mut attached = engine.attach().unwrap();
    for (text, part) in [
        ("name=d,ram=1M", "d"),
        ("name=x,file=/nowhere/at/all", "/nowhere/at/all"),
        ("name=x,linear=d:0:512K", "other disks"),
        ("x", "x"),
    ] {
        let error = engine.add_disk(text).unwrap_err().to_string();
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
    let toml = "[disk.good]\nram = \"1M\"\n[disk.bad]\nfile = \"/nowhere/at/all\"\n";
    drop(engine.add_toml(toml).unwrap_err());
    assert_eq!(engine.disks(), ["d"]);
    assert_eq!(status(&mut attached, &engine.disk("d").unwrap()), Status::Ok);
}
