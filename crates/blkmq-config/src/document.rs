//! A configuration as people write it: the tables of a file, with flags in the same form, so that a
//! running daemon can be changed by one key and saved again. [`Config`] is its meaning.

use std::fmt;
use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use blkmq_host::group_paths::check_path;
use serde::Deserialize;
use toml::{Table, Value};

use crate::config::Config;
use crate::disk::{self, DiskSpec};
use crate::export;
use crate::file;
use crate::group;

/// A configuration as people write it. Displayed as TOML.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Document(Table);

/// Reads the text of a configuration file.
///
/// # Errors
/// The file cannot be read, is no UTF-8, or has more than 16 MiB.
pub fn read_text(path: &Path) -> Result<String> {
    let read = || {
        let mut text = String::new();
        let bytes = File::open(path)?
            .take(FILE_BYTES_MAX + 1)
            .read_to_string(&mut text)?;
        ensure!(bytes as u64 <= FILE_BYTES_MAX, "more than 16 MiB");
        anyhow::Ok(text)
    };
    read().with_context(|| format!("{} cannot be read", path.display()))
}

const FILE_BYTES_MAX: u64 = 16 << 20;
/// How many addresses a message lists.
const LISTED_MAX: usize = 20;

/// The kinds of tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// `[daemon]`, which has no name.
    Daemon,
    /// `[control]`, which has none either.
    Control,
    /// `[metrics]`, likewise.
    Metrics,
    /// `[disk.NAME]`.
    Disk,
    /// `[queue.NAME]`.
    Queue,
    /// `[group."/PATH"]`.
    Group,
    /// `[[export]]`, named by its address.
    Export,
    /// The table of a front door, named by it.
    Door,
}

impl Kind {
    /// All kinds.
    pub const ALL: [Self; 8] = [
        Self::Daemon,
        Self::Control,
        Self::Metrics,
        Self::Disk,
        Self::Queue,
        Self::Group,
        Self::Export,
        Self::Door,
    ];

    /// The heads of all tables but those of front doors.
    pub(crate) fn heads() -> impl Iterator<Item = &'static str> {
        let others = Self::ALL.into_iter().filter(|kind| *kind != Self::Door);
        others.map(Self::name)
    }

    /// Its name: the head of its tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Daemon => "daemon",
            Self::Control => "control",
            Self::Metrics => "metrics",
            Self::Disk => "disk",
            Self::Queue => "queue",
            Self::Group => "group",
            Self::Export => "export",
            Self::Door => "door",
        }
    }

    /// Finds a kind by its name.
    ///
    /// # Errors
    /// There is none; the text lists all kinds.
    pub fn by_name(name: &str) -> Result<Self> {
        let Some(kind) = Self::ALL.into_iter().find(|kind| kind.name() == name) else {
            let known: Vec<&str> = Self::ALL.iter().map(|kind| kind.name()).collect();
            bail!("{name:?} rejected: must be one of {}", known.join(", "));
        };
        Ok(kind)
    }
}

impl Document {
    /// Parses TOML. [`Document::config`] checks the meaning of the keys.
    ///
    /// # Errors
    /// The place that is no TOML.
    pub fn from_toml(text: &str) -> Result<Self> {
        Ok(Self(text.parse()?))
    }

    /// Its meaning.
    ///
    /// # Errors
    /// The fault, with the table and the key.
    pub fn config(&self) -> Result<Config> {
        file::parse_table(self.0.clone())
    }

    /// Adds a disk in the form of `--disk`.
    ///
    /// # Errors
    /// The fault in it, or there is one of this name.
    pub fn add_disk(&mut self, text: &str) -> Result<()> {
        let spec = DiskSpec::parse(text)?;
        let mut table = text_table(disk::pairs(text)?);
        table.remove("name");
        let inserted = self.insert(Kind::Disk, &spec.name, table);
        inserted.with_context(|| {
            format!(
                "disk {}: the name is used twice: give each disk its own",
                spec.name
            )
        })
    }

