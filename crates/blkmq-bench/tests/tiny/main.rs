//! Runs every bench in its tiny mode, so that none rots: real servers, a real engine, real files, a
//! few milliseconds each. It asserts what a report contains, never how fast anything was.

mod engine;

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blkmq_bench::fairness::{self, FairnessArgs};
use blkmq_bench::images::{self, ImagesArgs};
use blkmq_bench::nbd::{self, NbdArgs};
use blkmq_bench::poll::{self, PollArgs};
use blkmq_bench::run_queue::{self, RunQueueArgs};
use blkmq_bench::scale::{self, ScaleArgs};
use blkmq_bench::single_dispatch::dbench::Door;
use blkmq_bench::single_dispatch::{self, SingleDispatchArgs};
use blkmq_bench::stack::{self, StackArgs};
use blkmq_bench::stats::{self, StatsArgs};
use clap::Parser;
use serde_json::Value;

#[derive(Parser)]
struct Nbd {
    #[command(flatten)]
    args: NbdArgs,
}

#[derive(Parser)]
struct Images {
    #[command(flatten)]
    args: ImagesArgs,
}

#[derive(Parser)]
struct Stats {
    #[command(flatten)]
    args: StatsArgs,
}

#[derive(Parser)]
struct Stack {
    #[command(flatten)]
    args: StackArgs,
}

#[derive(Parser)]
struct Poll {
    #[command(flatten)]
    args: PollArgs,
}

#[derive(Parser)]
struct Scale {
    #[command(flatten)]
    args: ScaleArgs,
}

#[derive(Parser)]
struct SingleDispatch {
    #[command(flatten)]
    args: SingleDispatchArgs,
}

#[derive(Parser)]
struct RunQueue {
    #[command(flatten)]
    args: RunQueueArgs,
}

#[derive(Parser)]
struct Fairness {
    #[command(flatten)]
    args: FairnessArgs,
}

#[test]
fn fairness_bench_has_every_side_of_shares_isolation_and_reaction() {
    let json = scratch("fairness", "json");
    for (only, figure) in [
        ("weights=1:2:4/mixed", "jain"),
        ("flooders=8x32r4k", "victim_p99_vs_alone"),
        ("reaction/weight", "total_vs_none"),
    ] {
        let line = format!("bench --only {only} {TINY}");
        let words = line.split_whitespace().map(PathBuf::from);
        let files = ["--json".into(), json.clone()];
        fairness::main(&Fairness::parse_from(words.chain(files)).args).expect("the bench runs");
        let report = read(&json);
        let rows = report["rows"].as_array().expect("rows");
        let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
        // One or several modelled drives, each with all sides.
        for sides in sides.chunks(5) {
            assert_eq!(sides, ["none", "caps", "mq-deadline", "kyber", "bfq"]);
        }
        for row in rows {
            assert!(is_positive(&row["iops"]) && is_positive(&row[figure]), "{row}");
        }
    }
    let _ = std::fs::remove_file(json);
}

