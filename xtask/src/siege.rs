//! Besieges daemons (`blkmq-siege`): the delivered one, whose tenant must not be disturbed, and mutants,
//! each of which lacks only one of its limits and must be caught.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::mutant;
use crate::skips;
use crate::steps::Steps;

/// # Errors
/// If the tenant was disturbed, or the daemon used or left behind more than it may.
pub(crate) fn run(steps: &mut Steps, seconds: u64, seed: u64, attack: Option<&str>) -> Result<()> {
    let program = steps.command_under_test()?;
    let besieger = steps.program("blkmq-siege")?;
    let only = attack.map_or_else(String::new, |attack| format!(" {attack}"));
    let again = format!("again: cargo xtask siege --seconds {seconds} --seed {seed}{only}");
    steps.time(&format!("siege of {seconds} s"), || {
        println!("    {again}");
        let mut command = besiege(&besieger, &program, seconds, seed);
        if let Some(attack) = attack {
            command.args(["--attack", attack]);
        }
        if seconds < SECONDS_JUDGED {
            // A siege this short runs beside other work of the machine, so of the latencies only
            // the longest is judged.
            command.arg("--lenient");
        }
        match verdict(skips::listed(&mut command)?)? {
            Verdict::Held => Ok(()),
            Verdict::Fell => bail!("the siege has found something; {again}"),
        }
    })
}

/// Besieges one mutant, or all of them, each by the attack that must find it.
///
/// # Errors
/// If a mutant is not caught, or cannot be built, or there is none of that name.
pub(crate) fn run_mutants(steps: &mut Steps, seed: u64, only: Option<&str>) -> Result<()> {
    let is_wanted = |mutant: &&Mutant| only.is_none_or(|only| only == mutant.name);
    let names: Vec<&str> = mutants().collect();
    ensure!(
        only.is_none_or(|only| names.contains(&only)),
        "there is no such mutant; there are {}",
        names.join(", ")
    );
    let (name, words) = HOLD_TIMER;
    if only.is_none_or(|only| only == name) {
        steps.time(&format!("mutant {name}: {}", mutant::what(name)?), || {
            mutant::must_fail(name, words)
        })?;
    }
    if !MUTANTS.iter().any(|mutant| is_wanted(&mutant)) {
        return Ok(());
    }
    let besieger = steps.program("blkmq-siege")?;
    // The same build without a mutant: what holds there and fails with a mutant was detected
    // because of the mutant.
    let control = steps.time("build without a mutant", || mutant::build(None, true))?;
    for mutant in MUTANTS.iter().filter(is_wanted) {
        let (name, what) = (mutant.name, mutant::what(mutant.name)?);
        let program = steps.time(&format!("build of mutant {name}"), || {
            mutant::build(Some(name), true)
        })?;
        let besiege = |program: &Path| {
            let mut command = besiege(&besieger, program, SECONDS_OF_A_MUTANT, seed);
            command.args(["--attack", mutant.attack, "--setting", mutant.setting]);
            if !mutant.is_slow {
                command.arg("--lenient");
            }
            verdict(&mut command)
        };
        let held = steps.time(&format!("{} without mutant {name}", mutant.attack), || {
            besiege(&control)
        })?;
        ensure!(
            matches!(held, Verdict::Held),
            "attack {} finds something without mutant {name}",
            mutant.attack
        );
        let verdict = steps.time(&format!("mutant {name}: {what}"), || besiege(&program))?;
        match verdict {
            Verdict::Fell => println!("    mutant {name}: caught"),
            Verdict::Held => bail!("mutant {name} ({what}) got through, from seed {seed}"),
        }
    }
    steps.print_summary();
    Ok(())
}

/// The names of all mutants that lack a limit.
pub(crate) fn mutants() -> impl Iterator<Item = &'static str> {
    MUTANTS.iter().map(|mutant| mutant.name).chain([HOLD_TIMER.0])
}

/// The result of a siege.
enum Verdict {
    Held,
    Fell,
}

/// A daemon that lacks a limit.
struct Mutant {
    /// The name of its patch.
    name: &'static str,
    /// The attack and the setting that must detect it.
    attack: &'static str,
    setting: &'static str,
    /// Only the tenant's latencies show it.
    is_slow: bool,
}

fn besiege(besieger: &Path, program: &Path, seconds: u64, seed: u64) -> Command {
    let mut command = Command::new(besieger);
    command.arg("--program").arg(program);
    command.args(["--seconds", &seconds.to_string(), "--seed", &seed.to_string()]);
    command
}

fn verdict(command: &mut Command) -> Result<Verdict> {
    let status = command.status().context("starting the siege")?;
    // As documented by `blkmq-siege --help`.
    match status.code() {
        Some(0) => Ok(Verdict::Held),
        Some(3) => Ok(Verdict::Fell),
        _ => bail!("the siege could not be laid: {status}"),
    }
}

const MUTANTS: [Mutant; 13] = [
    Mutant {
        name: "nbd_memory",
        attack: "unread",
        setting: "short-memory",
        is_slow: false,
    },
    Mutant {
        name: "silent_clients",
        attack: "crowd",
        setting: "ordinary",
        is_slow: false,
    },
    Mutant {
        name: "pace",
        attack: "crowd",
        setting: "ordinary",
        is_slow: true,
    },
    Mutant {
        name: "lookup_slices",
        attack: "status",
        setting: "ordinary",
        is_slow: true,
    },
    Mutant {
        name: "moved",
        attack: "unread",
        setting: "ordinary",
        is_slow: true,
    },
    Mutant {
        name: "descriptor_leak",
        attack: "truncated",
        setting: "ordinary",
        is_slow: false,
    },
    Mutant {
        name: "descriptors",
        attack: "descriptors",
        setting: "ordinary",
        is_slow: false,
    },
    Mutant {
        name: "log_waits",
        attack: "signals",
        setting: "log-unread",
        is_slow: false,
    },
    Mutant {
        name: "workers",
        attack: "slow",
        setting: "ordinary",
        is_slow: true,
    },
    Mutant {
        name: "inline_io",
        attack: "slow",
        setting: "ordinary",
        is_slow: true,
    },
    Mutant {
        name: "holds",
        attack: "late",
        setting: "ordinary",
        is_slow: false,
    },
    Mutant {
        name: "early_answers",
        attack: "servers",
        setting: "ordinary",
        is_slow: false,
    },
    Mutant {
        name: "late_looks",
        attack: "cut",
        setting: "ordinary",
        is_slow: false,
    },
];
/// A mutant that no attack meets in time, and the tests that must catch it: the simulator's drives hang for longer.
const HOLD_TIMER: (&str, &str) = ("hold_timer", "-p blkmq-sim --test scenarios slow_requests");
pub(crate) const SECONDS_DEFAULT: u64 = 300;
/// The time that CI can spare.
pub(crate) const SECONDS_SHORT: u64 = 14;
/// From this time on each attack has the windows that judging a p99 needs.
const SECONDS_JUDGED: u64 = 150;
/// For one attack: three windows.
const SECONDS_OF_A_MUTANT: u64 = 12;
pub(crate) const SEED_DEFAULT: u64 = 1;
