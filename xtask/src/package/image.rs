//! The container's image: a tree of the program and its libraries beside a Containerfile, from nothing. It is tried by
//! `runc`, with a read-only root, as builders of images would put it there.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_testkit::tools::find;
use serde_json::{Value, json};

use crate::place::root;
use crate::setup::is_root;
use crate::steps::{Steps, run_shown};

/// Lays the image out in `out`, and runs it.
///
/// # Errors
/// A step fails. Where runc is missing, the image is not run, with the reason.
pub(super) fn run(steps: &mut Steps, out: &Path, program: &Path) -> Result<()> {
    let image = out.join("image");
    steps.time("image", || make(&image, program))?;
    println!("    {}", image.display());
    if !is_root() || find("runc").is_none() || find("nbdinfo").is_none() {
        steps.skip("the image in runc", "needs root, runc and nbdinfo");
        return Ok(());
    }
    steps.time("the image in runc", || serve(&image))
}

fn make(image: &Path, program: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(image);
    let tree = image.join("root");
    for dir in [
        "usr/bin",
        "etc/blkmq",
        "proc",
        "sys",
        "dev",
        "run/blkmq",
        "tmp",
        "var/lib/blkmq",
    ] {
        fs::create_dir_all(tree.join(dir))?;
    }
    let to = tree.join("usr/bin/blkmq");
    fs::copy(program, &to).with_context(|| program.display().to_string())?;
    run_shown(Command::new("strip").arg(&to))?;
    let listed = Command::new("ldd").arg(program).output()?;
    for library in libraries(&String::from_utf8_lossy(&listed.stdout)) {
        let to = tree.join(library.strip_prefix("/")?);
        fs::create_dir_all(to.parent().context("a library lies in a directory")?)?;
        fs::copy(library, to).with_context(|| library.display().to_string())?;
    }
    fs::copy(root().join("contrib/Containerfile"), image.join("Containerfile"))?;
    Ok(())
}

/// The paths in ldd's list: `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)`.
fn libraries(listed: &str) -> impl Iterator<Item = &Path> {
    let words = listed
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    words.map(Path::new)
}

/// Runs the image with a disk, and asks for the disk.
fn serve(image: &Path) -> Result<()> {
    let data = image.join("data");
    fs::create_dir_all(&data)?;
    fs::File::create(data.join("vm1.raw"))?.set_len(DISK_BYTES)?;
    run_shown(Command::new("runc").args(["spec", "--bundle"]).arg(image))?;
    let config = image.join("config.json");
    let spec: Value = serde_json::from_str(&fs::read_to_string(&config)?)?;
    fs::write(&config, spec_of(spec, &data).to_string())?;
    let mut run = Command::new("runc");
    run.args(["run", NAME, "--bundle"])
        .arg(image)
        .stdin(Stdio::null());
    let mut container = run.spawn().context("starting runc")?;
    let size = size_at(&data.join("nbd.sock"));
    let _ = Command::new("runc").args(["kill", NAME, "TERM"]).status();
    let ended = container.wait()?;
    let _ = fs::remove_dir_all(&data);
    ensure!(size? == DISK_BYTES, "the disk has another size there");
    ensure!(ended.success(), "the daemon ended there with {ended}");
    Ok(())
}

/// runc's own defaults, but for the program, the disk's directory, and a terminal.
fn spec_of(mut spec: Value, data: &Path) -> Value {
    let serve =
        "/usr/bin/blkmq serve --disk name=vm1,file=/var/lib/blkmq/vm1.raw --nbd unix:/var/lib/blkmq/nbd.sock";
    spec["process"]["args"] = serve.split(' ').collect();
    spec["process"]["terminal"] = false.into();
    // It may not be allowed to set what it has.
    spec["process"]["rlimits"] = json!([]);
    spec["root"] = json!({"path": "root", "readonly": true});
    if let Some(mounts) = spec["mounts"].as_array_mut() {
        mounts.push(json!({
            "destination": "/var/lib/blkmq",
            "type": "bind",
            "source": data,
            "options": ["bind", "rw"],
        }));
    }
    spec
}

/// The size of the disk, as soon as it is served.
fn size_at(socket: &Path) -> Result<u64> {
    let start = Instant::now();
    while !socket.exists() {
        ensure!(start.elapsed() < START_MAX, "nothing is served");
        thread::sleep(Duration::from_millis(20));
    }
    let uri = format!("nbd+unix:///vm1?socket={}", socket.display());
    let done = Command::new("nbdinfo").args(["--size", &uri]).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?.trim().parse()?)
}

const NAME: &str = "blkmq-image";
const DISK_BYTES: u64 = 8 << 20;
const START_MAX: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_are_the_paths_in_the_list() {
        let listed =
            "\tlinux-vdso.so.1 (0x7f)\n\tlibc.so.6 => /lib/libc.so.6 (0x7e)\n\t/lib64/ld.so.2 (0x7d)\n";
        let found: Vec<&Path> = libraries(listed).collect();
        assert_eq!(found, [Path::new("/lib/libc.so.6"), Path::new("/lib64/ld.so.2")]);
        assert_eq!(libraries("\tstatically linked\n").count(), 0);
    }
}
