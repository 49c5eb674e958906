//! Tests that mapped disks, on each other and on several queues, keep their data: random operations
//! through attached threads, compared with a plain array.

mod sys;

use blkmq_config::{Config, DiskSpec, Plan, plan};
use blkmq_core::bio::{Bio, Data, Flags, Op, Status};
use blkmq_core::ids::DiskId;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_core::time::Nanos;
use blkmq_host::disk::MAPPED;
use blkmq_host::{Attached, Disk, Engine, EngineConfig, Error, QueueId};
use blkmq_testkit::Random;

fn disk(text: &str) -> DiskSpec {
    DiskSpec::parse(&format!("{text},group=/tenant")).unwrap()
}

fn ram(name: &str, size: u64) -> DiskSpec {
    disk(&format!("name={name},ram={size}"))
}

fn linear(name: &str, members: &str) -> DiskSpec {
    disk(&format!("name={name},linear={members}"))
}

fn striped(name: &str, members: &str, chunk: &str) -> DiskSpec {
    disk(&format!("name={name},striped={members},chunk={chunk}"))
}

fn planned(disks: Vec<DiskSpec>) -> Plan {
    let config = Config {
        disks,
        ..Config::default()
    };
    plan(&config).unwrap()
}

fn start(disks: Vec<DiskSpec>, elevator: &'static ElevatorType) -> Engine {
    let mut plan = planned(disks);
    for queue in &mut plan.queues {
        queue.elevator = elevator;
        queue.requests_per_reactor = 64;
    }
    let config = EngineConfig {
        attached_max: 2,
        queues: plan.queues,
        mapped: plan.mapped,
        ..EngineConfig::default()
    };
    Engine::start(config).unwrap()
}

/// Runs bios at the same time and returns them, in the order of their cookies, after their ends.
fn run(attached: &mut Attached, queue: QueueId, bios: Vec<Bio>) -> Vec<Bio> {
    let count = bios.len();
    let mut ended: Vec<Bio> = Vec::new();
    let mut out = Vec::new();
    for bio in bios {
        let mut next = Some(bio);
        while let Some(bio) = next.take() {
            next = attached.submit(queue, bio).err();
            if next.is_some() {
                assert!(attached.outstanding() > 0, "refused with nothing under way");
                attached.wait(&mut out, Some(Nanos::from_secs(30)));
                ended.append(&mut out);
            }
        }
    }
    while ended.len() < count {
        assert!(
            attached.wait(&mut out, Some(Nanos::from_secs(30))) > 0,
            "nothing ends"
        );
        ended.append(&mut out);
    }
    ended.sort_by_key(|bio| bio.cookie);
    ended
}

/// One operation of a batch, on a range that no other operation of the batch has.
fn cut(chance: &mut Random, disk: &Disk, op: Op, offset: usize, memory: &mut [u8], cookie: u64) -> Bio {
    let len = memory.len();
    let data = match (op, chance.index(2)) {
        (Op::Read | Op::Write, 0) => Data::Flat(sys::lend(memory)),
        (Op::Read | Op::Write, _) => {
            let (head, tail) = memory.split_at_mut(1 + chance.index(len - 1));
            Data::List([sys::lend(head), sys::lend(tail)].into())
        }
        _ => Data::None,
    };
    let flags = [Flags::NONE, Flags::FUA, Flags::PREFLUSH][chance.index(3)];
    Bio {
        op,
        disk: disk.id,
        offset: offset as u64,
        len: len as u64,
        flags: if op == Op::Write { flags } else { Flags::NONE },
        group: disk.group,
        data,
        cookie,
        ..Bio::default()
    }
}

#[test]
fn disks_on_disks_on_several_queues_keep_their_data() {
    for elevator in sched::BUILT_IN {
        let engine = start(
            vec![
                linear("top", "stripe:64K+e:512:1000K+stripe:0:64K"),
                striped("stripe", "a+b+c:1M+halves", "8K"),
                linear("halves", "d:512K:512K+d:0:512K"),
                ram("a", 1 << 20),
                ram("b", 1 << 20),
                ram("c", 2 << 20),
                ram("d", 1 << 20),
                ram("e", 1 << 20),
            ],
            elevator,
        );
        let top = engine.disk("top").unwrap().clone();
        let size = (4 << 20) + (1000 << 10);
        assert_eq!(top.size, size as u64);
        let mut attached = engine.attach().unwrap();
        let (mut plain, mut chance) = (vec![0u8; size], Random::new(9));
        for round in 0..60 {
            let op = [Op::Write, Op::Read, Op::WriteZeroes, Op::Write, Op::Read][round % 5];
            let start = chance.index(size / 512) * 512;
            let len = (1 << 20).min(size - start);
            let mut memory: Vec<u8> = (0..len).map(|at| (at / 512 * 7 + round) as u8).collect();
            let (mut rest, mut at) = (&mut memory[..], start);
            let mut bios = Vec::new();
            while !rest.is_empty() && bios.len() < 40 {
                let len = ((1 + chance.index(400)) * 512).min(rest.len());
                let (part, more) = rest.split_at_mut(len);
                bios.push(cut(&mut chance, &top, op, at, part, bios.len() as u64));
                (rest, at) = (more, at + len);
            }
            let sent: Vec<(u64, u64)> = bios.iter().map(|bio| (bio.offset, bio.len)).collect();
            let ended = run(&mut attached, top.queue, bios);
            let back: Vec<(u64, u64)> = ended.iter().map(|bio| (bio.offset, bio.len)).collect();
            assert_eq!(back, sent);
            assert!(
                ended.iter().all(|bio| bio.status.is_ok() && bio.disk == top.id),
                "{op:?}"
            );
            let memory = &memory[..at - start];
            match op {
                Op::Write => plain[start..at].copy_from_slice(memory),
                Op::WriteZeroes => plain[start..at].fill(0),
                _ => assert!(*memory == plain[start..at], "round {round}, {elevator}"),
            }
        }
        let mut whole = vec![1u8; size];
        let read = cut(&mut chance, &top, Op::Read, 0, &mut whole, 0);
        assert!(run(&mut attached, top.queue, vec![read])[0].status.is_ok());
        assert!(whole == plain);
        let discard = cut(&mut chance, &top, Op::Discard, 0, &mut whole, 0);
        let flush = Bio {
            op: Op::Flush,
            disk: top.id,
            ..Bio::default()
        };
        let ended = run(&mut attached, top.queue, vec![discard, flush]);
        assert!(ended.iter().all(|bio| bio.status.is_ok()));
        let mut extents = Vec::new();
        top.extents(0, top.size, 1000, &mut extents).unwrap();
        // A discard does not free a page of which it covers only a part.
        let data: u64 = extents
            .iter()
            .filter(|extent| !extent.hole)
            .map(|extent| extent.len)
            .sum();
        assert!(data <= 2 * 4096, "{extents:?}");
        drop(attached);
        engine.shutdown(Nanos::from_secs(10)).unwrap();
    }
}

