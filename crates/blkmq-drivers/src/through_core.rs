//! Tests of drivers behind the whole engine: merged and cut requests keep their data, and every bio
//! completes once despite faults. Tests only; time is virtual where the driver has no ring.

use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::ids::{DiskId, GroupId, HctxId};
use blkmq_core::local::LocalQueue;
use blkmq_core::queue::{DiskConfig, Effects, Queue, QueueConfig};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::{Instant, Nanos};
use blkmq_host::device::Device;
use blkmq_host::ring::{RingConfig, RingHandle};

use super::chance::Chance;
use super::file::{Direct, FileConfig, FileDevice, FileDisk};
use super::null::{NullConfig, NullDevice};
use super::ram::{RamConfig, RamDevice};
use super::testing::{lend, scratch_file};

/// A queue of one reactor with one disk.
struct Rig {
    queue: LocalQueue,
    ring: RingHandle,
    fx: Effects,
    now: Instant,
    /// The driver does without the ring, so that time can jump.
    is_virtual: bool,
}

fn rig(device: &dyn Device, size: u64, elevator: &'static ElevatorType) -> Rig {
    let ring = RingHandle::new(RingConfig::default()).expect("io_uring is available");
    let mut config = QueueConfig::new("q", 1);
    config.limits = device.limits();
    config.elevator = elevator;
    config.timeout = Nanos::from_millis(100);
    config.disks.push(DiskConfig {
        name: "d".into(),
        base: 0,
        size,
        read_only: false,
        logical_block: config.limits.logical_block,
    });
    let (_, mut handles) = Queue::new(config).unwrap();
    let driver = device.open_hctx(&ring, HctxId(0)).unwrap();
    Rig {
        queue: handles.remove(0).attach(Some(driver)),
        is_virtual: !ring_is_used(&ring),
        ring,
        fx: Effects::default(),
        now: Instant(1),
    }
}

/// Returns whether the driver has opened the ring's first client.
fn ring_is_used(ring: &RingHandle) -> bool {
    ring.open_client().id() > 0
}

impl Rig {
    /// Submits a batch and runs until all of it has ended. Returns the bios in the order of their cookies.
    fn run_all(&mut self, bios: Vec<Bio>) -> Vec<Bio> {
        let count = bios.len();
        let mut waiting = bios.into_iter();
        let mut next = waiting.next();
        let mut ended: Vec<Bio> = Vec::new();
        while ended.len() < count {
            while let Some(bio) = next.take() {
                match self.queue.submit(bio, self.now, &mut self.fx) {
                    Ok(()) => next = waiting.next(),
                    Err(bio) => {
                        next = Some(bio);
                        break;
                    }
                }
            }
            self.queue.unplug(self.now, &mut self.fx);
            ended.append(&mut self.fx.ended);
            if ended.len() < count {
                self.pass_time();
                self.queue.run(self.now, &mut self.fx);
                ended.append(&mut self.fx.ended);
            }
        }
        assert_eq!(self.queue.outstanding(), 0);
        ended.sort_by_key(|bio| bio.cookie);
        ended
    }

    /// Advances time to the queue's next call; with a ring, time stands still and the ring is
    /// waited for.
    fn pass_time(&mut self) {
        if self.is_virtual {
            let due = self.queue.next_wakeup().expect("something is under way");
            self.now = self.now.max(due);
        } else {
            self.ring.wait(Some(Nanos::from_millis(100)));
            self.ring.reap();
        }
    }
}

fn bio(op: Op, offset: u64, len: u64, cookie: u64, data: Data) -> Bio {
    Bio {
        op,
        offset,
        len,
        cookie,
        data,
        ..Bio::default()
    }
}

/// Cuts a range at random into neighbours, shuffles them, and runs them as one batch.
fn run_in_pieces(rig: &mut Rig, chance: &mut Chance, op: Op, offset: u64, memory: &mut [u8], block: usize) {
    let mut bios = Vec::new();
    let (mut rest, mut at) = (memory, offset);
    while !rest.is_empty() {
        let len = (chance.bits() as usize % 8 + 1) * block;
        let (now, later) = rest.split_at_mut(len.min(rest.len()));
        let (at_now, len) = (at, now.len() as u64);
        let data = if chance.bits() & 1 == 0 {
            Data::Flat(lend(now))
        } else {
            let (head, tail) = now.split_at_mut(block / 2);
            Data::List([lend(head), lend(tail)].into())
        };
        bios.push(bio(op, at_now, len, bios.len() as u64, data));
        (rest, at) = (later, at + len);
    }
    for i in (1..bios.len()).rev() {
        bios.swap(i, chance.bits() as usize % (i + 1));
    }
    let ended = rig.run_all(bios);
    assert!(ended.iter().all(|bio| bio.status.is_ok()), "{op:?} at {offset}");
}

