//! Decides how the control device is asked: each command blocks until it is done, so no reactor does it. A device of somebody who may not
//! do everything is named by its path, too, whose mode says who may.

use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::thread::sleep;
use std::time::{Duration, Instant};

use super::protocol::{
    ADD, DELETE, DELETE_LATER, DeviceInfo, END_RECOVERY, GET_INFO, GET_PARAMETERS, INFO_BYTES,
    PARAMETERS_BYTES, Parameters, SECTOR, SET_PARAMETERS, SET_SIZE, START, START_RECOVERY, STOP,
    UNPRIVILEGED,
};
use super::sys::{Descriptors, ask};
use crate::common::command_ring::CommandRing;

/// The control device.
pub(super) struct Control {
    device: OwnedFd,
    ring: CommandRing,
}

/// A device that there is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Named {
    pub(super) number: u32,
    is_unprivileged: bool,
}

impl Named {
    pub(super) fn of(info: &DeviceInfo) -> Self {
        Self {
            number: info.number,
            is_unprivileged: info.has(UNPRIVILEGED),
        }
    }

    /// Where its block device is.
    pub(super) fn path(self) -> String {
        format!("/dev/ublkb{}", self.number)
    }
}

impl Control {
    /// Opens it.
    ///
    /// # Errors
    /// What is missing, and what to do.
    pub(super) fn open() -> Result<Self, String> {
        let opened = OpenOptions::new().read(true).write(true).open(PATH);
        let device = opened.map_err(|error| match error.kind() {
            ErrorKind::NotFound => {
                format!("there is no {PATH}: load the kernel's module ublk_drv (modprobe ublk_drv; Linux 6.4 or later)")
            }
            ErrorKind::PermissionDenied => format!(
                "{PATH} cannot be opened: {error}: start the daemon as root, or have udev give the devices of ublk to this user"
            ),
            _ => format!("{PATH} cannot be opened: {error}: is the kernel's module ublk_drv loaded?"),
        })?;
        let ring = CommandRing::new(2).map_err(|error| format!("no ring for {PATH}: {error}"))?;
        Ok(Self {
            device: device.into(),
            ring,
        })
    }

    /// A copy of its descriptor.
    ///
    /// # Errors
    /// If there is no room for one more.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// What the device of this number is, if there is one.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn info(&self, number: u32) -> io::Result<Option<DeviceInfo>> {
        let mut memory = memory_of(Some(number), &[0; INFO_BYTES]);
        let path_bytes = (memory.len() - INFO_BYTES) as u16;
        match ask(
            &self.ring,
            self.device.as_raw_fd(),
            GET_INFO,
            (number, 0),
            &mut memory,
            path_bytes,
        ) {
            Ok(()) => Ok(Some(DeviceInfo::parse(last(&memory)))),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a device. Returns what became of it: it has a number then, and may have less than was asked for.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
        let mut memory = wanted.bytes().to_vec();
        let device = self.device.as_raw_fd();
        ask(&self.ring, device, ADD, (wanted.number, 0), &mut memory, 0)?;
        Ok(DeviceInfo::parse(last(&memory)))
    }

