//! The daemon's life: from the configuration to open front doors, until a signal, and the shutdown. `blkmq_config`
//! comes before; meanwhile the reactors of `blkmq_host` do the work.

#![deny(clippy::print_stdout, clippy::print_stderr)]

mod check;
mod descriptors;
mod dry_run;
mod keys;
mod last_sync;
mod notify;
mod placeholder;
mod reload;
mod report;
pub(crate) mod running;
pub(crate) mod upgrade;
mod watchdog;

use std::io::Write;
use std::mem::ManuallyDrop;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blkmq_config::luks::Keyring;
use blkmq_config::{Config, Document, ExportSpec, Kind, Plan, plan, read_text, typed};
use blkmq_core::time::Nanos;
use blkmq_export::common::{self, Common};
use blkmq_export::front_door::FRONT_DOORS;
use blkmq_export::handover::{Handover, Phase};
use blkmq_host::counted::counted;
use blkmq_host::disk::Disk;
use blkmq_host::engine::{Engine, EngineConfig};
use blkmq_host::size_news::SizeNews;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::iterator::{Handle, Signals};

use crate::cli::ServeArgs;
use crate::control;
use crate::log::{Log, subjects};
use crate::metrics;
use crate::sandbox::Sandbox;
use last_sync::Files;
use running::{OpenExport, RETRY_PAUSE, Refused, Running};
use upgrade::{Earlier, Outgoing};

/// Serves until a signal; a second one ends the process at once, whatever is under way.
///
/// All work is done by other threads, since a drive may not answer. The kernel gives the signals of a
/// process to its first thread, even if that waits for a drive where no signal reaches it. This one
/// waits for signals alone.
///
/// # Errors
/// What cannot be served, or was not finished in time.
pub fn main(args: &ServeArgs, log: &Log) -> Result<()> {
    let (document, config) = configuration(args)?;
    if args.check {
        log.start().context("no thread for the log can be made")?;
        return check::check(&config);
    }
    // While this is the only thread.
    let keyring = keys::of_commands(&config)?;
    let sandbox = Sandbox::enter(&config, args.config.as_deref())?;
    log.start().context("no thread for the log can be made")?;
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("signals cannot be handled")?;
    let over = Over(signals.handle());
    thread::scope(|scope| {
        let serve = move || {
            let _over = over;
            serve((document, config), (sandbox, keyring), args, log)
        };
        let thread = thread::Builder::new().name("serve".to_owned());
        let serving = thread.stack_size(STACK_BYTES).spawn_scoped(scope, serve);
        let serving = serving.context("no thread that serves can be made")?;
        end_at_once_on_the_second(&mut signals);
        serving.join().unwrap_or_else(|panic| resume_unwind(panic))
    })
}

/// Ends the wait for signals when it is dropped.
struct Over(Handle);

