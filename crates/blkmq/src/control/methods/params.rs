//! Parameters of the [methods](super): what they are read into, and what is refused.

use std::collections::VecDeque;

use anyhow::{Context, Result};
use blkmq_drivers::multipath::MultipathDevice;
use serde::de::value::BorrowedStrDeserializer;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, Error as _, MapAccess, Visitor};
use serde::{Deserialize, forward_to_deserialize_any};
use serde_json::{Map, Value, json};

use crate::control::protocol::{BAD_PARAMS, Failure};
use crate::control::server::Daemon;
use crate::control::wiped::Wiped;

/// A table of the configuration, and what is to become of it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Edit {
    pub(super) kind: String,
    #[serde(default)]
    pub(super) name: String,
    #[serde(default)]
    pub(super) keys: Map<String, Value>,
    #[serde(default)]
    pub(super) dry_run: bool,
}

/// A disk, for methods that need nothing else.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct OneDisk {
    pub(super) disk: String,
}

/// Keys with their values as a configuration has them; null is none.
pub(in crate::control) fn values(keys: Map<String, Value>) -> Result<Vec<(String, Option<toml::Value>)>> {
    let value = |(key, value): (String, Value)| {
        let value = match value {
            Value::Null => None,
            // More than TOML's numbers have room for: the key's own limits refuse it.
            Value::Number(number) if number.is_u64() && number.as_i64().is_none() => {
                Some(toml::Value::String(number.to_string()))
            }
            value => {
                let converted = toml::Value::try_from(&value);
                // Not its value: that may be somebody's passphrase.
                Some(converted.with_context(|| format!("{key} rejected"))?)
            }
        };
        Ok((key, value))
    };
    keys.into_iter().map(value).collect()
}

/// A message to a multipath disk.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Message {
    disk: String,
    message: String,
    path: Option<String>,
    group: Option<u8>,
}

impl Message {
    pub(super) fn send(self, daemon: &Daemon) -> Result<()> {
        let control = daemon.running.control();
        let disks = control.disks();
        let disk = disks.iter().find(|disk| disk.name == self.disk);
        let disk = disk.with_context(|| format!("disk {}: there is no such disk", self.disk))?;
        let device = MultipathDevice::of_queue(&control, disk.queue)?;
        let path = || self.path.as_deref().context("path is missing");
        match self.message.as_str() {
            "fail_path" => device.fail_path(path()?)?,
            "reinstate_path" => device.reinstate_path(path()?)?,
            "switch_group" => device.switch_group(self.group.context("group is missing")?)?,
            _ => anyhow::bail!("message rejected: must be fail_path, reinstate_path or switch_group"),
        }
        Ok(())
    }
}

/// The default of a flag.
pub(super) fn yes() -> bool {
    true
}

/// Accepts no parameters.
///
/// # Errors
/// If there are some.
pub(super) fn none(params: Value) -> Result<(), Failure> {
    #[derive(Deserialize)]
    #[serde(deny_unknown_fields)]
    struct None {}
    of::<None>(params).map(drop)
}

pub(in crate::control) fn of<T: DeserializeOwned>(params: Value) -> Result<T, Failure> {
    let params = if params.is_null() { json!({}) } else { params };
    // Somebody's passphrase may be where none is expected.
    let params = Wiped::from(params);
    if !params.get().is_object() {
        return Err(Failure::new(BAD_PARAMS, "params: must be an object, by names"));
    }
    let fields = Fields {
        left: params.get().as_object().into_iter().flatten().collect(),
        value: None,
    };
    T::deserialize(fields).map_err(|error| Failure::new(BAD_PARAMS, format!("params: {error}")))
}

/// The fields of an object, with errors that name the field and not its value, which may be somebody's passphrase.
struct Fields<'a> {
    left: VecDeque<(&'a String, &'a Value)>,
    value: Option<(&'a str, &'a Value)>,
}

impl<'de> Deserializer<'de> for Fields<'de> {
    type Error = serde_json::Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> serde_json::Result<V::Value> {
        visitor.visit_map(self)
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf option unit unit_struct
        newtype_struct seq tuple tuple_struct map struct enum identifier ignored_any
    }
}

impl<'de> MapAccess<'de> for Fields<'de> {
    type Error = serde_json::Error;

    fn next_key_seed<K: DeserializeSeed<'de>>(&mut self, seed: K) -> serde_json::Result<Option<K::Value>> {
        let Some((name, value)) = self.left.pop_front() else {
            return Ok(None);
        };
        self.value = Some((name, value));
        let name: BorrowedStrDeserializer<'de, serde_json::Error> = BorrowedStrDeserializer::new(name);
        seed.deserialize(name).map(Some)
    }

    fn next_value_seed<V: DeserializeSeed<'de>>(&mut self, seed: V) -> serde_json::Result<V::Value> {
        let (name, value) = self.value.take().unwrap_or(("", &Value::Null));
        seed.deserialize(value).map_err(|error| {
            let error = error.to_string();
            // Behind the value.
            let wanted = error.rsplit_once(", expected ").map(|(_, wanted)| wanted);
            let wanted = match wanted.unwrap_or("something else") {
                "u8" => "a whole number from 0 to 255",
                "u16" => "a whole number from 0 to 65535",
                "u32" | "u64" | "usize" => "a whole number",
                other => other,
            };
            serde_json::Error::custom(format_args!("{name} rejected: must be {wanted}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[derive(Debug, Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code)]
    struct Params {
        disk: String,
        #[serde(default)]
        weight: u16,
        way: Option<Way>,
        #[serde(default)]
        disks: BTreeMap<String, Vec<u64>>,
    }

    #[derive(Debug, Deserialize)]
    #[serde(rename_all = "lowercase")]
    enum Way {
        Raw,
        Qcow2,
    }

    #[test]
    fn refused_parameters_are_named_without_their_values() {
        for (params, said) in [
            (
                json!({"disk": "a", "weight": "swordfish"}),
                "params: weight rejected: must be a whole number from 0 to 65535",
            ),
            (
                json!({"disk": "a", "weight": "sword, expected fish"}),
                "params: weight rejected: must be a whole number from 0 to 65535",
            ),
            (
                json!({"disk": "a", "weight": 70_007}),
                "params: weight rejected: must be a whole number from 0 to 65535",
            ),
            (json!({"disk": 70_007}), "params: disk rejected: must be a string"),
            (
                json!({"disk": ["swordfish"]}),
                "params: disk rejected: must be a string",
            ),
            (
                json!({"disk": "a", "way": "swordfish"}),
                "params: way rejected: must be `raw` or `qcow2`",
            ),
            (
                json!({"disk": "a", "disks": {"b": ["swordfish"]}}),
                "params: disks rejected: must be a whole number",
            ),
            (
                json!({"disk": "a", "disks": "swordfish"}),
                "params: disks rejected: must be a map",
            ),
            (json!({"weight": 3}), "params: missing field `disk`"),
            (json!("swordfish"), "params: must be an object, by names"),
        ] {
            let refused = of::<Params>(params).unwrap_err();
            assert_eq!((refused.code, refused.message.as_str()), (BAD_PARAMS, said));
        }
        let unknown = of::<Params>(json!({"disk": "a", "colour": "swordfish"})).unwrap_err();
        assert!(
            unknown
                .message
                .contains("unknown field `colour`, expected one of"),
            "{unknown:?}"
        );
        let good =
            of::<Params>(json!({"disk": "a", "weight": 7, "way": "raw", "disks": {"b": [1]}})).unwrap();
        assert_eq!((good.disk.as_str(), good.weight, good.disks["b"][0]), ("a", 7, 1));
    }
}
