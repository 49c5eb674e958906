//! The engine's own bench: submitters, elevators, devices and paths.

use std::path::{Path, PathBuf};
use std::process::Command;

use blkmq_bench::engine::many::{self, Crowd};
use blkmq_bench::engine::{self, EngineArgs};
use blkmq_core::sched;
use clap::Parser;

use super::{TINY, is_positive, read, scratch};

#[derive(Parser)]
struct Engine {
    #[command(flatten)]
    args: EngineArgs,
}

#[test]
fn engine_bench_measures_every_elevator_and_submitter() {
    let json = scratch("engine", "json");
    run_engine(&format!("--jobs 1,8 --depth 1,64 {TINY}"), &json).expect("the bench runs");
    let report = read(&json);
    assert_eq!(report["bench"], "engine");
    let rows = report["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), sched::BUILT_IN.len() * 2 * 2);
    assert_eq!(rows[3]["case"], "null/none/jobs=8/depth=64");
    for row in rows {
        assert!(is_positive(&row["iops"]) && is_positive(&row["p999_ns"]), "{row}");
    }
    let _ = std::fs::remove_file(json);
}

#[test]
fn engine_bench_with_groups_gives_each_submitter_its_own() {
    let json = scratch("groups", "json");
    run_engine(
        &format!("--groups --elevator bfq --jobs 2 --depth 8 {TINY}"),
        &json,
    )
    .expect("the bench runs");
    let row = &read(&json)["rows"][0];
    assert_eq!(row["case"], "null/bfq/jobs=2/depth=8/groups");
    assert!(is_positive(&row["iops"]), "{row}");
    let error = run_engine(&format!("--groups --device ram {TINY}"), &json).expect_err("refused");
    assert!(
        error
            .to_string()
            .contains("--groups rejected: it needs --device null"),
        "{error:#}"
    );
    let _ = std::fs::remove_file(json);
}

#[test]
fn every_pattern_runs_on_memory_and_on_a_file() {
    let (json, disk) = (scratch("patterns", "json"), scratch("disk", "raw"));
    std::fs::write(&disk, vec![7; 4 << 20]).expect("the file is written");
    let file = format!("file:{}", disk.display());
    for device in ["ram", &file] {
        for pattern in ["randread", "randwrite", "read", "write"] {
            let options = "--elevator mq-deadline --jobs 2 --depth 8 --bs 8k --overwrite";
            let line = format!("--device {device} --rw {pattern} {options} {TINY}");
            if device == file && !has_direct_io(&disk) {
                blkmq_testkit::skip("a file: the filesystem of temporary files has no direct I/O");
                break;
            }
            run_engine(&line, &json).unwrap_or_else(|error| panic!("{pattern} on {device}: {error:#}"));
            let row = &read(&json)["rows"][0];
            assert!(is_positive(&row["iops"]), "{row}");
        }
    }
    let _ = (std::fs::remove_file(json), std::fs::remove_file(disk));
}

#[test]
fn copies_from_an_nbd_server_count_the_processor_time_of_ended_threads() {
    for program in ["nbdkit", "nbdcopy"] {
        if Command::new(program).arg("--version").output().is_err() {
            blkmq_testkit::skip(&format!("{program} is not installed (run `cargo xtask setup`)"));
            return;
        }
    }
    let (json, socket) = (scratch("copies", "json"), scratch("copies", "sock"));
    let mut server = Command::new("nbdkit")
        .args(["-f", "-U"])
        .arg(&socket)
        .args(["memory", "256M"])
        .spawn()
        .expect("nbdkit starts");
    while !socket.exists() {
        let ended = server.try_wait().expect("our own child can be asked");
        assert!(ended.is_none(), "nbdkit ended: {ended:?}");
        std::thread::yield_now();
    }
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let result = run_engine(
        &format!("--device {uri} --rw read --bs 256k --jobs 2 {TINY}"),
        &json,
    );
    server.kill().expect("our own child can be killed");
    let _ = server.wait();
    result.expect("the bench runs");
    let report = read(&json);
    let rows = report["rows"].as_array().expect("rows");
    let sides: Vec<_> = rows.iter().map(|row| row["side"].as_str().unwrap()).collect();
    assert_eq!(sides, ["ours", "nbdcopy"]);
    // A thread takes longer than this to receive 256 KiB on any machine; starting the engine,
    // divided over a thousand I/Os, takes less.
    let cpu_ns = rows[0]["cpu_ns_per_io"].as_f64().expect("a number");
    assert!(is_positive(&rows[0]["iops"]) && cpu_ns > 5000.0, "{}", rows[0]);
    let _ = (std::fs::remove_file(json), std::fs::remove_file(socket));
}

#[test]
fn file_is_not_written_to_without_leave() {
    let disk = scratch("precious", "raw");
    std::fs::write(&disk, vec![7; 8192]).expect("the file is written");
    let line = format!("--device file:{} --rw randwrite {TINY}", disk.display());
    let error = run_engine(&line, &scratch("none", "json")).expect_err("refused");
    assert!(error.to_string().contains("--overwrite"), "{error:#}");
    assert_eq!(std::fs::read(&disk).expect("the file is there"), vec![7; 8192]);
    let _ = std::fs::remove_file(disk);
}

#[test]
fn counted_paths_do_as_many_ios_as_they_are_told() {
    let elevators = sched::BUILT_IN.map(|elevator| elevator.name);
    let selectors = blkmq_core::mapper::multipath::Selector::ALL.map(|selector| selector.name());
    let others = ["direct", "depth-1", "polled", "linear", "striped"];
    for way in others.into_iter().chain(elevators).chain(selectors) {
        let done = engine::direct::run(way, 1_000).expect("the way is there");
        assert!((1_000..1_064).contains(&done), "{way}: {done}");
    }
    assert!(engine::direct::run("nowhere", 1).is_err());
}

#[test]
fn twenty_disks_among_idle_ones_do_as_many_ios_as_they_are_told() {
    for (share_queue, elevator) in [(false, sched::NONE), (true, sched::NONE), (true, sched::BFQ)] {
        let crowd = Crowd {
            disks: 25,
            share_queue,
            groups: 0,
            elevator,
        };
        assert_eq!(
            many::run(crowd, 1_000).expect("the path runs"),
            1_000,
            "{crowd:?}"
        );
    }
}

fn run_engine(line: &str, json: &Path) -> anyhow::Result<()> {
    let words = std::iter::once("engine").chain(line.split_whitespace());
    let json = ["--json".into(), json.to_owned()];
    engine::main(&Engine::parse_from(words.map(PathBuf::from).chain(json)).args)
}

fn has_direct_io(file: &Path) -> bool {
    use rustix::fs::{Mode, OFlags};
    rustix::fs::open(file, OFlags::RDWR | OFlags::DIRECT, Mode::empty()).is_ok()
}
