//! Runs the fuzz targets: they search for new inputs on demand, and replay the known ones in every test
//! run.
//!
//! `fuzz/` is a workspace of its own, so that its dependencies are not needed to build the project.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::place::{cargo, has_cargo_command, target_dir};
use crate::steps::Steps;

/// Searches with one target, or with each in turn, for `seconds` each.
///
/// # Errors
/// If a target finds an input that fails; cargo-fuzz prints where it was saved.
pub(crate) fn run(steps: &mut Steps, seconds: u64, target: Option<&str>) -> Result<()> {
    if !has_cargo_command("fuzz") {
        steps.run("installing cargo-fuzz", &mut cargo("install --locked cargo-fuzz"))?;
    }
    let known = targets()?;
    let chosen: Vec<String> = match target {
        Some(name) => {
            ensure!(
                known.iter().any(|known| known == name),
                "no fuzz target `{name}`; there are: {}",
                known.join(", ")
            );
            vec![name.to_owned()]
        }
        None => known,
    };
    for name in chosen {
        // Inputs that are found are stored in the build directory; the corpus in the tree is chosen
        // by hand.
        let found = target_dir()?.join("fuzz-found").join(&name);
        std::fs::create_dir_all(&found).with_context(|| format!("making {}", found.display()))?;
        let mut command = unstable(cargo("fuzz run"));
        command.arg(&name).arg(found).arg(format!("fuzz/corpus/{name}"));
        command.args(["--", &format!("-max_total_time={seconds}")]);
        steps.run(&format!("fuzz {name}, {seconds} s"), &mut command)?;
    }
    Ok(())
}

/// Runs every target's body on its corpus, with the stable compiler and without libFuzzer:
/// `fuzz/src/corpus.rs`.
///
/// # Errors
/// If an input of the corpus fails.
pub(crate) fn replay(steps: &mut Steps) -> Result<()> {
    // The library's tests, and the seeds, which would not compile one day otherwise; all would have every target linked.
    let mut command = cargo("test --manifest-path fuzz/Cargo.toml --lib --example seeds");
    // In the project's own directory, where most of it is built anyway.
    steps.run("fuzz corpus", command.env("CARGO_TARGET_DIR", target_dir()?))
}

fn targets() -> Result<Vec<String>> {
    let output = unstable(cargo("fuzz list"))
        .output()
        .context("starting cargo-fuzz")?;
    ensure!(
        output.status.success(),
        "cargo fuzz list: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let names = String::from_utf8(output.stdout).context("the list of fuzz targets")?;
    let names: Vec<String> = names.split_whitespace().map(str::to_owned).collect();
    ensure!(!names.is_empty(), "fuzz/ has no targets");
    Ok(names)
}

/// cargo-fuzz needs the compiler's sanitizer flags, which the stable compiler offers only with this
/// variable.
fn unstable(mut command: Command) -> Command {
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

pub(crate) const SECONDS_DEFAULT: u64 = 60;
