//! The package under systemd: a Debian of its own is booted in systemd-nspawn, and the package is installed, started,
//! reloaded, upgraded, killed and removed there as an operator does, beside verified load. `machine` boots it.

mod guest;
mod load;
mod machine;

use std::fs;
use std::io::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use blkmq_testkit::debugger::Stopped;
use blkmq_testkit::nbd::Client;
use blkmq_testkit::tools::find;

use self::guest::Guest;
use self::load::Load;
use self::machine::Machine;
use super::Package;
use super::test::make_debian;
use crate::place::target_dir;
use crate::setup::is_root;
use crate::steps::Steps;

/// Runs each part in one machine, with so many upgrades under load.
///
/// # Errors
/// A part fails. Where a tool is missing, all is skipped with the reason.
pub(super) fn run(steps: &mut Steps, package: &Package, upgrades: u32) -> Result<()> {
    let tools = [
        "systemd-nspawn",
        "debootstrap",
        "nsenter",
        "fio",
        "nbdinfo",
        "openssl",
    ];
    let missing: Vec<&str> = tools.into_iter().filter(|tool| find(tool).is_none()).collect();
    if !is_root() || !missing.is_empty() {
        let missing = missing.join(", ");
        steps.skip(
            "the package under systemd",
            &format!("needs root, and: {missing}"),
        );
        return Ok(());
    }
    let root = target_dir()?.join("package/debian");
    steps.time("a Debian of its own", || make_debian(&root))?;
    let host = steps.time("boot", || Machine::boot(&root))?;
    steps.time("installation and first start", || first_start(&host, package))?;
    steps.time("security", || security(&host))?;
    steps.time("journal", || journal(&host))?;
    steps.time("reload that is refused", || refused_reload(&host))?;
    steps.time(&format!("{upgrades} upgrades under load"), || {
        upgrade(&host, upgrades)
    })?;
    steps.time("kill and watchdog", || restarts(&host))?;
    steps.time("socket activation", || activation(&host))?;
    steps.time("credentials", || credentials(&host))?;
    steps.time("drop-ins", || drop_ins(&host))?;
    steps.time("removal", || removal(&host))?;
    host.power_off()
}

/// One install, one edit, one start, and a client that is served.
fn first_start(host: &Machine, package: &Package) -> Result<()> {
    fs::copy(&package.deb, host.path("/blkmq.deb"))?;
    let start = Instant::now();
    let said = host.run("dpkg -i /blkmq.deb")?;
    ensure!(
        said.contains("nothing is started, since no disk is configured"),
        "{said}"
    );
    ensure!(!is_active(host)?, "it was started without a disk");
    host.run("truncate -s 64M /var/lib/blkmq/vm1.raw")?;
    host.run("chown blkmq: /var/lib/blkmq/vm1.raw")?;
    write_config(host, "")?;
    host.run("systemctl enable --now blkmq")?;
    served(host, "nbd.sock")?;
    println!(
        "    from the package to a client: {:.1} s",
        start.elapsed().as_secs_f64()
    );
    let log = host.run("journalctl -u blkmq -o cat --no-pager")?;
    ensure!(log.contains("sandbox on: files of "), "{log}");
    Ok(())
}

/// The rating that the pages claim.
fn security(host: &Machine) -> Result<()> {
    let said = host.run("systemd-analyze security --threshold=20 --no-pager blkmq.service")?;
    println!("    {}", said.lines().last().unwrap_or_default());
    // Not of the process: a machine may forbid what the unit asks for.
    let adjusted = host.run("systemctl show -P OOMScoreAdjust blkmq")?;
    ensure!(
        adjusted.trim() == "-900",
        "the kernel may choose it first: {adjusted}"
    );
    Ok(())
}

/// What the journal has of a client that is hung up on.
fn journal(host: &Machine) -> Result<()> {
    let client = Client::connect(&host.socket("nbd.sock"), "vm1");
    let mut hostile = client.context("connecting")?;
    hostile.stream().write_all(&[0xff; 64])?;
    let start = Instant::now();
    let find = "journalctl -u blkmq -o cat --no-pager BLKMQ_DISK=vm1 BLKMQ_GROUP=/vm1 PRIORITY=4";
    loop {
        let said = host.run(find)?;
        if said.contains(" to vm1 closed: ") {
            return Ok(());
        }
        ensure!(start.elapsed() < SERVED_MAX, "the journal has of vm1: {said}");
    }
}

fn refused_reload(host: &Machine) -> Result<()> {
    let before = host.main_pid()?;
    write_config(host, "[queue.none]\ndepth = 3\n")?;
    ensure!(
        host.run("systemctl reload blkmq").is_err(),
        "a bad configuration was taken"
    );
    ensure!(host.main_pid()? == before, "another daemon serves");
    served(host, "nbd.sock")?;
    write_config(host, "")?;
    host.run("systemctl reload blkmq")?;
    ensure!(host.main_pid()? != before, "no daemon has taken over");
    served(host, "nbd.sock")
}

