//! Tests whether `blkmq top` can be used on a real terminal (tmux's): its keys work, it survives the daemon,
//! and it restores the terminal. Also whether `blkmq iostat` reports what was done.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::common::daemon::program;
use crate::common::nbd::Client;
use crate::common::pattern::{BLOCK, block};
use crate::common::tools::{installed, try_run};
use crate::common::{Daemon, Scratch};

#[test]
fn keys_walk_the_lines_of_a_running_daemon() {
    if !installed(&["tmux"]) {
        return;
    }
    let scratch = Scratch::new();
    let _daemon = serve(&scratch);
    let _busy = Busy::start(&scratch, "vm1");
    let top = Top::start(&scratch, 80, 24);
    top.wait("who is busy", |screen| {
        line(screen, "vm1").is_some_and(|line| number(&line, 1) > 0.0)
    });
    let screen = top.screen();
    assert!(
        screen.contains("F10Quit") && screen.contains("WAIT99"),
        "{screen}"
    );
    assert!(!screen.contains("BEHIND"), "there is no room for it:\n{screen}");

    for (keys, what, is_there) in [
        ("Down -", "customers is closed", ABSENT),
        ("+", "customers is open", PRESENT),
        ("/ v m 2 Enter Space", "the disk of vm2", |screen| {
            screen.contains("disk, 1.0M, 0 clients")
        }),
        ("Space F4 v m 2 Enter", "what the filter wants", ABSENT),
        ("\\ Escape", "everything again", PRESENT),
        ("F5", "a list of paths", |screen| {
            screen.contains("/customers/vm1")
        }),
        ("Tab", "the tree", |screen| !screen.contains("/customers/vm1 ")),
        ("F6", "the next column", |screen| screen.contains("tree by B/s")),
        ("< <", "the name", |screen| screen.contains("tree by name")),
        ("I", "the other way round", |screen| {
            screen.contains("by name, last first")
        }),
        ("i", "no idle lines", |screen| line(screen, "vm2").is_none()),
        ("i z", "a frozen screen", |screen| screen.contains("frozen")),
        ("p", "one that goes on", |screen| screen.contains("every 0.")),
        ("F1", "the help", |screen| screen.contains("freeze the screen")),
        ("Escape", "the lines", PRESENT),
    ] as [(&str, &str, fn(&str) -> bool); 15]
    {
        top.press(keys);
        top.wait(what, is_there);
    }
    top.tmux(&["resize-window", "-x", "140", "-y", "40"]);
    top.wait("more columns", |screen| screen.contains("BEHIND"));
    top.press("q");
    top.wait_for_end();
}

#[test]
fn lost_daemon_is_waited_for_and_every_way_out_leaves_the_terminal_as_it_was() {
    if !installed(&["tmux"]) {
        return;
    }
    let scratch = Scratch::new();
    let daemon = serve(&scratch);
    let top = Top::start(&scratch, 80, 24);
    top.wait("what there is", PRESENT);
    daemon.kill();
    top.wait("that it is lost", |screen| screen.contains("trying again"));
    assert!(
        line(&top.screen(), "vm1").is_some(),
        "what was seen last is still there"
    );
    let _daemon = serve(&scratch);
    top.wait("that it is back", |screen| screen.contains("every 0."));
    top.press("C-c");
    top.wait_for_end();

    for signal in ["TERM", "INT", "HUP"] {
        let top = Top::start(&scratch, 80, 24);
        top.wait("what there is", PRESENT);
        top.signal(signal);
        top.wait_for_end();
    }
}

#[test]
fn without_a_daemon_or_a_terminal_top_says_so() {
    let scratch = Scratch::new();
    let (code, said) = run(&scratch, &["top"]);
    assert!(
        code == Some(1) && said.contains("no daemon can be asked"),
        "{said}"
    );
    let _daemon = serve(&scratch);
    let (code, said) = run(&scratch, &["top"]);
    assert!(code == Some(1) && said.contains("needs a terminal"), "{said}");
}

#[test]
fn iostat_says_what_was_done() {
    let scratch = Scratch::new();
    let _daemon = serve(&scratch);
    let mut client = Client::connect(&scratch.path("nbd.sock"), "vm1").expect("it is served");
    for number in 0..8 {
        let write = client.write(number * BLOCK as u64, &block(number, 1));
        write.expect("a write");
    }
    let (code, table) = run(&scratch, &["iostat"]);
    let names: Vec<&str> = table.lines().filter_map(|line| line.split(' ').next()).collect();
    assert_eq!(
        (code, &names[..3]),
        (Some(0), &["Device", "q", "q:/customers/vm1"][..]),
        "{table}"
    );

    let (code, lines) = run(&scratch, &["iostat", "0.1", "2", "--json"]);
    let reports: Vec<Value> = lines
        .lines()
        .map(|line| serde_json::from_str(line).expect("JSON"))
        .collect();
    assert_eq!((code, reports.len()), (Some(0), 2), "{lines}");
    let group = &reports[0]["devices"][1];
    let written = |report: &Value| report["devices"][1]["w/s"].as_f64().expect("a rate");
    assert_eq!(
        (&reports[0]["since_start"], &group["group"]),
        (&true.into(), &"/customers/vm1".into())
    );
    assert!(
        written(&reports[0]) > 0.0 && written(&reports[1]) == 0.0,
        "{lines}"
    );

    let (code, said) = run(&scratch, &["iostat", "-y", "-z", "0.1", "1", "--json"]);
    let report: Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(
        (code, &report["devices"], &report["since_start"]),
        (Some(0), &Value::Array(vec![]), &false.into())
    );
    assert_eq!(run(&scratch, &["iostat", "0"]).0, Some(2));
}