impl Drop for Over {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Ends the process at the second signal. Returns when there is nothing left to end.
/// `timeout` and some supervisors send one signal twice, to the process and to its group, which counts as one.
fn end_at_once_on_the_second(signals: &mut Signals) {
    let mut first: Option<Instant> = None;
    for signal in signals.forever() {
        if first.get_or_insert_with(Instant::now).elapsed() > SAME_SIGNAL {
            std::process::exit(128 + signal);
        }
    }
}

fn serve(
    (document, config): (Document, Config),
    (sandbox, keyring): (Sandbox, Keyring),
    args: &ServeArgs,
    log: &Log,
) -> Result<()> {
    subjects::know(&document, &config);
    tracing::info!("sandbox {}", sandbox.summary);
    // Before anything is opened, so that no signal has the default action once `ready` is printed.
    let signals = Signals::new([SIGTERM, SIGINT, SIGUSR1, SIGHUP]).context("signals cannot be handled")?;
    // A write beyond the limit of a file's size fails; by default the signal would end the daemon.
    signal_hook::flag::register(libc::SIGXFSZ, Arc::default()).context("signals cannot be handled")?;
    let daemon = match &args.take_over {
        Some(address) => {
            upgrade::take_over((document, config), (sandbox, keyring), address, &args.same_data)?
        }
        None => {
            let plan = plan(&config)?;
            Daemon::start((document, config), plan, (sandbox, keyring))?
        }
    };
    daemon.run(args, signals, log)
}

/// Joins the configuration file and the flags: as they are written, and their meaning.
fn configuration(args: &ServeArgs) -> Result<(Document, Config)> {
    let mut document = match &args.config {
        Some(path) => {
            let text = read_text(path).context("configuration")?;
            let context = || format!("configuration {}", path.display());
            // Parsed as a whole first, since its errors have the line.
            Config::from_toml(&text).with_context(context)?;
            Document::from_toml(&text).with_context(context)?
        }
        None => Document::default(),
    };
    for disk in &args.disk {
        document.add_disk(disk)?;
    }
    for group in &args.group {
        document.add_group(group)?;
    }
    for (door, address) in &args.addresses.all {
        let keys = args.addresses.keys.get(door).cloned().unwrap_or_default();
        document.add_export(door, address, keys);
    }
    for (door, table) in args.addresses.tables.clone() {
        let keys = table.into_iter().map(|(key, value)| (key, Some(value)));
        document.set(Kind::Door, door, keys)?;
    }
    let flag = |key: &str, value: Option<String>| value.map(|value| (key.to_owned(), Some(typed(&value))));
    let named = document
        .get(Kind::Daemon, "")
        .is_some_and(|keys| keys.contains_key("upgrade_socket"));
    // A daemon that takes over listens there for the next one, unless configured otherwise.
    let inherited = args.take_over.clone().filter(|_| !named);
    let flags = [
        flag("reactors", args.reactors.map(|count| count.to_string())),
        flag("wait", args.wait.map(|wait| wait.to_string())),
        flag("sched", args.sched.clone()),
        flag("sandbox", args.sandbox.clone()),
        flag("upgrade_socket", args.upgrade_socket.clone().or(inherited)),
    ];
    document.set(Kind::Daemon, "", flags.into_iter().flatten())?;
    document.set(Kind::Control, "", flag("socket", args.control.clone()))?;
    let metrics_insecure = args.metrics_insecure.then(|| "true".to_owned());
    let flags = [
        flag("address", args.metrics.clone()),
        flag("allow_insecure", metrics_insecure),
    ];
    document.set(Kind::Metrics, "", flags.into_iter().flatten())?;
    let config = document.config()?;
    if let Some(address) = &config.upgrade_socket {
        upgrade::socket_path(address)?;
    }
    if let Some(address) = &config.control.socket {
        control::socket_path(address)?;
    }
    if let Some(address) = &config.metrics.address {
        metrics::place(address, config.metrics.allow_insecure)?;
    }
    config.check()?;
    if config.exports.is_empty() && !args.check {
        bail!("no address to serve at: give --nbd unix:PATH, or a configuration with [[export]]");
    }
    Ok((document, config))
}

/// The configuration of the engine.
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
    engine: Arc<Engine>,
    common: Arc<Common>,
    running: Arc<Running>,
    /// Where another daemon may take over.
    outgoing: Option<Outgoing>,
    /// The statistics of groups before this daemon took over.
    earlier: Arc<Earlier>,
    /// The addresses for clients: one line for each disk and address.
    pub addresses: Vec<String>,
}

impl Daemon {
    /// Starts the engine and opens the front doors.
    ///
    /// # Errors
    /// An address, a tunable or a thread fails.
    pub fn start(
        configuration: (Document, Config),
        plan: Plan,
        confined: (Sandbox, Keyring),
    ) -> Result<Self> {
        let handover = Arc::new(Handover::new(Phase::Serving));
        Self::start_with(configuration, plan, confined, &handover)
    }

