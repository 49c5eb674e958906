//! What a configuration can name: the drivers of disks, and the elevators of queues. `disk` and `file` look names
//! up here.

use blkmq_core::sched;
use blkmq_drivers::registry;

/// The drivers and the elevators that a configuration can name. By default the built-in ones.
#[derive(Clone, Debug, Default)]
pub struct Registries {
    /// The drivers.
    pub drivers: registry::Registry,
    /// The elevators.
    pub elevators: sched::Registry,
}

#[cfg(test)]
mod tests {
    use blkmq_core::sched::ElevatorType;

    use super::*;
    use crate::plan::scheduler::without_effect;
    use crate::{Config, plan};

    static ADDED: ElevatorType = ElevatorType {
        name: "added",
        help: "shares by weight, as far as anybody knows",
        knows_groups: true,
        build: None,
    };

    #[test]
    fn added_elevator_is_named_by_the_daemon_queues_and_disks() {
        let text = "[daemon]\nsched = \"added\"\n[queue.b]\nsched = \"added\"\n[disk.a]\nnull = \"1M\"\nsched = \"added\"\n\
                    [disk.b]\nnull = \"1M\"\n[disk.c]\nnull = \"1M\"\n[group.\"/c\"]\nweight = 3\n";
        let registries = Registries {
            elevators: sched::Registry::default().with(&ADDED),
            ..Registries::default()
        };
        let config = Config::from_toml_with(text, &registries).unwrap();
        for queue in plan(&config).unwrap().queues {
            assert_eq!(queue.elevator, &ADDED, "{}", queue.name);
        }
        let lost = without_effect(&config, "c", ["c"].into_iter()).unwrap();
        assert_eq!(lost, None, "it knows weights");
        let error = format!("{:#}", Config::from_toml(text).unwrap_err());
        assert!(
            error.contains("[daemon]: sched=added rejected: must be one of none,"),
            "{error}"
        );
    }
}
