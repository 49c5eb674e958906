//! `blkmq-lab bench fairness --clients`, which measures shares with the daemon itself: it starts the
//! command as its server, and fio or itself as its clients. How large the shares are is not asserted.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use serde_json::Value;

use crate::common::Scratch;
use crate::common::tools::{Lab, Said, installed, lab, output_within};

#[test]
fn clients_of_each_side_are_measured_and_those_with_little_under_way_against_alone() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let json = scratch.path("report.json");
    let said = bench(
        &lab,
        &scratch,
        "--case 1:16:64k,2:4:4k:randwrite --side mq-deadline,bfq --visits 2",
        &json,
    );
    assert!(said.success, "{}", said.stderr);
    let rows = rows(&json);
    let of = |side: &str| -> Vec<&Value> { rows.iter().filter(|row| row["side"] == side).collect() };
    for side in ["none", "mq-deadline", "bfq"] {
        let [case, heavy, light] = of(side)[..] else {
            panic!("{side}: not a row of the case and one of each tenant: {rows:?}");
        };
        for figure in ["mb_per_s", "share_error_worst", "bytes_vs_none", "largest_p99_ns"] {
            assert!(number(case, figure) > 0.0, "{side}: {figure} in {case}");
        }
        assert!(
            case["case"]
                .as_str()
                .is_some_and(|name| name.ends_with("/1:16:64k,2:4:4k:randwrite"))
        );
        // Its due is two thirds, and it has 1/64 of the bytes under way.
        assert!(
            number(light, "of_alone") > 0.0 && number(light, "alone_of_due") > 0.0,
            "{light}"
        );
        assert!(heavy.get("of_alone").is_none(), "{heavy}");
        let sum = number(heavy, "mb_per_s") + number(light, "mb_per_s");
        assert!(sum > 0.0 && number(heavy, "p99_ns") > 0.0);
        assert_eq!(case["rounds"].as_array().map(Vec::len), Some(2));
    }
}

#[test]
fn own_clients_pause_through_both_front_doors_and_are_held_against_goals() {
    let Some(lab) = lab() else { return };
    for door in ["nbd", "vhost-user"] {
        let scratch = Scratch::new();
        let json = scratch.path("report.json");
        let words = format!(
            "--client own --door {door} --side caps,bfq --visits 1 \
             --case 1:8:64k:write,1:4:16k:read,1:1:4k@100,1:4:4k:randwrite/20"
        );
        let said = bench(&lab, &scratch, &words, &json);
        assert!(said.success, "{door}: {}", said.stderr);
        assert!(said.stdout.contains("of 3"), "{door}: {}", said.stdout);
        let rows = rows(&json);
        for side in ["none", "caps", "bfq"] {
            let of_side: Vec<&Value> = rows.iter().filter(|row| row["side"] == side).collect();
            let [case, writer, reader, paced, bursts] = of_side[..] else {
                panic!("{door} {side}: not a row of the case and one of each tenant: {rows:?}");
            };
            for figure in ["light_p50_of_goal", "light_p99_ns_worst", "floods_of_goal"] {
                assert!(number(case, figure) > 0.0, "{door} {side}: {figure} in {case}");
            }
            assert!((0.0..=3.0).contains(&number(case, "goals_met")), "{case}");
            for flood in [writer, reader] {
                assert!(number(flood, "mb_per_s") > 0.0, "{door} {side}: {flood}");
            }
            // A client that never paused would have thousands. It may be late, never early.
            let (paced, bursts) = (number(paced, "iops"), number(bursts, "iops"));
            assert!((5.0..=110.0).contains(&paced), "{door} {side}: {paced}");
            assert!((10.0..=220.0).contains(&bursts), "{door} {side}: {bursts}");
        }
    }
}

#[test]
fn tenants_beyond_the_ninth_have_parts_of_one_image() {
    let Some(lab) = lab() else { return };
    let scratch = Scratch::new();
    let json = scratch.path("report.json");
    let case = ["1:1:4k"; 11].join(",");
    let words = format!("--client own --side none --visits 1 --case {case}");
    let said = bench(&lab, &scratch, &words, &json);
    assert!(said.success, "{}", said.stderr);
    assert!(said.stderr.contains("filling image 9 of 9"), "{}", said.stderr);
    let rows = rows(&json);
    assert_eq!(rows.len(), 1 + 11);
    assert!(rows.iter().all(|row| number(row, "mb_per_s") > 0.0), "{rows:?}");
}

#[test]
fn clients_that_cannot_be_are_refused_with_the_way_out() {
    let Some(lab) = lab() else { return };
    for (words, expected) in [
        (
            "--clients --door vhost-user --client fio",
            "fio has no engine for it; leave --client out",
        ),
        ("--case 1:1:4k@5", "only clients pause; add --clients"),
        ("--door vhost-user", "--clients"),
    ] {
        let mut command = lab.command(&["bench", "fairness"]);
        let said = said(command.args(words.split(' ')));
        assert!(!said.success && said.stderr.contains(expected), "{}", said.stderr);
    }
}

