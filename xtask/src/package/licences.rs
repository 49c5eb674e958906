//! The licences of what the program contains: every crate that is linked into it, with the texts that come with it.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::place::cargo;

/// The list and the texts, each text once.
///
/// # Errors
/// Cargo fails, or a crate says nothing of its licence.
pub(super) fn collect() -> Result<String> {
    let done = cargo("metadata --format-version 1 --locked").output()?;
    ensure!(
        done.status.success(),
        "cargo metadata: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    let metadata: Value = serde_json::from_slice(&done.stdout)?;
    let all = metadata["packages"].as_array().context("packages")?;
    let linked = linked(&metadata, "blkmq")?;
    let (mut list, mut texts) = (String::new(), BTreeMap::<String, Vec<String>>::new());
    for package in all {
        let id = package["id"].as_str().unwrap_or_default();
        // Without a source it is of this workspace.
        if !linked.contains(id) || package["source"].is_null() {
            continue;
        }
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        let licence = package["license"].as_str();
        let licence = licence.with_context(|| format!("{name} {version} names no licence"))?;
        writeln!(
            list,
            "{name} {version}: {licence}, {}",
            text(&package["repository"])
        )?;
        let manifest = Path::new(package["manifest_path"].as_str().unwrap_or_default());
        for found in texts_beside(manifest) {
            texts.entry(found).or_default().push(format!("{name} {version}"));
        }
    }
    let mut out = format!("The program contains these works of others.\n\n{list}");
    for (text, names) in texts {
        write!(
            out,
            "\n{}\n{}\n\n{}\n",
            "=".repeat(72),
            names.join(", "),
            text.trim()
        )?;
    }
    Ok(out)
}

/// The crates that are linked into one, not those that only build or test it.
fn linked(metadata: &Value, name: &str) -> Result<BTreeSet<String>> {
    let nodes = metadata["resolve"]["nodes"].as_array().context("resolve")?;
    let by_id: BTreeMap<&str, &Value> = nodes
        .iter()
        .filter_map(|node| Some((node["id"].as_str()?, node)))
        .collect();
    let packages = metadata["packages"].as_array().context("packages")?;
    let start = packages.iter().find(|package| package["name"] == name);
    let mut open = vec![
        start
            .and_then(|package| package["id"].as_str())
            .context("the program")?,
    ];
    let mut seen = BTreeSet::new();
    while let Some(id) = open.pop() {
        if !seen.insert(id.to_owned()) {
            continue;
        }
        let dependencies = by_id.get(id).and_then(|node| node["deps"].as_array());
        for dependency in dependencies.into_iter().flatten() {
            let mut kinds = dependency["dep_kinds"].as_array().into_iter().flatten();
            if kinds.any(|kind| kind["kind"].is_null()) {
                open.extend(dependency["pkg"].as_str());
            }
        }
    }
    Ok(seen)
}

/// The texts of licences in a crate's directory.
fn texts_beside(manifest: &Path) -> Vec<String> {
    let files = manifest.parent().and_then(|dir| fs::read_dir(dir).ok());
    let is_licence = |name: &str| {
        ["LICENSE", "LICENCE", "COPYING", "NOTICE"]
            .iter()
            .any(|word| name.starts_with(word))
    };
    let found = files
        .into_iter()
        .flatten()
        .flatten()
        .filter(|file| is_licence(&file.file_name().to_string_lossy().to_uppercase()));
    found
        .filter_map(|file| fs::read_to_string(file.path()).ok())
        .collect()
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn crates_that_only_build_or_test_a_program_are_not_linked_into_it() {
        let metadata = json!({
            "packages": [{"name": "p", "id": "p"}],
            "resolve": {"nodes": [
                {"id": "p", "deps": [
                    {"pkg": "a", "dep_kinds": [{"kind": null}, {"kind": "dev"}]},
                    {"pkg": "t", "dep_kinds": [{"kind": "dev"}]},
                    {"pkg": "b", "dep_kinds": [{"kind": "build"}]},
                ]},
                {"id": "a", "deps": [{"pkg": "c", "dep_kinds": [{"kind": null}]}]},
                {"id": "c", "deps": []},
            ]}
        });
        let found = linked(&metadata, "p").unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), ["a", "c", "p"]);
    }
}
