//! How a device is started, recovered, resized and removed: by a thread of its own, since
//! all of that blocks, most of it until the queues have done their part.

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, SyncSender};
use std::thread::Builder;
use std::time::Duration;

use super::control::{Control, open_queues, until};
use super::device::{Device, End, Reason};
use super::protocol::{DeviceInfo, RESIZABLE};

/// What is ordered from the thread.
pub(super) enum Order {
    /// Make requests come. The waiter, if any, gets the result.
    Begin(Option<SyncSender<io::Result<()>>>),
    /// Tell the kernel the new size.
    Grow,
    /// Stop and remove the device. The waiter, if any, is told when that is done.
    End {
        reason: Reason,
        done: Option<SyncSender<()>>,
    },
}

/// How requests begin to come to this daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// The device is new.
    Start,
    /// It was left by a daemon that has ended.
    Recovery,
    /// Another daemon has it, and is about to end.
    Succession,
}

struct ControlThread {
    control: Control,
    device: Arc<Device>,
    info: DeviceInfo,
    beginning: Beginning,
    has_begun: bool,
}

/// Starts the thread.
///
/// # Errors
/// The system's error.
pub(super) fn spawn(
    control: Control,
    device: &Arc<Device>,
    info: DeviceInfo,
    beginning: Beginning,
    orders: Receiver<Order>,
) -> io::Result<()> {
    let mut control_thread = ControlThread {
        control,
        device: Arc::clone(device),
        info,
        beginning,
        has_begun: false,
    };
    let thread = Builder::new().name("ublk".to_owned()).stack_size(STACK_BYTES);
    thread.spawn(move || control_thread.run(&orders)).map(drop)
}

impl ControlThread {
    fn run(&mut self, orders: &Receiver<Order>) {
        for order in orders {
            match order {
                Order::Begin(waiting) => self.begin_and_tell(waiting),
                Order::Grow => self.grow(),
                Order::End { reason, done } => {
                    let how = self.end(reason);
                    self.device.end(how);
                    // The waiter may have given up after a long time.
                    done.map(|done| done.try_send(()));
                    return;
                }
            }
        }
    }

    fn begin_and_tell(&mut self, waiting: Option<SyncSender<io::Result<()>>>) {
        let begun = self.begin();
        self.has_begun = begun.is_ok();
        if self.device.is_growing.load(Ordering::Relaxed) {
            self.grow();
        }
        match waiting {
            Some(waiting) => {
                let _ = waiting.try_send(begun);
            }
            None => {
                if let Err(error) = begun {
                    tracing::error!("ublk: {} is not served: {error}", self.device.name);
                    self.device.ask_end(Reason::Removed);
                }
            }
        }
    }

    fn begin(&mut self) -> io::Result<()> {
        let named = self.device.named;
        match self.beginning {
            Beginning::Start => self.control.start(named),
            Beginning::Recovery => self.control.end_recovery(named),
            Beginning::Succession => {
                self.succeed()?;
                self.control.end_recovery(named)
            }
        }
    }

    /// Waits for the other daemon's end, and makes the queues wait for requests.
    fn succeed(&mut self) -> io::Result<()> {
        let (control, named) = (&self.control, self.device.named);
        let is_there =
            |error: &io::Error| error.raw_os_error() == Some(libc::EBUSY) && !self.device.is_ending();
        until(PREDECESSOR_MAX, is_there, || control.start_recovery(named))?;
        self.device.set_ours(true);
        let (device, descriptors) = open_queues(&self.info)?;
        self.device.attach(device, descriptors);
        Ok(())
    }

    fn grow(&self) {
        if !self.has_begun {
            // The kernel may have no disk to resize yet: `begin_and_tell` comes back to this.
            return;
        }
        self.device.is_growing.store(false, Ordering::Relaxed);
        let (name, size) = (&self.device.name, self.device.disk.current_size());
        if !self.info.has(RESIZABLE) {
            tracing::warn!(
                "ublk: {name} keeps its size until the device is made again: this kernel cannot change it; the disk has {size} bytes"
            );
            return;
        }
        if let Err(error) = self.control.set_size(self.device.named, size) {
            tracing::warn!("ublk: {name} keeps its size: {error}");
        }
    }

    /// Ends the device in the kernel.
    fn end(&self, reason: Reason) -> End {
        let (device, named) = (&self.device, self.device.named);
        if let Some(address) = &device.address {
            device
                .common
                .handover
                .remove_door(super::front_door::DOOR, address);
        }
        let was_left = !self.has_begun && self.beginning != Beginning::Start;
        if !device.is_ours() || was_left {
            return End::Left;
        }
        if reason == Reason::Shutdown
            && device.address.is_some()
            && self.has_begun
            && is_claimed(&named.path())
        {
            tracing::warn!(
                "ublk: {} is in use, and stays: requests wait until it is served again",
                device.name
            );
            return End::Left;
        }
        if let Err(error) = self.control.stop(named) {
            tracing::debug!(
                "ublk: {} is not stopped before it is removed: {error}",
                device.name
            );
        }
        // It stops what is not stopped.
        if let Err(error) = self.control.delete(named)
            && error.raw_os_error() != Some(libc::ENODEV)
        {
            tracing::warn!("ublk: {} stays: {error}", device.name);
            return End::Left;
        }
        End::Stopped
    }
}

/// Returns whether a file system, another device or the like uses it: later write-back to it would
/// be lost.
fn is_claimed(path: &str) -> bool {
    let opened = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_EXCL)
        .open(path);
    opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY))
}

/// Time for the other daemon to end.
const PREDECESSOR_MAX: Duration = Duration::from_secs(60);
const STACK_BYTES: usize = 256 << 10;
