//! What has changed of a disk since a moment, as clients for backups ask for it over NBD, and as QEMU finds it in the image
//! afterwards. A bitmap that may lack a change is never one that can be used.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use serde_json::Value;

use crate::block_status::{asks_for, question};
use crate::common::Scratch;
use crate::common::nbd::Client;
use crate::common::tools::{installed, run};
use crate::upgrade::Stage;

#[test]
fn bitmap_goes_over_to_a_daemon_that_takes_over_with_its_clients() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = image(&scratch);
    run("qemu-img", &["bitmap", "--add", "-f", "qcow2", &image, "monday"]);
    let stage = Stage::of(scratch, &[&format!("name=vm1,qcow2={image}")]);
    let daemon = stage.start();
    let mut asking = asks_for(&stage.socket(), "vm1", "qemu:dirty-bitmap:monday");
    let mut client = Client::connect(&stage.socket(), "vm1").expect("it is served");
    client.write(128 << 10, &[1; 4096]).expect("a write");
    let before = vec![(128 << 10, 0), (64 << 10, 1), (832 << 10, 0)];
    assert_eq!(status(&mut asking, 1), Ok(before.clone()));
    let daemon = stage.upgrade(daemon);
    assert_eq!(status(&mut asking, 2), Ok(before));
    client.write(0, &[1; 4096]).expect("a write");
    let after = vec![(64 << 10, 1), (64 << 10, 0), (64 << 10, 1), (832 << 10, 0)];
    assert_eq!(status(&mut asking, 3), Ok(after));
    drop((client, asking));
    daemon.stop();
    assert_eq!(flags(&stage.scratch, "monday"), ["auto"]);
    assert_eq!(
        found_by_qemu(&stage.scratch, "monday"),
        [(0, 64 << 10), (128 << 10, 64 << 10)]
    );
    run("qemu-img", &["check", "-f", "qcow2", &image]);
}

/// Makes an image of 64 MiB.
fn image(scratch: &Scratch) -> String {
    let image = scratch.word("vm1.qcow2");
    run("qemu-img", &["create", "-q", "-f", "qcow2", &image, "64M"]);
    image
}

/// What QEMU's own server finds changed in the image, which nobody serves.
fn found_by_qemu(scratch: &Scratch, bitmap: &str) -> Vec<(u64, u64)> {
    let (image, socket) = (scratch.word("vm1.qcow2"), scratch.word("qemu.sock"));
    let bitmap_word = format!("--bitmap={bitmap}");
    let mut server = std::process::Command::new("qemu-nbd")
        .args([
            "-r",
            "-f",
            "qcow2",
            "-k",
            &socket,
            "-x",
            "vm1",
            &bitmap_word,
            &image,
        ])
        .spawn()
        .expect("it is installed with qemu-img");
    let end = std::time::Instant::now() + std::time::Duration::from_secs(10);
    while !scratch.path("qemu.sock").exists() && std::time::Instant::now() < end {
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    // Without --persistent it ends with its first client.
    let opts = format!(
        "driver=nbd,server.type=unix,server.path={socket},export=vm1,x-dirty-bitmap=qemu:dirty-bitmap:{bitmap}"
    );
    let map = run("qemu-img", &["map", "--output=json", "--image-opts", &opts]).stdout;
    let _ = server.wait();
    runs(&map, "start", |run| run["data"] == false)
}

/// The runs of a map that are wanted, neighbours as one.
fn runs(map: &str, start: &str, is_wanted: impl Fn(&Value) -> bool) -> Vec<(u64, u64)> {
    let map: Value = serde_json::from_str(map).expect("it is JSON");
    let mut found: Vec<(u64, u64)> = Vec::new();
    for run in map
        .as_array()
        .expect("a list")
        .iter()
        .filter(|run| is_wanted(run))
    {
        let (at, len) = (
            run[start].as_u64().expect("a number"),
            run["length"].as_u64().expect("a number"),
        );
        match found.last_mut() {
            Some(last) if last.0 + last.1 == at => last.1 += len,
            _ => found.push((at, len)),
        }
    }
    found
}

/// What QEMU finds of a bitmap in the image: its flags.
fn flags(scratch: &Scratch, bitmap: &str) -> Vec<String> {
    let image = scratch.word("vm1.qcow2");
    let info = run(
        "qemu-img",
        &["info", "-U", "--output=json", "-f", "qcow2", &image],
    )
    .stdout;
    let info: Value = serde_json::from_str(&info).expect("it is JSON");
    let bitmaps = info["format-specific"]["data"]["bitmaps"].as_array().cloned();
    let found = bitmaps
        .into_iter()
        .flatten()
        .find(|found| found["name"] == bitmap);
    let flags = found.map(|found| found["flags"].as_array().cloned().unwrap_or_default());
    let flags = flags.into_iter().flatten();
    flags
        .map(|flag| flag.as_str().expect("a text").to_owned())
        .collect()
}

/// Asks for the status of the first MiB: the length and the flags of each run, or the error's text.
fn status(stream: &mut UnixStream, cookie: u64) -> Result<Vec<(u32, u32)>, String> {
    stream.write_all(&question(cookie, 1 << 20)).expect("a question");
    let mut head = [0; 20];
    stream.read_exact(&mut head).expect("a reply");
    let number = |bytes: &[u8]| u32::from_be_bytes(bytes.try_into().expect("four bytes"));
    let mut payload = vec![0; number(&head[16..]) as usize];
    stream.read_exact(&mut payload).expect("its rest");
    assert_eq!(head[4..6], [0, 1], "one chunk");
    match head[6..8] {
        [0, 5] => Ok(payload[4..]
            .chunks_exact(8)
            .map(|run| (number(&run[..4]), number(&run[4..])))
            // What goes on behind the range may be told.
            .scan(1 << 20, |left: &mut u32, (len, flags)| {
                let now = len.min(*left);
                *left -= now;
                (now > 0).then_some((now, flags))
            })
            .collect()),
        _ => Err(String::from_utf8_lossy(&payload[6..]).into_owned()),
    }
}
