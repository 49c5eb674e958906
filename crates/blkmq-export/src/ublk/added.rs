//! A device that was added to the kernel, and is deleted again unless it is kept: a start that fails
//! leaves nothing behind. `create` makes what is added, `front_door` when it is kept.

use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use rustix::fs::{Access, access};

use super::control::{Control, Named, until};
use super::protocol::{DeviceInfo, Parameters};

/// What adding a device asks of the kernel; see [`Control`].
pub(super) trait Kernel {
    fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo>;
    fn set_parameters(&self, device: Named, parameters: &Parameters) -> io::Result<()>;
    fn delete(&self, device: Named) -> io::Result<()>;
}

impl Kernel for Control {
    fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
        Self::add(self, wanted)
    }

    fn set_parameters(&self, device: Named, parameters: &Parameters) -> io::Result<()> {
        Self::set_parameters(self, device, parameters)
    }

    fn delete(&self, device: Named) -> io::Result<()> {
        Self::delete(self, device)
    }
}

/// A device that is deleted when this is dropped, unless it is kept.
pub(super) struct Added<K: Kernel = Control> {
    /// Opened before the device was added, so that want of descriptors does not prevent the deletion.
    kernel: K,
    info: DeviceInfo,
    is_kept: bool,
}

impl<K: Kernel> Added<K> {
    /// Adds a device. May block.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn new(kernel: K, wanted: &DeviceInfo) -> io::Result<Self> {
        let info = kernel.add(wanted)?;
        Ok(Self {
            kernel,
            info,
            is_kept: false,
        })
    }

    /// Its description, as the kernel has granted it.
    pub(super) fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Sets its parameters. Waits for udev, which may have to give the device to this user. May block.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn set_parameters(&self, parameters: &Parameters) -> io::Result<()> {
        let set = || self.kernel.set_parameters(Named::of(&self.info), parameters);
        until(PERMISSION_MAX, is_denied, set)
    }

    /// It is served from here on, and somebody else deletes it.
    pub(super) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl<K: Kernel> Drop for Added<K> {
    fn drop(&mut self) {
        if self.is_kept {
            return;
        }
        let deleted = until(UNDO_MAX, is_denied, || self.kernel.delete(Named::of(&self.info)));
        if let Err(error) = deleted
            && error.raw_os_error() != Some(libc::ENODEV)
        {
            let number = self.info.number;
            tracing::error!(
                "ublk: device {number} was made, is not served, and stays: {error}: remove it as root (ublk del -n {number}, of \
                 ublksrv), and have udev give the devices of users to them"
            );
        }
    }
}

/// Returns whether this user may not open a device yet, until udev changes its owner.
pub(super) fn is_denied(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::EACCES | libc::EPERM | libc::ENOENT)
    )
}

/// Checks that udev gives devices to their users, as far as can be seen: the kernel lets nobody
/// delete a device that he may not open, so those that were made and given to nobody add up to its limit.
///
/// # Errors
/// There are some of these already.
pub(super) fn check_given() -> Result<(), String> {
    let Ok(all) = std::fs::read_dir("/sys/class/ublk-char") else {
        return Ok(());
    };
    let names = all.flatten().map(|entry| entry.file_name());
    let numbers = names.filter_map(|name| name.to_str()?.strip_prefix("ublkc")?.parse().ok());
    let mut left: Vec<u32> = numbers
        .filter(|number| look(*number).is_given_to_nobody())
        .collect();
    left.sort_unstable();
    refuse_many(&left)
}

fn refuse_many(left: &[u32]) -> Result<(), String> {
    if left.len() < GIVEN_TO_NOBODY_MAX {
        return Ok(());
    }
    let left: Vec<String> = left.iter().map(u32::to_string).collect();
    Err(format!(
        "ublk devices {} were made and given to nobody: have udev give /dev/ublkcN and /dev/ublkbN to the users that make them, \
         and remove these as root (ublk del -n N, of ublksrv)",
        left.join(", ")
    ))
}

/// What can be seen of a device.
struct Seen {
    /// It was started, and not stopped.
    has_disk: bool,
    /// The user that has its character device, if there is one.
    owner: Option<u32>,
    may_open: bool,
}

impl Seen {
    fn is_given_to_nobody(&self) -> bool {
        !self.has_disk && !self.may_open && self.owner.is_none_or(|owner| owner == 0)
    }
}

