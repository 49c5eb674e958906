//! The description of one disk: `name=vm1,file=vm1.raw,size=64M` on the command line, or a table of the
//! configuration file with the same keys. The driver, which the registry knows, parses its own keys.
//!
//! Three kinds of disks have no driver, since they refer to other disks by name: `linear` and
//! `striped`, which the engine maps (`blkmq_host::mapped`), and `multipath`, whose drive is made of
//! its paths' drives. Only this module and [`mod@crate::plan`] treat them specially.

use std::sync::Arc;

use anyhow::{Context, Result, bail};
use blkmq_core::sched::ElevatorType;
use blkmq_drivers::driver::{DiskRequest, DriverConfig};
use blkmq_drivers::keys::Pairs;
use blkmq_drivers::multipath::MultipathConfig;
use blkmq_drivers::registry::Registry;
use blkmq_host::disk::{SERIAL_BYTES_MAX, default_serial};
use blkmq_host::mapped::MapConfig;
use blkmq_host::value;

use crate::luks::LuksSource;
use crate::mapped;
use crate::name::check_name;
use crate::paths::{self, PathRef};
use crate::queue::{Polling, elevator, poll_delay};
use crate::registries::Registries;

/// One disk as configured.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskSpec {
    /// The name that clients ask for.
    pub name: String,
    /// A description for people who list the exports.
    pub description: String,
    /// What guests find as its serial number, if it is set.
    pub serial: Option<String>,
    /// What NBD clients call it, if that is not its name.
    pub export: Option<String>,
    /// What the disk lies on.
    pub source: Source,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses, in bytes. Default: the drive's.
    pub block_size: Option<u32>,
    /// Its queue; `None` for the queue of its filesystem, or one of its own.
    pub queue: Option<String>,
    /// The elevator of its queue, if the disk sets one.
    pub sched: Option<&'static ElevatorType>,
    /// How completions of its queue's requests are found, if the disk sets it.
    pub polling: Polling,
    /// The group it is accounted to. Default: the disk's name under the root.
    pub group: String,
}

/// What a disk lies on.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// A driver's disk.
    Driver(Arc<dyn DriverConfig>),
    /// Other disks, each of which leads to the same one.
    Multipath(MultipathSource),
    /// Other disks, concatenated or striped.
    Mapped(MapConfig),
    /// One other disk, whose data are encrypted.
    Luks(LuksSource),
}

/// A disk that is reached over others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultipathSource {
    /// The priority groups, the first one first.
    pub groups: Vec<Vec<PathRef>>,
    /// How paths are used.
    pub config: MultipathConfig,
}

impl Source {
    /// The description in listings of exports where none was given: not the path, which clients
    /// must not see.
    fn describe(&self) -> &'static str {
        match self {
            Self::Driver(config) => config.describe(),
            Self::Multipath(_) => "disk over several paths",
            Self::Mapped(_) => "disk on other disks",
            Self::Luks(_) => "encrypted disk",
        }
    }

    /// Returns whether the disk has no queue of its own, and bios for it go to disks below.
    pub fn is_without_queue(&self) -> bool {
        matches!(self, Self::Mapped(_) | Self::Luks(_))
    }

    /// The configuration by its driver, if it is a driver's disk.
    pub fn driver(&self) -> Option<&dyn DriverConfig> {
        match self {
            Self::Driver(config) => Some(&**config),
            _ => None,
        }
    }
}

impl DiskSpec {
    /// The names of the disks that it is made of: its members, or its paths.
    pub fn below(&self) -> Vec<&str> {
        match &self.source {
            Source::Driver(_) => Vec::new(),
            Source::Multipath(source) => {
                let paths = source.groups.iter().flatten();
                paths.map(|path| path.name.as_str()).collect()
            }
            Source::Mapped(map) => map.members.iter().map(|member| &*member.disk).collect(),
            Source::Luks(source) => vec![&source.below],
        }
    }

    /// The name of its queue, unless it is that of the device on which the disk lies, or the disk has none.
    pub fn queue_name(&self) -> Option<&str> {
        let own = || match &self.source {
            Source::Driver(config) => !config.shares_device(),
            Source::Multipath(_) => true,
            Source::Mapped(_) | Source::Luks(_) => false,
        };
        self.queue.as_deref().or_else(|| own().then_some(&*self.name))
    }

    /// What NBD clients call it.
    pub fn export(&self) -> &str {
        self.export.as_deref().unwrap_or(&self.name)
    }

