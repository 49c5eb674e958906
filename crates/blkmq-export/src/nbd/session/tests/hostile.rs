//! Tests the answer to each violation: an error for the request, or the end of the connection.

use CommandFlags as F;
use HeaderStyle::{Extended, Simple, Structured};
use blkmq_nbd::codec::BadMagic;

use super::*;
use crate::nbd::session::{CloseReason, Fault};

fn read_only() -> Export {
    let mut export = disk();
    export.features.read_only = true;
    export
}

fn plain() -> Export {
    let mut export = disk();
    let off = &mut export.features;
    (
        off.flush,
        off.fua,
        off.trim,
        off.write_zeroes,
        off.cache,
        off.fast_zero,
    ) = (false, false, false, false, false, false);
    off.block_status = false;
    export
}

/// A request that must be refused: command, flags, offset, length; then the fault and the error in
/// the reply.
type Case = (HeaderStyle, Command, F, u64, u64, Fault, ErrorCode);

fn check(export: fn() -> Export, cases: &[Case]) {
    for &(style, code, flags, offset, length, fault, error) in cases {
        let mut wire = Wire::selected(export(), style);
        let mut bytes = command(style, code, flags, offset, length);
        if style == Extended && code != Command::WRITE && flags.contains(F::PAYLOAD_LEN) {
            bytes.resize(bytes.len() + length as usize, 0);
        }
        let case = (style, code, flags, offset, length);
        let told = refused(&wire.send(&bytes));
        assert_eq!((told.fault, told.error), (fault, error), "{case:?}");
        assert_eq!(wire.reply(), (42, error.to_wire()), "{case:?}");
        // The stream is still in step, and no request is left.
        request(&wire.send(&command(style, Command::READ, F::NONE, 0, 512)));
        assert_eq!(wire.session.replies().requests(), 1);
    }
}

#[test]
fn ranges_outside_the_export_or_its_blocks_are_refused() {
    let (beyond, odd, empty) = (Fault::BeyondEnd, Fault::Unaligned, Fault::WrongRange);
    check(
        disk,
        &[
            (
                Simple,
                Command::READ,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::READ,
                F::NONE,
                MIB - 512,
                1024,
                beyond,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::READ,
                F::NONE,
                u64::MAX - 511,
                1024,
                beyond,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::WRITE,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::NoSpace,
            ),
            (
                Extended,
                Command::WRITE,
                F::NONE,
                u64::MAX - 511,
                512,
                beyond,
                ErrorCode::NoSpace,
            ),
            (
                Simple,
                Command::WRITE_ZEROES,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::NoSpace,
            ),
            (
                Extended,
                Command::WRITE_ZEROES,
                F::NONE,
                512,
                u64::MAX - 511,
                beyond,
                ErrorCode::NoSpace,
            ),
            (
                Simple,
                Command::TRIM,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::CACHE,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::Invalid,
            ),
            (
                Structured,
                Command::BLOCK_STATUS,
                F::NONE,
                MIB,
                512,
                beyond,
                ErrorCode::Invalid,
            ),
            (Simple, Command::READ, F::NONE, 1, 512, odd, ErrorCode::Invalid),
            (Simple, Command::READ, F::NONE, 0, 513, odd, ErrorCode::Invalid),
            (Simple, Command::WRITE, F::NONE, 0, 100, odd, ErrorCode::Invalid),
            (
                Structured,
                Command::TRIM,
                F::NONE,
                256,
                256,
                odd,
                ErrorCode::Invalid,
            ),
            (Simple, Command::READ, F::NONE, 0, 0, empty, ErrorCode::Invalid),
            (Extended, Command::WRITE, F::NONE, 0, 0, empty, ErrorCode::Invalid),
            (
                Structured,
                Command::BLOCK_STATUS,
                F::NONE,
                0,
                0,
                empty,
                ErrorCode::Invalid,
            ),
            (Simple, Command::FLUSH, F::NONE, 0, 512, empty, ErrorCode::Invalid),
            (Simple, Command::FLUSH, F::NONE, 512, 0, empty, ErrorCode::Invalid),
            (
                Simple,
                Command::FLUSH,
                F::NONE,
                512,
                512,
                empty,
                ErrorCode::Invalid,
            ),
        ],
    );
}

