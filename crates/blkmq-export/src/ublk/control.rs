//! Commands to the control device: each blocks until it is done, so no reactor calls
//! it. An unprivileged user also names the device by its path, whose mode decides who may use it.

use std::cell::Cell;
use std::fs::OpenOptions;
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::mpsc::sync_channel;
use std::thread::{Builder, sleep};
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
    /// None while a command is under way, and after one that the ring failed: the next has a new ring.
    ring: Cell<Option<CommandRing>>,
}

/// An existing device.
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

    /// The path of its block device.
    pub(super) fn path(self) -> String {
        format!("/dev/ublkb{}", self.number)
    }
}

impl Control {
    /// Opens the control device.
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
        let ring = new_ring().map_err(|error| format!("no ring for {PATH}: {error}"))?;
        Ok(Self {
            device: device.into(),
            ring: Cell::new(Some(ring)),
        })
    }

    /// A copy of its descriptor.
    ///
    /// # Errors
    /// There is no descriptor left.
    pub(super) fn descriptor(&self) -> io::Result<OwnedFd> {
        self.device.try_clone()
    }

    /// The description of the device of this number, if there is one.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn info(&self, number: u32) -> io::Result<Option<DeviceInfo>> {
        let mut memory = memory_of(Some(number), &[0; INFO_BYTES]);
        let path_bytes = (memory.len() - INFO_BYTES) as u16;
        match self.command(GET_INFO, (number, 0), &mut memory, path_bytes) {
            Ok(()) => Ok(Some(DeviceInfo::parse(last(&memory)))),
            Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Makes a device. Returns its description: it has a number then, and may have less than was
    /// asked for.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn add(&self, wanted: &DeviceInfo) -> io::Result<DeviceInfo> {
        let mut memory = wanted.bytes().to_vec();
        self.command(ADD, (wanted.number, 0), &mut memory, 0)?;
        Ok(DeviceInfo::parse(last(&memory)))
    }

    /// Sets the parameters of its disk, before the device is started.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn set_parameters(&self, device: Named, parameters: &Parameters) -> io::Result<()> {
        self.ask_with(SET_PARAMETERS, device, 0, &parameters.bytes())
            .map(drop)
    }

    /// The parameters of its disk.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn parameters(&self, device: Named) -> io::Result<Parameters> {
        let mut asked = [0; PARAMETERS_BYTES];
        asked[..4].copy_from_slice(&(PARAMETERS_BYTES as u32).to_ne_bytes());
        let memory = self.ask_with(GET_PARAMETERS, device, 0, &asked)?;
        Ok(Parameters::parse(last(&memory)))
    }

    /// Makes it appear, once all of its queues wait for requests: until then, and until its
    /// partitions are read, the call blocks.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn start(&self, device: Named) -> io::Result<()> {
        self.ask(START, device, std::process::id().into())
    }

    /// Takes over a device whose daemon has ended: its queues are to wait for requests from here
    /// on.
    ///
    /// # Errors
    /// The kernel's error; EBUSY as long as the other daemon has not ended.
    pub(super) fn start_recovery(&self, device: Named) -> io::Result<()> {
        self.ask(START_RECOVERY, device, 0)
    }

    /// Makes requests come again, once all of its queues wait for some.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn end_recovery(&self, device: Named) -> io::Result<()> {
        self.ask(END_RECOVERY, device, std::process::id().into())
    }

    /// Sets another size, in bytes.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn set_size(&self, device: Named, bytes: u64) -> io::Result<()> {
        self.ask(SET_SIZE, device, bytes / SECTOR)
    }

    /// Stops it: no more requests come, those under way end first, and a file system on it is
    /// written back, if possible.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn stop(&self, device: Named) -> io::Result<()> {
        self.ask(STOP, device, 0)
    }

    /// Removes it. It is gone when the last process has closed it.
    ///
    /// # Errors
    /// The kernel's error.
    pub(super) fn delete(&self, device: Named) -> io::Result<()> {
        match self.ask(DELETE_LATER, device, 0) {
            Err(error) if is_unknown(&error, device) => delete_and_wait(device),
            asked => asked,
        }
    }

    fn ask(&self, number: u32, device: Named, value: u64) -> io::Result<()> {
        self.ask_with(number, device, value, &[]).map(drop)
    }

    /// Returns the memory, whose end holds `data` as the kernel has changed it.
    fn ask_with(&self, number: u32, device: Named, value: u64, data: &[u8]) -> io::Result<Vec<u8>> {
        let mut memory = memory_of(device.is_unprivileged.then_some(device.number), data);
        let path_bytes = (memory.len() - data.len()) as u16;
        self.command(number, (device.number, value), &mut memory, path_bytes)?;
        Ok(memory)
    }

    /// Sends a command about a device, with a value, and waits until it is done.
    fn command(
        &self,
        number: u32,
        about: (u32, u64),
        memory: &mut Vec<u8>,
        path_bytes: u16,
    ) -> io::Result<()> {
        let ring = self.ring.take().map_or_else(new_ring, Ok)?;
        let device = self.device.as_raw_fd();
        let (ring, answer) = ask(ring, device, number, about, memory, path_bytes)?;
        self.ring.set(Some(ring));
        answer
    }
}

