//! The command line: the commands, their flags and their help. `main` runs what comes out.

use std::path::PathBuf;

use blkmq_core::poll::Wait;
use blkmq_core::sched;
use clap::builder::{PossibleValue, PossibleValuesParser};
use clap::{Args, CommandFactory, Parser, Subcommand};

use crate::addresses::Addresses;
use crate::complete::Shell;
use crate::ctl::CtlArgs;
#[cfg(feature = "demo")]
use crate::demo::DemoArgs;
use crate::help;
use crate::image::ImageArgs;
use crate::iostat::IostatArgs;
#[cfg(feature = "top")]
use crate::top::TopArgs;
use crate::trace::TraceArgs;

/// The multi-queue block layer, in user space
///
/// One daemon per host serves every tenant's disk and shares the host's drives between them: no root, no hugepages, no
/// dedicated core.
#[derive(Debug, Parser)]
#[command(name = "blkmq", version, after_help = EXAMPLES, propagate_version = true)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show in a minute what a scheduler does for a tenant with a noisy neighbour
    #[cfg(feature = "demo")]
    Demo(DemoArgs),
    /// Serve disks until told to stop
    Serve(Box<ServeArgs>),
    /// Query and change a running daemon
    Ctl(CtlArgs),
    /// Trace the requests of a running daemon, for blkparse and btt
    Trace(TraceArgs),
    /// Report the activity of a running daemon's queues and groups, in the form of iostat -x
    Iostat(IostatArgs),
    /// Show the activity of a running daemon's queues, groups and disks, as htop shows processes
    #[cfg(feature = "top")]
    Top(TopArgs),
    /// Make, describe and check qcow2 images
    Image(ImageArgs),
    /// Print a script for shell completion of commands and names: source <(blkmq completions bash)
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Print the manual page
    Man,
}

/// What `serve` takes.
#[derive(Clone, Debug, Args)]
#[command(after_long_help = help::of_serve())]
pub struct ServeArgs {
    /// Serve a disk; may be given again. KEY=VALUE,… as listed below
    #[arg(long, value_name = "KEY=VALUE,...")]
    pub disk: Vec<String>,
    /// Set the weight and limits of a group; may be given again. PATH,KEY=VALUE,… as listed below
    #[arg(long, value_name = "PATH,KEY=VALUE,...")]
    pub group: Vec<String>,
    /// Where disks are served.
    #[command(flatten)]
    pub addresses: Addresses,
    /// Read disks, queues, groups and exports from FILE (TOML); flags add to it
    #[arg(short, long, value_name = "FILE")]
    pub config: Option<PathBuf>,
    /// Serve with N threads [default: the number of processors, at most 4]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=128))]
    pub reactors: Option<u16>,
    /// Wait by blocking (block), polling (poll), sleeping until a request is due and polling then (hybrid), or in the
    /// cheapest of these ways (auto) [default: auto]
    #[arg(long, value_name = "HOW")]
    pub wait: Option<Wait>,
    /// Use the scheduler NAME for all queues for which neither a disk nor the configuration names one [default: bfq
    /// where groups have weights, else none]
    #[arg(long, value_name = "NAME", value_parser = schedulers())]
    pub sched: Option<String>,
    /// Confine the daemon to what its disks and addresses need (on), report what that would refuse (warn), or neither
    /// (off) [default: on, as far as the kernel and the addresses allow]
    #[arg(long, value_name = "HOW", value_parser = ["on", "warn", "off"])]
    pub sandbox: Option<String>,
    /// Allow another daemon to take over at the unix socket ADDRESS (unix:PATH): see --take-over
    #[arg(long, value_name = "ADDRESS")]
    pub upgrade_socket: Option<String>,
    /// Listen for queries and changes at ADDRESS, unix:PATH or none: see `blkmq ctl`
    /// [default: blkmq/control.sock in $XDG_RUNTIME_DIR, else in /run, if that directory is there]
    #[arg(long, value_name = "ADDRESS")]
    pub control: Option<String>,
    /// Serve metrics at ADDRESS: unix:PATH, or a port of the loopback, tcp:127.0.0.1:9464
    #[arg(long, value_name = "ADDRESS")]
    pub metrics: Option<String>,
    /// Let other hosts read metrics, whoever they are, where --metrics names an address that they reach
    #[arg(long)]
    pub metrics_insecure: bool,
    /// Take over from the daemon that has this upgrade socket (unix:PATH): its clients notice a short pause
    #[arg(long, value_name = "ADDRESS", conflicts_with = "check")]
    pub take_over: Option<String>,
    /// Take over disk NAME with its clients although its source or file has changed, as after a move of the image: the
    /// data must be the same, byte for byte; may be given again
    #[arg(long, value_name = "NAME", requires = "take_over")]
    pub same_data: Vec<String>,
    /// Check the configuration, open the disks, and end
    #[arg(long)]
    pub check: bool,
}

/// The schedulers that a queue can have.
fn schedulers() -> PossibleValuesParser {
    let listed = sched::Registry::default();
    let values = listed
        .iter()
        .map(|kind| PossibleValue::new(kind.name).help(kind.help));
    PossibleValuesParser::new(values)
}

/// Writes the manual page of the command and of each of its commands.
///
/// # Errors
/// What the writer says.
pub fn manual(out: &mut impl std::io::Write) -> std::io::Result<()> {
    let mut command = Cli::command();
    command.build();
    clap_mangen::Man::new(command.clone()).render(out)?;
    for sub in command
        .get_subcommands()
        .filter(|sub| !sub.is_hide_set() && sub.get_name() != "help")
    {
        clap_mangen::Man::new(sub.clone()).render(out)?;
    }
    Ok(())
}

const EXAMPLES: &str = "\
Examples:
  blkmq demo
  blkmq serve --disk name=vm1,file=vm1.raw --nbd unix:vm1.sock
  blkmq serve -c blkmq.toml
  blkmq top
  blkmq iostat 1";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_well_formed_and_have_a_manual() {
        Cli::command().debug_assert();
        let mut page = Vec::new();
        manual(&mut page).unwrap();
        let page = String::from_utf8(page).unwrap();
        assert!(page.contains("serve") && page.contains("mq\\-deadline"));
        // Of a driver and of a front door.
        assert!(page.contains("connect_timeout") && page.contains("handshake_deadline"));
    }

    #[test]
    fn control_socket_has_the_flag_of_the_daemon_at_each_command_that_asks_it() {
        for words in ["ctl list disks", "iostat", "trace --out t", "top"] {
            let words = ["blkmq"].into_iter().chain(words.split(' '));
            let words: Vec<&str> = words.chain(["--control", "unix:c.sock"]).collect();
            // Without a feature its command is missing.
            let is_there = Cli::command().find_subcommand(words[1]).is_some();
            assert_eq!(Cli::try_parse_from(&words).is_ok(), is_there, "{words:?}");
        }
    }
}
