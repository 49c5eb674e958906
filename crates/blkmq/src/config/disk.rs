//! Decides how one disk is described: `name=vm1,file=vm1.raw,size=64M` on the command line, or a table of the
//! configuration file with the same keys. The driver's own keys are checked by the driver's configuration.

use anyhow::{Context, Result, bail};
use blkmq_config::plan::MultipathSource;
use blkmq_core::sched::Kind;
use blkmq_drivers::file::FileConfig;
use blkmq_drivers::multipath::MultipathConfig;
use blkmq_drivers::nbd::NbdConfig;
use blkmq_drivers::null::NullConfig;
use blkmq_drivers::ram::RamConfig;
use blkmq_host::mapped::MapConfig;
use blkmq_host::value;

use super::{Polling, check_name, elevator, paths, poll_delay};

/// One disk as it is asked for.
#[derive(Clone, Debug, PartialEq)]
pub struct DiskSpec {
    /// What clients ask for.
    pub name: String,
    /// What it is, for people who list the exports.
    pub description: String,
    /// What it stands on.
    pub source: Source,
    /// Whether changes are refused.
    pub read_only: bool,
    /// Smallest unit of its addresses, in bytes. Default: the drive's.
    pub block_size: Option<u32>,
    /// The queue it is on; none for that of its filesystem, or one of its own.
    pub queue: Option<String>,
    /// The elevator of its queue, if the disk names one.
    pub sched: Option<Kind>,
    /// How ends of its queue's requests are found, if the disk says so.
    pub polling: Polling,
    /// The group it is accounted to. Default: the disk's name under the root.
    pub group: String,
}

/// What a disk stands on.
#[derive(Clone, Debug, PartialEq)]
pub enum Source {
    /// An image file or a block device.
    File(FileConfig),
    /// An export of an NBD server.
    Nbd(Box<NbdConfig>),
    /// Sparse memory.
    Ram {
        /// Bytes.
        size: u64,
        /// The drive's own keys.
        config: RamConfig,
    },
    /// Nothing.
    Null {
        /// Bytes.
        size: u64,
        /// The drive's own keys.
        config: Box<NullConfig>,
    },
    /// Other disks, each of which leads to the same.
    Multipath(MultipathSource),
    /// Other disks.
    Mapped(MapConfig),
}

impl Source {
    /// What people who list the exports are told where nothing was given: not the path, which is the host's business.
    fn describe(&self) -> &'static str {
        match self {
            Self::File(_) => "disk on a file",
            Self::Nbd(_) => "disk on an NBD server",
            Self::Ram { .. } => "disk in memory",
            Self::Null { .. } => "null disk, stores nothing",
            Self::Multipath(_) => "disk over several paths",
            Self::Mapped(_) => "disk on other disks",
        }
    }
}

impl DiskSpec {
    /// Reads `key=value,key=value`; `\,` is a comma in a value.
    ///
    /// # Errors
    /// Names the disk, the key, the value and what is allowed.
    pub fn parse(text: &str) -> Result<Self> {
        let mut pairs = Vec::new();
        for part in parts(text) {
            let Some((key, value)) = part.split_once('=') else {
                bail!(
                    "--disk {text}: {part:?} is not KEY=VALUE; an example: --disk name=vm1,file=vm1.raw (see blkmq \
                     serve --help)"
                );
            };
            pairs.push((key.trim().to_owned(), value.to_owned()));
        }
        let name = take(&mut pairs, "name").with_context(|| format!("--disk {text}"))?;
        let Some(name) = name else {
            bail!("--disk {text}: name= is missing: say what clients ask for, as in --disk name=vm1,{text}");
        };
        Self::from_pairs(name, pairs)
    }

    /// Makes a disk of its keys and values.
    ///
    /// # Errors
    /// As [`DiskSpec::parse`].
    pub fn from_pairs(name: String, mut pairs: Vec<(String, String)>) -> Result<Self> {
        check_name("disk", &name)?;
        let context = || format!("disk {name}");
        Self::build(&name, &mut pairs).with_context(context)
    }