#[test]
fn disk_of_another_server_is_the_drive_of_its_case() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let json = scratch.path("report.json");
    let said = bench(&lab, &scratch, "--only nbd/ --visits 1", &json);
    assert!(said.success, "{}", said.stderr);
    let rows = rows(&json);
    assert_eq!(rows.len(), 2 * 4, "{rows:?}");
    for row in &rows {
        assert!(number(row, "mb_per_s") > 0.0, "{row}");
    }
}

#[test]
fn kernels_sides_are_measured_or_skipped_aloud() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let json = scratch.path("report.json");
    let said = bench(
        &lab,
        &scratch,
        "--kernel --case 1:16:4k,1:16:4k --visits 1",
        &json,
    );
    assert!(said.success, "{}", said.stderr);
    let has_kernel = rows(&json).iter().any(|row| row["side"] == "kernel-bfq");
    assert_ne!(
        has_kernel,
        said.stderr.contains("SKIPPED the kernel's sides"),
        "{}",
        said.stderr
    );
    if !has_kernel {
        blkmq_testkit::skip(&format!("the kernel's sides: {}", said.stderr));
    }
}

#[test]
fn case_that_cannot_be_read_is_refused_with_what_is_allowed() {
    let Some(lab) = lab() else { return };
    for (case, expected) in [
        (
            "1:2",
            "tenant 1 (1:2): must be WEIGHT:DEPTH:SIZE[:OP][@RATE|/REST], as in 2:4:64k:randread",
        ),
        (
            "1:1:4k,2000:1:4k",
            "tenant 2 (2000:1:4k): weight 2000 rejected: must be a whole number from 1 to 1000",
        ),
    ] {
        let said = said(&mut lab.command(&["bench", "fairness", "--case", case]));
        assert!(!said.success && said.stderr.contains(expected), "{}", said.stderr);
    }
}

#[test]
fn images_that_do_not_fit_are_refused_before_they_are_filled() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let said = said(&mut bench_of_clients(&lab, &scratch, "99999T", "1"));
    assert!(
        !said.success && said.stderr.contains("do not fit"),
        "{}",
        said.stderr
    );
    assert!(!said.stderr.contains("filling image"), "{}", said.stderr);
}

#[test]
fn signal_ends_a_bench_and_leaves_nothing_behind() {
    let Some(lab) = lab() else { return };
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let mut command = bench_of_clients(&lab, &scratch, "16M", "1");
    command
        .env("TMPDIR", scratch.path(""))
        .stdout(Stdio::null())
        .stderr(Stdio::piped());
    let mut bench = command.spawn().expect("the bench starts");
    let mut said = BufReader::new(bench.stderr.take().expect("it is piped"));
    let mut line = String::new();
    while !line.starts_with("[1/") {
        line.clear();
        assert!(
            said.read_line(&mut line).expect("it can be read") > 0,
            "the bench ended"
        );
    }
    // Not before the daemon's directory exists.
    let is_there = || std::fs::read_dir(scratch.path("")).is_ok_and(|mut entries| entries.next().is_some());
    while !is_there() {
        std::thread::sleep(Duration::from_millis(5));
    }
    let id = rustix::process::Pid::from_raw(bench.id() as i32).expect("a process has an id");
    rustix::process::kill_process(id, rustix::process::Signal::TERM).expect("it is ours");
    line.clear();
    said.read_to_string(&mut line).expect("it can be read");
    assert!(!bench.wait().expect("it ends").success());
    assert!(line.contains("ended by a signal"), "{line}");
    assert!(!is_there(), "{:?}", std::fs::read_dir(scratch.path("")));
}

fn bench(lab: &Lab, scratch: &Scratch, words: &str, json: &Path) -> Said {
    let mut command = bench_of_clients(lab, scratch, "16M", "0.2");
    said(
        command
            .args(words.split_whitespace())
            .arg("--force")
            .arg("--json")
            .arg(json),
    )
}

fn bench_of_clients(lab: &Lab, scratch: &Scratch, size: &str, seconds: &str) -> Command {
    let mut command = lab.command(&["bench", "fairness", "--clients", "--size", size]);
    command.args(["--seconds", seconds, "--dir", &scratch.word("")]);
    command
}

fn said(command: &mut Command) -> Said {
    let output = output_within(command, TIME);
    Said {
        success: output.status.success(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

fn rows(json: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(json).expect("the report was written");
    let report: Value = serde_json::from_str(&text).expect("the report is JSON");
    report["rows"].as_array().expect("rows").clone()
}

fn number(row: &Value, figure: &str) -> f64 {
    row[figure].as_f64().unwrap_or(0.0)
}

const TIME: Duration = Duration::from_secs(100);