/// Opens the character device on which requests come, and maps the descriptors of its queues. Waits
/// for udev, which may have to make it or change its owner, and for the process that had it before.
///
/// # Errors
/// The system's error.
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

/// Retries for some time what fails with an error that may pass.
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

/// A ring for one command at a time.
fn new_ring() -> io::Result<CommandRing> {
    CommandRing::new(2)
}

/// Removes a device by the command that ends when the last process has closed it, which may be this one: on a thread of
/// its own, of which only a refusal is waited for. If this process ends first, the device goes with it.
fn delete_and_wait(device: Named) -> io::Result<()> {
    let control = Control::open().map_err(io::Error::other)?;
    let (ended, answer) = sync_channel(1);
    let thread = Builder::new().name("ublk".to_owned());
    thread.spawn(move || ended.try_send(control.ask(DELETE, device, 0)))?;
    answer.recv_timeout(REFUSAL_MAX).unwrap_or(Ok(()))
}

/// Says whether the kernel does not know the deletion that does not wait: older ones at all, Linux 6.12 for the device
/// of a user.
fn is_unknown(error: &io::Error, device: Named) -> bool {
    match error.raw_os_error() {
        Some(libc::EOPNOTSUPP) => true,
        Some(libc::EINVAL) => device.is_unprivileged,
        _ => false,
    }
}

fn is_late(error: &io::Error) -> bool {
    matches!(
        error.raw_os_error(),
        Some(libc::ENOENT | libc::EACCES | libc::EBUSY)
    )
}

/// The data behind the path of a device, if there is to be one.
fn memory_of(number: Option<u32>, data: &[u8]) -> Vec<u8> {
    let path = number.map(|number| format!("{}\0", character_path(number)));
    [path.unwrap_or_default().as_bytes(), data].concat()
}

fn last<const N: usize>(memory: &[u8]) -> &[u8; N] {
    memory.last_chunk().expect("as long as what was asked for")
}

pub(super) fn character_path(number: u32) -> String {
    format!("/dev/ublkc{number}")
}

const PATH: &str = "/dev/ublk-control";
const OPEN_MAX: Duration = Duration::from_secs(10);
/// Time for the kernel to refuse a deletion.
const REFUSAL_MAX: Duration = Duration::from_millis(200);
const PAUSE: Duration = Duration::from_millis(2);

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn command_after_one_that_its_ring_failed_has_its_own_answer() {
        let null = File::open("/dev/null").unwrap();
        // Nobody may enter this ring before it is enabled.
        let ring = CommandRing::for_one_thread(2).unwrap();
        let control = Control {
            device: null.into(),
            ring: Cell::new(Some(ring)),
        };
        let refused = control.info(0).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADFD));
        for _ in 0..2 {
            let answered = control.info(0);
            // Devices of this kind know no such commands, or take all.
            assert!(
                answered
                    .as_ref()
                    .err()
                    .is_none_or(|error| error.raw_os_error() == Some(libc::EOPNOTSUPP)),
                "{answered:?}"
            );
        }
    }
}
