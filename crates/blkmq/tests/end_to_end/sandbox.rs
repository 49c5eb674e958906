//! The sandbox of the daemon: what foreign code in a reactor could do, what every thread is confined to, and what a
//! running daemon is told that needs more.

use std::net::TcpListener;
use std::process::Command;
use std::sync::{Arc, Mutex};

use blkmq::sandbox::Sandbox;
use blkmq_config::{Config, plan};
use blkmq_host::{Engine, EngineConfig};

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, run};
use crate::common::{Daemon, Scratch};

/// Runs as a process of its own, which stays confined.
#[test]
fn reactor_that_runs_foreign_code_opens_starts_and_connects_nothing() {
    if std::env::var_os(VICTIM).is_some() {
        return be_the_victim();
    }
    let mut victim = Command::new(std::env::current_exe().expect("this program"));
    let name = "sandbox::reactor_that_runs_foreign_code_opens_starts_and_connects_nothing";
    victim.args(["--exact", name, "--nocapture"]).env(VICTIM, "1");
    let output = victim.output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(said.contains("5 attempts, 5 stopped"), "{said}");
}

/// Has a reactor try what a sandboxed one cannot, and this thread what is outside of its directories.
fn be_the_victim() {
    let scratch = Scratch::new();
    let image = scratch.image("vm1.raw", 1 << 20);
    let port = TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = port.local_addr().expect("an address");
    let text = format!("[disk.vm1]\nfile = \"{image}\"\n[control]\nsocket = \"none\"\n");
    let config = Config::from_toml(&text).expect("it is sound");
    let sandbox = Sandbox::enter(&config, None).expect("this kernel has what it takes");
    assert!(sandbox.summary.starts_with("on: "), "{}", sandbox.summary);
    let stopped = Arc::new(Mutex::new(Vec::new()));
    let (confine, found, of_disk) = (
        sandbox.on_reactor().expect("calls"),
        Arc::clone(&stopped),
        image.clone(),
    );
    let on_reactor = move || {
        confine()?;
        let started = Command::new("/bin/true").status().map(|_| ());
        *found.lock().expect("nobody panics") = vec![
            std::fs::read("/etc/shadow").map(drop),
            std::fs::read(&of_disk).map(drop),
            std::net::TcpStream::connect(at).map(drop),
            std::os::unix::net::UnixStream::connect("/run/nobody").map(drop),
            started,
        ];
        Ok(())
    };
    let plan = plan(&config).expect("it opens");
    let engine = Engine::start(EngineConfig {
        queues: plan.queues,
        mapped: plan.mapped,
        on_reactor: Some(Arc::new(on_reactor)),
        ..EngineConfig::default()
    });
    let engine = engine.expect("it starts");
    let attempts = stopped.lock().expect("nobody panics");
    let count = attempts
        .iter()
        .filter(|tried| {
            tried
                .as_ref()
                .is_err_and(|error| error.raw_os_error() == Some(libc::EPERM))
        })
        .count();
    println!("{} attempts, {count} stopped: {attempts:?}", attempts.len());
    let refused = |tried: rustix::io::Result<()>| assert_eq!(tried, Err(rustix::io::Errno::PERM));
    let multipath = Some(rustix::net::ipproto::MPTCP);
    let stream = rustix::net::SocketType::STREAM;
    refused(rustix::net::socket(rustix::net::AddressFamily::INET, stream, multipath).map(drop));
    refused(rustix::net::socket(rustix::net::AddressFamily::VSOCK, stream, None).map(drop));
    let dumpable = rustix::process::DumpableBehavior::Dumpable;
    refused(rustix::process::set_dumpable_behavior(dumpable));
    // Other threads open what their disks need, and nothing else, whoever they are.
    std::fs::read(&image).expect("a disk's file");
    for outside in ["/etc/shadow", "/etc/fstab"] {
        let error = std::fs::read(outside).expect_err("it is outside");
        assert!(
            [libc::EACCES, libc::ENOENT].contains(&error.raw_os_error().unwrap()),
            "{error}"
        );
    }
    assert!(Command::new("/bin/true").status().is_err());
    assert!(std::net::TcpStream::connect(at).is_err());
    drop(engine);
}

#[test]
fn threads_of_a_daemon_are_confined_before_and_after_a_take_over() {
    let scratch = Scratch::new();
    let image = format!("name=vm1,file={}", scratch.image("vm1.raw", 1 << 20));
    let (nbd, upgrade) = (
        format!("unix:{}", scratch.word("nbd.sock")),
        format!("unix:{}", scratch.word("upgrade.sock")),
    );
    let words = ["--disk", &image, "--nbd", &nbd];
    let first = Daemon::start(&[&words[..], &["--upgrade-socket", &upgrade]].concat());
    check_threads(first.id());
    let second = Daemon::start(&[&words[..], &["--take-over", &upgrade]].concat());
    check_threads(second.id());
    second.stop();
}