/// Writes and reads a disk in merged batches and compares it with a plain array. Returns how many bios were merged.
fn compare_with_plain(device: &dyn Device, size: usize, elevator: &'static ElevatorType) -> u64 {
    let block = device.limits().logical_block as usize;
    let mut rig = rig(device, size as u64, elevator);
    let mut plain = vec![0u8; size];
    let mut chance = Chance::new(23, 0);
    for step in 0..60u64 {
        let start = chance.bits() as usize % (size / block) * block;
        let len = ((chance.bits() as usize % 64 + 1) * block).min(size - start);
        // Every third batch has memory at an odd address, so that merged requests are bounced, too.
        let odd = usize::from(step % 3 == 0);
        let mut memory: Vec<u8> = (0..len + odd)
            .map(|i| (i as u8) ^ (step as u8).wrapping_mul(77))
            .collect();
        let memory = &mut memory[odd..];
        if step % 2 == 0 {
            plain[start..start + len].copy_from_slice(memory);
            run_in_pieces(&mut rig, &mut chance, Op::Write, start as u64, memory, block);
        } else {
            run_in_pieces(&mut rig, &mut chance, Op::Read, start as u64, memory, block);
            assert!(memory == &plain[start..start + len], "step {step}");
        }
    }
    let flush = rig.run_all(vec![bio(Op::Flush, 0, 0, 0, Data::None)]);
    assert_eq!(flush[0].status, Status::Ok);
    let mut seen = vec![1u8; size];
    run_in_pieces(&mut rig, &mut chance, Op::Read, 0, &mut seen, block);
    assert!(seen == plain);
    let stats = rig.queue.queue().group_stats(GroupId(0));
    stats.total().merged
}

#[test]
fn of_a_merged_read_beyond_a_files_end_what_lies_before_it_ends_well() {
    let path = scratch_file("cut_short", 1 << 20);
    let config = FileConfig {
        path: path.to_path_buf(),
        direct: Direct::Off,
        ..FileConfig::default()
    };
    let device = FileDevice::new(vec![FileDisk::open(&config).unwrap()], 128).unwrap();
    let mut rig = rig(&device, 1 << 20, sched::MQ_DEADLINE);
    // Somebody else has made it shorter meanwhile: two blocks and a part of the third are left.
    std::fs::write(&*path, vec![7u8; 8192 + 512]).unwrap();
    let mut memory = vec![0u8; 5 * 4096];
    let pieces = memory.chunks_mut(4096).zip(0..);
    let reads = pieces.map(|(piece, at)| bio(Op::Read, at * 4096, 4096, at, Data::Flat(lend(piece))));
    let ended = rig.run_all(reads.collect());
    let statuses: Vec<Status> = ended.iter().map(|bio| bio.status).collect();
    assert_eq!(
        statuses,
        [Status::Ok, Status::Ok, Status::Io, Status::Io, Status::Io]
    );
    assert_eq!(rig.queue.queue().group_stats(GroupId(0)).total().merged, 4);
    assert!(memory[..8192].iter().all(|byte| *byte == 7));
}

#[test]
fn merged_requests_keep_their_data_on_a_file() {
    for direct in [Direct::Auto, Direct::Off] {
        for elevator in sched::BUILT_IN {
            let path = scratch_file(&format!("merged_{direct:?}_{elevator}"), 1 << 20);
            let config = FileConfig {
                path: path.to_path_buf(),
                direct,
                ..FileConfig::default()
            };
            let device = FileDevice::new(vec![FileDisk::open(&config).unwrap()], 128).unwrap();
            let merged = compare_with_plain(&device, 1 << 20, elevator);
            assert!(merged > 50, "{merged} merged: the test tests nothing");
        }
    }
}

#[test]
fn merged_requests_keep_their_data_in_memory() {
    for elevator in sched::BUILT_IN {
        let ram = RamDevice::new(&RamConfig::default(), &[1 << 20]);
        assert!(compare_with_plain(&ram, 1 << 20, elevator) > 50);
        let cached = NullConfig {
            memory: true,
            cache: true,
            latency: Nanos::from_micros(50),
            spread: Nanos::from_micros(20),
            ..NullConfig::default()
        };
        let null = NullDevice::new(cached, &[1 << 20]).unwrap();
        assert!(compare_with_plain(&null, 1 << 20, elevator) > 50);
    }
}

#[test]
fn drive_without_fua_has_its_data_durable_through_flushes() {
    let config = NullConfig {
        memory: true,
        cache: true,
        fua: false,
        ..NullConfig::default()
    };
    let device = NullDevice::new(config, &[1 << 20]).unwrap();
    let mut rig = rig(&device, 1 << 20, sched::NONE);
    let mut memory = [vec![1u8; 4096], vec![2u8; 4096]];
    let [durable, volatile] = &mut memory;
    let durable = Bio {
        flags: Flags::FUA,
        ..bio(Op::Write, 0, 4096, 0, Data::Flat(lend(durable)))
    };
    assert!(rig.run_all(vec![durable])[0].status.is_ok());
    rig.run_all(vec![bio(Op::Write, 4096, 4096, 0, Data::Flat(lend(volatile)))]);
    device.lose_power();
    let mut seen = vec![9u8; 8192];
    rig.run_all(vec![bio(Op::Read, 0, 8192, 0, Data::Flat(lend(&mut seen)))]);
    assert_eq!((seen[0], seen[4095], seen[4096]), (1, 1, 0));
}

