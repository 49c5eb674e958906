//! An image is committed again and again while requests are under way.

use blkmq_host::device::GivenUp;

use super::committed::{SIZE, content, overlay};
use super::*;

#[test]
fn requests_under_way_go_on_while_an_image_is_committed() {
    for (base, image) in [
        ("raw", "-o cluster_size=16384"),
        ("-c -o cluster_size=2M", "-o cluster_size=4096"),
        ("-o cluster_size=4096", "-o cluster_size=2M"),
    ] {
        let scratch = Scratch::new("commit-load");
        if !overlay(&scratch, base, image) {
            return;
        }
        let wanted = load(&scratch, &mut Rig::at(&scratch.path("image")));
        let found = content(&scratch, "qcow2", "image");
        let firsts: Vec<u8> = found.chunks(4096).map(|block| block[0]).collect();
        let differ = (0..wanted.len()).filter(|at| wanted[*at] != 0 && wanted[*at] != firsts[*at]);
        assert_eq!(differ.collect::<Vec<_>>(), [], "{base}");
        assert!(
            found
                .chunks(4096)
                .zip(&wanted)
                .all(|(block, wanted)| { *wanted == 0 || block.iter().all(|byte| byte == wanted) })
        );
        check(&scratch, &scratch.path("image"));
        let base_format = if base == "raw" { "raw" } else { "qcow2" };
        if base_format == "qcow2" {
            check(&scratch, &scratch.path("base"));
        }
    }
}

/// Keeps requests under way, of which each is checked, while the image is committed again and again. Returns what each
/// block has, 0 if it was not written.
fn load(scratch: &Scratch, rig: &mut Rig) -> Vec<u8> {
    let mut generation = vec![0u8; (SIZE / 4096) as usize];
    let mut chance = Chance::new(7, 7);
    let (ask, asked) = std::sync::mpsc::channel::<()>();
    let (answer, answered) = std::sync::mpsc::channel::<()>();
    let (copy, to_copy) = std::sync::mpsc::channel::<std::ops::Range<u64>>();
    let (copied, was_copied) = std::sync::mpsc::channel::<()>();
    let device = rig.device.clone();
    let path = scratch.path("image");
    std::thread::scope(|scope| {
        let commits = scope.spawn(move || {
            let replace = |wanted| {
                device.replace(&[(DiskId(0), wanted)], &|| {
                    ask.send(()).unwrap();
                    answered.recv().map_err(std::io::Error::other)
                })
            };
            for _ in 0..4 {
                std::thread::sleep(std::time::Duration::from_millis(20));
                replace(Replacement::BeginCommit).unwrap();
                for _ in 0..2 {
                    let (mut at, mut all) = (0, Vec::new());
                    device.left(DiskId(0), 0, SIZE, 10_000, &mut all).unwrap();
                    for extent in all {
                        let end = at + extent.len;
                        while !extent.zero && at < end {
                            let part = at..end.min(at + (256 << 10));
                            at = part.end;
                            copy.send(part).unwrap();
                            was_copied.recv().unwrap();
                        }
                        at = end;
                    }
                    replace(Replacement::SettleCommit(GivenUp::default())).unwrap();
                }
                replace(Replacement::Commit).unwrap();
                assert!(std::fs::metadata(&path).unwrap().len() < 16 << 20);
            }
        });
        let mut memory: Vec<Mapping> = (0..DEPTH).map(|_| Mapping::new(4096).unwrap()).collect();
        let mut left = vec![None; DEPTH as usize];
        let mut done = Vec::new();
        let mut has_task = false;
        while !commits.is_finished() || left.iter().any(Option::is_some) {
            for tag in 0..DEPTH as usize - 1 {
                if left[tag].is_some() || commits.is_finished() {
                    continue;
                }
                let block = chance.bits() as usize % generation.len();
                if left.iter().flatten().any(|(other, _)| *other == block) {
                    continue;
                }
                let is_write = !chance.bits().is_multiple_of(3);
                if is_write {
                    generation[block] = generation[block].wrapping_add(1).max(1);
                    memory[tag].bytes_mut().fill(generation[block]);
                }
                let op = if is_write { Op::Write } else { Op::Read };
                let bytes = lend(memory[tag].bytes_mut());
                let rq = request_with(op, Flags::NONE, 0, block as u64 * 4096, &[bytes]);
                match rig.hctx.issue(&rq, cookie(tag as u32), true, Instant(0)) {
                    Issued::Queued => left[tag] = Some((block, is_write)),
                    Issued::Done(status) => assert_eq!(status, Status::Ok),
                    _ => panic!("there is room"),
                }
            }
            if asked.try_recv().is_ok() {
                rig.hctx.refresh_disks().unwrap();
                answer.send(()).unwrap();
            }
            if !has_task && let Ok(part) = to_copy.try_recv() {
                let rq = flagged(Op::Read, Flags::TASK, part.start, part.end - part.start);
                let issued = rig.hctx.issue(&rq, cookie(DEPTH - 1), true, Instant(0));
                assert_eq!(issued, Issued::Queued);
                has_task = true;
            }
            rig.reap(&mut done);
            for end in done.drain(..) {
                assert_eq!(end.status, Status::Ok);
                let tag = end.cookie.tag().index();
                if tag == DEPTH as usize - 1 {
                    has_task = false;
                    copied.send(()).unwrap();
                    continue;
                }
                let (block, is_write) = left[tag].take().unwrap();
                let found = &*memory[tag].bytes_mut();
                let wanted = generation[block];
                assert!(
                    wanted == 0 || found.iter().all(|byte| *byte == wanted),
                    "block {block}: write {is_write}"
                );
            }
        }
    });
    rig.flush();
    generation
}
