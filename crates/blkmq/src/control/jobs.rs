//! Work on images in the background, at an operator's word. `methods` lists it; `serve::running` does it.

use serde::Deserialize;
use serde_json::{Value, json};

use super::methods::Session;
use super::methods::params::of;
use super::protocol::{BAD_PARAMS, Failure};
use super::server::Daemon;
use crate::serve::running::Kind;

pub(super) const FLATTEN_HELP: &str = "copy what the image of a disk reads from its bases into it, in the background, and take the bases away at the end: {disk, weight}; weight is that of the group /blkmq/jobs, 1 to 1000, 100 by default";
pub(super) const COMMIT_HELP: &str = "write what the image of a disk has into what it lies on, in the background, so that the image is empty at the end: {disk, weight}, as for disk.flatten";
pub(super) const LIST_HELP: &str = "the work in the background, with bytes, and how it ended";
pub(super) const CANCEL_HELP: &str = "give up what is done to a disk in the background: {disk}";

/// `disk.flatten`.
pub(super) fn flatten(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    begin(params, daemon, Kind::Flatten)
}

/// `disk.commit`.
pub(super) fn commit(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    begin(params, daemon, Kind::Commit)
}

fn begin(params: Value, daemon: &Daemon, kind: Kind) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disk: String,
        #[serde(default = "usual")]
        weight: u16,
    }
    let Params { disk, weight } = of(params)?;
    if !(1..=1000).contains(&weight) {
        let what = format!("weight {weight} rejected: must be from 1 to 1000");
        return Err(Failure::new(BAD_PARAMS, what));
    }
    daemon.running.begin_job(&disk, kind, weight)?;
    Ok(json!({}))
}

/// `job.list`.
pub(super) fn list(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct None {}
    let None {} = of(params)?;
    let reports = daemon.running.jobs().reports().into_iter();
    let jobs = reports.map(|report| {
        let (state, error) = match report.end {
            Option::None => ("running", Value::Null),
            Some(Ok(())) => ("done", Value::Null),
            Some(Err(error)) => ("failed", json!(error)),
        };
        json!({
            "disk": report.disk,
            "kind": report.kind.name(),
            "bytes": report.all,
            "done": report.done,
            "state": state,
            "error": error,
        })
    });
    Ok(jobs.collect())
}

/// `job.cancel`.
pub(super) fn cancel(_: &mut Session, params: Value, daemon: &Daemon) -> Result<Value, Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Params {
        disk: String,
    }
    let Params { disk } = of(params)?;
    daemon.running.jobs().cancel(&disk)?;
    Ok(json!({}))
}

/// The weight of any group.
fn usual() -> u16 {
    100
}
