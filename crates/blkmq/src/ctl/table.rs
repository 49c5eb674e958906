//! Decides how rows of JSON look on a terminal: columns as wide as they need to be, numbers to the right, sizes and times with units.

use std::collections::BTreeMap;

use serde_json::Value;

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
            (Kind::Bytes, Some(bytes)) => size(bytes),
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

/// A line for each group: rates since `before`, if there is one, else counts since the start.
pub(super) fn of_groups(now: &Value, before: Option<&Value>) -> String {
    let seconds = before.map(|before| {
        let ns = now["uptime_ns"].as_f64().unwrap_or(0.0) - before["uptime_ns"].as_f64().unwrap_or(0.0);
        (ns / 1e9).max(1e-9)
    });
    let was = before.map(by_group).unwrap_or_default();
    let mut rows = Vec::new();
    for ((queue, path), group) in by_group(now) {
        let since = |key: &str, direction: &str| {
            let of = |group: &Value| group[direction][key].as_u64().unwrap_or(0);
            let before = was.get(&(queue, path)).map_or(0, |group| of(group));
            of(group).saturating_sub(before)
        };
        let rate = |key: &str, direction: &str| match seconds {
            Some(seconds) => (since(key, direction) as f64 / seconds) as u64,
            None => since(key, direction),
        };
        if since("ios", "total") == 0 && seconds.is_some() {
            continue;
        }
        rows.push(serde_json::json!({
            "queue": queue,
            "group": path,
            "reads": rate("ios", "read"),
            "writes": rate("ios", "write"),
            "read": rate("bytes", "read"),
            "written": rate("bytes", "write"),
            "wait_p99_ns": group["wait"]["p99_ns"],
            "device_p50_ns": group["device"]["p50_ns"],
            "device_p99_ns": group["device"]["p99_ns"],
            "errors": since("errors", "total"),
        }));
    }
    let columns = [
        Column::text("queue"),
        Column::text("group"),
        Column::number("reads"),
        Column::number("writes"),
        Column::bytes("read"),
        Column::bytes("written"),
        Column::time("wait_p99_ns"),
        Column::time("device_p50_ns"),
        Column::time("device_p99_ns"),
        Column::number("errors"),
    ];
    table(&columns, &rows)
}

fn by_group(statistics: &Value) -> BTreeMap<(&str, &str), &Value> {
    let queues = statistics["queues"].as_array().into_iter().flatten();
    let groups = queues.flat_map(|queue| {
        let name = queue["name"].as_str().unwrap_or("?");
        let groups = queue["groups"].as_array().into_iter().flatten();
        groups.map(move |group| ((name, group["path"].as_str().unwrap_or("?")), group))
    });
    groups.collect()
}

/// A value without quotes or braces.
pub(super) fn plain(value: &Value) -> String {
    match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        Value::Bool(true) => "yes".to_owned(),
        Value::Bool(false) => "no".to_owned(),
        Value::Object(fields) if fields.is_empty() => "-".to_owned(),
        Value::Object(fields) => {
            let pairs = fields.iter().map(|(key, value)| match value.get("rate") {
                Some(rate) => format!("{key}={rate}"),
                None => format!("{key}={}", plain(value)),
            });
            pairs.collect::<Vec<_>>().join(" ")
        }
        Value::Array(list) => list.iter().map(plain).collect::<Vec<_>>().join(", "),
        other => other.to_string(),
    }
}

fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "K", "M", "G", "T"])
}

fn time(ns: u64) -> String {
    scaled(ns as f64, 1000.0, &["ns", "us", "ms", "s"])
}

/// A number with the unit that leaves three digits or fewer, as far as there is one.
fn scaled(value: f64, step: f64, units: &[&str]) -> String {
    let (mut value, mut at) = (value, 0);
    while value >= step && at + 1 < units.len() {
        value /= step;
        at += 1;
    }
    match value {
        whole if at == 0 || whole >= 100.0 => format!("{whole:.0}{}", units[at]),
        value => format!("{value:.1}{}", units[at]),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

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
    fn rates_are_of_what_came_since_the_time_before() {
        let at = |uptime: u64, ios: u64| {
            json!({"uptime_ns": uptime, "queues": [{"name": "q", "groups": [
                {"path": "/a", "read": {"ios": ios, "bytes": ios * 4096}, "total": {"ios": ios}},
                {"path": "/idle", "total": {"ios": 5}},
            ]}]})
        };
        let text = of_groups(&at(3_000_000_000, 700), Some(&at(1_000_000_000, 100)));
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        assert_eq!(lines.len(), 2, "{text}");
        assert_eq!(lines[1][..5], ["q", "/a", "300", "0", "1.2M"]);
    }
}