    fn build(name: &str, pairs: &mut Vec<(String, String)>) -> Result<Self> {
        let switch = |pair: Option<String>, key| pair.map_or(Ok(false), |text| value::switch(key, &text));
        let read_only = switch(take(pairs, "ro")?, "ro")? || switch(take(pairs, "read_only")?, "read_only")?;
        let queue = take(pairs, "queue")?;
        queue.iter().try_for_each(|queue| check_name("queue", queue))?;
        let sched = take(pairs, "sched")?.map(|text| elevator(&text)).transpose()?;
        let polling = Polling {
            io_poll: take(pairs, "io_poll")?
                .map(|text| value::switch("io_poll", &text))
                .transpose()?,
            delay: take(pairs, "io_poll_delay")?
                .map(|text| poll_delay(&text))
                .transpose()?,
        };
        let description = take(pairs, "description")?;
        if let Some(long) = description.as_ref().filter(|text| text.len() > DESCRIPTION_MAX) {
            bail!(
                "description of {} bytes rejected: must be at most {DESCRIPTION_MAX}, as NBD has it; shorten it",
                long.len()
            );
        }
        let group = take(pairs, "group")?.unwrap_or_else(|| format!("/{name}"));
        check_group(&group)?;
        let block_size = take(pairs, "block_size")?;
        let source = source(pairs, read_only, block_size.as_deref())?;
        let block_size = block_size.as_deref().map(block).transpose()?;
        if matches!(source, Source::Mapped(_)) {
            refuse_queue_keys(&queue, sched, polling)?;
        }
        if let Some((key, _)) = pairs.first() {
            bail!("key {key} rejected: known for every disk are {COMMON_KEYS}");
        }
        Ok(Self {
            name: name.to_owned(),
            description: description.unwrap_or_else(|| source.describe().to_owned()),
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

/// Cuts a disk string at its commas. A comma behind a backslash belongs to the value; other backslashes are what they are.
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

/// Takes the keys that say what the disk stands on, and the driver's own.
fn source(pairs: &mut Vec<(String, String)>, read_only: bool, block_size: Option<&str>) -> Result<Source> {
    let drivers = ["file", "ram", "null", "nbd", "linear", "striped", "multipath"];
    let given: Vec<&str> = drivers
        .into_iter()
        .filter(|key| pairs.iter().any(|pair| pair.0 == *key))
        .collect();
    match given[..] {
        ["file"] => {
            let mut config = FileConfig {
                read_only,
                ..FileConfig::default()
            };
            if let Some(size) = block_size {
                config.set("block_size", size)?;
            }
            for (key, value) in pairs.drain(..) {
                config.set(&key, &value)?;
            }
            Ok(Source::File(config))
        }
        ["nbd"] => {
            let uri = take(pairs, "nbd")?.expect("it is given");
            let mut config = NbdConfig::new(&uri)?;
            for (key, value) in pairs.drain(..) {
                config.set(&key, &value)?;
            }
            Ok(Source::Nbd(Box::new(config)))
        }
        ["ram"] => {
            let size = take_size(pairs, "ram")?;
            fits_memory("ram", size)?;
            let mut config = RamConfig::default();
            for (key, value) in pairs.drain(..) {
                config.set(&key, &value)?;
            }
            Ok(Source::Ram { size, config })
        }
        ["null"] => {
            let size = take_size(pairs, "null")?;
            let mut config = NullConfig::default();
            for (key, value) in pairs.drain(..) {
                config.set(&key, &value)?;
            }
            config.check()?;
            if config.memory {
                fits_memory("memory=on with null", size)?;
            }
            if let Some(bad) = config.bad.iter().find(|bad| bad.end > size) {
                bail!(
                    "bad={}-{} rejected: must lie within the disk, {size} bytes",
                    bad.start,
                    bad.end
                );
            }
            Ok(Source::Null {
                size,
                config: Box::new(config),
            })
        }
        ["multipath"] => {
            let groups = paths::parse(&take(pairs, "multipath")?.expect("it is given"))?;
            let mut config = MultipathConfig::default();
            for (key, value) in pairs.drain(..) {
                config.set(&key, &value)?;
            }
            Ok(Source::Multipath(MultipathSource { groups, config }))
        }
        [key @ ("linear" | "striped")] => {
            let members = take(pairs, key)?.expect("it is given");
            let mut map = match key {
                "linear" => MapConfig::linear(&members)?,
                _ => MapConfig::striped(&members)?,
            };
            for (key, value) in pairs.drain(..) {
                map.set(&key, &value)?;
            }
            Ok(Source::Mapped(map))
        }
        [] => {
            let unknown = pairs
                .first()
                .map(|(key, _)| format!(" (key {key} is not known)"))
                .unwrap_or_default();
            bail!("nothing to stand on{unknown}: give one of {SOURCES}");
        }
        _ => bail!(
            "{} exclude each other: give one of them",
            given.join("= and ") + "="
        ),
    }
}

/// Checks the size of a disk whose content is kept in memory.
fn fits_memory(key: &str, size: u64) -> Result<()> {
    if size > MEMORY_MAX {
        bail!(
            "{key}={size} rejected: must be at most 1T, since the table of its pieces takes memory at once"
        );
    }
    Ok(())
}

/// A disk on other disks has no queue that keys could be for.
fn refuse_queue_keys(queue: &Option<String>, sched: Option<Kind>, polling: Polling) -> Result<()> {
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

/// Takes a size that is known to be given.
fn take_size(pairs: &mut Vec<(String, String)>, key: &str) -> Result<u64> {
    let text = take(pairs, key)?.expect("it is given");
    let size = value::size(key, &text)?;
    if size == 0 {
        bail!("{key}={text} rejected: a disk has at least one block, 512 bytes");
    }
    Ok(size)
}

/// Takes a key out of the list; it must not be there twice.
fn take(pairs: &mut Vec<(String, String)>, key: &str) -> Result<Option<String>> {
    let Some(at) = pairs.iter().position(|pair| pair.0 == key) else {
        return Ok(None);
    };
    let (_, value) = pairs.remove(at);
    if pairs.iter().any(|pair| pair.0 == key) {
        bail!("{key}= is given twice: keep one");
    }
    Ok(Some(value))
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

/// Checks a group's path: `/` and names with `/` between, as in `/customers/a/vm1`.
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
/// The largest disk in memory, in bytes.
const MEMORY_MAX: u64 = 1 << 40;
const SOURCES: &str =
    "file=PATH, ram=SIZE, null=SIZE, nbd=URI, linear=DISKS, striped=DISKS, multipath=DISK+DISK";
const COMMON_KEYS: &str = "name, file | ram | null | nbd | linear | striped | multipath, ro, queue, sched, io_poll, \
                           io_poll_delay, block_size, group, description";

#[cfg(test)]
mod tests {
    use super::*;

    fn error(text: &str) -> String {
        format!("{:#}", DiskSpec::parse(text).unwrap_err())
    }

    #[test]
    fn a_disk_string_becomes_a_disk() {
        let disk =
            DiskSpec::parse("name=vm1,file=vm1.raw,size=64M,ro=off,queue=q,sched=mq-deadline").unwrap();
        assert_eq!((disk.name.as_str(), disk.queue.as_deref()), ("vm1", Some("q")));
        assert_eq!(
            (disk.sched, disk.group.as_str()),
            (Some(Kind::MqDeadline), "/vm1")
        );
        let Source::File(file) = disk.source else {
            panic!("a file")
        };
        assert_eq!((file.path.to_str(), file.size), (Some("vm1.raw"), Some(64 << 20)));
    }

    #[test]
    fn a_comma_behind_a_backslash_belongs_to_the_value() {
        let disk = DiskSpec::parse(r"name=a,file=x\,y\z\,.raw,description=one\, two,ro=on").unwrap();
        let Source::File(file) = disk.source else {
            panic!("a file")
        };
        assert_eq!(file.path.to_str(), Some(r"x,y\z,.raw"));
        assert_eq!((disk.description.as_str(), disk.read_only), ("one, two", true));
    }

    #[test]
    fn a_disk_in_memory_may_have_huge_pages() {
        let disk = DiskSpec::parse("name=a,ram=1M,hugepages=on").unwrap();
        let config = RamConfig { hugepages: true };
        assert_eq!(
            disk.source,
            Source::Ram {
                size: 1 << 20,
                config
            }
        );
    }

    #[test]
    fn a_disk_may_be_on_an_nbd_server() {
        let disk =
            DiskSpec::parse("name=a,nbd=nbd+unix:///vm1?socket=/tmp/s,connections=2,reconnect=30").unwrap();
        let Source::Nbd(config) = disk.source else {
            panic!("an NBD server")
        };
        assert_eq!((config.uri.export.as_str(), config.connections), ("vm1", Some(2)));
        assert_eq!(config.reconnect.as_secs(), 30);
    }

    #[test]
    fn a_disk_may_lie_on_others() {
        let disk = DiskSpec::parse("name=big,striped=a+b:1G:2G,chunk=128K,ro=on").unwrap();
        let Source::Mapped(map) = disk.source else {
            panic!("on others")
        };
        let mut wanted = MapConfig::striped("a+b:1G:2G").unwrap();
        wanted.set("chunk", "128K").unwrap();
        assert_eq!((map, disk.read_only), (wanted, true));
    }

    #[test]
    fn what_is_wrong_is_named_with_what_is_allowed() {
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
