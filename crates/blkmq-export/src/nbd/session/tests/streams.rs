//! Tests that the same bytes have the same effect however the network divides them, and that no
//! bytes do harm.

use super::*;
use proptest::prelude::*;

/// The events and the output that a stream causes, however it was divided.
#[derive(Debug, PartialEq)]
struct Outcome {
    events: Vec<Event>,
    out: Vec<u8>,
    ended: bool,
}

/// Feeds `stream` in pieces of the given sizes (repeated), and replies to every request at once.
/// Also checks that the session requests no more than its limits allow.
fn run(stream: &[u8], pieces: &[usize], limits: &Limits) -> Outcome {
    let table = Arc::new(ExportTable::new([disk()]).unwrap());
    let mut written = Vec::new();
    let mut session = Session::new(table, limits.clone(), &mut written);
    let (mut events, mut buffer, mut payload_left) = (Vec::new(), Vec::new(), 0);
    let (mut rest, mut pieces) = (stream, pieces.iter().cycle());
    while !rest.is_empty() {
        let (piece, later) = rest.split_at(rest.len().min(*pieces.next().unwrap()));
        buffer.extend_from_slice(piece);
        rest = later;
        loop {
            let taken = buffer.len().min(payload_left);
            buffer.drain(..taken);
            session.payload_taken_if_any(taken);
            payload_left -= taken;
            if payload_left > 0 {
                break;
            }
            let mut out = Vec::new();
            let step = session.receive(&buffer, &mut out);
            buffer.drain(..step.consumed);
            written.extend_from_slice(&out);
            match &step.event {
                Event::NeedMore => break,
                Event::Write(request) => payload_left = request.length as usize,
                Event::Busy => panic!("busy with nothing held"),
                _ => {}
            }
            if let Event::Request(request) | Event::Write(request) = &step.event {
                reply(&mut session, request, &mut written);
            }
            let ended = matches!(step.event, Event::Disconnect | Event::Close(_));
            events.push(step.event);
            if ended {
                return Outcome {
                    events,
                    out: written,
                    ended: session.has_ended(),
                };
            }
        }
        assert!(
            buffer.len() < limits.receive_bytes_min(),
            "{} bytes left unconsumed",
            buffer.len()
        );
    }
    Outcome {
        events,
        out: written,
        ended: session.has_ended(),
    }
}

impl Session {
    fn payload_taken_if_any(&mut self, bytes: usize) {
        if bytes > 0 {
            self.payload_taken(bytes as u64);
        }
    }
}

fn reply(session: &mut Session, request: &Request, out: &mut Vec<u8>) {
    use crate::nbd::session::Op;
    let replies = session.replies();
    match request.op {
        Op::Read => {
            replies.read(request, out);
            out.resize(out.len() + request.length as usize, 0);
            replies.read_sent(request);
        }
        Op::BlockStatus => replies.block_status(
            request,
            Some(&[Extent {
                bytes: 512,
                state: ExtentState::HOLE,
            }]),
            &[],
            out,
        ),
        _ => replies.ok(request, out),
    }
    assert_eq!((replies.requests(), replies.memory_bytes()), (0, 0));
}

/// A stream of a client that mostly follows the protocol.
fn stream() -> impl Strategy<Value = Vec<u8>> {
    let an_option = prop_oneof![
        Just(option(OptionCode::LIST, &[])),
        Just(option(OptionCode::STRUCTURED_REPLY, &[])),
        Just(option(
            OptionCode::SET_META_CONTEXT,
            &contexts("vm1", &["base:allocation"])
        )),
        Just(option(OptionCode::INFO, &info("vm1", &[InfoKind::NAME]))),
        Just(option(OptionCode::GO, &info("nowhere", &[]))),
        Just(option(OptionCode::GO, &[0; 20_000])),
        (any::<u32>(), prop::collection::vec(any::<u8>(), 0..40))
            .prop_map(|(code, data)| option(OptionCode(code | 64), &data)),
    ];
    let extended = any::<bool>();
    let requests = prop::collection::vec((0..9u16, 0..8u16, 0..2100u64, 0..5u64, any::<bool>()), 0..12);
    (
        prop::collection::vec(an_option, 0..5),
        extended,
        requests,
        any::<bool>(),
    )
        .prop_map(|(options, extended, requests, leave)| {
            let mut bytes = flags(ClientFlags::KNOWN);
            bytes.extend(options.concat());
            let style = if extended {
                HeaderStyle::Extended
            } else {
                HeaderStyle::Structured
            };
            let code = if extended {
                OptionCode::EXTENDED_HEADERS
            } else {
                OptionCode::STRUCTURED_REPLY
            };
            bytes.extend(option(code, &[]));
            bytes.extend(option(OptionCode::GO, &info("vm1", &[])));
            for (code, flags, block, blocks, odd) in requests {
                // Mostly known flags; sometimes an unknown one, a range beyond the end, or an odd
                // length.
                let flags = if flags < 6 { 0 } else { flags & 1 };
                let length = blocks * 512 + u64::from(odd && blocks == 3);
                if code != Command::DISC.0 || leave {
                    bytes.extend(command(
                        style,
                        Command(code),
                        CommandFlags(flags),
                        block * 512,
                        length,
                    ));
                }
            }
            bytes
        })
}

proptest! {
    #[test]
    fn stream_means_the_same_in_whatever_pieces_it_arrives(
        stream in stream(), pieces in prop::collection::vec(1..70usize, 1..8),
    ) {
        let limits = Limits::default();
        let whole = run(&stream, &[stream.len()], &limits);
        prop_assert_eq!(&run(&stream, &[1], &limits), &whole);
        prop_assert_eq!(&run(&stream, &pieces, &limits), &whole);
    }

    #[test]
    fn garbage_neither_panics_nor_piles_up(
        garbage in prop::collection::vec(any::<u8>(), 0..600), place in 0..3usize,
    ) {
        let limits = Limits { option_bytes_max: 5000, option_skip_bytes_max: 6000, ..Limits::default() };
        let mut stream = if place > 0 { flags(ClientFlags::KNOWN) } else { Vec::new() };
        if place > 1 {
            stream.extend(option(OptionCode::GO, &info("vm1", &[])));
        }
        stream.extend(garbage);
        run(&stream, &[17], &limits);
    }

    #[test]
    fn damaged_stream_neither_panics_nor_piles_up(
        stream in stream(), hits in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut stream = stream;
        for (at, value) in hits {
            let at = at.index(stream.len());
            stream[at] ^= value;
        }
        run(&stream, &[41], &Limits::default());
    }
}
