//! Programs of other projects as tests run them: with a time limit, with their output kept, and with a
//! message if one is missing.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use crate::daemon::{program, wait_within};
use crate::skip;

/// Says whether every tool is installed, with a message if one is not: `if !installed(&["fio"]) {
/// return; }`.
pub fn installed(names: &[&str]) -> bool {
    let missing: Vec<&str> = names
        .iter()
        .copied()
        .filter(|name| find(name).is_none())
        .collect();
    if !missing.is_empty() {
        skip(&format!(
            "not installed: {} (run `cargo xtask setup`)",
            missing.join(", ")
        ));
    }
    missing.is_empty()
}

/// `blkmq-lab`, which lies beside the command that is tested, with a message if it does not:
/// `let Some(lab) = lab() else { return };`.
pub fn lab() -> Option<Lab> {
    let program = program().with_file_name("blkmq-lab");
    if !program.is_file() {
        skip("blkmq-lab is not built (run `cargo build -p blkmq-lab`)");
        return None;
    }
    Some(Lab(program))
}

/// The laboratory's program, whose benches use the command that is tested.
#[derive(Debug)]
pub struct Lab(PathBuf);

impl Lab {
    /// The program with these arguments, not yet started.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.0);
        command.args(words).env("BLKMQ_BIN", program());
        command
    }
}

/// A tool's output, and whether it succeeded.
#[derive(Debug)]
pub struct Said {
    /// Its exit status is 0.
    pub success: bool,
    /// What it printed.
    pub stdout: String,
    /// Its messages.
    pub stderr: String,
}

/// Runs the tool and checks that it succeeds.
pub fn run(name: &str, words: &[&str]) -> Said {
    let said = try_run(name, words);
    assert!(
        said.success,
        "{name} {}\nfailed:\n{}\n{}",
        words.join(" "),
        said.stdout,
        said.stderr
    );
    said
}

/// Runs the tool and returns its output, whatever its result.
pub fn try_run(name: &str, words: &[impl AsRef<OsStr>]) -> Said {
    let path = find(name).unwrap_or_else(|| panic!("{name} is not installed: the test did not ask first"));
    let output = output_within(Command::new(path).args(words), TOOL_TIME);
    Said {
        success: output.status.success(),
        stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
        stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// The output of a command that must end within `limit`; otherwise it is killed, and the test
/// fails.
pub fn output_within(command: &mut Command, limit: Duration) -> Output {
    let shown = format!("{command:?}");
    let mut child = command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{shown}: {error}"));
    let stdout = child.stdout.take().map(read_aside);
    let stderr = child.stderr.take().map(read_aside);
    let Some(status) = wait_within(&mut child, limit) else {
        child.kill().expect("our own child can be killed");
        let _ = child.wait();
        panic!("{shown}: not done after {limit:?}");
    };
    let collect = |reader: Option<std::thread::JoinHandle<Vec<u8>>>| {
        reader
            .map(|reader| reader.join().expect("the reader does not panic"))
            .unwrap_or_default()
    };
    Output {
        status,
        stdout: collect(stdout),
        stderr: collect(stderr),
    }
}

/// Reads a pipe to its end on a thread of its own, so that a tool with much output never blocks.
fn read_aside(mut pipe: impl std::io::Read + Send + 'static) -> std::thread::JoinHandle<Vec<u8>> {
    std::thread::spawn(move || {
        let mut all = Vec::new();
        let _ = pipe.read_to_end(&mut all);
        all
    })
}

/// The tool's path. The system's directories are searched even if the user's `PATH` omits them.
pub fn find(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let own = std::env::split_paths(&path);
    // The directories of mkfs and the like on Debian, which a user's PATH often omits.
    let system = ["/usr/sbin", "/sbin"].into_iter().map(PathBuf::from);
    own.chain(system)
        .map(|dir| dir.join(name))
        .find(|file| file.is_file())
}

/// Long, because the machine may be busy with other tests.
const TOOL_TIME: Duration = Duration::from_secs(120);
