//! Addresses that are not served because of the time alone: a certificate has expired or is not valid yet, or the
//! clock is wrong. They are tried again until they are served; all else is served meanwhile.

use std::time::Duration;

use anyhow::Result;
use blkmq_config::ExportSpec;
use blkmq_config::diff::is_same_place;

use super::Running;

/// An address that is not served for now.
#[derive(Clone, Debug)]
pub(crate) struct Refused {
    pub(crate) spec: ExportSpec,
    /// Why, for people.
    pub(crate) reason: String,
}

impl Refused {
    /// The address cannot be served now; all else may be.
    pub(crate) fn new(spec: &ExportSpec, reason: String) -> Self {
        let pause = RETRY_PAUSE.as_secs();
        tracing::error!(
            export = spec.address,
            "export {}: refused for now: {reason}; it is tried again every {pause} s, and all else is served",
            spec.address
        );
        let spec = spec.clone();
        Self { spec, reason }
    }
}

impl Running {
    /// The addresses that are not served for now.
    pub(crate) fn refused(&self) -> Vec<Refused> {
        self.refused_list().clone()
    }

    pub(super) fn is_refused(&self, spec: &ExportSpec) -> bool {
        let refused = self.refused_list();
        refused.iter().any(|other| is_same_place(&other.spec, spec))
    }

    /// The address is served, removed, or has other settings.
    pub(super) fn forget_refused(&self, spec: &ExportSpec) {
        self.refused_list()
            .retain(|other| !is_same_place(&other.spec, spec));
    }

    /// Tries the addresses again that are not served. Returns which are now, and which are not.
    pub(crate) fn retry(&self) -> (Vec<String>, Vec<String>) {
        let (mut done, mut failed) = (Vec::new(), Vec::new());
        for Refused { spec, reason } in self.refused() {
            // Not under the lock: the files may be on a drive that does not answer.
            let checked = spec.at.check();
            let is_of_time = matches!(&checked, Err(error) if error.is_of_time());
            let tried = checked
                .map_err(Into::into)
                .and_then(|()| self.open_refused(&spec));
            let Err(error) = tried else {
                tracing::info!(
                    export = spec.address,
                    "export {}: served: its certificates are valid now",
                    spec.address
                );
                done.push(format!("serves {}", spec.address));
                continue;
            };
            let now = format!("{error:#}");
            failed.push(format!("export {}: refused for now: {now}", spec.address));
            // The time is said once.
            if !is_of_time && now != reason && self.gate.check().is_ok() {
                tracing::error!(
                    export = spec.address,
                    "export {}: still refused: {now}",
                    spec.address
                );
            }
            let mut list = self.refused_list();
            let found = list.iter_mut().find(|other| other.spec == spec);
            found.into_iter().for_each(|other| other.reason.clone_from(&now));
        }
        (done, failed)
    }

    fn open_refused(&self, spec: &ExportSpec) -> Result<()> {
        let mut state = self.open_state()?;
        let found = state.exports.iter().position(|open| open.spec == *spec);
        let Some(at) = found.filter(|_| self.is_refused(spec)) else {
            // It was changed meanwhile.
            return Ok(());
        };
        let (config, disks) = (state.config.clone(), self.engine.disks());
        let names = state.exports[at].wanted(&config, &disks);
        state.exports[at].served = self.open(spec, &config.named_of(&names))?;
        self.forget_refused(spec);
        Ok(())
    }
}

/// The pause before an address is tried again.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_secs(5);
