//! What a reload of the configuration file means for a daemon that was changed since: the file's differences are made,
//! and all else stays. [`Document::follow`] makes them; `diff` turns the result into steps.
//!
//! | the file | the daemon has | then |
//! |---|---|---|
//! | is as before | anything | it stays |
//! | has a new table, or new or changed keys in one | the table | these keys are set, other keys stay |
//! | the same | no such table | the whole table of the file is added |
//! | has lost keys of a table | the table | they get their defaults |
//! | has lost a disk or an export | the table | it is removed |
//! | has lost another table | the table | the keys that the file had get their defaults |

use std::collections::BTreeSet;

use anyhow::Result;
use toml::Table;

use crate::document::{Document, Kind};

impl Document {
    /// Makes the differences between a file as it was loaded last and as it is now.
    ///
    /// # Errors
    /// As for [`Document::insert`] and [`Document::remove`].
    pub fn follow(&mut self, loaded: &Self, now: &Self) -> Result<()> {
        // What comes is there before what goes: settings of a queue go with its last disk.
        for kind in Kind::ALL {
            for name in now.names(kind) {
                if loaded.get(kind, &name) != now.get(kind, &name) {
                    self.follow_table(kind, &name, loaded, now)?;
                }
            }
        }
        for kind in Kind::ALL {
            for name in loaded.names(kind) {
                if now.get(kind, &name).is_none() && self.get(kind, &name).is_some() {
                    self.lose_table(kind, &name, loaded)?;
                }
            }
        }
        Ok(())
    }

    fn follow_table(&mut self, kind: Kind, name: &str, loaded: &Self, now: &Self) -> Result<()> {
        let Some(is) = now.get(kind, name) else {
            return Ok(());
        };
        if self.get(kind, name).is_some() {
            let was = loaded.get(kind, name).cloned().unwrap_or_default();
            let lost = was.keys().filter(|key| !is.contains_key(*key));
            let changed = is.iter().filter(|(key, value)| was.get(*key) != Some(value));
            let lost = lost.map(|key| (key.clone(), None));
            let changed = changed.map(|(key, value)| (key.clone(), Some(value.clone())));
            return self.set(kind, name, lost.chain(changed));
        }
        match kind {
            Kind::Daemon | Kind::Control | Kind::Metrics => {
                let keys = is.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
                return self.set(kind, name, keys);
            }
            // Its disks have gone, and it would be refused without them.
            Kind::Queue if !self.has_disk_on(name) => return Ok(()),
            _ => self.insert(kind, name, is.clone())?,
        }
        if kind == Kind::Disk
            && let Some(queue) = self.queue_of_disk(name)
            && self.get(Kind::Queue, &queue).is_none()
            && let Some(settings) = now.get(Kind::Queue, &queue)
        {
            // They went with the last disk.
            self.insert(Kind::Queue, &queue, settings.clone())?;
        }
        Ok(())
    }

    fn lose_table(&mut self, kind: Kind, name: &str, loaded: &Self) -> Result<()> {
        if matches!(kind, Kind::Disk | Kind::Export) {
            return self.remove(kind, name);
        }
        let was = loaded.get(kind, name).cloned().unwrap_or_default();
        if kind == Kind::Group && is_part(self.get(kind, name), &was) {
            return self.remove(kind, name);
        }
        self.set(kind, name, was.into_iter().map(|(key, _)| (key, None)))
    }

    /// The tables that differ from another document's, for people, as in `disk vm7`.
    pub fn differences(&self, other: &Self) -> Vec<String> {
        let mut all = Vec::new();
        for kind in Kind::ALL {
            let names: BTreeSet<String> = self.names(kind).into_iter().chain(other.names(kind)).collect();
            let differs = |name: &String| self.get(kind, name) != other.get(kind, name);
            let shown = |name: String| match name.is_empty() {
                true => format!("[{}]", kind.name()),
                false => format!("{} {name}", kind.name()),
            };
            all.extend(names.into_iter().filter(differs).map(shown));
        }
        all
    }

    /// The disks and exports that another document does not have, for people.
    pub fn missing_in(&self, other: &Self) -> Vec<String> {
        let mut all = Vec::new();
        for kind in [Kind::Disk, Kind::Export] {
            let mut names = self.names(kind);
            names.retain(|name| other.get(kind, name).is_none());
            all.extend(names.iter().map(|name| format!("{} {name}", kind.name())));
        }
        all
    }
}

