//! Keys: a disk without one is locked alone, they come over `ctl`, they are in no log, dump or core, and a
//! successor gets them.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blkmq::control::client::Client as Control;
use serde_json::json;

use super::crypt::{Crypt, KEY, has_tools};
use super::{MIB, disks};
use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{Said, output_within};
use crate::common::{Daemon, Scratch};
use crate::upgrade::load::Load;
use crate::upgrade::upgrades;

/// Runs `blkmq ctl` against the daemon of a test.
pub(crate) fn ctl(scratch: &Scratch, words: &[&str]) -> Said {
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let mut command = std::process::Command::new(program());
    command.args(["ctl", "--socket", &socket]).args(words);
    let output = output_within(&mut command, Duration::from_secs(60));
    Said {
        success: output.status.success(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

pub(crate) fn start(scratch: &Scratch, disks: &[String], more: &[&str]) -> Daemon {
    let nbd = format!("unix:{}", scratch.word("nbd.sock"));
    let control = format!("unix:{}", scratch.word("control.sock"));
    let mut words = vec!["--nbd", &nbd, "--control", &control];
    disks.iter().for_each(|disk| words.extend(["--disk", disk]));
    words.extend(more);
    Daemon::start(&words)
}

pub(super) fn state(scratch: &Scratch, name: &str) -> String {
    let path = scratch.path("control.sock");
    // A successor has its socket a moment after it has taken over.
    let until = std::time::Instant::now() + Duration::from_secs(10);
    let mut control = loop {
        match Control::connect(&path) {
            Ok(control) => break control,
            Err(error) if std::time::Instant::now() > until => panic!("it is served: {error:?}"),
            Err(_) => std::thread::sleep(Duration::from_millis(20)),
        }
    };
    let disks = control.call("disk.list", &json!({})).expect("an answer");
    let all = disks.as_array().expect("a list");
    let disk = all.iter().find(|disk| disk["name"] == name).expect("the disk");
    disk["state"].as_str().expect("a text").to_owned()
}

#[test]
fn disk_without_its_key_is_locked_alone_until_it_is_unlocked() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    std::fs::write(scratch.path("wrong"), "another passphrase").expect("a file");
    let wrong = scratch.word("wrong");
    for key in ["", ",key=/no/such/file", &format!(",key={wrong}")] {
        let all = [
            format!("name=vm1,luks=vm1-raw{key}"),
            format!("name=vm1-raw,file={image}"),
            "name=other,ram=4M".to_owned(),
        ];
        let daemon = start(&scratch, &all, &[]);
        let socket = scratch.path("nbd.sock");
        assert_eq!(state(&scratch, "vm1"), "locked");
        let mut other = Client::connect(&socket, "other").expect("the others serve");
        other.write(0, &block(1, 1)).expect("a write");
        assert!(
            Client::connect(&socket, "vm1").is_err(),
            "a locked disk has a client"
        );
        let refused = ctl(&scratch, &["unlock", "vm1", "--key-file", &wrong]);
        assert!(
            !refused.success
                && refused
                    .stderr
                    .contains("disk vm1: no key slot opens with this key"),
            "{}",
            refused.stderr
        );
        let done = ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
        assert!(done.success, "{}", done.stderr);
        assert_eq!(state(&scratch, "vm1"), "ok");
        let mut client = Client::connect(&socket, "vm1").expect("it serves");
        client.write(0, &block(1, 1)).expect("a write");
        assert!(client.read(0, BLOCK).expect("a read") == block(1, 1));
        let again = ctl(&scratch, &["unlock", "vm1", "--key-file", &crypt.key_file()]);
        assert!(
            !again.success && again.stderr.contains("disk vm1: is not locked"),
            "{}",
            again.stderr
        );
        drop((client, other));
        daemon.stop();
    }
}

#[test]
fn keys_are_in_no_log_no_dump_and_no_core() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let one = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf argon2id");
    let two = crypt.format("two", 32 * MIB, "--type luks1");
    let encoded = STANDARD.encode(KEY);
    // While nobody has the lock of the image.
    let secrets = [
        // No secret, but in the daemon's memory.
        scratch.word("nbd.sock").into_bytes(),
        KEY.as_bytes().to_vec(),
        encoded.clone().into_bytes(),
        crypt.volume_key(&one),
        crypt.volume_key(&two),
    ];
    let mut all = disks("vm1", &one, &crypt).to_vec();
    all.extend([
        "name=vm2,luks=vm2-raw".to_owned(),
        format!("name=vm2-raw,file={two}"),
    ]);
    let daemon = start(&scratch, &all, &[]);
    // Requests that are refused, are not read to the end, or whose answers nobody reads.
    let request = |disk: &str, more: &str| {
        let params = format!("{{\"disk\":\"{disk}\",\"key\":\"{encoded}\"{more}}}");
        format!("{{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"disk.unlock\",\"params\":{params}}}\n")
    };
    for line in [
        request("vm2", ",\"more\":1"),
        request("vm3", ""),
        request("vm1", ""),
    ] {
        for end in [line.len(), line.len() - 2] {
            let stream = UnixStream::connect(scratch.path("control.sock")).expect("it listens");
            (&stream).write_all(&line.as_bytes()[..end]).expect("it reads");
        }
    }
    // Lines that turn out to be no request after the key, and keys that are not what they should be. One client each,
    // and the answer comes before the next one, whose thread would use the memory again.
    let slashes = encoded.replace('/', "\\/");
    assert!(slashes != encoded, "the key has no slash in base64");
    let valid = request("vm2", "");
    for line in [
        request("vm2", ",\"more\":1e999"),
        request("vm2", ",\"more\":\"\\ud800\""),
        request("vm2", &format!(",\"more\":{}", "[".repeat(200))),
        request("vm2", ",\"key\":1"),
        valid.replace("}}", ""),
        valid.replace("}}", "}]"),
        valid.replace("2.0", "1.0"),
        valid.replace("\"id\":1", "\"id\":[]"),
        valid.replace("method", "methods"),
        valid.replace("disk.unlock", "disk.unlok"),
        valid.replace("disk.unlock", "disk.resize"),
        format!("[{}]\n", valid.trim_end()),
        valid.replace(&encoded, &format!("{encoded}!")),
        valid.replace(&format!("\"{encoded}\""), &format!("[\"{encoded}\"]")),
        valid.replace("vm2", "vm3").replace(&encoded, &slashes),
    ] {
        let stream = UnixStream::connect(scratch.path("control.sock")).expect("it listens");
        (&stream).write_all(line.as_bytes()).expect("it reads");
        let mut answer = String::new();
        BufReader::new(&stream).read_line(&mut answer).expect("an answer");
        assert!(answer.contains("error"), "{line}{answer}");
        let found = searched_memory(daemon.id(), &secrets, Searched::Dumped).unwrap_or_default();
        assert!(
            found.iter().all(|(which, _)| *which == 0),
            "{found:?} after {line}"
        );
    }
    assert!(ctl(&scratch, &["unlock", "vm2", "--key-file", &crypt.key_file()]).success);
    for disk in ["vm1", "vm2"] {
        let mut client = Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served");
        for number in 0..64 {
            client
                .write(number * BLOCK as u64, &block(number, 1))
                .expect("a write");
            client.read(number * BLOCK as u64, BLOCK).expect("a read");
        }
    }
    for words in [
        &["dump"][..],
        &["dump", "--json"],
        &["list", "disks", "--json"],
        &["stats", "--json"],
    ] {
        let said = ctl(&scratch, words);
        assert!(
            said.success && !said.stdout.contains(KEY.trim_end()),
            "{words:?}: {}",
            said.stdout
        );
    }
    assert!(!daemon.said().contains(KEY.trim_end()), "{}", daemon.said());
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.id())).expect("our child's");
    assert!(status.contains("CoreDumping:\t0"), "{status}");
    match searched_memory(daemon.id(), &secrets, Searched::Dumped) {
        Ok(found) => {
            assert!(
                found.iter().any(|(which, _)| *which == 0),
                "the search finds nothing"
            );
            assert!(found.iter().all(|(which, _)| *which == 0), "{found:?}");
        }
        Err(error) => blkmq_testkit::skip(&format!(
            "the memory of a process that is not dumpable needs root: {error}"
        )),
    }
    daemon.stop();
}