    /// The same; if another daemon's clients are taken over, nobody is served yet, and the keyring has the keys
    /// that it has handed over.
    fn start_with(
        (document, config): (Document, Config),
        mut plan: Plan,
        (sandbox, keyring): (Sandbox, Keyring),
        handover: &Arc<Handover>,
    ) -> Result<Self> {
        let luks = std::mem::take(&mut plan.luks);
        if !luks.is_empty() {
            keys::leave_no_core()?;
        }
        let files = Files::open(&config)?;
        let connections_max = descriptors::connections(&config, reactors(&config))?;
        let refused = refused(&config, handover.phase())?;
        // Listen first: an address in use should not cost a start of the engine.
        let mut opened = Vec::new();
        for export in &config.exports {
            let all = match refused.iter().any(|refused| refused.spec == *export) {
                true => Vec::new(),
                false => export.at.open(&config.named(export), handover)?,
            };
            opened.push((all, export.clone()));
        }
        let memory = config.limits.memory_bytes.unwrap_or(common::BYTES_MAX);
        let common = Arc::new(Common::taking_part(memory, connections_max, handover));
        let upgrade_socket = config.upgrade_socket.as_ref();
        let outgoing = upgrade_socket
            .map(|address| Outgoing::open(address, &common))
            .transpose()?;
        let mut of_engine = engine(&config, plan);
        of_engine.ring.is_restricted = sandbox.restricts_rings();
        of_engine.on_reactor = sandbox.on_reactor();
        let engine = Arc::new(Engine::start(of_engine)?);
        keyring.open_all(&engine.control(), luks)?;
        let (mut addresses, mut exports) = (Vec::new(), Vec::new());
        let disks = engine.disks();
        for (all, spec) in opened {
            let named = served(&config, &disks, spec.disks.as_deref());
            warn_of_members(&named, &spec);
            let mut open = Vec::new();
            for one in all {
                addresses.extend(named.iter().filter_map(|disk| one.client_line(disk)));
                let served = one.serve(&engine, running::offer_of(&spec), &common);
                let served = served.with_context(|| format!("export {}", spec.at))?;
                addresses.extend(served.client_line());
                open.push(Arc::from(served));
            }
            exports.push(OpenExport { spec, served: open });
        }
        let running = Running::new(
            Arc::clone(&engine),
            Arc::clone(&common),
            (document, config),
            files,
            (exports, refused),
            (sandbox, keyring),
        );
        Ok(Self {
            engine,
            common,
            running: Arc::new(running),
            outgoing,
            earlier: Arc::default(),
            addresses,
        })
    }

    /// The engine.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// Opens the control socket, if one is configured.
    fn control(&self, args: &ServeArgs, daemon: Arc<control::Daemon>) -> Result<Option<control::Server>> {
        let config = self.running.control_config();
        let Some((path, is_asked_for)) = control::place(&config)? else {
            return Ok(None);
        };
        if args.take_over.is_some() {
            return control::Server::start_later(&path, &config, daemon).map(Some);
        }
        match control::Server::start(&path, &config, daemon) {
            Err(error) if !is_asked_for => {
                tracing::info!("there is no control socket: {error:#}");
                Ok(None)
            }
            started => started.map(Some),
        }
    }

