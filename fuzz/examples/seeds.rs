//! Writes the seeds of the corpus: small streams that reach every state, for the fuzzer to start from.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use blkmq_core::trace::blktrace::{QUEUE, Record};
use blkmq_export::fuse::protocol::Agreed;
use blkmq_export::fuse::saved::SavedMount;
use blkmq_export::handover::codec::{self as handover, Disk, Message, Origin, Socket, Statistics, VERSION};
use blkmq_export::nbd::export::{Export, ExportId, ExportTable};
use blkmq_export::nbd::limits::Limits;
use blkmq_export::nbd::saved::SavedConnection;
use blkmq_export::nbd::session::{Contexts, Event, Op, SavedPhase, SavedSession, SavedState, Session};
use blkmq_nbd::client::{Handshake, Progress, Wanted};
use blkmq_nbd::codec::handshake::{
    InfoKind, InfoRequest, MetaRequest, OptionCode, SessionName, write_client_flags, write_option,
};
use blkmq_nbd::codec::option_reply::ReplyKind;
use blkmq_nbd::codec::reply::Extent;
use blkmq_nbd::codec::request::{Command, RequestHeader};
use blkmq_nbd::codec::{ClientFlags, CommandFlags, ErrorCode, ExtentState, HeaderStyle, TransmissionFlags};

const STYLES: [(&str, HeaderStyle); 3] = [
    ("simple", HeaderStyle::Simple),
    ("structured", HeaderStyle::Structured),
    ("extended", HeaderStyle::Extended),
];

fn main() {
    write("blktrace_records", "records", &records());
    write(
        "nbd_server_bytes",
        "negotiation",
        &[&[0, 255, 0], &negotiation()[..]].concat(),
    );
    for (place, (name, style)) in (1..).zip(STYLES) {
        let commands = commands(style);
        write(
            "nbd_server_bytes",
            name,
            &[&[place, 255, 0], &commands[..]].concat(),
        );
        write(
            "nbd_server_bytes",
            &format!("{name}-late"),
            &[&[place, 30, 7], &commands[..]].concat(),
        );
        write(
            "nbd_server_bytes",
            &format!("{name}-read-only"),
            &[&[place | 4, 255, 1], &commands[..]].concat(),
        );
        write(
            "nbd_server_bytes",
            &format!("{name}-fence"),
            &[&[place | 32, 255, 1], &fences(style)[..]].concat(),
        );
    }
    for (want, (name, style)) in (0..).zip(STYLES) {
        write(
            "nbd_client_bytes",
            name,
            &[&[want | 4, 255], &server_stream(style, false)[..]].concat(),
        );
        write(
            "nbd_client_bytes",
            &format!("{name}-named"),
            &[&[want | 12, 255], &server_stream(style, true)[..]].concat(),
        );
    }
    for (name, text) in CONFIGURATIONS {
        write("configuration", name, text.as_bytes());
    }
    for (name, operations) in OPERATIONS {
        write("operations", name, operations);
    }
    for (name, operations) in TLS_RECORDS {
        write("tls_records", name, operations);
    }
    for (name, operations) in TLS12_RECORDS {
        write("tls12_records", name, operations);
    }
    for (name, saved) in connections() {
        let bytes = saved.bytes();
        write("handover_messages", name, &[&[1], &bytes[..]].concat());
    }
    write("handover_messages", "messages", &[&[0], &messages()[..]].concat());
    write(
        "handover_messages",
        "mount",
        &[&[1], &mount().bytes()[..]].concat(),
    );
}

/// A mount that is open.
fn mount() -> SavedMount {
    SavedMount {
        disk: "a".to_owned(),
        size: 1 << 20,
        block_size: 512,
        agreed: Some(Agreed {
            is_ring: false,
            minor: 38,
            data_bytes_max: 1 << 20,
        }),
        opened: 1,
        is_made: true,
        entry: Some(("0:55".to_owned(), "fuse.blkmq".to_owned())),
        ..SavedMount::default()
    }
}

