//! Takes the screens of `blkmq top` for the documents: a daemon with tenants under load, `blkmq top` in a
//! terminal of tmux, and that terminal's content.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};

use crate::place::{root, target_dir};
use crate::steps::Steps;
use blkmq_testkit::tools::find;

/// Rewrites every screen of the document.
///
/// # Errors
/// If tmux or fio is missing, or one of the started programs fails.
pub(crate) fn run(steps: &mut Steps) -> Result<()> {
    for tool in ["tmux", "fio"] {
        ensure!(
            find(tool).is_some(),
            "not installed: {tool} (run `cargo xtask setup`)"
        );
    }
    let program = steps.command_under_test()?;
    let screens = steps.time("screens", || take(&program))?;
    let path = root().join(DOCUMENT);
    let text = fs::read_to_string(&path).with_context(|| format!("reading {DOCUMENT}"))?;
    fs::write(&path, fill(&text, &screens)?).with_context(|| format!("writing {DOCUMENT}"))?;
    println!("wrote {DOCUMENT}");
    Ok(())
}

/// A screen, by the size of its terminal.
type Screen = ((u16, u16), String);

fn take(program: &Path) -> Result<Vec<Screen>> {
    let dir = target_dir()?.join("screens");
    let _ = fs::remove_dir_all(&dir);
    fs::create_dir_all(&dir)?;
    fs::write(dir.join("blkmq.toml"), CONFIG)?;
    let control = format!("unix:{}", dir.join("control.sock").display());
    let mut daemon = Command::new(program);
    daemon.args([
        "serve",
        "-c",
        "blkmq.toml",
        "--nbd",
        "unix:nbd.sock",
        "--control",
        &control,
    ]);
    daemon.env("BLKMQ_LOG", "warn");
    let _daemon = Running::start(&mut daemon, &dir)?;
    wait_for(&dir.join("control.sock"))?;
    let mut fio = Command::new("fio");
    fio.args(["--ioengine=nbd", "--thread", "--time_based", "--runtime=60"]);
    for (disk, load) in LOADS {
        fio.arg(format!("--name={disk}"));
        fio.arg(format!("--uri=nbd+unix:///{disk}?socket=nbd.sock"));
        fio.args(load.split(' '));
    }
    let _load = Running::start(&mut fio, &dir)?;
    let terminal = Terminal::start(program, dir, SIZES[0])?;
    let mut screens = Vec::new();
    for size in SIZES {
        terminal.resize(size)?;
        // Fills the history that a screen shows.
        thread::sleep(HISTORY);
        screens.push((size, terminal.screen()?));
    }
    Ok(screens)
}

/// A process; dropping this ends it.
struct Running(Child);

impl Running {
    fn start(command: &mut Command, dir: &Path) -> Result<Self> {
        let quiet = command.current_dir(dir).stdin(Stdio::null());
        let child = quiet.stdout(Stdio::null()).spawn();
        Ok(Self(child.with_context(|| format!("starting {command:?}"))?))
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // Both fail if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn wait_for(path: &Path) -> Result<()> {
    let end = Instant::now() + START_MAX;
    while !path.exists() {
        ensure!(Instant::now() < end, "{}: not there in time", path.display());
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// `blkmq top` in a terminal of its own tmux.
struct Terminal {
    dir: PathBuf,
}

impl Terminal {
    fn start(program: &Path, dir: PathBuf, (width, height): (u16, u16)) -> Result<Self> {
        let terminal = Self { dir };
        let top = format!("exec {} top --socket unix:control.sock", program.display());
        let (width, height) = (width.to_string(), height.to_string());
        terminal.tmux(&[
            "-f",
            "/dev/null",
            "new-session",
            "-d",
            "-x",
            &width,
            "-y",
            &height,
            &top,
        ])?;
        Ok(terminal)
    }

    fn resize(&self, (width, height): (u16, u16)) -> Result<()> {
        let (width, height) = (width.to_string(), height.to_string());
        self.tmux(&["resize-window", "-x", &width, "-y", &height])?;
        Ok(())
    }

    fn screen(&self) -> Result<String> {
        let screen = self.tmux(&["capture-pane", "-p"])?;
        let lines = screen.lines().map(|line| format!("{}\n", line.trim_end()));
        Ok(lines.collect())
    }

    fn tmux(&self, words: &[&str]) -> Result<String> {
        let mut tmux = Command::new("tmux");
        let output = tmux
            .args(["-u", "-S", "tmux"])
            .args(words)
            .current_dir(&self.dir)
            .output()?;
        if !output.status.success() {
            bail!("tmux {words:?}: {}", String::from_utf8_lossy(&output.stderr));
        }
        Ok(String::from_utf8(output.stdout)?)
    }
}

impl Drop for Terminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]);
    }
}

