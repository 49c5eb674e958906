//! The sandbox's part for files and ports: rules of landlock, which hold for what is opened from now on, also by
//! io_uring. Descriptors that are open or come from a peer stay usable.

use std::path::Path;

use anyhow::{Result, bail};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, CompatLevel, Compatible, NetPort, PathBeneath, PathFd,
    Ruleset, RulesetAttr, RulesetCreated, RulesetCreatedAttr, RulesetStatus, Scope,
};

use super::reach::{Reach, What};

/// Confines the calling thread, and those that it will start. Returns what is confined, for people.
///
/// # Errors
/// The kernel has no landlock, or a step fails.
pub(super) fn enter(reach: &Reach) -> Result<String> {
    let connects_anywhere = reach.has_library;
    let mut ruleset = Ruleset::default()
        .set_compatibility(CompatLevel::BestEffort)
        .handle_access(AccessFs::from_all(NEWEST))?;
    if !reach.listens_anywhere {
        ruleset = ruleset.handle_access(AccessNet::BindTcp)?;
    }
    if !connects_anywhere {
        ruleset = ruleset.handle_access(AccessNet::ConnectTcp)?;
    }
    ruleset = ruleset.scope(Scope::Signal)?;
    // A service manager may be told at such a socket.
    let notify = std::env::var("NOTIFY_SOCKET").unwrap_or_default();
    if !notify.starts_with('@') && !reach.has_abstract {
        ruleset = ruleset.scope(Scope::AbstractUnixSocket)?;
    }
    let mut ruleset = ruleset.create()?;
    for need in &reach.needs {
        ruleset = allow(ruleset, &need.area, rights(need.what))?;
    }
    for (path, what) in of_every_daemon(reach) {
        ruleset = allow(ruleset, Path::new(path), rights(what))?;
    }
    for port in reach.listens.iter().filter(|_| !reach.listens_anywhere) {
        ruleset = ruleset.add_rule(NetPort::new(*port, AccessNet::BindTcp))?;
    }
    for port in reach.connects.iter().chain(reach.has_names.then_some(&DNS)) {
        if !connects_anywhere {
            ruleset = ruleset.add_rule(NetPort::new(*port, AccessNet::ConnectTcp))?;
        }
    }
    let status = ruleset.restrict_self()?;
    match status.ruleset {
        RulesetStatus::NotEnforced => {
            bail!("the kernel has no landlock, or it is switched off (lsm=landlock)")
        }
        RulesetStatus::PartiallyEnforced => {
            Ok(format!("files of {}, as far as this kernel knows", areas(reach)))
        }
        RulesetStatus::FullyEnforced => Ok(format!("files of {}", areas(reach))),
    }
}

/// Adds a rule for a path; nothing, if there is no such path.
fn allow(ruleset: RulesetCreated, path: &Path, rights: BitFlags<AccessFs>) -> Result<RulesetCreated> {
    let Ok(opened) = PathFd::new(path) else {
        return Ok(ruleset);
    };
    let is_dir = path.is_dir();
    let rights = if is_dir {
        rights
    } else {
        rights & AccessFs::from_file(NEWEST)
    };
    Ok(ruleset.add_rule(PathBeneath::new(opened, rights))?)
}

fn rights(what: What) -> BitFlags<AccessFs> {
    let read = AccessFs::ReadFile | AccessFs::ReadDir;
    let write = read
        | AccessFs::WriteFile
        | AccessFs::Truncate
        | AccessFs::MakeReg
        | AccessFs::RemoveFile
        | AccessFs::IoctlDev;
    let listen = AccessFs::MakeSock | AccessFs::MakeDir | AccessFs::RemoveFile | AccessFs::ReadDir;
    match what {
        What::Read => read | AccessFs::IoctlDev,
        What::Write => write,
        What::Listen => listen,
        What::All => write | listen,
    }
}

/// What every daemon reads: the kernel's descriptions of processes and drives, and the names of groups.
fn of_every_daemon(reach: &Reach) -> Vec<(&'static str, What)> {
    let mut all = vec![
        ("/proc", What::Read),
        ("/sys", What::Read),
        ("/dev/null", What::Write),
        ("/etc/group", What::Read),
        ("/etc/passwd", What::Read),
        ("/etc/localtime", What::Read),
    ];
    if reach.has_names || reach.has_library {
        // The resolver's files are replaced, and it loads libraries.
        let resolver = [
            "/etc",
            "/run/systemd/resolve",
            "/usr/lib",
            "/lib",
            "/lib64",
            "/usr/share/zoneinfo",
        ];
        all.extend(resolver.map(|path| (path, What::Read)));
    }
    if reach.has_library {
        let of_ceph = ["/usr/local/lib", "/usr/share", "/dev/urandom"];
        all.extend(of_ceph.map(|path| (path, What::Read)));
        all.extend(["/var/log/ceph", "/run/ceph"].map(|path| (path, What::All)));
    }
    if reach.makes_devices {
        all.push(("/dev", What::Write));
    }
    all
}

/// The first areas, for people.
fn areas(reach: &Reach) -> String {
    let mut all: Vec<String> = reach
        .needs
        .iter()
        .map(|need| need.area.display().to_string())
        .collect();
    all.sort_unstable();
    all.dedup();
    let more = all.len().saturating_sub(NAMED_MAX);
    all.truncate(NAMED_MAX);
    let mut text = if all.is_empty() {
        "nobody".to_owned()
    } else {
        all.join(", ")
    };
    if more > 0 {
        text += &format!(" and {more} more");
    }
    text
}

/// The newest version whose rights are handled; of an older kernel, those that it knows.
const NEWEST: ABI = ABI::V6;
const DNS: u16 = 53;
const NAMED_MAX: usize = 4;
