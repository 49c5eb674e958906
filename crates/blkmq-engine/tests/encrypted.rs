//! Tests of encrypted disks through the library, on headers of `cryptsetup`'s: a thread that takes part and one that hands
//! its I/O over read the same data, and what cannot be opened is an error of the start.

use std::io::Write;
use std::os::fd::AsRawFd;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use blkmq_engine::{Bio, Buffer, Builder, Engine};
use blkmq_testkit::Scratch;
use blkmq_testkit::tools::{installed, run};

const KEY: &str = "a passphrase\n";

/// One test at a time: a tool that the other starts has this one's files, with their locks, until it is run.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An image that `cryptsetup` has formatted, and the file of its key.
fn image(scratch: &Scratch) -> (String, String) {
    let (image, key) = (scratch.image("image", 32 << 20), scratch.word("key"));
    std::fs::write(&key, KEY).unwrap();
    let options = "luksFormat --batch-mode --type luks2 --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --sector-size 4096";
    let words: Vec<&str> = options.split(' ').chain(["--key-file", &key, &image]).collect();
    run("cryptsetup", &words);
    (image, key)
}

fn builder(image: &str, keys: &str) -> Builder {
    let toml = format!("[disk.raw]\nfile = {image:?}\n[disk.vm1]\nluks = \"raw\"\ngroup = \"/vm1\"\n{keys}");
    Engine::builder()
        .toml(&toml)
        .group("/vm1,weight=300")
        .scheduler("bfq")
}

#[test]
fn encrypted_disk_is_the_same_to_attached_threads_and_to_others() {
    if !installed(&["cryptsetup"]) {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let (image, key) = image(&scratch);
    let in_file = format!("key = {key:?}\n");
    let (pipe, mut end) = std::io::pipe().unwrap();
    end.write_all(KEY.as_bytes()).unwrap();
    drop(end);
    let in_pipe = format!("key = \"fd:{}\"\n", pipe.as_raw_fd());
    for (generation, builder) in [
        (1_u8, builder(&image, &in_file)),
        (2, builder(&image, "").key("vm1", KEY.as_bytes())),
        // The bytes count, not the file, which is another.
        (
            3,
            builder(&image, "key = \"/no/such/file\"\n").key("vm1", KEY.as_bytes()),
        ),
        (4, builder(&image, &in_pipe)),
    ] {
        assert!(!format!("{builder:?}").contains(KEY.trim()), "{builder:?}");
        let engine = builder.start().unwrap();
        let disk = engine.disk("vm1").unwrap();
        assert_eq!((disk.size(), disk.block_size()), (16 << 20, 4096));
        if generation > 1 {
            let before = disk.read(1 << 20, Buffer::new(65536)).wait().unwrap();
            assert!(before.iter().all(|&byte| byte == generation - 1));
        }
        disk.write(0, Buffer::from(&[generation; 65536][..]))
            .wait()
            .unwrap();
        let other = || {
            let mut attached = engine.attach().unwrap();
            let found = attached.read(&disk, 4096, Buffer::new(61440)).unwrap();
            assert!(found.iter().all(|&byte| byte == generation));
            // Inside of a sector, and many at once.
            attached.write(&disk, 100, Buffer::from(&[77; 1000][..])).unwrap();
            for at in 0..64 {
                let write = Bio::write((1 << 20) + at * 4096, Buffer::from(&[generation; 4096][..]));
                attached.submit(&disk, write, at).unwrap();
            }
            let mut ended = Vec::new();
            while attached.wait(&mut ended, None) > 0 {}
            assert!(ended.len() == 64 && ended.iter().all(|end| end.status.is_ok()));
        };
        // Threads that come later have the disk, too.
        other();
        std::thread::scope(|scope| drop(scope.spawn(other)));
        let found = disk.read(0, Buffer::new(4096)).wait().unwrap();
        assert!((0..4096).all(|at| found[at] == if (100..1100).contains(&at) { 77 } else { generation }));
        assert!(engine.statistics("/vm1").unwrap().write.bytes > 65536);
        disk.flush().wait().unwrap();
        for (name, part) in [("vm1", "is encrypted"), ("raw", "disk vm1 lies on it")] {
            let error = engine.remove_disk(name, Duration::from_secs(1)).unwrap_err();
            assert!(error.to_string().contains(part), "{error}");
        }
        disk.read(0, Buffer::new(4096)).wait().unwrap();
    }
    let stored = std::fs::read(&image).unwrap();
    assert!(
        !stored.windows(64).any(|bytes| bytes == [4; 64]),
        "it is stored as it is"
    );
}

#[test]
fn encrypted_disk_that_does_not_open_is_an_error_of_the_start() {
    if !installed(&["cryptsetup"]) {
        return;
    }
    let _alone = alone();
    let scratch = Scratch::new();
    let (image, key) = image(&scratch);
    let plain = scratch.image("plain", 32 << 20);
    for (builder, wanted) in [
        (builder(&image, ""), "disk vm1: has no key: set key= to a file"),
        (
            builder(&image, "").key("vm1", b"wrong"),
            "disk vm1: no key slot opens with this key",
        ),
        (
            builder(&image, "").key("vm1", b""),
            "disk vm1: its key has 0 bytes, and must have 1 to 65536",
        ),
        (
            builder(&image, "key = \"/no/such/file\"\n"),
            "disk vm1: key /no/such/file: No such file",
        ),
        (
            builder(&plain, "").key("vm1", b"any"),
            "disk vm1: there is no LUKS header",
        ),
        (
            builder(&image, &format!("key = {key:?}\n")).key("raw", b"any"),
            "disk raw: has a key, and there is no encrypted disk (luks=) of this name",
        ),
    ] {
        let said = builder.start().expect_err("it cannot be opened").to_string();
        assert!(
            said.contains(wanted) && !said.contains("wrong"),
            "{wanted}: {said}"
        );
    }
    // Nothing has the image any more.
    builder(&image, &format!("key = {key:?}\n")).start().unwrap();
}
