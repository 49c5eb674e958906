//! Disks that come and go while an engine runs. `engine` holds what is configured; `blkmq_config::live` opens disks and
//! puts them on their queues.

use std::sync::{MutexGuard, PoisonError};
use std::time::Duration;

use blkmq_config::{Config, DiskSpec, GroupSpec, group, live};
use blkmq_host::control::Control;

use crate::attached::Attached;
use crate::disk::Disk;
use crate::engine::{Engine, nanos};
use crate::error::Error;

impl Engine {
    /// Opens a disk and adds it, as [`Builder::disk`](crate::Builder::disk) describes it, while others have I/O under way.
    /// It joins the queue of its drive, or gets one; its group is made. Blocks as long as the drive needs to open.
    ///
    /// Disks that lie on others (`linear=`, `striped=`, `luks=`) are for the start alone, and stay. A queue that there was at the start
    /// takes 15 disks more than it had then; a disk beyond that needs a `queue=` of its own.
    ///
    /// # Errors
    /// The fault of the text, a disk of this name, a drive that cannot be opened, or no room. Nothing is changed then.
    pub fn add_disk(&self, text: &str) -> Result<Disk, Error> {
        let spec = DiskSpec::parse_with(text, self.registries());
        let spec = spec.map_err(|error| Error::configuration(&error))?;
        let name = spec.name.clone();
        self.add(vec![spec], Vec::new())?;
        self.disk(&name)
    }

    /// Adds the disks and groups of a configuration's tables, `[disk.NAME]` and `[group."/PATH"]`, as [`Self::add_disk`]
    /// does: all of them, or none. Returns the disks' names. A group that there is stays as it is; settings of queues are
    /// for the start alone.
    ///
    /// # Errors
    /// As for [`Self::add_disk`].
    pub fn add_toml(&self, text: &str) -> Result<Vec<String>, Error> {
        let added = Config::from_toml_without_addresses(text, self.registries());
        let added = added.map_err(|error| Error::configuration(&error))?;
        let names = added.disks.iter().map(|disk| disk.name.clone()).collect();
        self.add(added.disks, added.groups)?;
        Ok(names)
    }

    /// Removes a disk. At once it cannot be found, and I/O that is submitted through its handles ends with
    /// [`Status::Shutdown`](crate::Status::Shutdown), also if a disk of its name comes again; I/O under way ends first.
    /// Then its drive is closed, unless other disks use it. Its groups stay.
    ///
    /// Each attached thread must come back to its [`Attached`] meanwhile. Blocks until then, for at most about `limit`.
    ///
    /// # Errors
    /// There is no such disk, another one lies on it, or it was not let go in time: it stays then, but handles
    /// whose I/O another thread was to do are closed ([`Self::disk`] finds new ones). A thread that is attached itself is
    /// refused: see [`Attached::remove_disk`].
    pub fn remove_disk(&self, name: &str, limit: Duration) -> Result<(), Error> {
        let control = self.host()?.control();
        let mut config = self.lock_config();
        let disks = control.disks();
        let queue = disks.iter().find(|disk| disk.name == name).map(|disk| disk.queue);
        control.remove_disk(name, nanos(limit))?;
        config.disks.retain(|disk| disk.name != name);
        let Some(queue) = queue else { return Ok(()) };
        let is_last = !control.disks().iter().any(|disk| disk.queue == queue);
        if is_last
            && control.device(queue).is_ok_and(|device| device.is_removable())
            && let Err(error) = control.remove_queue(queue)
        {
            // The disk is removed: what is left of its queue ends with the engine.
            tracing::error!("disk {name}: removed; its queue stays: {error}");
        }
        Ok(())
    }

    /// Adds disks and groups, all or none.
    fn add(&self, disks: Vec<DiskSpec>, groups: Vec<GroupSpec>) -> Result<(), Error> {
        let control = self.host()?.control();
        let mut config = self.lock_config();
        let mut wanted = config.clone();
        let there = self.groups();
        let known = |path: &String| there.contains(path);
        wanted
            .groups
            .extend(groups.into_iter().filter(|group| !known(&group.path)));
        let names: Vec<String> = disks.iter().map(|disk| disk.name.clone()).collect();
        wanted.disks.extend(disks);
        wanted
            .check_parts()
            .map_err(|error| Error::configuration(&error))?;
        for (at, name) in names.iter().enumerate() {
            let added = live::add_disk(&control, &wanted, name);
            let ready = added.and_then(|_| Ok(self.make_groups(&control, &wanted)?));
            if let Err(error) = ready {
                drop(config);
                return Err(self.roll_back(&names[..=at], &error));
            }
        }
        *config = wanted;
        Ok(())
    }

    /// Removes disks that were added before one that cannot be, which nobody has used yet.
    fn roll_back(&self, names: &[String], why: &anyhow::Error) -> Error {
        let mut text = format!("{why:#}");
        for name in names {
            let is_there = self.disks().contains(name);
            if is_there && let Err(error) = self.remove_disk(name, ROLL_BACK) {
                text += &format!("; disk {name} was added before, and stays: {error}");
            }
        }
        Error::Configuration(text)
    }

    /// Makes every group on every queue, as at the start.
    fn make_groups(&self, control: &Control, config: &Config) -> Result<(), blkmq_host::Error> {
        let mut paths = self.groups();
        paths.extend(config.groups.iter().map(|group| group.path.clone()));
        for (queue, _) in control.queues() {
            for path in &paths {
                live::make_group(control, config, queue, path)?;
            }
        }
        Ok(())
    }

    /// Notes what a group is to be on queues that come.
    pub(crate) fn note_group(&self, spec: &GroupSpec) {
        let mut config = self.lock_config();
        config.groups.retain(|group| group.path != spec.path);
        config.groups.push(spec.clone());
    }

    /// The same of its weight alone.
    pub(crate) fn note_weight(&self, path: &str, weight: u16) {
        let mut config = self.lock_config();
        let known = config.groups.iter_mut().find(|group| group.path == path);
        match known {
            Some(group) => group.weight = Some(weight),
            None => {
                if let Ok(group) = group::parse(&format!("{path},weight={weight}")) {
                    config.groups.push(group);
                }
            }
        }
    }

    fn lock_config(&self) -> MutexGuard<'_, Config> {
        self.config().lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Attached {
    /// Removes a disk, as [`Engine::remove_disk`] does on other threads: I/O of this thread ends meanwhile, too, and its
    /// completions come from the next [`Self::poll`] or [`Self::wait`].
    ///
    /// # Errors
    /// As there.
    pub fn remove_disk(&mut self, name: &str, limit: Duration) -> Result<(), Error> {
        let engine = self.engine().clone();
        engine.check_fork()?;
        let other = std::thread::Builder::new().name("remove".to_owned());
        std::thread::scope(|scope| {
            let removal = other.spawn_scoped(scope, || engine.remove_disk(name, limit));
            let removal =
                removal.map_err(|error| Error::Engine(format!("a thread that removes a disk: {error}")))?;
            while !removal.is_finished() {
                self.take_part(TURN);
            }
            removal
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }
}

/// For disks that nobody has used yet.
const ROLL_BACK: Duration = Duration::from_secs(10);
/// How long a thread waits at most for its own I/O while another one removes a disk for it.
const TURN: Duration = Duration::from_millis(1);
