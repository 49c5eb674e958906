//! Requests of which the files have a part, or the threads, beside others of the same clusters.

use std::time::Duration;

use super::*;

/// Makes an image of clusters of 128 KiB that lie apart, and of which the map is known.
fn apart(scratch: &Scratch, clusters: u64) -> Option<Rig> {
    let words = format!("create -f qcow2 -o cluster_size=128k parts.qcow2 {}", 64 << 20);
    qemu(scratch, "qemu-img", &words)?;
    let mut rig = Rig::at(&scratch.0.join("parts.qcow2"));
    for cluster in (0..clusters).rev() {
        assert_eq!(rig.write(Flags::NONE, cluster * CLUSTER, &[1; 512]), Status::Ok);
    }
    rig.flush();
    rig.read(0, 512);
    Some(rig)
}

/// The first request has no area for its second part, which is not aligned and waits for the second request: that one
/// has given its own second part to the threads, too.
#[test]
fn requests_that_the_threads_have_a_part_of_do_not_wait_for_each_other_without_end() {
    let scratch = Scratch::new("crossing");
    let Some(mut rig) = apart(&scratch, AREAS + 3) else {
        return;
    };
    for round in 0..20 {
        let mut memory = Mapping::new((AREAS as usize + 5) * CLUSTER as usize).unwrap();
        let mut rest = memory.bytes_mut();
        let mut take = |len: usize| {
            let (taken, left) = std::mem::take(&mut rest).split_at_mut(len);
            rest = left;
            taken
        };
        take(1);
        let mut requests = Vec::new();
        for cluster in 3..AREAS + 2 {
            let piece = lend(take(CLUSTER as usize));
            requests.push(request_with(
                Op::Write,
                Flags::NONE,
                0,
                cluster * CLUSTER,
                &[piece],
            ));
        }
        let piece = lend(take(2 * CLUSTER as usize - 100));
        requests.push(request_with(Op::Write, Flags::NONE, 0, 0, &[piece]));
        take(99);
        let aligned = lend(take(CLUSTER as usize));
        take(1);
        let odd = lend(take(CLUSTER as usize));
        requests.push(request_with(Op::Write, Flags::NONE, 0, CLUSTER, &[aligned, odd]));
        for (tag, rq) in (0..).zip(&requests) {
            assert_eq!(
                rig.hctx.issue(rq, cookie(tag), true, Instant(0)),
                Issued::Queued,
                "request {tag} of round {round}"
            );
        }
        let (start, mut done) = (std::time::Instant::now(), Vec::new());
        while done.len() < requests.len() {
            rig.reap(&mut done);
            assert!(
                start.elapsed() < Duration::from_secs(20),
                "{} of {} requests have ended in round {round}",
                done.len(),
                requests.len()
            );
            std::thread::sleep(Duration::from_micros(20));
        }
        assert!(done.iter().all(|end| end.status.is_ok()), "{done:?}");
    }
}

#[test]
fn small_write_takes_nothing_back_of_what_a_thread_writes_to_its_block() {
    let scratch = Scratch::new("beside");
    let Some(mut rig) = apart(&scratch, 1) else { return };
    for round in 0..ROUNDS {
        // Something new: forced writes go to the threads while the tables are not written.
        let fresh = (round + 1) * CLUSTER;
        assert_eq!(rig.write(Flags::NONE, fresh, &[1; 512]), Status::Ok);
        let fill = (round % 200) as u8 + 1;
        let mut memory = Mapping::new(8192).unwrap();
        let (whole, small) = memory.bytes_mut().split_at_mut(4096);
        whole.fill(fill);
        small[..100].fill(!fill);
        let requests = [
            request_with(Op::Write, Flags::FUA, 0, 0, &[lend(whole)]),
            request_with(Op::Write, Flags::NONE, 0, 200, &[lend(&mut small[..100])]),
        ];
        let status = rig.run_all(&requests);
        assert_eq!(status, [Status::Ok; 2]);
        let found = rig.read(0, 4096);
        let around = found[..200].iter().chain(&found[300..]);
        let old = around.filter(|byte| **byte != fill).count();
        assert_eq!(old, 0, "bytes from before the write of round {round}");
    }
}