/// The text with the screens between their markers.
fn fill(text: &str, screens: &[Screen]) -> Result<String> {
    let mut filled = String::new();
    let mut lines = text.lines();
    let mut written = 0;
    while let Some(line) = lines.next() {
        filled += &format!("{line}\n");
        let wanted = |((width, height), _): &&Screen| line == format!("<!-- screen: {width}x{height} -->");
        let Some((_, screen)) = screens.iter().find(wanted) else {
            continue;
        };
        filled += &format!("\n```text\n{screen}```\n\n{END}\n");
        let end = lines.find(|line| *line == END);
        end.with_context(|| format!("`{line}` has no end"))?;
        written += 1;
    }
    ensure!(
        written == screens.len(),
        "{written} of {} screens have a place",
        screens.len()
    );
    Ok(filled)
}

/// Two queues: a drive of about 20000 IOPS that four tenants share by weight, and a fast one
/// without a scheduler.
const CONFIG: &str = r#"
[daemon]
reactors = 1

[queue.ssd]
depth = 8
sched = "bfq"

[disk.web1]
null = "1G"
queue = "ssd"
latency = "300us"
spread = "60us"
parallel = 6
group = "/customers/a/web1"

[disk.db1]
null = "1G"
queue = "ssd"
latency = "300us"
spread = "60us"
parallel = 6
group = "/customers/a/db1"

[disk.mail]
null = "1G"
queue = "ssd"
latency = "300us"
spread = "60us"
parallel = 6
group = "/customers/b/mail"

[disk.archive]
null = "1G"
queue = "ssd"
latency = "300us"
spread = "60us"
parallel = 6
group = "/backup"

[disk.scratch]
ram = "64M"
queue = "memory"
group = "/scratch"

[disk.spare]
ram = "64M"
queue = "memory"
group = "/spare"

[group."/customers"]
weight = 300

[group."/customers/a"]
weight = 200

[group."/customers/a/db1"]
weight = 300

[group."/backup"]
bps = "20M"
"#;
const LOADS: [(&str, &str); 5] = [
    ("web1", "--rw=randread --bs=4k --iodepth=8 --size=1G"),
    ("db1", "--rw=randrw --rwmixread=70 --bs=8k --iodepth=16 --size=1G"),
    ("mail", "--rw=randrw --bs=4k --iodepth=16 --size=1G"),
    ("archive", "--rw=read --bs=64k --iodepth=4 --size=1G"),
    (
        "scratch",
        "--rw=randread --bs=4k --iodepth=1 --rate_iops=2000 --size=64M",
    ),
];
/// The traditional size of a terminal, and that of a window on a wide screen.
const SIZES: [(u16, u16); 2] = [(80, 24), (140, 30)];
const HISTORY: Duration = Duration::from_secs(12);
const START_MAX: Duration = Duration::from_secs(10);
const DOCUMENT: &str = "docs/operate/top.md";
const END: &str = "<!-- screen: end -->";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn screen_replaces_what_was_between_its_markers() {
        let screens = [((80, 24), "new\n".to_owned())];
        let text = "a\n<!-- screen: 80x24 -->\nold\n<!-- screen: end -->\nb\n";
        let filled = fill(text, &screens).unwrap();
        let wanted = "a\n<!-- screen: 80x24 -->\n\n```text\nnew\n```\n\n<!-- screen: end -->\nb\n";
        assert_eq!(filled, wanted);
        assert_eq!(fill(&filled, &screens).unwrap(), wanted);
        for bad in ["a\n", "<!-- screen: 80x24 -->\n"] {
            assert!(fill(bad, &screens).is_err(), "{bad:?}");
        }
    }
}