    /// Reports that it is ready, and serves until a signal.
    fn run(mut self, args: &ServeArgs, mut signals: Signals, log: &Log) -> Result<()> {
        if let Some(outgoing) = &mut self.outgoing {
            outgoing.start(
                &self.engine,
                &self.common,
                &self.running,
                &self.earlier,
                signals.handle(),
            )?;
        }
        let asked = Arc::new(control::Daemon {
            running: Arc::clone(&self.running),
            earlier: Arc::clone(&self.earlier),
            readings: control::Readings::default(),
            log: log.clone(),
            started: Instant::now(),
            is_draining: AtomicBool::new(false),
        });
        let control = self.control(args, Arc::clone(&asked))?;
        let (place, detail) = self.running.metrics()?;
        let metrics =
            place.map(|place| metrics::Server::start((place, detail), asked, args.take_over.is_some()));
        let metrics = metrics.transpose()?;
        let size_news = self.look_at_sizes()?;
        let reload = self.reload_aside(args)?;
        self.retry_refused()?;
        tracing::info!("{}", self.summary(args));
        for name in common::untaken_sockets() {
            tracing::warn!(
                "socket {name} of systemd is at no address: clients that connect there wait; add an export at systemd:{name}, or \
                 stop its .socket unit"
            );
        }
        let mut out = std::io::stdout().lock();
        for address in self.addresses.iter().take(LISTED_MAX) {
            writeln!(out, "{address}")?;
        }
        if let more @ 1.. = self.addresses.len().saturating_sub(LISTED_MAX) {
            writeln!(out, "and {more} more: blkmq ctl show disk NAME --client KIND")?;
        }
        writeln!(out, "ready")?;
        out.flush()?;
        notify::ready();
        watchdog::start(Arc::downgrade(&self.running))?;
        for signal in signals.forever() {
            match signal {
                SIGUSR1 => {
                    let mut report = report::statistics(&self.engine.control(), &self.earlier);
                    report += &report::connections(&self.common);
                    log.print_long(tracing::Level::INFO, &report, REPORT_WAIT_MAX);
                }
                // A full channel: one is waiting already, and has yet to read the file.
                SIGHUP => drop(reload.try_send(())),
                _ => break,
            }
        }
        drop((control, metrics));
        size_news.close();
        self.running.close();
        let has_left = self.outgoing.as_mut().is_some_and(Outgoing::close);
        if !has_left {
            tracing::info!("shutting down: no new requests; a second signal ends at once");
        }
        let limit = self.running.shutdown_limit();
        if has_left {
            self.common.handover.leave();
            return self.end(limit);
        }
        self.shutdown(limit)
    }

    /// What is served, in one line.
    fn summary(&self, args: &ServeArgs) -> String {
        let (control, disks) = (self.engine.control(), self.engine.disks().len());
        let queues = control.queues();
        let mut schedulers: Vec<&str> = queues.iter().map(|(_, queue)| queue.elevator().name).collect();
        schedulers.sort_unstable();
        schedulers.dedup();
        let file = args.config.as_ref();
        let file = file.map_or_else(|| "flags alone".to_owned(), |file| file.display().to_string());
        format!(
            "blkmq {}: {} on {} ({}), {}, by {file}",
            env!("CARGO_PKG_VERSION"),
            counted(disks, "disk", "disks"),
            counted(queues.len(), "queue", "queues"),
            schedulers.join(", "),
            counted(self.engine.reactors(), "thread", "threads"),
        )
    }

    /// Starts a thread that reads the disks' sizes when a device reports that one may have grown.
    fn look_at_sizes(&self) -> Result<Arc<SizeNews>> {
        let news = self.engine.control().size_news();
        let (told, running) = (Arc::clone(&news), Arc::downgrade(&self.running));
        let look = move || {
            while told.wait() {
                let Some(running) = running.upgrade() else { return };
                running.resize_all();
            }
        };
        let thread = thread::Builder::new().name("sizes".to_owned());
        thread
            .spawn(look)
            .context("no thread for disks that grow can be made")?;
        Ok(news)
    }

    /// Starts a thread that tries addresses again that are not served, if there are any.
    fn retry_refused(&self) -> Result<()> {
        let running = Arc::downgrade(&self.running);
        let retry = move || {
            let is_left = |running: Arc<Running>| {
                running.retry();
                !running.refused().is_empty()
            };
            loop {
                thread::sleep(RETRY_PAUSE);
                if !running.upgrade().is_some_and(is_left) {
                    return;
                }
            }
        };
        if !self.running.refused().is_empty() {
            let thread = thread::Builder::new().name("refused".to_owned());
            let started = thread.spawn(retry);
            started.context("no thread that tries addresses again can be made")?;
        }
        Ok(())
    }

    /// Ends while another daemon serves the clients, which will make their writes durable.
    ///
    /// # Errors
    /// What was not finished in time.
    fn end(self, limit: Duration) -> Result<()> {
        let this = ManuallyDrop::new(self);
        this.end_engine(limit)?;
        drop(ManuallyDrop::into_inner(this));
        Ok(())
    }

