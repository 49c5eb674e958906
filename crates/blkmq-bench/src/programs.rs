//! The programs that a run has started, with their versions and command lines, and settings of the kernel that it has
//! measured under. `server` and `fio` note them where they start one, `output` writes them into the report.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::Serialize;

/// A program, or a part of the kernel, as a report has it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Program {
    /// The program's name.
    pub name: String,
    /// The first line of its `--version`; empty if it has none.
    pub version: String,
    /// How it was started, files without their directories; each form once, at most [`COMMANDS_MAX`].
    pub commands: Vec<String>,
}

/// Notes that a command is about to be started.
pub(crate) fn note(command: &Command) {
    let words: Vec<String> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| plain(&word.to_string_lossy()))
        .collect();
    let mut noted = noted();
    let program = noted.entry(words[0].clone()).or_insert_with(|| Program {
        name: words[0].clone(),
        version: version(command),
        commands: Vec::new(),
    });
    add(program, words.join(" "));
}

/// Notes a setting of something that is no program: its name, and what is set.
pub(crate) fn note_setting(name: &str, setting: String) {
    let mut noted = noted();
    let program = noted.entry(name.to_owned()).or_insert_with(|| Program {
        name: name.to_owned(),
        ..Program::default()
    });
    add(program, setting);
}

/// All that were noted, by name.
pub(crate) fn known() -> Vec<Program> {
    noted().values().cloned().collect()
}

fn add(program: &mut Program, command: String) {
    if program.commands.len() < COMMANDS_MAX && !program.commands.contains(&command) {
        program.commands.push(command);
    }
}

fn noted() -> MutexGuard<'static, BTreeMap<String, Program>> {
    static NOTED: Mutex<BTreeMap<String, Program>> = Mutex::new(BTreeMap::new());
    NOTED.lock().unwrap_or_else(PoisonError::into_inner)
}

fn version(command: &Command) -> String {
    let mut asked = Command::new(command.get_program());
    let output = asked.arg("--version").stdin(Stdio::null()).output();
    let said = output.map(|output| output.stdout).unwrap_or_default();
    let said = String::from_utf8_lossy(&said);
    said.lines().next().unwrap_or_default().to_owned()
}

/// A word with the names of files alone: directories differ from visit to visit.
fn plain(word: &str) -> String {
    let mut plain = String::new();
    for piece in word.split_inclusive([':', '=', ',']) {
        match piece.rsplit_once('/') {
            Some((dirs, name)) if dirs.is_empty() || dirs.starts_with('/') && !dirs.starts_with("//") => {
                plain += name
            }
            _ => plain += piece,
        }
    }
    plain
}

/// More forms than any bench has sides.
pub const COMMANDS_MAX: usize = 32;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_noted_once_with_each_form_of_its_command() {
        for dir in ["/tmp/a-1", "/tmp/a-2"] {
            let mut command = Command::new("/usr/bin/env");
            note(
                command
                    .arg(format!("--chdir={dir}/s"))
                    .arg("nbd+unix:///x?socket=/tmp/s"),
            );
        }
        note(Command::new("env").arg("other"));
        note_setting("a-setting", "slice_idle=8".into());
        let known = known();
        let env = known.iter().find(|program| program.name == "env").unwrap();
        assert_eq!(
            env.commands,
            ["env --chdir=s nbd+unix:///x?socket=s", "env other"]
        );
        assert!(env.version.starts_with("env "), "{}", env.version);
        assert!(known.iter().any(|program| program.commands == ["slice_idle=8"]));
    }
}