#[test]
fn clients_of_an_encrypted_disk_go_on_over_upgrades_without_its_key_file() {
    if !has_tools(&["cryptsetup"]) {
        return;
    }
    let scratch = Scratch::new();
    let crypt = Crypt::new(&scratch);
    let image = crypt.format("one", 32 * MIB, "--type luks2 --pbkdf pbkdf2");
    let all = disks("vm1", &image, &crypt);
    let upgrade = format!("unix:{}", scratch.word("up.sock"));
    let mut daemon = start(&scratch, &all, &["--upgrade-socket", &upgrade]);
    std::fs::remove_file(scratch.path("key")).expect("the key's file");
    let load = Load::start(&scratch.path("nbd.sock"), "vm1", 3);
    for _ in 0..upgrades() {
        std::thread::sleep(Duration::from_millis(50));
        let next = start(&scratch, &all, &["--take-over", &upgrade]);
        let status = daemon.ended_within(Duration::from_secs(20));
        assert!(status.success(), "{}", daemon.said());
        daemon = next;
    }
    assert!(load.stop() > 0);
    assert_eq!(state(&scratch, "vm1"), "ok");
    daemon.stop();
}

/// The memory in which secrets are looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Searched {
    /// What a core would have.
    Dumped,
    Everything,
}

