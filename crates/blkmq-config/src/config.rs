//! The configuration of a daemon: disks, queues, groups and exports, parsed from flags and from the
//! configuration file into one form. `plan` turns it into drives and queues; nothing here opens a file
//! but the configuration's own.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_core::poll::Wait;
use blkmq_core::sched::ElevatorType;
use blkmq_export::front_door::{DaemonLimits, DiskName};

use crate::control::Control;
use crate::disk::{DiskSpec, Source};
use crate::export::{self, ExportSpec};
use crate::group::GroupSpec;
use crate::metrics::Metrics;
use crate::queue::QueueSettings;

/// What a daemon serves, and how.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Threads that serve. Default: the number of processors, at most 4.
    pub reactors: Option<u16>,
    /// How long a shutdown waits for requests under way. Default 10 s.
    pub shutdown_limit: Duration,
    /// The tables of front doors, as they were written.
    pub doors: export::Tables,
    /// What these tables say about all connections together.
    pub limits: DaemonLimits,
    /// The disks, in order.
    pub disks: Vec<DiskSpec>,
    /// Queues that have settings of their own, by name.
    pub queues: BTreeMap<String, QueueSettings>,
    /// Groups that have settings of their own.
    pub groups: Vec<GroupSpec>,
    /// Where disks are served.
    pub exports: Vec<ExportSpec>,
    /// How threads wait. Default auto.
    pub wait: Wait,
    /// The elevator of queues for which neither their settings nor their disks name one. Default none.
    pub sched: Option<&'static ElevatorType>,
    /// Where it is queried and changed, and by whom.
    pub control: Control,
    /// Where metrics are read, and which.
    pub metrics: Metrics,
    /// The address of the unix socket at which another daemon may take over, as `unix:PATH`. Default: none.
    pub upgrade_socket: Option<String>,
    /// Whether the daemon confines itself to what it needs. Default: as far as the kernel and the exports allow.
    pub sandbox: Option<Sandbox>,
    /// Directories of disks and sockets that may be added while the sandboxed daemon runs.
    pub paths: Vec<PathBuf>,
}

/// Whether the daemon confines itself to what it needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sandbox {
    /// It may do what its user may do.
    Off,
    /// The same, and what a sandbox would refuse is reported where possible.
    Warn,
    /// It is confined, or does not start.
    On,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            reactors: None,
            shutdown_limit: Duration::from_secs(10),
            doors: export::Tables::new(),
            limits: DaemonLimits::default(),
            disks: Vec::new(),
            queues: BTreeMap::new(),
            groups: Vec::new(),
            exports: Vec::new(),
            wait: Wait::default(),
            sched: None,
            control: Control::default(),
            metrics: Metrics::default(),
            upgrade_socket: None,
            sandbox: None,
            paths: Vec::new(),
        }
    }
}

