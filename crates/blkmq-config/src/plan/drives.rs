//! The queues that lie on one drive: the weights of groups divide the drive only within a queue. `plan` warns of them
//! at the start, the daemon when it is changed.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use crate::config::Config;
use crate::plan::scheduler::{self, listed};
use crate::plan::{Groups, settings};

/// A queue with what is below it.
pub struct QueueDrives<'a> {
    /// Its name.
    pub queue: &'a str,
    /// The names of its disks.
    pub disks: Vec<&'a str>,
    /// The drives below these, by number or name.
    pub drives: Vec<String>,
}

/// Weights of groups that span queues of one drive. Displayed as a warning with the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AcrossQueues {
    drive: String,
    queues: Vec<String>,
    groups: Vec<String>,
}

impl fmt::Display for AcrossQueues {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "queues {}: lie on one drive ({}), which the weights of {} do not divide between queues: give their disks \
             the same queue=",
            listed(&self.queues),
            self.drive,
            listed(&self.groups)
        )
    }
}

/// Finds the weights that span queues of one drive, each combination of queues once.
pub fn across(config: &Config, queues: &[QueueDrives<'_>]) -> Vec<AcrossQueues> {
    across_queues(config, queues, Groups::OfItsDisks)
}

pub(crate) fn across_queues(
    config: &Config,
    queues: &[QueueDrives<'_>],
    groups: Groups,
) -> Vec<AcrossQueues> {
    let mut on: BTreeMap<&str, BTreeMap<&str, Vec<String>>> = BTreeMap::new();
    for queue in queues {
        let disks = settings::named(config, queue.disks.iter().copied());
        let weighted = scheduler::weighted(config, &disks, groups);
        for drive in queue.drives.iter().filter(|_| !weighted.is_empty()) {
            on.entry(drive).or_default().insert(queue.queue, weighted.clone());
        }
    }
    let mut found: Vec<AcrossQueues> = Vec::new();
    for (drive, queues) in on {
        let names: Vec<String> = queues.keys().map(|&name| name.to_owned()).collect();
        let groups: BTreeSet<String> = queues.into_values().flatten().collect();
        let is_new = !found.iter().any(|other| other.queues == names);
        if names.len() > 1 && groups.len() > 1 && is_new {
            found.push(AcrossQueues {
                drive: drive.to_owned(),
                queues: names,
                groups: groups.into_iter().collect(),
            });
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str, queues: &[(&str, &str, &[&str])]) -> Vec<String> {
        let config = Config::from_toml(text).unwrap();
        let queues = queues.iter().map(|(queue, disk, drives)| QueueDrives {
            queue,
            disks: vec![disk],
            drives: drives.iter().map(|&drive| drive.to_owned()).collect(),
        });
        let queues: Vec<_> = queues.collect();
        let found = across(&config, &queues);
        found.iter().map(ToString::to_string).collect()
    }

    const DISKS: &str = "[disk.a]\nfile = \"/a\"\n[disk.b]\nfile = \"/b\"\n[disk.c]\nfile = \"/c\"\n";
    const A_B: &str = "[group.\"/a\"]\nweight = 100\n[group.\"/b\"]\nweight = 900\n";

    #[test]
    fn weights_across_queues_of_one_drive_are_named_once_with_the_next_step() {
        let text = format!("{DISKS}{A_B}");
        let said = found(
            &text,
            &[
                ("x", "a", &["8:0", "8:16", "8:0"]),
                ("y", "b", &["8:16", "8:0"]),
                ("z", "c", &["8:0"]),
            ],
        );
        assert_eq!(
            said,
            [
                "queues x, y: lie on one drive (8:0), which the weights of /a, /b do not divide between queues: give their \
                 disks the same queue="
            ]
        );
    }

    #[test]
    fn weights_on_drives_of_their_own_or_of_one_group_are_not_named() {
        let text = format!("{DISKS}{A_B}");
        assert!(found(&text, &[("x", "a", &["8:0"]), ("y", "b", &["8:16"])]).is_empty());
        assert!(found(&text, &[("x", "a", &[]), ("y", "b", &[])]).is_empty());
        assert!(found(&text, &[("x", "a", &["8:0"]), ("z", "c", &["8:0"])]).is_empty());
        assert!(found(DISKS, &[("x", "a", &["8:0"]), ("y", "b", &["8:0"])]).is_empty());
    }
}
