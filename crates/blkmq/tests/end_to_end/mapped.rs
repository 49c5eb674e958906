//! Tests whether disks on other disks behave like any disk for clients: fio's verification, QEMU's operations
//! and a file system, on a stripe of four disks, and on a disk joined from parts.

use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run, try_run};
use crate::common::{Daemon, Scratch};
use crate::fio::{VERIFY, bytes, fio, jobs};
use crate::qemu::qemu_io;

/// Four members in memory and files, with a stripe over them and a disk joined from parts of
/// others.
fn serve(scratch: &Scratch) -> Daemon {
    let file = |name: &str| format!("name={name},file={}", scratch.image(name, 16 * MIB));
    Daemon::serve(
        scratch,
        &[
            "name=stripe,striped=a+b+c+d,chunk=16K",
            "name=joined,linear=e:8M:8M+f:4M:4M+e:0:8M+f:0:4M",
            "name=a,ram=16M",
            &file("b"),
            "name=c,ram=16M,sched=mq-deadline",
            &file("d"),
            &file("e"),
            "name=f,ram=8M",
        ],
    )
}

#[test]
fn data_behind_a_file_that_has_grown_stays_where_it_is() {
    for (kind, at) in [("linear=a+b", 9 * MIB), ("striped=a+b", 9 * MIB)] {
        let scratch = Scratch::new();
        let file = |name: &str| format!("name={name},file={},size=8M,create=on", scratch.word(name));
        let disks = [format!("name=whole,{kind}"), file("a"), file("b")];
        let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
        let daemon = Daemon::serve(&scratch, &disks);
        let mut client = Client::connect(&scratch.path("nbd.sock"), "whole").expect("it is served");
        client.write(at, &block(1, 7)).expect("a write");
        client.flush().expect("a flush");
        daemon.stop();
        let grown = std::fs::File::options().write(true).open(scratch.path("a"));
        grown.expect("the file").set_len(10 * MIB).expect("it grows");
        let daemon = Daemon::serve(&scratch, &disks);
        assert!(
            daemon.says("disk a: only the 8388608 bytes of its size= are used"),
            "{}",
            daemon.said()
        );
        let mut client = Client::connect(&scratch.path("nbd.sock"), "whole").expect("it is served");
        assert_eq!(client.size(), 16 * MIB, "{kind}");
        assert!(client.read(at, BLOCK).expect("a read") == block(1, 7), "{kind}");
        daemon.stop();
    }
}

#[test]
fn fio_verifies_every_operation_on_a_stripe_and_on_joined_parts() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    for disk in ["stripe", "joined"] {
        let uri = daemon.uri(disk);
        for words in [
            "--rw=randwrite --bsrange=512-256k --size=6m --offset_increment=6m --numjobs=4 --iodepth=16 --fsync=64",
            "--rw=randrw --bsrange=4k-64k --size=16m --iodepth=32 --fsync=32",
            "--rw=write --bs=1m --size=16m --iodepth=4",
            "--rw=trimwrite --bs=4k --size=8m --iodepth=1 --fsync=32",
        ] {
            for job in jobs(&fio(&uri, words, VERIFY)) {
                assert!(bytes(&job, "write") > 0, "{disk} {words}: nothing was written");
                assert!(bytes(&job, "read") > 0, "{disk} {words}: nothing was verified");
            }
        }
    }
    daemon.stop();
}

