//! Every bench in its tiny mode, so that none rots: real servers, real engine, real files, a few milliseconds each. It
//! asserts what a report says, never how fast anything was.

use std::path::PathBuf;
use std::process::Command;

use blkmq_bench::nbd::{self, NbdArgs};
use clap::Parser;
use serde_json::Value;

#[derive(Parser)]
struct Nbd {
    #[command(flatten)]
    args: NbdArgs,
}

#[test]
fn the_nbd_bench_measures_every_peer_that_is_installed() {
    for peer in ["qemu-storage-daemon", "nbdkit", "nbdkit-t1"] {
        let program = peer.trim_end_matches("-t1");
        if Command::new(program).arg("--version").output().is_err() {
            eprintln!("skipped: {program} is not installed");
            continue;
        }
        let (json, svg) = (scratch(peer, "json"), scratch(peer, "svg"));
        for replies in ["simple", "structured"] {
            let line = format!("nbd --side {peer} --depth 1,4 --conns 1,2 --replies {replies} {TINY}");
            let words = line.split_whitespace().map(PathBuf::from);
            let files = ["--json".into(), json.clone(), "--svg".into(), svg.clone()];
            nbd::main(&Nbd::parse_from(words.chain(files)).args).expect("the bench runs");
        }
        let report = read(&json);
        assert_eq!(report["bench"], "nbd");
        let rows = report["rows"].as_array().expect("rows");
        assert_eq!(rows.len(), 4);
        assert_eq!(rows[3]["case"], "nbd/null/conns=2/depth=4");
        for row in rows {
            assert_eq!(row["side"], peer);
            assert!(is_positive(&row["iops"]) && is_positive(&row["p50_ns"]), "{row}");
            assert_eq!(row["rounds"].as_array().map(Vec::len), Some(2));
        }
        let picture = std::fs::read_to_string(&svg).expect("the picture is there");
        assert!(picture.starts_with("<svg"));
        let _ = (std::fs::remove_file(json), std::fs::remove_file(svg));
    }
}

fn scratch(name: &str, suffix: &str) -> PathBuf {
    std::env::temp_dir().join(format!("blkmq-bench-test-{}-{name}.{suffix}", std::process::id()))
}

fn read(json: &PathBuf) -> Value {
    let text = std::fs::read_to_string(json).expect("the report was written");
    serde_json::from_str(&text).expect("the report is JSON")
}

fn is_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

const TINY: &str = "--seconds 0.02 --rounds 2";
