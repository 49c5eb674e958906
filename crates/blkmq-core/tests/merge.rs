//! Tests merging against its definition: whether two requests fit, and what the merged request is.

use blkmq_core::bio::{Bio, Class, Flags, Op, Prio};
use blkmq_core::ids::{DiskId, GroupId, ReactorId};
use blkmq_core::limits::Limits;
use blkmq_core::merge::{Fit, fit, try_merge};
use blkmq_core::request::Request;
use proptest::prelude::*;

/// Two bios that are often contiguous and often of one kind.
fn pairs() -> impl Strategy<Value = (Bio, Bio)> {
    (bios(), bios(), any::<bool>()).prop_map(|(first, mut second, alike)| {
        if alike {
            (second.op, second.flags, second.prio) = (first.op, first.flags, first.prio);
            (second.group, second.disk) = (first.group, first.disk);
        }
        (first, second)
    })
}

fn bios() -> impl Strategy<Value = Bio> {
    let ops = vec![Op::Read, Op::Write, Op::Discard, Op::WriteZeroes, Op::Flush];
    let flags = vec![
        Flags::NONE,
        Flags::FUA,
        Flags::PREFLUSH,
        Flags::NO_MERGE,
        Flags::NO_UNMAP,
    ];
    let kind = (prop::sample::select(ops), prop::sample::select(flags));
    let prio = (prop::sample::select(vec![Class::Rt, Class::Be]), 3..5u8);
    let range = (0..2u32, 0..2u32, 0..12u64, 1..5u64);
    (kind, prio, range).prop_map(|((op, flags), (class, level), (disk, group, block, blocks))| {
        let (block, blocks) = if op == Op::Flush { (0, 0) } else { (block, blocks) };
        Bio {
            op,
            flags,
            prio: Prio { class, level },
            group: GroupId(group),
            disk: DiskId(disk),
            offset: block * BLOCK,
            len: blocks * BLOCK,
            ..Bio::default()
        }
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    let boundary = prop::sample::select(vec![0, 4, 8]);
    let all = (1..9u32, 1..4u16, boundary, 1..9u64, any::<bool>());
    all.prop_map(|(transfer, segments, boundary, discard, written)| Limits {
        transfer_max: transfer * BLOCK as u32,
        segments_max: segments,
        boundary: boundary * BLOCK,
        discard_max: discard * BLOCK,
        zeroes_max: 4 * BLOCK,
        zeroes_are_written: written,
        ..Limits::default()
    })
}

fn request(bio: &Bio) -> Box<Request> {
    Request::for_test(ReactorId(0), bio.clone(), base(bio))
}

fn base(bio: &Bio) -> u64 {
    u64::from(bio.disk.0) * DISK
}

/// The definition: whether `right` may directly follow `left`.
fn joins(left: &Bio, right: &Bio, limits: &Limits) -> bool {
    let len = left.len + right.len;
    let whole = left
        .flags
        .has_any(Flags::FUA.with(Flags::PREFLUSH).with(Flags::NO_MERGE));
    if left.op == Op::Flush || left.end() != right.offset {
        return false;
    }
    let start = base(left) + left.offset;
    let crosses = |boundary: u64| boundary != 0 && start / boundary != (start + len - 1) / boundary;
    let must_write = limits.zeroes_are_written || left.flags.has(Flags::NO_UNMAP);
    let is_written = must_write && !left.flags.has(Flags::FAST_ONLY);
    let within = match left.op {
        Op::Discard => len <= limits.discard_max,
        Op::WriteZeroes if is_written => len <= limits.zeroes_max && len <= limits.transfer_max.into(),
        Op::WriteZeroes => len <= limits.zeroes_max,
        _ => len <= limits.transfer_max.into() && limits.segments_max >= 2 && !crosses(limits.boundary),
    };
    (left.op, left.disk, left.group, left.flags) == (right.op, right.disk, right.group, right.flags)
        && left.prio == right.prio
        && !whole
        && within
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn two_requests_fit_exactly_when_the_definition_says_so((a, b) in pairs(), limits in limits()) {
        let expected = if joins(&a, &b, &limits) {
            Some(Fit::Back)
        } else {
            joins(&b, &a, &limits).then_some(Fit::Front)
        };
        prop_assert_eq!(fit(&request(&a), &request(&b), &limits), expected);
    }

    #[test]
    fn back_merge_is_possible_where_the_front_merge_of_the_other_is((a, b) in pairs(), limits in limits()) {
        let turned = fit(&request(&b), &request(&a), &limits).map(|fit| match fit {
            Fit::Back => Fit::Front,
            Fit::Front => Fit::Back,
        });
        prop_assert_eq!(fit(&request(&a), &request(&b), &limits), turned);
    }

    #[test]
    fn merged_request_is_the_sum_and_a_refused_one_comes_back((a, b) in pairs(), limits in limits()) {
        let mut queued = request(&a);
        let (first, second) = (request(&a), request(&b));
        match try_merge(&mut queued, request(&b), &limits) {
            Ok(fit) => {
                let begin = if fit == Fit::Back { &first } else { &second };
                prop_assert_eq!((queued.position(), queued.offset()), (begin.position(), begin.offset()));
                prop_assert_eq!(queued.len(), a.len + b.len);
                prop_assert_eq!((queued.bio_count(), queued.segment_count()), (2, 2));
            }
            Err(back) => {
                prop_assert_eq!((back.position(), back.len()), (second.position(), b.len));
                prop_assert_eq!((queued.len(), queued.bio_count()), (a.len, 1));
            }
        }
    }
}

const BLOCK: u64 = 4096;
/// The disks are contiguous: the second begins where bios of the first can end.
const DISK: u64 = 12 * BLOCK;
