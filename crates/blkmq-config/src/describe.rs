//! Describes a step from one configuration to another: the keys that differ, and their old and new
//! values.

use std::collections::BTreeSet;

use toml::{Table, Value};

use crate::diff::Change;
use crate::document::{Document, Kind};

/// Returns a description of a change, which is a step from `old` to `new`.
pub fn describe(change: &Change, old: &Document, new: &Document) -> String {
    let differing: Vec<String> = match change {
        Change::Group(path) => differing_keys(old.get(Kind::Group, path), new.get(Kind::Group, path)),
        Change::Export(export) => {
            let of = |document: &'_ Document| document.get(Kind::Export, &export.address).cloned();
            differing_keys(of(old).as_ref(), of(new).as_ref())
        }
        Change::ShutdownLimit => {
            let of = |document: &Document| shown(document.get(Kind::Daemon, "")?.get("shutdown_limit"));
            return format!(
                "{change}: {} -> {}",
                of_or_default(of(old)),
                of_or_default(of(new))
            );
        }
        Change::Key(disk) => {
            let of = |document: &Document| shown(document.get(Kind::Disk, disk)?.get("key"));
            return format!(
                "{change}: {} -> {}",
                of_or_default(of(old)),
                of_or_default(of(new))
            );
        }
        Change::Queues => of_queues(old, new),
        Change::AddDisk(_) | Change::RemoveDisk(_) | Change::AddExport(_) | Change::RemoveExport(_) => {
            Vec::new()
        }
    };
    match differing.is_empty() {
        true => change.to_string(),
        false => format!("{change}: {}", differing.join(", ")),
    }
}

/// The settings of queues, of disks for their queues, and of the daemon for all queues, that differ.
fn of_queues(old: &Document, new: &Document) -> Vec<String> {
    let default = |document: &Document| {
        let sched = document.get(Kind::Daemon, "")?.get_key_value("sched")?;
        Some(Table::from_iter([(sched.0.clone(), sched.1.clone())]))
    };
    let differing = differing_keys(default(old).as_ref(), default(new).as_ref()).into_iter();
    let mut all: Vec<String> = differing.map(|text| format!("daemon {text}")).collect();
    for kind in [Kind::Queue, Kind::Disk] {
        let tables = |document: &Document| -> Table {
            let tables = document.tables_of_all().get(kind.name());
            tables.and_then(Value::as_table).cloned().unwrap_or_default()
        };
        let (was, is) = (tables(old), tables(new));
        let names: BTreeSet<&String> = match kind {
            // A disk that is added or removed is a step of its own.
            Kind::Disk => was.keys().filter(|name| is.contains_key(*name)).collect(),
            _ => was.keys().chain(is.keys()).collect(),
        };
        for name in names {
            let of = |tables: &'_ Table| tables.get(name).and_then(Value::as_table).cloned();
            let differing = differing_keys(of(&was).as_ref(), of(&is).as_ref()).into_iter();
            all.extend(differing.map(|text| format!("{} {name} {text}", kind.name())));
        }
    }
    all
}

/// The keys of two tables that differ, with their values.
pub fn differing_keys(old: Option<&Table>, new: Option<&Table>) -> Vec<String> {
    let none = Table::new();
    let (old, new) = (old.unwrap_or(&none), new.unwrap_or(&none));
    let all: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let differ = all.into_iter().filter(|key| old.get(*key) != new.get(*key));
    differ
        .map(|key| {
            let (was, is) = (shown(old.get(key)), shown(new.get(key)));
            format!("{key} {} -> {}", of_or_default(was), of_or_default(is))
        })
        .collect()
}

fn shown(value: Option<&Value>) -> Option<String> {
    value.map(Value::to_string)
}

fn of_or_default(value: Option<String>) -> String {
    value.unwrap_or_else(|| "default".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diff::diff;

    fn described(old: &str, new: &str) -> String {
        let [old, new] =
            [old, new].map(|text| Document::from_toml(&format!("[disk.a]\nram = \"1M\"\n{text}")).unwrap());
        let steps = diff(
            &old.config().unwrap(),
            &new.config().unwrap(),
            &std::collections::BTreeMap::new(),
        )
        .unwrap();
        let texts: Vec<String> = steps.iter().map(|step| describe(step, &old, &new)).collect();
        texts.join("; ")
    }

    #[test]
    fn step_says_which_keys_differ_and_how() {
        for (old, new, wanted) in [
            (
                "[group.\"/x\"]\nweight = 3\niops = 5",
                "[group.\"/x\"]\nweight = 4\nlatency_target = \"2ms\"",
                "set group /x: iops 5 -> default, latency_target default -> \"2ms\", weight 3 -> 4",
            ),
            ("[group.\"/x\"]", "", "set group /x"),
            (
                "[queue.q]\ndepth = 3",
                "",
                "set queues: queue q depth 3 -> default",
            ),
            (
                "[disk.b]\nram = \"1M\"\nsched = \"bfq\"",
                "[disk.b]\nram = \"1M\"",
                "set queues: disk b sched \"bfq\" -> default",
            ),
            (
                "[[export]]\nnbd = \"unix:x\"\nconnections = 3",
                "[[export]]\nnbd = \"unix:x\"",
                "change what is served at nbd unix:x: connections 3 -> default",
            ),
            (
                "[daemon]\nshutdown_limit = \"1s\"",
                "",
                "set shutdown_limit: \"1s\" -> default",
            ),
            (
                "[daemon]\nsched = \"bfq\"",
                "[daemon]\nshutdown_limit = \"10s\"",
                "set queues: daemon sched \"bfq\" -> default",
            ),
            ("", "[disk.b]\nram = \"1M\"", "add disk b"),
        ] {
            assert_eq!(described(old, new), wanted, "{old} -> {new}");
        }
    }
}
