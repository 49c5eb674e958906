//! A release as far as this machine: which crates would be published, in which order, and whether each is complete.
//! With `--make`, also their packages, the notes and a tag, all local; with `--compare`, what is stable beside another
//! revision. Nothing is ever published or pushed.

mod crates;

use std::fs;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, has_cargo_command, root, target_dir};
use crate::steps::{Steps, run_shown};
use crates::Crate;

/// Checks every crate that is meant to be published. With `is_made`, makes packages, notes and a tag. Then what is
/// stable is compared with the version before; with a `revision`, it is compared with that instead.
///
/// # Errors
/// What keeps a crate from being published, all at once; or a step fails.
pub(crate) fn run(steps: &mut Steps, is_made: bool, revision: Option<&str>) -> Result<()> {
    let order = steps.time("crates to publish", check)?;
    steps.time("packages, as Cargo makes them", || pack(&order))?;
    if is_made || revision.is_some() {
        compare(steps, &order, revision)?;
    }
    if is_made {
        make(steps, &order)?;
    }
    Ok(())
}

/// Makes the packages, without a build of what is in them; Cargo has nothing to say about them.
fn pack(order: &[Crate]) -> Result<()> {
    // All that they need was downloaded for the present build.
    let mut command = cargo("package --no-verify --allow-dirty --offline");
    let done = command.args(selection(order).split(' ')).output();
    let done = done.context("cargo package")?;
    let said = String::from_utf8_lossy(&done.stderr);
    ensure!(
        done.status.success() && !said.contains("warning:"),
        "cargo package:\n{said}"
    );
    for one in order {
        let package = target_dir()?.join("package");
        let package = package.join(format!("{}-{}.crate", one.name, one.version));
        ensure!(package.is_file(), "cargo package made no {}", package.display());
    }
    Ok(())
}

/// Compares what is stable with `revision`, or else with the version before, by the rules of semantic versioning.
fn compare(steps: &mut Steps, order: &[Crate], revision: Option<&str>) -> Result<()> {
    const STEP: &str = "semantic versioning";
    let version = format!("v{}", order.last().context("there are crates")?.version);
    let tags = output("git", &["tag", "--list", "v*", "--sort=-v:refname"])?;
    let Some(before) = revision.or_else(|| tags.lines().find(|tag| *tag != version)) else {
        steps.skip(STEP, "there is no version before this one");
        return Ok(());
    };
    if !has_cargo_command("semver-checks") {
        steps.skip(
            STEP,
            "cargo-semver-checks is not installed; run: cargo install cargo-semver-checks",
        );
        return Ok(());
    }
    // The other crates may change with every version.
    let command = format!("semver-checks -p blkmq-engine --baseline-rev {before}");
    steps.run(STEP, &mut cargo(&command))
}

/// The crates, for a command of Cargo's.
fn selection(order: &[Crate]) -> String {
    let names: Vec<String> = order.iter().map(|one| format!("-p {}", one.name)).collect();
    names.join(" ")
}

/// Checks the crates, and prints them in the order in which they would be published.
fn check() -> Result<Vec<Crate>> {
    let order = crates::in_order()?;
    let mut faults = Vec::new();
    for (at, one) in order.iter().enumerate() {
        println!("    {:>2}. {} {}", at + 1, one.name, one.version);
        faults.extend(one.faults(&order[..at]));
        faults.extend(missing_files(one)?);
    }
    ensure!(
        faults.is_empty(),
        "not fit for a registry:\n    {}",
        faults.join("\n    ")
    );
    Ok(order)
}

/// What a package of the crate lacks.
fn missing_files(one: &Crate) -> Result<Vec<String>> {
    let mut list = cargo(&format!("package --list --allow-dirty -p {}", one.name));
    let listed = list.output().context("cargo package")?;
    ensure!(
        listed.status.success(),
        "cargo package --list -p {}: {}",
        one.name,
        String::from_utf8_lossy(&listed.stderr)
    );
    let files = String::from_utf8(listed.stdout)?;
    let has = |name: &str| files.lines().any(|file| file == name);
    let missing = crates::FILES.iter().filter(|name| !has(name));
    Ok(missing
        .map(|name| format!("{}: the package has no {name}", one.name))
        .collect())
}

fn make(steps: &mut Steps, order: &[Crate]) -> Result<()> {
    let version = &order.last().context("there are crates")?.version;
    let tag = format!("v{version}");
    let changed = output("git", &["status", "--porcelain"])?;
    ensure!(
        changed.is_empty(),
        "files differ from the last commit: commit them first\n{changed}"
    );
    let tags = output("git", &["tag", "--list", &tag])?;
    ensure!(
        tags.is_empty(),
        "the tag {tag} is there: raise the version, or remove the tag"
    );
    let notes = notes(&fs::read_to_string(root().join("CHANGELOG.md"))?, version)?;
    steps.run(
        "packages that build",
        &mut cargo(&format!("package {}", selection(order))),
    )?;
    let place = target_dir()?.join(format!("release-notes-{version}.md"));
    fs::write(&place, &notes)?;
    let mut command = Command::new("git");
    command.args(["tag", "--annotate", &tag, "--file"]).arg(&place);
    run_shown(command.current_dir(root()))?;
    println!(
        "    packages: {}\n    notes: {}\n    tag: {tag}, not pushed",
        target_dir()?.join("package").display(),
        place.display()
    );
    Ok(())
}

/// The part of the changes that is about this version.
fn notes(changes: &str, version: &str) -> Result<String> {
    let mut parts = changes.split("\n## ").skip(1);
    let newest = parts.next().context("CHANGELOG.md has no version")?;
    let (heading, text) = newest.split_once('\n').unwrap_or((newest, ""));
    ensure!(
        heading.split(' ').next() == Some(version),
        "the first part of CHANGELOG.md is `{heading}`: name it `{version} (DATE)`, or set the version of the workspace"
    );
    Ok(format!("blkmq {heading}\n\n{}\n", text.trim()))
}

fn output(program: &str, words: &[&str]) -> Result<String> {
    let done = Command::new(program).args(words).current_dir(root()).output();
    let done = done.with_context(|| program.to_owned())?;
    ensure!(done.status.success(), "{program} {}: it failed", words.join(" "));
    Ok(String::from_utf8(done.stdout)?.trim().to_owned())
}

/// Whether a file or a link is at a place in a crate.
fn is_there(dir: &Path, name: &str) -> bool {
    dir.join(name).is_file()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notes_are_those_of_the_version_alone() {
        let changes = "# Changes\n\n## 0.2.0 (today)\n\nNew:\n- a\n\n## 0.1.0\n\n- b\n";
        assert_eq!(
            notes(changes, "0.2.0").unwrap(),
            "blkmq 0.2.0 (today)\n\nNew:\n- a\n"
        );
        let error = notes(changes, "0.3.0").unwrap_err().to_string();
        assert!(
            error.contains("`0.2.0 (today)`") && error.contains("0.3.0"),
            "{error}"
        );
    }
}