    fn end_engine(&self, limit: Duration) -> Result<(), blkmq_host::Error> {
        let limit = Nanos(limit.as_nanos().try_into().unwrap_or(u64::MAX));
        self.engine.shutdown(limit)?;
        FRONT_DOORS.iter().for_each(|door| door.leave());
        Ok(())
    }

    /// Finishes requests under way, for at most about `limit`, and makes written data durable,
    /// whatever else failed.
    ///
    /// # Errors
    /// What was not finished in time, or may be lost.
    pub fn shutdown(self, limit: Duration) -> Result<()> {
        // What has not ended is not closed, which may take as long as a drive does not answer: the process ends.
        let this = ManuallyDrop::new(self);
        match (this.end_engine(limit), this.running.sync()) {
            (Ok(()), Ok(())) => drop(ManuallyDrop::into_inner(this)),
            (Ok(()), Err(unsynced)) => return Err(unsynced),
            (Err(error), Ok(())) => return Err(error.into()),
            (Err(error), Err(unsynced)) => bail!("{error}; {unsynced:#}"),
        }
        Ok(())
    }
}

/// Checks addresses as [`check_exports`] does. Returns those that only the time is in the way of, which no other
/// one needs to suffer from. A daemon that takes over fails: the other one serves, with what it has read.
fn refused(config: &Config, phase: Phase) -> Result<Vec<Refused>> {
    dry_run::check_exports(config)?;
    let mut refused = Vec::new();
    for export in &config.exports {
        match export.at.check() {
            Ok(()) => {}
            Err(error) if error.is_of_time() && phase == Phase::Serving => {
                refused.push(Refused::new(export, error.to_string()));
            }
            Err(error) => return Err(error).with_context(|| format!("export {}", export.address)),
        }
    }
    Ok(refused)
}

/// Checks, without opening them, that addresses can be served as configured.
fn check_exports(config: &Config) -> Result<()> {
    dry_run::check_exports(config)?;
    for export in &config.exports {
        let checked = export.at.check();
        checked.with_context(|| format!("export {}", export.address))?;
    }
    Ok(())
}

/// The disks that an address serves, in the order of the configuration: those that are named, or all on which no other lies.
fn served<'a>(config: &Config, disks: &'a [Disk], only: Option<&[String]>) -> Vec<&'a Disk> {
    let found = config
        .disks
        .iter()
        .filter_map(|spec| disks.iter().find(|disk| disk.name == spec.name));
    let is_served = |disk: &&Disk| match only {
        None => disk.used_by.is_none(),
        Some(names) => names.contains(&disk.name),
    };
    found.filter(is_served).collect()
}

fn warn_of_members(served: &[&Disk], export: &ExportSpec) {
    for disk in served {
        if let (Some(user), Some(_)) = (&disk.used_by, &export.disks) {
            tracing::warn!(
                disk = disk.name,
                "disk {}: it is served although disk {user} lies on it: whoever writes to it damages that one",
                disk.name
            );
        }
    }
}

/// The number of threads that serve.
fn reactors(config: &Config) -> usize {
    config.reactors.map_or_else(default_reactors, usize::from)
}

/// As many reactors as processors, but no more than most hosts would give to storage.
fn default_reactors() -> usize {
    thread::available_parallelism()
        .map_or(1, usize::from)
        .min(REACTORS_MAX)
}

/// How many addresses are printed at the start.
const LISTED_MAX: usize = 64;
/// How long after a signal another one is the same.
const SAME_SIGNAL: Duration = Duration::from_millis(300);
const REACTORS_MAX: usize = 4;
/// As the first thread of a process has by default.
const STACK_BYTES: usize = 8 << 20;
/// How long statistics wait for a reader, before the rest is left out.
const REPORT_WAIT_MAX: Duration = Duration::from_secs(1);

impl std::fmt::Debug for Daemon {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Daemon")
            .field("addresses", &self.addresses)
            .finish_non_exhaustive()
    }
}