#[test]
fn stack_bench_has_every_mend_by_itself_and_every_selector() {
    let _alone = alone();
    let json = scratch("stack", "json");
    let line = format!("bench --paths 1,4 --drive completion=deferred {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    let files = ["--json".into(), json.clone()];
    stack::main(&Stack::parse_from(words.chain(files)).args).expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let of = |case: &str| -> Vec<(String, f64)> {
        let of_case = rows.iter().filter(|row| row["case"] == case);
        let side = |row: &serde_json::Value| row["side"].as_str().unwrap().to_owned();
        of_case
            .map(|row| (side(row), row["ctx_per_io"].as_f64().unwrap()))
            .collect()
    };
    let shown = of("paths=4/selector=round-robin");
    let names: Vec<&str> = shown.iter().map(|(side, _)| side.as_str()).collect();
    assert_eq!(
        names,
        ["raw", "before", "fix-insert", "fix-run", "fix-complete", "after"]
    );
    assert!(
        shown[1].1 > 3.0 * shown[5].1,
        "the worker is woken before, and not after: {shown:?}"
    );
    for selector in [
        "queue-length",
        "service-time",
        "historical-service-time",
        "io-affinity",
    ] {
        assert_eq!(of(&format!("paths=4/selector={selector}")).len(), 2);
    }
    let wrong = Stack::parse_from(["bench", "--paths", "33"]);
    let error = stack::main(&wrong.args).expect_err("refused").to_string();
    assert!(
        error.contains("--paths 33 rejected: must be from 1 to 32"),
        "{error}"
    );
    let _ = std::fs::remove_file(json);
}

#[test]
fn poll_bench_measures_every_way_to_wait_and_says_what_the_least_is() {
    let _alone = alone();
    let (json, svg) = (scratch("poll", "json"), scratch("poll", "svg"));
    let line = format!("bench --device 20,100 --shape mixed --depth 1,4 {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    let files = ["--json".into(), json.clone(), "--svg".into(), svg.clone()];
    poll::main(&Poll::parse_from(words.chain(files)).args).expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
    assert_eq!(
        sides,
        ["block", "classic", "half-mean", "half-min", "ours", "cautious"].repeat(4)
    );
    assert_eq!(rows[0]["case"], "device=20us-mixed/depth=1");
    for row in rows {
        let part = |figure: &str| row[figure].as_f64().expect("a number");
        assert!(is_positive(&row["iops"]) && is_positive(&row["cpu"]), "{row}");
        assert!((0.0..=1.0).contains(&part("oversleep_rate")), "{row}");
        assert!(part("cpu_limit") > 0.0 && part("cpu_limit") <= 1.0, "{row}");
    }
    let wrong = Poll::parse_from(["bench", "--depth", "0"]);
    let error = poll::main(&wrong.args).expect_err("refused").to_string();
    assert!(
        error.contains("--depth 0 rejected: must be from 1 to 256"),
        "{error}"
    );
    for file in [json, svg] {
        let _ = std::fs::remove_file(file);
    }
}

#[test]
fn run_queue_bench_counts_the_runs_that_each_side_schedules() {
    let json = scratch("run-queue", "json");
    let run = |drive: &str| {
        let line = format!("bench --jobs 2 --tags 8 --depth 4,64{drive} {TINY}");
        let words = line.split_whitespace().map(PathBuf::from);
        run_queue::main(&RunQueue::parse_from(words.chain(["--json".into(), json.clone()])).args)
    };
    for drive in ["", " --drive bandwidth=1G"] {
        run(drive).expect("the bench runs");
        let report = read(&json);
        let rows = report["rows"].as_array().expect("rows");
        let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
        assert_eq!(sides, ["before", "marked", "after"].repeat(2));
        assert_eq!(rows[3]["case"], "jobs=2/depth=64");
        assert!(rows.iter().all(|row| is_positive(&row["iops"])));
        let before = rows[3]["schedules_per_io"].as_f64().expect("a number");
        assert!(before > 1.0, "each end runs both contexts: {before}");
    }
    let error = format!("{:#}", run(" --drive latency").expect_err("no value"));
    assert!(error.contains("must be KEY=VALUE"), "{error}");
    let error = format!("{:#}", run(" --drive depth=0").expect_err("out of range"));
    assert!(error.contains("from 1 to 65536"), "{error}");
    let _ = std::fs::remove_file(json);
}

#[test]
fn stack_bench_puts_mapped_disks_on_the_drive() {
    let json = scratch("mapped", "json");
    let line = format!("bench --side raw,linear,striped {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    stack::main(&Stack::parse_from(words.chain(["--json".into(), json.clone()])).args)
        .expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["raw", "linear", "striped"]);
    let is_sound = |row: &serde_json::Value| row["case"] == "mapped" && is_positive(&row["iops"]);
    assert!(rows.iter().all(is_sound));
    let _ = std::fs::remove_file(json);
}

#[test]
fn stats_bench_measures_all_four_sides() {
    let json = scratch("stats", "json");
    let line = format!("bench --elevator mq-deadline --jobs 1,2 {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    stats::main(&Stats::parse_from(words.chain(["--json".into(), json.clone()])).args)
        .expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["published", "before", "after", "off"].repeat(2));
    assert_eq!(rows[4]["case"], "null/mq-deadline/jobs=2");
    assert!(rows.iter().all(|row| is_positive(&row["iops"])));
}

#[test]
fn scale_bench_models_every_elevator() {
    let json = scratch("scale", "json");
    let line = format!("bench --submitters 1,4 {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    scale::main(&Scale::parse_from(words.chain(["--json".into(), json.clone()])).args)
        .expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let names = |row: &serde_json::Value| {
        format!(
            "{} {}",
            row["case"].as_str().unwrap(),
            row["side"].as_str().unwrap()
        )
    };
    let of_bfq: Vec<_> = rows
        .iter()
        .map(names)
        .filter(|name| name.contains("bfq"))
        .collect();
    assert_eq!(
        of_bfq,
        [
            "model/bfq/submitters=1 lock",
            "model/bfq/submitters=1 gate",
            "model/bfq/submitters=4 lock",
            "model/bfq/submitters=4 gate",
            "model/bfq/submitters=4 four-gates"
        ]
    );
    let is_sound = |row: &serde_json::Value| is_positive(&row["iops"]) && is_positive(&row["cpu_ns_per_io"]);
    assert!(rows.iter().all(is_sound));
    let _ = std::fs::remove_file(json);
}

#[test]
fn single_dispatch_bench_measures_with_dbench_on_a_real_file_system() {
    let works = |program: &str, word: &str| {
        let output = Command::new(program).arg(word).output();
        output.is_ok_and(|output| output.status.success())
    };
    let is_root = rustix::process::geteuid().is_root();
    if !is_root || !works("losetup", "--find") || !works("mkfs.xfs", "-V") || !works("dbench", "--help") {
        blkmq_testkit::skip("it needs root, loop devices, mkfs.xfs and dbench");
        return;
    }
    let all = ["before", "single-queue", "after", "kernel"];
    for (more, case, sides) in [
        ("", "dbench/bfq/clients=2", &all[..]),
        (
            "--filesystem ext4 --side single-queue,after",
            "dbench-ext4/bfq/clients=2",
            &all[1..3],
        ),
    ] {
        let json = scratch("dbench", "json");
        let words = format!("bench --dbench --quick --force --clients 2 --ops 40 {more}");
        let words = words.split_whitespace().map(PathBuf::from);
        let files = ["--json".into(), json.clone()];
        single_dispatch::main(&SingleDispatch::parse_from(words.chain(files)).args).expect("the bench runs");
        let report = read(&json);
        let rows = report["rows"].as_array().expect("rows");
        let measured: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
        assert_eq!(measured, sides);
        for row in rows {
            assert_eq!(row["case"], case);
            assert!(
                is_positive(&row["seconds"]) && is_positive(&row["requests"]),
                "{row}"
            );
        }
        let _ = std::fs::remove_file(json);
    }
}

#[test]
fn door_of_dbench_that_cannot_be_is_refused() {
    let parse = |line: &str| SingleDispatch::try_parse_from(line.split_whitespace());
    assert!(parse("bench --door ublk").is_err(), "without dbench");
    assert!(parse("bench --dbench --door nbd").is_err(), "no block device");
    let args = parse("bench --dbench --door ublk").expect("a door").args;
    assert_eq!(args.door, Door::Ublk);
    if Path::new("/dev/ublk-control").exists() {
        blkmq_testkit::skip("this kernel has ublk_drv: what is said without it cannot be seen");
        return;
    }
    let error = single_dispatch::main(&args).expect_err("no device of ublk can be made");
    assert!(error.to_string().contains("modprobe ublk_drv"), "{error}");
}

#[test]
fn single_dispatch_bench_measures_all_sides_on_the_null_drive_and_the_modelled_disk() {
    let (json, svg) = (scratch("dispatch", "json"), scratch("dispatch", "svg"));
    let line = format!("bench --elevator mq-deadline --jobs 1,2 --clients 1,2 {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    let files = ["--json".into(), json.clone(), "--svg".into(), svg.clone()];
    single_dispatch::main(&SingleDispatch::parse_from(words.chain(files)).args).expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
    assert_eq!(sides[..6], ["before", "single-queue", "after"].repeat(2));
    assert_eq!(
        sides[6..],
        ["before", "single-queue", "single-direct", "after"].repeat(2)
    );
    assert_eq!(rows[3]["case"], "null/mq-deadline/jobs=2");
    assert_eq!(rows[13]["case"], "disk/mq-deadline/clients=2");
    for row in rows {
        let on_disk = row["case"].as_str().unwrap().starts_with("disk/");
        assert!(is_positive(&row["iops"]), "{row}");
        assert_eq!(is_positive(&row["seconds"]), on_disk, "{row}");
    }
    // Beside busy processors the threads of so short a window can be gone before their time is read.
    assert!(
        rows.iter().any(|row| is_positive(&row["cpu_ns_per_io"])),
        "{rows:?}"
    );
    let _ = (std::fs::remove_file(json), std::fs::remove_file(svg));
}

#[test]
fn nbd_bench_measures_every_peer_that_is_installed() {
    for peer in ["qemu-storage-daemon", "nbdkit", "nbdkit-t1"] {
        let program = peer.trim_end_matches("-t1");
        if Command::new(program).arg("--version").output().is_err() {
            blkmq_testkit::skip(&format!("{program} is not installed (run `cargo xtask setup`)"));
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
            for key in ["p50_ns", "p99_ns", "p999_ns", "cpu_ns_per_io", "ctx_per_io"] {
                assert_eq!(
                    row["by_round"][key].as_array().map(Vec::len),
                    Some(2),
                    "{key}: {row}"
                );
            }
        }
        let programs = report["programs"].as_array().expect("programs");
        let is_it = |noted: &&Value| noted["name"] == program;
        let noted = programs.iter().find(is_it).expect("what was measured is noted");
        assert!(
            noted["version"]
                .as_str()
                .is_some_and(|version| !version.is_empty()),
            "{noted}"
        );
        assert!(
            noted["commands"][0]
                .as_str()
                .is_some_and(|command| command.starts_with(program)),
            "{noted}"
        );
        let picture = std::fs::read_to_string(&svg).expect("the picture is there");
        assert!(picture.starts_with("<svg"));
        let _ = (std::fs::remove_file(json), std::fs::remove_file(svg));
    }
}

#[test]
fn images_bench_measures_images_of_ours_and_of_qemu_and_raw_files() {
    for program in ["fio", "qemu-img", "qemu-io", "qemu-storage-daemon"] {
        if Command::new(program).arg("--version").output().is_err() {
            return blkmq_testkit::skip(&format!("{program} is not installed (run `cargo xtask setup`)"));
        }
    }
    if !blkmq_testkit::daemon::program().is_file() {
        return blkmq_testkit::skip("blkmq is not built beside this test (cargo build -p blkmq)");
    }
    let json = scratch("images", "json");
    let line = format!("images --mib 16 --case read4k-depth1,write4k,first64k,chain4 {TINY}");
    let words = line.split_whitespace().map(PathBuf::from);
    let files = ["--json".into(), json.clone()];
    images::main(&Images::parse_from(words.chain(files)).args).expect("the bench runs");
    let report = read(&json);
    assert_eq!(report["bench"], "images");
    let rows = report["rows"].as_array().expect("rows").iter();
    let rows: Vec<(&str, &str)> = rows
        .inspect(|row| assert!(is_positive(&row["iops"]) && is_positive(&row["p50_ns"]), "{row}"))
        .filter_map(|row| Some((row["case"].as_str()?, row["side"].as_str()?)))
        .collect();
    let wanted = [
        ("read=4k/depth=1", "ours"),
        ("read=4k/depth=1", "qemu-storage-daemon"),
        ("read=4k/depth=1", "ours-raw"),
        ("write=4k/depth=32", "ours"),
        ("write=4k/depth=32", "qemu-storage-daemon"),
        ("write=4k/depth=32", "ours-raw"),
        ("first=64k/depth=32", "ours"),
        ("first=64k/depth=32", "qemu-storage-daemon"),
        ("read=4k/depth=32/chain=4", "ours"),
        ("read=4k/depth=32/chain=4", "qemu-storage-daemon"),
    ];
    assert_eq!(rows, wanted);
    let _ = std::fs::remove_file(json);
}

/// Whether the file supports direct I/O, without which the bench on a file is pointless.
/// Context switches are counted for the whole process, so a test that sleeps thousands of times
/// must not run beside one that asserts how few there are.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn scratch(name: &str, suffix: &str) -> PathBuf {
    std::env::temp_dir().join(format!("blkmq-bench-test-{}-{name}.{suffix}", std::process::id()))
}

fn read(json: &Path) -> Value {
    let text = std::fs::read_to_string(json).expect("the report was written");
    serde_json::from_str(&text).expect("the report is JSON")
}

fn is_positive(value: &Value) -> bool {
    value.as_f64().is_some_and(|number| number > 0.0)
}

/// Long enough for every thread to run on a busy machine, and whatever else it does.
const TINY: &str = "--seconds 0.1 --rounds 2 --force";
