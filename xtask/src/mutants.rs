//! Tests builds of the core with one small change each (`cargo-mutants`): an operator, a constant, a
//! removed body. A change that no test notices is a survivor; docs/reliability.md lists the known ones,
//! with the reason.

use anyhow::{Result, ensure};

use crate::place::{cargo, has_cargo_command, root, target_dir};
use crate::steps::Steps;

/// The files that are changed by default: each decides one rule on the way of a request by itself.
const FILES: [&str; 6] = ["merge", "split", "tag", "qos/tag_share", "qos/share", "flush"];

/// # Errors
/// If a file does not exist, or a change survives that `.cargo/mutants.toml` does not list.
pub(crate) fn run(steps: &mut Steps, files: &[String]) -> Result<()> {
    if !has_cargo_command("mutants") {
        steps.run(
            "installing cargo-mutants",
            &mut cargo("install --locked cargo-mutants"),
        )?;
    }
    let mut command =
        cargo("mutants --package blkmq-core --test-package blkmq-core --no-shuffle --timeout 300");
    command.arg("--output").arg(target_dir()?);
    let default = FILES.map(String::from);
    for name in if files.is_empty() { &default[..] } else { files } {
        let file = format!("crates/blkmq-core/src/{name}.rs");
        ensure!(root().join(&file).is_file(), "there is no {file}");
        command.arg("--file").arg(file);
    }
    steps.run("mutants of the core", &mut command)
}
