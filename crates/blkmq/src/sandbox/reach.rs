//! What a configuration needs of the host: directories, files, ports. `files` allows it, and a change of a running
//! daemon may need no more.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use blkmq_config::{Config, DiskSpec, ExportSpec, Source};
use blkmq_export::common::{Address, Place};
use blkmq_export::front_door::{self, Reach as DoorReach};

use crate::control;

/// What a configuration needs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    pub(super) needs: Vec<Need>,
    /// TCP ports to listen at.
    pub(super) listens: BTreeSet<u16>,
    /// The system chooses a port, and the same one is taken of another address.
    pub(super) listens_anywhere: bool,
    /// It connects to sockets by names in the abstract namespace.
    pub(super) has_abstract: bool,
    /// TCP ports to connect to; all of them, if there is a library that chooses.
    pub(super) connects: BTreeSet<u16>,
    /// Reactors connect to unix sockets where front ends listen.
    pub(super) reactors_connect: bool,
    /// It asks for the addresses of hosts by their names.
    pub(super) has_names: bool,
    /// A driver's library does as it likes.
    pub(super) has_library: bool,
    /// It mounts.
    pub(super) mounts: bool,
    /// It makes block devices.
    pub(super) makes_devices: bool,
}

/// Something that is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Need {
    /// Who needs it, for messages.
    pub(super) who: String,
    /// The directory, or a file in a directory that is not opened as a whole.
    pub(super) area: PathBuf,
    pub(super) what: What,
}

/// What is done below an area.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// Files are read.
    Read,
    /// Files are read, written, made and removed.
    Write,
    /// Sockets are made and removed.
    Listen,
    /// Anything of the above, for what is added later.
    All,
}

impl What {
    fn covers(self, other: Self) -> bool {
        self == other || self == Self::All || (self, other) == (Self::Write, Self::Read)
    }
}

impl Reach {
    /// What a configuration needs. Files that are not there yet count by their directories.
    ///
    /// # Errors
    /// An address is none, or a directory of `paths` is not there.
    pub(super) fn of(config: &Config) -> Result<Self> {
        let mut reach = Self::of_new(&Config::default(), config)?;
        for path in &config.paths {
            let real = path.canonicalize();
            let real = real
                .with_context(|| format!("[daemon]: paths={path:?}: make that directory, or take it out"))?;
            reach.add("paths of [daemon]", real, What::All);
        }
        if let Some((path, _)) = control::place(&config.control)? {
            reach.add_socket("control socket", &path);
        }
        let own = [
            ("upgrade socket", &config.upgrade_socket),
            ("metrics", &config.metrics.address),
        ];
        for (who, address) in own {
            match address.as_deref().map(str::parse) {
                Some(Ok(Address::Unix(path))) => reach.add_socket(who, &path),
                Some(Ok(address)) => reach.add_port(&address),
                _ => {}
            }
        }
        Ok(reach)
    }

    /// What the disks and exports of a configuration need that are not in an earlier one. May block for as long as a
    /// file's drive does not answer.
    ///
    /// # Errors
    /// An address is none.
    pub(super) fn of_new(old: &Config, new: &Config) -> Result<Self> {
        let mut reach = Self::default();
        for disk in new.disks.iter().filter(|disk| !old.disks.contains(disk)) {
            reach.add_disk(disk);
        }
        for export in new.exports.iter().filter(|export| !old.exports.contains(export)) {
            reach.add_export(new, export)?;
        }
        Ok(reach)
    }

    /// Adds the file of the configuration, which is read again on SIGHUP.
    pub(super) fn add_configuration(&mut self, path: &Path) {
        self.add_file("the configuration", path, What::Read);
    }

