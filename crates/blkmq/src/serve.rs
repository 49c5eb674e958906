//! Decides the life of the daemon: from the configuration to open doors, until a signal, and down again.
//! Comes after `blkmq_config`; the reactors of `blkmq_host` do the work meanwhile.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod descriptors;
mod last_sync;
mod notify;
mod placeholder;
mod report;
mod upgrade;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::mpsc::{self, SyncSender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_config::{Config, DiskSpec, ExportSpec, Plan, group, plan};
use blkmq_core::time::Nanos;
use blkmq_export::common::{self, AddressLimits, Common};
use blkmq_export::front_door::{self, FRONT_DOORS, Offer};
use blkmq_export::handover::{Handover, Phase};
use blkmq_host::disk::Disk;
use blkmq_host::engine::{Engine, EngineConfig};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::Signals;

use crate::cli::ServeArgs;
use crate::log::Log;
use last_sync::Files;
use placeholder::Placeholders;
use upgrade::{Earlier, Outgoing};

/// Serves until a signal.
///
/// # Errors
/// What cannot be served, or was not finished when time ran out.
pub fn main(args: &ServeArgs, log: &Log) -> Result<()> {
    let config = configuration(args)?;
    // Before anything is opened, so that no signal finds the default action once `ready` is printed.
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP]).context("signals cannot be handled")?;
    if args.check {
        return check(&config);
    }
    let daemon = match &args.take_over {
        Some(address) => upgrade::take_over(&config, address)?,
        None => Daemon::start(&config, plan(&config)?)?,
    };
    daemon.run(signals, config.shutdown_limit, log)
}

/// Opens the disks, makes the queues and says whether they can be served; does not listen. Files that had to be made for that are taken away again.
fn check(config: &Config) -> Result<()> {
    let made = Placeholders::make(config);
    let queues = plan(config).and_then(|plan| {
        let queues = plan.queues.len();
        let _files = Files::open(config)?;
        descriptors::connections(config, reactors(config))?;
        Engine::check(engine(config, plan))?;
        Ok(queues)
    });
    drop(made);
    let (disks, queues) = (config.disks.len(), queues?);
    writeln!(
        io::stdout(),
        "{disks} disks on {queues} queues: all can be served"
    )?;
    Ok(())
}

/// Joins the configuration file and the flags.
fn configuration(args: &ServeArgs) -> Result<Config> {
    let mut config = match &args.config {
        Some(path) => {
            let text = std::fs::read_to_string(path)
                .with_context(|| format!("configuration {} cannot be read", path.display()))?;
            Config::from_toml(&text).with_context(|| format!("configuration {}", path.display()))?
        }
        None => Config::default(),
    };
    for disk in &args.disk {
        config.disks.push(DiskSpec::parse(disk)?);
    }
    for group in &args.group {
        config.groups.push(group::parse(group)?);
    }
    for (door, address) in &args.addresses.0 {
        let export = ExportSpec::new(door, address);
        read(&export).with_context(|| format!("--{door} {address}"))?;
        config.exports.push(export);
    }
    config.reactors = args.reactors.or(config.reactors);
    config.wait = args.wait.unwrap_or(config.wait);
    let upgrade_socket = args.upgrade_socket.as_ref().or(config.upgrade_socket.as_ref());
    // Who takes over listens there for the next, unless told otherwise.
    config.upgrade_socket = upgrade_socket.or(args.take_over.as_ref()).cloned();
    if let Some(address) = &config.upgrade_socket {
        upgrade::socket_path(address)?;
    }
    config.check()?;
    for export in &config.exports {
        read(export).with_context(|| format!("[[export]] {}", export.door))?;
    }
    if config.exports.is_empty() && !args.check {
        bail!("no address to serve at: give --nbd unix:PATH, or a configuration with [[export]]");
    }
    Ok(config)
}

/// What the engine is to be.
fn engine(config: &Config, plan: Plan) -> EngineConfig {
    EngineConfig {
        reactors: reactors(config),
        wait: config.wait,
        queues: plan.queues,
        mapped: plan.mapped,
        ..EngineConfig::default()
    }
}