    /// What guests find as its serial number.
    pub fn serial(&self) -> String {
        self.serial.clone().unwrap_or_else(|| default_serial(&self.name))
    }

    /// Returns whether another disk can join its queue while that is served.
    pub(crate) fn may_be_joined_by(&self, other: &Self) -> bool {
        match (self.source.driver(), other.source.driver()) {
            (Some(one), Some(other)) => one.drive() == other.drive() && one.shares_device(),
            _ => false,
        }
    }

    /// Parses `key=value,key=value`; `\,` is a comma in a value.
    ///
    /// # Errors
    /// Names the disk, the key, the value and what is allowed.
    pub fn parse(text: &str) -> Result<Self> {
        Self::parse_with(text, &Registries::default())
    }

    /// The same, with other drivers and elevators than the built-in ones.
    ///
    /// # Errors
    /// As [`DiskSpec::parse`].
    pub fn parse_with(text: &str, registries: &Registries) -> Result<Self> {
        let mut pairs = Pairs::from(pairs(text)?);
        let name = pairs.take("name").with_context(|| format!("--disk {text}"))?;
        let Some(name) = name else {
            bail!("--disk {text}: name= is missing: say what clients ask for, as in --disk name=vm1,{text}");
        };
        Self::from(name, pairs, registries)
    }

    /// Makes a disk of its keys and values.
    ///
    /// # Errors
    /// As [`DiskSpec::parse`].
    pub fn from_pairs(name: String, pairs: Vec<(String, String)>) -> Result<Self> {
        Self::from_pairs_with(name, pairs, &Registries::default())
    }

    /// The same, with other drivers and elevators than the built-in ones.
    ///
    /// # Errors
    /// As [`DiskSpec::parse`].
    pub fn from_pairs_with(
        name: String,
        pairs: Vec<(String, String)>,
        registries: &Registries,
    ) -> Result<Self> {
        Self::from(name, pairs.into(), registries)
    }

    fn from(name: String, mut pairs: Pairs, registries: &Registries) -> Result<Self> {
        check_name("disk", &name)?;
        let context = || format!("disk {name}");
        Self::build(&name, &mut pairs, registries).with_context(context)
    }

    fn build(name: &str, pairs: &mut Pairs, registries: &Registries) -> Result<Self> {
        let drivers = &registries.drivers;
        let switch = |pair: Option<String>, key| pair.map_or(Ok(false), |text| value::switch(key, &text));
        let read_only = switch(pairs.take("ro")?, "ro")? || switch(pairs.take("read_only")?, "read_only")?;
        let queue = pairs.take("queue")?;
        queue.iter().try_for_each(|queue| check_name("queue", queue))?;
        let sched = pairs.take("sched")?;
        let sched = sched
            .map(|text| elevator(&text, &registries.elevators))
            .transpose()?;
        let polling = Polling {
            io_poll: pairs
                .take("io_poll")?
                .map(|text| value::switch("io_poll", &text))
                .transpose()?,
            delay: pairs
                .take("io_poll_delay")?
                .map(|text| poll_delay(&text))
                .transpose()?,
        };
        let description = pairs.take("description")?;
        if let Some(long) = description.as_ref().filter(|text| text.len() > DESCRIPTION_MAX) {
            bail!(
                "description of {} bytes rejected: must be at most {DESCRIPTION_MAX}, as NBD has it; shorten it",
                long.len()
            );
        }
        let serial = pairs.take("serial")?;
        serial.iter().try_for_each(|serial| check_serial(serial))?;
        let export = pairs.take("export")?;
        export.iter().try_for_each(|export| check_export(export))?;
        let group = pairs.take("group")?.unwrap_or_else(|| format!("/{name}"));
        check_group(&group)?;
        let block_size = pairs.take("block_size")?;
        let source = source(pairs, drivers, read_only, block_size.as_deref())?;
        let block_size = block_size.as_deref().map(block).transpose()?;
        if source.is_without_queue() {
            refuse_queue_keys(&queue, sched, polling)?;
        }
        if let Some(key) = pairs.first() {
            let names = names(drivers).join(" | ");
            bail!(
                "key {key} rejected: known for every disk are name, {names}, ro, queue, sched, io_poll, io_poll_delay, \
                 block_size, group, description, serial, export"
            );
        }
        Ok(Self {
            name: name.to_owned(),
            description: description.unwrap_or_else(|| source.describe().to_owned()),
            serial,
            export,
            source,
            read_only,
            block_size,
            queue,
            sched,
            polling,
            group,
        })
    }
}