fn look(number: u32) -> Seen {
    let node = format!("/dev/ublkc{number}");
    Seen {
        has_disk: Path::new(&format!("/sys/block/ublkb{number}")).exists(),
        owner: std::fs::metadata(&node).ok().map(|node| node.uid()),
        may_open: access(&*node, Access::READ_OK | Access::WRITE_OK).is_ok(),
    }
}

/// Time for udev to give a device to a user.
const PERMISSION_MAX: Duration = Duration::from_secs(5);
/// The same for one that is deleted again, for which udev has had time already.
const UNDO_MAX: Duration = Duration::from_secs(1);
/// Devices that were given to nobody, from which on no more are made. Some may be on their way, or left by a daemon
/// of root.
const GIVEN_TO_NOBODY_MAX: usize = 4;

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use super::*;

    /// Notes what is asked of it; each deletion ends with the next of these errors, and well after them.
    #[derive(Clone, Default)]
    struct Fake {
        asked: Rc<RefCell<Vec<String>>>,
        refusals: Rc<RefCell<Vec<i32>>>,
        refuses_parameters: bool,
    }

    impl Fake {
        fn asked(&self) -> String {
            self.asked.borrow().join(" ")
        }
    }

    impl Kernel for Fake {
        fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
            self.asked.borrow_mut().push("add".to_owned());
            Ok(DeviceInfo { number: 7, ..*wanted })
        }

        fn set_parameters(&self, device: Named, _: &Parameters) -> io::Result<()> {
            self.asked.borrow_mut().push(format!("set {}", device.number));
            match self.refuses_parameters {
                true => Err(io::Error::from_raw_os_error(libc::EINVAL)),
                false => Ok(()),
            }
        }

        fn delete(&self, device: Named) -> io::Result<()> {
            self.asked.borrow_mut().push(format!("delete {}", device.number));
            match self.refusals.borrow_mut().pop() {
                Some(errno) => Err(io::Error::from_raw_os_error(errno)),
                None => Ok(()),
            }
        }
    }

    fn added(kernel: &Fake) -> Added<Fake> {
        Added::new(kernel.clone(), &DeviceInfo::default()).unwrap()
    }

    #[test]
    fn device_whose_start_fails_is_deleted() {
        let kernel = Fake {
            refuses_parameters: true,
            ..Fake::default()
        };
        let start = || -> io::Result<()> {
            let added = added(&kernel);
            added.set_parameters(&Parameters::parse(&[0; super::super::protocol::PARAMETERS_BYTES]))?;
            added.keep();
            Ok(())
        };
        assert!(start().is_err());
        assert_eq!(kernel.asked(), "add set 7 delete 7");
    }

    #[test]
    fn device_that_is_served_is_not_deleted() {
        let kernel = Fake::default();
        added(&kernel).keep();
        assert_eq!(kernel.asked(), "add");
    }

    #[test]
    fn deletion_is_retried_until_udev_gives_the_device() {
        let kernel = Fake::default();
        kernel.refusals.borrow_mut().extend([libc::ENOENT, libc::EACCES]);
        drop(added(&kernel));
        assert_eq!(kernel.asked(), "add delete 7 delete 7 delete 7");
    }

    #[test]
    fn deletion_that_fails_for_good_is_not_retried() {
        let kernel = Fake::default();
        kernel.refusals.borrow_mut().extend([libc::EINVAL; 2]);
        drop(added(&kernel));
        assert_eq!(kernel.asked(), "add delete 7");
    }

    #[test]
    fn devices_given_to_nobody_stop_further_ones_before_the_limit_of_the_kernel() {
        let seen = |has_disk, owner, may_open| Seen {
            has_disk,
            owner,
            may_open,
        };
        assert!(seen(false, Some(0), false).is_given_to_nobody());
        assert!(seen(false, None, false).is_given_to_nobody());
        for other in [
            seen(true, Some(0), false),
            seen(false, Some(1000), false),
            seen(false, Some(0), true),
        ] {
            assert!(!other.is_given_to_nobody());
        }
        assert_eq!(refuse_many(&[1, 2, 3]), Ok(()));
        assert!(refuse_many(&[1, 2, 3, 9]).unwrap_err().contains("1, 2, 3, 9"));
    }
}
