//! The keys of a front door: what its addresses may have in `[[export]]`, and what its own table, such as
//! `[nbd]`, may have. `blkmq-config` reads them as they are written, with the lists of `front_door`, and the
//! front door parses the values; the command makes flags and help of the lists.

use std::collections::BTreeMap;

use blkmq_host::value::{self, ConfigError};

/// A key of a front door. Its page in `docs/exports` has the details.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key {
    /// The key.
    pub name: &'static str,
    /// What it may be, as in `32M to 16T`.
    pub range: &'static str,
    /// Its default value, as text; empty if there is none.
    pub default: &'static str,
    /// What it does, in one line.
    pub help: &'static str,
    /// The flag of the command that sets it, if there is one. Front doors may share one.
    pub flag: Option<Flag>,
}

impl Key {
    /// Returns one line for people: what it does, what it may be, and its default.
    pub fn line(&self) -> String {
        let line = format!("{}: {}", self.help, self.range);
        match self.default {
            "" => line,
            default => format!("{line} [default: {default}]"),
        }
    }
}

/// A flag of the command that sets a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flag {
    /// Its name, without the dashes.
    pub name: &'static str,
    /// What follows it.
    pub takes: Takes,
}

/// What follows a flag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Takes {
    /// A value, with its name in the help, as in `FILE`.
    Value(&'static str),
    /// The same, and the flag may be given again: the key is a list.
    Values(&'static str),
    /// Nothing: the key is a switch, and the flag turns it on.
    Nothing,
}

/// The value of a key, as it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Value {
    /// A text; numbers are in digits, switches `on` or `off`.
    Text(String),
    /// A list of texts.
    List(Vec<String>),
}

/// Keys with their values.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Keys(BTreeMap<String, Value>);

impl Keys {
    /// The text of a key, if it is given.
    ///
    /// # Errors
    /// It is a list.
    pub fn text(&self, key: &str) -> Result<Option<&str>, ConfigError> {
        match self.0.get(key) {
            Some(Value::Text(text)) => Ok(Some(text)),
            Some(Value::List(list)) => value::bad(key, &format!("{list:?}"), "one text, not a list"),
            None => Ok(None),
        }
    }

    /// The texts of a key, if it is given.
    ///
    /// # Errors
    /// It is no list.
    pub fn list(&self, key: &str) -> Result<Option<&[String]>, ConfigError> {
        match self.0.get(key) {
            Some(Value::List(list)) => Ok(Some(list)),
            Some(Value::Text(text)) => value::bad(key, text, "a list of texts"),
            None => Ok(None),
        }
    }

    /// Returns whether a switch is on. Default: off.
    ///
    /// # Errors
    /// It is no switch.
    pub fn switch(&self, key: &str) -> Result<bool, ConfigError> {
        self.text(key)?.map_or(Ok(false), |text| value::switch(key, text))
    }

    /// Checks that all keys are known.
    ///
    /// # Errors
    /// The first one that is not, with those that are.
    pub fn check<'a>(&self, known: impl Iterator<Item = &'a str> + Clone) -> Result<(), ConfigError> {
        let Some(key) = self.0.keys().find(|key| known.clone().all(|name| name != *key)) else {
            return Ok(());
        };
        let known: Vec<&str> = known.collect();
        Err(ConfigError::Refused {
            key: key.clone(),
            value: self.shown(key).unwrap_or_default(),
            why: match known.is_empty() {
                true => "there are no such keys here".to_owned(),
                false => format!("must be one of {}", known.join(", ")),
            },
        })
    }

    /// A value, for people.
    pub fn shown(&self, key: &str) -> Option<String> {
        Some(match self.0.get(key)? {
            Value::Text(text) => text.clone(),
            Value::List(list) => format!("{list:?}"),
        })
    }

    /// The names of the keys, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

/// No keys.
pub static NO_KEYS: Keys = Keys(BTreeMap::new());

impl FromIterator<(String, Value)> for Keys {
    fn from_iter<T: IntoIterator<Item = (String, Value)>>(pairs: T) -> Self {
        Self(pairs.into_iter().collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_refused_where_nobody_knows_them_and_in_another_form() {
        let text = |text: &str| Value::Text(text.to_owned());
        let keys = Keys::from_iter([
            ("a".to_owned(), text("on")),
            ("b".to_owned(), Value::List(vec!["x".to_owned()])),
        ]);
        assert_eq!(keys.text("a"), Ok(Some("on")));
        assert_eq!(keys.switch("a"), Ok(true));
        assert_eq!(keys.list("b").unwrap().unwrap(), ["x"]);
        assert_eq!((keys.text("c"), keys.switch("c")), (Ok(None), Ok(false)));
        assert!(keys.list("a").is_err() && keys.text("b").is_err());
        assert!(keys.check(["a", "b", "c"].into_iter()).is_ok());
        let error = keys.check(["a", "c"].into_iter()).unwrap_err().to_string();
        assert_eq!(error, "b=[\"x\"] rejected: must be one of a, c");
    }
}