/// Connections in each phase, with something on its way.
fn connections() -> [(&'static str, SavedConnection); 3] {
    let saved = |style, phase, input| SavedConnection {
        session: SavedSession {
            style,
            name: SessionName::parse(&[7; 24]),
            phase,
        },
        is_closing: false,
        has_losses: false,
        input,
        unsent: b"unsent".to_vec(),
    };
    let contexts = || Contexts {
        allocation: true,
        bitmaps: vec!["monday".to_owned()],
    };
    let negotiation = |state| SavedPhase::Negotiation {
        state,
        is_padded: true,
        options: 3,
        context: Some(("a".to_owned(), contexts())),
    };
    let skipping = SavedState::Skipping {
        left: 20,
        option: OptionCode(99),
        kind: ReplyKind::ERR_UNSUP,
    };
    let transmission = SavedPhase::Transmission {
        export: "a".to_owned(),
        size_bytes: 1 << 20,
        block_min_bytes: 512,
        flags: TransmissionFlags::HAS_FLAGS,
        contexts: contexts(),
        drain: None,
    };
    let style = HeaderStyle::Structured;
    [
        (
            "flags",
            saved(style, negotiation(SavedState::Flags), self::negotiation()),
        ),
        ("skipping", saved(style, negotiation(skipping), vec![0; 20])),
        ("transmission", saved(style, transmission, commands(style))),
    ]
}

/// One message of most kinds.
fn messages() -> Vec<u8> {
    let (door, address) = ("nbd".to_owned(), "unix:/a".to_owned());
    let mut out = Vec::new();
    for message in [
        Message::Hello { version: VERSION },
        Message::Welcome {
            version: VERSION,
            instance: Some(1),
        },
        Message::Source(handover::Source {
            disk: "a".to_owned(),
            keys: "file = \"/a\"\n".to_owned(),
            size: Some(1 << 20),
            files: vec![handover::FileId { device: 1, inode: 2 }],
            has_clients: true,
        }),
        Message::Lock,
        Message::Socket(Socket {
            door: door.clone(),
            address: address.clone(),
            origin: Origin::Systemd(None),
        }),
        Message::Path {
            address: address.clone(),
            file: handover::FileId { device: 1, inode: 3 },
        },
        Message::Disk(Disk {
            name: "a".to_owned(),
            size: 1 << 20,
            block_size: 512,
            read_only: true,
        }),
        Message::Differs(handover::Difference {
            disk: "a".to_owned(),
            how: "another file".to_owned(),
        }),
        Message::Session(handover::Session {
            door,
            address,
            body: vec![1],
        }),
        Message::Statistics(Statistics {
            queue: "a".to_owned(),
            group: "/a".to_owned(),
            counts: vec![1, 2],
            debts: vec![3],
            scheduler: "bfq".to_owned(),
            learnt: vec![300, 1, 1_000_000],
        }),
        Message::End { count: 1 },
        Message::Refused {
            reason: "no".to_owned(),
        },
    ] {
        message.write(&mut out);
    }
    out
}

/// A notice, a request, and the beginning of another record.
fn records() -> Vec<u8> {
    let request = Record {
        time: 5,
        sector: 8,
        bytes: 4096,
        action: QUEUE,
        ..Record::default()
    };
    let mut out = Vec::new();
    for record in [Record::notice(0, 1, "blkmq"), request.clone(), request] {
        record.write(&mut out);
    }
    out.truncate(out.len() - 7);
    out
}

/// What operators write, right and wrong.
const CONFIGURATIONS: [(&str, &str); 9] = [
    ("example", include_str!("../../docs/operate/blkmq.toml")),
    (
        "file",
        "[disk.a]\nfile='a'\nsize='1G'\nblock_size=4096\ndirect='on'\nlock=false\nsched='none'",
    ),
    (
        "contradiction",
        "disk.a.ram='1M'\nqueue.q.timeout='1.5s'\n[[export]]\nnbd='tcp:1'\ndisks=['b']",
    ),
    (
        "disk",
        "name=vm1,file=vm1.raw,size=64M,create=on,ro=off,queue=q,sched=mq-deadline,group=/a/b,description=x",
    ),
    (
        "disk-null",
        "name=n,null=1T,latency=80us,spread=9us,slow_rate=1%,parallel=8,bandwidth=1G,bad=1M-2M,bad=0-4K",
    ),
    ("disk-two-names", "name=a,name=b,ram=1M"),
    ("address-unix", "unix:/run/blkmq/nbd.sock"),
    ("address-tcp", "tcp:[::1]:10809"),
    ("address-systemd", "systemd"),
];

/// The setting of the queue, then operations: see `blkmq_fuzz::operations`.
#[rustfmt::skip]
const OPERATIONS: [(&str, &[u8]); 5] = [
    // One reactor without elevator: two writes that merge, a read, one of each end.
    ("direct", &[
        0, 7, 15, 0,
        0, 1, 0, 0, 0, 8, 4, 0, 0, 1, 0, 0, 0, 12, 4, 0, 0, 0, 0, 0, 0, 99, 1, 0, 4,
        6, 0, 0, 6, 0, 4, 5,
    ]),
    // Two reactors with mq-deadline, shared tags, depth 2: everybody's requests, a context that pushes back, time.
    ("scheduled", &[
        5, 0x19, 15, 0x3b,
        8, 0, 0, 0, 0, 0, 0, 1, 5, 8, 0, 0x10, 1, 1, 0, 2, 1, 70, 9, 0, 4, 0x14, 15, 12, 5, 6, 0, 2, 5, 0x15,
        0x10, 3, 0, 3, 3, 20, 20, 0, 0x14, 0x15, 15, 24, 5, 6, 1, 0, 5,
    ]),
    // A drive with a cache and without FUA: writes with FUA and preflush around flushes.
    ("flushes", &[
        0, 7, 15, 1,
        0, 1, 1, 0, 0, 8, 4, 0, 0, 1, 3, 0, 0, 30, 4, 0, 0, 2, 0, 1, 0, 0, 0, 0, 4,
        6, 0, 0, 5, 6, 0, 0, 5, 6, 0, 4, 5, 6, 0, 0, 5,
    ]),
    // Reads under way while the queue is frozen, switched and thawed; then quiesced.
    ("freeze-and-switch", &[
        1, 7, 15, 0x1b,
        0, 0, 0, 0, 0, 1, 1, 0, 4, 9, 0, 0, 0, 0, 0, 9, 1, 0, 4, 13, 1, 6, 0, 0, 5, 13, 1, 10, 5,
        14, 0, 1, 11, 0, 1, 0, 0, 0, 9, 1, 0, 4, 12, 5, 14, 128, 1,
    ]),
    // Late requests that the driver lets go of, and their stale ends.
    ("time-limits", &[
        4, 1, 15, 0,
        0, 0, 0, 0, 0, 1, 1, 0, 4, 15, 255, 15, 26, 5, 0x10, 0, 0, 0, 0, 7, 1, 0, 0x14, 6, 0, 0, 5, 0x15,
    ]),
];

/// The cipher suite, then operations of four bytes: see `blkmq_fuzz::tls12_records`.
#[rustfmt::skip]
const TLS12_RECORDS: [(&str, &[u8]); 5] = [
    // Data of several lengths; the stream answers.
    ("data", &[0, 0, 1, 0, 9, 0, 2, 64, 0, 6, 9, 0, 0, 7, 0, 90, 0, 0, 3, 0, 1, 6, 9, 0, 0, 7, 0, 0, 1]),
    // The same with the other ciphers; a record that is too long, a changed one and one again.
    ("changed", &[1, 0, 1, 0, 9, 0, 2, 0, 9, 35, 1, 0, 20, 6, 9, 0, 0, 7, 0, 0, 9]),
    ("again", &[2, 0, 1, 0, 9, 4, 0, 0, 0, 6, 9, 0, 0, 0, 0, 66, 0, 6, 9, 0, 0]),
    // A close, and data behind it; a new negotiation; an empty record.
    ("alerts", &[2, 2, 21, 0, 2, 1, 0, 0, 1, 0, 9, 6, 9, 0, 0]),
    ("hello", &[0, 2, 22, 0, 4, 1, 0, 0, 0, 0, 1, 0, 0, 6, 9, 0, 0, 8, 0, 0, 5, 23, 3, 3, 0, 0]),
];

/// Side, cipher suite and pieces, then operations: see `blkmq_fuzz::tls_records`.
#[rustfmt::skip]
const TLS_RECORDS: [(&str, &[u8]); 10] = [
    // Data of several lengths with padding, in small pieces; the stream answers.
    ("data", &[0, 9, 0, 0, 1, 1, 1, 0, 2, 40, 3, 11, 2, 0, 50, 12, 0x50, 0, 13, 20, 0, 0x40, 1, 11, 9, 255, 255]),
    // Key updates, whole and in two records, some of which ask for ours; a flood of them at the end.
    ("key-updates", &[1, 255, 2, 9, 0, 4, 1, 2, 9, 0, 4, 4, 2, 9, 1, 11, 9, 0, 255, 12, 0, 30, 4, 9, 2, 7, 0, 11, 9, 0, 9, 12, 0, 9, 15, 36]),
    // Tickets for a client in one record and in two; then data in the middle of one.
    ("tickets", &[6, 255, 3, 22, 6, 4, 0, 0, 2, 1, 1, 3, 22, 3, 4, 0, 0, 3, 22, 3, 2, 1, 1, 2, 9, 0, 3, 22, 5, 4, 0, 0, 2, 1, 2, 9, 0]),
    // A close, and data behind it; the stream goes on and closes, too.
    ("close", &[4, 60, 2, 9, 0, 5, 1, 0, 2, 9, 0, 11, 9, 1, 0, 12, 0, 99, 15, 0]),
    ("alerts", &[5, 60, 5, 1, 90, 2, 9, 0, 5, 2, 40, 2, 9, 0]),
    // As many empty records as are borne, twice, and more.
    ("empty", &[2, 200, 14, 32, 2, 1, 0, 14, 32, 2, 1, 0, 14, 33]),
    // A bit of the content and one of the header are changed.
    ("changed", &[0, 60, 2, 9, 0, 2, 9, 0, 6, 1, 0, 8, 3, 2, 9, 0, 6, 2, 0, 1, 8]),
    // The second record twice.
    ("repeated", &[1, 60, 2, 9, 0, 2, 9, 0, 8, 1, 2, 9, 0, 7, 2, 3]),
    // Content of 16385 bytes.
    ("too-long", &[2, 255, 0, 0x40, 0, 2, 9, 0, 0, 0x40, 1]),
    // A change of ciphers in the clear, which has no place here.
    ("raw", &[8, 3, 20, 3, 3, 0, 1, 1]),
];

fn write(target: &str, name: &str, bytes: &[u8]) {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(target);
    fs::create_dir_all(&directory).expect("a directory for the seeds");
    fs::write(directory.join(name), bytes).expect("a seed written");
}

/// Every option a client may send, then an export by its name.
fn negotiation() -> Vec<u8> {
    let (mut out, mut name, mut contexts) = (Vec::new(), Vec::new(), Vec::new());
    InfoRequest::write(
        "a",
        &[InfoKind::NAME, InfoKind::DESCRIPTION, InfoKind::BLOCK_SIZE],
        &mut name,
    );
    MetaRequest::write("a", &["base:", "base:allocation"], &mut contexts);
    write_client_flags(ClientFlags::FIXED_NEWSTYLE, &mut out);
    for (code, data) in [
        (OptionCode::STARTTLS, &[][..]),
        (OptionCode::LIST, &[]),
        (OptionCode(99), b"unknown"),
        (OptionCode::STRUCTURED_REPLY, &[]),
        (OptionCode::LIST_META_CONTEXT, &contexts),
        (OptionCode::SET_META_CONTEXT, &contexts),
        (OptionCode::INFO, &name),
        (OptionCode::SESSION, &[7; 23]),
        (OptionCode::SESSION, &[7; 24]),
        (OptionCode::SESSION, &[7; 24]),
        (OptionCode::EXPORT_NAME, b"a"),
    ] {
        write_option(code, data, &mut out);
    }
    out.extend(commands(HeaderStyle::Structured));
    out
}

/// Fences of other sessions and of its own, and some that are none.
fn fences(style: HeaderStyle) -> Vec<u8> {
    let mut out = Vec::new();
    for (offset, length, flags) in [
        (0, 0, CommandFlags::NONE),
        (u64::MAX, 0, CommandFlags::NONE),
        (1, 0, CommandFlags::NONE),
        (2, 1, CommandFlags::NONE),
        (u64::MAX, 4096, CommandFlags::PAYLOAD_LEN),
    ] {
        let command = Command::FENCE;
        RequestHeader {
            cookie: offset,
            offset,
            length,
            command,
            flags,
        }
        .write(style, &mut out);
    }
    out
}

/// One of each command.
fn commands(style: HeaderStyle) -> Vec<u8> {
    let payload = if style == HeaderStyle::Extended {
        CommandFlags::PAYLOAD_LEN
    } else {
        CommandFlags::NONE
    };
    let mut out = Vec::new();
    for (cookie, (command, flags, offset, length)) in (1..).zip([
        (Command::WRITE, payload.with(CommandFlags::FUA), 512, 16),
        (Command::READ, CommandFlags::NONE, 512, 512),
        (Command::FLUSH, CommandFlags::NONE, 0, 0),
        (Command::WRITE_ZEROES, CommandFlags::NO_HOLE, 1024, 512),
        (Command::TRIM, CommandFlags::NONE, 0, 1024),
        (Command::CACHE, CommandFlags::NONE, 0, 1024),
        (Command::BLOCK_STATUS, CommandFlags::REQ_ONE, 0, 65536),
        (Command::READ, CommandFlags::DF, 1 << 40, 512),
        (Command::DISC, CommandFlags::NONE, 0, 0),
    ]) {
        RequestHeader {
            cookie,
            offset,
            length,
            command,
            flags,
        }
        .write(style, &mut out);
        if command == Command::WRITE {
            out.extend_from_slice(b"sixteen bytes ok");
        }
    }
    out
}

/// What our own server sends to a client of this style: its part of the negotiation and some replies.
fn server_stream(style: HeaderStyle, is_named: bool) -> Vec<u8> {
    let mut table = ExportTable::new([Export::new(ExportId(1), "a", 1 << 20)]).expect("a proper export");
    table.instance = Some(7);
    let (mut to_client, mut to_server, mut stream) = (Vec::new(), Vec::new(), Vec::new());
    let mut session = Session::new(Arc::new(table), Limits::default(), &mut to_client);
    let mut handshake = Handshake::new(Wanted {
        name: "a".into(),
        style,
        block_status: true,
        session: is_named.then_some(SessionName {
            client: 0x626c_6b6d_7100 << 80,
            number: 7,
        }),
    });
    while let (_, Progress::NeedMore) = handshake.receive(&to_client, &mut to_server) {
        stream.append(&mut to_client);
        while session.receive(&to_server, &mut to_client).event != Event::NeedMore {
            to_server.clear();
        }
        to_server.clear();
    }
    stream.append(&mut to_client);
    serve(&mut session, &commands(style), &mut stream);
    stream
}

fn serve(session: &mut Session, mut input: &[u8], out: &mut Vec<u8>) {
    loop {
        let step = session.receive(input, out);
        input = &input[step.consumed..];
        let (Event::Request(request) | Event::Write(request)) = step.event else {
            if let Event::Refused(_) = step.event {
                continue;
            }
            return;
        };
        if request.op == Op::Write {
            session.payload_taken(request.length);
            input = &input[request.length as usize..];
        }
        let replies = session.replies();
        match request.op {
            Op::Read => {
                replies.read(&request, out);
                out.resize(out.len() + request.length as usize, 0);
                replies.read_sent(&request);
            }
            Op::BlockStatus => {
                replies.block_status(
                    &request,
                    Some(&[Extent {
                        bytes: 65536,
                        state: ExtentState::HOLE,
                    }]),
                    &[],
                    out,
                );
            }
            Op::Cache => replies.error(&request, ErrorCode::Io, "no such luck", out),
            _ => replies.ok(&request, out),
        }
    }
}