#[test]
fn error_of_one_member_is_that_of_the_bio_and_the_other_members_go_on() {
    let engine = start(
        vec![
            disk("name=a,null=1M"),
            disk("name=b,null=1M,bad=64K-128K"),
            striped("s", "a+b", "64K"),
        ],
        sched::NONE,
    );
    let disk = engine.disk("s").unwrap().clone();
    let mut attached = engine.attach().unwrap();
    let read = |chunk: u64, chunks: u64| Bio {
        disk: disk.id,
        offset: chunk << 16,
        len: chunks << 16,
        cookie: chunk,
        ..Bio::default()
    };
    // The second chunk of `b` is the fourth in total.
    let bios = vec![read(0, 1), read(1, 2), read(3, 1), read(4, 8), read(12, 4)];
    // One at a time: neighbours on a member may be merged, and fail together.
    let mut run_one = |bio| run(&mut attached, disk.queue, vec![bio])[0].status;
    let status: Vec<Status> = bios.into_iter().map(&mut run_one).collect();
    assert_eq!(
        status,
        [Status::Ok, Status::Ok, Status::Medium, Status::Ok, Status::Ok]
    );
    assert_eq!(run_one(read(0, 32)), Status::Medium);
}

#[test]
fn mapped_disks_number_is_answered_with_where_to_look() {
    let null = disk("name=a,null=1M");
    let engine = start(vec![null, linear("l", "a")], sched::NONE);
    let disk = engine.disk("l").unwrap().clone();
    let control = engine.control();
    assert_eq!(disk.queue, MAPPED);
    let error = control.set_depth(disk.queue, 3).unwrap_err();
    assert!(
        error
            .to_string()
            .contains("there is no queue 65535, there are 1: a mapped disk has none of its own"),
        "{error}"
    );
    assert!(matches!(
        control.freeze(disk.queue),
        Err(Error::NoQueueNumber { .. })
    ));
    assert!(control.group(disk.queue, "/").is_err() && control.tunables(disk.queue).is_err());
    let error = control
        .remove_group(QueueId(0), "/tenant")
        .unwrap_err()
        .to_string();
    assert!(error.contains("is accounted to it"), "{error}");
    let mut attached = engine.attach().unwrap();
    for (queue, disk) in [(1, 1), (2, 0), (2, 7)] {
        let bio = Bio {
            disk: DiskId(disk),
            len: 512,
            ..Bio::default()
        };
        let ended = run(&mut attached, QueueId(queue), vec![bio]);
        // A number beyond those of the queues means the mapped disks.
        let wanted = if disk == 0 { Status::Ok } else { Status::Invalid };
        assert_eq!(ended[0].status, wanted, "queue {queue}, disk {disk}");
    }
}

#[test]
fn members_work_beside_each_other_while_one_queue_is_frozen() {
    let null = |name| disk(&format!("name={name},null=1M"));
    let disks = vec![null("a"), null("b"), striped("s", "a+b", "64K")];
    let engine = start(disks, sched::NONE);
    let disk = engine.disk("s").unwrap().clone();
    let mut attached = engine.attach().unwrap();
    let frozen = engine.control().freeze(QueueId(0)).unwrap();
    let read = |chunk: u64, chunks: u64| Bio {
        disk: disk.id,
        offset: chunk << 16,
        len: chunks << 16,
        cookie: chunk,
        ..Bio::default()
    };
    attached.submit(disk.queue, read(0, 2)).unwrap();
    attached.submit(disk.queue, read(1, 1)).unwrap();
    let mut out = Vec::new();
    attached.wait(&mut out, Some(Nanos::from_secs(30)));
    assert_eq!(out.iter().map(|bio| bio.cookie).collect::<Vec<_>>(), [1]);
    assert_eq!(attached.poll(&mut out), 0);
    drop(frozen);
    out.clear();
    attached.wait(&mut out, Some(Nanos::from_secs(30)));
    assert_eq!(out.iter().map(|bio| bio.cookie).collect::<Vec<_>>(), [0]);
}