/// Parses the keys of a disk string with their values.
pub(crate) fn pairs(text: &str) -> Result<Vec<(String, String)>> {
    let pair = |part: String| {
        let Some((key, value)) = part.split_once('=') else {
            bail!(
                "--disk {text}: {part:?} is not KEY=VALUE; an example: --disk name=vm1,file=vm1.raw (see blkmq serve --help)"
            );
        };
        Ok((key.trim().to_owned(), value.to_owned()))
    };
    parts(text).into_iter().map(pair).collect()
}

/// Splits a disk string at its commas. A comma behind a backslash belongs to the value; other
/// backslashes are literal.
fn parts(text: &str) -> Vec<String> {
    let mut parts = vec![String::new()];
    let mut chars = text.chars().peekable();
    while let Some(c) = chars.next() {
        let part = parts.last_mut().expect("never empty");
        match c {
            '\\' if chars.next_if_eq(&',').is_some() => part.push(','),
            ',' => parts.push(String::new()),
            _ => part.push(c),
        }
    }
    parts
}

/// Takes the keys of what the disk lies on, and the driver's own.
fn source(
    pairs: &mut Pairs,
    drivers: &Registry,
    read_only: bool,
    block_size: Option<&str>,
) -> Result<Source> {
    let names = names(drivers);
    let given: Vec<&str> = names.into_iter().filter(|key| pairs.has(key)).collect();
    match given[..] {
        ["multipath"] => {
            let groups = paths::parse(&pairs.take("multipath")?.expect("it is given"))?;
            let mut config = MultipathConfig::default();
            pairs.set_all(|key, value| config.set(key, value))?;
            Ok(Source::Multipath(MultipathSource { groups, config }))
        }
        [key @ ("linear" | "striped")] => {
            let members = pairs.take(key)?.expect("it is given");
            let mut map = match key {
                "linear" => mapped::linear(&members)?,
                _ => mapped::striped(&members)?,
            };
            pairs.set_all(|key, value| mapped::set(&mut map, key, value))?;
            Ok(Source::Mapped(map))
        }
        ["luks"] => {
            let below = pairs.take("luks")?.expect("it is given");
            Ok(Source::Luks(LuksSource::parse(below, pairs)?))
        }
        [name] => {
            let driver = drivers.get(name).expect("it is listed");
            let request = DiskRequest {
                read_only,
                block_size,
            };
            Ok(Source::Driver((driver.parse)(pairs, &request)?))
        }
        [] => {
            let unknown = pairs
                .first()
                .map(|key| format!(" (key {key} is not known)"))
                .unwrap_or_default();
            let known = drivers
                .iter()
                .map(|driver| format!("{}={}", driver.name, driver.value));
            let known: Vec<String> = known.collect();
            bail!(
                "nothing to stand on{unknown}: give one of {}, {ON_DISKS}",
                known.join(", ")
            );
        }
        _ => bail!(
            "{} exclude each other: give one of them",
            given.join("= and ") + "="
        ),
    }
}

/// The keys that set what a disk lies on.
fn names(drivers: &Registry) -> Vec<&'static str> {
    let drivers = drivers.iter().map(|driver| driver.name);
    drivers
        .chain(["linear", "striped", "multipath", "luks"])
        .collect()
}

/// A disk on other disks has no queue, so keys for one are refused.
fn refuse_queue_keys(
    queue: &Option<String>,
    sched: Option<&'static ElevatorType>,
    polling: Polling,
) -> Result<()> {
    let given = [
        ("queue", queue.is_some()),
        ("sched", sched.is_some()),
        ("io_poll", polling.io_poll.is_some()),
        ("io_poll_delay", polling.delay.is_some()),
    ];
    if let Some((key, _)) = given.iter().find(|(_, is_given)| *is_given) {
        bail!("{key}= rejected: a disk on other disks has no queue of its own; set it in its members");
    }
    Ok(())
}

fn block(text: &str) -> Result<u32> {
    let bytes = value::size("block_size", text)?;
    let valid = u32::try_from(bytes)
        .ok()
        .filter(|b| b.is_power_of_two() && (512..=65536).contains(b));
    let Some(bytes) = valid else {
        bail!("block size {text} rejected: must be a power of two from 512 to 65536; set block_size");
    };
    Ok(bytes)
}

