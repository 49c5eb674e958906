//! `blkmq ctl`: what it asks of a running daemon, and the form of the responses, tables for people, JSON for
//! programs.

mod bitmaps;
mod jobs;
mod listed;
mod printed;
mod stats;
mod table;

use std::fs::File;
use std::io::IsTerminal;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blkmq_config::typed;
use blkmq_export::client_settings::Client as ClientKind;
use blkmq_luks::Secret;
use clap::{Args, Subcommand, ValueEnum};
use clap_complete::engine::ArgValueCompleter;
use serde_json::{Map, Value, json};

pub use self::bitmaps::BitmapCommand;
use self::jobs::WorkArgs;
pub use self::listed::Listed;
use self::printed::{print_json, print_record, print_resized, print_settings, print_steps};
use crate::complete::{Disks, Names, kinds};
use crate::control::client::{Client, QUERY_MAX};
use crate::control::{LINE_MAX, path_to_ask};
use crate::stdout::{print, unless_reader_left};

/// What `ctl` takes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct CtlArgs {
    /// The daemon's control socket, unix:PATH [default: blkmq/control.sock in $XDG_RUNTIME_DIR, else in /run]
    #[arg(long, visible_alias = "control", value_name = "ADDRESS", global = true)]
    pub socket: Option<String>,
    /// Print JSON
    #[arg(long, global = true)]
    pub json: bool,
    /// The query or change
    #[command(subcommand)]
    pub command: CtlCommand,
}

/// What can be asked and changed.
#[derive(Debug, Subcommand)]
pub enum CtlCommand {
    /// Numbers of disks, queues, connections, and used memory
    Status,
    /// List disks, queues, groups or exports
    List {
        /// The kind of objects
        what: Listed,
    },
    /// List them, and again whenever the list changes, until interrupted
    Watch {
        /// The kind of objects
        what: Listed,
        /// Seconds between two checks
        #[arg(default_value = "1", value_parser = between_looks)]
        interval: Duration,
    },
    /// Show everything about one of them
    Show {
        /// The kind of objects
        what: Listed,
        /// Its name, path or address
        #[arg(add = ArgValueCompleter::new(Names))]
        name: String,
        /// Of a disk: what a client of this kind is told to reach it
        #[arg(long, value_name = "KIND", value_parser = ClientKind::ALL.map(ClientKind::name))]
        client: Option<String>,
    },
    /// Set keys of the configuration: KEY=VALUE, or KEY= for the default
    Set(EditArgs),
    /// Add a disk, a group, settings of a queue, or an export
    Add(EditArgs),
    /// Remove a disk, the settings of a group or a queue, or an export
    Remove {
        /// The kind: disk, group, queue, export
        #[arg(add = kinds())]
        kind: String,
        /// Its name, path or address
        #[arg(add = ArgValueCompleter::new(Names))]
        name: String,
        /// Only print what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Let a disk grow: to a size, or to the present size of its file or device
    Resize {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
        /// Bytes, or a number with K, M, G or T
        size: Option<String>,
    },
    /// Serve a disk as before whose drive was full or gone: its clients are told once that data may be lost
    Reopen {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
    },
    /// Make an image on a base and serve it as a disk
    Clone {
        /// The base, an image or, with --raw, a raw disk
        base: PathBuf,
        /// The disk
        name: String,
        /// Where its image is to be
        path: PathBuf,
        /// Other keys of the disk, KEY=VALUE
        keys: Vec<String>,
        /// The base is a raw disk
        #[arg(long)]
        raw: bool,
    },
    /// Keep what disks have now as images, all at one moment, and go on above them
    Snapshot {
        /// DISK=PATH, where the image of the moment is to be
        #[arg(required = true, value_name = "DISK=PATH")]
        disks: Vec<String>,
    },
    /// Throw away what disks without clients have above their bases
    Reset {
        /// The disks
        #[arg(required = true, add = ArgValueCompleter::new(Disks))]
        disks: Vec<String>,
    },
    /// Copy what the image of a disk reads from its bases into it, while it is used, and take the bases away
    Flatten(WorkArgs),
    /// Write what the image of a disk has into its base, while it is used: the image is empty then
    Commit(WorkArgs),
    /// Note which parts of a disk change, for backups of these alone
    #[command(subcommand)]
    Bitmap(BitmapCommand),
    /// List what the daemon does in the background, and how it ended
    Jobs,
    /// Give up what is done to a disk in the background
    Cancel {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
    },
    /// Give an encrypted disk its passphrase, from a file or from standard input, each byte of it
    Unlock {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
        /// The file [default: standard input]
        #[arg(long, value_name = "FILE")]
        key_file: Option<PathBuf>,
    },
    /// Print the configuration of the daemon as it is now
    Dump,
    /// Change the daemon to what a configuration file says
    Apply {
        /// The file
        file: PathBuf,
        /// Also remove disks and exports that the file does not have, with their clients
        #[arg(long)]
        remove: bool,
        /// Only print what would be done
        #[arg(long)]
        dry_run: bool,
    },
    /// Make the daemon read files again
    Reload {
        /// What to read again
        what: Reloaded,
    },
    /// Shut the daemon down as by SIGTERM: it takes no more requests and finishes those in flight
    Drain,
    /// Show the statistics of groups since the start or, with an interval, of each interval
    Stats {
        /// Seconds between two answers
        interval: Option<f64>,
    },
    /// Set the level of the log, in the form of BLKMQ_LOG: debug; info,blkmq_export=debug
    Log {
        /// The filter
        filter: String,
    },
    /// Send a message to a multipath disk: fail_path PATH, reinstate_path PATH, switch_group NUMBER
    Message {
        /// The disk
        #[arg(add = ArgValueCompleter::new(Disks))]
        disk: String,
        /// The message
        message: String,
        /// The path or the number
        argument: String,
    },
    /// Call a method of the protocol: see docs/operate/control.md
    Call {
        /// The method
        method: String,
        /// Its parameters, JSON
        params: Option<String>,
    },
}

/// A change of one table.
#[derive(Debug, Args)]
pub struct EditArgs {
    /// The kind: disk, group, queue, export, daemon
    #[arg(add = kinds())]
    pub kind: String,
    /// Its name, path or address; none for daemon, nor for an export that is added: nbd=unix:PATH
    #[arg(add = ArgValueCompleter::new(Names))]
    pub name: String,
    /// KEY=VALUE
    pub keys: Vec<String>,
    /// Only print what would be done
    #[arg(long)]
    pub dry_run: bool,
}

/// What can be read again.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Reloaded {
    /// The certificates and keys of all addresses, for new clients
    Tls,
}

