//! The adjustment of a block device of the kernel, by its attributes in sysfs, above all its scheduler.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, ensure};

/// A block device, named by its path: `/dev/loop0`.
pub(crate) struct BlockDevice(String);

impl BlockDevice {
    pub(crate) const fn new(path: String) -> Self {
        Self(path)
    }

    /// Its path.
    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// Sets one of the kernel's schedulers on it.
    ///
    /// # Errors
    /// If the kernel does not offer it.
    pub(crate) fn choose(&self, scheduler: &str) -> Result<()> {
        let offered = self.read(SCHEDULER)?;
        ensure!(
            offered.contains(scheduler),
            "the kernel offers no {scheduler} on {}: {offered}; load its module",
            self.0,
        );
        self.write(SCHEDULER, scheduler)
    }

    /// The settings of its scheduler, as `low_latency=1 slice_idle=8`; what cannot be read is left out.
    pub(crate) fn tunables(&self) -> String {
        let entries = fs::read_dir(self.attribute(TUNABLES))
            .into_iter()
            .flatten()
            .flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let setting = |name: String| {
            Some(format!(
                "{name}={}",
                self.read(&format!("{TUNABLES}/{name}")).ok()?
            ))
        };
        let mut settings: Vec<String> = names.filter_map(setting).collect();
        settings.sort();
        settings.join(" ")
    }

    /// Sets one of its attributes in sysfs: `queue/rotational`.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn write(&self, attribute: &str, value: &str) -> Result<()> {
        let path = self.attribute(attribute);
        fs::write(&path, value).with_context(|| format!("writing {value} to {}", path.display()))
    }

    /// Reads one.
    ///
    /// # Errors
    /// The system's error.
    pub(crate) fn read(&self, attribute: &str) -> Result<String> {
        let path = self.attribute(attribute);
        let value = fs::read_to_string(&path).with_context(|| format!("reading {}", path.display()))?;
        Ok(value.trim().to_owned())
    }

    fn attribute(&self, name: &str) -> PathBuf {
        Path::new("/sys/block")
            .join(self.0.trim_start_matches("/dev/"))
            .join(name)
    }
}

const SCHEDULER: &str = "queue/scheduler";
const TUNABLES: &str = "queue/iosched";
