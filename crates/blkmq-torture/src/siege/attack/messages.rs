//! Wrong messages: cut off at every byte, wrong at every byte, too many.

use std::time::Instant;

use blkmq_nbd::codec::handshake::{MetaRequest, OptionCode, write_client_flags, write_option};
use blkmq_nbd::codec::request::Command;
use blkmq_nbd::codec::{ClientFlags, CommandFlags, HeaderStyle};
use blkmq_testkit::Random;

use super::{BIG, HOLES, HOLES_BYTES, PREY, Site, Tally};
use crate::siege::wire::{Wire, conversation, info, negotiation, push_request};

/// Disconnects after each byte of a conversation, in order or by a reset, at once or after reading
/// the answers.
pub(super) fn truncated(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let scripts = STYLES.map(|style| conversation(style, PREY));
    let all: usize = scripts.iter().map(Vec::len).sum();
    let mut tally = Tally::default();
    while Instant::now() < end {
        let mut cut = site.next_place(all);
        let mut script = &scripts[0];
        for next in &scripts[1..] {
            if cut >= script.len() {
                cut -= script.len();
                script = next;
            }
        }
        let Some(mut wire) = connect(site, random) else {
            tally.failed += 1;
            continue;
        };
        wire.send(&script[..cut]);
        tally.done += 1;
        match random.below(4) {
            0 => wire.finish(),
            1 => wire.reset(),
            _ => drop(wire),
        }
    }
    tally
}

/// Sends a conversation in which each byte in turn, and up to three others, are wrong.
pub(super) fn malformed(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let scripts = STYLES.map(|style| conversation(style, PREY));
    let longest = scripts.iter().map(Vec::len).max().unwrap_or(1);
    let mut tally = Tally::default();
    while Instant::now() < end {
        let place = site.next_place(longest);
        let mut script = scripts[random.below(STYLES.len() as u64) as usize].clone();
        let more = (0..random.below(4)).map(|_| random.below(script.len() as u64) as usize);
        for at in std::iter::once(place % script.len()).chain(more.collect::<Vec<_>>()) {
            script[at] = wrong(script[at], random);
        }
        let Some(mut wire) = connect(site, random) else {
            tally.failed += 1;
            continue;
        };
        let is_taken = wire.send(&script);
        tally.failed += u64::from(!is_taken);
        tally.done += 1;
        // A server that was told of a long payload waits for it; most of these clients disconnect
        // at once.
        if random.below(8) == 0 {
            wire.finish();
        }
    }
    tally
}

/// Sends options, valid and invalid, as fast as they are taken, and reads no answer.
pub(super) fn options(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        let Some(mut wire) = connect(site, random) else {
            tally.failed += 1;
            continue;
        };
        let (mut flood, mut count) = (Vec::new(), 0);
        write_client_flags(ClientFlags::FIXED_NEWSTYLE, &mut flood);
        while flood.len() < FLOOD_BYTES {
            push_option(random, &mut flood);
            count += 1;
        }
        let is_taken = wire.send(&flood);
        tally.failed += u64::from(!is_taken);
        tally.done += count;
    }
    tally
}

fn push_option(random: &mut Random, out: &mut Vec<u8>) {
    let many: Vec<&str> = vec!["base:", "base:allocation", "qemu:dirty-bitmap:x"]
        .into_iter()
        .cycle()
        .take(random.below(300) as usize)
        .collect();
    let mut contexts = Vec::new();
    MetaRequest::write(BIG, &many, &mut contexts);
    match random.below(8) {
        0 => write_option(OptionCode::LIST, &[], out),
        1 => write_option(OptionCode::INFO, &info(BIG), out),
        2 => write_option(OptionCode::INFO, &info(&"x".repeat(4096)), out),
        3 => write_option(OptionCode::LIST_META_CONTEXT, &contexts, out),
        4 => write_option(OptionCode::SET_META_CONTEXT, &contexts, out),
        5 => write_option(OptionCode::STARTTLS, &[], out),
        6 => write_option(OptionCode(random.draw() as u32), &[0; 40], out),
        // Longer than the server reads, and sometimes longer than it skips.
        _ => write_option(OptionCode::INFO, &vec![7; random.below(20 << 10) as usize], out),
    }
}

/// Sends hundreds of requests for the block status of a fragmented disk.
pub(super) fn status(site: &Site<'_>, random: &mut Random, end: Instant) -> Tally {
    let mut tally = Tally::default();
    while Instant::now() < end {
        let style = random.one_of(&[HeaderStyle::Structured, HeaderStyle::Extended]);
        let Some(mut wire) = connect(site, random) else {
            tally.failed += 1;
            continue;
        };
        let mut questions = negotiation(style, HOLES);
        for cookie in 0..STATUS_AT_ONCE {
            let range = (0, HOLES_BYTES);
            let question = (Command::BLOCK_STATUS, CommandFlags::NONE);
            push_request(style, question, cookie, range, &mut questions);
        }
        let disconnect = (Command::DISC, CommandFlags::NONE);
        push_request(style, disconnect, 0, (0, 0), &mut questions);
        wire.send(&questions);
        let heard = wire.discard(usize::MAX);
        tally.done += STATUS_AT_ONCE.min(heard as u64 / STATUS_REPLY_BYTES);
    }
    tally
}

fn connect(site: &Site<'_>, random: &mut Random) -> Option<Wire> {
    if random.below(4) == 0 {
        Wire::tcp(site.tcp).ok()
    } else {
        Wire::unix(&site.socket).ok()
    }
}

/// Another value for a byte, as a defective client might send it.
fn wrong(byte: u8, random: &mut Random) -> u8 {
    match random.below(4) {
        0 => 0,
        1 => 0xff,
        2 => byte ^ 1 << random.below(8),
        _ => random.draw() as u8,
    }
}

const STYLES: [HeaderStyle; 3] = [
    HeaderStyle::Simple,
    HeaderStyle::Structured,
    HeaderStyle::Extended,
];
const FLOOD_BYTES: usize = 256 << 10;
const STATUS_AT_ONCE: u64 = 200;
/// A reply with 64 extents, of which no reply of this disk has fewer.
const STATUS_REPLY_BYTES: u64 = 20 + 4 + 64 * 8;
