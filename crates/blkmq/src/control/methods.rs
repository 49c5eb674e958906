//! The methods of the control socket, by which a daemon is asked and changed: one entry of [`METHODS`] each.
//! Every change goes through [`Running::change`], so it is checked whole, and done or not.

pub(super) mod params;

use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::engine::general_purpose::STANDARD;
use base64::{Engine as _, decoded_len_estimate};
use blkmq_config::diff::Change;
use blkmq_config::{Document, Kind};
use blkmq_export::client_settings::Client as ClientKind;
use blkmq_luks::Secret;
use blkmq_luks::secret::KEY_BYTES_MAX;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use zeroize::Zeroizing;

use self::params::{Edit, Message, OneDisk, none, of, values, yes};
use super::API;
use super::bitmaps;
use super::images;
use super::jobs;
use super::names;
use super::protocol::{BAD_PARAMS, Failure};
use super::report;
use super::roles::{Admitted, Needs};
use super::server::Daemon;
use super::statistics::Statistics;
use super::subscription::Subscription;
use super::wiped::Wiped;
use crate::serve::running::Changed;
use crate::trace::recording::Recording;

/// A method.
pub(super) struct Method {
    pub(super) name: &'static str,
    pub(super) help: &'static str,
    needs: Needs,
    call: fn(&mut Session, Value, &Daemon) -> Result<Value, Failure>,
}

