//! Tests that a daemon which cannot serve what it was asked to states why, and does not start.
//!
//! A message names the object, the value, the limit if there is one, and the next step.

use std::io::ErrorKind;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::daemon::serve_command;
use crate::common::tools::output_within;
use crate::common::{Daemon, Scratch};

/// What is wrong, the words after `serve`, and what the message must contain.
struct Case {
    what: &'static str,
    words: Vec<String>,
    says: Vec<String>,
}

#[test]
fn every_bad_configuration_is_refused_with_object_value_and_next_step() {
    let scratch = Scratch::new();
    let mut wrong = Vec::new();
    for case in cases(&scratch) {
        if let Err(complaint) = refused(&case) {
            wrong.push(format!("{}: {complaint}", case.what));
        }
    }
    assert!(wrong.is_empty(), "{} case(s):\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn bad_configuration_file_is_refused_with_its_name_and_the_place() {
    let scratch = Scratch::new();
    let mut wrong = Vec::new();
    let export = format!("[[export]]\nnbd = \"unix:{}\"\n", scratch.word("refused.sock"));
    let queue = |keys: &str| format!("[disk.vm1]\nram = \"1M\"\nqueue = \"q\"\n[queue.q]\n{keys}\n{export}");
    for (what, text, says) in [
        (
            "an unknown key",
            "[disk.vm1]\nram = \"1M\"\ncolour = \"red\"\n",
            &["blkmq.toml", "vm1", "colour"][..],
        ),
        (
            "an unknown table",
            "[disc.vm1]\nram = \"1M\"\n",
            &["blkmq.toml", "disc"],
        ),
        ("no TOML", "disk vm1 is in vm1.raw\n", &["blkmq.toml", "1"]),
        (
            "a bad block size",
            "[disk.vm1]\nram = \"1M\"\nblock_size = 768\n",
            &["vm1", "768", "power of two"],
        ),
        (
            "a tunable that the scheduler has not",
            &queue("sched = \"bfq\"\ntunables = { read_expire = 3 }"),
            &["queue q", "bfq", "read_expire"],
        ),
        (
            "a tunable without a scheduler",
            &queue("tunables = { read_expire = 3 }"),
            &["queue q", "none", "read_expire"],
        ),
        (
            "a tunable out of its range",
            &queue("sched = \"kyber\"\ntunables = { read_lat_nsec = 1 }"),
            &["queue q", "read_lat_nsec 1 rejected", "1000"],
        ),
        (
            "a depth of nothing",
            &queue("depth = 0"),
            &["queue q", "depth 0", "65536"],
        ),
        (
            "a depth beyond the largest",
            &queue("depth = 65537"),
            &["queue q", "depth 65537", "65536"],
        ),
        (
            "no time at all",
            &queue("timeout = \"0s\""),
            &["queue q", "timeout"],
        ),
        (
            "more threads than there can be",
            &format!("[daemon]\nreactors = 129\n[disk.vm1]\nram = \"1M\"\n{export}"),
            &["129", "128"],
        ),
        (
            "a disk that is not there",
            "[disk.vm1]\nram = \"1M\"\n[[export]]\nnbd = \"unix:x\"\ndisks = [\"vm2\"]\n",
            &["vm2"],
        ),
    ] {
        std::fs::write(scratch.path("blkmq.toml"), text).expect("a configuration can be written");
        let words = vec!["-c".to_owned(), scratch.word("blkmq.toml")];
        let case = Case {
            what,
            words,
            says: says.iter().map(|word| (*word).to_owned()).collect(),
        };
        wrong.extend(
            refused(&case)
                .err()
                .map(|complaint| format!("{what}: {complaint}")),
        );
    }
    let words = vec!["-c".to_owned(), scratch.word("absent.toml")];
    let case = Case {
        what: "a missing file",
        words,
        says: vec!["absent.toml".to_owned()],
    };
    wrong.extend(
        refused(&case)
            .err()
            .map(|complaint| format!("{}: {complaint}", case.what)),
    );
    assert!(wrong.is_empty(), "{} case(s):\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn bad_group_is_refused_with_its_path_the_value_and_what_is_allowed() {
    let scratch = Scratch::new();
    let path = |depth: usize| "/a".repeat(depth);
    let mut wrong = Vec::new();
    for (what, groups, says) in [
        (
            "no weight",
            vec!["/vm1,weight=0"],
            vec!["group /vm1", "weight=0", "from 1 to 1000"],
        ),
        (
            "more than the largest weight",
            vec!["/vm1,weight=1001"],
            vec!["group /vm1", "weight=1001", "from 1 to 1000"],
        ),
        (
            "a cap of nothing",
            vec!["/vm1,iops=0"],
            vec!["group /vm1", "iops", "0"],
        ),
        (
            "a cap below one request",
            vec!["/vm1,bps=4K"],
            vec!["group /vm1", "bps 4096 rejected"],
        ),
        (
            "a cap that is no number",
            vec!["/vm1,read_bps=fast"],
            vec!["group /vm1", "read_bps=fast"],
        ),
        (
            "a burst without a cap",
            vec!["/vm1,iops_burst=3"],
            vec!["group /vm1", "iops_burst=3"],
        ),
        (
            "an unknown key",
            vec!["/vm1,wieght=3"],
            vec!["group /vm1", "wieght", "weight"],
        ),
        (
            "a key given twice",
            vec!["/vm1,iops=3,iops=4"],
            vec!["group /vm1", "iops", "twice"],
        ),
        (
            "a group given twice",
            vec!["/vm1,iops=3", "/vm1,weight=4"],
            vec!["group /vm1", "twice"],
        ),
        (
            "a target that is no time",
            vec!["/vm1,latency_target=soon"],
            vec!["/vm1", "latency_target=soon"],
        ),
        (
            "a path without a root",
            vec!["vm1,weight=3"],
            vec!["vm1", "/customers/a"],
        ),
        ("a path with a hole", vec!["/a//b,weight=3"], vec!["/a//b"]),
        ("a path too deep", vec![path(17).leak()], vec!["/a/a", "16"]),
        (
            "settings of the root's weight",
            vec!["/,weight=3"],
            vec!["group /", "weight"],
        ),
    ] {
        let mut case = case(what, &scratch, &["name=vm1,ram=1M"], &says);
        for group in groups {
            case.words.extend(["--group".to_owned(), group.to_owned()]);
        }
        wrong.extend(
            refused(&case)
                .err()
                .map(|complaint| format!("{what}: {complaint}")),
        );
    }
    assert!(wrong.is_empty(), "{} case(s):\n{}", wrong.len(), wrong.join("\n"));
}

#[test]
fn neither_a_check_nor_a_refusal_leaves_a_file_behind() {
    let scratch = Scratch::new();
    let (new, ragged) = (scratch.word("new.raw"), scratch.word("ragged.raw"));
    let wanted = format!("name=vm1,file={new},size=1M,create=on");
    let checked = output_within(
        &mut serve_command(&["--check", "--disk", &wanted]),
        Duration::from_secs(30),
    );
    assert!(checked.status.success(), "{checked:?}");
    assert!(String::from_utf8_lossy(&checked.stdout).contains("1 disk on 1 queue: all can be served"));
    let refusal = case(
        "a size that is no multiple of a block",
        &scratch,
        &[&format!("name=vm1,file={ragged},size=1000,create=on")],
        &["ragged.raw", "1000"],
    );
    refused(&refusal).unwrap_or_else(|complaint| panic!("{complaint}"));
    for path in [new, ragged] {
        assert!(!std::path::Path::new(&path).exists(), "{path} was left behind");
    }
}

#[test]
fn check_removes_nothing_that_it_has_not_made() {
    let scratch = Scratch::new();
    // The target does not exist yet, as if its filesystem were not mounted.
    let link = scratch.path("vm1.raw");
    std::os::unix::fs::symlink(scratch.path("not-mounted.raw"), &link).expect("a link can be made");
    let wanted = format!("name=vm1,file={},size=1M,create=on", link.display());
    let mut command = serve_command(&["--check", "--disk", &wanted]);
    let checked = output_within(&mut command, Duration::from_secs(30));
    assert!(
        std::fs::symlink_metadata(&link).is_ok(),
        "the check removed the operator's link: {checked:?}"
    );
}

#[test]
fn image_whose_path_has_a_comma_is_served() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1,old.raw", 1 << 20).replace(',', "\\,");
    let daemon = Daemon::serve(&scratch, &[&format!("name=vm1,file={image},ro=on")]);
    daemon.stop();
}

#[test]
fn image_that_is_already_served_is_refused_and_the_first_daemon_goes_on() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    let disk = format!("name=vm1,file={image}");
    let first = Daemon::serve(&scratch, &[&disk]);
    let second = case(
        "served twice",
        &scratch,
        &[&format!("name=other,file={image}")],
        &["other", "vm1.raw", "in use", "stop"],
    );
    // A check is for hosts where a daemon serves.
    refused_with(&second, &[]).unwrap_or_else(|complaint| panic!("{complaint}"));
    first.stop();
    // The lock is released with the daemon.
    Daemon::serve(&scratch, &[&disk]).stop();
}