#[test]
fn flags_that_do_not_belong_are_refused_and_payload_is_skipped() {
    let wrong = Fault::WrongFlags;
    check(
        disk,
        &[
            (Simple, Command::READ, F::DF, 0, 512, wrong, ErrorCode::Invalid),
            (
                Structured,
                Command::READ,
                F::NO_HOLE,
                0,
                512,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Structured,
                Command::READ,
                F(1 << 9),
                0,
                512,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::WRITE,
                F::REQ_ONE,
                0,
                4096,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::WRITE,
                F::PAYLOAD_LEN,
                0,
                4096,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::TRIM,
                F::FAST_ZERO,
                0,
                512,
                wrong,
                ErrorCode::Invalid,
            ),
            (Simple, Command::FLUSH, F::DF, 0, 0, wrong, ErrorCode::Invalid),
            (
                Simple,
                Command::CACHE,
                F::NO_HOLE,
                0,
                512,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Extended,
                Command::READ,
                F::PAYLOAD_LEN,
                0,
                512,
                wrong,
                ErrorCode::Invalid,
            ),
            (
                Extended,
                Command::BLOCK_STATUS,
                F::PAYLOAD_LEN,
                0,
                12,
                wrong,
                ErrorCode::Invalid,
            ),
        ],
    );
}

#[test]
fn extended_write_without_its_payload_flag_has_no_payload_and_is_refused() {
    let mut wire = Wire::selected(disk(), Extended);
    let mut bytes = Vec::new();
    RequestHeader {
        cookie: 42,
        offset: 0,
        length: 512,
        command: Command::WRITE,
        flags: F::NONE,
    }
    .write(Extended, &mut bytes);
    assert_eq!(refused(&wire.send(&bytes)).fault, Fault::NoPayload);
    assert_eq!(wire.reply(), (42, ErrorCode::Invalid.to_wire()));
}

#[test]
fn commands_an_export_does_not_have_are_refused() {
    let unknown = Fault::UnknownCommand;
    check(
        disk,
        &[
            (Simple, Command(8), F::NONE, 0, 512, unknown, ErrorCode::Invalid),
            (
                Extended,
                Command(0xffff),
                F::NONE,
                0,
                512,
                unknown,
                ErrorCode::Invalid,
            ),
            (
                Extended,
                Command(9),
                F::PAYLOAD_LEN,
                0,
                512,
                unknown,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::BLOCK_STATUS,
                F::NONE,
                0,
                512,
                Fault::NoContext,
                ErrorCode::Invalid,
            ),
        ],
    );
    let not = Fault::NotOffered;
    check(
        plain,
        &[
            (Simple, Command::FLUSH, F::NONE, 0, 0, not, ErrorCode::Invalid),
            (Simple, Command::TRIM, F::NONE, 0, 512, not, ErrorCode::Invalid),
            (Simple, Command::CACHE, F::NONE, 0, 512, not, ErrorCode::Invalid),
            (
                Simple,
                Command::WRITE_ZEROES,
                F::NONE,
                0,
                512,
                not,
                ErrorCode::Invalid,
            ),
            (
                Simple,
                Command::WRITE,
                F::FUA,
                0,
                512,
                Fault::WrongFlags,
                ErrorCode::Invalid,
            ),
            (
                Structured,
                Command::BLOCK_STATUS,
                F::NONE,
                0,
                512,
                Fault::NoContext,
                ErrorCode::Invalid,
            ),
        ],
    );
}

#[test]
fn whatever_changes_data_is_refused_on_a_read_only_export() {
    let fault = Fault::ReadOnly;
    check(
        read_only,
        &[
            (Simple, Command::WRITE, F::NONE, 0, 512, fault, ErrorCode::Perm),
            (Extended, Command::WRITE, F::FUA, 0, 512, fault, ErrorCode::Perm),
            (Simple, Command::TRIM, F::NONE, 0, 512, fault, ErrorCode::Perm),
            (
                Structured,
                Command::WRITE_ZEROES,
                F::NONE,
                0,
                512,
                fault,
                ErrorCode::Perm,
            ),
        ],
    );
}

