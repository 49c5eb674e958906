//! Decides which disks can be devices, and how one is made: its queues, its parameters for the
//! kernel, and whether it outlives its daemon.

use std::io;
use std::time::Duration;

use blkmq_host::disk::Disk;

use super::control::{Control, Named, until};
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
/// Why it cannot.
pub(super) fn add(
    control: &Control,
    disk: &Disk,
    number: Option<u32>,
    reactors: usize,
) -> Result<DeviceInfo, String> {
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
    let info = control.add(&wanted).map_err(|error| cannot_add(number, &error))?;
    let named = Named::of(&info);
    let parameters = Parameters::of(disk, info.data_bytes_max);
    let set = match info.is_served() {
        true => until(PERMISSION_MAX, is_denied, || {
            control.set_parameters(named, &parameters)
        }),
        false => Err(io::ErrorKind::Unsupported.into()),
    };
    if let Err(error) = set {
        let _ = control.delete(named);
        return Err(format!("the kernel refuses {}: {error}", named.path()));
    }
    Ok(info)
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

/// Returns whether this user may not open a device yet, until udev changes its owner.
fn is_denied(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EACCES | libc::EPERM | libc::ENOENT)
    )
}

/// Requests of a device at a time, shared among its queues.
const REQUESTS: u16 = 128;
const REQUESTS_OF_QUEUE_MIN: u16 = 8;
const QUEUES_MAX: usize = 64;
/// Time for udev to give a device to a user.
const PERMISSION_MAX: Duration = Duration::from_secs(5);
