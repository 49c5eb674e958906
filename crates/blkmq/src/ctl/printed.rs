//! What `blkmq ctl` prints of an answer: JSON if that was asked for, else text for a reader.

use std::io::Write;

use anyhow::{Result, bail};
use serde_json::Value;

use super::table;
use crate::stdout::print;

/// Prints what has changed, or would with `--dry-run`, and notes for the user.
pub(super) fn print_steps(is_json: bool, done: Value, is_dry: bool) -> Result<()> {
    if is_json {
        return print_json(&done);
    }
    let texts = |key: &str| -> Vec<&str> {
        let texts = done[key].as_array().into_iter().flatten();
        texts.filter_map(Value::as_str).collect()
    };
    let printed = match (texts("steps").as_slice(), is_dry) {
        ([], _) => print("nothing differs\n"),
        (steps, true) => print(&format!("would {}\n", steps.join("\nwould "))),
        (steps, false) => print(&format!("{}\n", steps.join("\n"))),
    };
    printed?;
    let notes = texts("notes").into_iter();
    // Nobody may read them.
    notes.for_each(|note| drop(writeln!(std::io::stderr(), "note: {note}")));
    Ok(())
}

/// Prints an object, a line a field.
pub(super) fn print_record(is_json: bool, record: &Value) -> Result<()> {
    if is_json {
        return print_json(record);
    }
    let fields = record.as_object().into_iter().flatten();
    let lines = fields.map(|(key, value)| {
        let name = key.trim_end_matches("_ns").trim_end_matches("_s");
        format!("{name:<18} {}\n", table::with_unit(key, value))
    });
    print(&lines.collect::<String>())
}

/// Prints what a client needs, at each address.
pub(super) fn print_settings(is_json: bool, disk: &str, kind: &str, found: &Value) -> Result<()> {
    if is_json {
        return print_json(found);
    }
    let all = found.as_array().map_or(&[][..], Vec::as_slice);
    let text = |key: &str, one: &Value| one[key].as_str().unwrap_or_default().to_owned();
    match all {
        [] => bail!(
            "disk {disk}: no address of it is for {kind}: add an export, as in blkmq ctl add export \
             vhost-user=unix:/run/blkmq/{disk}.sock 'disks=[\"{disk}\"]'"
        ),
        [one] => print(&format!("{}\n", text("settings", one))),
        all => {
            let each = all
                .iter()
                .map(|one| format!("{}:\n{}\n", text("address", one), text("settings", one)));
            print(&each.collect::<Vec<_>>().join("\n"))
        }
    }
}

/// Prints who was told of a disk's size, and who has to be told otherwise.
pub(super) fn print_resized(is_json: bool, record: &Value) -> Result<()> {
    if is_json {
        return print_json(record);
    }
    let mut out = String::new();
    for key in ["before", "size"] {
        out += &format!("{key:<18} {}\n", table::with_unit(key, &record[key]));
    }
    for client in record["told"].as_array().into_iter().flatten() {
        out += &format!("{:<18} {}\n", "told", table::plain(client));
    }
    for client in record["not_told"].as_array().into_iter().flatten() {
        let (who, why) = (table::plain(&client["client"]), table::plain(&client["why"]));
        out += &format!("{:<18} {who}: {why}\n", "not told");
    }
    print(&out)
}

pub(super) fn print_json(value: &Value) -> Result<()> {
    print(&format!("{value:#}\n"))
}
