//! The elevator and the way of polling of a queue, from its settings and those of its disks, which must
//! agree.

use std::collections::BTreeSet;

use anyhow::{Result, bail};
use blkmq_core::sched::{self, ElevatorType};
use blkmq_host::{Error, QueueSpec};

use crate::config::Config;
use crate::disk::DiskSpec;
use crate::group::GroupSpec;
use crate::plan::{Groups, scheduler};
use crate::queue::Polling;

/// Applies the settings of a queue and of its disks, and returns them.
pub(crate) fn apply(queue: &mut QueueSpec, config: &Config, groups: Groups) -> Result<Wish> {
    let disks = queue.disks.iter().map(|disk| disk.name.as_str());
    let wish = wish_with(config, &queue.name, disks, groups)?;
    queue.tunables.clone_from(&wish.tunables);
    queue.elevator = wish.elevator.unwrap_or(queue.elevator);
    queue.io_poll = wish.polling.io_poll.or(queue.io_poll);
    queue.poll_policy = wish.polling.delay.unwrap_or(queue.poll_policy);
    queue.is_polled()?;
    Ok(wish)
}

/// Checks that a disk that joins a queue agrees with it about the elevator.
pub(crate) fn agrees(disk: &DiskSpec, queue: &str, kind: &'static ElevatorType) -> Result<()> {
    match disk.sched {
        Some(wanted) if wanted != kind => bail!(
            "disk {}: sched={wanted} rejected: its queue, {queue}, has sched={kind}, and a queue has one elevator; leave it out, \
             or give the disk a queue= of its own",
            disk.name
        ),
        _ => Ok(()),
    }
}

/// Warns of groups that have settings and no disk: most often the path is misspelt.
pub(crate) fn warn_of_empty_groups(config: &Config) {
    let is_empty = |group: &&GroupSpec| {
        let below = |path: &str| {
            path.strip_prefix(&group.path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        group.path != "/" && !config.disks.iter().any(|disk| below(&disk.group))
    };
    let empty: Vec<&str> = config
        .groups
        .iter()
        .filter(is_empty)
        .map(|group| group.path.as_str())
        .collect();
    let named = scheduler::listed(&empty);
    match empty.len() {
        0 => {}
        1 => tracing::warn!(
            group = named,
            "group {named}: no disk is in it, so its settings have no effect"
        ),
        _ => tracing::warn!("groups {named}: no disk is in them, so their settings have no effect"),
    }
}

/// The settings of a queue and of its disks, which must agree.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    /// The elevator, if one is named or groups need one.
    pub elevator: Option<&'static ElevatorType>,
    /// The groups for whose weights it has its elevator; none if one is named.
    pub weighted: Vec<String>,
    /// How completions of requests are found.
    pub polling: Polling,
    /// Requests in flight.
    pub depth: Option<u32>,
    /// Tunables of the elevator, by name.
    pub tunables: Vec<(String, u64)>,
}

impl Wish {
    /// Why a queue has an elevator that nobody has named.
    pub fn reason(&self, queue: &str) -> Option<String> {
        let kind = self.elevator.filter(|_| !self.weighted.is_empty())?;
        let groups = scheduler::listed(&self.weighted);
        let who = match self.weighted.len() {
            1 => format!("weight of group {groups} needs"),
            _ => format!("weights of groups {groups} need"),
        };
        Some(format!(
            "queue {queue}: sched={kind}, since the {who} it and no scheduler is named"
        ))
    }
}

/// The settings in `config` for a queue with these disks.
///
/// # Errors
/// The disks or settings that do not agree.
pub fn wish<'a>(config: &Config, queue: &str, disks: impl Iterator<Item = &'a str>) -> Result<Wish> {
    wish_with(config, queue, disks, Groups::OfItsDisks)
}