#[test]
fn image_that_cannot_be_written_is_refused_with_a_way_out() {
    let scratch = Scratch::new();
    // A running program cannot be opened for writing, even by root.
    let busy = scratch.word("busy");
    std::fs::copy("/bin/sleep", &busy).expect("a program to copy");
    let length = std::fs::metadata(&busy)
        .expect("the copy")
        .len()
        .next_multiple_of(4096);
    std::fs::File::options()
        .write(true)
        .open(&busy)
        .and_then(|file| file.set_len(length))
        .expect("a whole number of blocks");
    let mut runs = run_copy(&busy);
    let case = case(
        "not writable",
        &scratch,
        &[&format!("name=vm1,file={busy}")],
        &["vm1", "busy", "ro=on"],
    );
    let result = refused(&case);
    runs.kill().expect("our own child can be killed");
    runs.wait().expect("our own child can be waited for");
    result.unwrap_or_else(|complaint| panic!("{complaint}"));
}

/// Runs a program that has just been written.
fn run_copy(program: &str) -> Child {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        match Command::new(program).arg("60").stdin(Stdio::null()).spawn() {
            Ok(child) => return child,
            // Another test's child, while it has not executed its program yet, may have our
            // descriptor for writing.
            Err(error) if error.kind() == ErrorKind::ExecutableFileBusy && Instant::now() < end => {
                std::thread::sleep(Duration::from_millis(5));
            }
            Err(error) => panic!("{program}: {error}"),
        }
    }
}