/// Asserts that each thread has its filters, reactors one more, and that none can gain privileges.
fn check_threads(process: u32) {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let mut filters = Vec::new();
    for task in tasks {
        let task = task.expect("a thread").path();
        let read = |name: &str| std::fs::read_to_string(task.join(name)).expect("it is there");
        let (name, status) = (read("comm"), read("status"));
        let field = |key: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(key));
            line.map(|value| value.trim().to_owned()).unwrap_or_default()
        };
        assert_eq!(
            (field("Seccomp:"), field("NoNewPrivs:")),
            ("2".into(), "1".into()),
            "{name}"
        );
        filters.push((name.starts_with("blkmq-r"), field("Seccomp_filters:")));
    }
    let of = |is_reactor| {
        let mut all = filters.iter().filter(move |(found, _)| *found == is_reactor);
        all.next().map(|(_, count)| count.clone()).expect("such a thread")
    };
    assert_eq!((of(false), of(true)), ("3".to_owned(), "4".to_owned()));
}

#[test]
fn disk_outside_of_the_sandbox_is_refused_with_the_key_that_lets_it_in() {
    let (scratch, elsewhere) = (Scratch::new(), Scratch::new());
    let image = elsewhere.image("vm2.raw", 1 << 20);
    let config = |paths: &str| {
        let text = format!(
            "[daemon]\n{paths}\n[control]\nsocket = \"unix:{0}\"\n[disk.vm1]\nfile = \"{1}\"\n[[export]]\nnbd = \"unix:{2}\"\n",
            scratch.word("control.sock"),
            scratch.image("vm1.raw", 1 << 20),
            scratch.word("nbd.sock")
        );
        std::fs::write(scratch.path("c.toml"), text).expect("it is written");
        scratch.word("c.toml")
    };
    let add = |disk: &str, more: &[&str]| {
        let socket = format!("unix:{}", scratch.word("control.sock"));
        let words = ["ctl", "--socket", &socket, "add", "disk", "vm2", disk];
        let output = Command::new(program()).args(words).args(more).output();
        String::from_utf8(output.expect("it runs").stderr).expect("text")
    };
    let file = format!("file={image}");
    let daemon = Daemon::start(&["-c", &config("")]);
    for more in [&["--dry-run"][..], &[]] {
        let said = add(&file, more);
        assert!(
            said.contains("disk vm2: ") && said.contains("name its directory in paths of [daemon]"),
            "{said}"
        );
    }
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let clone = [
        "--raw",
        &scratch.word("vm1.raw"),
        "vm3",
        &elsewhere.word("vm3.qcow2"),
    ];
    let clone = Command::new(program())
        .args(["ctl", "--socket", &socket, "clone"])
        .args(clone)
        .output()
        .expect("it runs");
    let said = String::from_utf8_lossy(&clone.stderr);
    assert!(
        said.contains("disk vm3: ") && said.contains("name its directory in paths of [daemon]"),
        "{said}"
    );
    let said = add("nbd=nbd://127.0.0.1:9/x", &[]);
    assert!(
        said.contains("a server's port 9 is outside of the sandbox"),
        "{said}"
    );
    daemon.stop();
    let paths = format!("paths = [\"{}\"]", elsewhere.word(""));
    let daemon = Daemon::start(&["-c", &config(&paths)]);
    assert_eq!(add(&file, &[]), "");
    daemon.stop();
}

#[test]
fn sandbox_is_refused_where_fuse_mounts_and_is_left_out_or_reported_on_request() {
    let scratch = Scratch::new();
    let disk = format!("name=vm1,file={}", scratch.image("vm1.raw", 1 << 20));
    let (file, nbd) = (scratch.word("disk"), format!("unix:{}", scratch.word("nbd.sock")));
    let serve = ["serve", "--disk", &disk, "--fuse", &file, "--sandbox", "on"];
    let output = Command::new(program()).args(serve).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        said.contains("sandbox=on rejected: an export of fuse mounts"),
        "{said}"
    );
    for (how, line) in [
        ("off", "sandbox off: "),
        ("warn", "sandbox warn: "),
        ("on", "sandbox on: files of "),
    ] {
        let daemon = Daemon::start(&["--disk", &disk, "--nbd", &nbd, "--sandbox", how]);
        assert!(daemon.says(line), "{}", daemon.said());
        daemon.stop();
    }
}

#[test]
fn sandbox_lets_an_image_read_its_base_in_a_directory_that_the_disk_names() {
    if !installed(&["qemu-img"]) {
        return;
    }
    let (scratch, bases) = (Scratch::new(), Scratch::new());
    let (base, image) = (bases.image("base.raw", 1 << 20), scratch.word("vm1.qcow2"));
    run(
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-b", &base, "-F", "raw", &image],
    );
    let dirs = format!("{}:{}", bases.word(""), scratch.word(""));
    let disk = format!("name=vm1,qcow2={image},dirs={dirs}");
    let daemon = Daemon::serve(&scratch, &[&disk]);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    client.write(0, &block(0, 1)).expect("a write");
    assert!(client.read(4096, BLOCK).expect("a read of the base") == vec![0; BLOCK]);
    daemon.stop();
}

/// Set in the process that is confined.
const VICTIM: &str = "BLKMQ_SANDBOX_VICTIM";