fn check_export(export: &str) -> Result<()> {
    if export.is_empty() || export.len() > EXPORT_BYTES_MAX || export.chars().any(char::is_control) {
        bail!(
            "export={export:?} rejected: must be 1 to {EXPORT_BYTES_MAX} bytes without control characters, as NBD clients ask \
             for it"
        );
    }
    Ok(())
}

fn check_serial(serial: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_' | '+');
    if serial.is_empty() || serial.len() > SERIAL_BYTES_MAX || !serial.chars().all(is_plain) {
        bail!(
            "serial={serial} rejected: must be 1 to {SERIAL_BYTES_MAX} of letters, digits, dots, dashes, underscores and +, as \
             guests find it"
        );
    }
    Ok(())
}

/// Checks a group's path: `/`, or names separated by `/`, as in `/customers/a/vm1`.
fn check_group(path: &str) -> Result<()> {
    let Some(names) = path.strip_prefix('/') else {
        bail!("group {path:?} rejected: must start with / as in /customers/a");
    };
    if names.is_empty() {
        return Ok(());
    }
    names.split('/').try_for_each(|name| check_name("group", name))
}

/// The longest text of an NBD export, in bytes.
const DESCRIPTION_MAX: usize = 4096;
/// The forms of disks on other disks.
const ON_DISKS: &str = "linear=DISKS, striped=DISKS, multipath=DISK+DISK, luks=DISK";

/// The longest name of an NBD export, in bytes, as the protocol has it.
const EXPORT_BYTES_MAX: usize = 4096;

#[cfg(test)]
mod tests {
    use blkmq_core::sched;
    use blkmq_drivers::driver::config_of;
    use blkmq_drivers::file::FileConfig;
    use blkmq_drivers::nbd::NbdConfig;
    use blkmq_drivers::ram::{RamConfig, RamDisk};

    use super::*;

    fn config<T: DriverConfig>(disk: &DiskSpec) -> &T {
        disk.source
            .driver()
            .and_then(config_of)
            .expect("that driver's disk")
    }

    fn error(text: &str) -> String {
        format!("{:#}", DiskSpec::parse(text).unwrap_err())
    }

    #[test]
    fn disk_string_becomes_a_disk() {
        let disk =
            DiskSpec::parse("name=vm1,file=vm1.raw,size=64M,ro=off,queue=q,sched=mq-deadline").unwrap();
        assert_eq!((disk.name.as_str(), disk.queue.as_deref()), ("vm1", Some("q")));
        assert_eq!(
            (disk.sched, disk.group.as_str()),
            (Some(sched::MQ_DEADLINE), "/vm1")
        );
        let file: &FileConfig = config(&disk);
        assert_eq!((file.path.to_str(), file.size), (Some("vm1.raw"), Some(64 << 20)));
    }

    #[test]
    fn comma_behind_a_backslash_belongs_to_the_value() {
        let disk = DiskSpec::parse(r"name=a,file=x\,y\z\,.raw,description=one\, two,ro=on").unwrap();
        let file: &FileConfig = config(&disk);
        assert_eq!(file.path.to_str(), Some(r"x,y\z,.raw"));
        assert_eq!((disk.description.as_str(), disk.read_only), ("one, two", true));
    }

    #[test]
    fn disk_in_memory_may_have_huge_pages() {
        let disk = DiskSpec::parse("name=a,ram=1M,hugepages=on").unwrap();
        let wanted = RamDisk {
            size: 1 << 20,
            config: RamConfig { hugepages: true },
        };
        assert_eq!(config::<RamDisk>(&disk), &wanted);
    }

    #[test]
    fn disk_may_be_on_an_nbd_server() {
        let disk =
            DiskSpec::parse("name=a,nbd=nbd+unix:///vm1?socket=/tmp/s,connections=2,reconnect=30").unwrap();
        let config: &NbdConfig = config(&disk);
        assert_eq!((config.uri.export.as_str(), config.connections), ("vm1", Some(2)));
        assert_eq!(config.reconnect.as_secs(), 30);
    }

    #[test]
    fn disk_may_lie_on_others() {
        let disk = DiskSpec::parse("name=big,striped=a+b:1G:2G,chunk=128K,ro=on").unwrap();
        let Source::Mapped(map) = disk.source else {
            panic!("on others")
        };
        let mut wanted = mapped::striped("a+b:1G:2G").unwrap();
        mapped::set(&mut wanted, "chunk", "128K").unwrap();
        assert_eq!((map, disk.read_only), (wanted, true));
    }

