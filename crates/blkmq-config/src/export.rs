//! The description of an address at which disks are served: a table `[[export]]`, or a flag such as `--nbd`.
//! The front door, which the registry knows, parses the address and its own keys, and its own table,
//! such as `[nbd]`.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blkmq_export::front_door::{self, Address, DaemonLimits, FRONT_DOORS, FrontDoor, Given};
use blkmq_export::keys::{Key, Keys, NO_KEYS, Value};
use toml::Table;

use crate::document::Kind;
use crate::line::at;

/// One address at which disks are served.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    /// The front door, by its name.
    pub door: &'static str,
    /// Where clients connect, in that front door's form.
    pub address: String,
    /// The names of the disks; `None` for all.
    pub disks: Option<Vec<String>>,
    /// Connections at a time. Default 4096.
    pub connections: Option<u32>,
    /// Connections of one group at a time. Default: its share.
    pub group_connections: Option<u32>,
    /// The front door's own keys, as they were written.
    pub keys: Keys,
    /// The address with these keys, as the front door has parsed it.
    pub at: Arc<dyn Address>,
}

impl ExportSpec {
    /// An address of all disks, without more keys, in a daemon of which no other takes over.
    ///
    /// # Errors
    /// There is no such front door, or it refuses the address.
    pub fn new(door: &str, address: &str) -> Result<Self> {
        let table = Table::from_iter([(door.to_owned(), address.into())]);
        parse(&table, &Tables::new(), false)
    }
}

impl PartialEq for ExportSpec {
    fn eq(&self, other: &Self) -> bool {
        let written = |spec: &Self| (spec.door, spec.connections, spec.group_connections);
        written(self) == written(other)
            && (&self.address, &self.disks, &self.keys) == (&other.address, &other.disks, &other.keys)
    }
}

impl Eq for ExportSpec {}

/// The tables of front doors, by their names.
pub type Tables = BTreeMap<&'static str, Keys>;

/// Parses the tables that no other part of a configuration has.
///
/// # Errors
/// No front door has this name, or it refuses a key.
pub(crate) fn tables(tables: &Table) -> Result<(Tables, DaemonLimits)> {
    let (mut all, mut limits) = (Tables::new(), DaemonLimits::default());
    for (head, value) in tables {
        let (door, keys) = at(head, "", one_table(head, value, &mut limits))?;
        if all.insert(door, keys).is_some() {
            bail!("[{head}] rejected: it is there twice, with - and with _: keep one");
        }
    }
    Ok((all, limits))
}

fn one_table(head: &str, value: &toml::Value, limits: &mut DaemonLimits) -> Result<(&'static str, Keys)> {
    let Some(door) = front_door::find(head) else {
        let doors = FRONT_DOORS.iter().map(|door| door.name());
        let known: Vec<&str> = Kind::heads().chain(doors).collect();
        bail!("[{head}] rejected: must be one of {}", known.join(", "));
    };
    let context = || format!("[{head}]");
    let Some(table) = value.as_table() else {
        bail!("{head} = {value} rejected: must be a table, [{head}]");
    };
    let keys = keys(table).with_context(context)?;
    let known = door.table_keys().iter().map(|key| key.name);
    keys.check(known).with_context(context)?;
    door.parse_table(&keys, limits).with_context(context)?;
    Ok((door.name(), keys))
}

