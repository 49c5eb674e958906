//! Tests what happens to requests that wait for a cap when another daemon takes over: they are done at once,
//! and charged there.

use std::time::{Duration, Instant};

use blkmq_testkit::vhost_user::FrontEnd;

use super::load::Load;
use super::{DISK_BYTES, Stage};
use crate::common::Scratch;
use crate::common::nbd::{Client, Command};
use crate::common::pattern::{BLOCK, block};

#[test]
fn requests_that_wait_for_a_cap_delay_no_upgrade_and_are_paid_for_after_it() {
    let stage = capped_stage();
    let daemon = stage.start();
    let load = Load::start(&stage.socket(), "free", 1);
    let start = Instant::now();
    let mut client = Client::connect(&stage.socket(), "capped").expect("it is served");
    let mut sent: Vec<u64> = (0..NBD_REQUESTS)
        .map(|number| write(&mut client, number))
        .collect();
    let mut guests: Vec<FrontEnd> = (0..GUESTS).map(|number| guest(&stage, number)).collect();
    std::thread::sleep(Duration::from_millis(100));
    load.take_longest_gap();
    let daemon = stage.upgrade(daemon);
    let pause = load.take_longest_gap();
    for _ in 0..NBD_REQUESTS {
        let answered = client.reply().expect("a reply");
        let at = sent.iter().position(|cookie| *cookie == answered);
        sent.swap_remove(at.expect("a reply to what was asked, and once"));
    }
    for guest in &mut guests {
        let mut heads = guest.used(HEADS.len() as u16);
        heads.sort_unstable();
        assert_eq!(heads, HEADS.map(u32::from), "each is given back once");
        HEADS.iter().for_each(|head| assert_eq!(guest.status(*head), 0));
    }
    let drained = start.elapsed();
    // Requests that passed at once are charged here as well: the next one waits until all requests
    // before it are paid for.
    client.write(0, &block(0, 2)).expect("a write");
    let before = NBD_REQUESTS + GUESTS * HEADS.len() as u64;
    let due = Duration::from_secs(before) / CAP_IOPS;
    let took = start.elapsed();
    eprintln!(
        "{before} requests at {CAP_IOPS} a second: pause {pause:?}, all ended after {drained:?}, one more after {took:?}, due {due:?}"
    );
    assert!(
        took >= due.mul_f64(0.95),
        "the cap does not hold: {took:?}, due {due:?}"
    );
    assert!(
        took < due.mul_f64(1.5),
        "it is paid for twice: {took:?}, due {due:?}"
    );
    assert!(pause < Duration::from_millis(500), "pause {pause:?}");
    load.stop();
    daemon.stop();
    let image = std::fs::read(stage.scratch.path("capped.raw")).expect("the image");
    for number in 0..NBD_REQUESTS {
        let at = number as usize * BLOCK;
        assert!(image[at..at + BLOCK] == block(number, if number == 0 { 2 } else { 1 }));
    }
}

/// Disks for an NBD client and guests in one group with a cap, and a disk without one.
fn capped_stage() -> Stage {
    let scratch = Scratch::new();
    let image = scratch.image("capped.raw", DISK_BYTES);
    let mut disks = vec![format!("name=capped,file={image},queue=q,group=/capped/nbd")];
    for number in 0..GUESTS {
        let image = scratch.image(&format!("vm{number}.raw"), 1 << 20);
        disks.push(format!(
            "name=vm{number},file={image},block_size=512,queue=q,group=/capped/vm{number}"
        ));
    }
    let free = scratch.image("free.raw", DISK_BYTES);
    disks.push(format!("name=free,file={free},queue=q"));
    let address = format!("unix:{}", scratch.word("{disk}.sock"));
    let mut stage = Stage::of(scratch, &disks.iter().map(String::as_str).collect::<Vec<_>>());
    let cap = format!("/capped,iops={CAP_IOPS}");
    let more = ["--vhost-user", &address, "--group", &cap];
    stage.words.extend(more.map(str::to_owned));
    stage
}

fn write(client: &mut Client, number: u64) -> u64 {
    let data = block(number, 1);
    let sent = client.send(Command::Write, 0, number * BLOCK as u64, BLOCK as u32, &data);
    sent.expect("a write is sent")
}

/// A driver that has submitted five writes.
fn guest(stage: &Stage, number: u64) -> FrontEnd {
    let guest = FrontEnd::connect(&stage.scratch.path(&format!("vm{number}.sock")));
    guest.start();
    for head in HEADS {
        guest.request(head, 1, head.into());
    }
    guest.offer(&HEADS);
    guest
}

/// 67 requests, which take longer at this rate than an upgrade waits.
const CAP_IOPS: u32 = 20;
const NBD_REQUESTS: u64 = 32;
const GUESTS: u64 = 7;
/// The requests of a guest, each with three descriptors.
const HEADS: [u16; 5] = [0, 3, 6, 9, 12];
