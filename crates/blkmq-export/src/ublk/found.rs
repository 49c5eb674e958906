//! Decides what is there of a device before it is served: nothing, or what a daemon has left that was killed; what another daemon serves,
//! or somebody else has made, is not touched.

use std::io;
use std::time::Duration;

use blkmq_host::disk::Disk;
use rustix::process::{Pid, test_kill_process};

use super::control::{Control, Named, until};
use super::protocol::{DeviceInfo, LIVE, Parameters, QUIESCED, STOPPED, identity};

/// What another daemon has left of a device, if it has.
pub(super) enum Found {
    Nothing,
    /// Requests wait for who serves it next.
    Waiting(DeviceInfo),
}

/// Looks for the device of a number, which is to be that of this disk. Removes what is left of one that cannot be gone on with. May block.
///
/// # Errors
/// Whose it is.
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
    let info = wait_for_end(control, info).map_err(failed)?;
    match info.state {
        QUIESCED => Ok(Found::Waiting(info)),
        STOPPED if !is_alive(&info) => {
            control
                .delete(named)
                .map_err(|error| format!("ublk device {number}, which a daemon has left, stays: {error}"))?;
            Ok(Found::Nothing)
        }
        _ => Err(format!(
            "ublk device {number} is served by process {}: stop it, or choose another number",
            info.process
        )),
    }
}

/// Says whether users of a device that was left find the same disk here.
///
/// # Errors
/// What is different.
pub(super) fn compare(control: &Control, info: &DeviceInfo, disk: &Disk) -> Result<(), String> {
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
    Ok(())
}

/// Removes what daemons that were killed have left of devices of this disk that nobody waits at.
pub(super) fn remove_stopped(control: &Control, disk: &str) {
    let Ok(entries) = std::fs::read_dir("/dev") else {
        return;
    };
    let names = entries.flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.strip_prefix("ublkc")?.parse().ok());
    for number in numbers {
        if let Ok(Some(info)) = control.info(number)
            && (info.identity, info.state) == (identity(disk), STOPPED)
            && !is_alive(&info)
        {
            // It is in nobody's way.
            let _ = control.delete(Named::of(&info));
        }
    }
}

/// Waits for a daemon that is just ending: the kernel needs a moment to take its rings apart.
fn wait_for_end(control: &Control, info: DeviceInfo) -> io::Result<DeviceInfo> {
    let limit = if is_alive(&info) { ALIVE_MAX } else { ENDING_MAX };
    let mut latest = info;
    let waited = until(
        limit,
        |_| true,
        || {
            latest = control.info(info.number)?.unwrap_or_default();
            match latest.state == LIVE {
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

/// Says whether the process that serves it is there. In a container this one may have the number of the one before.
fn is_alive(info: &DeviceInfo) -> bool {
    let is_other = info.process > 0 && info.process as u32 != std::process::id();
    let process = is_other.then(|| Pid::from_raw(info.process)).flatten();
    process.is_some_and(|process| test_kill_process(process) != Err(rustix::io::Errno::SRCH))
}

/// For one that can be seen, and may be just ending.
const ALIVE_MAX: Duration = Duration::from_secs(1);
const ENDING_MAX: Duration = Duration::from_secs(10);