    /// Checks that another one needs nothing more.
    ///
    /// # Errors
    /// The first thing that is outside, and what to do.
    pub(super) fn covers(&self, other: &Self) -> Result<()> {
        for need in &other.needs {
            let is_inside = |has: &Need| has.what.covers(need.what) && need.area.starts_with(&has.area);
            if !self.needs.iter().any(is_inside) {
                bail!(
                    "{}: {} is outside of the sandbox: name its directory in paths of [daemon], and start a daemon that takes over \
                     (--take-over)",
                    need.who,
                    need.area.display()
                );
            }
        }
        let listens = |port: &&u16| !self.listens_anywhere && !self.listens.contains(port);
        if let Some(port) = other.listens.iter().find(listens) {
            bail!("port {port} is outside of the sandbox: {START_ANEW}");
        }
        let connects = |port: &&u16| !self.has_library && !self.connects.contains(port);
        if let Some(port) = other.connects.iter().find(connects) {
            bail!("a server's port {port} is outside of the sandbox: {START_ANEW}");
        }
        for (has, needs, what) in [
            (self.listens_anywhere, other.listens_anywhere, "tcp:localhost:0"),
            (
                self.has_abstract,
                other.has_abstract,
                "the first server at a name without a path",
            ),
            (
                self.reactors_connect,
                other.reactors_connect,
                "the first export that connects",
            ),
            (self.has_names, other.has_names, "the first name of a host"),
            (
                self.has_library,
                other.has_library,
                "the first disk of a Ceph cluster",
            ),
            (self.mounts, other.mounts, "the first export of fuse"),
            (
                self.makes_devices,
                other.makes_devices,
                "the first export of ublk",
            ),
        ] {
            if needs && !has {
                bail!("{what} is outside of the sandbox: {START_ANEW}");
            }
        }
        Ok(())
    }

    fn add_disk(&mut self, disk: &DiskSpec) {
        let who = format!("disk {}", disk.name);
        if let Source::Luks(source) = &disk.source {
            for path in source.reads() {
                self.add_file(&who, &path, What::Read);
            }
        }
        let Some(driver) = disk.source.driver() else {
            return;
        };
        if let Some(file) = driver.file() {
            let what = if disk.read_only { What::Read } else { What::Write };
            self.add_file(&who, file.path, what);
        }
        let needs = driver.needs();
        for path in &needs.read {
            self.add_file(&who, path, What::Read);
        }
        self.connects.extend(needs.ports);
        self.has_names |= needs.has_names;
        self.has_abstract |= needs.has_abstract;
        self.has_library |= needs.has_library;
    }

    fn add_export(&mut self, config: &Config, export: &ExportSpec) -> Result<()> {
        let who = format!("export {} {}", export.door, export.address);
        self.reactors_connect |= export.at.connects();
        for place in export.at.places(&config.named(export)) {
            match place {
                Place::Path(path) => self.add_socket(&who, &path),
                Place::Tcp(at) => drop(self.listens.insert(at.port())),
                Place::Abstract(_) | Place::Systemd(_) | Place::Device(_) => {}
            }
        }
        // The system chooses such a port.
        if let Ok(address) = export.address.parse() {
            self.add_port(&address);
        }
        for path in export.at.reads() {
            self.add_file(&who, &path, What::Read);
        }
        match front_door::find(export.door).map(front_door::FrontDoor::reach) {
            Some(DoorReach::Mounts) => self.mounts = true,
            Some(DoorReach::Devices) => self.makes_devices = true,
            Some(DoorReach::Places) | None => {}
        }
        Ok(())
    }

    fn add_port(&mut self, address: &Address) {
        match address {
            Address::Tcp(at) => drop(self.listens.insert(at.port())),
            Address::Localhost(0) => self.listens_anywhere = true,
            Address::Localhost(port) => drop(self.listens.insert(*port)),
            _ => {}
        }
    }

    fn add_socket(&mut self, who: &str, path: &Path) {
        self.add(who, existing(directory_of(path)), What::Listen);
    }

    fn add_file(&mut self, who: &str, path: &Path, what: What) {
        if let Some(area) = area(path) {
            self.add(who, area, what);
        }
    }

    fn add(&mut self, who: &str, area: PathBuf, what: What) {
        let is_there = self
            .needs
            .iter()
            .any(|need| need.area == area && need.what == what);
        if !is_there {
            let who = who.to_owned();
            self.needs.push(Need { who, area, what });
        }
    }
}

