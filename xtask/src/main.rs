//! Decides which chore `cargo xtask NAME` runs; each chore has a file of its own.

mod args;
mod ceph;
mod crashes;
mod figures;
mod filesystems;
mod fio;
mod fuzz;
mod guest;
mod instructions;
mod loom;
mod mutant;
mod mutants;
mod path_loss;
mod place;
mod sanitize;
mod screens;
mod setup;
mod siege;
mod sim;
mod skips;
mod soak;
mod steps;
mod test;

use std::process::ExitCode;

use anyhow::bail;

use crate::args::Args;
use crate::steps::Steps;

fn main() -> ExitCode {
    match run(Args::from_command_line()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(mut args: Args) -> anyhow::Result<()> {
    let chore = args.positional().unwrap_or_default();
    let mut steps = Steps::new();
    match chore.as_str() {
        "test" => {
            let mode = if args.flag("--strict") {
                skips::Mode::Strict
            } else {
                skips::Mode::Listed
            };
            args.finish()?;
            test::run(&mut steps, mode)
        }
        "setup" => {
            args.finish()?;
            setup::run(&mut steps)
        }
        "instructions" => {
            let update = args.flag("--update");
            args.finish()?;
            instructions::run(&mut steps, update)
        }
        "figures" => figures::run(&args.rest()),
        "screens" => {
            args.finish()?;
            screens::run(&mut steps)
        }
        "loom" => {
            let depth = if args.flag("--deep") {
                loom::Depth::Deep
            } else {
                loom::Depth::Short
            };
            args.finish()?;
            loom::run(&mut steps, depth)
        }
        "sim" => {
            let seeds = args.number("--seeds")?.unwrap_or(sim::SEEDS_SHORT);
            args.finish()?;
            sim::run(&mut steps, seeds)
        }
        "fuzz" => {
            let seconds = args.number("--seconds")?.unwrap_or(fuzz::SECONDS_DEFAULT);
            let target = args.positional();
            args.finish()?;
            fuzz::run(&mut steps, seconds, target.as_deref())
        }
        "fio" => {
            let seconds = args.number("--seconds")?.unwrap_or(fio::SECONDS_DEFAULT);
            let rounds = args.number("--rounds")?.unwrap_or(fio::ROUNDS_DEFAULT);
            args.finish()?;
            fio::run(&mut steps, seconds, rounds)
        }
        "crashes" => {
            let crashes = args.number("--crashes")?;
            let seed = args.number("--seed")?.unwrap_or(crashes::SEED_DEFAULT);
            let mutants = args.flag("--mutants");
            let filesystems = !mutants && args.flag("--filesystems");
            let only = if mutants { args.positional() } else { None };
            args.finish()?;
            if mutants {
                let crashes = crashes.unwrap_or(crashes::CRASHES_OF_A_MUTANT);
                crashes::run_mutants(&mut steps, crashes, seed, only.as_deref())
            } else if filesystems {
                let crashes = crashes.unwrap_or(crashes::CRASHES_OF_FILESYSTEMS);
                crashes::run_filesystems(&mut steps, crashes, seed)
            } else {
                crashes::run(&mut steps, crashes.unwrap_or(crashes::CRASHES_DEFAULT), seed)
            }
        }
        "filesystems" => {
            let minutes = args.number("--minutes")?.unwrap_or(filesystems::MINUTES_DEFAULT);
            let xfstests = args.positional().map(Into::into);
            let tests = args.rest();
            let wish = filesystems::Wish {
                xfstests,
                minutes,
                tests,
            };
            filesystems::run(&mut steps, &wish)
        }
        "ceph" => {
            let (bluestore, cephx) = (args.flag("--bluestore"), args.flag("--cephx"));
            let (is_test, is_stop) = (args.flag("--test"), args.flag("--stop"));
            let images = args.number("--images")?;
            if args.flag("--bench") {
                let wish = ceph::Wish {
                    bluestore,
                    cephx,
                    ..ceph::Wish::default()
                };
                return ceph::bench(&mut steps, &wish, &args.rest());
            }
            let directory = args.positional().map(Into::into);
            args.finish()?;
            let wish = ceph::Wish {
                directory,
                bluestore,
                cephx,
            };
            if let Some(images) = images {
                return ceph::images(&mut steps, &wish, images);
            }
            match (is_test, is_stop) {
                (true, true) => bail!("--test ends the cluster by itself: leave --stop out"),
                (true, false) => ceph::test(&mut steps, &wish),
                (false, true) => ceph::stop(&wish),
                (false, false) => ceph::start(&mut steps, &wish),
            }
        }
        "siege" => {
            let seconds = args.number("--seconds")?;
            let seed = args.number("--seed")?.unwrap_or(siege::SEED_DEFAULT);
            let mutants = args.flag("--mutants");
            let only = args.positional();
            args.finish()?;
            if mutants {
                siege::run_mutants(&mut steps, seed, only.as_deref())
            } else {
                let seconds = seconds.unwrap_or(siege::SECONDS_DEFAULT);
                siege::run(&mut steps, seconds, seed, only.as_deref())
            }
        }
        "guest" => {
            let mutants = args.flag("--mutants");
            let short = !mutants && args.flag("--short");
            let only = if short { None } else { args.positional() };
            let mutant = if mutants { args.positional() } else { None };
            args.finish()?;
            if short {
                guest::run_short(&mut steps)
            } else if mutants {
                guest::run_mutants(&mut steps, only.as_deref(), mutant.as_deref())
            } else {
                guest::run(&mut steps, only.as_deref())
            }
        }
        // For cargo, which runs the guest's tests in this way.
        guest::BOOT => {
            let mut words = args.rest().into_iter();
            let program = words.next().unwrap_or_default();
            guest::boot(program.as_ref(), &words.collect::<Vec<_>>())
        }
        // In a guest, which has this program.
        guest::LOAD => guest::load(&args.rest()),
        "path-loss" => {
            let seconds = args.number("--seconds")?;
            let seed = args.number("--seed")?;
            args.finish()?;
            path_loss::run(&mut steps, seconds.unwrap_or(path_loss::SECONDS_DEFAULT), seed)
        }
        "mutants" => mutants::run(&mut steps, &args.rest()),
        "tsan" => {
            args.finish()?;
            sanitize::run(&mut steps, sanitize::Sanitizer::Thread)
        }
        "asan" => {
            args.finish()?;
            sanitize::run(&mut steps, sanitize::Sanitizer::Address)
        }
        "soak" => {
            let minutes = args.number("--minutes")?.unwrap_or(soak::MINUTES_DEFAULT);
            args.finish()?;
            soak::run(&mut steps, minutes)
        }
        "help" | "--help" | "-h" => {
            print!("{HELP}");
            Ok(())
        }
        "" => bail!("no chore was named\n\n{HELP}"),
        other => bail!("there is no chore `{other}`\n\n{HELP}"),
    }
}

const HELP: &str = "\
cargo xtask test [--strict]                 set up what the tests need, then every check and test; --strict (what CI runs): a skip fails
cargo xtask setup                           only the set-up: the Debian packages that the tests use
cargo xtask instructions [--update]         instructions per I/O by callgrind, against bench/instructions.toml
cargo xtask figures [REPORT.json ...]       take in reports of `blkmq bench --json`, and write the tables of figures anew
cargo xtask screens                         the screens of `blkmq top` in its document, taken anew
cargo xtask loom [--deep]                   model-check blkmq-sync: two preemptions, or four with --deep
cargo xtask sim [--seeds N]                 every simulator scenario with N seeds (default 1000)
cargo xtask fuzz [--seconds N] [TARGET]     fuzz one target, or each of them, for N seconds (default 60)
cargo xtask fio [--seconds N] [--rounds N]  the fio engine beside fio's own null engine (default 2 seconds, 5 rounds)
cargo xtask crashes [--crashes N] [--seed N]  kill the daemon on a filesystem that forgets, and look for what is durable (default 200)
cargo xtask crashes --filesystems [--crashes N] [--seed N]  the same below ext4 and XFS on a loop device (default 50); needs root
cargo xtask crashes --mutants [NAME]        the same on builds that lose data, each of which must be caught
cargo xtask siege [--seconds N] [--seed N] [ATTACK]  hostile clients and failing drives beside a tenant who must not notice (default 300 s)
cargo xtask siege --mutants [NAME]          the same on builds that lack one limit each, which must be caught
cargo xtask guest [NAME]                    in an emulated guest: polled, vhost-user, weights, ublk, ublk-kills, log-writes or flakey, or all; downloads 55 MB once
cargo xtask guest --short                   what `cargo xtask test` runs of it: vhost-user, 15 s
cargo xtask guest --mutants [NAME [MUTANT]]  log-writes and flakey on builds that lose data, each of which must be caught
cargo xtask filesystems [--minutes N] XFSTESTS [TEST ...]  fsx (default 10 minutes) and xfstests' quick group on disks that are files
cargo xtask ceph [--bluestore] [--cephx] [DIRECTORY]  start a Ceph cluster on the loopback and leave it running
cargo xtask ceph --stop [DIRECTORY]         end it and remove its files
cargo xtask ceph --test [DIRECTORY]         every test that needs a cluster, on two kinds of one, each ended afterwards
cargo xtask ceph --images N [DIRECTORY]     threads, memory and descriptors of a daemon with N images of two clusters
cargo xtask ceph --bench [OPTION ...]       `blkmq bench rbd` with these options, on two clusters
cargo xtask path-loss [--seconds N] [--seed N]  cut and restore links between two hosts under verified load (default 300 s); needs root
cargo xtask mutants [FILE ...]              the core's tests on builds with one small change each; FILE: merge, split ... of crates/blkmq-core/src
cargo xtask tsan                            the threaded crates' tests under ThreadSanitizer
cargo xtask asan                            the same under AddressSanitizer
cargo xtask soak [--minutes N]              simulator, properties and real clients again and again (default 30 minutes)
";
