//! The engine that the jobs share. Fio asks for every job's disk before any job starts, so the first job
//! to start makes an engine from the options of all, and the last to end shuts it down. `job` attaches to
//! it.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result, anyhow, bail, ensure};
use blkmq_config::{Config, DiskSpec, Plan, QueueSettings, Registries, group, luks, plan_with_all_groups};
use blkmq_core::ids::GroupId;
use blkmq_core::sched;
use blkmq_core::time::Nanos;
use blkmq_host::{Attached, Disk, Engine, EngineConfig, QueueId};

/// The options of one job; empty or zero where nothing was given.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct JobOptions {
    /// A disk as for `blkmq serve --disk`, or the name of one in `config`.
    pub(crate) disk: String,
    /// A configuration file as for `blkmq serve -c`.
    pub(crate) config: String,
    /// The elevator of the disk's queue.
    pub(crate) sched: String,
    /// The group of the job's I/O, as for `blkmq serve --group`.
    pub(crate) group: String,
    /// Requests in flight at the drive.
    pub(crate) depth: u32,
}

/// The resources with which a job does its I/O.
pub(crate) struct JobHandle {
    pub(crate) attached: Attached,
    pub(crate) disk: Disk,
    pub(crate) group: GroupId,
}

/// All jobs of a process.
pub(crate) struct SharedEngine(Mutex<State>);

struct State {
    /// Jobs by their addresses in fio, as registered before the engine starts.
    jobs: BTreeMap<usize, Registered>,
    /// The process in which they were registered.
    process: u32,
    /// Jobs that hold a handle.
    inside: usize,
    open: Option<Open>,
}

/// A job that has not ended.
struct Registered {
    options: JobOptions,
    /// Bytes of its disk.
    size: u64,
}

/// The engine while jobs run.
struct Open {
    engine: Engine,
    /// The name of each job's disk.
    disks: BTreeMap<usize, String>,
}