/// All methods.
pub(super) static METHODS: &[Method] = &[
    ask(
        "daemon.methods",
        "all methods, with what they do",
        |_, params, _| {
            none(params)?;
            let all = METHODS
                .iter()
                .map(|method| json!({"name": method.name, "help": method.help}));
            Ok(all.collect())
        },
    ),
    ask(
        "daemon.version",
        "version of the daemon and of these methods",
        |_, params, _| {
            none(params)?;
            Ok(json!({"version": env!("CARGO_PKG_VERSION"), "api": API, "pid": std::process::id()}))
        },
    ),
    ask_all(
        "daemon.status",
        "numbers of disks, queues, connections, and used memory",
        |_, params, daemon| {
            none(params)?;
            Ok(report::status(daemon))
        },
    ),
    change(
        "daemon.drain",
        "shut down as by SIGTERM: take no more requests, finish those in flight",
        |session, params, _| {
            none(params)?;
            session.drains = true;
            Ok(json!({}))
        },
    ),
    ask_all(
        "config.get",
        "the configuration of the daemon as it is now: {toml, tables}",
        |_, params, daemon| {
            none(params)?;
            let document = daemon.running.document();
            let tables = to_value(&document.tables_of_all())?;
            Ok(json!({"toml": document.to_string(), "tables": tables}))
        },
    ),
    change(
        "config.apply",
        "change the daemon to what a whole configuration says: {toml, remove, dry_run}; with remove false, refuse to remove",
        |session, params, daemon| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                toml: String,
                #[serde(default = "yes")]
                remove: bool,
                #[serde(default)]
                dry_run: bool,
            }
            let Params {
                toml,
                remove,
                dry_run,
            } = of(params)?;
            let replace = |document: &mut Document| {
                let new = Document::from_toml(&toml)?;
                let missing = document.missing_in(&new);
                ensure!(
                    remove || dry_run || missing.is_empty(),
                    "it would remove what this configuration does not have, with its clients: {}; add it there, or give --remove \
                     (of config.apply: remove)",
                    missing.join(", ")
                );
                *document = new;
                Ok(())
            };
            session.edit(daemon, dry_run, replace)
        },
    ),
    Method {
        needs: Needs::Set,
        ..ask(
            "config.set",
            "set keys of a table, null for the default: {kind, name, keys, dry_run}",
            |session, params, daemon| {
                let Edit {
                    kind,
                    name,
                    keys,
                    dry_run,
                } = of(params)?;
                let kind = Kind::by_name(&kind)?;
                session.client.check_set(kind, &name, &keys)?;
                session.edit(daemon, dry_run, |document| {
                    let name = names::configured(document, kind, &name);
                    document.set(kind, &name, values(keys.clone())?)
                })
            },
        )
    },
    change(
        "config.add",
        "add a table: {kind, name, keys, dry_run}",
        |session, params, daemon| {
            let Edit {
                kind,
                name,
                keys,
                dry_run,
            } = of(params)?;
            session.edit(daemon, dry_run, |document| {
                let given = values(keys.clone())?
                    .into_iter()
                    .filter_map(|(key, value)| Some((key, value?)));
                let kind = Kind::by_name(&kind)?;
                let name = names::configured(document, kind, &name);
                document.insert(kind, &name, given.collect())
            })
        },
    ),
    change(
        "config.remove",
        "remove a table: {kind, name, dry_run}",
        |session, params, daemon| {
            let Edit {
                kind, name, dry_run, ..
            } = of(params)?;
            session.edit(daemon, dry_run, |document| {
                let kind = Kind::by_name(&kind)?;
                document.remove(kind, &names::configured(document, kind, &name))
            })
        },
    ),
    change(
        "tls.reload",
        "read the certificates and keys of all addresses again, for new clients",
        |_, params, daemon| {
            none(params)?;
            let (done, failed) = daemon.running.refresh();
            done.iter().for_each(|step| tracing::info!("tls: {step}"));
            match failed.is_empty() {
                true => Ok(json!({"steps": done})),
                false => Err(anyhow::anyhow!("{}; it keeps what it had", failed.join("; ")).into()),
            }
        },
    ),
    ask("disk.list", "the disks", |session, params, daemon| {
        none(params)?;
        Ok(session
            .client
            .role
            .shown(report::disks(&daemon.running.control()), "group"))
    }),
    ask(
        "disk.clients",
        "what clients of a kind are told to reach a disk, at each address: {disk, client}; without client, of all kinds",
        |session, params, daemon| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                disk: String,
                client: Option<String>,
            }
            let Params { disk, client } = of(params)?;
            let kinds = match client.as_deref().map(|name| (name, ClientKind::by_name(name))) {
                None => ClientKind::ALL.to_vec(),
                Some((_, Some(kind))) => vec![kind],
                Some((_, None)) => {
                    let known = ClientKind::ALL.map(ClientKind::name).join(", ");
                    return Err(Failure::new(
                        BAD_PARAMS,
                        format!("client rejected: must be one of {known}"),
                    ));
                }
            };
            let all = report::clients(daemon, &disk, &kinds, &session.client.role);
            Ok(all.with_context(|| format!("disk {disk}: there is no such disk"))?)
        },
    ),
    change(
        "disk.resize",
        "let a disk grow, and notify its clients: {disk, size}; without size, to the size of its file",
        |_, params, daemon| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                disk: String,
                size: Option<u64>,
            }
            let Params { disk, size } = of(params)?;
            let (before, size) = daemon.running.resize(&disk, size)?;
            let (told, not_told) = daemon.running.hearings(&disk);
            let not_told = not_told.into_iter();
            let not_told = not_told.map(|(who, why)| json!({"client": who, "why": why}));
            let not_told: Vec<Value> = not_told.collect();
            Ok(json!({"before": before, "size": size, "told": told, "not_told": not_told}))
        },
    ),
    change(
        "disk.reopen",
        "serve a disk as before whose drive was full or gone; its clients are told once that data may be lost: {disk}",
        |_, params, daemon| {
            let OneDisk { disk } = of(params)?;
            daemon.running.reopen(&disk)?;
            Ok(json!({}))
        },
    ),
    change("disk.snapshot", images::SNAPSHOT_HELP, images::snapshot),
    change("disk.reset", images::RESET_HELP, images::reset),
    change("disk.clone", images::CLONE_HELP, images::clone),
    change("disk.flatten", jobs::FLATTEN_HELP, jobs::flatten),
    change("disk.commit", jobs::COMMIT_HELP, jobs::commit),
    change("bitmap.add", bitmaps::ADD_HELP, bitmaps::add),
    change("bitmap.remove", bitmaps::REMOVE_HELP, bitmaps::remove),
    ask_all("bitmap.list", bitmaps::LIST_HELP, bitmaps::list),
    ask("job.list", jobs::LIST_HELP, jobs::list),
    change("job.cancel", jobs::CANCEL_HELP, jobs::cancel),
    change(
        "disk.unlock",
        "give an encrypted disk its passphrase: {disk, key}; the key in base64",
        |_, params, daemon| {
            // Taken out first: what is refused is not wiped.
            let mut params = Wiped::from(params);
            let key = params.remove("key").unwrap_or_default();
            let Some(text) = key.get().as_str() else {
                return Err(Failure::new(BAD_PARAMS, "key: must be a text"));
            };
            let OneDisk { disk } = of(params.take())?;
            // Into memory that is wiped, whether or not all of it is base64.
            let mut bytes = Zeroizing::new(vec![0; decoded_len_estimate(text.len())]);
            let len = STANDARD.decode_slice(text, &mut bytes).unwrap_or(0);
            if !(1..=KEY_BYTES_MAX).contains(&len) {
                let what = format!("key: must be base64 of 1 to {KEY_BYTES_MAX} bytes");
                return Err(Failure::new(BAD_PARAMS, what));
            }
            let secret = Secret::take(&mut bytes[..len]).map_err(anyhow::Error::from)?;
            // Before the disk is opened, which may take seconds: a core has no other copy meanwhile.
            drop(key);
            daemon.running.unlock(&disk, &secret)?;
            tracing::info!(disk, "disk {disk}: unlocked");
            Ok(json!({}))
        },
    ),
    ask_all(
        "queue.list",
        "the queues, with their elevators and tunables",
        |_, params, daemon| {
            none(params)?;
            Ok(report::queues(&daemon.running.control())?)
        },
    ),
    ask(
        "group.list",
        "the groups of each queue, and groups without disks, with weights, caps and targets",
        |session, params, daemon| {
            none(params)?;
            let config = daemon.running.config();
            let all = report::groups(&daemon.running.control(), &config.groups);
            Ok(session.client.role.shown(all, "path"))
        },
    ),
    ask_all(
        "export.list",
        "the addresses, with their connections",
        |_, params, daemon| {
            none(params)?;
            to_value(&report::exports(daemon))
        },
    ),
    ask(
        "statistics.get",
        "what queues and groups have done since the start",
        |session, params, daemon| {
            none(params)?;
            let all = report::statistics(daemon, &daemon.readings.take(daemon));
            to_value(&session.client.role.shown_statistics(all))
        },
    ),
    ask(
        "subscribe",
        "send the statistics at each interval: {interval_ms, changed}; with changed, only of queues that have changed",
        |session, params, _| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                interval_ms: u64,
                #[serde(default)]
                changed: bool,
            }
            let Params { interval_ms, changed } = of(params)?;
            if !(INTERVAL_MIN..=INTERVAL_MAX).contains(&interval_ms) {
                let what = format!(
                    "interval_ms {interval_ms} rejected: must be from {INTERVAL_MIN} to {INTERVAL_MAX}"
                );
                return Err(Failure::new(BAD_PARAMS, what));
            }
            let interval = Duration::from_millis(interval_ms);
            // What a tenant is shown of a queue comes and goes with its groups.
            let changed = changed && !session.client.role.is_only_tenant();
            session.subscription = Some(Subscription::new(interval, changed));
            Ok(json!({}))
        },
    ),
    change(
        "trace.start",
        "trace requests until this connection ends: {disks}; the answer comes with a descriptor of the events' memory",
        |session, params, daemon| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                #[serde(default)]
                disks: Vec<String>,
            }
            let Params { disks } = of(params)?;
            if session.recording.is_some() {
                let what = "this connection traces already: the trace ends with the connection";
                return Err(anyhow::anyhow!(what).into());
            }
            let recording = session
                .recording
                .insert(Recording::start(daemon.running.control(), disks)?);
            session.sends_memory = true;
            to_value(&recording.started())
        },
    ),
    change(
        "trace.names",
        "the disks and groups behind the numbers in the events of this connection's trace",
        |session, params, _| {
            none(params)?;
            let recording = session.recording.as_ref();
            to_value(
                &recording
                    .context("this connection traces nothing: call trace.start first")?
                    .names(),
            )
        },
    ),
    ask(
        "unsubscribe",
        "end the notifications of subscribe",
        |session, params, _| {
            none(params)?;
            session.subscription = None;
            Ok(json!({}))
        },
    ),
    change(
        "log.set",
        "set the level of the log, in the form of BLKMQ_LOG: {filter}",
        |_, params, daemon| {
            #[derive(Deserialize)]
            #[serde(deny_unknown_fields)]
            struct Params {
                filter: String,
            }
            let Params { filter } = of(params)?;
            daemon.log.set_filter(&filter)?;
            Ok(json!({}))
        },
    ),
    change(
        "multipath.message",
        "send a message to a multipath disk: {disk, message, path or group}",
        |_, params, daemon| {
            let message: Message = of(params)?;
            message.send(daemon)?;
            Ok(json!({}))
        },
    ),
];