/// A running daemon.
pub struct Daemon {
    engine: Engine,
    common: Arc<Common>,
    /// What is to be durable at the end.
    files: Files,
    /// Where another daemon may take over.
    outgoing: Option<Outgoing>,
    /// What groups did before this daemon took over.
    earlier: Arc<Earlier>,
    /// What to give to clients: one line for each disk and address.
    pub addresses: Vec<String>,
}

impl Daemon {
    /// Starts the engine and opens the doors.
    ///
    /// # Errors
    /// The address, the tunable or the thread that cannot be had.
    pub fn start(config: &Config, plan: Plan) -> Result<Self> {
        Self::start_with(config, plan, &Arc::new(Handover::new(Phase::Serving)))
    }

    /// The same; where another daemon's clients are taken over nobody is served yet.
    fn start_with(config: &Config, plan: Plan, handover: &Arc<Handover>) -> Result<Self> {
        let files = Files::open(config)?;
        let connections_max = descriptors::connections(config, reactors(config))?;
        // Listen first: an address that is taken should not cost a start of the engine.
        let mut opened = Vec::new();
        for export in &config.exports {
            let address = read(export)?;
            let all = address
                .open(&reached(config, &plan, export), handover)?
                .into_iter();
            opened.extend(all.map(|one| (one, address.to_string(), export)));
        }
        let memory = config.nbd_memory.unwrap_or(common::BYTES_MAX);
        let common = Arc::new(Common::taking_part(memory, connections_max, handover));
        let upgrade_socket = config.upgrade_socket.as_ref();
        let outgoing = upgrade_socket
            .map(|address| Outgoing::open(address, &common))
            .transpose()?;
        let engine = Engine::start(engine(config, plan))?;
        let mut addresses = Vec::new();
        for (opened, address, export) in opened {
            let disks = export.disks.as_deref();
            let served = served(config, &engine, disks);
            addresses.extend(served.filter_map(|disk| opened.client_line(&disk.name)));
            let offer = Offer {
                disks,
                admitted: admitted(&address, export),
                handshake_deadline: config.nbd_handshake_deadline,
            };
            opened
                .serve(&engine, offer, &common)
                .with_context(|| format!("export {address}"))?;
        }
        Ok(Self {
            engine,
            common,
            files,
            outgoing,
            earlier: Arc::default(),
            addresses,
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Says that it is ready, and serves until a signal.
    fn run(mut self, mut signals: Signals, limit: Duration, log: &Log) -> Result<()> {
        let at_shutdown = end_at_once_on_the_next()?;
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.start(&self.engine, &self.common, &self.earlier, signals.handle())?;
        }
        let mut out = std::io::stdout().lock();
        for address in &self.addresses {
            writeln!(out, "{address}")?;
        }
        writeln!(out, "ready")?;
        out.flush()?;
        notify::ready();
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => {
                    let mut report = report::statistics(&self.engine.control(), &self.earlier);
                    report += &report::connections(&self.common);
                    log.print_long(&report, REPORT_WAIT_MAX);
                }
                SIGHUP => {
                    tracing::warn!("SIGHUP: nothing changes; the configuration is read at the start alone")
                }
                _ => break,
            }
        }
        let has_left = self.outgoing.as_mut().is_some_and(Outgoing::close);
        if !has_left {
            tracing::info!("shutting down: no new requests; a second signal ends at once");
        }
        // The thread waits for that alone.
        let _ = at_shutdown.send(signals);
        if has_left {
            self.common.handover.leave();
            return self.end(limit);
        }
        self.shutdown(limit)
    }

