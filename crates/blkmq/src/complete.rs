//! The completion of what is typed in a shell: commands and flags from their definitions, and names by a
//! query to the running daemon, at its default control socket. If that fails, nothing is offered.

use std::ffi::OsStr;
use std::io::{self, Write};
use std::time::Duration;

use clap::ValueEnum;
use clap_complete::engine::{ArgValueCandidates, CompletionCandidate, ValueCompleter};
use clap_complete::env::{CompleteEnv, Shells};
use serde_json::json;

use crate::cli::Cli;
use crate::control::client::Client;
use crate::control::default_path_to_ask;

/// The shells that can complete.
#[derive(Clone, Copy, Debug, ValueEnum)]
#[value(rename_all = "lower")]
pub enum Shell {
    /// bash
    Bash,
    /// elvish
    Elvish,
    /// fish
    Fish,
    /// PowerShell
    PowerShell,
    /// zsh
    Zsh,
}

/// Prints the script that a shell reads at its start; with it the shell queries this program.
///
/// # Errors
/// The writer's error.
pub fn register(shell: Shell, out: &mut impl Write) -> io::Result<()> {
    let name = shell.to_possible_value();
    let name = name.as_ref().map_or("bash", |value| value.get_name());
    let shells = Shells::builtins();
    let shell = shells.completer(name).ok_or(io::ErrorKind::Unsupported)?;
    shell.write_registration(ASKED, "blkmq", "blkmq", "blkmq", out)
}

/// Answers the query of a shell, if this is one, and ends the process then.
pub fn answer() {
    CompleteEnv::with_factory(<Cli as clap::CommandFactory>::command)
        .var(ASKED)
        .complete();
}

/// The kinds of tables that `ctl` changes.
pub(crate) fn kinds() -> ArgValueCandidates {
    ArgValueCandidates::new(|| {
        ["disk", "group", "queue", "export", "daemon"]
            .map(CompletionCandidate::new)
            .into()
    })
}

/// The disks of the daemon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Disks;

impl ValueCompleter for Disks {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        names(&[("disk.list", "name")], current)
    }
}

/// Everything that has a name in the daemon.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names;

impl ValueCompleter for Names {
    fn complete(&self, current: &OsStr) -> Vec<CompletionCandidate> {
        let lists = [
            ("disk.list", "name"),
            ("queue.list", "name"),
            ("group.list", "path"),
            ("export.list", "address"),
        ];
        names(&lists, current)
    }
}

/// The names in these lists that begin with `current`, once each.
fn names(lists: &[(&str, &str)], current: &OsStr) -> Vec<CompletionCandidate> {
    let (Ok(mut client), Some(begun)) = (
        Client::connect_within(&default_path_to_ask(), ANSWER_MAX),
        current.to_str(),
    ) else {
        return Vec::new();
    };
    let mut found: Vec<String> = Vec::new();
    for (method, key) in lists {
        let Ok(rows) = client.call(method, &json!({})) else {
            continue;
        };
        let rows = rows.as_array().into_iter().flatten();
        let names = rows.filter_map(|row| row[*key].as_str());
        found.extend(names.filter(|name| name.starts_with(begun)).map(str::to_owned));
    }
    found.sort_unstable();
    found.dedup();
    found.into_iter().map(CompletionCandidate::new).collect()
}

/// The variable by which a shell queries.
const ASKED: &str = "BLKMQ_COMPLETE";
/// A user waits at a terminal.
const ANSWER_MAX: Duration = Duration::from_secs(1);
