//! The scheduler that a queue gets for the sake of its groups, if nothing names one; and the settings of
//! groups that a named one does not know. `settings` has what is named.

use std::collections::BTreeSet;
use std::fmt;

use anyhow::Result;
use blkmq_core::sched::{self, ElevatorType};
use blkmq_host::group_paths::parent_of;

use crate::config::Config;
use crate::disk::DiskSpec;
use crate::group::GroupSpec;
use crate::plan::{Groups, settings};

/// Settings of groups that have no effect on a queue, because its scheduler does not know them. Displayed as
/// a warning with the next step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WithoutEffect {
    queue: String,
    kind: &'static ElevatorType,
    /// The groups with weights, and those with latency targets, that have no effect.
    weights: Vec<String>,
    targets: Vec<String>,
    /// The disks and queues that name the scheduler, or may.
    named_in: Vec<String>,
}

impl WithoutEffect {
    /// Returns whether settings of this group are among them.
    pub fn concerns(&self, path: &str) -> bool {
        self.weights
            .iter()
            .chain(&self.targets)
            .any(|group| group == path)
    }
}

impl fmt::Display for WithoutEffect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kinds = [
            (&self.weights, "knows no weights", "the weights of"),
            (
                &self.targets,
                "keeps no latency targets",
                "the latency targets of",
            ),
        ];
        let lacking = kinds.into_iter().filter(|(groups, ..)| !groups.is_empty());
        let lacks: Vec<&str> = lacking.clone().map(|(_, lacks, _)| lacks).collect();
        let settings: Vec<String> = lacking
            .map(|(groups, _, what)| format!("{what} {}", listed(groups)))
            .collect();
        write!(
            f,
            "queue {}: sched={} {}, so {} have no effect: set sched={} of {}",
            self.queue,
            self.kind,
            lacks.join(" and "),
            settings.join(" and "),
            sched::FOR_WEIGHTS,
            listed(&self.named_in)
        )
    }
}

/// Finds the settings of groups that have no effect on a queue with these disks: weights, unless its scheduler
/// shares by them, and latency targets, if it has `none`, which holds nobody back.
///
/// # Errors
/// The disks or settings that do not agree about the scheduler.
pub fn without_effect<'a>(
    config: &Config,
    queue: &str,
    disks: impl Iterator<Item = &'a str> + Clone,
) -> Result<Option<WithoutEffect>> {
    without_effect_with(config, queue, disks, Groups::OfItsDisks)
}

pub(crate) fn without_effect_with<'a>(
    config: &Config,
    queue: &str,
    disks: impl Iterator<Item = &'a str> + Clone,
    groups: Groups,
) -> Result<Option<WithoutEffect>> {
    let wish = settings::wish_with(config, queue, disks.clone(), groups)?;
    let kind = wish.elevator.unwrap_or_default();
    let disks = settings::named(config, disks);
    let weights = match kind.knows_groups {
        true => Vec::new(),
        false => weighted(config, &disks, groups),
    };
    let targets = match kind.is_some() {
        true => Vec::new(),
        false => groups_with(config, &disks, groups, |group| group.latency_target.is_some()),
    };
    let found = WithoutEffect {
        queue: queue.to_owned(),
        kind,
        named_in: named_in(config, queue, &disks),
        weights,
        targets,
    };
    Ok(Some(found).filter(|found| !found.weights.is_empty() || !found.targets.is_empty()))
}

/// What names a queue's scheduler, in a file or by flags; without that, what may, since it is for this queue alone.
fn named_in(config: &Config, queue: &str, disks: &[&DiskSpec]) -> Vec<String> {
    let of_queue = || format!("queue {queue}");
    let of_disk = |disk: &&DiskSpec| format!("disk {}", disk.name);
    let settings = config
        .queues
        .get(queue)
        .filter(|settings| settings.sched.is_some());
    let named = disks.iter().filter(|disk| disk.sched.is_some()).map(of_disk);
    let mut all: Vec<String> = settings.map(|_| of_queue()).into_iter().chain(named).collect();
    if all.is_empty() {
        let may = match config.has_queue(queue) {
            true => Some(of_queue()),
            // That of a filesystem or a cluster.
            false => disks.first().map(of_disk),
        };
        all.extend(may);
    }
    all
}