    /// Adds a group in the form of `--group`.
    ///
    /// # Errors
    /// As [`Document::add_disk`].
    pub fn add_group(&mut self, text: &str) -> Result<()> {
        let spec = group::parse(text)?;
        let pairs = text.split(',').skip(1).filter_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            Some((key.trim().to_owned(), value.to_owned()))
        });
        let inserted = self.insert(Kind::Group, &spec.path, text_table(pairs));
        inserted.with_context(|| format!("group {}: it is given twice; keep one", spec.path))
    }

    /// Adds an address at which all disks are served, with keys of its own.
    pub fn add_export(&mut self, door: &str, address: &str, keys: Table) {
        let mut table = Table::from_iter([(door.to_owned(), Value::String(address.to_owned()))]);
        table.extend(keys);
        self.exports().push(Value::Table(table));
    }

    /// Adds a table that does not exist yet.
    ///
    /// # Errors
    /// It exists.
    pub fn insert(&mut self, kind: Kind, name: &str, keys: Table) -> Result<()> {
        check_head(kind, name)?;
        if self.get(kind, name).is_some() {
            bail!("{} {name}: there is one already", kind.name());
        }
        match kind {
            Kind::Daemon | Kind::Control | Kind::Metrics => {
                bail!("[{}] is there already: set its keys", kind.name())
            }
            Kind::Export => {
                let mut values = keys.values().filter_map(Value::as_str);
                if !name.is_empty() && !values.any(|value| value == name) {
                    bail!(
                        "export {name}: an export is named by its address, which has to be one of its keys, as in nbd=unix:PATH"
                    );
                }
                self.exports().push(Value::Table(keys));
            }
            _ => {
                self.tables(kind).insert(name.to_owned(), Value::Table(keys));
            }
        }
        Ok(())
    }

    /// Removes a table.
    ///
    /// # Errors
    /// There is none.
    pub fn remove(&mut self, kind: Kind, name: &str) -> Result<()> {
        check_head(kind, name)?;
        match kind {
            Kind::Daemon | Kind::Control | Kind::Metrics => {
                bail!("[{}] cannot be removed: set its keys", kind.name())
            }
            Kind::Export => {
                let at = self.find_export(name);
                let at = at.with_context(|| self.missing(kind, name))?;
                self.exports().remove(at);
            }
            _ => {
                let removed = self.tables(kind).remove(name);
                let removed = removed.with_context(|| self.missing(kind, name))?;
                if kind == Kind::Disk {
                    self.remove_settings_of_queue(queue_of(name, &removed));
                }
            }
        }
        Ok(())
    }

    /// Removes the settings of a queue that has lost a disk, if none is left on it.
    fn remove_settings_of_queue(&mut self, queue: &str) {
        let mut disks = self.tables(Kind::Disk).iter();
        if !disks.any(|(name, disk)| queue_of(name, disk) == queue) {
            self.remove_queue(queue);
        }
    }

    fn remove_queue(&mut self, name: &str) {
        let queues = self.tables(Kind::Queue);
        queues.remove(name);
        if queues.is_empty() {
            self.0.remove(Kind::Queue.name());
        }
    }

    /// Sets keys of a table; keys without a value get their defaults again. Missing tables of
    /// queues and groups, which exist without a table too, are made.
    ///
    /// # Errors
    /// There is no such disk or export, or no disk is in such a group.
    pub fn set(
        &mut self,
        kind: Kind,
        name: &str,
        keys: impl IntoIterator<Item = (String, Option<Value>)>,
    ) -> Result<()> {
        let is_implied = !matches!(kind, Kind::Disk | Kind::Export);
        let mut keys = keys.into_iter().peekable();
        if is_implied && keys.peek().is_none() {
            return Ok(());
        }
        if self.get(kind, name).is_none() && !is_implied {
            bail!("{}", self.missing(kind, name));
        }
        if kind == Kind::Group {
            check_path(name)?;
        }
        check_head(kind, name)?;
        if kind == Kind::Group && self.get(kind, name).is_none() && !self.has_disk_in(name) {
            bail!("group {name}: no disk is in it, and it is not configured; add it, if a disk is to come");
        }
        let table = match kind {
            Kind::Export => {
                let at = self.find_export(name).context("looked at above")?;
                table_of(&mut self.exports()[at])
            }
            Kind::Daemon | Kind::Control | Kind::Metrics => {
                table_of(self.0.entry(kind.name()).or_insert_with(empty))
            }
            _ => table_of(self.tables(kind).entry(name).or_insert_with(empty)),
        };
        for (key, value) in keys {
            match value {
                Some(value) => table.insert(key, value),
                None => table.remove(&key),
            };
        }
        match kind {
            Kind::Queue if table.is_empty() => self.remove_queue(name),
            Kind::Door if table.is_empty() => drop(self.0.remove(name)),
            _ => {}
        }
        Ok(())
    }

    /// A table, if it exists.
    pub fn get(&self, kind: Kind, name: &str) -> Option<&Table> {
        match kind {
            Kind::Daemon | Kind::Control | Kind::Metrics => self.0.get(kind.name())?.as_table(),
            Kind::Export => self
                .0
                .get("export")?
                .as_array()?
                .get(self.find_export(name)?)?
                .as_table(),
            Kind::Door if is_head(name) => None,
            Kind::Door => self.0.get(name)?.as_table(),
            _ => self.0.get(kind.name())?.as_table()?.get(name)?.as_table(),
        }
    }

    /// The names of all tables of a kind; that of a table without a name is empty.
    pub(crate) fn names(&self, kind: Kind) -> Vec<String> {
        match kind {
            Kind::Daemon | Kind::Control | Kind::Metrics => {
                let found = self.get(kind, "").map(|_| String::new());
                found.into_iter().collect()
            }
            Kind::Export => self.addresses().map(str::to_owned).collect(),
            Kind::Door => {
                let heads = self.0.keys().filter(|head| !is_head(head));
                heads.cloned().collect()
            }
            _ => {
                let tables = self.0.get(kind.name()).and_then(Value::as_table);
                tables.map_or_else(Vec::new, |tables| tables.keys().cloned().collect())
            }
        }
    }

    /// The queue of a disk, if it names one or has one of its own.
    pub(crate) fn queue_of_disk(&self, name: &str) -> Option<String> {
        let disk = self.0.get(Kind::Disk.name())?.as_table()?.get(name)?;
        Some(queue_of(name, disk).to_owned())
    }

    /// Returns whether a disk names a queue, or has it as its own.
    pub(crate) fn has_disk_on(&self, queue: &str) -> bool {
        let mut disks = self.names(Kind::Disk).into_iter();
        disks.any(|name| self.queue_of_disk(&name).is_some_and(|of_disk| of_disk == queue))
    }

    /// Returns whether a disk is in a group, or in a group below it.
    fn has_disk_in(&self, path: &str) -> bool {
        let disks = self.0.get("disk").and_then(Value::as_table);
        let mut disks = disks.into_iter().flatten();
        disks.any(|(name, keys)| {
            let group = keys.get("group").and_then(Value::as_str);
            let group = group.map_or_else(|| format!("/{name}"), str::to_owned);
            let below = group.strip_prefix(path.trim_end_matches('/'));
            below.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        })
    }

    /// The tables, as data.
    pub fn tables_of_all(&self) -> &Table {
        &self.0
    }

    /// The addresses of all exports, in order.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        let exports = self.0.get("export").and_then(Value::as_array);
        exports.into_iter().flatten().filter_map(address)
    }

    fn find_export(&self, name: &str) -> Option<usize> {
        let exports = self.0.get("export")?.as_array()?;
        exports.iter().position(|export| address(export) == Some(name))
    }

    /// Says that there is no such table, and where to see those that there are.
    fn missing(&self, kind: Kind, name: &str) -> String {
        match kind {
            Kind::Disk => {
                format!("disk {name}: there is no such disk; `blkmq ctl list disks` prints all disks")
            }
            Kind::Export => {
                let known: Vec<&str> = self.addresses().take(LISTED_MAX).collect();
                format!(
                    "export {name}: no export has this address; there are: {}; `blkmq ctl dump` prints all of them",
                    known.join(", ")
                )
            }
            _ => format!(
                "{} {name}: nothing is configured of it; `blkmq ctl dump` prints what is configured",
                kind.name()
            ),
        }
    }

    fn tables(&mut self, kind: Kind) -> &mut Table {
        if kind == Kind::Door {
            return &mut self.0;
        }
        table_of(self.0.entry(kind.name()).or_insert_with(empty))
    }

    fn exports(&mut self) -> &mut Vec<Value> {
        let exports = self.0.entry("export").or_insert_with(|| Value::Array(Vec::new()));
        if !exports.is_array() {
            *exports = Value::Array(Vec::new());
        }
        exports.as_array_mut().expect("made one")
    }
}

