//! Tests whether a dry run finds what the change would find, and leaves nothing behind.

use super::{DISK_BYTES, Stage};

#[test]
fn dry_run_opens_the_files_of_new_disks_and_leaves_none() {
    let stage = Stage::new(&[]);
    let (_, dumped) = stage.ctl(&["dump"]);
    let scratch = &stage.scratch;
    let (file, missing) = (scratch.word("new.toml"), scratch.word("missing.raw"));
    let (used, free) = (scratch.word("vm1.raw"), scratch.image("free.raw", DISK_BYTES));
    let directory = scratch.word("");
    let disk = |name: &str, path: &str, more: &str| format!("[disk.{name}]\nfile = \"{path}\"\n{more}\n");
    let sized = "size = \"1M\"\ncreate = true";
    for (added, code, part) in [
        (disk("a", &missing, ""), 1, "disk a"),
        (disk("a", &directory, ""), 1, "is a directory"),
        (disk("a", &used, ""), 1, "in use by this process"),
        (disk("a", &free, "") + &disk("b", &free, ""), 1, "disk b"),
        (
            disk("a", &missing, sized) + &disk("b", &missing, sized),
            1,
            "disk b",
        ),
        (
            disk("a", &free, "lock = false") + &disk("b", &free, "lock = false"),
            0,
            "would add disk a\nwould add disk b",
        ),
        (
            disk("a", &free, "") + &disk("b", &missing, sized),
            0,
            "would add disk a\nwould add disk b",
        ),
    ] {
        std::fs::write(&file, format!("{dumped}\n{added}")).expect("the file can be written");
        let (found, said) = stage.ctl(&["apply", &file, "--dry-run"]);
        assert!(found == code && said.contains(part), "{added}: {found}, {said}");
        assert!(!scratch.path("missing.raw").exists(), "{added}");
        if code == 1 {
            let (found, said) = stage.ctl(&["apply", &file]);
            assert!(found == 1 && said.contains(part), "not dry: {added}: {said}");
            // What a change that fails has made stays.
            let _ = std::fs::remove_file(&missing);
        }
    }
    // The file of a disk that goes is free by then.
    let renamed = dumped.replace("[disk.vm1]", "[disk.vm2]");
    std::fs::write(&file, renamed).expect("the file can be written");
    let would = "would remove disk vm1\nwould add disk vm2\n".to_owned();
    assert_eq!(stage.ctl(&["apply", &file, "--dry-run"]), (0, would));
    assert_eq!(stage.ctl(&["apply", &file, "--remove"]).0, 0);
    stage.daemon.stop();
}

#[test]
fn one_address_for_several_disks_is_refused_before_anything_is_done() {
    // A sandboxed daemon refuses the first export of fuse for another reason.
    let stage = Stage::new(&["--sandbox", "off"]);
    let file = stage.scratch.word("one");
    let key = format!("fuse={file}");
    for words in [
        &["add", "disk", "vm2", "ram=1M"],
        &["add", "disk", "vm3", "ram=1M"],
    ] {
        assert_eq!(stage.ctl(words).0, 0);
    }
    for more in [&["--dry-run"][..], &[]] {
        let (code, said) = stage.ctl(&[&["add", "export", &key], more].concat());
        assert!(code == 1 && said.contains("one file for 3 disks"), "{said}");
        let (code, said) = stage.ctl(&[&["add", "export", &key, "disks=[\"vm1\", \"vm3\"]"], more].concat());
        assert!(code == 1 && said.contains("one file for 2 disks"), "{said}");
    }
    let one = ["add", "export", &key, "disks=[\"vm2\"]", "--dry-run"];
    let (code, said) = stage.ctl(&one);
    assert!(code == 0 && said.contains("would serve at fuse"), "{said}");
    assert!(!stage.scratch.path("one").exists());
    stage.daemon.stop();
}

#[test]
fn dry_run_reads_the_files_of_tls() {
    let stage = Stage::new(&[]);
    let key = format!("nbd=unix:{}", stage.scratch.word("tls.sock"));
    let certificate = format!("tls_certificate={}", stage.scratch.word("nobody.pem"));
    let private = format!("tls_key={}", stage.scratch.word("nobody.key"));
    let add = ["add", "export", &key, "tls=require", &certificate, &private];
    for more in [&["--dry-run"][..], &[]] {
        let (code, said) = stage.ctl(&[&add[..], more].concat());
        assert!(code == 1 && said.contains("nobody"), "{more:?}: {said}");
    }
    stage.daemon.stop();
}

#[test]
fn dry_run_refuses_places_that_cannot_be_had() {
    let stage = Stage::new(&["--sandbox", "off"]);
    let (missing, taken) = (stage.scratch.word("no/x"), stage.scratch.image("x.raw", 512));
    let nbd = |path: &str| format!("nbd=unix:{path}");
    let fuse = format!("fuse={missing}");
    for (key, says) in [
        (nbd(&missing), "directory"),
        (nbd(&taken), "something else than a socket"),
        (fuse, "directory"),
    ] {
        for more in [&["--dry-run"][..], &[]] {
            let (code, said) = stage.ctl(&[&["add", "export", &key], more].concat());
            assert!(code == 1 && said.contains(says), "{key} {more:?}: {said}");
        }
    }
    let each = format!("vhost-user=unix:{}{{disk}}", stage.scratch.word(&"x".repeat(60)));
    assert_eq!(stage.ctl(&["add", "export", &each]).0, 0);
    let long = "d".repeat(60);
    let (code, said) = stage.ctl(&["add", "disk", &long, "ram=1M", "--dry-run"]);
    assert!(code == 1 && said.contains("107"), "{said}");
    stage.daemon.stop();
}
