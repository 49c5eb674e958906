//! Tests of threads that do their own I/O through the library, and of what an engine tells of itself.

use std::time::{Duration, Instant};

use blkmq_engine::{Bio, Buffer, Engine, Error, Status};

fn engine() -> Engine {
    let engine = Engine::builder()
        .disk("name=ram,ram=1M,group=/a")
        .disk("name=slow,null=1G,latency=300us,completion=timer")
        .group("/a,weight=300")
        .group("/b,weight=100")
        .scheduler("bfq");
    engine.start().unwrap()
}

#[test]
fn blocking_calls_do_what_they_say_and_return_the_buffer() {
    let engine = engine();
    let disk = engine.disk("ram").unwrap();
    assert_eq!(
        (disk.name(), disk.size(), disk.block_size()),
        ("ram", 1 << 20, 512)
    );
    let mut attached = engine.attach().unwrap();
    let buffer = Buffer::from(&[5; 8192][..]);
    let at = buffer.as_ptr();
    let buffer = attached.write(&disk, 4096, buffer).unwrap();
    attached.flush(&disk).unwrap();
    attached.discard(&disk, 0, 4096).unwrap();
    attached.run(&disk, Bio::write_zeroes(8192, 512).fua()).unwrap();
    let buffer = attached.read(&disk, 4096, buffer).unwrap();
    assert_eq!(buffer.as_ptr(), at);
    assert!(buffer[..4096].iter().all(|&byte| byte == 5));
    assert!(buffer[4096..][..512].iter().all(|&byte| byte == 0));
    let statistics = engine.statistics("/a").unwrap();
    assert_eq!((statistics.read.ios, statistics.read.bytes), (1, 8192));
    assert_eq!((statistics.write.ios, statistics.discard.ios), (2, 1));
}

#[test]
fn failed_io_returns_its_status_and_its_buffer() {
    let engine = engine();
    let disk = engine.disk("ram").unwrap();
    let mut attached = engine.attach().unwrap();
    for (offset, len) in [(1 << 20, 512), ((1 << 20) - 100, 101)] {
        let error = attached.write(&disk, offset, Buffer::new(len)).unwrap_err();
        assert_eq!(
            (error.status, error.buffer.len()),
            (Status::NoSpace, len),
            "{offset} {len}"
        );
    }
    let error = attached.read(&disk, 1 << 20, Buffer::new(512)).unwrap_err();
    assert_eq!(error.status, Status::Invalid, "behind the end");
    let error = attached.read(&disk, 0, Buffer::default()).unwrap_err();
    assert_eq!(std::io::Error::from(error).raw_os_error(), Some(22));
    assert_eq!(engine.statistics("/a").unwrap().write.bytes, 0);
}

#[test]
fn completions_come_once_each_also_around_a_blocking_call() {
    let engine = engine();
    let disk = engine.disk("slow").unwrap();
    let mut attached = engine.attach().unwrap();
    let (mut ended, mut cookies) = (Vec::new(), Vec::new());
    for cookie in 0..100 {
        let read = Bio::read(cookie * 4096, Buffer::new(4096));
        attached.submit(&disk, read, cookie).unwrap();
        if cookie % 10 == 5 {
            attached.read(&disk, 0, Buffer::new(512)).unwrap();
        }
    }
    while attached.outstanding() > 0 {
        attached.wait(&mut ended, Some(Duration::from_secs(10)));
        cookies.extend(ended.drain(..).map(|completion| completion.cookie));
    }
    cookies.sort_unstable();
    assert_eq!(cookies, (0..100).collect::<Vec<_>>());
    assert_eq!(attached.wait(&mut ended, None), 0, "nothing is under way");
}

#[test]
fn refused_bio_comes_back_with_its_buffer_and_fits_later() {
    let engine = engine();
    let disk = engine.disk("slow").unwrap();
    let mut attached = engine.attach().unwrap();
    let mut ended = Vec::new();
    let refused = (0..100_000).find_map(|cookie| {
        let read = Bio::read(0, Buffer::new(512));
        attached.submit(&disk, read, cookie).err()
    });
    let buffer = refused.expect("room is limited").into_buffer();
    assert_eq!(buffer.len(), 512);
    attached.read(&disk, 0, buffer).unwrap();
    assert!(attached.wait(&mut ended, None) > 0);
}

#[test]
fn io_is_accounted_to_the_group_of_the_handle() {
    let engine = engine();
    assert_eq!(engine.groups(), ["/", "/a", "/b", "/slow"]);
    let mut attached = engine.attach().unwrap();
    let disk = engine.disk_in_group("slow", "/b").unwrap();
    attached.read(&disk, 0, Buffer::new(512)).unwrap();
    engine.set_weight("/b", 50).unwrap();
    let ios = |path| engine.statistics(path).unwrap().read.ios;
    assert_eq!((ios("/slow"), ios("/b")), (0, 1));
}