#[test]
fn qemu_io_reads_back_what_each_operation_left_over_members() {
    if !installed(&["qemu-io"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    for disk in ["stripe", "joined"] {
        qemu_io(
            &daemon.uri(disk),
            &[
                // Over many members at once, and overlapping.
                "write -P 0x11 0 12M",
                "write -P 0x22 512 130k",
                "read -P 0x11 0 512",
                "read -P 0x22 512 130k",
                "read -P 0x11 133632 1M",
                "write -f -P 0x44 7M 3M",
                "flush",
                "read -P 0x44 7M 3M",
                "write -z 1M 3M",
                "read -P 0 1M 3M",
                "write -z -u 7M 1M",
                "read -P 0 7M 1M",
                "read -P 0x44 8M 2M",
                "discard 12M 8M",
                "write -P 0x55 13M 100k",
                "read -P 0x55 13M 100k",
                "aio_write -P 0x66 8M 1M",
                "aio_write -P 0x77 9M 1M",
                "aio_write -z 10M 1M",
                "aio_flush",
                "read -P 0x66 8M 1M",
                "read -P 0x77 9M 1M",
                "read -P 0 10M 1M",
                // The very end of the disk.
                "write -P 0x88 25165312 512",
                "read -P 0x88 25165312 512",
            ],
        );
    }
    daemon.stop();
}

#[test]
fn image_copied_to_a_stripe_lies_in_its_members_chunk_by_chunk() {
    if !installed(&["mkfs.ext4", "e2fsck", "nbdcopy", "qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let made = scratch.noisy_image("made.raw", 64 * MIB, 3);
    run("mkfs.ext4", &["-q", "-F", &made]);
    let members = ["a", "b", "c", "d"].map(|name| scratch.image(name, 16 * MIB));
    let mut disks = vec!["name=s,striped=m0+m1+m2+m3,chunk=32K".to_owned()];
    disks.extend(
        (0..)
            .zip(&members)
            .map(|(at, file)| format!("name=m{at},file={file}")),
    );
    let disks: Vec<&str> = disks.iter().map(String::as_str).collect();
    let daemon = Daemon::serve(&scratch, &disks);
    let uri = daemon.uri("s");
    run("nbdcopy", &["--connections=4", "--flush", &made, &uri]);
    let back = scratch.word("back.raw");
    run("nbdcopy", &["--connections=4", &uri, &back]);
    run("e2fsck", &["-f", "-n", &back]);
    run("qemu-img", &["compare", "-f", "raw", "-F", "raw", &made, &uri]);
    // Unwritten ranges are holes, through the stripe too: `qemu-img` finds the hole in the middle
    // of the image.
    let map = run("qemu-img", &["map", "--output=json", "-f", "raw", &uri]).stdout;
    assert!(map.contains("\"data\": false"), "{map}");
    daemon.stop();

    // Read without the daemon: chunk n of the image is chunk n / 4 of member n % 4.
    let image = std::fs::read(&made).unwrap();
    let members = members.map(|file| std::fs::read(file).unwrap());
    for (number, chunk) in image.chunks(32 << 10).enumerate() {
        let at = number / 4 * (32 << 10);
        assert!(
            members[number % 4][at..at + chunk.len()] == *chunk,
            "chunk {number}"
        );
    }
}

#[test]
fn disk_below_another_is_served_only_where_it_is_named() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let (all, one) = (scratch.word("all.sock"), scratch.word("one.sock"));
    let text = format!(
        "[disk.big]\nstriped = [\"a\", \"b\"]\nchunk = \"4K\"\n[disk.a]\nram = \"1M\"\n[disk.b]\nram = \"1M\"\n\
         [[export]]\nnbd = \"unix:{all}\"\n[[export]]\nnbd = \"unix:{one}\"\ndisks = [\"a\"]\n"
    );
    std::fs::write(scratch.path("blkmq.toml"), text).unwrap();
    let daemon = Daemon::start(&["-c", &scratch.word("blkmq.toml")]);
    let info = |disk: &str, socket: &str| {
        let uri = format!("nbd+unix:///{disk}?socket={socket}");
        try_run("qemu-img", &["info", "-f", "raw", &uri]).success
    };
    assert!(info("big", &all) && info("a", &one));
    assert!(!info("a", &all) && !info("b", &all) && !info("big", &one));
    let said = daemon.said();
    assert!(
        said.contains("disk a: it is served although disk big lies on it"),
        "{said}"
    );
    assert!(!said.contains("/b?"), "{said}");
    daemon.stop();
}

const MIB: u64 = 1 << 20;
