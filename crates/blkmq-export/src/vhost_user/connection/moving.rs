//! What another daemon needs to continue a front end: the messages that set its device up; and how a
//! front end that another daemon has saved is restored. `Client` has the steps of a hand-over, before
//! which all rings end.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use blkmq_host::disk::Disk;

use super::super::descriptors::Descriptors;
use super::super::device::Device;
use super::super::saved::SavedFrontEnd;
use super::{FrontEnd, Shared};
use crate::common::life::{Life, Resume};
use crate::common::listener::Admitted;
use crate::handover::Saved;
use crate::handover::codec::FDS_MAX;

/// Why a front end cannot continue here.
type Refusal = Box<dyn std::error::Error + Send + Sync>;

/// Makes the client that continues a front end saved by another daemon.
pub(in super::super) fn restored(
    admitted: Admitted,
    device: Device,
    shared: Shared,
    saved: SavedFrontEnd,
    fds: Descriptors,
) -> FrontEnd {
    let mut client = super::client(admitted, device.disk().clone(), shared);
    client.life = Life::Saved(Resume::Serving);
    client.reported_size = saved.size;
    let connection = &mut client.protocol;
    connection.device = device;
    connection.received.extend_from_slice(&saved.received);
    connection.fds = fds;
    connection.is_selected = saved.is_selected;
    client
}

impl FrontEnd {
    /// What another daemon needs to continue the front end.
    ///
    /// # Errors
    /// It has more descriptors than can be handed over.
    pub(super) fn save(&mut self) -> Result<Option<Saved>, String> {
        let connection = &self.protocol;
        let set_up = connection.device.set_up();
        let mut fds = vec![Arc::clone(&connection.socket)];
        fds.extend(set_up.iter().flat_map(|(_, fds)| fds.iter().map(Arc::clone)));
        for fd in connection.fds.iter() {
            let copy = fd.try_clone().map_err(|error| error.to_string())?;
            fds.push(Arc::new(copy));
        }
        if fds.len() > FDS_MAX {
            let count = fds.len();
            return Err(format!(
                "it has {count} descriptors, {FDS_MAX} can be handed over"
            ));
        }
        let disk = connection.device.disk();
        let saved = SavedFrontEnd {
            disk: disk.name.clone(),
            size: self.reported_size,
            block_size: disk.block_size,
            read_only: disk.read_only,
            is_selected: connection.is_selected,
            messages: set_up.into_iter().map(|(message, _)| message).collect(),
            received: connection.received.clone(),
            ..connection.device.saved_state()
        };
        Ok(Some(Saved {
            door: connection.shared.log.door(),
            address: connection.shared.address.to_string(),
            body: saved.bytes(),
            fds,
        }))
    }
}

/// Makes a device of what another daemon has saved, on the disk that is served here. Returns the
/// remaining descriptors: those of a message that has not arrived whole.
pub(in super::super) fn restore(
    disk: &Disk,
    segments_max: u32,
    saved: &SavedFrontEnd,
    mut fds: Vec<OwnedFd>,
) -> Result<(Device, Descriptors), Refusal> {
    let known = (saved.disk.as_str(), saved.size, saved.block_size, saved.read_only);
    // A disk that has grown since is larger for a guest that is told.
    let size = match disk.current_size() {
        grown if grown > saved.size => saved.size,
        size => size,
    };
    let found = (disk.name.as_str(), size, disk.block_size, disk.read_only);
    if known != found {
        return Err(format!(
            "the guest's disk is {known:?} (name, size, block size, read-only), here {found:?}"
        )
        .into());
    }
    let mut device = Device::new(disk.clone(), segments_max);
    for message in &saved.messages {
        if message.fds() > fds.len() {
            return Err("descriptors are missing".into());
        }
        let of_message: Vec<OwnedFd> = fds.drain(..message.fds()).collect();
        device.handle(message.clone(), of_message.into())?;
    }
    device.restore_state(saved)?;
    Ok((device, fds.into()))
}