/// The first of them has the cluster made, and the others go on in it.
#[test]
fn writes_to_the_same_new_cluster_at_once_are_all_there() {
    let scratch = Scratch::new("same-cluster");
    std::fs::write(scratch.path("base"), vec![3; 8 << 20]).unwrap();
    for base in ["-b base -F raw", ""] {
        let words = format!("create -q -f qcow2 -o cluster_size=128k {base} image 8M");
        if qemu(&scratch, "qemu-img", &words).is_none() {
            return;
        }
        let mut rig = Rig::at(&scratch.path("image"));
        // The table is in memory from here on.
        assert_eq!(rig.write(Flags::NONE, 0, &[1; 512]), Status::Ok);
        rig.read(0, 512);
        for cluster in 1..60u64 {
            let mut memory = Mapping::new(DEPTH as usize * 4096).unwrap();
            let mut requests = Vec::new();
            for (number, bytes) in (0..).zip(memory.bytes_mut().chunks_mut(4096)) {
                bytes.fill(number as u8 + 10);
                let at = cluster * CLUSTER + number * 4096;
                // Every fourth is odd.
                let len = if number % 4 == 3 { 512 } else { 4096 };
                requests.push(request_with(
                    Op::Write,
                    Flags::NONE,
                    0,
                    at,
                    &[lend(&mut bytes[..len])],
                ));
            }
            assert!(rig.run_all(&requests).iter().all(|status| status.is_ok()));
            let found = rig.read(cluster * CLUSTER, CLUSTER as usize);
            for (number, bytes) in (0..).zip(found.chunks(4096)) {
                let old = if base.is_empty() { 0 } else { 3 };
                let rest = if number % 4 == 3 { old } else { number + 10 };
                assert!(
                    bytes[..512].iter().all(|byte| *byte == number + 10)
                        && bytes[512..].iter().all(|byte| *byte == rest),
                    "block {number} of cluster {cluster}"
                );
            }
        }
        rig.flush();
        drop(rig);
        check(&scratch, &scratch.path("image"));
    }
}

/// Each is there as if it had come before or after the other.
#[test]
fn new_cluster_that_is_written_and_zeroed_at_once_has_one_after_the_other() {
    let scratch = Scratch::new("zeroed-at-once");
    std::fs::write(scratch.path("base"), vec![3; 16 << 20]).unwrap();
    let words = "create -q -f qcow2 -o cluster_size=128k -b base -F raw image 16M";
    if qemu(&scratch, "qemu-img", words).is_none() {
        return;
    }
    let mut rig = Rig::at(&scratch.path("image"));
    assert_eq!(rig.write(Flags::NONE, 0, &[1; 512]), Status::Ok);
    rig.read(0, 512);
    for cluster in 1..120u64 {
        let (at, order) = (cluster * CLUSTER, cluster % 2);
        let mut memory = Mapping::new(4096).unwrap();
        memory.bytes_mut().fill(7);
        let mut requests = [
            request_with(Op::Write, Flags::NONE, 0, at + 8192, &[lend(memory.bytes_mut())]),
            request(Op::WriteZeroes, at, CLUSTER),
        ];
        if order == 1 {
            requests.swap(0, 1);
        }
        assert_eq!(rig.run_all(&requests), [Status::Ok; 2]);
        let found = rig.read(at, CLUSTER as usize);
        let data = &found[8192..12288];
        let is_one = data.iter().all(|byte| *byte == 7) || data.iter().all(|byte| *byte == 0);
        let around = found[..8192].iter().chain(&found[12288..]);
        assert!(
            is_one && around.into_iter().all(|byte| *byte == 0),
            "cluster {cluster}"
        );
    }
    rig.flush();
    drop(rig);
    check(&scratch, &scratch.path("image"));
}

const CLUSTER: u64 = 128 << 10;
/// Requests of a cluster that have an area at a time.
const AREAS: u64 = 16;
const ROUNDS: u64 = 400;

/// A block device may end there.
#[test]
fn data_file_ends_with_the_disk_inside_its_last_cluster() {
    let scratch = Scratch::new("ends");
    // What the base has behind the disk is not copied.
    std::fs::write(scratch.path("base"), vec![3; 128 << 10]).unwrap();
    for (name, on) in [("one", ""), ("two", "-b base -F raw")] {
        let words = format!("create -q -f qcow2 -o data_file={name}.data {on} {name} 100K");
        if qemu(&scratch, "qemu-img", &words).is_none() {
            return;
        }
        let mut rig = Rig::at(&scratch.path(name));
        assert_eq!(rig.write(Flags::NONE, 98_304, &[4; 4096]), Status::Ok);
        rig.flush();
        let data = std::fs::metadata(scratch.path(&format!("{name}.data"))).unwrap();
        assert_eq!(data.len(), 100 << 10, "{name}");
        let around = rig.read(65_536, 512)[0];
        assert_eq!(around, if on.is_empty() { 0 } else { 3 });
    }
}
