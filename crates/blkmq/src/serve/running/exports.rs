//! The addresses of a running daemon: what each offers, and how that changes while clients use it. Steps of a change
//! in `running` call it.

use std::mem;
use std::sync::Arc;

use anyhow::{Context, Result};
use blkmq_config::diff::is_same_place;
use blkmq_config::{Config, ExportSpec};
use blkmq_export::common::{Address, AddressLimits, Place};
use blkmq_export::front_door::{DiskName, Offer, Served};
use blkmq_host::disk::Disk;

use super::encrypted::as_offered;
use super::{OpenExport, Running, State};
use crate::serve::served;

impl OpenExport {
    /// The names of those disks that are to be served there.
    pub(super) fn wanted<'a>(&self, config: &Config, disks: &'a [Disk]) -> Vec<&'a str> {
        let wanted = served(config, disks, self.spec.disks.as_deref()).into_iter();
        wanted.map(|disk| disk.name.as_str()).collect()
    }
}

impl Running {
    /// Makes all addresses serve these disks: opens the sockets of new ones and closes those of
    /// removed ones.
    pub(super) fn offer(&self, state: &mut State, config: &Config, disks: &[Disk]) -> Result<()> {
        let disks = &*as_offered(state, config, disks);
        // Nothing is closed before all is open that can be open beside it.
        for open in &mut state.exports {
            let address = Arc::clone(&open.spec.at);
            let mut names = open.wanted(config, disks);
            address.check_disks(&names)?;
            let present = open.served.iter().filter_map(|served| served.disk());
            names.extend(present.filter(|name| !names.contains(name)).collect::<Vec<_>>());
            if address.check_disks(&names).is_ok() {
                self.open_missing(open, config, disks)?;
            }
        }
        for open in &state.exports {
            let wanted = open.wanted(config, disks);
            for served in open.served.iter().filter(|served| is_among(&***served, &wanted)) {
                served.offer(disks, offer_of(&open.spec))?;
            }
        }
        // Nor before all have accepted what they offer from now on.
        for open in &mut state.exports {
            let wanted = open.wanted(config, disks);
            let gone = open.served.extract_if(.., |served| !is_among(&**served, &wanted));
            gone.for_each(|served| served.close());
            self.open_missing(open, config, disks)?;
        }
        Ok(())
    }

    /// Offers all disks as before a step that has failed.
    pub(super) fn offer_again(&self, state: &mut State, config: &Config) {
        if let Err(error) = self.offer(state, config, &self.engine.disks()) {
            tracing::error!("change: taking it back: {error:#}");
        }
    }

    /// Opens what is not open of the disks that an address is to serve.
    pub(super) fn open_missing(&self, open: &mut OpenExport, config: &Config, disks: &[Disk]) -> Result<()> {
        let is_open = |name: &str| {
            open.served
                .iter()
                .any(|served| served.disk().is_none_or(|disk| disk == name))
        };
        let mut missing = open.wanted(config, disks);
        missing.retain(|name| !is_open(name));
        if self.is_refused(&open.spec) {
            return Ok(());
        }
        if !missing.is_empty() {
            let opened = self.open(&open.spec, &config.named_of(&missing))?;
            open.served.extend(opened);
        }
        Ok(())
    }

    /// Changes what an address serves, or nothing of it.
    pub(super) fn change_export(&self, state: &mut State, new: &Config, spec: &ExportSpec) -> Result<()> {
        let mut exports = state.exports.iter();
        let at = exports.position(|open| is_same_place(&open.spec, spec));
        let at = at.context("it is not open")?;
        let former = mem::replace(&mut state.exports[at].spec, spec.clone());
        let refused = self.refused();
        self.forget_refused(spec);
        let disks = self.engine.disks();
        let offered = self.offer(state, new, &disks);
        let offered = offered.and_then(|()| match self.is_refused(spec) {
            true => Ok(()),
            false => set_owners(new, spec, &disks),
        });
        if offered.is_err() {
            *self.refused_list() = refused;
            state.exports[at].spec = former;
            self.offer_again(state, new);
        }
        offered
    }

    pub(super) fn add_export(&self, state: &mut State, config: &Config, spec: &ExportSpec) -> Result<()> {
        let disks = as_offered(state, config, &self.engine.disks());
        let names = served(config, &disks, spec.disks.as_deref());
        let names: Vec<&str> = names.iter().map(|disk| disk.name.as_str()).collect();
        let served = self.open(spec, &config.named_of(&names))?;
        state.exports.push(OpenExport {
            spec: spec.clone(),
            served,
        });
        Ok(())
    }

    /// Opens an address for some disks, and serves them there.
    pub(super) fn open(&self, spec: &ExportSpec, disks: &[DiskName<'_>]) -> Result<Vec<Arc<dyn Served>>> {
        let address = &spec.at;
        if address.is_per_disk() {
            // Others read files, which was done before, with no lock held.
            address.check()?;
        }
        if disks.is_empty() && address.is_per_disk() {
            return Ok(Vec::new());
        }
        let mut all: Vec<Arc<dyn Served>> = Vec::new();
        for opened in address.open(disks, &self.common.handover)? {
            match opened.serve(&self.engine, offer_of(spec), &self.common) {
                Ok(served) => all.push(Arc::from(served)),
                Err(error) => {
                    all.iter().for_each(|served| served.close());
                    return Err(error.into());
                }
            }
        }
        Ok(all)
    }
}

/// Returns whether an address is for one of these disks, or for all.
fn is_among(served: &dyn Served, names: &[&str]) -> bool {
    served.disk().is_none_or(|name| names.contains(&name))
}

/// Gives the sockets of an address the owner and the mode that it has now.
fn set_owners(config: &Config, spec: &ExportSpec, disks: &[Disk]) -> Result<()> {
    let Some(access) = spec.at.access().filter(|_| !spec.at.connects()) else {
        return Ok(());
    };
    let names = served(config, disks, spec.disks.as_deref());
    let names: Vec<&str> = names.iter().map(|disk| disk.name.as_str()).collect();
    for place in spec.at.places(&config.named_of(&names)) {
        if let Place::Path(path) = place {
            access.apply(&Address::Unix(path))?;
        }
    }
    Ok(())
}

/// What an address offers.
pub(in crate::serve) fn offer_of(spec: &ExportSpec) -> Offer<'_> {
    let default = AddressLimits::default();
    Offer {
        disks: spec.disks.as_deref(),
        admitted: AddressLimits {
            name: spec.address.clone(),
            connections_max: spec.connections.unwrap_or(default.connections_max),
            group_connections_max: spec.group_connections.unwrap_or(default.group_connections_max),
            allowed: spec
                .at
                .access()
                .map_or(default.allowed, |access| access.allowed.clone()),
        },
        at: &*spec.at,
    }
}
