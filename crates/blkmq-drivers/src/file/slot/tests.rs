//! What the results of steps lead to, without a ring.

use super::*;
use crate::file::disk::{Alignment, Backing};
use crate::testing::scratch_file;

fn disk(name: &str, is_block_device: bool) -> FileDisk {
    let path = scratch_file(name, 1 << 20);
    let device = if is_block_device {
        Backing::Block(1)
    } else {
        Backing::Filesystem(1)
    };
    let file = std::fs::File::open(&*path).unwrap();
    FileDisk::new(file, path.to_path_buf(), 1 << 20, 512, device)
}

fn slot(op: Op, flags: Flags) -> Slot {
    Slot {
        op,
        flags,
        len: 65536,
        ..Slot::IDLE
    }
}

#[test]
fn short_transfer_goes_on_from_the_last_whole_block() {
    let mut disk = disk("short", false);
    disk.set_alignment(Some(Alignment {
        memory: 512,
        range: 512,
    }));
    let mut slot = slot(Op::Read, Flags::NONE);
    assert_eq!(slot.start(&disk), None);
    assert_eq!(slot.take_result(4096 + 100, &disk, NOW), Next::Submit(4096));
    assert_eq!(slot.take_result(-libc::EINTR, &disk, NOW), Next::Submit(0));
    assert_eq!(slot.take_result(65536 - 4096, &disk, NOW), Next::End(Status::Ok));
    assert_eq!(disk.errors(), 0);
}

#[test]
fn discard_of_a_block_device_is_narrowed_to_whole_sectors() {
    let mut disk = disk("narrow", true);
    disk.set_alignment(Some(Alignment {
        memory: 4096,
        range: 4096,
    }));
    for (offset, len, narrowed) in [
        (0, 4096, Some((0, 4096))),
        (512, 512, None),
        (512, 7680, Some((4096, 4096))),
        (512, 8191, Some((4096, 4096))),
        (4095, 4097, Some((4096, 4096))),
        (1, 4096, None),
    ] {
        let mut slot = Slot {
            offset,
            len,
            ..slot(Op::Discard, Flags::NONE)
        };
        match narrowed {
            None => assert_eq!(slot.start(&disk), Some(Status::Ok), "{offset} {len}"),
            Some(range) => {
                assert_eq!(slot.start(&disk), None, "{offset} {len}");
                assert_eq!((slot.offset, slot.len), range, "{offset} {len}");
            }
        }
    }
}

#[test]
fn end_of_the_file_is_an_error() {
    let disk = disk("eof", false);
    let mut slot = slot(Op::Read, Flags::NONE);
    slot.start(&disk);
    assert_eq!(slot.take_result(1000, &disk, NOW), Next::Submit(1000));
    assert_eq!(slot.take_result(0, &disk, NOW), Next::End(Status::Io));
    assert_eq!(disk.errors(), 1);
}

#[test]
fn interruptions_are_retried_but_not_for_ever() {
    let disk = disk("retries", false);
    let mut slot = slot(Op::Write, Flags::NONE);
    slot.start(&disk);
    for _ in 0..RETRIES_MAX {
        assert_eq!(slot.take_result(-libc::EINTR, &disk, NOW), Next::Submit(0));
        assert!(!slot.is_paused, "at once");
    }
    assert_eq!(slot.take_result(-libc::EINTR, &disk, NOW), Next::End(Status::Io));
}

#[test]
fn eagain_is_retried_after_pauses_of_seconds_in_all_and_then_an_error() {
    for op in [Op::Write, Op::Flush, Op::Discard] {
        let disk = disk(&format!("pauses-{op:?}"), false);
        let mut slot = slot(op, Flags::NONE);
        slot.start(&disk);
        let step = slot.step;
        let mut waited_ms = 0;
        for _ in 0..RETRIES_MAX {
            slot.pushed(&disk, NOW);
            assert_eq!(slot.take_result(-libc::EAGAIN, &disk, NOW), Next::Submit(0));
            assert!(slot.is_paused, "{op:?}");
            slot.pushed(&disk, NOW);
            waited_ms += 1 << slot.pause();
            assert_eq!(slot.take_result(-libc::ETIME, &disk, NOW), Next::Submit(0));
            assert_eq!((slot.is_paused, slot.step), (false, step));
        }
        assert!((2000..5000).contains(&waited_ms), "{waited_ms}");
        assert_eq!(slot.take_result(-libc::EAGAIN, &disk, NOW), Next::End(Status::Io));
    }
}