fn cases(scratch: &Scratch) -> Vec<Case> {
    let odd = scratch.image("odd.raw", 1000);
    let good = scratch.image("good.raw", 1 << 20);
    let absent = scratch.word("absent.raw");
    let no_directory = scratch.word("no/such/directory.raw");
    let file = |path: &str| format!("name=vm1,file={path}");
    let mut cases = vec![
        case(
            "a missing file",
            scratch,
            &[&file(&absent)],
            &["vm1", "absent.raw", "create=on"],
        ),
        case(
            "a missing file with a size",
            scratch,
            &[&format!("{},size=1M", file(&absent))],
            &["vm1", "absent.raw", "create=on"],
        ),
        case(
            "a file to be made without a size",
            scratch,
            &[&format!("{},create=on", file(&absent))],
            &["vm1", "create=on", "size="],
        ),
        case(
            "a missing directory",
            scratch,
            &[&format!("{},size=1M,create=on", file(&no_directory))],
            &["vm1", "directory.raw"],
        ),
        case(
            "a directory for a file",
            scratch,
            &[&file(&scratch.word("."))],
            &["vm1", "directory"],
        ),
        case(
            "a size that is no multiple of the block",
            scratch,
            &[&file(&odd)],
            &["vm1", "1000", "512"],
        ),
        case(
            "an unknown key",
            scratch,
            &["name=vm1,fiel=x.raw"],
            &["fiel", "file"],
        ),
        case(
            "disks that are too large for one queue",
            scratch,
            &[
                "name=a,null=8388607T,queue=q",
                "name=b,null=8388607T,queue=q",
                "name=c,null=8T,queue=q",
            ],
            &["queue q", "disk c", "8796093022208", "queue= of its own"],
        ),
        case("no name", scratch, &["ram=1M"], &["name"]),
        case("no backing", scratch, &["name=vm1"], &["vm1", "file="]),
        case(
            "two backings",
            scratch,
            &["name=vm1,ram=1M,null=1M"],
            &["vm1", "ram", "null"],
        ),
        case(
            "a size that is none",
            scratch,
            &["name=vm1,ram=lots"],
            &["vm1", "lots"],
        ),
        case("a size of nothing", scratch, &["name=vm1,ram=0"], &["vm1", "0"]),
        case(
            "a name given twice",
            scratch,
            &["name=vm1,ram=1M", "name=vm1,ram=2M"],
            &["vm1"],
        ),
        case(
            "an unknown elevator",
            scratch,
            &["name=vm1,ram=1M,sched=elevator9"],
            &["elevator9", "mq-deadline"],
        ),
        case(
            "an unknown state",
            scratch,
            &[&format!("{},ro=perhaps", file(&good))],
            &["vm1", "perhaps", "on"],
        ),
    ];
    for (what, address, says) in [
        (
            "an unknown transport",
            "carrier-pigeon:coop",
            &["carrier-pigeon", "unix:"][..],
        ),
        ("a port beyond the last", "tcp:127.0.0.1:99999", &["99999"]),
        ("a port that is none", "tcp:127.0.0.1:http", &["http"]),
        ("a socket without a path", "unix:", &["unix:"]),
        (
            "a socket in a missing directory",
            "unix:/nonexistent/blkmq/nbd.sock",
            &["/nonexistent/blkmq/nbd.sock"],
        ),
    ] {
        let words = ["--disk", "name=vm1,ram=1M", "--nbd", address]
            .map(str::to_owned)
            .to_vec();
        cases.push(Case {
            what,
            words,
            says: says.iter().map(|word| (*word).to_owned()).collect(),
        });
    }
    let absent = scratch.word("absent.pem");
    let tls = [
        "--tls",
        "require",
        "--tls-certificate",
        &absent,
        "--tls-key",
        &absent,
    ];
    cases.push(Case {
        what: "a certificate that is missing",
        words: [&["--disk", "name=vm1,ram=1M", "--nbd", "unix:x"], &tls[..]]
            .concat()
            .into_iter()
            .map(str::to_owned)
            .collect(),
        says: vec![
            "export unix:x: ".to_owned(),
            format!("{absent}: cannot be read: No such file"),
        ],
    });
    let long = format!("unix:{}", scratch.word(&"x".repeat(120)));
    let words = ["--disk", "name=vm1,ram=1M", "--nbd", &long]
        .map(str::to_owned)
        .to_vec();
    cases.push(Case {
        what: "a socket path that is too long",
        words,
        says: vec!["xxx".to_owned(), "107".to_owned()],
    });
    cases.extend(mapped(scratch));
    cases
}

