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

const CLUSTER: u64 = 128 << 10;
/// Requests of a cluster that have an area at a time.
const AREAS: u64 = 16;
const ROUNDS: u64 = 400;