#[test]
fn group_is_made_and_changed_while_the_engine_runs() {
    let engine = engine();
    engine
        .set_group("/new/vm,weight=300,iops=20,iops_burst=1")
        .unwrap();
    assert_eq!(
        engine.groups(),
        ["/", "/a", "/b", "/new", "/new/vm", "/slow"],
        "all queues have them"
    );
    let disk = engine.disk_in_group("ram", "/new/vm").unwrap();
    let mut attached = engine.attach().unwrap();
    let mut time_of_ten = || {
        let start = Instant::now();
        for _ in 0..10 {
            attached.read(&disk, 0, Buffer::new(512)).unwrap();
        }
        start.elapsed()
    };
    let capped = time_of_ten();
    assert!(capped >= Duration::from_millis(350), "{capped:?}");
    // What is left out has its default: no cap.
    engine.set_group("/new/vm,weight=300").unwrap();
    time_of_ten();
    let free = (0..20).map(|_| time_of_ten()).min().unwrap();
    assert!(free < Duration::from_millis(100), "{free:?}");
    assert_eq!(engine.statistics("/new/vm").unwrap().read.ios, 220);
    for (text, part) in [
        ("/a,iops=fast", "iops=fast"),
        ("/a,bps=1,bps_burst=1", "/a"),
        ("a", "as in /"),
    ] {
        let error = engine.set_group(text).unwrap_err().to_string();
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn faults_name_the_object_and_what_there_is() {
    let fault = |result: Result<Engine, Error>| result.unwrap_err().to_string();
    for (error, part) in [
        (fault(Engine::builder().disk("null=1G").start()), "name="),
        (fault(Engine::builder().disk("name=a,null=1Q").start()), "1Q"),
        (
            fault(Engine::builder().scheduler("cfq").start()),
            "scheduler cfq rejected",
        ),
        (fault(Engine::builder().group("a").start()), "as in /"),
        (fault(Engine::builder().toml("[disk").start()), "TOML"),
        (
            engine().disk("x").unwrap_err().to_string(),
            "no disk x; there are: ram, slow",
        ),
        (
            engine().statistics("/x").unwrap_err().to_string(),
            "no group /x; there are: /, /a, /b, /slow",
        ),
        (engine().set_weight("/a", 0).unwrap_err().to_string(), "/a"),
    ] {
        assert!(error.contains(part), "{part} is missing in: {error}");
    }
}

#[test]
fn engine_lives_as_long_as_a_thread_is_attached() {
    let engine = engine();
    let disk = engine.disk("ram").unwrap();
    let mut attached = engine.attach().unwrap();
    drop(engine);
    attached.write(&disk, 0, Buffer::new(512)).unwrap();
    let one_too_many = Engine::builder()
        .disk("name=n,null=1G")
        .attached_max(1)
        .start()
        .unwrap();
    let _attached = one_too_many.attach().unwrap();
    assert!(one_too_many.attach().is_err());
}

#[test]
fn attached_thread_that_leaves_waits_for_its_io() {
    let engine = engine();
    let disk = engine.disk("slow").unwrap();
    let mut attached = engine.attach().unwrap();
    for cookie in 0..50 {
        attached
            .submit(&disk, Bio::read(0, Buffer::new(4096)), cookie)
            .unwrap();
    }
    drop(attached);
    assert_eq!(engine.statistics("/slow").unwrap().read.ios, 50);
    engine.shutdown(Duration::from_secs(10)).unwrap();
    assert!(engine.attach().is_err(), "it is shut down");
}

#[test]
fn completions_can_be_taken_a_few_at_a_time() {
    let engine = engine();
    let disk = engine.disk("ram").unwrap();
    let mut attached = engine.attach().unwrap();
    for cookie in 0..10 {
        attached
            .submit(&disk, Bio::read(0, Buffer::new(512)), cookie)
            .unwrap();
    }
    let mut cookies = Vec::new();
    while attached.outstanding() > 0 {
        let count = attached.wait_each(None, 3, |ended| cookies.push(ended.cookie));
        assert!((1..=3).contains(&count), "{count}");
        attached.poll_each(0, |_| panic!("none was asked for"));
    }
    cookies.sort_unstable();
    assert_eq!(cookies, (0..10).collect::<Vec<_>>());
}

#[test]
fn disk_of_another_engine_is_refused_and_none_of_its_number_is_written() {
    let (mine, other) = (engine(), engine());
    let (own, foreign) = (mine.disk("ram").unwrap(), other.disk("ram").unwrap());
    let mut attached = mine.attach().unwrap();
    let before = attached.read(&own, 0, Buffer::new(4096)).unwrap();
    let mut buffer = Buffer::new(4096);
    buffer.fill(9);
    let error = attached.write(&foreign, 0, buffer).unwrap_err();
    assert_eq!(error.status, Status::Invalid);
    assert_eq!(error.buffer.len(), 4096, "it comes back");
    let after = attached.read(&own, 0, Buffer::new(4096)).unwrap();
    assert_eq!(before[..], after[..]);
}