/// Mapped disks.
fn mapped(scratch: &Scratch) -> Vec<Case> {
    let of = |what, disk: &str, says: &[&str]| {
        let words = ["name=a,ram=1M", "name=b,ram=2M", "name=p,null=1M", disk];
        case(what, scratch, &words, says)
    };
    let mut cases = vec![
        of("an unknown member", "name=m,linear=a+z", &["disk m", "no disk z"]),
        of(
            "a range behind the end",
            "name=m,linear=a:512K:1M",
            &["disk m", "member a", "1048576 bytes"],
        ),
        of(
            "a range that starts in a block",
            "name=m,linear=a:100",
            &["disk m", "start 100", "block size 512"],
        ),
        of(
            "bytes used twice",
            "name=m,linear=a:0:8K+a:4K",
            &["disk m", "4096 to 8192", "disk a", "a:START:LENGTH"],
        ),
        of(
            "a chunk of 3K",
            "name=m,striped=a+b,chunk=3K",
            &["disk m", "chunk 3072", "power of two", "4096"],
        ),
        of(
            "a chunk of more than a member",
            "name=m,striped=a+b,chunk=2M",
            &["disk m", "chunk 2097152", "1048576"],
        ),
        of(
            "no members",
            "name=m,linear=",
            &["disk m", "linear= rejected", "NAME:START:LENGTH"],
        ),
        of(
            "smaller blocks than the members",
            "name=m,linear=a,block_size=256",
            &["disk m", "256"],
        ),
    ];
    let chain: Vec<String> = (1..10)
        .map(|at| match at {
            1 => "name=m1,linear=a".to_owned(),
            _ => format!("name=m{at},linear=m{}", at - 1),
        })
        .chain(["name=a,ram=1M".to_owned()])
        .collect();
    let chain: Vec<&str> = chain.iter().map(String::as_str).collect();
    cases.push(case(
        "nine on each other",
        scratch,
        &chain,
        &["disk m9", "9 mapped disks", "at most 8"],
    ));
    let circle = ["name=m,linear=n", "name=n,striped=m"];
    cases.push(case(
        "a circle",
        scratch,
        &circle,
        &["lies on itself", "m on n on m"],
    ));
    let on_others = ["name=a,ram=1M", "name=x,linear=a", "name=m,multipath=x"];
    cases.push(case(
        "a path on other disks",
        scratch,
        &on_others,
        &["disk x", "cannot be a path"],
    ));
    cases
}