    /// Ends when another daemon serves the clients, and will make durable what they wrote.
    ///
    /// # Errors
    /// What was not finished in time.
    fn end(self, limit: Duration) -> Result<()> {
        let limit = Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX));
        Ok(self.engine.shutdown(limit)?)
    }

    /// Finishes what is under way, for at most about `limit`, and makes durable what was written, whatever else failed.
    ///
    /// # Errors
    /// What was not finished in time, or may be lost.
    pub fn shutdown(self, limit: Duration) -> Result<()> {
        let limit = Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX));
        let finished = self.engine.shutdown(limit);
        match (finished, self.files.sync()) {
            (Ok(()), synced) => synced,
            (Err(error), Ok(())) => Err(error.into()),
            (Err(error), Err(unsynced)) => bail!("{error}; {unsynced:#}"),
        }
    }
}

/// Reads an address as its front door has it.
///
/// # Errors
/// What is wrong with it.
fn read(export: &ExportSpec) -> Result<Box<dyn front_door::Address>> {
    let Some(door) = front_door::find(&export.door) else {
        let known: Vec<&str> = FRONT_DOORS.iter().map(|door| door.name()).collect();
        bail!(
            "key {} rejected: there is no such front door; known are {}, and beside them disks, connections, group_connections",
            export.door,
            known.join(", ")
        );
    };
    Ok(door.parse(&export.address)?)
}

/// The disks that an address is opened for, by name: those that are named, or all on which no other lies.
fn reached<'a>(config: &'a Config, plan: &'a Plan, export: &'a ExportSpec) -> Vec<&'a str> {
    let members = || plan.mapped.iter().flat_map(|mapped| &mapped.map.members);
    let is_reached = |name: &String| match &export.disks {
        Some(named) => named.contains(name),
        None => !members().any(|member| member.disk == *name),
    };
    let names = config.disks.iter().map(|disk| &disk.name);
    names
        .filter(|name| is_reached(name))
        .map(String::as_str)
        .collect()
}

/// How many connections an address may have.
fn admitted(address: &str, export: &ExportSpec) -> AddressLimits {
    let default = AddressLimits::default();
    AddressLimits {
        name: address.to_owned(),
        connections_max: export.connections.unwrap_or(default.connections_max),
        group_connections_max: export.group_connections.unwrap_or(default.group_connections_max),
    }
}

/// The disks that an address serves, in the order of the configuration: those that are named, or all on which no other lies.
fn served<'a>(
    config: &'a Config,
    engine: &'a Engine,
    only: Option<&'a [String]>,
) -> impl Iterator<Item = &'a Disk> {
    let disks = config.disks.iter().filter_map(|disk| engine.disk(&disk.name));
    disks.filter(move |disk| match (only, &disk.used_by) {
        (None, user) => user.is_none(),
        (Some(names), user) => {
            let is_named = names.contains(&disk.name);
            if let (true, Some(user)) = (is_named, user) {
                tracing::warn!(
                    "disk {}: it is served although disk {user} lies on it: whoever writes to it damages that one",
                    disk.name
                );
            }
            is_named
        }
    })
}

/// Makes a thread that ends the process at the next signal, whatever is under way, from when it is given the signals. There is one
/// from the start: when the daemon ends there may be no memory for it.
fn end_at_once_on_the_next() -> Result<SyncSender<Signals>> {
    let (at_shutdown, given) = mpsc::sync_channel::<Signals>(1);
    let end = move || {
        let Ok(mut signals) = given.recv() else { return };
        for signal in signals.forever() {
            if !matches!(signal, SIGUSR1 | SIGHUP) {
                std::process::exit(128 + signal);
            }
        }
    };
    let thread = thread::Builder::new().name("signals".to_owned());
    thread.spawn(end).context("no thread for signals can be made")?;
    Ok(at_shutdown)
}

/// How many threads serve.
fn reactors(config: &Config) -> usize {
    config.reactors.map_or_else(default_reactors, usize::from)
}

/// As many reactors as processors, but no more than most hosts want to give to storage.
fn default_reactors() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(REACTORS_MAX)
}

const REACTORS_MAX: usize = 4;
/// How long statistics wait for somebody to take them, before the rest is left out.
const REPORT_WAIT_MAX: Duration = Duration::from_secs(1);

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}
