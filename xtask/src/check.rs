//! The quick check before a change is sent, `cargo xtask check`: commit messages, format, lints,
//! style, and the unit tests of the packages that changed. [`crate::test`] runs everything.

use std::collections::BTreeSet;
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, root};
use crate::steps::Steps;
use crate::{commits, test};

/// `range` names the commits whose messages are checked, as git writes ranges.
///
/// # Errors
/// The first step that fails.
pub(crate) fn run(steps: &mut Steps, range: Option<&str>) -> Result<()> {
    let base = base()?;
    let range = range.map_or_else(|| format!("{base}..HEAD"), str::to_owned);
    steps.time("commit messages", || commits::check(&range))?;
    test::check_formats(steps)?;
    steps.run("lints", &mut cargo(test::LINTS))?;
    steps.run("style", &mut cargo("test --quiet -p xtask"))?;
    let packages = packages(&changed_files(&base)?);
    if packages.is_empty() {
        println!("\n==> no other package has changed since {base}");
    } else {
        let name = format!("unit tests of {}", packages.join(", "));
        steps.run(&name, &mut unit_tests(&packages))?;
    }
    steps.print_summary();
    Ok(())
}

/// Where the present branch left the main one: changes since then are checked. On the main branch
/// itself, without a remote one, only what is not committed counts.
fn base() -> Result<String> {
    let found = ["origin/main", "main"]
        .iter()
        .find_map(|main| git(&["merge-base", main, "HEAD"]).ok());
    let base = found.map_or_else(|| git(&["rev-parse", "HEAD"]), Ok)?;
    Ok(base.trim().chars().take(SHORT).collect())
}

/// The files that differ from the commit, and those that git does not know yet.
fn changed_files(base: &str) -> Result<String> {
    let changed = git(&["diff", "--name-only", base])?;
    let new = git(&["ls-files", "--others", "--exclude-standard"])?;
    Ok(changed + &new)
}

/// The packages of these files, but for this one, whose tests always run.
fn packages(files: &str) -> Vec<String> {
    let names = files
        .lines()
        .filter_map(|file| file.strip_prefix("crates/")?.split('/').next());
    let names: BTreeSet<&str> = names.collect();
    let is_there = |name: &&str| root().join("crates").join(name).join("Cargo.toml").is_file();
    names.into_iter().filter(is_there).map(str::to_owned).collect()
}

fn unit_tests(packages: &[String]) -> Command {
    let mut tests = cargo("test --quiet --bins");
    let has_library = |name: &String| root().join("crates").join(name).join("src/lib.rs").is_file();
    // Cargo refuses to look for libraries where there are none.
    tests.args(packages.iter().any(has_library).then_some("--lib"));
    tests.args(packages.iter().flat_map(|name| ["-p", name]));
    tests.env(test::PROPERTY_SEED, "1");
    tests
}

/// What git prints.
///
/// # Errors
/// If it fails; the error has what it said.
pub(crate) fn git(words: &[&str]) -> Result<String> {
    let output = Command::new("git").args(words).current_dir(root()).output();
    let output = output.context("starting git")?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(
        output.status.success(),
        "git {}: {}",
        words.join(" "),
        said.trim()
    );
    Ok(String::from_utf8(output.stdout)?)
}

/// Digits of a commit's name.
const SHORT: usize = 12;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_those_of_changed_files() {
        let files = "README.md\ncrates/blkmq-sim/src/run.rs\ncrates/blkmq-sim/Cargo.toml\nxtask/src/main.rs\n\
                     crates/gone/src/lib.rs\ncrates/blkmq-core/src/lib.rs\n";
        assert_eq!(packages(files), ["blkmq-core", "blkmq-sim"]);
        assert!(packages("docs/README.md\n").is_empty());
    }

    #[test]
    fn libraries_are_tested_only_where_there_are_some() {
        let words = |name: &str| format!("{:?}", unit_tests(&[name.to_owned()]));
        assert!(words("blkmq-core").contains("--lib"));
        assert!(!words("blkmq-lab").contains("--lib"));
    }
}