impl fmt::Display for Document {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&toml::to_string(&self.0).map_err(|_| fmt::Error)?)
    }
}

/// The queue of a disk, if it names one or has one of its own.
fn queue_of<'a>(name: &'a str, disk: &'a Value) -> &'a str {
    disk.get("queue").and_then(Value::as_str).unwrap_or(name)
}

/// The address of an export: the value of the key that is a front door.
fn address(export: &Value) -> Option<&str> {
    let mut keys = export.as_table()?.iter();
    keys.find_map(|(key, value)| value.as_str().filter(|_| export::is_address(key)))
}

/// Checks that the table of a front door has no other table's head.
fn check_head(kind: Kind, name: &str) -> Result<()> {
    match kind {
        Kind::Door if is_head(name) => bail!("door {name}: there is no such front door"),
        _ => Ok(()),
    }
}

fn is_head(name: &str) -> bool {
    Kind::heads().any(|head| head == name)
}

fn empty() -> Value {
    Value::Table(Table::new())
}

/// The table of a value; a value of another type, which no configuration can have, is replaced by
/// an empty table.
fn table_of(value: &mut Value) -> &mut Table {
    if !value.is_table() {
        *value = empty();
    }
    value.as_table_mut().expect("made one")
}

fn text_table(pairs: impl IntoIterator<Item = (String, String)>) -> Table {
    pairs
        .into_iter()
        .map(|(key, value)| (key, Value::String(value)))
        .collect()
}

