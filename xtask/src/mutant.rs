//! Builds with one deliberate defect each: the patches in `lab/mutants`, which are applied to a copy of the
//! source. The delivered source has no line of them.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, root, target_dir};
use crate::steps::{Steps, run_shown};

/// Builds the command with a mutant in it, or without one.
///
/// `optimized` is for mutants that must be about as fast as the delivered daemon.
///
/// # Errors
/// If it cannot be built.
pub(crate) fn build(mutant: Option<&str>, optimized: bool) -> Result<PathBuf> {
    let (target, mut command) = with(mutant, optimized, "build --quiet -p blkmq")?;
    run_shown(&mut command)?;
    let built = target.join("debug/blkmq");
    // A copy, because the next mutant's build replaces it.
    let program = target.join(format!("blkmq-{}", mutant.unwrap_or("none")));
    fs::copy(&built, &program).with_context(|| format!("copying {}", built.display()))?;
    ensure!(program.is_file(), "{} was not built", program.display());
    Ok(program)
}

/// Runs the tests that must catch a mutant, on a build with it and on one without.
///
/// # Errors
/// If they cannot be built, do not pass without the mutant, or pass with it.
pub(crate) fn must_fail(mutant: &str, words: &str) -> Result<()> {
    let run = |mutant, more: &str| test(mutant, &format!("test --quiet {words} {more}"));
    ensure!(run(None, "")?, "cargo test {words} fails without a mutant");
    ensure!(
        run(Some(mutant), "--no-run")?,
        "cargo test {words} cannot be built with mutant {mutant}"
    );
    ensure!(
        !run(Some(mutant), "")?,
        "mutant {mutant} got through cargo test {words}"
    );
    println!("    mutant {mutant}: caught");
    Ok(())
}

/// What a mutant does: the first line of its patch.
///
/// # Errors
/// If it has no patch.
pub(crate) fn what(mutant: &str) -> Result<String> {
    let patch = patch(mutant);
    let text = fs::read_to_string(&patch).with_context(|| format!("reading {}", patch.display()))?;
    let line = text.lines().next().unwrap_or_default();
    Ok(line.trim_end_matches('.').to_owned())
}

/// The copy of the source with a mutant in it, or without one, in which cargo is to run. There is only one copy, of
/// which each call changes as few files as possible: the next build is short.
///
/// # Errors
/// If the source cannot be copied, or the patch does not apply.
pub(crate) fn source(mutant: Option<&str>) -> Result<PathBuf> {
    let tree = target_dir()?.join("mutants-source");
    let wanted = files()?;
    for file in present(&tree, Path::new(""))? {
        if !wanted.contains(&file) {
            fs::remove_file(tree.join(file))?;
        }
    }
    for file in &wanted {
        copy_if_different(&root().join(file), &tree.join(file))
            .with_context(|| format!("copying {}", file.display()))?;
    }
    mutant.map_or(Ok(()), |mutant| apply(mutant, &tree))?;
    Ok(tree)
}

/// Applies all mutants, and compiles those of the core at once, which takes some seconds: a patch that applies may
/// still be wrong.
///
/// # Errors
/// If a patch does not apply, or they do not compile.
pub(crate) fn check_all(steps: &mut Steps) -> Result<()> {
    steps.time("mutants of the core compile", || {
        let tree = source(None)?;
        all()?.iter().try_for_each(|mutant| apply(mutant, &tree))?;
        let mut check = cargo("check --quiet -p blkmq-core");
        // Never in the usual directory: cargo takes what is built of a copy for what is built of the original.
        check.env("CARGO_TARGET_DIR", target_dir()?.join("mutants"));
        let output = check.current_dir(&tree).output();
        let output = output.context("starting cargo")?;
        // Warnings are of no interest: defects leave variables unused.
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{said}");
        Ok(())
    })
}

/// The names of all mutants, in order.
fn all() -> Result<BTreeSet<String>> {
    let mut names = BTreeSet::new();
    for entry in fs::read_dir(root().join(DIRECTORY))? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str());
        names.insert(name.context("a patch has a name")?.to_owned());
    }
    Ok(names)
}

