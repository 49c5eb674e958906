//! The file descriptors of the process, and the connections for which they suffice: the process raises its limit as
//! far as permitted, and reserves what disks, threads and addresses need. `serve` passes the number to the
//! front doors, `--check` reports if it is too low.

use anyhow::{Result, bail};
use blkmq_config::{Config, DiskSpec, ExportSpec};
use blkmq_export::common::{CONNECTIONS_MAX, LEAVING_MAX};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The most connections at a time, with the disks open and nothing else.
///
/// # Errors
/// It is less than configured, or than two for each address: with the limit, the present value and
/// what to raise.
pub(super) fn connections(config: &Config, reactors: usize) -> Result<u32> {
    let limit = raised();
    let kept = in_use() + needed(config, reactors);
    let left = u32::try_from(limit.saturating_sub(kept)).unwrap_or(u32::MAX);
    let each = |export: &ExportSpec| export.connections.unwrap_or(CONNECTIONS_MIN);
    let configured = config.exports.iter().map(each).fold(0, u32::saturating_add);
    let wanted = config.limits.connections.unwrap_or(0).max(configured);
    let least = kept + u64::from(wanted);
    if left < wanted {
        bail!(
            "{limit} file descriptors are too few: {kept} are for disks, threads and addresses, and {wanted} connections are \
             configured; raise the hard limit (LimitNOFILE= of a service, ulimit -Hn of a shell) to {} at least, or configure fewer",
            least.max(FOR_A_TABLE)
        );
    }
    if limit < FOR_A_TABLE {
        bail!(
            "{limit} file descriptors are too few: the kernel permits no ring of io_uring with room for {FOR_A_TABLE} files then; \
             raise the hard limit (LimitNOFILE= of a service, ulimit -Hn of a shell) to {} at least",
            least.max(FOR_A_TABLE)
        );
    }
    let max = config.limits.connections.unwrap_or(left);
    let most = |export: &ExportSpec| export.connections.unwrap_or(CONNECTIONS_MAX);
    let addresses = config.exports.iter().map(most).fold(0, u32::saturating_add);
    make_room(kept + u64::from(addresses.min(max)));
    Ok(max)
}

/// Makes the kernel enlarge its table of descriptors to the most that it can get. Otherwise the
/// table would grow step by step, and each time the thread whose descriptor does not fit waits for
/// 10 ms or more (an RCU grace period, since other threads use the table), even if that thread
/// serves.
fn make_room(descriptors: u64) {
    let last = i32::try_from(descriptors).unwrap_or(i32::MAX) - 1;
    // A failure is not fatal: the table grows later then.
    if let Err(error) = fcntl_dupfd_cloexec(std::io::stderr(), last) {
        tracing::debug!("no room for {descriptors} descriptors was made: {error}");
    }
}

/// Raises the limit of descriptors as far as is permitted without privileges. Returns the new
/// limit.
fn raised() -> u64 {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = Rlimit {
        current: maximum,
        maximum,
    };
    // `None` means no limit.
    let (now, most) = (current.unwrap_or(u64::MAX), maximum.unwrap_or(u64::MAX));
    if now >= most {
        return now;
    }
    match setrlimit(Resource::Nofile, wanted) {
        Ok(()) => most,
        Err(error) => {
            tracing::warn!("the limit of {now} file descriptors cannot be raised to {most}: {error}");
            now
        }
    }
}

/// Descriptors that are open now, the disks' among them.
fn in_use() -> u64 {
    std::fs::read_dir("/proc/self/fd").map_or(UNKNOWN_IN_USE, |all| all.count() as u64)
}

/// Descriptors that the daemon may need, without clients'. Each disk has one that reports clients
/// that have left.
fn needed(config: &Config, reactors: usize) -> u64 {
    let to_servers = |disk: &DiskSpec| {
        let config = disk.source.driver();
        config.map_or(0, |config| config.connections(reactors))
    };
    let servers: usize = config.disks.iter().map(to_servers).sum();
    let exports = config.exports.iter();
    let addresses: usize = exports.map(|export| of_address(config, export, reactors)).sum();
    let leaving = config.exports.len() * LEAVING_MAX as usize;
    let own = addresses + leaving + config.disks.len() + servers + reactors * FOR_A_REACTOR;
    own as u64 + SPARE
}

/// What an address needs, for all of its sockets or mounts.
fn of_address(config: &Config, export: &ExportSpec, reactors: usize) -> usize {
    let places = match export.at.is_per_disk() {
        true => config.disks_of(export).len(),
        false => 1,
    };
    places * export.at.descriptors(reactors)
}

/// A reactor's ring and a ring for polled devices, its wake-up event, and as much again.
const FOR_A_REACTOR: usize = 6;
/// The slots for files of a reactor's ring: the kernel makes no more of them than a process may have descriptors.
const FOR_A_TABLE: u64 = 256;
/// Reserve for temporary use: signals, reconnections to servers and paths.
const SPARE: u64 = 48;
/// Fewest clients that every address must be able to serve.
const CONNECTIONS_MIN: u32 = 2;
/// Where /proc is missing.
const UNKNOWN_IN_USE: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn front_ends_have_descriptors_for_their_memory_and_rings() {
        let of = |export: &str| {
            let text = format!("[disk.a]\nram = \"1M\"\n[disk.b]\nram = \"1M\"\n{export}");
            needed(&Config::from_toml(&text).unwrap(), 4)
        };
        let none = of("");
        let front_ends = of("[[export]]\nvhost-user = \"unix:/tmp/{disk}.sock\"\n") - none;
        // Two with a socket that listens and one of their own, a channel, a record, 8 regions, and 3 events a ring.
        let least = 2 * (4 + 8 + 4 * 3);
        assert!((least..200).contains(&front_ends), "{front_ends}");
        let clients = of("[[export]]\nnbd = \"unix:/tmp/nbd.sock\"\n") - none;
        assert_eq!(clients, 2 + u64::from(LEAVING_MAX));
    }
}