/// Parses a table `[[export]]`.
///
/// # Errors
/// It has no address, or several; or a key is refused, with what is allowed.
pub(crate) fn parse(table: &Table, tables: &Tables, may_hand_over: bool) -> Result<ExportSpec> {
    let mut doors = table.iter().filter_map(|(key, value)| Some((door(key)?, value)));
    let (Some((door, address)), None) = (doors.next(), doors.next()) else {
        let given: Vec<&str> = table.keys().map(String::as_str).collect();
        let doors: Vec<&str> = FRONT_DOORS.iter().map(|door| door.name()).collect();
        bail!(
            "[[export]] with {} rejected: must have one address, as one of {}",
            if given.is_empty() {
                "no keys".to_owned()
            } else {
                given.join(", ")
            },
            doors.join(", ")
        );
    };
    let Some(address) = address.as_str() else {
        bail!(
            "[[export]] {} rejected: must be a text, not {address}",
            door.name()
        );
    };
    let context = || format!("[[export]] {address}");
    let own = |key: &str| !KEYS.contains(&key) && self::door(key).is_none();
    let own = table.iter().filter(|(key, _)| own(key));
    let own: Table = own.map(|(key, value)| (key.clone(), value.clone())).collect();
    let keys = keys(&own).with_context(context)?;
    let known = own_keys(door).map(|key| key.name);
    keys.check(KEYS.iter().copied().chain(known))
        .with_context(context)?;
    let given = Given {
        address,
        keys: &keys,
        table: tables.get(door.name()).unwrap_or(&NO_KEYS),
        may_hand_over,
    };
    let at = door
        .parse(&given)
        .with_context(|| format!("[[export]] {}", door.name()))?;
    let number = |key| at_least_one(key, table.get(key)).with_context(context);
    Ok(ExportSpec {
        door: door.name(),
        address: address.to_owned(),
        disks: table.get(DISKS).map(names).transpose().with_context(context)?,
        connections: number(CONNECTIONS)?,
        group_connections: number(GROUP_CONNECTIONS)?,
        keys,
        at: at.into(),
    })
}

/// The front door that a key of an address names.
fn door(key: &str) -> Option<&'static dyn FrontDoor> {
    front_door::find(key)
}

/// The keys that a front door has for its addresses.
fn own_keys(door: &dyn FrontDoor) -> impl Iterator<Item = &'static Key> + Clone {
    door.keys().iter().copied().flatten()
}

/// Returns whether a key of `[[export]]` is an address.
pub(crate) fn is_address(key: &str) -> bool {
    door(key).is_some()
}

/// The keys of a table, in the form in which front doors get them.
fn keys(table: &Table) -> Result<Keys> {
    let one = |(key, value): (&String, &toml::Value)| {
        let text = |value: &toml::Value| match value {
            toml::Value::String(text) => Some(text.clone()),
            toml::Value::Integer(number) => Some(number.to_string()),
            toml::Value::Float(number) => Some(number.to_string()),
            toml::Value::Boolean(is_on) => Some(if *is_on { "on" } else { "off" }.to_owned()),
            _ => None,
        };
        let value = match value {
            toml::Value::Array(list) => list.iter().map(text).collect::<Option<_>>().map(Value::List),
            one => text(one).map(Value::Text),
        };
        let value = value.with_context(|| {
            format!("{key} rejected: must be a text, a list of texts, a number or a boolean")
        })?;
        Ok((key.clone(), value))
    };
    table.iter().map(one).collect()
}

/// Parses a number of connections.
fn at_least_one(key: &str, value: Option<&toml::Value>) -> Result<Option<u32>> {
    let Some(value) = value else { return Ok(None) };
    let number = value.as_integer().and_then(|number| u32::try_from(number).ok());
    match number {
        Some(1..) => Ok(number),
        _ => bail!("{key}={value} rejected: must be at least 1, or left out"),
    }
}

/// Parses a list of disks.
fn names(value: &toml::Value) -> Result<Vec<String>> {
    let names = value.as_array().and_then(|list| {
        let names = list.iter().map(|name| Some(name.as_str()?.to_owned()));
        names.collect()
    });
    names.with_context(|| format!("{DISKS}={value} rejected: must be a list of names, as in [\"vm1\"]"))
}

const DISKS: &str = "disks";
const CONNECTIONS: &str = "connections";
const GROUP_CONNECTIONS: &str = "group_connections";
/// The keys of every address, whatever its front door.
const KEYS: &[&str] = &[DISKS, CONNECTIONS, GROUP_CONNECTIONS];
