//! Tests what the daemon reports at an orderly end of a file that cannot be made durable, and that it still
//! syncs the others: on filesystems of which one fails a sync.

use std::path::Path;
use std::time::Duration;

use blkmq_torture::mount::{Cache, Faults, Mount};
use rustix::process::Signal;

use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::{Daemon, Scratch};

#[test]
fn last_sync_that_fails_is_reported_by_name_and_exit_code_and_others_are_done() {
    let scratch = Scratch::new();
    let Some([bad, good]) = mounts(&scratch) else {
        return;
    };
    for fails in [true, false] {
        let disk = |name: &str, mount: &Mount| format!("name={name},file={}", mount.image().display());
        let mut daemon = Daemon::serve(&scratch, &[&disk("bad", &bad), &disk("good", &good)]);
        for name in ["bad", "good"] {
            let mut client = Client::connect(&scratch.path("nbd.sock"), name).expect("it is served");
            client
                .write(0, &block(0, 1))
                .expect("a write that nobody flushes");
        }
        let synced_before = good.arrived().syncs;
        bad.set_faults(Faults {
            failing_sync: fails.then_some(1),
            ..Faults::default()
        });
        daemon.signal(Signal::TERM);
        let status = daemon.ended_within(Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(100));
        let said = daemon.said();
        assert_eq!(status.success(), !fails, "{status}; it said:\n{said}");
        assert!(status.code().is_some(), "{status}");
        let is_named =
            |mount: &Mount| said.contains(&format!("file {}: what was not", mount.image().display()));
        assert_eq!((is_named(&bad), is_named(&good)), (fails, false), "{said}");
        assert!(
            good.arrived().syncs > synced_before,
            "the other file was left out"
        );
        for mount in [&bad, &good] {
            mount
                .wait_closed(Duration::from_secs(10))
                .expect("nobody has it open");
        }
        good.forget(1);
        let content = std::fs::read(good.image()).expect("a file");
        assert!(content[..BLOCK] == block(0, 1), "what was synced is gone");
    }
}

/// Two filesystems; none, with a message, without FUSE.
fn mounts(scratch: &Scratch) -> Option<[Mount; 2]> {
    let mount = |name: &str| {
        let dir = scratch.path(name);
        std::fs::create_dir(&dir)?;
        Mount::new(Path::new(&dir), 1 << 20, Cache::Back)
    };
    match (mount("one"), mount("two")) {
        (Ok(one), Ok(two)) => Some([one, two]),
        (Err(error), _) | (_, Err(error)) => {
            blkmq_testkit::skip(&format!("no FUSE here: {error}"));
            None
        }
    }
}
