//! The scheduler that a queue gets for the sake of its groups, if nothing names one. `settings` has what
//! is named.

use std::collections::BTreeSet;

use blkmq_host::group_paths::parent_of;

use crate::config::Config;
use crate::disk::{DiskSpec, Source};
use crate::group::GroupSpec;
use crate::plan::Groups;

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
    let mut left: Vec<&DiskSpec> = mapped
        .filter(|disk| matches!(disk.source, Source::Mapped(_)))
        .collect();
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
    use blkmq_core::sched::Kind;

    use super::*;
    use crate::plan::{plan, plan_with_all_groups};

    fn config(text: &str) -> Config {
        Config::from_toml(text).unwrap()
    }

    /// The scheduler of each queue.
    fn kinds(text: &str) -> Vec<(String, Kind)> {
        let queues = plan(&config(text)).unwrap().queues.into_iter();
        queues.map(|queue| (queue.name, queue.elevator)).collect()
    }

    fn is(name: &str, kind: Kind) -> (String, Kind) {
        (name.to_owned(), kind)
    }

    const A_B_C: &str = "[disk.a]\nnull = \"1M\"\n[disk.b]\nnull = \"1M\"\nsched = \"none\"\n\
                         [disk.c]\nnull = \"1M\"\n[queue.c]\nsched = \"mq-deadline\"\n";

    #[test]
    fn default_scheduler_is_that_of_queues_for_which_none_is_named() {
        assert_eq!(
            kinds(&format!("[daemon]\nsched = \"kyber\"\n{A_B_C}")),
            [
                is("a", Kind::Kyber),
                is("b", Kind::None),
                is("c", Kind::MqDeadline)
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
                is("a", Kind::Bfq),
                is("b", Kind::None),
                is("c", Kind::MqDeadline),
                is("d", Kind::None)
            ]
        );
        let with_default = format!("[daemon]\nsched = \"none\"\n{A_B_C}{weights}");
        assert_eq!(kinds(&with_default)[0], is("a", Kind::None));
        let bounded = format!("{A_B_C}[group.\"/a\"]\niops = 100\nlatency_target = \"1ms\"\n");
        assert_eq!(kinds(&bounded)[0], is("a", Kind::None), "no weight is given");
    }

    #[test]
    fn weight_of_a_group_above_or_of_a_disk_on_others_counts() {
        let nested = "[disk.a]\nnull = \"1M\"\ngroup = \"/x/y\"\n[group.\"/x\"]\nweight = 3\n[disk.b]\nnull = \"1M\"\ngroup = \"/xy\"";
        assert_eq!(kinds(nested), [is("a", Kind::Bfq), is("b", Kind::None)]);
        let mapped = "[disk.a]\nnull = \"1M\"\n[disk.b]\nnull = \"1M\"\n[disk.m]\nlinear = \"a\"\n[group.\"/m\"]\nweight = 3";
        assert_eq!(kinds(mapped), [is("a", Kind::Bfq), is("b", Kind::None)]);
        let twice = mapped.replace("/m", "/n") + "\n[disk.n]\nstriped = \"m\"";
        assert_eq!(kinds(&twice), [is("a", Kind::Bfq), is("b", Kind::None)]);
        // Users of such an engine submit I/O of any group to any disk.
        let all =
            plan_with_all_groups(&config("[disk.a]\nnull = \"1M\"\n[group.\"/x\"]\nweight = 3")).unwrap();
        assert_eq!(all.queues[0].elevator, Kind::Bfq);
    }
}