/// Returns whether a table has no keys but those of another.
fn is_part(table: Option<&Table>, of: &Table) -> bool {
    table.is_none_or(|table| table.keys().all(|key| of.contains_key(key)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn document(text: &str) -> Document {
        Document::from_toml(text).unwrap()
    }

    #[test]
    fn reload_makes_the_differences_of_the_file_and_keeps_the_rest() {
        const A: &str = "[disk.a]\nram = \"1M\"\n";
        const B: &str = "[disk.b]\nram = \"1M\"\n";
        let weight = |weight: u32| format!("[group.\"/a\"]\nweight = {weight}\n");
        let at = |keys: &str| format!("[[export]]\nnbd = \"unix:x\"\n{keys}\n");
        let queue = "[queue.b]\ndepth = 8\n";
        for (what, loaded, now, running, wanted) in [
            (
                "added by ctl",
                A.to_owned(),
                A.to_owned(),
                [A, B].concat(),
                [A, B].concat(),
            ),
            (
                "removed by ctl",
                [A, B].concat(),
                [A, B].concat(),
                A.into(),
                A.into(),
            ),
            ("added", A.into(), [A, B].concat(), A.into(), [A, B].concat()),
            (
                "added by both",
                A.into(),
                [A, B].concat(),
                [A, B].concat(),
                [A, B].concat(),
            ),
            (
                "added by both, with a key of ctl",
                A.into(),
                [A, B].concat(),
                [A, B, "ro = true\n"].concat(),
                [A, B, "ro = true\n"].concat(),
            ),
            ("removed", [A, B].concat(), A.into(), [A, B].concat(), A.into()),
            ("removed by both", [A, B].concat(), A.into(), A.into(), A.into()),
            (
                "removed by ctl, and changed",
                [A, B].concat(),
                [A, B, "ro = true\n"].concat(),
                A.into(),
                [A, B, "ro = true\n"].concat(),
            ),
            (
                "set by ctl",
                A.to_owned() + &weight(1),
                A.to_owned() + &weight(1),
                A.to_owned() + &weight(2),
                A.to_owned() + &weight(2),
            ),
            (
                "set by ctl, and changed",
                A.to_owned() + &weight(1),
                A.to_owned() + &weight(3),
                A.to_owned() + &weight(2) + "iops = 5\n",
                A.to_owned() + &weight(3) + "iops = 5\n",
            ),
            (
                "a group removed, with a key of ctl",
                A.to_owned() + &weight(1),
                A.into(),
                A.to_owned() + &weight(1) + "iops = 5\n",
                A.to_owned() + "[group.\"/a\"]\niops = 5\n",
            ),
            (
                "a group removed",
                A.to_owned() + &weight(1),
                A.into(),
                A.to_owned() + &weight(2),
                A.into(),
            ),
            (
                "an export changed",
                A.to_owned() + &at("connections = 5"),
                A.to_owned() + &at("connections = 6"),
                A.to_owned() + &at("connections = 5") + "[[export]]\nnbd = \"unix:y\"\n",
                A.to_owned() + &at("connections = 6") + "[[export]]\nnbd = \"unix:y\"\n",
            ),
            (
                "a queue's disk replaced",
                [B, "queue = \"q\"\n[queue.q]\ndepth = 8\n"].concat(),
                [A, "queue = \"q\"\n[queue.q]\ndepth = 8\n"].concat(),
                [B, "queue = \"q\"\n[queue.q]\ndepth = 8\n"].concat(),
                [A, "queue = \"q\"\n[queue.q]\ndepth = 8\n"].concat(),
            ),
            (
                "a disk with settings removed by ctl, and changed",
                [A, B, queue].concat(),
                [A, B, "ro = true\n", queue].concat(),
                A.into(),
                [A, B, "ro = true\n", queue].concat(),
            ),
            (
                "settings of a disk that ctl removed",
                [A, B].concat(),
                [A, B, queue].concat(),
                A.into(),
                A.into(),
            ),
            (
                "a key of the daemon",
                A.into(),
                [A, "[daemon]\nshutdown_limit = \"3s\"\n"].concat(),
                [A, B].concat(),
                [A, B, "[daemon]\nshutdown_limit = \"3s\"\n"].concat(),
            ),
        ] {
            let mut found = document(&running);
            found.follow(&document(&loaded), &document(&now)).unwrap();
            let wanted = document(&wanted);
            let (found, wanted) = (found.config().unwrap(), wanted.config().unwrap());
            assert_eq!(found, wanted, "{what}");
        }
    }

    #[test]
    fn differences_are_named_by_their_tables() {
        let running =
            document("[disk.a]\nram = \"1M\"\n[[export]]\nnbd = \"unix:x\"\n[daemon]\nreactors = 1");
        let file = document("[disk.b]\nram = \"1M\"\n");
        assert_eq!(
            running.differences(&file),
            ["[daemon]", "disk a", "disk b", "export unix:x"]
        );
        assert_eq!(running.missing_in(&file), ["disk a", "export unix:x"]);
        assert!(running.differences(&running.clone()).is_empty());
    }
}
