//! Tests of disks that grow while they are served: what guests and NBD clients are told, and what is refused.

use super::*;

/// The capacity in bytes that a front end is told.
pub(super) fn capacity(guest: &mut Guest) -> u64 {
    let mut request: Vec<u8> = [0_u32, 8, 0].iter().flat_map(|word| word.to_ne_bytes()).collect();
    request.extend([0; 8]);
    guest.send(GET_CONFIG, &request, &[]);
    let answer = guest.reply();
    u64::from_le_bytes(answer[12..20].try_into().expect("8 bytes")) * 512
}

#[test]
fn disk_that_has_grown_is_served_by_the_file_that_has_its_first_size() {
    let scratch = Scratch::new();
    let text = format!(
        "[control]\nsocket = \"unix:{}\"\n[[export]]\nnbd = \"unix:{}\"\n[disk.vm1]\nfile = \"{}\"\nsize = \"1M\"\ncreate = true\n",
        scratch.word("control.sock"),
        scratch.word("nbd.sock"),
        scratch.word("vm1.raw"),
    );
    let file = scratch.word("blkmq.toml");
    std::fs::write(&file, text).expect("a configuration");
    let mut daemon = Daemon::start(&["-c", &file]);
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    control
        .call("disk.resize", &json!({"disk": "vm1", "size": 2 << 20}))
        .expect("it grows");
    daemon.signal(Signal::HUP);
    assert!(
        daemon.wait_for(LONG, |line| line.contains("SIGHUP: nothing differs")),
        "{}",
        daemon.said()
    );
    for (size, is_right) in [(2 << 20, true), (3 << 20, false)] {
        let keys = json!({"kind": "disk", "name": "vm1", "keys": {"size": size}});
        assert_eq!(control.call("config.set", &keys).is_ok(), is_right, "{size}");
    }
    // Another program makes it larger, and the file has the new size: one SIGHUP does both.
    let image = std::fs::File::options().write(true).open(scratch.path("vm1.raw"));
    let image = image.expect("the image");
    image.set_len(4 << 20).expect("it grows");
    let text = std::fs::read_to_string(&file).expect("the file");
    std::fs::write(&file, text.replace("1M", "4M")).expect("a configuration");
    daemon.signal(Signal::HUP);
    assert!(
        daemon.wait_for(LONG, |line| line.contains("SIGHUP: ")
            && line.contains("disk vm1 has grown")),
        "{}",
        daemon.said()
    );
    assert!(!daemon.said().contains("is not changed"), "{}", daemon.said());
    daemon.stop();
    let daemon = Daemon::start(&["-c", &file]);
    let client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    assert_eq!(client.size(), 4 << 20);
    // What was cut off is not made up for by zeroes.
    image.set_len(1 << 20).expect("it shrinks");
    let mut control = Control::connect(&scratch.path("control.sock")).expect("it is served");
    for params in [json!({"disk": "vm1"}), json!({"disk": "vm1", "size": 8 << 20})] {
        let refused = control.call("disk.resize", &params).expect_err("it has shrunk");
        assert!(refused.to_string().contains("has shrunk"), "{refused}");
    }
    assert_eq!(image.metadata().expect("its size").len(), 1 << 20);
    daemon.stop();
}

#[test]
fn disk_that_grows_is_larger_for_guests_at_once_and_for_nbd_clients_that_come() {
    let mut stage = Stage::with_vhost_user();
    let mut guest = Guest::connect(&stage.scratch.path("vm1.vsock"));
    let (ours, theirs) = UnixStream::pair().expect("a pair of sockets");
    ours.set_read_timeout(Some(LONG)).expect("a time limit");
    guest.send(SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()]);
    guest.start();
    assert_eq!(capacity(&mut guest), DISK_BYTES);
    let old = Client::connect(&stage.nbd(), "vm1").expect("it is served");
    let is_told = || {
        let mut message = [0; 12];
        (&ours).read_exact(&mut message).expect("the guest is told");
        assert_eq!(message, [2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    };

    let (code, said) = stage.ctl(&["resize", "vm1", "16M"]);
    assert!(code == 0 && said.contains("16777216"), "{said}");
    is_told();
    assert_eq!((capacity(&mut guest), old.size()), (16 << 20, DISK_BYTES));
    let mut new = Client::connect(&stage.nbd(), "vm1").expect("it is served");
    assert_eq!(new.size(), 16 << 20);
    new.write((16 << 20) - BLOCK as u64, &block(1, 1))
        .expect("a write to the new end");
    // The guest reads at the new end.
    let sector = ((16 << 20) - BLOCK as u64) / 512;
    guest.request(0, 0, sector);
    guest.offer(&[0]);
    guest.kick();
    assert_eq!((guest.used(1), guest.status(0)), (vec![0], 0));

    // Another program makes the file larger, and the daemon is told to check it.
    let file = std::fs::OpenOptions::new()
        .write(true)
        .open(stage.scratch.path("vm1.raw"));
    file.expect("the image").set_len(24 << 20).expect("it grows");
    stage.daemon.signal(Signal::HUP);
    is_told();
    assert_eq!(capacity(&mut guest), 24 << 20);
    assert!(
        stage
            .daemon
            .wait_for(LONG, |line| line.contains("SIGHUP: disk vm1 has grown"))
    );

    for (words, part) in [
        (&["resize", "vm1", "1M"][..], "can only grow"),
        (&["resize", "vm1", "25165825"], "multiple of its block size"),
        (&["resize", "vm9"], "no such disk"),
    ] {
        let (code, said) = stage.ctl(words);
        assert!(code == 1 && said.contains(part), "{words:?}: {said}");
    }
    // A front end that does not read its messages loses nothing else.
    drop(ours);
    assert_eq!(stage.ctl(&["resize", "vm1", "32M"]).0, 0);
    assert_eq!(capacity(&mut guest), 32 << 20);
    stage.daemon.stop();
}

const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
