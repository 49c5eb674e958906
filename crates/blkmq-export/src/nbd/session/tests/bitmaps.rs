//! Tests of the contexts of bitmaps: they are those of the moment in which a client asks, and each has a chunk of a reply.

use std::sync::Mutex;

use blkmq_nbd::codec::ChunkFlags;
use blkmq_nbd::codec::option_reply::parse_meta_context;

use super::*;
use crate::nbd::export::Bitmaps;

/// A disk with bitmaps, which come and go.
fn disk_with(names: &[&str]) -> (Export, Arc<Mutex<Vec<String>>>) {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let names = Arc::new(Mutex::new(names));
    let mut export = disk();
    let shared = Arc::clone(&names);
    export.bitmaps = Bitmaps::of(move || shared.lock().unwrap().clone());
    (export, names)
}

/// The contexts that an option is answered with: the id of each, and its name.
fn answered(wire: &mut Wire, code: OptionCode, queries: &[&str]) -> Vec<(u32, String)> {
    wire.send(&option(code, &contexts("vm1", queries)));
    let answers = wire.answers();
    assert_eq!(answers.last().map(|(kind, _)| *kind), Some(ReplyKind::ACK));
    let contexts = answers.iter().filter_map(|(_, data)| parse_meta_context(data));
    contexts.map(|(id, name)| (id, name.to_owned())).collect()
}

#[test]
fn bitmaps_are_listed_and_selected_as_they_are_when_a_client_asks() {
    let (export, names) = disk_with(&["monday", "x"]);
    let mut wire = Wire::greeted([export]);
    wire.acked(OptionCode::STRUCTURED_REPLY, &[]);
    let mut names_of = |code, queries: &[&str]| -> Vec<String> {
        let found = answered(&mut wire, code, queries).into_iter();
        found
            .map(|(_, name)| name.replace("qemu:dirty-bitmap:", ""))
            .collect()
    };
    let list = OptionCode::LIST_META_CONTEXT;
    assert_eq!(names_of(list, &[]), ["base:allocation", "monday", "x"]);
    assert_eq!(names_of(list, &["base:"]), ["base:allocation"]);
    assert_eq!(names_of(list, &["qemu:"]), ["monday", "x"]);
    assert_eq!(names_of(list, &["qemu:dirty-bitmap:"]), ["monday", "x"]);
    assert_eq!(names_of(list, &["qemu:dirty-bitmap:x"]), ["x"]);
    assert!(names_of(list, &["qemu:dirty-bitmap:mon", "qemu:other:", "x"]).is_empty());
    let set = OptionCode::SET_META_CONTEXT;
    assert!(names_of(set, &["qemu:", "qemu:dirty-bitmap:", "qemu:dirty-bitmap:y"]).is_empty());
    *names.lock().unwrap() = vec!["y".to_owned()];
    assert_eq!(
        names_of(set, &["qemu:dirty-bitmap:y", "qemu:dirty-bitmap:x"]),
        ["y"]
    );
    *names.lock().unwrap() = (0..20).map(|number| number.to_string()).collect();
    let all: Vec<String> = (0..20)
        .map(|number| format!("qemu:dirty-bitmap:{number}"))
        .collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    let selected = answered(&mut wire, set, &[&all[..], &all[..1]].concat());
    let ids: Vec<u32> = selected.iter().map(|(id, _)| *id).collect();
    assert_eq!(ids, (2..18).collect::<Vec<u32>>(), "some are enough");
}

#[test]
fn reply_to_a_block_status_has_a_chunk_for_each_context_and_the_last_one_ends_it() {
    for (queries, wanted) in [
        (&["qemu:dirty-bitmap:x", "base:allocation"][..], &[1, 2][..]),
        (&["qemu:dirty-bitmap:x", "qemu:dirty-bitmap:monday"], &[2, 3]),
        (&["qemu:dirty-bitmap:monday"], &[2]),
    ] {
        let (export, _names) = disk_with(&["monday", "x"]);
        let mut wire = Wire::greeted([export]);
        wire.acked(OptionCode::EXTENDED_HEADERS, &[]);
        answered(&mut wire, OptionCode::SET_META_CONTEXT, queries);
        wire.send(&option(OptionCode::GO, &info("vm1", &[])));
        wire.out.clear();
        // As another daemon goes on with it.
        let contexts = wire.session.contexts().expect("it is selected").clone();
        let saved = wire.session.save();
        assert!(saved.has_bitmaps());
        let ask = command(
            HeaderStyle::Extended,
            Command::BLOCK_STATUS,
            CommandFlags::NONE,
            0,
            8192,
        );
        let begun = request(&wire.send(&ask));
        let run = |bytes, state| Extent {
            bytes,
            state: ExtentState(state),
        };
        let changed = vec![vec![run(4096, 1), run(4096, 0)]; contexts.bitmaps.len()];
        let allocation = [run(8192, 3)];
        let allocation = contexts.allocation.then_some(&allocation[..]);
        let replies = wire.session.replies();
        replies.block_status(&begun, allocation, &changed, &mut wire.out);
        let (mut rest, mut found) = (&wire.out[..], Vec::new());
        while let Some((ReplyHead::Chunk(head), bytes)) = ReplyHead::parse(HeaderStyle::Extended, rest)
            .unwrap()
            .filter(|_| !rest.is_empty())
        {
            let payload = &rest[bytes..bytes + head.payload_bytes as usize];
            let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(head.kind, payload) else {
                panic!("{head:?}")
            };
            let states: Vec<u32> = status.extents().map(|extent| extent.state.0).collect();
            assert_eq!(states, if status.context == 1 { vec![3] } else { vec![1, 0] });
            found.push(status.context);
            rest = &rest[bytes + payload.len()..];
            assert_eq!(
                head.flags.contains(ChunkFlags::DONE),
                rest.is_empty(),
                "{queries:?}"
            );
        }
        assert_eq!(found, wanted, "{queries:?}");
    }
}

#[test]
fn range_of_which_nothing_is_known_counts_as_changed() {
    let (export, _names) = disk_with(&["x"]);
    let mut wire = Wire::greeted([export]);
    wire.acked(OptionCode::EXTENDED_HEADERS, &[]);
    let queries = ["qemu:dirty-bitmap:x", "base:allocation"];
    answered(&mut wire, OptionCode::SET_META_CONTEXT, &queries);
    wire.send(&option(OptionCode::GO, &info("vm1", &[])));
    wire.out.clear();
    let ask = command(
        HeaderStyle::Extended,
        Command::BLOCK_STATUS,
        CommandFlags::NONE,
        0,
        8192,
    );
    let begun = request(&wire.send(&ask));
    let replies = wire.session.replies();
    replies.block_status(&begun, Some(&[]), &[Vec::new()], &mut wire.out);
    let (mut rest, mut found) = (&wire.out[..], Vec::new());
    while let Ok(Some((ReplyHead::Chunk(head), bytes))) = ReplyHead::parse(HeaderStyle::Extended, rest) {
        let payload = &rest[bytes..bytes + head.payload_bytes as usize];
        let Some(ChunkPayload::Status(status)) = ChunkPayload::parse(head.kind, payload) else {
            panic!("{head:?}")
        };
        found.extend(
            status
                .extents()
                .map(|run| (status.context, run.bytes, run.state.0)),
        );
        rest = &rest[bytes + payload.len()..];
    }
    assert_eq!(found, [(1, 8192, 0), (2, 8192, 1)]);
}
