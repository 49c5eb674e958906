//! What exists of a device before it is served: nothing, or what a killed daemon has left. A device that
//! another daemon serves, or that somebody else has made, is not touched.

use std::fs::OpenOptions;
use std::io;
use std::time::Duration;

use blkmq_host::disk::Disk;
use rustix::process::Pid;

use super::control::{Control, Named, character_path, until};
use super::protocol::{DeviceInfo, LIVE, Parameters, QUIESCED, STOPPED, identity};
use crate::common::has_ended;

/// What another daemon has left of a device, if it has.
pub(super) enum Found {
    Nothing,
    /// Requests wait for the next daemon.
    Waiting(DeviceInfo),
}

/// Looks for the device of a number, which is to be that of this disk. Removes the rest of one that
/// cannot be continued. May block.
///
/// # Errors
/// The owner of the device.
pub(super) fn find(control: &Control, number: u32, disk: &str) -> Result<Found, String> {
    let failed = |error: io::Error| format!("ublk device {number} cannot be looked at: {error}");
    let Some(info) = control.info(number).map_err(failed)? else {
        return Ok(Found::Nothing);
    };
    let named = Named::of(&info);
    if info.identity != identity(disk) {
        return Err(format!(
            "ublk device {number} is another disk's, or another program's: choose another number, or remove it"
        ));
    }
    let Some(info) = wait_for_end(info, || control.info(number)).map_err(failed)? else {
        return Ok(Found::Nothing);
    };
    match info.state {
        QUIESCED => Ok(Found::Waiting(info)),
        STOPPED if is_left(&info) => match control.delete(named) {
            Err(error) if error.raw_os_error() != Some(libc::ENODEV) => Err(format!(
                "ublk device {number}, which a daemon has left, stays: {error}"
            )),
            _ => Ok(Found::Nothing),
        },
        _ => Err(format!(
            "ublk device {number} is served by process {}: stop it, or choose another number",
            info.process
        )),
    }
}

/// Checks that users of a device that was left find the same disk here, or the disk grown. Returns
/// the size that the kernel was told last.
///
/// # Errors
/// The difference.
pub(super) fn compare(control: &Control, info: &DeviceInfo, disk: &Disk) -> Result<u64, String> {
    let number = info.number;
    let told = control
        .parameters(Named::of(info))
        .map_err(|error| format!("ublk device {number} cannot be looked at: {error}"))?;
    let Parameters {
        size,
        block_size,
        read_only,
        ..
    } = told;
    let is_same = (block_size, read_only) == (disk.block_size, disk.read_only);
    if !is_same || size > disk.current_size() || !info.is_served() {
        return Err(format!(
            "ublk device {number} waits for a disk of {size} bytes in blocks of {block_size}{}: serve that one, or remove the device",
            if read_only { ", read-only" } else { "" },
        ));
    }
    Ok(size)
}

/// Removes what killed daemons have left of devices of this disk at which nobody waits.
pub(super) fn remove_stopped(control: &Control, disk: &str) {
    let Ok(entries) = std::fs::read_dir("/dev") else {
        return;
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.strip_prefix("ublkc")?.parse().ok());
    for number in numbers {
        if let Ok(Some(info)) = control.info(number)
            && info.identity == identity(disk)
            && is_left(&info)
        {
            // A failure does no harm to the device that is to be made.
            if let Err(error) = control.delete(Named::of(&info)) {
                tracing::warn!("ublk: device {number}, which a daemon has left, stays: {error}");
            }
        }
    }
}

/// Waits for a daemon that is ending: the kernel needs a moment to dismantle its rings. Returns how
/// `look` has found the device last; `None` if it is gone, since its daemon may remove it.
fn wait_for_end(
    info: DeviceInfo,
    mut look: impl FnMut() -> io::Result<Option<DeviceInfo>>,
) -> io::Result<Option<DeviceInfo>> {
    let limit = if is_alive(&info) { ALIVE_MAX } else { ENDING_MAX };
    let mut latest = Some(info);
    let waited = until(
        limit,
        |_| true,
        || {
            latest = look()?;
            match latest.is_some_and(|info| info.state == LIVE) {
                true => Err(io::ErrorKind::ResourceBusy.into()),
                false => Ok(()),
            }
        },
    );
    match waited {
        Err(error) if error.kind() != io::ErrorKind::ResourceBusy => Err(error),
        _ => Ok(latest),
    }
}

/// Returns whether nobody is about to serve a device that is stopped. The process that made it may be of another PID
/// namespace, and its number somebody else's here: the kernel lets one process at a time open a device.
fn is_left(info: &DeviceInfo) -> bool {
    let is_held = || {
        let mut options = OpenOptions::new();
        let opened = options.read(true).write(true).open(character_path(info.number));
        opened.is_err_and(|error| error.kind() == io::ErrorKind::ResourceBusy)
    };
    info.state == STOPPED && !is_alive(info) && !is_held()
}

/// Returns whether the process that serves it exists, and is not about to end. In a container this process may have the
/// number of the former one.
fn is_alive(info: &DeviceInfo) -> bool {
    let is_other = info.process > 0 && info.process as u32 != std::process::id();
    let process = is_other.then(|| Pid::from_raw(info.process)).flatten();
    process.is_some_and(|process| !has_ended(process))
}

/// Time for a process that exists and may be ending.
const ALIVE_MAX: Duration = Duration::from_secs(1);
const ENDING_MAX: Duration = Duration::from_secs(10);

#[cfg(test)]
mod tests {
    use super::*;

    fn live() -> DeviceInfo {
        DeviceInfo {
            state: LIVE,
            process: -1,
            ..DeviceInfo::default()
        }
    }

    #[test]
    fn device_that_its_daemon_removes_meanwhile_is_gone() {
        let mut looks = vec![None, Some(live()), Some(live())];
        let found = wait_for_end(live(), || Ok(looks.pop().expect("one look after another")));
        assert_eq!(found.unwrap(), None);
    }

    #[test]
    fn device_whose_daemon_is_killed_meanwhile_is_found_as_it_was_left() {
        let left = DeviceInfo {
            state: QUIESCED,
            ..live()
        };
        let mut looks = vec![Some(left), Some(live())];
        let found = wait_for_end(live(), || Ok(looks.pop().expect("one look after another")));
        assert_eq!(found.unwrap(), Some(left));
    }
}