#[test]
fn pause_ends_with_a_cancellation() {
    for result in [-libc::ECANCELED, -libc::ETIME] {
        let disk = disk(&format!("pause-cancelled{result}"), false);
        let mut slot = slot(Op::Write, Flags::NONE);
        slot.start(&disk);
        assert_eq!(slot.take_result(4096, &disk, NOW), Next::Submit(4096));
        assert_eq!(slot.take_result(-libc::EAGAIN, &disk, NOW), Next::Submit(0));
        slot.is_cancelled = true;
        assert_eq!(slot.take_result(result, &disk, NOW), Next::End(Status::Timeout));
        assert!(slot.keeps_what_moved(), "as without a pause");
    }
}

#[test]
fn request_that_polling_could_not_do_is_repeated_through_the_reactors_ring() {
    for (errno, is_lacking) in [(libc::EOPNOTSUPP, true), (libc::EAGAIN, false)] {
        let disk = disk(&format!("polled-{errno}"), false);
        let mut slot = slot(Op::Read, Flags::NONE);
        slot.start(&disk);
        slot.is_polled = true;
        assert_eq!(slot.take_result(4096, &disk, NOW), Next::Submit(4096));
        assert!(slot.is_polled, "the rest of a short transfer is polled, too");
        assert_eq!(slot.take_result(-errno, &disk, NOW), Next::Submit(0));
        assert!(!slot.is_polled);
        assert_eq!(disk.lacks.polling.load(Ordering::Relaxed), is_lacking);
        assert_eq!(slot.take_result(65536 - 4096, &disk, NOW), Next::End(Status::Ok));
        assert_eq!(disk.errors(), 0);
    }
}

#[test]
fn cancelled_request_is_not_repeated() {
    let disk = disk("cancelled", false);
    let mut slot = slot(Op::Read, Flags::NONE);
    slot.start(&disk);
    (slot.is_polled, slot.is_cancelled) = (true, true);
    assert_eq!(
        slot.take_result(-libc::EOPNOTSUPP, &disk, NOW),
        Next::End(Status::Timeout)
    );
}

#[test]
fn zeroing_takes_the_next_way_when_one_is_not_supported() {
    let disk = disk("ways", false);
    let mut first = slot(Op::WriteZeroes, Flags::FUA);
    assert_eq!(first.start(&disk), None);
    let mut steps = vec![first.step];
    while let Next::Submit(_) | Next::Part = first.take_result(
        match first.step {
            Step::WriteOut => 65536,
            Step::Sync => 0,
            _ => -libc::EOPNOTSUPP,
        },
        &disk,
        NOW,
    ) {
        steps.push(first.step);
    }
    assert_eq!(steps, [Step::Punch, Step::ZeroRange, Step::WriteOut, Step::Sync]);
    let mut second = slot(Op::WriteZeroes, Flags::NONE);
    second.start(&disk);
    assert_eq!(second.step, Step::WriteOut, "what was refused is not tried again");
    assert_eq!(
        slot(Op::WriteZeroes, Flags::FAST_ONLY).start(&disk),
        Some(Status::NotSupported)
    );
    assert_eq!(slot(Op::Discard, Flags::NONE).start(&disk), Some(Status::Ok));
}

#[test]
fn zeroes_that_must_stay_allocated_are_never_punched() {
    let disk = disk("no_unmap", false);
    let mut slot = slot(Op::WriteZeroes, Flags::NO_UNMAP);
    slot.start(&disk);
    assert_eq!(slot.step, Step::ZeroRange);
}

#[test]
fn block_device_is_not_asked_for_fast_zeroes_that_may_be_slow() {
    let disk = disk("device", true);
    let mut slot = slot(Op::WriteZeroes, Flags::FAST_ONLY);
    slot.start(&disk);
    assert_eq!(slot.step, Step::Punch);
    let refused = slot.take_result(-libc::EOPNOTSUPP, &disk, NOW);
    assert_eq!(refused, Next::End(Status::NotSupported));
}

