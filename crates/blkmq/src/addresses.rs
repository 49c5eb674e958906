//! The flags of front doors: one for the addresses of each, as `--nbd ADDRESS`, and those of their keys, as
//! `--tls`. The registry has all of them, with their help; `serve` adds them to the configuration.

use std::collections::BTreeMap;

use blkmq_export::front_door::{FRONT_DOORS, FrontDoor};
use blkmq_export::keys::{Flag, Key, Takes};
use clap::{Arg, ArgAction, ArgMatches, Args, FromArgMatches};
use toml::{Table, Value};

/// Addresses at which all disks are served, and the keys of front doors that have flags.
#[derive(Clone, Debug, Default)]
pub struct Addresses {
    /// The front doors with their addresses.
    pub all: Vec<(&'static str, String)>,
    /// The keys of each front door's addresses.
    pub keys: BTreeMap<&'static str, Table>,
    /// The keys of each front door's table.
    pub tables: BTreeMap<&'static str, Table>,
}

impl Args for Addresses {
    fn augment_args(command: clap::Command) -> clap::Command {
        let address = |command: clap::Command, door: &&dyn FrontDoor| {
            let flag = Arg::new(door.name()).long(door.name()).value_name("ADDRESS");
            command.arg(flag.action(ArgAction::Append).help(door.help()))
        };
        let mut command = FRONT_DOORS.iter().fold(command, address);
        let mut seen: Vec<&str> = Vec::new();
        for (key, flag) in FRONT_DOORS.iter().flat_map(|door| all_flags(*door)) {
            if !seen.contains(&flag.name) {
                command = command.arg(arg(key, flag));
                seen.push(flag.name);
            }
        }
        command
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

impl FromArgMatches for Addresses {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut found = Self::default();
        for door in FRONT_DOORS {
            let name = door.name();
            let given = matches.get_many::<String>(name).into_iter().flatten();
            found.all.extend(given.map(|address| (name, address.clone())));
            let of = |flags: &mut dyn Iterator<Item = (&Key, Flag)>| -> Table {
                let given = |(key, flag): (&Key, Flag)| Some((key.name.to_owned(), value(flag, matches)?));
                flags.filter_map(given).collect()
            };
            found
                .keys
                .insert(name, of(&mut flags(door.keys().iter().copied().flatten())));
            found.tables.insert(name, of(&mut flags(door.table_keys())));
        }
        Ok(found)
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

/// The keys that have flags.
fn flags(keys: impl IntoIterator<Item = &'static Key>) -> impl Iterator<Item = (&'static Key, Flag)> {
    keys.into_iter().filter_map(|key| Some((key, key.flag?)))
}

fn all_flags(door: &dyn FrontDoor) -> impl Iterator<Item = (&'static Key, Flag)> {
    flags(door.keys().iter().copied().flatten().chain(door.table_keys()))
}

/// The flag of a key.
fn arg(key: &Key, flag: Flag) -> Arg {
    let arg = Arg::new(flag.name).long(flag.name);
    match flag.takes {
        Takes::Value(name) => arg.value_name(name).help(key.line()),
        Takes::Values(name) => arg
            .value_name(name)
            .action(ArgAction::Append)
            .help(key.line() + "; may be given again"),
        Takes::Nothing => arg.action(ArgAction::SetTrue).help(key.help),
    }
}

/// The value of a key, if its flag is given.
fn value(flag: Flag, matches: &ArgMatches) -> Option<Value> {
    let text = |text: &String| Value::String(text.clone());
    match flag.takes {
        Takes::Value(_) => matches.get_one(flag.name).map(text),
        Takes::Values(_) => {
            let all = matches.get_many::<String>(flag.name)?;
            Some(Value::Array(all.map(text).collect()))
        }
        Takes::Nothing => matches.get_flag(flag.name).then_some(Value::Boolean(true)),
    }
}
