//! The container's image: a static program and empty directories beside a Containerfile, from nothing. buildah builds
//! it, and runc runs it with a read-only root, with a disk in a file and one of a server that it finds by its name.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_testkit::tools::find;
use serde_json::{Value, json};

use crate::place::{STATIC_TRIPLE, cargo_static, root, target_dir};
use crate::setup::is_root;
use crate::steps::{Steps, run_shown};

/// Lays the image out in `out`, builds and runs it. The program is a static release build, or the one that
/// `BLKMQ_IMAGE_BIN` names.
///
/// # Errors
/// A step fails. Where buildah or runc is missing, the image is not built or not run, with the reason.
pub(super) fn run(steps: &mut Steps, out: &Path) -> Result<()> {
    let program = program(steps)?;
    let image = out.join("image");
    steps.time("image", || make(&image, &program))?;
    println!("    {}", image.display());
    steps.time("what a static program refuses", || refuse(&image))?;
    let mut tree = image.join("root");
    if is_root() && find("buildah").is_some() {
        tree = steps.time("the image by buildah", || build(&image, &out.join("buildah")))?;
    } else {
        steps.skip("the image by buildah", "needs root and buildah");
    }
    if is_root() && find("runc").is_some() && find("nbdinfo").is_some() {
        steps.time("the image in runc", || serve(&image, &tree))?;
    } else {
        steps.skip("the image in runc", "needs root, runc and nbdinfo");
    }
    let _ = fs::remove_dir_all(out.join("buildah"));
    Ok(())
}

fn program(steps: &mut Steps) -> Result<PathBuf> {
    if let Some(program) = std::env::var_os("BLKMQ_IMAGE_BIN") {
        return Ok(program.into());
    }
    let mut build = cargo_static("build --release -p blkmq --bins");
    steps.run("static release build", &mut build)?;
    Ok(target_dir()?.join(STATIC_TRIPLE).join("release/blkmq"))
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
    let to = tree.join(PROGRAM);
    fs::copy(program, &to).with_context(|| program.display().to_string())?;
    run_shown(Command::new("strip").arg(&to))?;
    let interpreted = has_interpreter(&fs::read(&to)?).context("the program is no ELF file of 64 bits")?;
    ensure!(!interpreted, "{} is not static", program.display());
    fs::copy(root().join("contrib/Containerfile"), image.join("Containerfile"))?;
    Ok(())
}

