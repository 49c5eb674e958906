//! A domain of Debian's libvirt on disks of the daemon, as `blkmq ctl show --client libvirt` describes them: it is
//! defined, goes on when the daemon is killed, gets a second disk while it runs, goes on when another daemon takes over,
//! and gives the disk back. libvirt runs as a user of its own, whom the daemon lets in.

mod session;

use std::fs::{self, File, Permissions};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};

use self::session::Session;
use super::initrd::Initrd;
use super::packages::Place;
use crate::setup::is_root;
use crate::steps::Steps;
use blkmq_testkit::tools::find as find_tool;

/// # Errors
/// The domain notices more than a pause, or a step fails. Without libvirt the test is skipped.
pub(super) fn run(steps: &mut Steps, place: &Place) -> Result<()> {
    let tools = ["virsh", "libvirtd", "qemu-system-x86_64", "setpriv"];
    let missing: Vec<&str> = tools
        .into_iter()
        .filter(|tool| find_tool(tool).is_none())
        .collect();
    if !is_root() || !missing.is_empty() {
        let why = format!(
            "needs root, and of libvirt-daemon-system, libvirt-clients and QEMU: {}",
            missing.join(", ")
        );
        steps.skip("a domain of libvirt", &why);
        return Ok(());
    }
    let program = steps.command_under_test()?;
    steps.time("a domain of libvirt", || follow(place, &program))
}

fn follow(place: &Place, program: &Path) -> Result<()> {
    // The newer kernel of the other tests crashes in Debian 12's emulator.
    let kernel = place.own_kernel()?;
    let mut initrd = Initrd::new(place)?.of_kernel(kernel.clone());
    initrd.add_module("virtio_pci", "")?;
    initrd.add_module("virtio_blk", "")?;
    let initrd = initrd.pack(SCRIPT)?;
    // A path that every user may walk.
    let dir = std::env::temp_dir().join(format!("blkmq-libvirt-{}", std::process::id()));
    fs::create_dir_all(&dir)?;
    fs::set_permissions(&dir, Permissions::from_mode(0o755))?;
    let done = walk(&kernel, program, &initrd, &dir);
    if done.is_ok() {
        fs::remove_dir_all(&dir)?;
    }
    done.with_context(|| format!("the files are in {}", dir.display()))
}

fn walk(kernel: &Path, program: &Path, initrd: &Path, dir: &Path) -> Result<()> {
    let mut boot = fs::read_dir(kernel.join("boot"))?
        .flatten()
        .map(|entry| entry.path());
    let is_kernel = |path: &PathBuf| {
        path.file_name()
            .is_some_and(|name| name.display().to_string().starts_with("vmlinuz"))
    };
    let kernel = boot.find(is_kernel).context("the package has a kernel")?;
    for (name, from) in [("vmlinuz", kernel.as_path()), ("initrd", initrd)] {
        fs::copy(from, dir.join(name))?;
        fs::set_permissions(dir.join(name), Permissions::from_mode(0o644))?;
    }
    let mut daemon = Daemon::start(program, dir, None)?;
    let session = Session::new(dir)?;
    let text = DOMAIN
        .replace("DIR", &dir.display().to_string())
        .replace("DISK", &daemon.xml("vda")?);
    let domain = session.write("domain.xml", &text)?;
    session.virsh(&["create", &domain])?;
    session.wait_for("vda", "right")?;
    daemon.kill()?;
    daemon = Daemon::start(program, dir, None)?;
    session.wait_for("vda", "right")?;
    println!("    the domain went on after a kill of the daemon");
    // Behind the kill: libvirt 9.0 and QEMU 7.2 do not connect a disk again that was attached while the machine ran.
    let vdb = session.write("vdb.xml", &daemon.xml("vdb")?)?;
    session.virsh(&["attach-device", NAME, &vdb, "--live"])?;
    session.wait_for("vdb", "right")?;
    let next = Daemon::start(program, dir, Some(&daemon))?;
    daemon.ended()?;
    session.wait_for("vda", "right")?;
    session.wait_for("vdb", "right")?;
    println!("    the domain went on with another daemon");
    session.virsh(&["detach-device", NAME, &vdb, "--live"])?;
    session.wait_for("vdb", "absent")?;
    session.wait_for("vda", "right")?;
    let now = session.virsh(&["dumpxml", NAME])?;
    ensure!(!now.contains("vdb.sock"), "libvirt still has the disk: {now}");
    session.check()?;
    session.virsh(&["destroy", NAME])?;
    drop(next);
    Ok(())
}