/// Runs reads on a faulty null drive and counts those that end with `status`; all others must be well.
fn count_ends(keys: &[(&str, &str)], elevator: &'static ElevatorType, status: Status) -> usize {
    let mut config = NullConfig::default();
    for (key, value) in keys {
        config.set(key, value).unwrap();
    }
    let device = NullDevice::new(config, &[1 << 30]).unwrap();
    let mut rig = rig(&device, 1 << 30, elevator);
    let reads = (0..2000)
        .map(|i| bio(Op::Read, i * 8192, 4096, i, Data::None))
        .collect();
    let ended = rig.run_all(reads);
    let of_status = ended.iter().filter(|bio| bio.status == status).count();
    let well = ended.iter().filter(|bio| bio.status.is_ok()).count();
    assert!(well + of_status == 2000 || status == Status::Ok, "{keys:?}");
    assert!(
        ended.iter().enumerate().all(|(i, bio)| bio.cookie == i as u64),
        "each bio ends once"
    );
    of_status
}

#[test]
fn tenth_requeued_all_end_well_with_every_elevator_and_completion() {
    for elevator in sched::BUILT_IN {
        for completion in ["inline", "deferred", "timer"] {
            let keys = [("requeue_rate", "10%"), ("completion", completion)];
            assert_eq!(
                count_ends(&keys, elevator, Status::Ok),
                2000,
                "{elevator} {completion}"
            );
        }
    }
}

#[test]
fn third_refused_for_want_of_a_resource_all_end_well() {
    for elevator in sched::BUILT_IN {
        for completion in ["inline", "deferred", "timer"] {
            let keys = [("resource_rate", "33%"), ("completion", completion)];
            assert_eq!(
                count_ends(&keys, elevator, Status::Ok),
                2000,
                "{elevator} {completion}"
            );
        }
    }
}

#[test]
fn half_swallowed_half_time_out_and_no_more() {
    for elevator in sched::BUILT_IN {
        let timed_out = count_ends(&[("timeout_rate", "50%")], elevator, Status::Timeout);
        assert!(
            (850..1150).contains(&timed_out),
            "{timed_out} of 2000 with {elevator}"
        );
    }
}

#[test]
fn bad_range_fails_the_bios_that_touch_it() {
    let bad = count_ends(
        &[("bad", "8M-12M"), ("latency", "20us")],
        sched::NONE,
        Status::Medium,
    );
    assert_eq!(bad, (4 << 20) / 8192);
}

#[test]
fn discard_of_a_whole_large_disk_is_done_in_slices() {
    let size = 1 << 40;
    let device = RamDevice::new(&RamConfig::default(), &[size]);
    let mut rig = rig(&device, size, sched::NONE);
    let mut ones = vec![1; 4096];
    for offset in [0, size / 2, size - 4096] {
        rig.run_all(vec![bio(Op::Write, offset, 4096, 0, Data::Flat(lend(&mut ones)))]);
    }
    assert_eq!(device.present_bytes(DiskId(0)), 3 * 4096);
    rig.queue
        .submit(bio(Op::Discard, 0, size, 7, Data::None), rig.now, &mut rig.fx)
        .unwrap();
    rig.queue.unplug(rig.now, &mut rig.fx);
    let mut turns = 1;
    while rig.fx.ended.is_empty() {
        assert_eq!(
            rig.queue.next_wakeup(),
            Some(Instant(0)),
            "the rest is due at once"
        );
        rig.queue.run(rig.now, &mut rig.fx);
        turns += 1;
    }
    let ended = rig.fx.ended.pop().unwrap();
    assert_eq!((ended.cookie, ended.status, ended.len), (7, Status::Ok, size));
    assert_eq!(device.present_bytes(DiskId(0)), 0);
    assert!(
        turns >= 500,
        "{turns} turns of up to {} MiB each",
        (size / turns) >> 20
    );
}

#[test]
fn discard_of_a_huge_null_disk_is_one_request() {
    let size = 900 << 40;
    let device = NullDevice::new(NullConfig::default(), &[size]).unwrap();
    let mut rig = rig(&device, size, sched::NONE);
    for op in [Op::Discard, Op::WriteZeroes] {
        rig.queue
            .submit(bio(op, 0, size, 1, Data::None), rig.now, &mut rig.fx)
            .unwrap();
        rig.queue.unplug(rig.now, &mut rig.fx);
        let ended = rig.fx.ended.pop().expect("it ends at once");
        assert_eq!((ended.status, ended.len), (Status::Ok, size));
    }
}