    #[test]
    fn fault_is_named_with_the_allowed_values() {
        for (text, parts) in [
            ("file=a", &["name= is missing"][..]),
            ("name=a", &["disk a", "file=PATH"]),
            (
                "name=a,ram=1M,null=1M",
                &["disk a", "ram= and null= exclude each other"],
            ),
            ("name=a,ram=2T", &["disk a", "ram=2199023255552", "at most 1T"]),
            ("name=a,ram=1X", &["disk a", "ram=1X"]),
            ("name=a,ram=0", &["disk a", "ram=0", "512"]),
            ("name=a,fiel=b", &["disk a", "fiel", "file=PATH"]),
            ("name=a,ram=1M,color=red", &["disk a", "color", "hugepages"]),
            ("name=a,ram=1M,hugepages=2", &["disk a", "hugepages=2"]),
            ("name=a,ram=1M,sched=cfq", &["cfq", "none, mq-deadline"]),
            ("name=a,file=b,file=c", &["disk a", "file= is given twice"]),
            (
                "name=a,null=1M,latency=1us,latency=2us",
                &["disk a", "latency= is given twice"],
            ),
            (
                "name=a,null=1M,poll_queues=1,io_poll_delay=-2",
                &["disk a", "io_poll_delay=-2 rejected", "-1", "1000000"],
            ),
            ("name=a,ram=1M,io_poll=maybe", &["disk a", "io_poll=maybe"]),
            ("name=a,ram=1M,block_size=768", &["768", "power of two"]),
            ("name=a/b,ram=1M", &["a/b", "letters"]),
            (
                "name=a,name=b,ram=1M",
                &["--disk name=a,name=b,ram=1M", "name= is given twice"],
            ),
            ("name=a,ram", &["not KEY=VALUE"]),
            (
                "name=a,ram=1M,serial=123456789012345678901",
                &["disk a", "serial=123456789012345678901", "1 to 20"],
            ),
            ("name=a,ram=1M,serial=a b", &["disk a", "serial=a b", "letters"]),
            ("name=a,ram=1M,serial=", &["disk a", "serial= rejected"]),
            ("name=a,ram=1M,export=", &["disk a", "export=\"\" rejected"]),
            ("name=a,ram=1M,export=b\tc", &["disk a", "control characters"]),
            ("name=a,ram=1M,group=x", &["group", "start with /"]),
            ("name=a,nbd=x", &["disk a", "nbd=x rejected", "nbd://"]),
            (
                "name=a,nbd=nbd://x/,connections=0",
                &["disk a", "connections=0", "1 to 64"],
            ),
            ("name=a,nbd=nbd://x/,size=1M", &["disk a", "size", "nbd driver"]),
            ("name=a,null=1M,latency=soon", &["disk a", "latency=soon"]),
            (
                "name=a,null=2T,memory=on",
                &["disk a", "null=2199023255552", "at most 1T"],
            ),
            (
                "name=a,null=1M,bad=1M-2M",
                &["disk a", "bad=1048576-2097152", "within the disk, 1048576 bytes"],
            ),
            (
                "name=a,null=1M,parallel=0",
                &["disk a", "parallel=0 rejected", "leave it out"],
            ),
            (
                "name=a,null=1M,poll_queues=1000",
                &["disk a", "poll_queues=1000", "128"],
            ),
            ("name=a,file=", &["disk a", "file= rejected", "path"]),
            (
                "name=a,file=x,size=9000000T",
                &["disk a", "size=9000000T", "less than 8388608T"],
            ),
            (
                "name=a,linear=b+,ro=on",
                &["disk a", "linear= rejected", "NAME:START:LENGTH"],
            ),
            ("name=a,striped=b,chunk=much", &["disk a", "chunk=much"]),
            ("name=a,linear=b,chunk=4K", &["disk a", "chunk", "linear"]),
            (
                "name=a,linear=b,sched=bfq",
                &["disk a: sched= rejected", "set it in its members"],
            ),
            ("name=a,linear=b,queue=q", &["disk a: queue= rejected"]),
        ] {
            let error = error(text);
            assert!(parts.iter().all(|part| error.contains(part)), "{text}: {error}");
        }
    }
}