/// Looks for secrets in the memory of a process. Returns which are there, and where.
pub(super) fn searched_memory(
    process: u32,
    secrets: &[Vec<u8>],
    searched: Searched,
) -> std::io::Result<Vec<(usize, String)>> {
    let maps = BufReader::new(std::fs::File::open(format!("/proc/{process}/smaps"))?);
    let memory = std::fs::File::open(format!("/proc/{process}/mem"))?;
    let (mut found, mut range) = (Vec::new(), String::new());
    for line in maps.lines() {
        let line = line?;
        let first = line.split_whitespace().next().unwrap_or_default();
        if first.contains('-') {
            range = line;
            continue;
        }
        let Some(flags) = line.strip_prefix("VmFlags:") else {
            continue;
        };
        let flags: Vec<&str> = flags.split_whitespace().collect();
        let is_left_out = searched == Searched::Dumped && flags.contains(&"dd");
        if !flags.contains(&"rd") || is_left_out || flags.contains(&"io") {
            continue;
        }
        let ends = range.split(' ').next().and_then(|range| range.split_once('-'));
        let ends = ends.map(|(start, end)| [start, end].map(|end| u64::from_str_radix(end, 16)));
        let Some([Ok(start), Ok(end)]) = ends else {
            panic!("{range}")
        };
        for which in used_pages(&memory, start, end)
            .iter()
            .flat_map(|bytes| secrets_in(bytes, secrets))
        {
            found.push((which, range.clone()));
        }
    }
    Ok(found)
}

/// The runs of pages that are not zero.
fn used_pages(memory: &std::fs::File, start: u64, end: u64) -> Vec<Vec<u8>> {
    let (mut runs, mut run, mut page) = (Vec::new(), Vec::new(), [0; 4096]);
    for at in (start..end).step_by(page.len()) {
        // Some are not readable, as [vvar].
        let is_used = memory.read_exact_at(&mut page, at).is_ok() && page != [0; 4096];
        match is_used {
            true => run.extend_from_slice(&page),
            false if !run.is_empty() => runs.push(std::mem::take(&mut run)),
            false => {}
        }
    }
    runs.push(run);
    runs
}

fn secrets_in(bytes: &[u8], secrets: &[Vec<u8>]) -> Vec<usize> {
    let is_there = |secret: &[u8]| {
        // The first half of a volume key is the key of the data. A secret that was freed has lost its first bytes.
        let len = secret.len().min(24);
        let mut starts = [0, (secret.len() - len) / 2].into_iter();
        starts.any(|at| is_in(bytes, &secret[at..at + len]))
    };
    (0..secrets.len())
        .filter(|which| is_there(&secrets[*which]))
        .collect()
}

/// Whether `bytes` has `part` somewhere. By the standard library's search of one byte, which is quick in any build.
fn is_in(mut bytes: &[u8], part: &[u8]) -> bool {
    while bytes.skip_until(part[0]).is_ok_and(|skipped| skipped > 0) {
        if bytes.starts_with(&part[1..]) {
            return true;
        }
    }
    false
}
