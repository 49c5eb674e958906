//! The steps of a chore as they are shown: announced, timed, and a skipped one with its reason.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::place::{cargo, target_dir};

/// The steps taken so far.
pub(crate) struct Steps {
    taken: Vec<(String, Outcome)>,
}

enum Outcome {
    Took(Duration),
    Skipped(String),
}

impl Steps {
    pub(crate) fn new() -> Steps {
        Steps { taken: Vec::new() }
    }

    /// Runs the command with its output shown.
    ///
    /// # Errors
    /// If it cannot be started or does not succeed: the step, the command and how it ended.
    pub(crate) fn run(&mut self, name: &str, command: &mut Command) -> Result<()> {
        self.time(name, || run_shown(command))
    }

    /// Runs `work` as one step.
    ///
    /// # Errors
    /// What `work` returns, with the step's name before it.
    pub(crate) fn time<T>(&mut self, name: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
        println!("\n==> {name}");
        let start = Instant::now();
        let result = work().with_context(|| format!("step `{name}` failed"))?;
        let took = start.elapsed();
        println!("    {name}: {:.1} s", took.as_secs_f64());
        self.taken.push((name.to_owned(), Outcome::Took(took)));
        Ok(result)
    }

    /// The `blkmq` under test: the one that `BLKMQ_BIN` names, otherwise a release build.
    ///
    /// # Errors
    /// If the command cannot be built.
    pub(crate) fn command_under_test(&mut self) -> Result<PathBuf> {
        match std::env::var_os("BLKMQ_BIN") {
            Some(program) => Ok(PathBuf::from(program)),
            None => self.program("blkmq"),
        }
    }

    /// The release build of one of the programs that the checks run, relative to its folder:
    /// `blkmq`, or `examples/NAME`.
    ///
    /// All of them are built together: separate builds would build the crates that they share
    /// again, with different features.
    ///
    /// # Errors
    /// If one of the programs cannot be built.
    pub(crate) fn program(&mut self, name: &str) -> Result<PathBuf> {
        let packages = "-p blkmq -p blkmq-lab -p blkmq-torture -p blkmq-bench";
        // Each is optimized once more when it is linked, so what no check runs is left out.
        let programs =
            "--bin blkmq --bin blkmq-lab --bin blkmq-forget --bin blkmq-siege --example in_process";
        self.run(
            "release build",
            &mut cargo(&format!("build --release {packages} {programs}")),
        )?;
        Ok(target_dir()?.join("release").join(name))
    }

    pub(crate) fn skip(&mut self, name: &str, reason: &str) {
        println!("\n==> {name}: SKIPPED: {reason}");
        self.taken
            .push((name.to_owned(), Outcome::Skipped(reason.to_owned())));
    }

    /// The skipped steps, as lines like those of the list of skipped tests: `name: reason`.
    pub(crate) fn skipped(&self) -> impl Iterator<Item = String> {
        self.taken.iter().filter_map(|(name, outcome)| match outcome {
            Outcome::Skipped(reason) => Some(format!("{name}: {reason}")),
            Outcome::Took(_) => None,
        })
    }

    /// Prints every step with its time, and the sum.
    pub(crate) fn print_summary(&self) {
        println!("\n==> steps so far");
        let mut total = Duration::ZERO;
        for (name, outcome) in &self.taken {
            match outcome {
                Outcome::Took(took) => {
                    total += *took;
                    println!("    {:>7.1} s  {name}", took.as_secs_f64());
                }
                Outcome::Skipped(reason) => println!("    skipped    {name}: {reason}"),
            }
        }
        println!("    {:>7.1} s  in all", total.as_secs_f64());
    }
}

/// A build that runs beside the steps, on the processor time that they leave. Its outcome does not count and its
/// output is not shown: the step that needs what it builds calls cargo again, which then has little to do.
pub(crate) struct BuildBeside(Child);

impl BuildBeside {
    /// # Errors
    /// If `nice` cannot be started.
    pub(crate) fn start(build: &Command) -> Result<Self> {
        let mut command = Command::new("nice");
        command
            .args(["-n", "19"])
            .arg(build.get_program())
            .args(build.get_args());
        for (name, value) in build.get_envs() {
            match value {
                Some(value) => command.env(name, value),
                None => command.env_remove(name),
            };
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        if let Some(dir) = build.get_current_dir() {
            command.current_dir(dir);
        }
        Ok(Self(command.spawn().context("starting `nice`")?))
    }

    /// Waits for its end, which lets the next call of cargo into the build directory.
    ///
    /// # Errors
    /// If it cannot be waited for.
    pub(crate) fn finish(mut self) -> Result<()> {
        self.0.wait().context("waiting for a build")?;
        Ok(())
    }
}

impl Drop for BuildBeside {
    /// A step has failed, if it still runs.
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs the command with its output shown, and prints nothing itself.
///
/// # Errors
/// If it cannot be started or does not succeed.
pub(crate) fn run_shown(command: &mut Command) -> Result<()> {
    let shown = show(command);
    let status = command.status().with_context(|| format!("starting `{shown}`"))?;
    if !status.success() {
        bail!("`{shown}`: {status}");
    }
    Ok(())
}

/// The command as a user would type it, with the variables that it sets.
fn show(command: &Command) -> String {
    let program = std::path::Path::new(command.get_program())
        .file_name()
        .unwrap_or(command.get_program());
    let set = command
        .get_envs()
        .filter_map(|(name, value)| Some((name, value?)));
    let variables = set.map(|(name, value)| format!("{}='{}'", name.display(), value.display()));
    let words = std::iter::once(program)
        .chain(command.get_args())
        .map(|word| word.display().to_string());
    variables.chain(words).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::{BuildBeside, Command, Steps, show};

    #[test]
    fn build_beside_has_the_words_variables_and_place_of_its_command() {
        let dir = std::env::temp_dir();
        let mut command = Command::new("sh");
        command
            .args(["-c", r#"test "$FROM/$PWD" = "here/$WANTED" || sleep 60"#])
            .env("FROM", "here")
            .env("WANTED", &dir)
            .current_dir(&dir);
        let start = std::time::Instant::now();
        BuildBeside::start(&command).unwrap().finish().unwrap();
        assert!(start.elapsed().as_secs() < 30, "it has others");
    }

    #[test]
    fn build_beside_ends_with_a_step_that_fails() {
        let build = BuildBeside::start(Command::new("sleep").arg("60")).unwrap();
        let start = std::time::Instant::now();
        drop(build);
        assert!(start.elapsed().as_secs() < 30, "it is waited for");
    }

    #[test]
    fn failing_command_fails_the_step_and_names_both() {
        let error = Steps::new()
            .run("the step", Command::new("false").arg("x"))
            .unwrap_err();
        let text = format!("{error:#}");
        assert!(
            text.contains("the step") && text.contains("`false x`") && text.contains('1'),
            "{text}"
        );
    }

    #[test]
    fn command_is_shown_as_one_would_type_it() {
        let mut command = Command::new("/usr/bin/env");
        command
            .arg("test")
            .env("RUSTFLAGS", "--cfg loom")
            .env_remove("OTHER");
        assert_eq!(show(&command), "RUSTFLAGS='--cfg loom' env test");
    }
}