/// Parses a value as people type it behind `KEY=`: TOML's numbers, booleans and lists as such,
/// everything else as text.
pub fn typed(text: &str) -> Value {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct One {
        value: Value,
    }
    let parsed = toml::from_str::<One>(&format!("value = {text}"));
    match parsed {
        Ok(One {
            value: value @ (Value::Integer(_) | Value::Boolean(_) | Value::Array(_) | Value::Table(_)),
        }) => value,
        _ => Value::String(text.to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_and_a_file_become_one_document_that_means_the_same_when_it_is_read_again() {
        let mut document = Document::from_toml("[disk.a]\nram = \"1M\"\n[daemon]\nreactors = 1").unwrap();
        document
            .add_disk(r"name=b,file=/x\,y.raw,size=1M,ro=on,sched=bfq")
            .unwrap();
        document.add_group("/b,weight=200,iops=100,iops_burst=5").unwrap();
        document.add_export("nbd", "unix:/tmp/x.sock", Table::new());
        let config = document.config().unwrap();
        assert_eq!(
            config.disks[1],
            DiskSpec::parse(r"name=b,file=/x\,y.raw,size=1M,ro=on,sched=bfq").unwrap()
        );
        assert_eq!(
            config.groups,
            [group::parse("/b,weight=200,iops=100,iops_burst=5").unwrap()]
        );
        assert_eq!(config.exports[0].address, "unix:/tmp/x.sock");
        let again = Document::from_toml(&document.to_string()).unwrap();
        assert_eq!((&again, again.config().unwrap()), (&document, config));
        assert!(document.add_disk("name=a,ram=1M").is_err() && document.add_group("/b").is_err());
    }

    #[test]
    fn keys_are_set_and_taken_back_and_tables_come_and_go() {
        let mut document =
            Document::from_toml("[disk.a]\nram = \"1M\"\n[[export]]\nnbd = \"unix:x\"").unwrap();
        let weight = |value: &str| [("weight".to_owned(), Some(typed(value)))];
        document.set(Kind::Group, "/a", weight("300")).unwrap();
        assert_eq!(document.config().unwrap().groups[0].weight(), 300);
        document
            .set(Kind::Group, "/a", [("weight".to_owned(), None)])
            .unwrap();
        assert_eq!(document.config().unwrap().groups[0].weight(), 100);
        document.remove(Kind::Group, "/a").unwrap();
        assert!(document.remove(Kind::Group, "/a").is_err());
        assert!(document.set(Kind::Disk, "b", weight("3")).is_err());
        document
            .set(
                Kind::Export,
                "unix:x",
                [("tls_key".to_owned(), Some(typed("/key")))],
            )
            .unwrap();
        for (kind, name, parts) in [
            (Kind::Disk, "b", ["no such disk", "ctl list disks"]),
            (Kind::Group, "/b", ["nothing is configured", "ctl dump"]),
            (Kind::Export, "unix:y", ["there are: unix:x;", "ctl dump"]),
            (Kind::Export, "/key", ["no export has this address", "ctl dump"]),
        ] {
            let error = document.remove(kind, name).unwrap_err().to_string();
            assert!(parts.iter().all(|part| error.contains(part)), "{error}");
            assert!(error.starts_with(&format!("{} {name}: ", kind.name())), "{error}");
        }
        document
            .set(Kind::Export, "unix:x", [("tls_key".to_owned(), None)])
            .unwrap();
        let disks = [("disks".to_owned(), Some(typed("[\"a\"]")))];
        document.set(Kind::Export, "unix:x", disks).unwrap();
        assert_eq!(
            document.config().unwrap().exports[0].disks,
            Some(vec!["a".to_owned()])
        );
        document.remove(Kind::Export, "unix:x").unwrap();
        assert!(document.config().unwrap().exports.is_empty());
        assert!(document.set(Kind::Group, "/a", weight("heavy")).is_ok());
        assert!(document.config().unwrap_err().to_string().contains("group /a"));
    }

    #[test]
    fn settings_of_a_queue_go_with_its_last_disk_and_with_their_last_key() {
        let disks = "[disk.a]\nram = \"1M\"\n[disk.b]\nram = \"1M\"\nqueue = \"q\"\n[disk.c]\nram = \"1M\"\nqueue = \"q\"\n";
        let mut document = Document::from_toml(disks).unwrap();
        let depth = |value: Option<&str>| [("depth".to_owned(), value.map(typed))];
        document.set(Kind::Queue, "a", depth(Some("8"))).unwrap();
        document.set(Kind::Queue, "q", depth(Some("8"))).unwrap();
        let is_there = |document: &Document, queue| document.get(Kind::Queue, queue).is_some();
        document.remove(Kind::Disk, "b").unwrap();
        assert!(is_there(&document, "a") && is_there(&document, "q"));
        document.remove(Kind::Disk, "c").unwrap();
        assert!(is_there(&document, "a") && !is_there(&document, "q"));
        document.set(Kind::Queue, "a", depth(None)).unwrap();
        assert!(!document.to_string().contains("queue"), "{document}");
        let error = document.set(Kind::Group, "t", [("weight".to_owned(), Some(typed("3")))]);
        assert!(error.unwrap_err().to_string().contains("group"));
    }

    #[test]
    fn typed_value_is_a_number_a_boolean_a_list_or_a_text() {
        for (text, value) in [
            ("3", Value::Integer(3)),
            ("true", Value::Boolean(true)),
            ("64M", Value::String("64M".to_owned())),
            ("unix:/run/x.sock", Value::String("unix:/run/x.sock".to_owned())),
            ("1.5s", Value::String("1.5s".to_owned())),
            ("", Value::String(String::new())),
            ("3\nx = 4", Value::String("3\nx = 4".to_owned())),
        ] {
            assert_eq!(typed(text), value, "{text}");
        }
    }
}
