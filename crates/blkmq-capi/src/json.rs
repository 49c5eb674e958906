//! Statistics of groups as JSON, for `sys`.

use blkmq_engine::{Count, Engine, Error};
use serde_json::{Map, Value, json};

/// All groups: `{"groups": {"/a": {"read": {"ios": 1, ...}, "write": ..., "discard": ..., "flush": ...}}}`.
pub(crate) fn statistics(engine: &Engine) -> Result<String, Error> {
    let mut groups = Map::new();
    for path in engine.groups() {
        let of = engine.statistics(&path)?;
        let kinds = json!({
            "read": count(of.read),
            "write": count(of.write),
            "discard": count(of.discard),
            "flush": count(of.flush),
        });
        groups.insert(path, kinds);
    }
    Ok(json!({ "groups": groups }).to_string())
}

fn count(count: Count) -> Value {
    json!({
        "ios": count.ios,
        "bytes": count.bytes,
        "errors": count.errors,
        "wait_ns": count.wait_ns,
        "service_ns": count.service_ns,
    })
}
