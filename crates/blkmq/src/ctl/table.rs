//! JSON rows on a terminal: columns as wide as needed, numbers to the right, sizes and times with units.

use serde_json::Value;

use crate::units::{size, time};

/// A column of a table.
#[derive(Clone, Copy, Debug)]
pub(super) struct Column {
    key: &'static str,
    kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Text,
    Number,
    Bytes,
    Time,
}

impl Column {
    pub(super) const fn text(key: &'static str) -> Self {
        Self {
            key,
            kind: Kind::Text,
        }
    }

    pub(super) const fn number(key: &'static str) -> Self {
        let kind = Kind::Number;
        Self { key, kind }
    }

    pub(super) const fn bytes(key: &'static str) -> Self {
        let kind = Kind::Bytes;
        Self { key, kind }
    }

    pub(super) const fn time(key: &'static str) -> Self {
        Self {
            key,
            kind: Kind::Time,
        }
    }

    fn cell(self, row: &Value) -> String {
        let value = &row[self.key];
        match (self.kind, value.as_u64()) {
            (Kind::Bytes, Some(bytes)) => size(bytes as f64),
            (Kind::Time, Some(ns)) => time(ns),
            _ => plain(value),
        }
    }
}

/// Rows under the names of their columns.
pub(super) fn table(columns: &[Column], rows: &[Value]) -> String {
    let heads = columns
        .iter()
        .map(|column| column.key.trim_end_matches("_ns").to_owned());
    let mut lines = vec![heads.collect::<Vec<_>>()];
    lines.extend(
        rows.iter()
            .map(|row| columns.iter().map(|column| column.cell(row)).collect()),
    );
    let width = |at: usize| {
        lines
            .iter()
            .map(|line| line[at].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut out = String::new();
    for line in &lines {
        let mut text = String::new();
        for ((cell, column), width) in line.iter().zip(columns).zip(&widths) {
            match column.kind {
                Kind::Text => text += &format!("{cell:<width$}  "),
                _ => text += &format!("{cell:>width$}  "),
            }
        }
        out += text.trim_end();
        out.push('\n');
    }
    out
}

/// A value of a record with the unit that its key has: bytes, seconds, or a rate of them.
pub(super) fn with_unit(key: &str, value: &Value) -> String {
    let bytes = |number: u64| match number {
        0..1024 => format!("{number} bytes"),
        _ => format!("{} ({number} bytes)", size(number as f64)),
    };
    match (key, value) {
        ("size" | "block_size" | "before", Value::Number(_)) => {
            value.as_u64().map_or_else(|| plain(value), bytes)
        }
        ("uptime_s", Value::Number(_)) => value.as_u64().map_or_else(|| plain(value), days),
        (key, Value::Number(_)) if key.ends_with("_ns") => value.as_u64().map_or_else(|| plain(value), time),
        ("nbd_memory", Value::Object(fields)) => {
            let pairs = fields.iter().map(|(key, value)| match value.as_u64() {
                Some(bytes) => format!("{key}={}", size(bytes as f64)),
                None => format!("{key}={}", plain(value)),
            });
            pairs.collect::<Vec<_>>().join(" ")
        }
        ("caps", Value::Object(fields)) if !fields.is_empty() => {
            let caps = fields.iter().map(|(kind, cap)| {
                let unit = |number: &Value| match (number.as_u64(), kind.ends_with("bps")) {
                    (Some(bytes), true) => size(bytes as f64),
                    _ => plain(number),
                };
                format!(
                    "{kind}={}/s {kind}_burst={}",
                    unit(&cap["rate"]),
                    unit(&cap["burst"])
                )
            });
            caps.collect::<Vec<_>>().join(" ")
        }
        _ => plain(value),
    }
}

/// A text without control characters: clients choose names and descriptions.
fn printable(text: &str) -> String {
    let one = |c: char| match c.is_control() {
        true => c.escape_default().collect(),
        false => c.to_string(),
    };
    text.chars().map(one).collect()
}

/// A value without quotes or braces.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => printable(text),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Object(fields) if fields.is_empty() => "-".to_owned(),
        Value::Object(fields) => {
            let pairs = fields.iter().map(|(key, value)| match value.get("rate") {
                Some(rate) => format!("{key}={rate} {key}_burst={}", value["burst"]),
                None => format!("{key}={}", plain(value)),
            });
            pairs.collect::<Vec<_>>().join(" ")
        }
        Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

/// Seconds, in the three largest units that they have.
fn days(seconds: u64) -> String {
    let (minutes, hours, days) = (seconds / 60 % 60, seconds / 3600 % 24, seconds / 86_400);
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3600 => format!("{minutes}min {}s", seconds % 60),
        3600..86_400 => format!("{hours}h {minutes}min"),
        _ => format!("{days}d {hours}h {minutes}min"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn value_of_a_record_has_the_unit_of_its_key() {
        for (key, value, shown) in [
            ("size", json!(20u64 << 30), "20.0G (21474836480 bytes)"),
            ("block_size", json!(512), "512 bytes"),
            ("uptime_s", json!(3), "3s"),
            ("uptime_s", json!(90_061), "1d 1h 1min"),
            ("latency_target_ns", json!(2_000_000), "2.0ms"),
            ("latency_target_ns", json!(null), "-"),
            (
                "nbd_memory",
                json!({"used": 0, "max": 1 << 30}),
                "max=1.0G used=0B",
            ),
            (
                "caps",
                json!({"bps": {"rate": 1 << 20, "burst": 0}, "iops": {"rate": 500, "burst": 9}}),
                "bps=1.0M/s bps_burst=0B iops=500/s iops_burst=9",
            ),
            ("clients", json!(3), "3"),
        ] {
            assert_eq!(with_unit(key, &value), shown, "{key}");
        }
    }

    #[test]
    fn columns_are_as_wide_as_needed_and_numbers_are_on_the_right() {
        let rows = [
            json!({"name": "a", "size": 1 << 20, "n": 7}),
            json!({"name": "long", "size": 512, "n": 12345}),
        ];
        let columns = [Column::text("name"), Column::bytes("size"), Column::number("n")];
        let wanted = "name  size      n\na     1.0M      7\nlong  512B  12345\n";
        assert_eq!(table(&columns, &rows), wanted);
    }

    #[test]
    fn text_of_others_does_nothing_to_a_terminal() {
        let evil = json!(["a\u{1b}[2Jb\nc\u{9b}d", "Zürich"]);
        assert_eq!(plain(&evil), "a\\u{1b}[2Jb\\nc\\u{9b}d, Zürich");
    }
}
