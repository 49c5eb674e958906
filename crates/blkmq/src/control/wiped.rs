//! JSON whose texts are wiped when it is dropped, also when the rest of a line turns out to be no JSON: a request
//! may have a passphrase. `protocol` makes requests of it, and a method takes what it needs.

use std::fmt;
use std::mem;

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use zeroize::Zeroize;

/// A value, and the duty to wipe its texts. The names of its fields are no secrets.
#[derive(Default)]
pub(super) struct Wiped(Value);

impl Wiped {
    /// Parses a line, in which escaped slashes become plain ones: serde_json copies a text with escapes through memory
    /// that it does not wipe, and some programs escape the slashes of base64. (None has a reason to escape its other
    /// characters.)
    ///
    /// # Errors
    /// It is no JSON.
    pub(super) fn parse(line: &mut [u8]) -> serde_json::Result<Self> {
        let len = unescape_slashes(line);
        serde_json::from_slice(&line[..len])
    }

    pub(super) fn get(&self) -> &Value {
        &self.0
    }

    /// Takes a field out of an object.
    pub(super) fn remove(&mut self, name: &str) -> Option<Self> {
        self.0.as_object_mut()?.remove(name).map(Self)
    }

    /// The value, which its new owner wipes if need be.
    pub(super) fn take(mut self) -> Value {
        mem::take(&mut self.0)
    }
}

impl From<Value> for Wiped {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl Drop for Wiped {
    fn drop(&mut self) {
        wipe(&mut self.0);
    }
}

impl fmt::Debug for Wiped {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Wiped { .. }")
    }
}

impl<'de> Deserialize<'de> for Wiped {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        from.deserialize_any(Build)
    }
}

/// Wipes the texts of a value. As deep as serde_json lets values be: 128.
fn wipe(value: &mut Value) {
    match value {
        Value::String(text) => text.zeroize(),
        Value::Array(all) => all.iter_mut().for_each(wipe),
        Value::Object(fields) => fields.values_mut().for_each(wipe),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// Builds a value of parts that are wiped if one of them cannot be read.
struct Build;

impl<'de> Visitor<'de> for Build {
    type Value = Wiped;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Wiped, E> {
        Ok(Wiped::default())
    }

    fn visit_bool<E>(self, is_so: bool) -> Result<Wiped, E> {
        Ok(Wiped(is_so.into()))
    }

    fn visit_u64<E>(self, number: u64) -> Result<Wiped, E> {
        Ok(Wiped(number.into()))
    }

    fn visit_i64<E>(self, number: i64) -> Result<Wiped, E> {
        Ok(Wiped(number.into()))
    }

    fn visit_f64<E>(self, number: f64) -> Result<Wiped, E> {
        Ok(Wiped(Number::from_f64(number).map_or(Value::Null, Value::Number)))
    }

    fn visit_str<E>(self, text: &str) -> Result<Wiped, E> {
        Ok(Wiped(text.into()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut from: A) -> Result<Wiped, A::Error> {
        let mut all: Vec<Wiped> = Vec::new();
        while let Some(one) = from.next_element()? {
            all.push(one);
        }
        Ok(Wiped(all.into_iter().map(Wiped::take).collect()))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Wiped, A::Error> {
        let mut all: Vec<(String, Wiped)> = Vec::new();
        while let Some(field) = from.next_entry()? {
            all.push(field);
        }
        let mut fields = Map::new();
        for (name, value) in all {
            // Of two fields of one name, the last one counts.
            drop(fields.insert(name, value.take()).map(Wiped));
        }
        Ok(Wiped(Value::Object(fields)))
    }
}

/// Writes `\/` as `/`, which is the same in JSON. Returns the new length.
fn unescape_slashes(line: &mut [u8]) -> usize {
    let (mut from, mut to) = (0, 0);
    while from < line.len() {
        // A backslash and what it escapes, or one byte.
        let is_escape = line[from] == b'\\' && from + 1 < line.len();
        let start = from + usize::from(is_escape && line[from + 1] == b'/');
        let end = from + 1 + usize::from(is_escape);
        line.copy_within(start..end, to);
        (from, to) = (end, to + end - start);
    }
    to
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn value_is_what_serde_json_makes_of_it() {
        for text in [
            "null",
            " [true, -3, 18446744073709551615, 0.5, 1e3, \"a\"] ",
            r#"{"a":{"b":[{},[]]},"c":"d","a":2}"#,
            r#""\\/ \" \/ \/\/ \\\/ \n \u00e9 \ud83d\ude00""#,
        ] {
            let parsed = Wiped::parse(&mut text.as_bytes().to_vec()).unwrap();
            assert_eq!(
                parsed.take(),
                serde_json::from_str::<Value>(text).unwrap(),
                "{text}"
            );
        }
        for text in [
            "",
            "{",
            "[1,]",
            "\"\\",
            "\"\\/",
            "\\/",
            "\"\\ud800\"",
            "1e999",
            "[\"a\"] 2",
        ] {
            assert!(Wiped::parse(&mut text.as_bytes().to_vec()).is_err(), "{text}");
        }
    }

    #[test]
    fn slashes_are_plain_and_other_escapes_stay() {
        let mut line = *br#""\/a\\/b\"\/\\\/\"#;
        let len = unescape_slashes(&mut line);
        assert_eq!(&line[..len], br#""/a\\/b\"/\\/\"#);
    }

    #[test]
    fn texts_are_wiped_wherever_they_are() {
        let mut value = serde_json::json!({"a": ["b", {"c": "d"}], "e": 1, "f": "g"});
        wipe(&mut value);
        assert_eq!(value, serde_json::json!({"a": ["", {"c": ""}], "e": 1, "f": ""}));
    }
}
