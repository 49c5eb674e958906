//! Which disks can be devices, and how one is made: its queues, its parameters for the
//! kernel, and whether it outlives its daemon.

use std::io;

use blkmq_host::disk::Disk;

use super::added::{Added, check_given, is_denied};
use super::control::{Control, Named};
use super::front_door::AUTO;
use super::protocol::{
    BLOCK_BYTES_MAX, DATA_BYTES_MAX, DeviceInfo, IOCTL_NUMBERS, Parameters, RECOVERY, REISSUE, RESIZABLE,
    SECTOR, UNPRIVILEGED, identity,
};

/// Checks that a disk can be a device.
///
/// # Errors
/// The obstacle.
pub(super) fn check(disk: &Disk) -> Result<(), String> {
    let (block, size) = (disk.block_size, disk.current_size());
    if block < SECTOR as u32 || block > BLOCK_BYTES_MAX || !block.is_power_of_two() {
        return Err(format!(
            "block size {block} rejected: ublk has powers of two from {SECTOR} to {BLOCK_BYTES_MAX}; set block_size in [disk.{}]",
            disk.name
        ));
    }
    match size.is_multiple_of(SECTOR) && size > 0 {
        true => Ok(()),
        false => Err(format!(
            "size {size} rejected: ublk needs a multiple of {SECTOR} bytes"
        )),
    }
}

/// Makes a device of a disk, with a queue for each of `reactors`. May block.
///
/// # Errors
/// Why it cannot; then nothing is left of it.
pub(super) fn add(disk: &Disk, number: Option<u32>, reactors: usize) -> Result<Added, String> {
    check_given()?;
    let queues = reactors.clamp(1, QUEUES_MAX) as u16;
    let survives = if number.is_some() { RECOVERY | REISSUE } else { 0 };
    let wanted = DeviceInfo {
        queues,
        depth: (REQUESTS / queues).max(REQUESTS_OF_QUEUE_MIN),
        data_bytes_max: DATA_BYTES_MAX,
        number: number.unwrap_or(u32::MAX),
        process: std::process::id() as i32,
        // The kernel removes features that it does not have, and the last one if root asks.
        features: IOCTL_NUMBERS | RESIZABLE | survives | UNPRIVILEGED,
        identity: identity(&disk.name),
        ..DeviceInfo::default()
    };
    let added = Added::new(Control::open()?, &wanted).map_err(|error| cannot_add(number, &error))?;
    let info = added.info();
    let parameters = Parameters::of(disk, info.data_bytes_max);
    let set = match info.is_served() {
        true => added.set_parameters(&parameters),
        false => Err(io::ErrorKind::Unsupported.into()),
    };
    match set {
        Ok(()) => Ok(added),
        Err(error) => Err(refused(&info, &error)),
    }
}

fn refused(info: &DeviceInfo, error: &io::Error) -> String {
    let path = Named::of(info).path();
    match info.has(UNPRIVILEGED) && is_denied(error) {
        true => format!(
            "{path} is not given to this user: {error}: udev has to give /dev/ublkcN and /dev/ublkbN to the user that makes them"
        ),
        false => format!("the kernel refuses {path}: {error}"),
    }
}

fn cannot_add(number: Option<u32>, error: &io::Error) -> String {
    let path = number.map_or_else(|| "a device".to_owned(), |number| format!("/dev/ublkb{number}"));
    match error.raw_os_error() {
        Some(libc::EEXIST) => format!("{path} is there already: choose another number, or {AUTO}"),
        Some(libc::EACCES) => format!(
            "{path} cannot be made: {error}: there are as many devices of users as /sys/module/ublk_drv/parameters/ublks_max allows"
        ),
        Some(libc::EPERM) => format!("{path} cannot be made: {error}: start the daemon as root"),
        Some(libc::EOPNOTSUPP | libc::EINVAL) => {
            format!("{path} cannot be made: {error}: the kernel's ublk_drv is too old, Linux 6.4 is needed")
        }
        _ => format!("{path} cannot be made: {error}"),
    }
}

/// Requests of a device at a time, shared among its queues.
const REQUESTS: u16 = 128;
const REQUESTS_OF_QUEUE_MIN: u16 = 8;
const QUEUES_MAX: usize = 64;
