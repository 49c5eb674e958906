//! Tests whether all of this holds if requests come over io_uring, too: the parent's tests run once more with
//! the kernel's setting enabled. Also tests the messages if it is disabled, or if mounts must be handed over.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::{STEP, Stage, aligned, may_mount};
use crate::common::daemon::serve_command;
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};

/// The kernel's setting, which is restored when this is dropped. It applies to the host, so one
/// test at a time has it.
struct Switch {
    before: String,
    _held: File,
}

impl Switch {
    /// None, with a message, if there is no such setting, or this user may not change it.
    fn turn(to: &str) -> Option<Self> {
        if !may_mount() {
            return None;
        }
        let held =
            File::create(std::env::temp_dir().join("blkmq-test-fuse-switch")).expect("a file can be made");
        held.lock().expect("a lock can be had");
        let turned = std::fs::read_to_string(SWITCH).and_then(|before| {
            std::fs::write(SWITCH, to)?;
            Ok(before)
        });
        match turned {
            Ok(before) => Some(Self { before, _held: held }),
            Err(error) => {
                blkmq_testkit::skip(&format!(
                    "the kernel's FUSE over io_uring cannot be switched: {error}"
                ));
                None
            }
        }
    }
}

impl Drop for Switch {
    fn drop(&mut self) {
        let _ = std::fs::write(SWITCH, self.before.trim());
    }
}

/// The argument that the parent's tests pass to `--fuse-io-uring`.
pub(super) fn transport() -> &'static str {
    match std::env::var_os(OVER_RINGS) {
        Some(_) => "on",
        None => "off",
    }
}

#[test]
fn all_that_holds_for_disks_that_are_files_holds_over_io_uring() {
    let Some(_switch) = Switch::turn("1") else { return };
    let mut tests = Command::new(std::env::current_exe().expect("this program"));
    tests.args(["fuse::", "--skip", "fuse::rings::", "--skip", "fuse::upgrade::"]);
    let output = tests.env(OVER_RINGS, "1").output().expect("it starts");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        said.contains("writes_of_dd_are_read_by_dd_and_are_in_the_image ... ok"),
        "{said}"
    );
}

/// `BLKMQ_RUNS` is another number of runs than 100.
#[test]
#[ignore = "takes ten minutes: cargo test -p blkmq --test end_to_end -- --ignored write_back_ends_in_many_runs"]
fn write_back_ends_in_many_runs_four_at_a_time() {
    let Some(_switch) = Switch::turn("1") else { return };
    let runs = std::env::var("BLKMQ_RUNS").map_or(100, |runs| runs.parse().expect("a number of runs"));
    let (begun, failed) = (AtomicU32::new(0), AtomicU32::new(0));
    let run_all = || {
        while begun.fetch_add(1, Ordering::Relaxed) < runs {
            let mut test = Command::new(std::env::current_exe().expect("this program"));
            test.args([
                "--exact",
                "fuse::memory::load_beyond_memory_is_written_back_all_the_same",
            ]);
            let output = test.env(OVER_RINGS, "1").output().expect("it starts");
            if !output.status.success() {
                failed.fetch_add(1, Ordering::Relaxed);
                eprintln!("{}", String::from_utf8_lossy(&output.stdout));
            }
        }
    };
    std::thread::scope(|scope| {
        (0..4).for_each(|_| drop(scope.spawn(run_all)));
    });
    assert_eq!(failed.into_inner(), 0, "of {runs} runs");
}

#[test]
fn rings_that_the_kernel_has_switched_off_are_refused_if_asked_for_else_reported() {
    let Some(_switch) = Switch::turn("0") else { return };
    let scratch = Scratch::new();
    let place = scratch.word("{disk}");
    let disks = [
        "--disk",
        "name=a,ram=1M",
        "--disk",
        "name=b,ram=1M",
        "--control",
        "none",
    ];
    let words = [&disks[..], &["--fuse", &place]].concat();
    let asked = [&words[..], &["--fuse-io-uring", "on"]].concat();
    let output = output_within(&mut serve_command(&asked), TIME);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("switched off in the kernel: echo 1 >"),
        "{said}"
    );
    let daemon = Daemon::start(&words);
    let said = daemon.said();
    assert_eq!(
        said.matches("switched off in the kernel: echo 1 >").count(),
        1,
        "{said}"
    );
    daemon.stop();
}

#[test]
fn daemon_whose_mounts_may_be_handed_over_has_no_rings() {
    let Some(_switch) = Switch::turn("1") else { return };
    let scratch = Scratch::new();
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let words = [
        "--upgrade-socket",
        &upgrade,
        "--fuse-io-uring",
        "on",
        "--disk",
        "name=a,ram=1M",
    ];
    let place = scratch.word("a");
    let words = [&words[..], &["--fuse", &place]].concat();
    let output = output_within(&mut serve_command(&words), TIME);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("cannot be handed over"),
        "{said}"
    );
}

#[test]
fn open_file_gets_enotconn_at_the_daemons_end_and_begun_requests_end() {
    let Some(_switch) = Switch::turn("1") else { return };
    let mut stage = Stage {
        daemon: None,
        scratch: Scratch::new(),
    };
    let place = stage.word();
    let words = [
        "--disk",
        "name=vm1,null=64M,latency=300ms",
        "--fuse",
        &place,
        "--fuse-io-uring",
        "on",
    ];
    stage.daemon = Some(Daemon::start(&[&words[..], &["--control", "none"]].concat()));
    let file = stage.open();
    let reading = std::thread::spawn(move || {
        let first = file.read_exact_at(&mut aligned(0).0, 0);
        (first, file.read_exact_at(&mut aligned(0).0, STEP))
    });
    std::thread::sleep(Duration::from_millis(100));
    stage.daemon.take().expect("it serves").stop();
    let (first, later) = reading.join().expect("it ends");
    first.expect("what was begun ends");
    let gone = later.expect_err("nobody serves it").raw_os_error();
    // Which one, depends on whether the request had reached the ring before the kernel cancelled what waits there.
    let allowed = [ENOTCONN, ECONNABORTED, ECANCELED];
    assert!(gone.is_some_and(|gone| allowed.contains(&gone)), "{gone:?}");
}

const ENOTCONN: i32 = rustix::io::Errno::NOTCONN.raw_os_error();
const ECANCELED: i32 = rustix::io::Errno::CANCELED.raw_os_error();
const ECONNABORTED: i32 = rustix::io::Errno::CONNABORTED.raw_os_error();
const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// Set if the parent's tests must use rings.
const OVER_RINGS: &str = "BLKMQ_TEST_FUSE_OVER_RINGS";
const TIME: Duration = Duration::from_secs(20);
