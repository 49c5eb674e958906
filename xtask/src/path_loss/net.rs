//! The network between the two hosts of a test: two network namespaces, and links that can be cut in four
//! ways.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use blkmq_testkit::tools::find;

/// Two hosts and the links between them. Dropping it removes everything.
pub(crate) struct Net {
    /// The namespace of the host that uses the disks.
    pub(crate) near: String,
    /// The namespace of the host that provides the disks.
    pub(crate) far: String,
}

/// How a link is cut. TCP detects none of these by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cut {
    /// Down at the host that uses the disks: its packets have no route.
    NearDown,
    /// Down at the host that provides them: the near one loses its carrier.
    FarDown,
    /// Up on both sides; packets to the far host are lost.
    RequestsLost,
    /// Up on both sides; packets from the far host are lost: requests are executed, and no reply
    /// arrives.
    RepliesLost,
}

impl Cut {
    pub(crate) const ALL: [Self; 4] = [
        Self::NearDown,
        Self::FarDown,
        Self::RequestsLost,
        Self::RepliesLost,
    ];
}

impl Net {
    /// Sets up the hosts and `links` links.
    ///
    /// # Errors
    /// The kernel's error, such as an operation that is not allowed or not supported.
    pub(crate) fn set_up(links: usize) -> Result<Self> {
        clear_leftovers();
        let own = std::process::id();
        let net = Self {
            near: format!("{PREFIX}{own}-near"),
            far: format!("{PREFIX}{own}-far"),
        };
        let (near, far) = (&net.near, &net.far);
        ip(&format!("netns add {near}"))?;
        ip(&format!("netns add {far}"))?;
        for link in 0..links {
            let device = device(link);
            ip(&format!(
                "link add {device} netns {near} type veth peer name {device} netns {far}"
            ))?;
            for (host, address) in [(near, near_address(link)), (far, far_address(link))] {
                ip(&format!("-n {host} address add {address}/24 dev {device}"))?;
                ip(&format!("-n {host} link set {device} up"))?;
            }
        }
        Ok(net)
    }

    pub(crate) fn cut(&self, link: usize, cut: Cut) -> Result<()> {
        let device = device(link);
        match cut {
            Cut::NearDown => ip(&format!("-n {} link set {device} down", self.near)),
            Cut::FarDown => ip(&format!("-n {} link set {device} down", self.far)),
            // To a station that does not exist, so that the other side drops what it receives.
            Cut::RequestsLost => mislead(&self.near, &far_address(link), &device),
            Cut::RepliesLost => mislead(&self.far, &near_address(link), &device),
        }
    }

    pub(crate) fn restore(&self, link: usize, cut: Cut) -> Result<()> {
        let device = device(link);
        match cut {
            Cut::NearDown => ip(&format!("-n {} link set {device} up", self.near)),
            Cut::FarDown => ip(&format!("-n {} link set {device} up", self.far)),
            Cut::RequestsLost => ask_again(&self.near, &far_address(link), &device),
            Cut::RepliesLost => ask_again(&self.far, &near_address(link), &device),
        }
    }

    /// A command that runs on one of the hosts, and ends with this program.
    pub(crate) fn command(host: &str, program: &Path) -> Command {
        let mut command = Command::new("ip");
        command
            .args(["netns", "exec", host, "setpriv", "--pdeathsig", "KILL"])
            .arg(program);
        command
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        for host in [&self.near, &self.far] {
            // It may not exist.
            let _ = ip(&format!("netns delete {host}"));
        }
    }
}

/// The address of the host that provides the disks, on one of the links.
pub(crate) fn far_address(link: usize) -> String {
    format!("10.77.{}.2", link + 1)
}

fn near_address(link: usize) -> String {
    format!("10.77.{}.1", link + 1)
}

fn device(link: usize) -> String {
    format!("path{}", link + 1)
}

fn mislead(host: &str, address: &str, device: &str) -> Result<()> {
    ip(&format!(
        "-n {host} neighbour replace {address} lladdr {NOBODY} nud permanent dev {device}"
    ))
}

fn ask_again(host: &str, address: &str, device: &str) -> Result<()> {
    ip(&format!("-n {host} neighbour delete {address} dev {device}"))
}

/// Removes what killed runs have left.
fn clear_leftovers() {
    let Ok(hosts) = std::fs::read_dir("/run/netns") else {
        return;
    };
    for name in hosts
        .flatten()
        .filter_map(|host| host.file_name().into_string().ok())
    {
        let run = name.strip_prefix(PREFIX).and_then(|rest| rest.split('-').next());
        if run.is_some_and(|run| !Path::new("/proc").join(run).exists()) {
            let _ = ip(&format!("netns delete {name}"));
        }
    }
}

fn ip(words: &str) -> Result<()> {
    let tool = find("ip").context("ip is not installed")?;
    let output = Command::new(tool)
        .args(words.split_whitespace())
        .stdin(Stdio::null())
        .output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "ip {words}: {}", said.trim());
    Ok(())
}

const PREFIX: &str = "blkmq-path-loss-";
/// A hardware address that no device has.
const NOBODY: &str = "02:00:00:00:00:01";