fn case(what: &'static str, scratch: &Scratch, disks: &[&str], says: &[&str]) -> Case {
    let mut words = Vec::new();
    for disk in disks {
        words.extend(["--disk".to_owned(), (*disk).to_owned()]);
    }
    words.extend([
        "--nbd".to_owned(),
        format!("unix:{}", scratch.word("refused.sock")),
    ]);
    Case {
        what,
        words,
        says: says.iter().map(|word| (*word).to_owned()).collect(),
    }
}

/// # Errors
/// If the daemon does not refuse as expected, when serving or with `--check`.
fn refused(case: &Case) -> Result<(), String> {
    refused_with(case, &[])?;
    refused_with(case, &["--check"]).map_err(|complaint| format!("with --check: {complaint}"))
}

fn refused_with(case: &Case, flags: &[&str]) -> Result<(), String> {
    let words: Vec<&str> = case.words.iter().map(String::as_str).collect();
    // `timeout`, which every Debian has, ends it if it serves after all.
    let serve = serve_command(&[&words, flags].concat());
    let mut command = Command::new("timeout");
    command.arg("10").arg(serve.get_program()).args(serve.get_args());
    let output = output_within(&mut command, Duration::from_secs(30));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    match output.status.code() {
        Some(0) => return Err("it ended with success".to_owned()),
        Some(124) => return Err(format!("it serves it; it said:\n{said}")),
        Some(1 | 2) => {}
        other => return Err(format!("it ended with {other:?}: a crash? It said:\n{said}")),
    }
    if said.contains("panicked") {
        return Err(format!("it panicked:\n{said}"));
    }
    let parts: Vec<&str> = said.trim().split(": ").collect();
    if let Some(twice) = parts.windows(2).find(|pair| pair[0] == pair[1]) {
        return Err(format!("it says {:?} twice:\n{said}", twice[0]));
    }
    let missing: Vec<&String> = case
        .says
        .iter()
        .filter(|word| !said.contains(word.as_str()))
        .collect();
    if missing.is_empty() {
        Ok(())
    } else {
        Err(format!("the message lacks {missing:?}:\n{said}"))
    }
}