/// Serves `vm1` and `vm2`, each in its own group.
fn serve(scratch: &Scratch) -> Daemon {
    let [nbd, control] = ["nbd.sock", "control.sock"].map(|name| format!("unix:{}", scratch.word(name)));
    let disk = |name| format!("name={name},ram=1M,queue=q,sched=bfq,group=/customers/{name}");
    let (one, other) = (disk("vm1"), disk("vm2"));
    Daemon::start(&[
        "--disk",
        &one,
        "--disk",
        &other,
        "--nbd",
        &nbd,
        "--control",
        &control,
    ])
}

/// Runs `blkmq` with these arguments for the daemon in `scratch`. Returns its exit code and its
/// output.
fn run(scratch: &Scratch, words: &[&str]) -> (Option<i32>, String) {
    let mut command = Command::new(program());
    let socket = format!("unix:{}", scratch.word("control.sock"));
    let output = command.args(words).args(["--socket", &socket]).output();
    let output = output.expect("the command runs");
    let said = String::from_utf8([output.stdout, output.stderr].concat()).expect("a text");
    (output.status.code(), said)
}

/// A client that writes until this is dropped.
struct Busy {
    is_over: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    fn start(scratch: &Scratch, disk: &str) -> Self {
        let mut client = Client::connect(&scratch.path("nbd.sock"), disk).expect("it is served");
        let is_over = Arc::new(AtomicBool::new(false));
        let of_thread = Arc::clone(&is_over);
        let thread = std::thread::spawn(move || {
            while !of_thread.load(Ordering::Relaxed) {
                client.write(0, &block(0, 1)).expect("a write");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let thread = Some(thread);
        Self { is_over, thread }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Relaxed);
        if let Some(Err(panic)) = self.thread.take().map(JoinHandle::join)
            && !std::thread::panicking()
        {
            std::panic::resume_unwind(panic);
        }
    }
}

/// `blkmq top` in a terminal of its own tmux. After its end the shell prints its exit code, and
/// whether the terminal was restored.
struct Top {
    server: String,
}

impl Top {
    fn start(scratch: &Scratch, width: u16, height: u16) -> Self {
        // A server that was told to end may still have its socket.
        let number = SERVERS.fetch_add(1, Ordering::Relaxed);
        let server = scratch.word(&format!("tmux{number}"));
        let top = Self { server };
        let command = format!(
            "{} top --interval 0.2 --socket unix:{}; echo ended with $?; stty -a | grep -ow -e '-*icanon' -e '-*echo'; exec sleep 60",
            program().display(),
            scratch.word("control.sock"),
        );
        let (width, height) = (width.to_string(), height.to_string());
        top.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            &width,
            "-y",
            &height,
            &command,
        ]);
        top
    }

    fn tmux(&self, words: &[&str]) -> String {
        let said = try_run("tmux", &[&["-u", "-S", &self.server], words].concat());
        assert!(said.success, "tmux {words:?}: {}", said.stderr);
        said.stdout
    }

    fn press(&self, keys: &str) {
        self.tmux(&[&["send-keys"], &*keys.split(' ').collect::<Vec<_>>()].concat());
    }

    fn screen(&self) -> String {
        self.tmux(&["capture-pane", "-p"])
    }

    fn wait(&self, what: &str, is_there: impl Fn(&str) -> bool) {
        let end = Instant::now() + LONG;
        while !is_there(&self.screen()) {
            assert!(Instant::now() < end, "{what} is not shown:\n{}", self.screen());
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    /// Sends a signal to `top` itself, the child of the terminal's shell.
    fn signal(&self, signal: &str) {
        let shell = self.tmux(&["list-panes", "-F", "#{pane_pid}"]);
        let path = format!("/proc/{0}/task/{0}/children", shell.trim());
        let children = std::fs::read_to_string(Path::new(&path)).expect("the shell has a child");
        let said = try_run("kill", &[&format!("-{signal}"), children.trim()]);
        assert!(said.success, "{}", said.stderr);
    }

    fn wait_for_end(&self) {
        self.wait("a clean end", |screen| {
            screen.lines().take(3).eq(["ended with 0", "icanon", "echo"])
        });
        let cursor = self.tmux(&["display-message", "-p", "#{cursor_flag} #{alternate_on}"]);
        assert_eq!(
            cursor.trim(),
            "1 0",
            "the cursor is seen, on the screen of before"
        );
    }
}

impl Drop for Top {
    fn drop(&mut self) {
        let _ = try_run("tmux", &["-S", &self.server, "kill-server"]);
    }
}

/// The line of the screen that begins with a name.
fn line(screen: &str, name: &str) -> Option<String> {
    let is_it = |line: &&str| {
        let word = line.split_whitespace().next().unwrap_or_default();
        word.trim_start_matches(['+', '-']) == name
    };
    screen.lines().find(is_it).map(str::to_owned)
}

/// The number at position `at` after the name in a line.
fn number(line: &str, at: usize) -> f64 {
    let word = line.split_whitespace().nth(at);
    word.and_then(|word| word.parse().ok()).unwrap_or(0.0)
}

/// Whether the lines of both groups are shown.
const PRESENT: fn(&str) -> bool = |screen| line(screen, "vm1").is_some() && line(screen, "vm2").is_some();
/// Whether the line of the group with a client is not shown.
const ABSENT: fn(&str) -> bool = |screen| line(screen, "vm1").is_none();
const LONG: Duration = Duration::from_secs(20);
/// How many terminals have been started.
static SERVERS: AtomicU32 = AtomicU32::new(0);