impl SharedEngine {
    /// An engine that no job shares yet.
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(State {
            jobs: BTreeMap::new(),
            process: 0,
            inside: 0,
            open: None,
        }))
    }

    /// Registers the options of the job at address `job`, and returns the size of its disk in
    /// bytes.
    ///
    /// # Errors
    /// The fault in the options, for the user.
    pub(crate) fn register(&self, job: usize, options: JobOptions) -> Result<u64> {
        let mut shared_engine = self.lock();
        if let Some(known) = shared_engine.jobs.get(&job)
            && (shared_engine.open.is_some() || known.options == options)
        {
            return Ok(known.size);
        }
        ensure!(
            shared_engine.open.is_none(),
            "a job comes after others have started: leave create_serialize at its default, 1"
        );
        // The drives are opened for their sizes, and again when the engine starts: only then are
        // all jobs known.
        let (config, names) = configuration(std::iter::once(&options))?;
        let Plan { queues, mapped, luks } = plan_with_all_groups(&config)?;
        luks::refuse(&luks)?;
        let disks = Engine::check(EngineConfig {
            queues,
            mapped,
            ..EngineConfig::default()
        })?;
        let size = disks
            .iter()
            .find(|disk| disk.name == names[0])
            .expect("a planned disk")
            .size;
        shared_engine.jobs.insert(job, Registered { options, size });
        shared_engine.process = std::process::id();
        Ok(size)
    }

    /// Admits a registered job: attaches the calling thread.
    ///
    /// # Errors
    /// Why the engine does not start.
    pub(crate) fn enter(&self, job: usize) -> Result<JobHandle> {
        let mut shared_engine = self.lock();
        ensure!(
            shared_engine.process == std::process::id(),
            "jobs must be threads of one process, so that they share an engine: give fio --thread"
        );
        if shared_engine.open.is_none() {
            shared_engine.open = Some(start(&shared_engine.jobs)?);
        }
        let open = shared_engine.open.as_ref().expect("started");
        let job = shared_engine.jobs.get(&job).zip(open.disks.get(&job));
        let (job, name) = job.context("the job was not known when the first one started")?;
        let disk = open.engine.disk(name).expect("a started disk").clone();
        let group = match job.options.group.as_str() {
            "" => disk.group,
            text => {
                let path = group::parse(text)?.path;
                // All queues have all groups, with the same numbers.
                let mut groups = open.engine.control().groups(QueueId(0)).into_iter();
                let found = groups.find(|(known, _)| *known == path);
                found.map(|(_, id)| id).expect("a started group")
            }
        };
        let attached = open.engine.attach()?;
        shared_engine.inside += 1;
        Ok(JobHandle {
            attached,
            disk,
            group,
        })
    }

    /// Takes a job's handle back. The last one shuts the engine down.
    pub(crate) fn leave(&self, job: usize, handle: JobHandle) {
        // This waits for requests under way, so not under the lock.
        drop(handle);
        let mut shared_engine = self.lock();
        shared_engine.inside -= 1;
        shared_engine.jobs.remove(&job);
        if shared_engine.inside == 0
            && shared_engine.jobs.is_empty()
            && let Some(open) = shared_engine.open.take()
            && let Err(error) = open.engine.shutdown(SHUTDOWN_LIMIT)
        {
            eprintln!("blkmq: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn start(jobs: &BTreeMap<usize, Registered>) -> Result<Open> {
    let (config, names) = configuration(jobs.values().map(|job| &job.options))?;
    let Plan {
        mut queues,
        mapped,
        luks,
    } = plan_with_all_groups(&config)?;
    luks::refuse(&luks)?;
    for queue in &mut queues {
        queue.requests_per_reactor = queue.requests_per_reactor.max(REQUESTS_MIN);
    }
    let engine = Engine::start(EngineConfig {
        // There are no clients: one thread that sleeps, for the elevators' timers.
        reactors: 0,
        attached_max: jobs.len(),
        wait: config.wait,
        queues,
        mapped,
        ..EngineConfig::default()
    })?;
    Ok(Open {
        engine,
        disks: jobs.keys().copied().zip(names).collect(),
    })
}

/// Joins the options of all jobs into one configuration. Also returns the name of each job's disk.
fn configuration<'a>(wishes: impl Iterator<Item = &'a JobOptions>) -> Result<(Config, Vec<String>)> {
    let mut config = Config::default();
    let mut files: Vec<&str> = Vec::new();
    // The texts of disks and groups already added, so that jobs can share them.
    let mut disks: Vec<(&str, String)> = Vec::new();
    let mut groups: Vec<&str> = Vec::new();
    let mut names = Vec::new();
    for options in wishes {
        if !options.config.is_empty() && !files.contains(&options.config.as_str()) {
            ensure!(
                files.is_empty(),
                "config={}: all jobs must name the same one",
                options.config
            );
            files.push(&options.config);
            let text = std::fs::read_to_string(&options.config);
            let text = text.with_context(|| format!("config={} cannot be read", options.config))?;
            let file = Config::from_toml_without_addresses(&text, &Registries::default());
            let file = file.with_context(|| format!("config={}", options.config))?;
            config.disks.extend(file.disks);
            config.groups.extend(file.groups);
            config.queues.extend(file.queues);
            config.wait = file.wait;
            config.sched = file.sched;
        }
        let known = disks.iter().find(|(text, _)| *text == options.disk);
        let name = match known {
            Some((_, name)) => name.clone(),
            None => {
                let name = add_disk(&mut config, &options.disk, disks.len())?;
                disks.push((&options.disk, name.clone()));
                name
            }
        };
        set_queue(&mut config, &name, options)?;
        names.push(name);
        if !options.group.is_empty() && !groups.contains(&options.group.as_str()) {
            let spec = group::parse(&options.group)?;
            ensure!(
                config.groups.iter().all(|other| other.path != spec.path),
                "group={}: another job gives the same group other settings",
                options.group
            );
            groups.push(&options.group);
            config.groups.push(spec);
        }
    }
    config.check()?;
    Ok((config, names))
}

/// Finds the disk that the options name in the configuration file, or adds the one that it describes. Returns its name.
fn add_disk(config: &mut Config, text: &str, number: usize) -> Result<String> {
    ensure!(
        !text.is_empty(),
        "disk= is missing: say what to do I/O on, as in disk=null=1T or disk=file=vm1.raw (see blkmq serve --help)"
    );
    if !text.contains('=') {
        let Some(disk) = config.disks.iter().find(|disk| disk.name == text) else {
            bail!(
                "disk={text}: the configuration file has no [disk.{text}]; a disk of its own is KEY=VALUE,KEY=VALUE"
            );
        };
        return Ok(disk.name.clone());
    }
    let is_named = text.split(',').any(|part| part.trim_start().starts_with("name="));
    let spec = if is_named {
        DiskSpec::parse(text)?
    } else {
        DiskSpec::parse(&format!("name=disk{number},{text}"))?
    };
    let name = spec.name.clone();
    config.disks.push(spec);
    Ok(name)
}

/// Applies a job's options to the disk's queue.
fn set_queue(config: &mut Config, name: &str, options: &JobOptions) -> Result<()> {
    if options.sched.is_empty() && options.depth == 0 {
        return Ok(());
    }
    let disk = config.disks.iter_mut().find(|disk| disk.name == name);
    let disk = disk.expect("it was added");
    let queue = disk.queue.get_or_insert_with(|| name.to_owned()).clone();
    let settings: &mut QueueSettings = config.queues.entry(queue.clone()).or_default();
    if !options.sched.is_empty() {
        let kind = sched::Registry::default().choose(&options.sched);
        let kind = kind.map_err(|error| anyhow!("sched={} rejected: {error}", options.sched))?;
        agree(settings.sched.replace(kind), kind, "sched", &queue)?;
    }
    if options.depth > 0 {
        agree(
            settings.depth.replace(options.depth),
            options.depth,
            "queue_depth",
            &queue,
        )?;
    }
    Ok(())
}

/// Checks that two jobs agree about a queue.
fn agree<T: PartialEq + std::fmt::Display>(before: Option<T>, now: T, what: &str, queue: &str) -> Result<()> {
    match before {
        Some(before) if before != now => bail!(
            "{what}={now} rejected: queue {queue} has {what}={before} already; make the jobs agree, or give their disks \
             queues of their own"
        ),
        _ => Ok(()),
    }
}

/// Fewest requests under way for each job: a job may have as large an iodepth without waiting.
const REQUESTS_MIN: u32 = 2048;
const SHUTDOWN_LIMIT: Nanos = Nanos::from_secs(10);

#[cfg(test)]
mod tests {
    use blkmq_core::poll::Wait;

    use super::*;

    fn options(disk: &str, group: &str) -> JobOptions {
        JobOptions {
            disk: disk.to_owned(),
            group: group.to_owned(),
            ..JobOptions::default()
        }
    }

    #[test]
    fn jobs_with_the_same_text_share_a_disk_and_a_group() {
        let wishes = [
            options("null=1G", "/a,weight=200"),
            options("ram=1M,name=x", ""),
            options("null=1G", "/a,weight=200"),
        ];
        let (config, names) = configuration(wishes.iter()).unwrap();
        assert_eq!(names, ["disk0", "x", "disk0"]);
        assert_eq!((config.disks.len(), config.groups.len()), (2, 1));
    }

    #[test]
    fn jobs_wait_as_the_configuration_file_says() {
        let path = std::env::temp_dir().join(format!("blkmq-fio-wait-{}.toml", std::process::id()));
        std::fs::write(&path, "[daemon]\nwait = \"poll\"\n[disk.a]\nnull = \"1G\"\n").unwrap();
        let with = JobOptions {
            config: path.to_str().unwrap().to_owned(),
            ..options("a", "")
        };
        let waits = |wishes: &[JobOptions]| configuration(wishes.iter()).unwrap().0.wait;
        assert_eq!(waits(&[options("null=1G", ""), with]), Wait::Poll);
        assert_eq!(waits(&[options("null=1G", "")]), Wait::Auto);
        std::fs::remove_file(path).unwrap();
    }

    #[test]
    fn engine_is_made_for_all_and_ends_with_the_last() {
        let shared_engine = SharedEngine::new();
        let sizes: Vec<u64> = [
            (1, options("null=1G,name=t1", "")),
            (2, options("ram=1M,name=t2", "/g")),
        ]
        .into_iter()
        .map(|(job, options)| shared_engine.register(job, options).unwrap())
        .collect();
        assert_eq!(sizes, [1 << 30, 1 << 20]);
        let first = shared_engine.enter(1).unwrap();
        let second = shared_engine.enter(2).unwrap();
        assert_eq!(
            (first.disk.name.as_str(), second.disk.name.as_str()),
            ("t1", "t2")
        );
        assert_ne!(second.group, second.disk.group);
        assert!(shared_engine.enter(3).is_err());
        shared_engine.leave(1, first);
        assert!(shared_engine.lock().open.is_some());
        shared_engine.leave(2, second);
        assert!(shared_engine.lock().open.is_none());
    }

    #[test]
    fn fault_is_named() {
        let sched = JobOptions {
            sched: "cfq".to_owned(),
            ..options("null=1G", "")
        };
        let (deep, deeper) = (
            JobOptions {
                depth: 4,
                ..options("null=1G", "")
            },
            JobOptions {
                depth: 5,
                ..options("null=1G", "")
            },
        );
        for (wishes, part) in [
            (vec![options("", "")], "disk= is missing"),
            (vec![options("vm1", "")], "no [disk.vm1]"),
            (vec![options("null=1Q", "")], "null=1Q"),
            (vec![sched], "sched=cfq rejected: must be one of none"),
            (
                vec![
                    options("null=1G", "/a,weight=1"),
                    options("null=1G", "/a,weight=2"),
                ],
                "other settings",
            ),
            (vec![options("null=1G", "a")], "as in /customers/a"),
            (vec![deep, deeper], "queue_depth=5 rejected"),
        ] {
            let error = format!("{:#}", configuration(wishes.iter()).unwrap_err());
            assert!(error.contains(part), "{error}");
        }
    }
}