    /// Says what its disk is, before it is started.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn set_parameters(&self, device: Named, parameters: &Parameters) -> io::Result<()> {
        self.ask_with(SET_PARAMETERS, device, 0, &parameters.bytes())
            .map(drop)
    }

    /// What it says its disk is.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn parameters(&self, device: Named) -> io::Result<Parameters> {
        let mut asked = [0; PARAMETERS_BYTES];
        asked[..4].copy_from_slice(&(PARAMETERS_BYTES as u32).to_ne_bytes());
        let memory = self.ask_with(GET_PARAMETERS, device, 0, &asked)?;
        Ok(Parameters::parse(last(&memory)))
    }

    /// Has it appear, once all of its queues wait for requests: until then, and until its partitions are read, it blocks.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn start(&self, device: Named) -> io::Result<()> {
        self.ask(START, device, std::process::id().into())
    }

    /// Takes one over whose daemon has ended: its queues are to be waited at from here on.
    ///
    /// # Errors
    /// What the kernel says; EBUSY as long as the other daemon has not ended.
    pub(super) fn start_recovery(&self, device: Named) -> io::Result<()> {
        self.ask(START_RECOVERY, device, 0)
    }

    /// Has requests come again, once all of its queues wait for some.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn end_recovery(&self, device: Named) -> io::Result<()> {
        self.ask(END_RECOVERY, device, std::process::id().into())
    }

    /// Tells the kernel of another size, in bytes.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn set_size(&self, device: Named, bytes: u64) -> io::Result<()> {
        self.ask(SET_SIZE, device, bytes / SECTOR)
    }

    /// Has nothing more come: what is under way ends first, and a file system on it is written back, if it can be.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn stop(&self, device: Named) -> io::Result<()> {
        self.ask(STOP, device, 0)
    }

    /// Removes it. It is gone when the last process has closed it.
    ///
    /// # Errors
    /// What the kernel says.
    pub(super) fn delete(&self, device: Named) -> io::Result<()> {
        match self.ask(DELETE_LATER, device, 0) {
            // An older kernel waits for that.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => self.ask(DELETE, device, 0),
            asked => asked,
        }
    }

    fn ask(&self, number: u32, device: Named, value: u64) -> io::Result<()> {
        self.ask_with(number, device, value, &[]).map(drop)
    }

    /// Returns the memory, at whose end is what the kernel has made of `data`.
    fn ask_with(&self, number: u32, device: Named, value: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        let mut memory = memory_of(device.is_unprivileged.then_some(device.number), data);
        let path_bytes = (memory.len() - data.len()) as u16;
        ask(
            &self.ring,
            self.device.as_raw_fd(),
            number,
            (device.number, value),
            &mut memory,
            path_bytes,
        )?;
        Ok(memory)
    }
}

/// Opens the way on which requests come, and maps the descriptors of its queues. Waits for udev, who may have to make it or give it away,
/// and for the process that had it before.
///
/// # Errors
/// What the system says.
pub(super) fn open_queues(info: &DeviceInfo) -> io::Result<(OwnedFd, Vec<Descriptors>)> {
    let path = character_path(info.number);
    let device = until(OPEN_MAX, is_late, || {
        OpenOptions::new().read(true).write(true).open(&path)
    });
    let device: OwnedFd = device
        .map_err(|error| io::Error::new(error.kind(), format!("{path}: {error}")))?
        .into();
    let map = |queue| Descriptors::map(device.as_fd(), queue, info.depth);
    let all = (0..info.queues).map(map).collect::<io::Result<_>>()?;
    Ok((device, all))
}

/// Tries again and again what fails with an error that may pass, for some time.
pub(super) fn until<T>(
    limit: Duration,
    may_pass: impl Fn(&io::Error) -> bool,
    mut tried: impl FnMut() -> io::Result<T>,
) -> io::Result<T> {
    let end = Instant::now() + limit;
    loop {
        match tried() {
            Err(error) if may_pass(&error) && Instant::now() < end => sleep(PAUSE),
            done => return done,
        }
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EACCES | libc::EBUSY)
    )
}

/// Some data behind the path of a device, if there is to be one.
fn memory_of(number: Option<u32>, data: &[u8]) -> Vec<u8> {
    let path = number.map(|number| format!("{}\0", character_path(number)));
    [path.unwrap_or_default().as_bytes(), data].concat()
}

fn last<const N: usize>(memory: &[u8]) -> &[u8; N] {
    memory.last_chunk().expect("as long as what was asked for")
}

fn character_path(number: u32) -> String {
    format!("/dev/ublkc{number}")
}

const PATH: &str = "/dev/ublk-control";
const OPEN_MAX: Duration = Duration::from_secs(10);
const PAUSE: Duration = Duration::from_millis(2);