pub(crate) fn wish_with<'a>(
    config: &Config,
    queue: &str,
    disks: impl Iterator<Item = &'a str>,
    groups: Groups,
) -> Result<Wish> {
    let settings = config.queues.get(queue).cloned().unwrap_or_default();
    let disks = named(config, disks);
    let named = elevator(queue, settings.sched, &disks)?.or(config.sched);
    let weighted = match named {
        Some(_) => Vec::new(),
        None => scheduler::weighted(config, &disks, groups),
    };
    let elevator = named.or((!weighted.is_empty()).then_some(sched::FOR_WEIGHTS));
    let tunables = settings.tunables.iter();
    let checked = elevator
        .unwrap_or_default()
        .check_tunables(tunables.map(|(name, value)| (name.as_str(), *value)));
    checked.map_err(|cause| Error::Tunable {
        queue: queue.to_owned(),
        cause,
    })?;
    Ok(Wish {
        elevator,
        weighted,
        polling: polling(queue, settings.polling, &disks)?,
        depth: settings.depth,
        tunables: settings.tunables,
    })
}

/// The disks of these names, in the order of the configuration.
pub(crate) fn named<'c, 'a>(config: &'c Config, names: impl Iterator<Item = &'a str>) -> Vec<&'c DiskSpec> {
    let names: BTreeSet<&str> = names.collect();
    let disks = config.disks.iter();
    disks.filter(|disk| names.contains(disk.name.as_str())).collect()
}

/// The elevator that a queue's settings or its disks set; they must agree.
fn elevator(
    queue: &str,
    chosen: Option<&'static ElevatorType>,
    disks: &[&DiskSpec],
) -> Result<Option<&'static ElevatorType>> {
    let mut chosen = chosen.map(|kind| (kind, "the queue's settings"));
    for disk in disks {
        let Some(kind) = disk.sched else {
            continue;
        };
        match chosen {
            Some((other, who)) if other != kind => bail!(
                "disk {}: sched={kind} rejected: {who} of the same queue, {queue}, has sched={other}, and a queue has one \
                 elevator; make them agree, or give the disk a queue= of its own",
                disk.name,
            ),
            _ => chosen = Some((kind, &disk.name)),
        }
    }
    Ok(chosen.map(|(kind, _)| kind))
}

/// The attributes of polling that disks set for their queue, before its own settings; disks must
/// agree.
fn polling(queue: &str, settings: Polling, disks: &[&DiskSpec]) -> Result<Polling> {
    let conflict = |disk: &DiskSpec, key: &str| {
        anyhow::anyhow!(
            "disk {}: {key} rejected: another disk of the same queue, {queue}, says otherwise, and a queue is polled in one way; \
             make them agree, or give the disk a queue= of its own",
            disk.name,
        )
    };
    let (mut io_poll, mut delay) = (None, None);
    for disk in disks {
        if let Some(on) = disk.polling.io_poll
            && io_poll.replace(on).is_some_and(|other| other != on)
        {
            return Err(conflict(disk, "io_poll"));
        }
        if let Some(policy) = disk.polling.delay
            && delay.replace(policy).is_some_and(|other| other != policy)
        {
            return Err(conflict(disk, "io_poll_delay"));
        }
    }
    Ok(Polling {
        io_poll: io_poll.or(settings.io_poll),
        delay: delay.or(settings.delay),
    })
}

#[cfg(test)]
mod tests {
    use blkmq_core::poll::Policy;
    use blkmq_core::time::Nanos;
    use blkmq_drivers::multipath::MultipathDevice;

    use super::*;
    use crate::plan::plan;

    fn config(disks: &[&str]) -> Config {
        let disks = disks.iter().map(|text| DiskSpec::parse(text).unwrap()).collect();
        Config {
            disks,
            ..Config::default()
        }
    }

    #[test]
    fn elevator_that_a_disk_names_is_its_queues() {
        let plan = plan(&config(&["name=a,ram=1M,sched=mq-deadline", "name=b,null=1M"])).unwrap();
        let kinds: Vec<_> = plan
            .queues
            .iter()
            .map(|queue| (queue.name.as_str(), queue.elevator))
            .collect();
        assert_eq!(kinds, [("a", sched::MQ_DEADLINE), ("b", sched::NONE)]);
        assert_eq!(plan.queues[1].group_paths, ["/", "/b"]);
    }