/// Queries or changes a running daemon.
///
/// # Errors
/// The daemon's error, or there is no daemon.
pub fn main(args: &CtlArgs) -> Result<()> {
    let path = path_to_ask(args.socket.as_deref())?;
    let mut client = match args.command.changes() {
        true => Client::connect(&path)?,
        false => Client::connect_within(&path, QUERY_MAX)?,
    };
    // The reader may have closed early.
    unless_reader_left(run(args, &mut client))
}

impl CtlCommand {
    /// Whether its answer may take as long as a change.
    fn changes(&self) -> bool {
        !matches!(
            self,
            Self::Status
                | Self::List { .. }
                | Self::Watch { .. }
                | Self::Show { .. }
                | Self::Dump
                | Self::Jobs
                | Self::Stats { .. }
        )
    }
}

fn run(args: &CtlArgs, client: &mut Client) -> Result<()> {
    match &args.command {
        CtlCommand::Status => {
            let status = client.call("daemon.status", &json!({}))?;
            print_record(args.json, &status)
        }
        CtlCommand::List { what } => listed::list(args.json, client, *what),
        CtlCommand::Watch { what, interval } => listed::watch(args.json, client, *what, *interval),
        CtlCommand::Show {
            what: Listed::Disks,
            name,
            client: Some(kind),
        } => {
            let found = client.call("disk.clients", &json!({"disk": name, "client": kind}))?;
            print_settings(args.json, name, kind, &found)
        }
        CtlCommand::Show { client: Some(_), .. } => {
            bail!("--client is for disks: blkmq ctl show disk NAME --client KIND")
        }
        CtlCommand::Show { what, name, .. } => listed::show(args.json, client, *what, name),
        CtlCommand::Set(edit) => print_steps(
            args.json,
            client.call("config.set", &edit.params(true)?)?,
            edit.dry_run,
        ),
        CtlCommand::Add(edit) => print_steps(
            args.json,
            client.call("config.add", &edit.params(false)?)?,
            edit.dry_run,
        ),
        CtlCommand::Remove { kind, name, dry_run } => {
            let params = json!({"kind": kind, "name": name, "dry_run": dry_run});
            print_steps(args.json, client.call("config.remove", &params)?, *dry_run)
        }
        CtlCommand::Resize { disk, size } => {
            let bytes = size.as_deref().map(|size| blkmq_host::value::size("size", size));
            let params = json!({"disk": disk, "size": bytes.transpose()?});
            print_resized(args.json, &client.call("disk.resize", &params)?)
        }
        CtlCommand::Reopen { disk } => {
            client.call("disk.reopen", &json!({"disk": disk}))?;
            Ok(())
        }
        CtlCommand::Clone {
            base,
            name,
            path,
            keys,
            raw,
        } => {
            let edit = EditArgs {
                kind: "disk".to_owned(),
                name: name.clone(),
                keys: keys.clone(),
                dry_run: false,
            };
            let params = json!({
                "name": name,
                "path": std::path::absolute(path)?,
                "base": std::path::absolute(base)?,
                "format": if *raw { "raw" } else { "qcow2" },
                "keys": edit.params(false)?["keys"],
            });
            print_steps(args.json, client.call("disk.clone", &params)?, false)
        }
        CtlCommand::Snapshot { disks } => {
            let mut paths = serde_json::Map::new();
            for text in disks {
                let Some((disk, path)) = text.split_once('=') else {
                    bail!("{text:?} rejected: must be DISK=PATH");
                };
                // The daemon may be in another directory.
                let path = std::path::absolute(path)?;
                if paths.insert(disk.to_owned(), json!(path)).is_some() {
                    bail!("{disk}: is named twice");
                }
            }
            client.call("disk.snapshot", &json!({"disks": paths}))?;
            Ok(())
        }
        CtlCommand::Reset { disks } => {
            client.call("disk.reset", &json!({"disks": disks}))?;
            Ok(())
        }
        CtlCommand::Flatten(work) => jobs::begin(client, "disk.flatten", work),
        CtlCommand::Commit(work) => jobs::begin(client, "disk.commit", work),
        CtlCommand::Bitmap(command) => bitmaps::run(args.json, client, command),
        CtlCommand::Jobs => jobs::list(client, args.json),
        CtlCommand::Cancel { disk } => client.call("job.cancel", &json!({"disk": disk})).map(drop),
        CtlCommand::Unlock { disk, key_file } => {
            let secret = passphrase(key_file.as_deref())?;
            let params = json!({"disk": disk, "key": STANDARD.encode(secret.bytes())});
            client.call("disk.unlock", &params).map(drop)
        }
        CtlCommand::Dump => {
            let config = client.call("config.get", &json!({}))?;
            match args.json {
                true => print_json(&config["tables"]),
                false => print(config["toml"].as_str().unwrap_or_default()),
            }
        }
        CtlCommand::Apply {
            file,
            remove,
            dry_run,
        } => {
            let text = blkmq_config::read_text(file)?;
            // Parsed here first, since its errors have the line.
            let check = blkmq_config::Config::from_toml(&text);
            check.with_context(|| format!("configuration {}", file.display()))?;
            let params = json!({"toml": text, "remove": remove, "dry_run": dry_run});
            let bytes = params.to_string().len() + REQUEST_BYTES;
            ensure!(
                bytes <= LINE_MAX,
                "configuration {}: {bytes} bytes to send, and a running daemon takes at most {LINE_MAX}; start a daemon \
                 with this file instead",
                file.display()
            );
            print_steps(args.json, client.call("config.apply", &params)?, *dry_run)
        }
        CtlCommand::Reload { what: Reloaded::Tls } => {
            print_steps(args.json, client.call("tls.reload", &json!({}))?, false)
        }
        CtlCommand::Drain => client.call("daemon.drain", &json!({})).map(drop),
        CtlCommand::Stats { interval } => stats::run(args.json, client, *interval),
        CtlCommand::Log { filter } => client.call("log.set", &json!({"filter": filter})).map(drop),
        CtlCommand::Message {
            disk,
            message,
            argument,
        } => {
            let mut params = json!({"disk": disk, "message": message});
            match argument.parse::<u8>() {
                Ok(group) if message == "switch_group" => params["group"] = group.into(),
                _ => params["path"] = argument.as_str().into(),
            }
            client.call("multipath.message", &params).map(drop)
        }
        CtlCommand::Call { method, params } => {
            let params = params.as_deref().map_or(Ok(json!({})), serde_json::from_str);
            print_json(&client.call(method, &params.context("the parameters are no JSON")?)?)
        }
    }
}