/// The groups with a weight to which I/O on a queue with these disks is accounted.
pub(crate) fn weighted(config: &Config, disks: &[&DiskSpec], groups: Groups) -> Vec<String> {
    groups_with(config, disks, groups, |group| {
        group.weight.is_some() && group.path != "/"
    })
}

/// The groups of a queue with these disks that have a setting.
fn groups_with(
    config: &Config,
    disks: &[&DiskSpec],
    groups: Groups,
    has: impl Fn(&GroupSpec) -> bool,
) -> Vec<String> {
    let mut with = config.groups.iter().filter(|group| has(group)).peekable();
    if with.peek().is_none() {
        return Vec::new();
    }
    let there = groups_of(config, disks);
    let found = with.filter(|group| groups == Groups::All || there.contains(&*group.path));
    found.map(|group| group.path.clone()).collect()
}

/// The groups of these disks, and of those that lie on them, with all their parents.
fn groups_of<'a>(config: &'a Config, disks: &[&'a DiskSpec]) -> BTreeSet<&'a str> {
    let mut groups = BTreeSet::new();
    for disk in with_mapped(config, disks) {
        let path = |path: &&'a str| (*path != "/").then(|| parent_of(path));
        let mut paths = std::iter::successors(Some(&*disk.group), path);
        // The parents of a group that is there are there too.
        while paths.next().is_some_and(|path| groups.insert(path)) {}
    }
    groups
}

/// These disks, and the mapped ones that lie on them.
fn with_mapped<'a>(config: &'a Config, disks: &[&'a DiskSpec]) -> Vec<&'a DiskSpec> {
    let mapped = config.disks.iter();
    let mut left: Vec<&DiskSpec> = mapped.filter(|disk| disk.source.is_without_queue()).collect();
    let mut all = disks.to_vec();
    let mut at = 0;
    while let Some(below) = all.get(at) {
        let name = below.name.as_str();
        all.extend(left.extract_if(.., |disk| disk.below().contains(&name)));
        at += 1;
    }
    all
}

/// Paths for a message, the first ones by name.
pub(crate) fn listed<T: AsRef<str>>(paths: &[T]) -> String {
    let named: Vec<&str> = paths.iter().take(NAMED_MAX).map(AsRef::as_ref).collect();
    match paths.len() {
        0..=NAMED_MAX => named.join(", "),
        all => format!("{} and {} more", named.join(", "), all - NAMED_MAX),
    }
}

/// Most groups that a message names.
const NAMED_MAX: usize = 8;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{plan, plan_with_all_groups};

    fn config(text: &str) -> Config {
        Config::from_toml(text).unwrap()
    }

    /// The scheduler of each queue.
    fn kinds(text: &str) -> Vec<(String, &'static ElevatorType)> {
        let queues = plan(&config(text)).unwrap().queues.into_iter();
        queues.map(|queue| (queue.name, queue.elevator)).collect()
    }

    fn is(name: &str, kind: &'static ElevatorType) -> (String, &'static ElevatorType) {
        (name.to_owned(), kind)
    }

    const A_B_C: &str = "[disk.a]\nnull = \"1M\"\n[disk.b]\nnull = \"1M\"\nsched = \"none\"\n\
                         [disk.c]\nnull = \"1M\"\n[queue.c]\nsched = \"mq-deadline\"\n";

    #[test]
    fn default_scheduler_is_that_of_queues_for_which_none_is_named() {
        assert_eq!(
            kinds(&format!("[daemon]\nsched = \"kyber\"\n{A_B_C}")),
            [
                is("a", sched::KYBER),
                is("b", sched::NONE),
                is("c", sched::MQ_DEADLINE)
            ]
        );
    }

    #[test]
    fn weight_gives_bfq_to_queues_of_its_group_for_which_no_scheduler_is_named() {
        let weights =
            "[group.\"/a\"]\nweight = 100\n[group.\"/b\"]\nweight = 3\n[group.\"/c\"]\nweight = 3\n";
        assert_eq!(
            kinds(&format!("{A_B_C}{weights}[disk.d]\nnull = \"1M\"\n")),
            [
                is("a", sched::BFQ),
                is("b", sched::NONE),
                is("c", sched::MQ_DEADLINE),
                is("d", sched::NONE)
            ]
        );
        let with_default = format!("[daemon]\nsched = \"none\"\n{A_B_C}{weights}");
        assert_eq!(kinds(&with_default)[0], is("a", sched::NONE));
        let bounded = format!("{A_B_C}[group.\"/a\"]\niops = 100\nlatency_target = \"1ms\"\n");
        assert_eq!(kinds(&bounded)[0], is("a", sched::NONE), "no weight is given");
    }

    #[test]
    fn weight_of_a_group_above_or_of_a_disk_on_others_counts() {
        let nested = "[disk.a]\nnull = \"1M\"\ngroup = \"/x/y\"\n[group.\"/x\"]\nweight = 3\n[disk.b]\nnull = \"1M\"\ngroup = \"/xy\"";
        assert_eq!(kinds(nested), [is("a", sched::BFQ), is("b", sched::NONE)]);
        let mapped = "[disk.a]\nnull = \"1M\"\n[disk.b]\nnull = \"1M\"\n[disk.m]\nlinear = \"a\"\n[group.\"/m\"]\nweight = 3";
        assert_eq!(kinds(mapped), [is("a", sched::BFQ), is("b", sched::NONE)]);
        let twice = mapped.replace("/m", "/n") + "\n[disk.n]\nstriped = \"m\"";
        assert_eq!(kinds(&twice), [is("a", sched::BFQ), is("b", sched::NONE)]);
        // Users of such an engine submit I/O of any group to any disk.
        let all =
            plan_with_all_groups(&config("[disk.a]\nnull = \"1M\"\n[group.\"/x\"]\nweight = 3")).unwrap();
        assert_eq!(all.queues[0].elevator, sched::BFQ);
    }

    #[test]
    fn settings_of_groups_that_a_scheduler_does_not_know_are_named_with_the_next_step() {
        let settings = "[group.\"/a\"]\nweight = 3\n[group.\"/b\"]\nweight = 3\n[group.\"/t\"]\nlatency_target = \"1ms\"\n";
        let said = |keys: &str, more: &str| {
            let disk = |name: &str, group: &str| {
                format!("[disk.{name}]\nnull = \"1M\"\nqueue = \"q\"\ngroup = \"{group}\"\n")
            };
            let disks = disk("a", "/a") + keys + "\n" + &disk("b", "/b") + &disk("t", "/t/vm1");
            let config = config(&format!("{disks}{settings}{more}"));
            let found = without_effect(&config, "q", ["a", "b", "t"].into_iter()).unwrap();
            found.map_or_else(String::new, |found| found.to_string())
        };
        assert_eq!(said("", ""), "", "it has bfq for the weights");
        assert_eq!(said("sched = \"bfq\"", ""), "");
        assert_eq!(
            said("sched = \"none\"", ""),
            "queue q: sched=none knows no weights and keeps no latency targets, so the weights of /a, /b and the latency \
             targets of /t have no effect: set sched=bfq of disk a"
        );
        assert_eq!(
            said("", "[queue.q]\nsched = \"mq-deadline\""),
            "queue q: sched=mq-deadline knows no weights, so the weights of /a, /b have no effect: set sched=bfq of \
             queue q"
        );
        assert_eq!(
            said("", "[daemon]\nsched = \"kyber\""),
            "queue q: sched=kyber knows no weights, so the weights of /a, /b have no effect: set sched=bfq of queue q"
        );
        let file = config("[disk.a]\nfile = \"/a\"\n[group.\"/a\"]\nlatency_target = \"1ms\"");
        let found = without_effect(&file, "dev-8:1", ["a"].into_iter())
            .unwrap()
            .unwrap();
        assert_eq!(
            found.to_string(),
            "queue dev-8:1: sched=none keeps no latency targets, so the latency targets of /a have no effect: set \
             sched=bfq of disk a"
        );
    }
}