    #[test]
    fn polling_is_as_disks_say_and_refused_where_it_cannot_be() {
        let of = |disks: &[&str]| {
            plan(&config(disks)).map(|plan| (plan.queues[0].io_poll, plan.queues[0].poll_policy))
        };
        let polled = of(&["name=a,null=1M,latency=50us,poll_queues=9,io_poll=on,io_poll_delay=20"]);
        assert_eq!(polled.unwrap(), (Some(true), Policy::Fixed(Nanos(20_000))));
        for (disks, parts) in [
            (
                &["name=a,ram=1M,io_poll=on"][..],
                ["queue a: io_poll on rejected", "cannot be polled"],
            ),
            (
                &["name=a,ram=1M,io_poll_delay=-1"],
                ["queue a: io_poll_delay -1 rejected", "cannot be polled"],
            ),
            (
                &[
                    "name=a,null=1M,poll_queues=9,queue=q,io_poll=on",
                    "name=b,null=1M,poll_queues=9,queue=q,io_poll=off",
                ],
                ["disk b: io_poll rejected", "make them agree"],
            ),
        ] {
            let error = format!("{:#}", of(disks).unwrap_err());
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn multipath_disk_takes_its_paths_off_the_list() {
        let disks = [
            "name=m,multipath=a+b/c:3,queue_if_no_path=on,sched=mq-deadline",
            "name=a,null=1M",
            "name=b,null=1M",
            "name=c,ram=1M",
            "name=other,null=1M",
        ];
        let plan = plan(&config(&disks)).unwrap();
        let names: Vec<&str> = plan.queues.iter().map(|queue| queue.name.as_str()).collect();
        assert_eq!(names, ["m", "other"]);
        let queue = &plan.queues[0];
        assert_eq!(
            (queue.elevator, queue.disks[0].size),
            (sched::MQ_DEADLINE, 1 << 20)
        );
        let paths = MultipathDevice::of(&*queue.device).expect("it has paths").paths();
        let told: Vec<_> = paths
            .iter()
            .map(|path| (path.name.as_str(), path.group, path.throughput))
            .collect();
        assert_eq!(told, [("a", 0, 1), ("b", 0, 1), ("c", 1, 3)]);
    }

    #[test]
    fn paths_that_cannot_be_are_refused_by_name() {
        for (disks, parts) in [
            (
                &["name=m,multipath=a", "name=x,null=1M"][..],
                ["disk m: path a rejected", "no disk of that name"],
            ),
            (
                &["name=m,multipath=a", "name=n,multipath=a", "name=a,null=1M"],
                ["disk n: path a rejected", "a path already"],
            ),
            (
                &["name=m,multipath=n", "name=n,multipath=a", "name=a,null=1M"],
                ["disk m: path n rejected", "multipath disk itself"],
            ),
            (
                &["name=m,multipath=a+b", "name=a,null=1M", "name=b,null=2M"],
                ["path b has 2097152 bytes", "the others have 1048576"],
            ),
            (
                &["name=m,multipath=a", "name=a,null=1M,queue=q"],
                ["disk m: path a rejected", "no queue of its own"],
            ),
        ] {
            let error = format!("{:#}", plan(&config(disks)).err().expect("refused"));
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
        }
    }

    #[test]
    fn disks_of_one_queue_that_name_two_elevators_are_refused() {
        let disks = [
            "name=a,ram=1M,queue=q,sched=none",
            "name=b,ram=1M,queue=q,sched=mq-deadline",
        ];
        let error = format!("{:#}", plan(&config(&disks)).err().expect("refused"));
        assert!(
            error.contains("disk b: sched=mq-deadline rejected") && error.contains("a of the same queue, q"),
            "{error}"
        );
    }
}
