//! Decides how the configuration becomes what the engine is started with. Which disks share a queue is up to
//! `blkmq_config::plan`; here the elevators that disks ask for are put on their queues.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use blkmq_config::plan as host;
use blkmq_core::sched::Kind;
use blkmq_core::time::Nanos;
use blkmq_host::engine::QueueSpec;
use blkmq_host::mapped::MappedSpec;

use crate::config::{Config, DiskSpec, QueueSettings, Source};

/// What the engine is to be made of.
pub struct Plan {
    /// The queues with their disks, open.
    pub queues: Vec<QueueSpec>,
    /// The disks that lie on other disks.
    pub mapped: Vec<MappedSpec>,
    /// The paths of the groups, by their ids.
    pub groups: Vec<String>,
}

/// Opens the disks and joins them into queues.
///
/// # Errors
/// A disk that cannot be served or does not fit on its queue; the text names it, and what to do.
pub fn plan(config: &Config) -> Result<Plan> {
    let disks = config.disks.iter().map(disk).collect();
    let settings: BTreeMap<String, _> = config
        .queues
        .iter()
        .map(|(name, queue)| (name.clone(), settings(queue)))
        .collect();
    let mut plan = host::plan(disks, &settings, &host::QueueSettings::default())?;
    plan.set_groups(&config.groups)?;
    warn_of_empty_groups(config);
    let host::Plan {
        mut queues,
        mapped,
        groups,
    } = plan;
    for queue in &mut queues {
        let settings = config.queues.get(&queue.name);
        queue.tunables = settings
            .map(|settings| settings.tunables.clone())
            .unwrap_or_default();
        let chosen = settings.and_then(|settings| settings.sched);
        if let Some(kind) = elevator(queue, chosen, &config.disks)? {
            queue.elevator = kind;
        }
        poll_as_disks_say(queue, &config.disks)?;
    }
    Ok(Plan {
        queues,
        mapped,
        groups,
    })
}

/// Says which groups have settings and no disk: most often a path that was misspelt.
fn warn_of_empty_groups(config: &Config) {
    for group in &config.groups {
        let below = |path: &str| {
            path.strip_prefix(&group.path)
                .is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if group.path != "/" && !config.disks.iter().any(|disk| below(&disk.group)) {
            tracing::warn!(
                "group {}: no disk is in it, so its settings have no effect",
                group.path
            );
        }
    }
}

fn disk(disk: &DiskSpec) -> host::DiskSpec {
    let (source, size) = match &disk.source {
        Source::File(config) => (host::Source::File(config.clone()), None),
        Source::Nbd(config) => (host::Source::Nbd((**config).clone()), None),
        Source::Ram { size, config } => (host::Source::Ram(config.clone()), Some(*size)),
        Source::Mapped(map) => (host::Source::Mapped(map.clone()), None),
        Source::Null { size, config } => (host::Source::Null((**config).clone()), Some(*size)),
        Source::Multipath(source) => (host::Source::Multipath(source.clone()), None),
    };
    host::DiskSpec {
        name: disk.name.clone(),
        description: disk.description.clone(),
        source,
        size,
        read_only: disk.read_only,
        block_size: disk.block_size,
        queue: disk.queue.clone(),
        group: Some(disk.group.clone()),
    }
}

fn settings(queue: &QueueSettings) -> host::QueueSettings {
    let default = host::QueueSettings::default();
    host::QueueSettings {
        depth: queue.depth,
        timeout: queue
            .timeout
            .map_or(default.timeout, |limit| Nanos(limit.as_nanos() as u64)),
        merges: queue.merges.unwrap_or(default.merges),
        io_poll: queue.polling.io_poll,
        poll_policy: queue.polling.delay.unwrap_or_default(),
        ..default
    }
}

/// The elevator that a queue's settings or its disks name; they must agree.
fn elevator(queue: &QueueSpec, chosen: Option<Kind>, disks: &[DiskSpec]) -> Result<Option<Kind>> {
    let mut chosen = chosen.map(|kind| (kind, "the queue's settings"));
    for entry in &queue.disks {
        let disk = disks.iter().find(|disk| disk.name == entry.name);
        let Some(kind) = disk.and_then(|disk| disk.sched) else {
            continue;
        };
        match chosen {
            Some((other, who)) if other != kind => bail!(
                "disk {}: sched={kind} rejected: {who} of the same queue, {}, has sched={other}, and a queue has one \
                 elevator; make them agree, or give the disk a queue= of its own",
                entry.name,
                queue.name
            ),
            _ => chosen = Some((kind, &entry.name)),
        }
    }
    Ok(chosen.map(|(kind, _)| kind))
}

/// Puts the attributes of polling that disks name on their queue; they must agree.
fn poll_as_disks_say(queue: &mut QueueSpec, disks: &[DiskSpec]) -> Result<()> {
    let on_it = |disk: &&DiskSpec| queue.disks.iter().any(|entry| entry.name == disk.name);
    let said: Vec<&DiskSpec> = disks.iter().filter(on_it).collect();
    let conflict = |disk: &DiskSpec, key: &str| {
        anyhow::anyhow!(
            "disk {}: {key} rejected: another disk of the same queue, {}, says otherwise, and a queue is polled in one way; \
             make them agree, or give the disk a queue= of its own",
            disk.name,
            queue.name
        )
    };
    let (mut io_poll, mut delay) = (None, None);
    for disk in said {
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
    queue.io_poll = io_poll.or(queue.io_poll);
    queue.poll_policy = delay.unwrap_or(queue.poll_policy);
    queue.is_polled()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use blkmq_core::poll::Policy;
    use blkmq_drivers::multipath::MultipathDrive;

    use super::*;

    fn config(disks: &[&str]) -> Config {
        let disks = disks.iter().map(|text| DiskSpec::parse(text).unwrap()).collect();
        Config {
            disks,
            ..Config::default()
        }
    }

    #[test]
    fn the_elevator_that_a_disk_names_is_its_queues() {
        let plan = plan(&config(&["name=a,ram=1M,sched=mq-deadline", "name=b,null=1M"])).unwrap();
        let kinds: Vec<_> = plan
            .queues
            .iter()
            .map(|queue| (queue.name.as_str(), queue.elevator))
            .collect();
        assert_eq!(kinds, [("a", Kind::MqDeadline), ("b", Kind::None)]);
        assert_eq!(plan.groups, ["/", "/a", "/b"]);
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
    fn a_multipath_disk_takes_its_paths_off_the_list() {
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
        assert_eq!((queue.elevator, queue.disks[0].size), (Kind::MqDeadline, 1 << 20));
        let paths = MultipathDrive::of(&*queue.drive).expect("it has paths").paths();
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
