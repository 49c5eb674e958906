//! Writes the seeds of the corpus: small streams that reach every state, for the fuzzer to start from.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use blkmq_export::nbd::client::{Handshake, Progress, Wanted};
use blkmq_export::nbd::codec::handshake::{
    InfoKind, InfoRequest, MetaRequest, OptionCode, write_client_flags, write_option,
};
use blkmq_export::nbd::codec::reply::Extent;
use blkmq_export::nbd::codec::request::{Command, RequestHeader};
use blkmq_export::nbd::codec::{ClientFlags, CommandFlags, ErrorCode, ExtentState, HeaderStyle};
use blkmq_export::nbd::export::{Export, ExportId, ExportTable};
use blkmq_export::nbd::limits::Limits;
use blkmq_export::nbd::session::{Event, Op, Session};

const STYLES: [(&str, HeaderStyle); 3] = [
    ("simple", HeaderStyle::Simple),
    ("structured", HeaderStyle::Structured),
    ("extended", HeaderStyle::Extended),
];

fn main() {
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
    }
    for (want, (name, style)) in (0..).zip(STYLES) {
        write(
            "nbd_client_bytes",
            name,
            &[&[want | 4, 255], &server_stream(style)[..]].concat(),
        );
    }
}

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
        (OptionCode::EXPORT_NAME, b"a"),
    ] {
        write_option(code, data, &mut out);
    }
    out.extend(commands(HeaderStyle::Structured));
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
fn server_stream(style: HeaderStyle) -> Vec<u8> {
    let table = ExportTable::new([Export::new(ExportId(1), "a", 1 << 20)]).expect("a proper export");
    let (mut to_client, mut to_server, mut stream) = (Vec::new(), Vec::new(), Vec::new());
    let mut session = Session::new(Arc::new(table), Limits::default(), &mut to_client);
    let mut handshake = Handshake::new(Wanted {
        name: "a".into(),
        style,
        block_status: true,
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
                    &[Extent {
                        bytes: 65536,
                        state: ExtentState::HOLE,
                    }],
                    out,
                );
            }
            Op::Cache => replies.error(&request, ErrorCode::Io, "no such luck", out),
            _ => replies.ok(&request, out),
        }
    }
}