#[test]
fn payload_over_the_limit_is_refused_while_portable_and_ends_the_connection_beyond() {
    let mut export = disk();
    export.size_bytes = 1 << 40;
    let limits = Limits {
        payload_bytes_max: 1 << 20,
        ..Limits::default()
    };
    for (style, error) in [(Simple, ErrorCode::Invalid), (Structured, ErrorCode::Overflow)] {
        let mut wire = Wire::selected_with(export.clone(), style, limits.clone());
        let read = refused(&wire.send(&command(style, Command::READ, F::NONE, 0, 2 << 20)));
        assert_eq!((read.fault, read.error), (Fault::TooLong, error));
        wire.out.clear();
        let write = refused(&wire.send(&command(style, Command::WRITE, F::NONE, 0, 2 << 20)));
        assert_eq!((write.fault, write.error), (Fault::TooLong, ErrorCode::Invalid));
        assert_eq!(wire.reply(), (42, ErrorCode::Invalid.to_wire()));
        let huge = header(style, Command::WRITE, F::NONE, 0, (32 << 20) + 512);
        let reason = CloseReason::PayloadTooLong {
            payload_bytes: (32 << 20) + 512,
            bytes_max: 32 << 20,
        };
        assert_eq!(wire.send(&huge), [Event::Close(reason)]);
        assert!(wire.out.is_empty());
    }
}

#[test]
fn stream_out_of_step_ends_the_connection_with_the_number_found() {
    let mut wire = Wire::selected(disk(), Simple);
    let reason = CloseReason::BadRequestMagic(BadMagic {
        found: u64::from_be_bytes(*b"\0\0\0\0GET "),
        expected: 0x2560_9513,
    });
    assert_eq!(
        wire.send(b"GET / HTTP/1.1\r\nHost: disks.example\r\n"),
        [Event::Close(reason)]
    );
    assert_eq!(
        reason.to_string(),
        "request rejected: magic number 0x47455420 where 0x25609513 belongs"
    );
    let mut wire = Wire::selected(disk(), Extended);
    let compact = command(Simple, Command::READ, F::NONE, 0, 512).repeat(2);
    assert!(matches!(
        wire.send(&compact)[..],
        [Event::Close(CloseReason::BadRequestMagic(_))]
    ));
}

#[test]
fn violations_of_the_negotiation_end_the_connection_with_their_reason() {
    let huge = |code: OptionCode, bytes: u32| {
        let mut option = option(code, &[]);
        option[12..16].copy_from_slice(&bytes.to_be_bytes());
        option
    };
    let cases = [
        (
            b"IHAVEOPX\0\0\0\x03\0\0\0\0".to_vec(),
            "option rejected: magic number",
        ),
        (
            huge(OptionCode::GO, (1 << 20) + 1),
            "GO with 1048577 bytes of data rejected: at most 1048576 are read",
        ),
        (
            huge(OptionCode(77), u32::MAX),
            "option 77 with 4294967295 bytes of data rejected",
        ),
        (
            huge(OptionCode::EXPORT_NAME, 4097),
            "EXPORT_NAME with 4097 bytes of data rejected: at most 4096",
        ),
        (
            option(OptionCode::EXPORT_NAME, b"nowhere"),
            "EXPORT_NAME names an export that is not here",
        ),
        (
            option(OptionCode::EXPORT_NAME, b"\xff"),
            "EXPORT_NAME names an export that is not here",
        ),
        (
            option(OptionCode::LIST, &[]).repeat(6),
            "more than 5 options sent without an export selected",
        ),
    ];
    for (bytes, message) in cases {
        let mut wire = Wire::new(
            [disk()],
            Limits {
                options_max: 5,
                ..Limits::default()
            },
        );
        wire.send(&flags(ClientFlags::KNOWN));
        let events = wire.send(&bytes);
        let [Event::Close(reason)] = events[..] else {
            panic!("{message}: {events:?}")
        };
        assert!(reason.to_string().starts_with(message), "{reason}");
        assert!(wire.session.has_ended());
    }
}

#[test]
fn client_flags_nobody_knows_end_the_connection() {
    let mut wire = Wire::new([disk()], Limits::default());
    let events = wire.send(&[0, 0, 0, 4]);
    let [Event::Close(reason)] = events[..] else {
        panic!("{events:?}")
    };
    assert_eq!(
        reason.to_string(),
        "client flags 0x4 rejected: only the bits of 0x3 are known"
    );
}