fn patch(mutant: &str) -> PathBuf {
    root().join(DIRECTORY).join(format!("{mutant}.patch"))
}

/// Applies a patch to a copy of the source.
fn apply(mutant: &str, tree: &Path) -> Result<()> {
    let mut git = Command::new("git");
    // One line around a change must be as it was: two patches may change neighbours.
    git.args(["apply", "-C1"]).arg(patch(mutant)).current_dir(tree);
    // The copy lies in a repository of which it is no part.
    git.env("GIT_CEILING_DIRECTORIES", tree.parent().unwrap_or(tree));
    run_shown(&mut git)
        .with_context(|| format!("the patch of mutant {mutant} no longer applies: change it, too"))
}

/// The files of the source, those that are not committed yet among them.
fn files() -> Result<BTreeSet<PathBuf>> {
    let mut git = Command::new("git");
    git.args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"]);
    let output = git.current_dir(root()).output().context("starting git")?;
    ensure!(
        output.status.success(),
        "git lists no files of {}",
        root().display()
    );
    let listed = String::from_utf8(output.stdout).context("names of files")?;
    let files = listed
        .split('\0')
        .filter(|name| !name.is_empty())
        .map(PathBuf::from);
    Ok(files.filter(|file| root().join(file).is_file()).collect())
}

/// The files below a directory of a copy.
fn present(tree: &Path, below: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let entries = match fs::read_dir(tree.join(below)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(found),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = below.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => found.extend(present(tree, &path)?),
            false => found.push(path),
        }
    }
    Ok(found)
}

fn copy_if_different(from: &Path, to: &Path) -> Result<()> {
    if fs::read(to).is_ok_and(|there| fs::read(from).is_ok_and(|wanted| wanted == there)) {
        return Ok(());
    }
    to.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::copy(from, to)?;
    Ok(())
}

/// Runs tests with a mutant in the tested code. Says whether they passed.
///
/// # Errors
/// If cargo cannot be started.
fn test(mutant: Option<&str>, words: &str) -> Result<bool> {
    let (_, mut command) = with(mutant, false, words)?;
    // Without this variable, the tests run the program that is built for them.
    let status = command.env_remove("BLKMQ_BIN").status();
    Ok(status.context("starting cargo")?.success())
}

/// A cargo command that builds with a mutant, and the directory that it builds in.
fn with(mutant: Option<&str>, optimized: bool, words: &str) -> Result<(PathBuf, Command)> {
    // Each in a directory of its own, so that neither build invalidates the other.
    let (name, level) = match optimized {
        true => ("mutants-optimized", "2"),
        false => ("mutants", "0"),
    };
    let target = target_dir()?.join(name);
    let mut command = cargo(words);
    command
        .current_dir(source(mutant)?)
        // This builds faster, and the build is not debugged.
        .env("CARGO_PROFILE_DEV_DEBUG", "0")
        .env("CARGO_PROFILE_DEV_OPT_LEVEL", level)
        .env("CARGO_TARGET_DIR", &target);
    Ok((target, command))
}

/// The directory with a patch for each mutant, which begins with a line that says what it does.
const DIRECTORY: &str = "lab/mutants";

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{crashes, siege};

    #[test]
    fn mutants_apply_to_the_source_and_say_what_they_do() {
        for mutant in all().unwrap() {
            let mut git = Command::new("git");
            git.args(["apply", "--check"])
                .arg(patch(&mutant))
                .current_dir(root());
            let output = git.output().unwrap();
            assert!(
                output.status.success(),
                "the patch of mutant {mutant} no longer applies: {}",
                String::from_utf8_lossy(&output.stderr)
            );
            let what = what(&mutant).unwrap();
            assert!(what.len() > 20, "{mutant}: {what:?}");
        }
    }

    #[test]
    fn mutants_with_patches_are_those_that_are_tried() {
        let tried = crashes::mutants().chain(siege::mutants()).map(str::to_owned);
        assert_eq!(all().unwrap(), tried.collect());
    }
}