/// Whether an ELF file names a dynamic loader; None if it is none, or cut off.
fn has_interpreter(file: &[u8]) -> Option<bool> {
    const PT_INTERP: u64 = 3;
    let number = |at: usize, bytes: usize| -> Option<u64> {
        let mut whole = [0; 8];
        whole[..bytes].copy_from_slice(file.get(at..at.checked_add(bytes)?)?);
        Some(u64::from_le_bytes(whole))
    };
    if !file.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    // e_phoff, e_phentsize and e_phnum.
    let (table, entry, entries) = (number(0x20, 8)?, number(0x36, 2)?, number(0x38, 2)?);
    for at in (0..entries).map(|n| table.checked_add(n * entry)) {
        if number(at?.try_into().ok()?, 4)? == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

/// A disk whose driver is a library that would have to be loaded, and a user in no file.
fn refuse(image: &Path) -> Result<()> {
    for (key, said) in [
        (
            "[disk.r]\nrbd = \"pool/image\"",
            "is static and can load no library",
        ),
        ("allow_uid = [\"no-such-user\"]", "a name in /etc/passwd"),
    ] {
        let config = image.join("refused.toml");
        fs::write(
            &config,
            format!("[[export]]\nnbd = \"unix:/nowhere/a.sock\"\n{key}\n"),
        )?;
        let mut serve = Command::new(image.join("root").join(PROGRAM));
        let done = serve.args(["serve", "-c"]).arg(&config).output()?;
        fs::remove_file(&config)?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(!done.status.success() && stderr.contains(said), "{key}: {stderr}");
    }
    Ok(())
}

/// Builds the image as the Containerfile says, and returns the root of a container of it.
fn build(image: &Path, storage: &Path) -> Result<PathBuf> {
    let buildah = |words: &[&str]| -> Result<String> {
        let mut command = Command::new("buildah");
        // Storage of its own, without the kernel's overlays.
        command
            .args(["--storage-driver", "vfs", "--root"])
            .arg(storage.join("root"));
        command.arg("--runroot").arg(storage.join("run")).args(words);
        let done = command.output().context("starting buildah")?;
        let stderr = String::from_utf8_lossy(&done.stderr);
        ensure!(done.status.success(), "buildah {}: {stderr}", words.join(" "));
        Ok(String::from_utf8(done.stdout)?.trim().to_owned())
    };
    let context = image
        .to_str()
        .context("the build directory has a name in UTF-8")?;
    buildah(&["build", "--isolation", "chroot", "-t", NAME, context])?;
    let starts = buildah(&[
        "inspect",
        "--format",
        "{{.OCIv1.Config.Entrypoint}} {{.OCIv1.Config.Cmd}}",
        NAME,
    ])?;
    ensure!(
        starts == format!("[/{PROGRAM}] [{}]", WORDS.join(" ")),
        "the image starts {starts}"
    );
    let container = buildah(&["from", NAME])?;
    Ok(buildah(&["mount", &container])?.into())
}

/// Runs a container of this root with two disks, and asks for both.
fn serve(image: &Path, tree: &Path) -> Result<()> {
    let data = image.join("data");
    fs::create_dir_all(&data)?;
    for (name, bytes) in DISKS {
        fs::File::create(data.join(format!("{name}.raw")))?.set_len(bytes)?;
    }
    let server = Server::start(&tree.join(PROGRAM), &data)?;
    fs::write(data.join("hosts"), format!("127.0.0.1 {HOST}\n"))?;
    let config = CONFIG
        .replace("HOST", HOST)
        .replace("PORT", &server.port.to_string());
    fs::write(data.join("blkmq.toml"), config)?;
    let bundle = image.join("bundle");
    fs::create_dir_all(&bundle)?;
    run_shown(Command::new("runc").args(["spec", "--bundle"]).arg(&bundle))?;
    let config = bundle.join("config.json");
    let spec: Value = serde_json::from_str(&fs::read_to_string(&config)?)?;
    fs::write(&config, spec_of(spec, tree, &data).to_string())?;
    let mut run = Command::new("runc");
    run.args(["run", NAME, "--bundle"])
        .arg(&bundle)
        .stdin(Stdio::null());
    let mut container = run.spawn().context("starting runc")?;
    let sizes = DISKS.map(|(name, _)| size_at(&data.join("nbd.sock"), name));
    let _ = Command::new("runc").args(["kill", NAME, "TERM"]).status();
    let ended = container.wait()?;
    drop(server);
    let _ = fs::remove_dir_all(&data);
    let _ = fs::remove_dir_all(&bundle);
    for (size, (name, bytes)) in sizes.into_iter().zip(DISKS) {
        ensure!(size? == bytes, "{name} has another size there");
    }
    ensure!(ended.success(), "the daemon ended there with {ended}");
    Ok(())
}

/// runc's own defaults, but for the program, what is mounted, the network, and a terminal.
fn spec_of(mut spec: Value, tree: &Path, data: &Path) -> Value {
    let program = format!("/{PROGRAM}");
    let words = [&[program.as_str()][..], &WORDS].concat();
    spec["process"]["args"] = words.into();
    spec["process"]["terminal"] = false.into();
    // It may not be allowed to set what it has.
    spec["process"]["rlimits"] = json!([]);
    spec["root"] = json!({"path": tree, "readonly": true});
    if let Some(namespaces) = spec["linux"]["namespaces"].as_array_mut() {
        namespaces.retain(|space| space["type"] != "network");
    }
    if let Some(mounts) = spec["mounts"].as_array_mut() {
        for (source, to, how) in [
            (data.to_owned(), "/var/lib/blkmq", "rw"),
            (data.join("blkmq.toml"), "/etc/blkmq/blkmq.toml", "ro"),
            (data.join("hosts"), "/etc/hosts", "ro"),
        ] {
            mounts
                .push(json!({"destination": to, "type": "bind", "source": source, "options": ["bind", how]}));
        }
    }
    spec
}

/// A daemon beside the container, with the disk that the container finds by the name of its host.
struct Server {
    daemon: Child,
    port: u16,
}

impl Server {
    fn start(program: &Path, data: &Path) -> Result<Self> {
        let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
        let disk = format!("name=far,file={}", data.join("far.raw").display());
        let mut serve = Command::new(program);
        serve.args([
            "serve",
            "--disk",
            &disk,
            "--nbd",
            &format!("tcp:127.0.0.1:{port}"),
        ]);
        let mut daemon = serve.stdout(Stdio::piped()).spawn()?;
        let said = daemon.stdout.take().context("it is piped")?;
        let started = Self { daemon, port };
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        ensure!(
            lines.any(|line| line == "ready"),
            "the daemon beside the container is not ready"
        );
        Ok(started)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

/// The size of a disk, as soon as it is served.
fn size_at(socket: &Path, disk: &str) -> Result<u64> {
    let start = Instant::now();
    while !socket.exists() {
        ensure!(start.elapsed() < START_MAX, "nothing is served");
        thread::sleep(Duration::from_millis(20));
    }
    let uri = format!("nbd+unix:///{disk}?socket={}", socket.display());
    let done = Command::new("nbdinfo").args(["--size", &uri]).output()?;
    ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    Ok(String::from_utf8(done.stdout)?.trim().parse()?)
}

const NAME: &str = "blkmq-image";
/// In the image.
const PROGRAM: &str = "usr/bin/blkmq";
const WORDS: [&str; 3] = ["serve", "-c", "/etc/blkmq/blkmq.toml"];
const DISKS: [(&str, u64); 2] = [("vm1", 8 << 20), ("far", 12 << 20)];
/// In the container's `/etc/hosts` alone.
const HOST: &str = "disks.blkmq.test";
/// The words in capitals are replaced.
const CONFIG: &str = r#"
[disk.vm1]
file = "/var/lib/blkmq/vm1.raw"
[disk.far]
nbd = "nbd://HOST:PORT/far"
[[export]]
nbd = "unix:/var/lib/blkmq/nbd.sock"
"#;
const START_MAX: Duration = Duration::from_secs(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn static_program_has_no_interpreter() -> Result<()> {
        let mut program = fs::read(std::env::current_exe()?)?;
        assert_eq!(has_interpreter(&program), Some(true), "the tests are not static");
        // Without its table of segments.
        program[0x38..0x3a].fill(0);
        assert_eq!(has_interpreter(&program), Some(false));
        assert_eq!(has_interpreter(&program[..0x30]), None);
        assert_eq!(has_interpreter(b"#!/bin/sh\n"), None);
        Ok(())
    }
}