const fn ask(
    name: &'static str,
    help: &'static str,
    call: fn(&mut Session, Value, &Daemon) -> Result<Value, Failure>,
) -> Method {
    Method {
        name,
        help,
        needs: Needs::Ask,
        call,
    }
}

/// A method whose answer is for those who see everything.
const fn ask_all(
    name: &'static str,
    help: &'static str,
    call: fn(&mut Session, Value, &Daemon) -> Result<Value, Failure>,
) -> Method {
    Method {
        needs: Needs::AskAll,
        ..ask(name, help, call)
    }
}

const fn change(
    name: &'static str,
    help: &'static str,
    call: fn(&mut Session, Value, &Daemon) -> Result<Value, Failure>,
) -> Method {
    Method {
        needs: Needs::Own,
        ..ask(name, help, call)
    }
}

/// Finds a method.
pub(super) fn find(name: &str) -> Option<&'static Method> {
    METHODS.iter().find(|method| method.name == name)
}

/// What is kept of one client.
pub(super) struct Session {
    client: Admitted,
    subscription: Option<Subscription>,
    /// The client's running trace.
    recording: Option<Recording>,
    /// The next answer carries a descriptor of the trace's memory.
    sends_memory: bool,
    /// The daemon is to shut down when the answer is on its way.
    drains: bool,
}