impl Config {
    /// The names of the disks that an export serves, in order: those that it names, or all that no
    /// other disk has as a member or as a path.
    pub fn disks_of<'a>(&'a self, export: &ExportSpec) -> Vec<&'a str> {
        let below: BTreeSet<&str> = self.disks.iter().flat_map(DiskSpec::below).collect();
        let is_served = |name: &&str| match &export.disks {
            Some(named) => named.iter().any(|one| one == name),
            None => !below.contains(name),
        };
        let names = self.disks.iter().map(|disk| disk.name.as_str());
        names.filter(is_served).collect()
    }

    /// The same, as the address of the export names them.
    pub fn named<'a>(&'a self, export: &ExportSpec) -> Vec<DiskName<'a>> {
        self.named_of(&self.disks_of(export))
    }

    /// Disks by their names, with their groups.
    pub fn named_of<'a>(&'a self, names: &[&str]) -> Vec<DiskName<'a>> {
        let named = |name: &&str| {
            let spec = self.disks.iter().find(|disk| disk.name == **name)?;
            Some(DiskName {
                disk: &spec.name,
                group: &spec.group,
            })
        };
        names.iter().filter_map(named).collect()
    }

    /// Returns whether a disk is a path of another one: it has no queue, and nobody is served with
    /// it.
    pub(crate) fn is_path(&self, name: &str) -> bool {
        let mut multipath = self
            .disks
            .iter()
            .filter(|disk| matches!(disk.source, Source::Multipath(_)));
        multipath.any(|disk| disk.below().contains(&name))
    }

    /// The disks on which linear and striped ones lie, each with one of those.
    pub fn below_mapped(&self) -> BTreeMap<&str, &str> {
        let mapped = self
            .disks
            .iter()
            .filter(|disk| matches!(disk.source, Source::Mapped(_)));
        mapped
            .flat_map(|user| user.below().into_iter().map(|disk| (disk, user.name.as_str())))
            .collect()
    }

    /// Returns whether there is a disk of this name.
    pub fn has_disk(&self, name: &str) -> bool {
        self.disks.iter().any(|disk| disk.name == name)
    }

    /// Returns whether a disk is on a queue of this name.
    pub(crate) fn has_queue(&self, name: &str) -> bool {
        let mut there = self.disks.iter().filter(|disk| disk.queue_name() == Some(name));
        there.any(|disk| !self.is_path(&disk.name))
    }

    /// Checks that a daemon can start with it: it has a disk, or a control socket where disks can be added; and
    /// the parts fit together.
    ///
    /// # Errors
    /// Neither, or as for [`Config::check_parts`].
    pub fn check(&self) -> Result<()> {
        if self.disks.is_empty() && self.control.socket.is_none() {
            bail!(
                "no disk to serve: give --disk name=NAME,file=PATH, or a configuration with [disk.NAME]; or --control unix:PATH, to add                  disks later"
            );
        }
        self.check_parts()
    }

    /// A guest with two disks of one serial number cannot tell them apart. Paths are not served.
    fn check_serials(&self) -> Result<()> {
        let mut of: BTreeMap<String, &str> = BTreeMap::new();
        for disk in self.disks.iter().filter(|disk| !self.is_path(&disk.name)) {
            if let Some(other) = of.insert(disk.serial(), &disk.name) {
                bail!(
                    "disks {other} and {}: both have the serial number {}: give one another serial=",
                    disk.name,
                    disk.serial()
                );
            }
        }
        Ok(())
    }

    /// A client cannot ask for one of two disks of one export name. Paths are not served.
    fn check_export_names(&self) -> Result<()> {
        let mut of: BTreeMap<&str, &str> = BTreeMap::new();
        for disk in self.disks.iter().filter(|disk| !self.is_path(&disk.name)) {
            if let Some(other) = of.insert(disk.export(), &disk.name) {
                bail!(
                    "disks {other} and {}: both are the export {:?} of NBD: give one another export=",
                    disk.name,
                    disk.export()
                );
            }
        }
        Ok(())
    }

    /// Encrypted disks are added when the others are there: they lie on those, and nothing lies on them.
    fn check_encrypted(&self, names: &[&str]) -> Result<()> {
        let encrypted = |disk: &&DiskSpec| matches!(disk.source, Source::Luks(_));
        let is_encrypted = |name: &str| self.disks.iter().filter(encrypted).any(|disk| disk.name == name);
        for disk in &self.disks {
            for below in disk.below() {
                if is_encrypted(below) {
                    bail!(
                        "disk {}: disk {below} is encrypted, and cannot be below another: encrypt the upper one, as in luks={}",
                        disk.name,
                        disk.name
                    );
                }
                let users = self.disks.iter().filter(|other| other.below().contains(&below));
                if encrypted(&disk) && users.count() > 1 {
                    bail!(
                        "disk {}: another disk lies on {below}, too: it needs one of its own",
                        disk.name
                    );
                }
                if encrypted(&disk) && names.binary_search(&below).is_err() {
                    bail!(
                        "disk {}: there is no disk {below} for it to lie on: add [disk.{below}]",
                        disk.name
                    );
                }
            }
        }
        Ok(())
    }

    /// Checks the parts against each other.
    ///
    /// # Errors
    /// The first contradiction: two disks of a name, a path that does not exist, an export of a disk that does not
    /// exist, settings for a queue without a disk.
    pub fn check_parts(&self) -> Result<()> {
        let mut names: Vec<&str> = self.disks.iter().map(|disk| disk.name.as_str()).collect();
        names.sort_unstable();
        if let Some(pair) = names.windows(2).find(|pair| pair[0] == pair[1]) {
            bail!("disk {}: the name is used twice: give each disk its own", pair[0]);
        }
        self.check_serials()?;
        self.check_export_names()?;
        for disk in self
            .disks
            .iter()
            .filter(|disk| matches!(disk.source, Source::Multipath(_)))
        {
            let mut paths = disk.below().into_iter();
            if let Some(path) = paths.find(|path| names.binary_search(path).is_err()) {
                bail!(
                    "disk {}: path {path} rejected: there is no disk of that name: add [disk.{path}] or take it out",
                    disk.name
                );
            }
        }
        self.check_encrypted(&names)?;
        for export in &self.exports {
            for disk in export.disks.iter().flatten() {
                if names.binary_search(&disk.as_str()).is_err() {
                    bail!(
                        "export {}: there is no disk {disk}: add [disk.{disk}] or take it out",
                        export.address
                    );
                }
                let named = export.disks.iter().flatten().filter(|other| *other == disk);
                if named.count() > 1 {
                    bail!("export {}: disk {disk} is named twice: keep one", export.address);
                }
            }
            let named = export.at.check_named(&names);
            named.with_context(|| format!("export {}", export.address))?;
        }
        for name in self.queues.keys() {
            if !self.has_queue(name) {
                bail!(
                    "queue {name}: no disk is on it: set queue = \"{name}\" in a disk, or take [queue.{name}] out (blkmq ctl \
                     remove queue {name})"
                );
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISKS: &str = "[disk.a]\nram = \"1M\"\n[disk.b]\nram = \"1M\"\n[disk.c]\nram = \"1M\"\n\
                         [disk.m]\nmultipath = \"a/b\"\n[disk.s]\nlinear = \"c\"\n";

    #[test]
    fn export_serves_the_disks_that_it_names_or_all_that_no_other_lies_on() {
        for (disks, wanted) in [("", &["m", "s"][..]), ("disks = [\"s\", \"c\"]", &["c", "s"])] {
            let text = format!("{DISKS}[[export]]\nnbd = \"unix:x\"\n{disks}");
            let config = Config::from_toml(&text).unwrap();
            assert_eq!(config.disks_of(&config.exports[0]), wanted, "{disks}");
        }
    }

    #[test]
    fn settings_are_for_queues_that_disks_name_or_have_of_their_own() {
        let is_taken = |queue: &str| {
            let disks =
                format!("{DISKS}[disk.f]\nfile = \"/f\"\n[disk.g]\nfile = \"/g\"\nqueue = \"fast\"\n");
            let text = format!("{disks}[queue.{queue}]\ndepth = 8\n[[export]]\nnbd = \"unix:x\"");
            Config::from_toml(&text).unwrap().check()
        };
        for queue in ["c", "m", "fast"] {
            is_taken(queue).unwrap();
        }
        // A path, a mapped disk, one of its filesystem's queue, and one on another queue.
        for queue in ["a", "s", "f", "g"] {
            let error = is_taken(queue).unwrap_err().to_string();
            assert!(
                error.contains(&format!("queue {queue}: no disk is on it")),
                "{error}"
            );
        }
    }

    #[test]
    fn serial_numbers_that_are_equal_are_refused_unless_one_is_a_paths() {
        let checked = |serial: &str, of: &str| {
            let table = format!("[disk.{of}]\n");
            let text = DISKS.replace(&table, &format!("{table}serial = \"{serial}\"\n"));
            Config::from_toml(&text).unwrap().check()
        };
        let error = checked("s", "c").unwrap_err().to_string();
        assert_eq!(
            error,
            "disks c and s: both have the serial number s: give one another serial="
        );
        checked("s", "a").expect("a path is not served");
        checked("d", "c").unwrap();
        // The first 20 bytes are the same.
        let long =
            "[disk.pvc-0f2a77f1-b61c-4d6e-a]\nram = \"1M\"\n[disk.pvc-0f2a77f1-b61c-4d6e-b]\nram = \"1M\"";
        let config = Config::from_toml(long).unwrap();
        config.check().unwrap();
        assert_ne!(config.disks[0].serial(), config.disks[1].serial());
    }

    #[test]
    fn export_names_that_are_equal_are_refused() {
        let text = "[disk.a]\nram = \"1M\"\nexport = \"x/y: z\"\n[disk.b]\nram = \"1M\"\nexport = \"EXPORT\"";
        let checked = |export: &str| {
            Config::from_toml(&text.replace("EXPORT", export))
                .unwrap()
                .check()
        };
        let error = checked("x/y: z").unwrap_err().to_string();
        assert_eq!(
            error,
            "disks a and b: both are the export \"x/y: z\" of NBD: give one another export="
        );
        // The name of a disk that has another one is free.
        checked("a").unwrap();
    }

    #[test]
    fn path_that_is_no_disk_is_refused() {
        let config = Config::from_toml(&DISKS.replace("[disk.b]", "[disk.z]")).unwrap();
        let error = config.check().unwrap_err().to_string();
        assert!(
            error.contains("disk m: path b rejected: there is no disk of that name"),
            "{error}"
        );
    }
}