/// Upgrades of the package beside a client of NBD and a guest that verify what they read, and connect once.
fn upgrade(host: &Machine, upgrades: u32) -> Result<()> {
    let load = Load::start(&host.socket("nbd.sock"))?;
    let guest = Guest::start(&host.socket(GUEST));
    for number in 1..=upgrades {
        let before = host.main_pid()?;
        let said = host.run("dpkg -i /blkmq.deb")?;
        ensure!(
            said.contains("the new version has taken over; clients stayed connected"),
            "upgrade {number}: {said}"
        );
        ensure!(
            host.main_pid()? != before,
            "upgrade {number}: the same daemon serves"
        );
    }
    let verified = load.stop()?;
    let of_guest = guest.stop()?;
    ensure!(verified > 0 && of_guest > 0, "nothing was read");
    println!("    {verified} blocks were verified over NBD, {of_guest} sectors by a guest");
    Ok(())
}

/// A daemon that was killed, one that does not go on, and one a reactor of which a debugger has stopped are started
/// again, and a guest goes on.
fn restarts(host: &Machine) -> Result<()> {
    let drop_in = "/run/systemd/system/blkmq.service.d/soon.conf";
    host.write(drop_in, "[Service]\nWatchdogSec=3\n")?;
    restart(host)?;
    served(host, "nbd.sock")?;
    let guest = Guest::start(&host.socket(GUEST));
    for how in [How::Kill, How::Stop, How::Debug] {
        let before = host.main_pid()?;
        let start = Instant::now();
        let debugged = match how {
            How::Kill => signal(host, "KILL").map(|()| None)?,
            How::Stop => signal(host, "STOP").map(|()| None)?,
            How::Debug => Some(Stopped::thread(host.host_pid(before)?, "blkmq-r0")?),
        };
        while !is_active(host)? || host.main_pid()? == before {
            // The kernel keeps the process until its debugger has asked how it has ended.
            debugged.iter().for_each(|debugged| _ = debugged.has_ended());
            ensure!(start.elapsed() < RESTART_MAX, "{how:?}: it was not started again");
        }
        served(host, "nbd.sock")?;
        guest.connect_again()?;
        println!(
            "    {how:?}: it serves again after {:.1} s",
            start.elapsed().as_secs_f64()
        );
    }
    // Long enough for what was in flight, and for more.
    std::thread::sleep(Duration::from_millis(500));
    println!("    {} sectors were verified by a guest", guest.stop()?);
    let said = host.run("journalctl -u blkmq -o cat --no-pager")?;
    ensure!(
        said.contains("watchdog: no answer within 1s from blkmq-r0"),
        "the log does not name the reactor: {said}"
    );
    fs::remove_file(host.path(drop_in))?;
    restart(host)
}

fn signal(host: &Machine, signal: &str) -> Result<()> {
    host.run(&format!(
        "systemctl kill --kill-whom=main --signal={signal} blkmq"
    ))
    .map(drop)
}

/// What is done to a daemon.
#[derive(Clone, Copy, Debug)]
enum How {
    Kill,
    Stop,
    Debug,
}

/// A tenant's socket that systemd opens, by its name, also for a daemon that takes over.
fn activation(host: &Machine) -> Result<()> {
    host.write(
        "/etc/systemd/system/blkmq-tenant-a.socket",
        "[Socket]\nListenStream=/run/blkmq/tenant-a.sock\nSocketMode=0600\nFileDescriptorName=tenant-a\nService=blkmq.service\n",
    )?;
    host.write(
        DROP_IN,
        "[Unit]\nRequires=blkmq-tenant-a.socket\nAfter=blkmq-tenant-a.socket\n[Service]\nSockets=blkmq-tenant-a.socket\n",
    )?;
    write_config(host, "[[export]]\nnbd = \"systemd:tenant-a\"\n")?;
    restart(host)?;
    served(host, "tenant-a.sock")?;
    host.run("systemctl reload blkmq")?;
    served(host, "tenant-a.sock")?;
    write_config(host, "")?;
    host.run("systemctl stop blkmq-tenant-a.socket blkmq.service")?;
    host.run(&format!("rm {DROP_IN} /etc/systemd/system/blkmq-tenant-a.socket"))?;
    restart(host)
}