impl Session {
    pub(super) fn new(client: Admitted) -> Self {
        Self {
            client,
            subscription: None,
            recording: None,
            sends_memory: false,
            drains: false,
        }
    }

    pub(super) fn call(&mut self, method: &Method, params: Wiped, daemon: &Daemon) -> Result<Value, Failure> {
        self.client.pace();
        self.client.check(method.name, method.needs)?;
        (method.call)(self, params.take(), daemon)
    }

    /// The descriptor that the next answer carries.
    pub(super) fn take_descriptor(&mut self) -> Option<BorrowedFd<'_>> {
        let is_sent = std::mem::take(&mut self.sends_memory);
        self.recording.as_ref().filter(|_| is_sent).map(Recording::memory)
    }

    /// Whether it has asked for the daemon's end.
    pub(super) fn drains(&self) -> bool {
        self.drains
    }

    /// When it is to be told next.
    pub(super) fn next_tick(&self) -> Option<Instant> {
        self.subscription.as_ref().map(|subscription| subscription.next)
    }

    /// What it is to be told now, if it is time.
    pub(super) fn tick(&mut self, daemon: &Daemon) -> Option<Statistics> {
        let told = self.subscription.as_mut()?.tick(daemon)?;
        Some(self.client.role.shown_statistics(told))
    }

    /// Changes the configuration, as far as the client may.
    pub(super) fn edit(
        &self,
        daemon: &Daemon,
        dry_run: bool,
        edit: impl Fn(&mut Document) -> Result<()>,
    ) -> Result<Value, Failure> {
        let may = |steps: &[Change]| self.client.check_steps(steps);
        let Changed { steps, notes } = daemon.running.change_if(edit, may, dry_run)?;
        if !dry_run {
            steps.iter().for_each(|step| self.client.note_change(step));
        }
        Ok(json!({"steps": steps, "notes": notes}))
    }

    /// Checks a change before the files that it needs are made.
    pub(super) fn check(
        &self,
        daemon: &Daemon,
        edit: impl Fn(&mut Document) -> Result<()>,
    ) -> Result<(), Failure> {
        let may = |steps: &[Change]| self.client.check_steps(steps);
        Ok(daemon.running.check_change(edit, may)?)
    }
}

fn to_value(answer: &impl Serialize) -> Result<Value, Failure> {
    Ok(serde_json::to_value(answer).map_err(anyhow::Error::from)?)
}

/// How often statistics can be told, in milliseconds.
const INTERVAL_MIN: u64 = 100;
const INTERVAL_MAX: u64 = 3_600_000;
