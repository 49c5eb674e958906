//! Tests the messages if a disk cannot be a block device of the host. The devices themselves are tested in a
//! guest (`cargo xtask guest ublk`), since few machines have the kernel's module.

use std::path::Path;
use std::time::Duration;

use crate::common::daemon::serve_command;
use crate::common::tools::output_within;

#[test]
fn host_without_the_module_is_told_its_name() {
    if Path::new("/dev/ublk-control").exists() {
        blkmq_testkit::skip("this machine has the kernel's module ublk_drv");
        return;
    }
    for address in ["0", "auto"] {
        let said = refused(&["--disk", "name=vm1,ram=1M", "--ublk", address]);
        let names = ["ublk", "/dev/ublk-control", "modprobe ublk_drv"];
        assert!(names.iter().all(|name| said.contains(name)), "{said}");
    }
}

#[test]
fn address_that_is_no_number_is_refused_with_what_is_allowed() {
    for address in ["", "x", "-1", "1048576", "/dev/ublkb0"] {
        let said = refused(&["--disk", "name=vm1,ram=1M", &format!("--ublk={address}")]);
        assert!(
            said.contains(&format!("{address:?}")) && said.contains("0 to 1048575, or auto"),
            "{said}"
        );
    }
}

#[test]
fn two_disks_are_not_given_one_number() {
    let said = refused(&[
        "--disk",
        "name=a,ram=1M",
        "--disk",
        "name=b,ram=1M",
        "--ublk",
        "3",
    ]);
    assert!(
        said.contains("one device for 2 disks") && said.contains("auto"),
        "{said}"
    );
}

/// The output of a daemon that does not start.
fn refused(words: &[&str]) -> String {
    let output = output_within(&mut serve_command(words), Duration::from_secs(20));
    assert!(!output.status.success(), "started: {words:?}");
    String::from_utf8_lossy(&output.stderr).into_owned()
}
