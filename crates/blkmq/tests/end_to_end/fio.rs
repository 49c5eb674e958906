//! Tests whether fio finds every block that it wrote.

use std::os::unix::fs::FileExt;
use std::os::unix::process::ExitStatusExt;
use std::time::Duration;

use serde_json::Value;

use crate::common::tools::{Said, installed, run, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn fio_verifies_random_sizes_and_offsets_from_several_jobs() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 64 * MIB);
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image}")]);
    let words = "--rw=randwrite --bsrange=512-128k --size=16m --offset_increment=16m --numjobs=4 --iodepth=16 --fsync=64";
    let jobs = jobs(&fio(&daemon.uri("vm1"), words, VERIFY));
    assert_eq!(jobs.len(), 4);
    for job in &jobs {
        assert!(
            bytes(job, "write") >= 16 * MIB,
            "a job wrote only {} bytes",
            bytes(job, "write")
        );
        assert!(
            bytes(job, "read") >= 16 * MIB,
            "a job verified only {} bytes",
            bytes(job, "read")
        );
    }
    daemon.stop();
}

#[test]
fn two_disks_of_one_scheduler_keep_their_data_apart() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    // On one filesystem, and so on one queue: the second disk names no scheduler and gets the first
    // one's.
    let disks = ["a", "b"].map(|name| format!("name={name},file={}", scratch.image(name, 32 * MIB)));
    let daemon = Daemon::serve(&scratch, &[&format!("{},sched=mq-deadline", disks[0]), &disks[1]]);
    let words =
        "--rw=randrw --bsrange=4k-64k --size=16m --offset_increment=16m --numjobs=2 --iodepth=32 --fsync=128";
    std::thread::scope(|scope| {
        for (disk, seed) in [("a", 1), ("b", 2)] {
            let (uri, words) = (daemon.uri(disk), format!("{words} --randseed={seed}"));
            scope.spawn(move || {
                for job in jobs(&fio(&uri, &words, VERIFY)) {
                    assert!(
                        bytes(&job, "write") > 0 && bytes(&job, "read") > 0,
                        "{disk}: a job did nothing"
                    );
                }
            });
        }
    });
    daemon.stop();
}

#[test]
fn fio_verifies_every_operation_on_memory_and_on_a_file() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("file.raw", 32 * MIB);
    let daemon = Daemon::serve(
        &scratch,
        &[&format!("name=file,file={image}"), "name=ram,ram=32M"],
    );
    for disk in ["file", "ram"] {
        let uri = daemon.uri(disk);
        for rw in [
            "write",
            "randwrite",
            "randrw",
            "readwrite",
            "trimwrite",
            "randtrimwrite",
        ] {
            // A trim and the write that follows it go to the same block; at a larger depth fio
            // itself lets them overtake each other.
            let depth = if rw.contains("trim") { 1 } else { 8 };
            let words = format!("--rw={rw} --bs=4k --size=8m --iodepth={depth} --fsync=32");
            let jobs = jobs(&fio(&uri, &words, VERIFY));
            assert!(bytes(&jobs[0], "write") > 0, "{disk} {rw}: nothing was written");
            if rw.contains("trim") {
                assert!(bytes(&jobs[0], "trim") > 0, "{disk} {rw}: nothing was trimmed");
            }
        }
        for rw in ["read", "randread", "trim", "randtrim"] {
            let jobs = jobs(&fio(
                &uri,
                &format!("--rw={rw} --bs=16k --size=8m --iodepth=8"),
                "",
            ));
            let kind = if rw.contains("trim") { "trim" } else { "read" };
            assert_eq!(bytes(&jobs[0], kind), 8 * MIB, "{disk} {rw}");
        }
    }
    daemon.stop();
}

#[test]
fn fio_finds_what_it_wrote_after_a_restart_and_notices_one_changed_byte() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 16 * MIB);
    let disk = format!("name=vm1,file={image}");
    let words = "--rw=randwrite --bs=4k --size=16m --iodepth=32 --randseed=7";

    let daemon = Daemon::serve(&scratch, &[&disk]);
    fio(
        &daemon.uri("vm1"),
        words,
        "--verify=crc32c --do_verify=0 --end_fsync=1",
    );
    daemon.stop();

    let daemon = Daemon::serve(&scratch, &[&disk]);
    let verify_only = "--verify=crc32c --verify_only=1 --verify_fatal=1";
    let jobs = jobs(&fio(&daemon.uri("vm1"), words, verify_only));
    assert_eq!(bytes(&jobs[0], "read"), 16 * MIB);
    daemon.stop();

    // Checks that the verification fails if the data is wrong.
    let file = std::fs::File::options()
        .write(true)
        .open(&image)
        .expect("the image opens");
    file.write_all_at(b"?", 5 * MIB + 1234)
        .expect("the image takes a byte");
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let said = try_fio(&daemon.uri("vm1"), words, verify_only);
    assert!(!said.success, "fio did not notice a changed byte");
    assert!(
        said.stderr.contains("verify"),
        "fio failed for another reason: {}",
        said.stderr
    );
    daemon.stop();
}