/// The area of a file: its directory, since files are replaced; but the file alone if it is a device, or if the
/// directory is one of the system. None if there is not even a directory.
fn area(path: &Path) -> Option<PathBuf> {
    let Ok(real) = path.canonicalize() else {
        let directory = directory_of(path).canonicalize().ok()?;
        return (!is_of_the_system(&directory)).then_some(directory);
    };
    let kind = fs::metadata(&real).ok()?.file_type();
    let is_device = kind.is_block_device() || kind.is_char_device();
    let directory = directory_of(&real);
    let is_alone = is_device || kind.is_dir() || is_of_the_system(directory);
    Some(if is_alone { real } else { directory.to_owned() })
}

fn is_of_the_system(directory: &Path) -> bool {
    OF_THE_SYSTEM.iter().any(|one| Path::new(one) == directory)
}

fn directory_of(path: &Path) -> &Path {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty());
    parent.unwrap_or(Path::new("."))
}

/// The deepest directory of a path that is there.
fn existing(directory: &Path) -> PathBuf {
    let found = directory
        .ancestors()
        .find_map(|ancestor| match ancestor.as_os_str().is_empty() {
            true => Path::new(".").canonicalize().ok(),
            false => ancestor.canonicalize().ok(),
        });
    found.unwrap_or_else(|| "/".into())
}

/// Directories that are not opened as a whole for a file in them.
const OF_THE_SYSTEM: &[&str] = &[
    "/", "/boot", "/dev", "/etc", "/proc", "/root", "/run", "/sys", "/usr",
];
const START_ANEW: &str =
    "start a daemon with the new configuration that takes over (--take-over), or set sandbox=off";

#[cfg(test)]
mod tests {
    use super::*;

    fn reach(text: &str) -> Reach {
        Reach::of(&Config::from_toml(text).unwrap()).unwrap()
    }

    #[test]
    fn reach_of_a_configuration_is_its_directories_and_ports() {
        let dir = std::env::temp_dir().canonicalize().unwrap();
        let text = format!(
            "[disk.a]\nfile = \"{0}/a.raw\"\n[disk.b]\nfile = \"/dev/null\"\nro = true\n[disk.c]\nnbd = \"nbd://store:10810/x\"\n\
             [control]\nsocket = \"none\"\n[[export]]\nnbd = \"tcp:127.0.0.1:0\"\ndisks = [\"a\"]\n[[export]]\nvhost-user = \"unix:{0}/{{disk}}\"\n",
            dir.display()
        );
        let reach = reach(&text);
        let areas: Vec<_> = reach
            .needs
            .iter()
            .map(|need| (need.area.as_path(), need.what))
            .collect();
        let (dir, null) = (dir.as_path(), Path::new("/dev/null"));
        assert_eq!(
            areas,
            [(dir, What::Write), (null, What::Read), (dir, What::Listen)]
        );
        assert_eq!((reach.listens, reach.connects), ([0].into(), [10810].into()));
        assert!(reach.has_names && !reach.has_library && !reach.mounts);
    }

    #[test]
    fn reach_covers_what_is_below_its_directories_and_nothing_else() {
        let has = reach("[daemon]\npaths = [\"/tmp\"]\n[disk.a]\nfile = \"/var/tmp/a\"\nro = true\n");
        let fits = |disk: &str| has.covers(&reach(&format!("[control]\nsocket=\"none\"\n[disk.x]\n{disk}")));
        fits("file = \"/tmp/new/x\"").unwrap();
        fits("file = \"/var/tmp/x\"\nro = true").unwrap();
        for (disk, part) in [
            (
                "file = \"/var/tmp/x\"",
                "disk x: /var/tmp is outside of the sandbox",
            ),
            (
                "file = \"/srv/x\"",
                "disk x: /srv is outside of the sandbox: name its directory in paths",
            ),
            ("nbd = \"nbd://127.0.0.1:7/x\"", "a server's port 7 is outside"),
            ("rbd = \"pool/x\"", "the first name of a host is outside"),
        ] {
            let error = fits(disk).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }

    #[test]
    fn area_of_a_file_in_a_directory_of_the_system_is_the_file() {
        let area = |path: &str| area(Path::new(path));
        assert_eq!(area("/etc/passwd"), Some("/etc/passwd".into()));
        assert_eq!(area("/dev/null"), Some("/dev/null".into()));
        assert_eq!(
            (area("/etc/no-such-disk"), area("/no-such-directory/disk")),
            (None, None)
        );
    }
}