/// A daemon with the disks of the domain; dropping it kills it.
struct Daemon {
    program: PathBuf,
    dir: PathBuf,
    child: Child,
}

impl Daemon {
    /// Starts it, or has it take over.
    fn start(program: &Path, dir: &Path, before: Option<&Self>) -> Result<Self> {
        let at = |name: &str| format!("unix:{}", dir.join(name).display());
        let mut text = format!("[control]\nsocket = \"{}\"\n", at("control.sock"));
        for disk in ["vda", "vdb"] {
            let image = dir.join(format!("{disk}.raw"));
            if !image.exists() {
                File::create(&image)?.set_len(DISK_BYTES)?;
            }
            text += &format!("[disk.{disk}]\nfile = \"{}\"\n", image.display());
        }
        let user = session::USER;
        text += &format!(
            "[[export]]\nvhost-user = \"{}\"\nmode = \"0666\"\nallow_uid = [\"{user}\"]\n",
            at("{disk}.sock")
        );
        fs::write(dir.join("blkmq.toml"), text)?;
        let how = if before.is_some() {
            "--take-over"
        } else {
            "--upgrade-socket"
        };
        let mut child = Command::new(program)
            .args(["serve", "-c"])
            .arg(dir.join("blkmq.toml"))
            .args([how, &at("upgrade.sock")])
            .stdout(Stdio::piped())
            .spawn()?;
        let said = child.stdout.take().context("it is piped")?;
        let (program, dir) = (program.to_owned(), dir.to_owned());
        let started = Self { program, dir, child };
        let mut lines = BufReader::new(said).lines().map_while(Result::ok);
        ensure!(lines.any(|line| line == "ready"), "the daemon is not ready");
        Ok(started)
    }

    /// What libvirt is told of a disk.
    fn xml(&self, disk: &str) -> Result<String> {
        let socket = format!("unix:{}", self.dir.join("control.sock").display());
        let words = [
            "ctl", "--socket", &socket, "show", "disk", disk, "--client", "libvirt",
        ];
        let done = Command::new(&self.program).args(words).output()?;
        ensure!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
        // The domain's own name for it.
        Ok(String::from_utf8(done.stdout)?.replace("dev='vda'", &format!("dev='{disk}'")))
    }

    fn kill(mut self) -> Result<()> {
        self.child.kill()?;
        self.child.wait().map(drop).context("the daemon is our own child")
    }

    /// Waits until it has ended by itself.
    fn ended(mut self) -> Result<()> {
        let status = self.child.wait()?;
        ensure!(status.success(), "the daemon ended with {status}");
        Ok(())
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

pub(super) const TEST: &str = "libvirt";
const NAME: &str = "blkmq";
const DISK_BYTES: u64 = 64 << 20;
const DOMAIN: &str = "\
<domain type='qemu'>
  <name>blkmq</name>
  <memory unit='MiB'>256</memory>
  <vcpu>2</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>DIR/vmlinuz</kernel>
    <initrd>DIR/initrd</initrd>
    <cmdline>console=ttyS0 loglevel=2 panic=-1</cmdline>
  </os>
  <features><acpi/></features>
  <memoryBacking><source type='memfd'/><access mode='shared'/></memoryBacking>
  <devices>
    <serial type='file'><source path='DIR/session/serial.log'/></serial>
DISK
  </devices>
</domain>
";
/// Writes new content to each disk and reads it back from there, again and again.
const SCRIPT: &str = "\
export PATH=/bin:/tmp/bin
busybox mkdir /tmp/bin; busybox --install -s /tmp/bin
turn=0
while :; do
  turn=$((turn + 1))
  dd if=/dev/urandom of=/tmp/content bs=64k count=4 2>/dev/null
  for disk in vda vdb; do
    if ! test -b /dev/$disk; then echo $disk absent $turn; continue; fi
    dd if=/tmp/content of=/dev/$disk bs=64k seek=$((turn % 100)) conv=notrunc,fsync 2>/dev/null || { echo $disk wrong $turn; continue; }
    dd if=/dev/$disk iflag=direct bs=64k skip=$((turn % 100)) count=4 of=/tmp/read 2>/dev/null
    if cmp -s /tmp/content /tmp/read; then echo $disk right $turn; else echo $disk wrong $turn; fi
  done
  sleep 0.2
done
";