#[test]
fn after_a_failed_flush_no_flush_succeeds() {
    let disk = disk("flush", false);
    let mut first = slot(Op::Flush, Flags::NONE);
    first.start(&disk);
    assert_eq!(first.take_result(-libc::EIO, &disk, NOW), Next::End(Status::Io));
    assert_eq!(slot(Op::Flush, Flags::NONE).start(&disk), Some(Status::Io));
}

#[test]
fn flush_that_overlaps_a_failed_one_does_not_succeed() {
    for is_first_told in [true, false] {
        let disk = disk(&format!("overlap-{is_first_told}"), false);
        let [mut told, mut other] = [0; 2].map(|_| slot(Op::Flush, Flags::NONE));
        for flush in [&mut told, &mut other] {
            assert_eq!(flush.start(&disk), None);
            flush.pushed(&disk, NOW);
        }
        if !is_first_told {
            assert_eq!(
                other.take_result(0, &disk, NOW),
                Next::Submit(0),
                "not heard of the first"
            );
        }
        assert_eq!(told.take_result(-libc::EIO, &disk, NOW), Next::End(Status::Io));
        let later = if is_first_told { 0 } else { -libc::ETIME };
        assert_eq!(other.take_result(later, &disk, NOW), Next::End(Status::Io));
    }
}

#[test]
fn flush_that_overlaps_another_that_goes_well_ends_after_it() {
    let disk = disk("overlap-well", false);
    let [mut first, mut second] = [0; 2].map(|_| slot(Op::Flush, Flags::NONE));
    for flush in [&mut first, &mut second] {
        assert_eq!(flush.start(&disk), None);
        flush.pushed(&disk, NOW);
    }
    assert_eq!(second.take_result(0, &disk, NOW), Next::Submit(0));
    assert_eq!(second.take_result(-libc::ETIME, &disk, NOW), Next::Submit(0));
    assert_eq!(first.take_result(0, &disk, NOW), Next::End(Status::Ok));
    assert_eq!(
        second.take_result(-libc::ETIME, &disk, NOW),
        Next::End(Status::Ok)
    );
}

#[test]
fn after_a_failed_fua_write_no_flush_succeeds_unless_there_was_just_no_room() {
    for (errno, flush) in [(libc::EIO, Some(Status::Io)), (libc::ENOSPC, None)] {
        let mut disk = disk(&format!("fua-{errno}"), false);
        disk.set_alignment(Some(Alignment {
            memory: 512,
            range: 512,
        }));
        let mut write = slot(Op::Write, Flags::FUA);
        write.start(&disk);
        assert!(matches!(write.take_result(-errno, &disk, NOW), Next::End(status) if !status.is_ok()));
        assert_eq!(slot(Op::Flush, Flags::NONE).start(&disk), flush, "errno {errno}");
    }
}

#[test]
fn after_a_fua_write_whose_sync_failed_for_want_of_room_no_flush_succeeds() {
    for errno in [libc::ENOSPC, libc::EDQUOT, libc::EIO] {
        let disk = disk(&format!("fua-sync-{errno}"), false);
        let mut write = slot(Op::Write, Flags::FUA);
        write.start(&disk);
        assert!(!write.is_forced(&disk), "through the page cache");
        assert_eq!(write.take_result(65536, &disk, NOW), Next::Submit(0));
        assert_eq!(write.step, Step::Sync);
        assert!(matches!(write.take_result(-errno, &disk, NOW), Next::End(status) if !status.is_ok()));
        let flush = slot(Op::Flush, Flags::NONE).start(&disk);
        assert_eq!(flush, Some(Status::Io), "errno {errno}: the kernel tells it once");
    }
}

#[test]
fn fua_write_through_the_page_cache_that_had_no_room_puts_nothing_else_in_doubt() {
    for errno in [libc::ENOSPC, libc::EDQUOT] {
        let disk = disk(&format!("fua-write-{errno}"), false);
        let mut write = slot(Op::Write, Flags::FUA);
        write.start(&disk);
        assert!(matches!(write.take_result(-errno, &disk, NOW), Next::End(status) if !status.is_ok()));
        assert_eq!(slot(Op::Flush, Flags::NONE).start(&disk), None, "errno {errno}");
    }
}

const NOW: Instant = Instant(1);