/// A key that systemd hands over. Where it gives credentials to a service's first process alone, as that of Debian 12
/// does, no other daemon takes over, and the first one goes on.
fn credentials(host: &Machine) -> Result<()> {
    machine::certificate(&host.path("/etc/key.pem"), &host.path("/etc/blkmq/cert.pem"))?;
    host.write(DROP_IN, "[Service]\nLoadCredential=key.pem:/etc/key.pem\n")?;
    write_config(
        host,
        "[[export]]\nnbd = \"unix:/run/blkmq/tls.sock\"\ntls = \"require\"\ntls_certificate = \"/etc/blkmq/cert.pem\"\n\
         tls_key = \"/run/credentials/blkmq.service/key.pem\"\n",
    )?;
    restart(host)?;
    served(host, "nbd.sock")?;
    ensure!(
        host.socket("tls.sock").exists(),
        "no socket with the key of a credential"
    );
    let before = host.main_pid()?;
    let is_taken_over = host.run("systemctl reload blkmq").is_ok();
    ensure!(
        (host.main_pid()? != before) == is_taken_over,
        "another daemon serves"
    );
    println!("    with a credential, a reload is done: {is_taken_over}");
    served(host, "nbd.sock")?;
    write_config(host, "")?;
    host.run(&format!("rm {DROP_IN}"))?;
    restart(host)
}

fn restart(host: &Machine) -> Result<()> {
    host.run("systemctl daemon-reload")?;
    // All these starts are ours, and too many for the unit's limit.
    host.run("systemctl reset-failed blkmq")?;
    host.run("systemctl restart blkmq").map(drop)
}

/// The drop-in for FUSE, whose file the host has to see. That for ublk is only loaded: this kernel may have no such
/// devices.
fn drop_ins(host: &Machine) -> Result<()> {
    let examples = "/usr/share/doc/blkmq/examples";
    let to = "/etc/systemd/system/blkmq.service.d";
    for (name, drop_in) in [("ublk", "ublk.conf"), ("fuse", "fuse.conf")] {
        host.run(&format!("install -D -m 0644 {examples}/{drop_in} {to}/{drop_in}"))?;
        host.run("systemctl daemon-reload")?;
        host.run("systemd-analyze verify --man=no blkmq.service")?;
        if name == "fuse" {
            write_config(host, "[[export]]\nfuse = \"/run/blkmq/vm1.disk\"\n")?;
        }
        host.run("systemctl restart blkmq")?;
        served(host, "nbd.sock")?;
        if name == "fuse" {
            let size = host.run("stat -c %s /run/blkmq/vm1.disk")?;
            ensure!(
                size.trim() == (64 << 20).to_string(),
                "the host sees {size} bytes"
            );
        }
        host.run("systemctl stop blkmq")?;
        host.run(&format!("rm {to}/{drop_in}"))?;
    }
    write_config(host, "")?;
    restart(host)
}

fn removal(host: &Machine) -> Result<()> {
    host.run("dpkg -r blkmq")?;
    ensure!(!is_active(host)?, "it serves without its package");
    host.run("test -s /var/lib/blkmq/vm1.raw")?;
    host.run("dpkg -P blkmq")?;
    host.run("test ! -e /etc/blkmq/blkmq.toml -a -s /etc/blkmq/cert.pem -a -s /var/lib/blkmq/vm1.raw")
        .map(drop)
}

/// The package's configuration with one disk at one socket, and more.
fn write_config(host: &Machine, more: &str) -> Result<()> {
    let text = format!(
        "[daemon]\npaths = [\"/var/lib/blkmq\", \"/run/blkmq\"]\n[control]\nsocket = \"unix:/run/blkmq/control.sock\"\n\
         [disk.vm1]\nfile = \"/var/lib/blkmq/vm1.raw\"\n[[export]]\nnbd = \"unix:/run/blkmq/nbd.sock\"\n\
         [[export]]\nvhost-user = \"unix:/run/blkmq/{GUEST}\"\n{more}"
    );
    host.write("/etc/blkmq/blkmq.toml", &text)
}

fn is_active(host: &Machine) -> Result<bool> {
    Ok(host.run("systemctl show -P ActiveState blkmq")?.trim() == "active")
}

/// Asks for the disk at a socket there.
fn served(host: &Machine, socket: &str) -> Result<()> {
    let (path, start) = (host.socket(socket), Instant::now());
    while !path.exists() {
        ensure!(start.elapsed() < SERVED_MAX, "there is no {socket}");
        std::thread::sleep(Duration::from_millis(20));
    }
    let size = load::size(&path).with_context(|| socket.to_owned())?;
    ensure!(size == 64 << 20, "{socket}: {size} bytes");
    Ok(())
}

/// The socket for a guest's monitor.
const GUEST: &str = "vm1.vhost";
const DROP_IN: &str = "/etc/systemd/system/blkmq.service.d/test.conf";
const SERVED_MAX: Duration = Duration::from_secs(10);
const RESTART_MAX: Duration = Duration::from_secs(30);
