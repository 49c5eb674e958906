//! The crates of the workspace that are meant to be published: their order, and what each lacks.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::is_there;
use crate::place::cargo;

/// A crate that is meant to be published.
#[derive(Debug)]
pub(super) struct Crate {
    pub(super) name: String,
    pub(super) version: String,
    dir: PathBuf,
    metadata: Value,
}

/// All of them, each behind those that it depends on.
///
/// # Errors
/// Cargo fails, or they depend on each other in a circle.
pub(super) fn in_order() -> Result<Vec<Crate>> {
    let done = cargo("metadata --format-version 1 --no-deps --locked").output()?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "cargo metadata: {said}");
    let metadata: Value = serde_json::from_slice(&done.stdout)?;
    let packages = metadata["packages"].as_array().context("packages")?;
    order(
        packages
            .iter()
            .filter(|package| package["publish"].is_null())
            .map(Crate::new)
            .collect(),
    )
}

fn order(mut waiting: Vec<Crate>) -> Result<Vec<Crate>> {
    waiting.sort_by(|a, b| a.name.cmp(&b.name));
    let mut ordered: Vec<Crate> = Vec::new();
    while !waiting.is_empty() {
        let names: BTreeSet<String> = waiting.iter().map(|one| one.name.clone()).collect();
        let is_next = |one: &Crate| !one.links().any(|link| names.contains(text(&link["name"])));
        let next = waiting.iter().position(is_next);
        let next = next.with_context(|| format!("in a circle: {names:?}"))?;
        ordered.push(waiting.remove(next));
    }
    Ok(ordered)
}

impl Crate {
    fn new(metadata: &Value) -> Self {
        let manifest = Path::new(text(&metadata["manifest_path"]));
        Self {
            name: text(&metadata["name"]).to_owned(),
            version: text(&metadata["version"]).to_owned(),
            dir: manifest.parent().unwrap_or(manifest).to_owned(),
            metadata: metadata.clone(),
        }
    }

    /// What keeps it from being published behind `earlier` ones.
    pub(super) fn faults(&self, earlier: &[Self]) -> Vec<String> {
        let mut faults = Vec::new();
        for key in ["description", "documentation", "license", "rust_version"] {
            if text(&self.metadata[key]).is_empty() {
                faults.push(format!("{key} is missing"));
            }
        }
        for key in ["keywords", "categories"] {
            // crates.io's limits.
            let words = self.metadata[key].as_array().map_or(0, Vec::len);
            if !(1..=5).contains(&words) {
                faults.push(format!("{key}: {words}, 1 to 5 are needed"));
            }
        }
        let keywords = self.metadata["keywords"].as_array().into_iter().flatten();
        for word in keywords.map(text).filter(|word| word.len() > 20) {
            faults.push(format!("the keyword {word} has more than 20 characters"));
        }
        if self.metadata["metadata"]["docs"]["rs"].is_null() {
            faults.push("[package.metadata.docs.rs] is missing".to_owned());
        }
        let missing = FILES.iter().filter(|name| !is_there(&self.dir, name));
        faults.extend(missing.map(|name| format!("{name} is missing")));
        faults.extend(self.ours().filter_map(|link| self.fault_of(link, earlier)));
        faults
            .into_iter()
            .map(|fault| format!("{}: {fault}", self.name))
            .collect()
    }

    /// What is wrong with a dependency on a crate of the workspace.
    fn fault_of(&self, link: &Value, earlier: &[Self]) -> Option<String> {
        let (name, version) = (text(&link["name"]), text(&link["req"]));
        if link["kind"] == "dev" {
            // Without a version it is left out of the package; with one, it would have to be published first.
            let fault = format!("tests depend on {name} with a version: give the path alone");
            return (version != "*").then_some(fault);
        }
        match earlier.iter().find(|one| one.name == name) {
            None => Some(format!("depends on {name}, which is not published")),
            Some(one) if version != format!("^{}", one.version) => {
                Some(format!("depends on {name} {version}, not on {}", one.version))
            }
            Some(_) => None,
        }
    }

    /// What it depends on when it is used.
    fn links(&self) -> impl Iterator<Item = &Value> {
        self.ours().filter(|link| link["kind"] != "dev")
    }

    /// Dependencies on crates of the workspace.
    fn ours(&self) -> impl Iterator<Item = &Value> {
        let all = self.metadata["dependencies"].as_array().into_iter().flatten();
        all.filter(|link| !link["path"].is_null())
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The files that each package has.
pub(super) const FILES: [&str; 2] = ["LICENSE-APACHE", "LICENSE-MIT"];

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn one(name: &str, dependencies: Value) -> Crate {
        Crate::new(&json!({
            "name": name,
            "version": "1.2.0",
            "manifest_path": concat!(env!("CARGO_MANIFEST_DIR"), "/../Cargo.toml"),
            "description": "d", "documentation": "https://d", "license": "MIT", "rust_version": "1.95",
            "keywords": ["k"], "categories": ["c"],
            "metadata": {"docs": {"rs": {}}},
            "dependencies": dependencies,
        }))
    }

    fn link(name: &str, req: &str, kind: Option<&str>) -> Value {
        json!({"name": name, "req": req, "kind": kind, "path": "there"})
    }

    #[test]
    fn crates_come_behind_those_that_they_depend_on_and_circles_of_tests_do_not_count() {
        let all = vec![
            one("a", json!([link("c", "^1.2.0", None)])),
            one("b", json!([])),
            one(
                "c",
                json!([link("b", "^1.2.0", None), link("a", "*", Some("dev"))]),
            ),
        ];
        let order = order(all).unwrap();
        let names: Vec<&str> = order.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["b", "c", "a"]);
        for (at, one) in order.iter().enumerate() {
            assert!(
                one.faults(&order[..at]).is_empty(),
                "{:?}",
                one.faults(&order[..at])
            );
        }
        let circle = vec![
            one("a", json!([link("b", "^1.2.0", None)])),
            one("b", json!([link("a", "^1.2.0", None)])),
        ];
        assert!(super::order(circle).is_err());
    }

    #[test]
    fn each_fault_is_told_with_its_crate() {
        let earlier = [one("b", json!([]))];
        for (link, part) in [
            (link("b", "*", None), "a: depends on b *, not on 1.2.0"),
            (link("b", "^1.1.0", None), "a: depends on b ^1.1.0"),
            (
                link("x", "^1.2.0", None),
                "a: depends on x, which is not published",
            ),
            (
                link("b", "^1.2.0", Some("dev")),
                "a: tests depend on b with a version",
            ),
        ] {
            let faults = one("a", json!([link])).faults(&earlier);
            assert!(faults.len() == 1 && faults[0].starts_with(part), "{faults:?}");
        }
        let bare = json!({"name": "a", "version": "1", "keywords": ["a-keyword-that-is-too-long"]});
        let faults = Crate::new(&bare).faults(&[]);
        for part in [
            "description",
            "keyword a-",
            "categories: 0",
            "docs.rs",
            "LICENSE-MIT",
        ] {
            assert!(
                faults.iter().any(|fault| fault.contains(part)),
                "{part}: {faults:?}"
            );
        }
    }
}
