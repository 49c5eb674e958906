//! The circumstances that a report states: host, kernel, commit, command, other load. A figure without these
//! is not evidence; `report` writes them above every table and into every JSON file.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde::Serialize;

/// The machine a report was made on.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Host {
    /// Kernel name and release.
    pub kernel: String,
    /// The processor's model, as the kernel names it.
    pub cpu: String,
    /// Processors that this process may use.
    pub cores: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Load average over one minute before the run; other load distorts the figures.
    pub load_before: f64,
    /// The same after the run; it includes the run itself.
    pub load_after: f64,
}

impl Host {
    /// Collects the facts before a run. What cannot be read stays empty.
    pub fn before_run() -> Self {
        let kernel = read("/proc/sys/kernel/osrelease");
        Self {
            kernel: format!("Linux {}", kernel.trim()),
            cpu: field(&read("/proc/cpuinfo"), "model name").unwrap_or_default(),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: memory_mib(&read("/proc/meminfo")),
            load_before: load(),
            load_after: 0.0,
        }
    }

    /// Collects the load after the run.
    pub fn after_run(&mut self) {
        self.load_after = load();
    }
}

/// The commit that this program was built from, as far as the work tree around it tells: `-dirty`
/// if it has changes.
pub(crate) fn commit() -> String {
    work_tree()
        .and_then(|tree| describe(&tree))
        .unwrap_or_else(|| "unknown".into())
}

/// The command line, the program's path shortened to its name.
pub(crate) fn command_line() -> String {
    let mut words: Vec<String> = std::env::args().collect();
    if let Some(program) = words.first_mut() {
        *program = Path::new(program.as_str())
            .file_name()
            .map_or_else(|| program.clone(), |name| name.to_string_lossy().into_owned());
    }
    words.join(" ")
}

/// The project's work tree: above the program (it lies in `target`), or above the current directory.
fn work_tree() -> Option<PathBuf> {
    let program = std::env::current_exe().ok();
    let places = [program, std::env::current_dir().ok()];
    places.into_iter().flatten().find_map(|place| {
        let tree = place.ancestors().find(|dir| dir.join(MARK).is_dir())?;
        Some(tree.to_owned())
    })
}

fn describe(tree: &Path) -> Option<String> {
    let output = Command::new("git")
        .args(["describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"])
        .current_dir(tree)
        .output()
        .ok()?;
    let said = String::from_utf8(output.stdout).ok()?;
    (output.status.success() && !said.trim().is_empty()).then(|| said.trim().to_owned())
}

/// The load average over one minute; 0 if it cannot be read.
pub(crate) fn load() -> f64 {
    read("/proc/loadavg")
        .split_whitespace()
        .next()
        .and_then(|word| word.parse().ok())
        .unwrap_or(0.0)
}

/// The value of the first line `name : value`.
fn field(text: &str, name: &str) -> Option<String> {
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn memory_mib(meminfo: &str) -> u64 {
    let kib =
        field(meminfo, "MemTotal").and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok());
    kib.unwrap_or(0) / 1024
}

fn read(path: &str) -> String {
    std::fs::read_to_string(path).unwrap_or_default()
}

/// A directory that only this project's work tree has.
const MARK: &str = "crates/blkmq-bench";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_machine_is_described() {
        let host = Host::before_run();
        assert!(host.kernel.len() > "Linux ".len());
        assert!(host.cores > 0 && host.memory_mib > 0);
    }

    #[test]
    fn fields_are_read_by_their_name() {
        let cpuinfo = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nmodel name\t: Another\n";
        assert_eq!(field(cpuinfo, "model name").as_deref(), Some("Some CPU @ 2 GHz"));
        assert_eq!(field(cpuinfo, "flags"), None);
        assert_eq!(memory_mib("MemTotal:       24652112 kB\nMemFree: 1 kB\n"), 24_074);
    }
}
