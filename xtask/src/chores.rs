//! The chores: which exist, with which options, and which file does each.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Parser, Subcommand};

use crate::steps::Steps;
use crate::{
    ceph, check, crashes, figures, filesystems, fio, fuzz, guest, instructions, loom, mutants, package,
    path_loss, release, sanitize, screens, setup, siege, sim, skips, soak, test,
};

/// The project's own chores: test set-up, tests, heavy checks
#[derive(Debug, Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    disable_help_subcommand = false
)]
pub(crate) struct Command {
    #[command(subcommand)]
    pub(crate) chore: Chore,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Chore {
    /// Set up what the tests need, then run every check and test
    Test {
        /// A skip fails; what CI runs
        #[arg(long)]
        strict: bool,
    },
    /// Check quickly what changed: commit messages, format, lints, style, unit tests; under 3 minutes
    Check {
        /// Commits whose messages are checked [default: those since the main branch]
        #[arg(long, value_name = "RANGE")]
        commits: Option<String>,
    },
    /// Only install the Debian packages that the tests use
    Setup,
    /// Count instructions per I/O with callgrind, and compare with bench/instructions.toml
    Instructions {
        /// Record the counts instead
        #[arg(long)]
        update: bool,
    },
    /// Add reports of `blkmq-lab bench --json`, and rewrite the tables of figures
    Figures(figures::Wish),
    /// Rewrite the screens of `blkmq top` in its document
    Screens,
    /// Model-check blkmq-sync with two preemptions
    Loom {
        /// Use four preemptions
        #[arg(long)]
        deep: bool,
    },
    /// Check the crates that are meant to be published, and print their order; nothing is ever published
    Release {
        /// Make their packages, the notes and a tag as well, all on this machine
        #[arg(long)]
        make: bool,
        /// Compare what is stable with this commit, branch or tag, by cargo-semver-checks
        #[arg(long, value_name = "REVISION")]
        compare: Option<String>,
    },
    /// Make a Debian package and a tarball in the build directory
    Package {
        /// Then check the package, and install, upgrade, remove and purge it in a Debian of its own; needs root
        #[arg(long)]
        test: bool,
        /// Then run it under systemd in a Debian of its own, with this many upgrades under load; needs root
        #[arg(long, value_name = "UPGRADES", num_args = 0..=1, default_missing_value = "3")]
        systemd: Option<u32>,
        /// Also make a container's image of a static build, and run it in runc; needs root
        #[arg(long)]
        image: bool,
    },
    /// Run every simulator scenario
    Sim {
        #[arg(long, value_name = "N", default_value_t = sim::SEEDS_SHORT)]
        seeds: u64,
    },
    /// Fuzz one target, or each of them
    Fuzz {
        #[arg(long, value_name = "N", default_value_t = fuzz::SECONDS_DEFAULT)]
        seconds: u64,
        target: Option<String>,
    },
    /// Compare the fio engine with fio's own null engine
    Fio {
        #[arg(long, value_name = "N", default_value_t = fio::SECONDS_DEFAULT)]
        seconds: u64,
        #[arg(long, value_name = "N", default_value_t = fio::ROUNDS_DEFAULT)]
        rounds: u64,
    },
    /// Kill the daemon on a filesystem that loses unsynced data, and check what is durable
    Crashes(Crashes),
    /// Attack the daemon with hostile clients and failing drives beside a tenant that must not
    /// notice
    Siege(Siege),
    /// Run all tests in an emulated guest, or one of them; downloads 55 MB once
    Guest(Guest),
    /// Boot a guest for cargo, which runs the guest's tests with this
    #[command(name = guest::BOOT, hide = true)]
    GuestBoot {
        name: String,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Load the disk, in a guest that has this program
    #[command(name = guest::LOAD, hide = true)]
    GuestLoad {
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        words: Vec<String>,
    },
    /// Run fsx and xfstests' quick group on disks that are files
    Filesystems {
        /// Minutes that fsx runs
        #[arg(long, value_name = "N", default_value_t = filesystems::MINUTES_DEFAULT)]
        minutes: u64,
        /// Directory where xfstests are built
        xfstests: Option<PathBuf>,
        /// Run only these tests
        #[arg(value_name = "TEST")]
        tests: Vec<String>,
    },
    /// Start a Ceph cluster on the loopback and leave it running
    Ceph(Ceph),
    /// Cut and restore links between two hosts under verified load; needs root
    PathLoss {
        #[arg(long, value_name = "N", default_value_t = path_loss::SECONDS_DEFAULT)]
        seconds: u64,
        #[arg(long, value_name = "N")]
        seed: Option<u64>,
    },
    /// Run the core's tests on builds with one small change each
    Mutants {
        /// Files of crates/blkmq-core/src, such as merge or split
        #[arg(value_name = "FILE")]
        files: Vec<String>,
    },
    /// Run the threaded crates' tests under ThreadSanitizer
    Tsan,
    /// The same under AddressSanitizer
    Asan,
    /// Repeat the simulator, the property tests and real clients
    Soak {
        #[arg(long, value_name = "N", default_value_t = soak::MINUTES_DEFAULT)]
        minutes: u64,
    },
}

#[derive(Debug, Args)]
pub(crate) struct Crashes {
    /// [default: 200; 50 with --filesystems]
    #[arg(long, value_name = "N")]
    crashes: Option<u64>,
    #[arg(long, value_name = "N", default_value_t = crashes::SEED_DEFAULT)]
    seed: u64,
    /// Use disks with ext4 or XFS on them, on a loop device; needs root
    #[arg(long, conflicts_with = "mutants")]
    filesystems: bool,
    /// Have direct I/O take whole blocks of 4096 bytes only, so that small writes change them
    #[arg(long, conflicts_with_all = ["mutants", "filesystems"])]
    blocks: bool,
    /// Have the disks encrypted; needs cryptsetup
    #[arg(long, conflicts_with_all = ["mutants", "filesystems", "blocks"])]
    encrypted: bool,
    /// Have the disks in qcow2 images, with snapshots meanwhile; needs qemu-img
    #[arg(long, conflicts_with_all = ["mutants", "filesystems", "blocks", "encrypted"])]
    images: bool,
    /// Use builds that lose data, each of which must be caught
    #[arg(long)]
    mutants: bool,
    /// Only the mutant with this name
    #[arg(requires = "mutants")]
    name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Siege {
    #[arg(long, value_name = "N", default_value_t = siege::SECONDS_DEFAULT, conflicts_with = "mutants")]
    seconds: u64,
    #[arg(long, value_name = "N", default_value_t = siege::SEED_DEFAULT)]
    seed: u64,
    /// Use builds that lack one limit each, which must be caught
    #[arg(long)]
    mutants: bool,
    /// Only this attack, or this mutant
    name: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Guest {
    /// Only the part that `test` runs: vhost-user, 15 s
    #[arg(long, conflicts_with_all = ["mutants", "name"])]
    short: bool,
    /// Run log-writes and flakey on builds that lose data, each of which must be caught
    #[arg(long)]
    mutants: bool,
    /// polled, hosts, dm-crypt, libvirt, vhost-user, weights, nbd-client, nfs, ublk, ublk-kills, ublk-failures, log-writes or flakey
    name: Option<String>,
    #[arg(requires = "mutants")]
    mutant: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct Ceph {
    /// Use an OSD whose store survives it
    #[arg(long)]
    bluestore: bool,
    /// Require clients to show a key
    #[arg(long)]
    cephx: bool,
    /// Seconds after which it forgets a client that says nothing [default: 10]
    #[arg(long, value_name = "N")]
    watch: Option<u64>,
    /// End the cluster and remove its files
    #[arg(long, group = "what")]
    stop: bool,
    /// Run every test that needs a cluster, on two kinds of clusters, which are ended afterwards
    #[arg(long, group = "what")]
    test: bool,
    /// Report threads, memory and descriptors of a daemon with so many images of two clusters
    #[arg(long, value_name = "N", group = "what")]
    images: Option<u64>,
    /// Run `blkmq-lab bench rbd` with these options, on two clusters
    #[arg(long, value_name = "OPTION", num_args = 0.., allow_hyphen_values = true, group = "what")]
    bench: Option<Vec<String>>,
    /// [default: ceph, below the build directory]
    directory: Option<PathBuf>,
}

impl Chore {
    /// # Errors
    /// The chore's error.
    pub(crate) fn run(self, steps: &mut Steps) -> Result<()> {
        match self {
            Self::Test { strict: true } => test::run(steps, skips::Mode::Strict),
            Self::Test { strict: false } => test::run(steps, skips::Mode::Listed),
            Self::Check { commits } => check::run(steps, commits.as_deref()),
            Self::Setup => setup::run(steps),
            Self::Instructions { update } => instructions::run(steps, update),
            Self::Figures(wish) => figures::run(&wish),
            Self::Screens => screens::run(steps),
            Self::Loom { deep: true } => loom::run(steps, loom::Depth::Deep),
            Self::Loom { deep: false } => loom::run(steps, loom::Depth::Short),
            Self::Release { make, compare } => release::run(steps, make, compare.as_deref()),
            Self::Package { test, systemd, image } => package::run(steps, test, systemd, image),
            Self::Sim { seeds } => sim::run(steps, seeds),
            Self::Fuzz { seconds, target } => fuzz::run(steps, seconds, target.as_deref()),
            Self::Fio { seconds, rounds } => fio::run(steps, seconds, rounds),
            Self::Crashes(crashes) => crashes.run(steps),
            Self::Siege(siege) if siege.mutants => {
                siege::run_mutants(steps, siege.seed, siege.name.as_deref())
            }
            Self::Siege(siege) => siege::run(steps, siege.seconds, siege.seed, siege.name.as_deref()),
            Self::Guest(guest) => guest.run(steps),
            Self::GuestBoot { name, program, words } => guest::boot(&name, &program, &words),
            Self::GuestLoad { words } => guest::load(&words),
            Self::Filesystems {
                minutes,
                xfstests,
                tests,
            } => {
                let wish = filesystems::Wish {
                    xfstests,
                    minutes,
                    tests,
                };
                filesystems::run(steps, &wish)
            }
            Self::Ceph(ceph) => ceph.run(steps),
            Self::PathLoss { seconds, seed } => path_loss::run(steps, seconds, seed),
            Self::Mutants { files } => mutants::run(steps, &files),
            Self::Tsan => sanitize::run(steps, sanitize::Sanitizer::Thread),
            Self::Asan => sanitize::run(steps, sanitize::Sanitizer::Address),
            Self::Soak { minutes } => soak::run(steps, minutes),
        }
    }
}

impl Crashes {
    fn run(self, steps: &mut Steps) -> Result<()> {
        let crashes = |default| self.crashes.unwrap_or(default);
        if self.mutants {
            let crashes = crashes(crashes::CRASHES_OF_A_MUTANT);
            crashes::run_mutants(steps, crashes, self.seed, self.name.as_deref())
        } else if self.filesystems {
            crashes::run_filesystems(steps, crashes(crashes::CRASHES_OF_FILESYSTEMS), self.seed)
        } else if self.blocks {
            crashes::run_blocks(steps, crashes(crashes::CRASHES_DEFAULT), self.seed)
        } else if self.encrypted {
            crashes::run_encrypted(steps, crashes(crashes::CRASHES_DEFAULT), self.seed)
        } else if self.images {
            crashes::run_images(steps, crashes(crashes::CRASHES_DEFAULT), self.seed)
        } else {
            crashes::run(steps, crashes(crashes::CRASHES_DEFAULT), self.seed)
        }
    }
}

impl Guest {
    fn run(self, steps: &mut Steps) -> Result<()> {
        let (name, mutant) = (self.name.as_deref(), self.mutant.as_deref());
        if self.short {
            guest::run_short(steps)
        } else if self.mutants {
            guest::run_mutants(steps, name, mutant)
        } else {
            guest::run(steps, name)
        }
    }
}

impl Ceph {
    fn run(self, steps: &mut Steps) -> Result<()> {
        let wish = ceph::Wish {
            directory: self.directory,
            bluestore: self.bluestore,
            cephx: self.cephx,
            watch_s: self.watch,
        };
        match (self.images, self.bench) {
            (Some(images), _) => ceph::images(steps, &wish, images),
            (_, Some(words)) => ceph::bench(steps, &wish, &words),
            _ if self.test => ceph::test(steps, &wish),
            _ if self.stop => ceph::stop(&wish),
            _ => ceph::start(steps, &wish),
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(line: &str) -> Result<Chore, clap::Error> {
        let words = ["cargo xtask"].into_iter().chain(line.split_whitespace());
        Command::try_parse_from(words).map(|command| command.chore)
    }

    #[test]
    fn options_may_stand_before_or_after_the_name() {
        Command::command().debug_assert();
        for line in ["fuzz --seconds 5 nbd", "fuzz nbd --seconds 5"] {
            let chore = parse(line).unwrap();
            assert!(
                matches!(&chore, Chore::Fuzz { seconds: 5, target: Some(name) } if name == "nbd"),
                "{chore:?}"
            );
        }
    }

    #[test]
    fn words_for_a_bench_are_its_own() {
        let Ok(Chore::Ceph(ceph)) = parse("ceph --cephx --bench --what nbd --rounds 5") else {
            panic!("it is understood");
        };
        assert!(ceph.cephx && ceph.directory.is_none());
        assert_eq!(ceph.bench.unwrap(), ["--what", "nbd", "--rounds", "5"]);
        assert!(matches!(parse("ceph --bench"), Ok(Chore::Ceph(ceph)) if ceph.bench == Some(Vec::new())));
    }

    #[test]
    fn unknown_and_conflicting_options_are_refused() {
        for line in [
            "",
            "tset",
            "loom --deeep",
            "fuzz --seconds",
            "fuzz --seconds ten",
            "setup now",
            "crashes sloppy",
            "guest --short weights",
            "ceph --test --stop",
            "siege --mutants --seconds 5",
        ] {
            assert!(parse(line).is_err(), "{line}");
        }
        // `--help` must not be taken for a directory in which a cluster is started.
        let help = parse("ceph --help").unwrap_err();
        assert_eq!(help.kind(), clap::error::ErrorKind::DisplayHelp);
    }
}
