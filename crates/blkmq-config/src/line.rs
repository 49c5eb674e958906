//! The line of a configuration file at which a fault is: of the key that the message names, else of its table's head.
//! `file` says which table a fault is in; faults of TOML itself have their line from the parser.

use std::fmt;
use std::ops::Range;

use anyhow::{Error, Result};
use toml::de::{DeTable, DeValue};

/// A fault in a table of a configuration.
#[derive(Debug)]
pub(crate) struct Fault {
    head: String,
    /// The name of the table, the number of the export, or nothing.
    name: String,
    error: Error,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#}", self.error)
    }
}

impl std::error::Error for Fault {}

/// Says in which table a fault is.
pub(crate) fn at<T>(head: &str, name: impl ToString, result: Result<T>) -> Result<T> {
    result.map_err(|error| {
        let (head, name) = (head.to_owned(), name.to_string());
        Fault { head, name, error }.into()
    })
}

/// Adds the line to a fault in this text.
pub(crate) fn with_line(text: &str, error: Error) -> Error {
    let Some(fault) = error.downcast_ref::<Fault>() else {
        return error;
    };
    match offset_of(text, fault) {
        Some(offset) => error.context(format!("line {}", text[..offset].matches('\n').count() + 1)),
        None => error,
    }
}

fn offset_of(text: &str, fault: &Fault) -> Option<usize> {
    let all = DeTable::parse(text).ok()?;
    let (head, value) = entry(all.get_ref(), &fault.head)?;
    let (head, value) = match value {
        DeValue::Array(list) => {
            let one = list.get(fault.name.parse::<usize>().ok()?)?;
            (one.span(), one.get_ref())
        }
        DeValue::Table(tables) if !fault.name.is_empty() => entry(tables, &fault.name)?,
        value => (head, value),
    };
    let key = value
        .as_table()
        .and_then(|table| named_key(table, &fault.to_string()));
    Some(key.unwrap_or(head).start)
}

/// The place of a key, and its value.
fn entry<'a, 'i>(table: &'a DeTable<'i>, name: &str) -> Option<(Range<usize>, &'a DeValue<'i>)> {
    let mut found = table.iter().filter(|(key, _)| key.get_ref() == name);
    found.next().map(|(key, value)| (key.span(), value.get_ref()))
}

/// The place of the first key that a message names.
fn named_key(table: &DeTable<'_>, message: &str) -> Option<Range<usize>> {
    let place = |key: &str| {
        let forms = [
            format!("{key}="),
            format!("{key} rejected"),
            format!("`{key}`"),
            format!("{key}: "),
        ];
        let found = forms.iter().flat_map(|form| message.match_indices(form.as_str()));
        let is_whole = |at: &usize| !message[..*at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
        found.map(|(at, _)| at).filter(is_whole).min()
    };
    let named = table
        .iter()
        .filter_map(|(key, _)| Some((place(key.get_ref())?, key.span())));
    named.min_by_key(|(at, _)| *at).map(|(_, span)| span)
}

#[cfg(test)]
mod tests {
    use crate::Config;

    #[test]
    fn fault_has_the_line_of_its_key_or_else_of_its_table() {
        for (text, line) in [
            (
                "[daemon]\nreactors = 2\n\nsandbox = \"yes\"\n",
                "line 4: [daemon]: sandbox=yes",
            ),
            ("\n[disk.a]\nram = \"1M\"\ncolour = 3\n", "line 4: "),
            ("[disk.a]\nram = \"1M\"\n[disk.b]\nsize = \"1M\"\n", "line 3: "),
            ("[group.\"/a\"]\nbps = 1\nweight = 2000\n", "line 3: "),
            ("[queue.q]\ndepth = 3\nsched = \"cfq\"\n", "line 3: [queue.q]"),
            (
                "[[export]]\nnbd = \"unix:a\"\n[[export]]\nnbd = \"unix:b\"\nconnections = 0\n",
                "line 5: [[export]] unix:b",
            ),
            (
                "[[export]]\nnbd = \"unix:a\"\n\n[[export]]\n",
                "line 4: [[export]]",
            ),
            (
                "[disk.a]\nram = \"1M\"\n[nbd]\nmemory = \"1K\"\n",
                "line 4: [nbd]: memory=1K",
            ),
            (
                "[disk.a]\nram = \"1M\"\n[demon]\nx = 1\n",
                "line 3: [demon] rejected",
            ),
            (
                "[control]\nsocket = \"none\"\nreaders = \"no-such-user\"\n",
                "line 3: [control]: readers",
            ),
        ] {
            let error = format!("{:#}", Config::from_toml(text).unwrap_err());
            assert!(error.starts_with(line), "{text}{error}");
        }
        let of_toml = format!("{:#}", Config::from_toml("[daemon]\nwait = 3\n").unwrap_err());
        assert!(of_toml.contains("line 2"), "{of_toml}");
    }
}