/// Reads a passphrase; each byte of it counts.
fn passphrase(file: Option<&Path>) -> Result<Secret> {
    let Some(path) = file else {
        let input = std::io::stdin();
        ensure!(
            !input.is_terminal(),
            "the passphrase would be shown here: give it by --key-file, or by a pipe"
        );
        return Secret::read_from(input.lock()).context("the passphrase on standard input");
    };
    let context = || format!("key file {}", path.display());
    let file = File::open(path).with_context(context)?;
    Secret::read_from(file).with_context(context)
}

fn between_looks(text: &str) -> Result<Duration> {
    let seconds: f64 = text.parse().context("must be seconds")?;
    ensure!((0.1..=3600.0).contains(&seconds), "must be from 0.1 to 3600");
    Ok(Duration::from_secs_f64(seconds))
}

impl EditArgs {
    /// With `takes_back`, a key without a value gets its default again.
    fn params(&self, takes_back: bool) -> Result<Value> {
        let mut keys = Map::new();
        // There is one daemon, and an export has its address as name: the word in place of a name
        // is a key.
        let (name, first) = match self.name.split_once('=') {
            Some(_) if self.kind == "daemon" => ("", Some(&self.name)),
            None if self.kind == "daemon" && !["", "daemon"].contains(&self.name.as_str()) => {
                bail!("{:?} is not KEY=VALUE, as in shutdown_limit=20s", self.name)
            }
            Some((door, address)) if self.kind == "export" && !door.contains(':') => {
                (address, Some(&self.name))
            }
            _ => (self.name.as_str(), None),
        };
        for (number, pair) in first.into_iter().chain(&self.keys).enumerate() {
            let Some((key, value)) = pair.split_once('=') else {
                bail!("{pair:?} is not KEY=VALUE, as in weight=300");
            };
            let value = match value {
                // An address is text, also that of a device: ublk=7.
                address if number == 0 && first.is_some() && self.kind == "export" => address.into(),
                "" if takes_back => Value::Null,
                value => serde_json::to_value(typed(value))?,
            };
            keys.insert(key.to_owned(), value);
        }
        Ok(json!({"kind": self.kind, "name": name, "keys": keys, "dry_run": self.dry_run}))
    }
}

/// What a request has besides its parameters.
const REQUEST_BYTES: usize = 100;
const EXAMPLES: &str = "\
Examples:
  blkmq ctl list groups
  blkmq ctl show disk vm7 --client libvirt
  blkmq ctl set group /customers/b weight=300 iops=5000
  blkmq ctl add disk vm7 file=/srv/vm7.raw size=8G create=on group=/customers/b
  blkmq ctl add export nbd=unix:/run/blkmq/b.sock 'disks=[\"vm7\"]'
  blkmq ctl set queue fast sched=bfq
  blkmq ctl resize vm7 16G
  blkmq ctl remove disk vm7
  blkmq ctl dump > blkmq.toml
  blkmq ctl apply blkmq.toml --dry-run
  blkmq ctl stats 1";
