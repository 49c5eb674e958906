//! The benches of `blkmq-lab` that start the command as a server, or use one: each measures its own
//! side, not only its peers'.

use crate::common::tools::{Lab, lab};
use crate::common::{Daemon, Scratch};

/// Runs a short bench; returns the rows of its report.
pub(crate) fn rows(lab: &Lab, scratch: &Scratch, words: &[&str]) -> Vec<serde_json::Value> {
    let json = scratch.path("report.json");
    let mut command = lab.command(&["bench"]);
    command
        .args(words)
        .args(["--seconds", "0.1", "--rounds", "2", "--force", "--json"]);
    let ended = command.arg(&json).output().expect("the command starts");
    assert!(
        ended.status.success(),
        "{words:?}: {}",
        String::from_utf8_lossy(&ended.stderr)
    );
    let text = std::fs::read_to_string(json).expect("the report was written");
    let report: serde_json::Value = serde_json::from_str(&text).expect("the report is JSON");
    report["rows"].as_array().expect("rows").clone()
}

pub(crate) fn assert_measured(row: &serde_json::Value) {
    let is_positive = |name: &str| row[name].as_f64().is_some_and(|number| number > 0.0);
    assert!(
        is_positive("iops") && is_positive("p50_ns") && is_positive("cpu_ns_per_io"),
        "{row}"
    );
}

#[test]
fn nbd_bench_measures_our_own_server() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let words = [
        "nbd",
        "--side",
        "ours",
        "--depth",
        "1,4",
        "--conns",
        "1,2",
        "--replies",
        "structured",
    ];
    let rows = rows(&lab, &scratch, &words);
    assert_eq!(rows.len(), 4, "{rows:?}");
    for row in &rows {
        assert_eq!(row["side"], "ours");
        assert_measured(row);
    }
}

#[test]
fn observers_bench_measures_a_daemon_that_is_traced_and_asked() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let rows = rows(&lab, &scratch, &["observers", "--disks", "3", "--depth", "4"]);
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str()).collect();
    assert_eq!(
        sides,
        [Some("nobody"), Some("trace"), Some("statistics"), Some("changes")]
    );
    rows.iter().for_each(assert_measured);
    assert!(rows[1]["observers_cpu"].as_f64() > Some(0.0), "{rows:?}");
}

#[test]
fn engine_bench_reads_and_writes_through_the_nbd_driver() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let daemon = Daemon::serve(&scratch, &["name=a,ram=16M"]);
    for pattern in ["randread", "randwrite"] {
        let words = [
            "engine",
            "--device",
            &daemon.uri("a"),
            "--rw",
            pattern,
            "--jobs",
            "1",
            "--depth",
            "1,8",
            "--overwrite",
        ];
        let rows = rows(&lab, &scratch, &words);
        assert_eq!(rows.len(), 2, "{rows:?}");
        rows.iter().for_each(assert_measured);
    }
    daemon.stop();
}

#[test]
fn tls_bench_measures_our_own_server_and_others() {
    let Some(lab) = lab() else { return };
    if !crate::common::tools::installed(&["openssl", "nbdcopy", "nbdkit", "qemu-nbd"]) {
        return;
    }
    let rows = rows(&lab, &Scratch::new(), &["tls", "--rw", "randread"]);
    assert_eq!(rows.len(), 18, "{rows:?}");
    rows.iter().for_each(assert_measured);
    assert_eq!(rows[1]["side"], "ours-tls");
}

#[test]
fn doors_bench_reads_a_disk_that_is_a_file() {
    let Some(lab) = lab() else { return };
    if !crate::fuse::may_mount() {
        return;
    }
    let scratch = Scratch::new();
    let words = "doors --door fuse --side ours,ours-bfq --queues 1,2 --depth 1,64";
    let rows = rows(&lab, &scratch, &words.split(' ').collect::<Vec<_>>());
    assert_eq!(rows.len(), 8, "{rows:?}");
    rows.iter().for_each(assert_measured);
    assert_eq!(rows[0]["case"], "door=fuse/queues=1/depth=1");
}
