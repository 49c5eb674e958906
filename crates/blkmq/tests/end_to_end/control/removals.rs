//! What a removal leaves: nothing of a disk that is removed, and everything of one whose removal is refused.

use std::path::Path;

use serde_json::json;

use super::sizes::capacity;
use super::{Control, Guest, Stage, add, names, remove};
use crate::common::nbd::Client;
use crate::common::{Daemon, Scratch};

/// A daemon with these lines of configuration, and a control socket.
fn serve(scratch: &Scratch, text: &str) -> Daemon {
    let control = scratch.word("control.sock");
    let file = scratch.word("blkmq.toml");
    let text = format!("[control]\nsocket = \"unix:{control}\"\n{text}");
    std::fs::write(&file, text).expect("a configuration");
    Daemon::start(&["-c", &file])
}

fn control(scratch: &Scratch) -> Control {
    Control::connect(&scratch.path("control.sock")).expect("it is served")
}

#[test]
fn refused_removal_keeps_the_clients_of_its_disk() {
    let scratch = Scratch::new();
    let socket = scratch.word("{disk}.vsock");
    let daemon = serve(
        &scratch,
        &format!(
            "[disk.part]\nram = \"1M\"\n[disk.whole]\nlinear = \"part\"\n\
             [[export]]\nvhost-user = \"unix:{socket}\"\ndisks = [\"part\", \"whole\"]\n\
             [[export]]\nnbd = \"unix:{}\"\n",
            scratch.word("nbd.sock")
        ),
    );
    let mut guest = Guest::connect(&scratch.path("part.vsock"));
    guest.start();
    let mut control = control(&scratch);
    let refused = remove(&mut control, "disk", "part").expect_err("it is in use");
    assert!(refused.to_string().contains("part"), "{refused}");
    assert_eq!(capacity(&mut guest), 1 << 20, "it is served on");
    daemon.stop();
}

#[test]
fn last_disk_is_removed_and_another_one_added() {
    let stage = Stage::new(&[]);
    let mut control = stage.control();
    remove(&mut control, "disk", "vm1").expect("it can be removed");
    assert_eq!(names(&mut control), [""; 0]);
    assert!(Client::connect(&stage.nbd(), "vm1").is_err());
    for words in [
        &["status"][..],
        &["list", "exports"],
        &["list", "queues"],
        &["stats"],
    ] {
        assert_eq!(stage.ctl(words).0, 0, "{words:?}");
    }
    add(&mut control, "disk", "vm2", &stage.file("vm2.raw")).expect("it can be added");
    drop(Client::connect(&stage.nbd(), "vm2").expect("it is served"));
    stage.daemon.stop();
}

#[test]
fn daemon_without_a_disk_starts_where_disks_can_be_added() {
    let scratch = Scratch::new();
    let nbd = scratch.word("nbd.sock");
    let daemon = serve(&scratch, &format!("[[export]]\nnbd = \"unix:{nbd}\"\n"));
    add(&mut control(&scratch), "disk", "vm1", &json!({"ram": "1M"})).expect("it can be added");
    drop(Client::connect(Path::new(&nbd), "vm1").expect("it is served"));
    daemon.stop();
}
