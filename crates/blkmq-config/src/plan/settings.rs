//! Decides which elevator and which way of polling a queue has: what its settings say, and what its disks say, who must agree.

use anyhow::{Result, bail};
use blkmq_core::sched::Kind;
use blkmq_host::QueueSpec;

use crate::config::Config;
use crate::disk::DiskSpec;

/// Puts what the settings and the disks of a queue say on it.
pub(super) fn apply(queue: &mut QueueSpec, config: &Config) -> Result<()> {
    let settings = config.queues.get(&queue.name);
    queue.tunables = settings
        .map(|settings| settings.tunables.clone())
        .unwrap_or_default();
    let chosen = settings.and_then(|settings| settings.sched);
    if let Some(kind) = elevator(queue, chosen, &config.disks)? {
        queue.elevator = kind;
    }
    poll_as_disks_say(queue, &config.disks)
}

/// Says which groups have settings and no disk: most often a path that was misspelt.
pub(super) fn warn_of_empty_groups(config: &Config) {
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