#[test]
fn fio_finds_what_it_wrote_with_flushes_before_kill_9() {
    if !installed(&["fio"]) {
        return;
    }
    let scratch = Scratch::new();
    let disk = format!("name=vm1,file={}", scratch.image("vm1.raw", 256 * MIB));
    // The state file tells the second run how far the first one came.
    let words = format!(
        "--thread --rw=randwrite --bs=4k --size=256m --iodepth=8 --fsync=2 --randseed=5 --rate_iops=3000 --aux-path={}",
        scratch.word("")
    );
    let mut daemon = Daemon::serve(&scratch, &[&disk]);
    // fio waits forever for a write whose server is gone, and then does not write its state. So fio
    // itself kills the daemon, after it has written the state, and is ended if it is stuck then.
    let save = "--verify=crc32c --do_verify=0 --verify_state_save=1 --trigger-timeout=2";
    let mut run = with_fio(&["-k", "1", "5"], &daemon.uri("vm1"), &words, save);
    run.push(format!("--trigger=kill -9 {}", daemon.id()));
    let cut_short = try_run("timeout", &run);
    let ended = daemon.ended_within(Duration::from_secs(10));
    assert_eq!(
        ended.signal(),
        Some(9),
        "{}\n{}",
        cut_short.stdout,
        cut_short.stderr
    );
    let daemon = Daemon::serve(&scratch, &[&disk]);
    // One at a time: at a larger depth fio also expects the last writes, which were never
    // acknowledged.
    let load = "--iodepth=1 --verify=crc32c --verify_only=1 --verify_fatal=1 --verify_state_load=1";
    let resumed = fio(&daemon.uri("vm1"), &words, load);
    daemon.stop();
    let verified = bytes(&jobs(&resumed)[0], "read");
    assert!(
        verified >= MIB / 4,
        "only {verified} bytes were written before the kill: no test"
    );
}

/// Runs fio on the disk; the test fails unless fio succeeds.
pub(crate) fn fio(uri: &str, words: &str, verify: &str) -> Said {
    let said = try_fio(uri, words, verify);
    assert!(
        said.success,
        "fio {words} {verify}\nfailed:\n{}\n{}",
        said.stdout, said.stderr
    );
    said
}

fn try_fio(uri: &str, words: &str, verify: &str) -> Said {
    let all = with_fio(&[], uri, words, verify);
    try_run(&all[0], &all[1..])
}

/// The arguments of fio, after those of a program that runs it.
fn with_fio(before: &[&str], uri: &str, words: &str, verify: &str) -> Vec<String> {
    // The engine must precede its address.
    let uri = format!("--uri={uri}");
    // fio must not leave a state file in its directory, unless a test needs it.
    let own = [
        "fio",
        "--name=job",
        "--ioengine=nbd",
        &uri,
        "--output-format=json",
        "--verify_state_save=0",
    ];
    let given = words.split_whitespace().chain(verify.split_whitespace());
    before
        .iter()
        .copied()
        .chain(own)
        .chain(given)
        .map(str::to_owned)
        .collect()
}

pub(crate) fn jobs(said: &Said) -> Vec<Value> {
    // Messages may precede the report.
    let start = said
        .stdout
        .find('{')
        .unwrap_or_else(|| panic!("fio printed no report: {}", said.stdout));
    let report: Value = serde_json::from_str(&said.stdout[start..]).expect("fio's report is JSON");
    let jobs = report["jobs"].as_array().expect("the report has jobs").clone();
    for job in &jobs {
        assert_eq!(job["error"], 0, "a job ended with an error: {job}");
    }
    jobs
}

pub(crate) fn bytes(job: &Value, kind: &str) -> u64 {
    job[kind]["io_bytes"]
        .as_u64()
        .unwrap_or_else(|| panic!("no {kind} in the report"))
}

pub(crate) const VERIFY: &str = "--verify=crc32c --do_verify=1 --verify_fatal=1 --verify_dump=0";
const MIB: u64 = 1 << 20;

#[test]
fn fio_understands_the_engine_that_the_tests_use() {
    if installed(&["fio"]) {
        assert!(run("fio", &["--enghelp=nbd"]).stdout.contains("uri"));
    }
}
