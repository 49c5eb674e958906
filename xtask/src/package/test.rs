//! The test of the package: lintian looks at it, and it is installed, upgraded, removed and purged in a Debian of its
//! own, below a directory, where its program serves a disk.

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail, ensure};

use super::Package;
use crate::place::target_dir;
use crate::setup::is_root;
use crate::steps::{Steps, run_shown};
use blkmq_testkit::tools::find;

/// # Errors
/// The package is wrong, or a step fails. Steps whose tools are missing are skipped with the reason.
pub(super) fn run(steps: &mut Steps, package: &Package) -> Result<()> {
    match find("lintian") {
        None => steps.skip("lintian", "not installed: lintian"),
        Some(lintian) => {
            let mut command = Command::new(lintian);
            command.args(["--allow-root", "--fail-on", "error"]);
            command.args(["--suppress-tags", SUPPRESSED]).arg(&package.deb);
            steps.run("lintian", &mut command)?;
        }
    }
    if !is_root() || find("debootstrap").is_none() {
        steps.skip("installation", "needs root and debootstrap");
        return Ok(());
    }
    let root = target_dir()?.join("package/debian");
    steps.time("a Debian of its own", || make_debian(&root))?;
    steps.time("installation", || install(&root, package))
}

/// The smallest Debian, kept for the next run.
pub(super) fn make_debian(root: &Path) -> Result<()> {
    let kept = target_dir()?.join(format!("package-debian-{SUITE}.tar"));
    fs::create_dir_all(root)?;
    if kept.is_file() {
        return run_shown(Command::new("tar").arg("-xf").arg(&kept).arg("-C").arg(root));
    }
    let mut make = Command::new("debootstrap");
    make.args(["--variant=minbase", "--include=systemd,systemd-sysv,dbus", SUITE])
        .arg(root);
    run_shown(make.stdout(Stdio::null()))?;
    run_shown(
        Command::new("tar")
            .arg("-cf")
            .arg(&kept)
            .arg("-C")
            .arg(root)
            .arg("."),
    )
}

fn install(root: &Path, package: &Package) -> Result<()> {
    fs::copy(&package.deb, root.join("blkmq.deb"))?;
    let said = inside(root, "dpkg -i /blkmq.deb")?;
    ensure!(
        said.contains("nothing is started, since no disk is configured"),
        "{said}"
    );
    inside(root, "getent passwd blkmq")?;
    inside(root, "test -d /var/lib/blkmq -a -d /run/blkmq")?;
    inside(root, "test -s /usr/share/man/man1/blkmq-serve.1.gz")?;
    let config = root.join("etc/blkmq/blkmq.toml");
    let text = fs::read_to_string(&config)?;
    // The one edit: the disk of the comments.
    fs::write(
        &config,
        text.replace("\n#[", "\n[")
            .replace("\n#file", "\nfile")
            .replace("\n#vhost-user", "\nnbd"),
    )?;
    inside(root, "truncate -s 64M /var/lib/blkmq/vm1.raw")?;
    inside(root, "chown blkmq: /var/lib/blkmq/vm1.raw")?;
    fs::write(&config, fs::read_to_string(&config)?.replace("{disk}", "nbd"))?;
    serve(root)?;
    let said = inside(root, "dpkg -i /blkmq.deb")?;
    ensure!(!said.contains("nothing is started"), "{said}");
    inside(root, "dpkg -r blkmq")?;
    inside(root, "test -s /var/lib/blkmq/vm1.raw -a -s /etc/blkmq/blkmq.toml")?;
    let said = inside(root, "dpkg -P blkmq")?;
    ensure!(said.contains("the images in /var/lib/blkmq are left"), "{said}");
    inside(
        root,
        "test -s /var/lib/blkmq/vm1.raw -a ! -e /etc/blkmq -a ! -e /usr/bin/blkmq",
    )?;
    let left = inside(root, "find /etc /usr /run -name *blkmq*")?;
    ensure!(left.is_empty(), "left behind: {left}");
    Ok(())
}

/// Serves the disk there as the package's user, as its unit does but for systemd, and asks for it.
fn serve(root: &Path) -> Result<()> {
    let mut daemon = chroot(root, "--userspec=blkmq:blkmq");
    daemon.args(["/usr/bin/blkmq", "serve", "-c", "/etc/blkmq/blkmq.toml"]);
    let mut daemon = Running(daemon.env("BLKMQ_LOG", "info").spawn()?);
    let dir = root.join("run/blkmq");
    let start = Instant::now();
    // The last of its sockets.
    while !dir.join("control.sock").exists() {
        ensure!(start.elapsed() < START_MAX, "the daemon does not serve");
        if let Some(status) = daemon.0.try_wait()? {
            bail!("the daemon has ended: {status}");
        }
        thread::sleep(Duration::from_millis(20));
    }
    let said = inside(root, "blkmq ctl --socket unix:/run/blkmq/control.sock list disks")?;
    ensure!(said.contains("vm1"), "{said}");
    if let Some(nbdinfo) = find("nbdinfo") {
        let uri = format!("nbd+unix:///vm1?socket={}", dir.join("nbd.sock").display());
        run_shown(Command::new(nbdinfo).args(["--size", &uri]))?;
    }
    Ok(())
}

/// Runs a command there, and returns what it says.
fn inside(root: &Path, words: &str) -> Result<String> {
    let done = chroot(root, "--userspec=0:0").args(words.split(' ')).output()?;
    let said = format!(
        "{}{}",
        String::from_utf8_lossy(&done.stdout),
        String::from_utf8_lossy(&done.stderr)
    );
    ensure!(done.status.success(), "`{words}`: {said}");
    Ok(said)
}

/// A command in the root's files, with a view of processes of its own, without which programs find no descriptors.
fn chroot(root: &Path, user: &str) -> Command {
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "sh", "-c", ENTER, "sh"])
        .arg(root)
        .arg(user);
    command.env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin");
    command
}

/// A daemon that ends with its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = Command::new("kill").arg(self.0.id().to_string()).status();
        let _ = self.0.wait();
    }
}

const ENTER: &str =
    r#"root=$1 user=$2; shift 2; mount -t proc proc "$root/proc" && exec chroot "$user" "$root" "$@""#;
/// The oldest that the package is for.
const SUITE: &str = "bookworm";
const START_MAX: Duration = Duration::from_secs(20);
/// The project has no address.
const SUPPRESSED: &str = "bogus-mail-host,bogus-mail-host-in-debian-changelog";
