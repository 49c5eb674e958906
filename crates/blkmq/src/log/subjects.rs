//! What a message is about that names only a part of it: the disk on a file or at an address, and a disk's group. The
//! daemon says what there is, at its start and after each change; the [journal](super::journal)'s entries ask.

use std::collections::HashMap;
use std::sync::{PoisonError, RwLock};

use blkmq_config::{Config, Document, Kind};

/// What a message is about.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Subject {
    pub(super) disk: Option<String>,
    pub(super) group: Option<String>,
    /// An address.
    pub(super) export: Option<String>,
    /// A file, an image or a server, as the configuration has it.
    pub(super) source: Option<String>,
}

/// What there is, by names.
#[derive(Debug, Default)]
struct Known {
    groups: HashMap<String, String>,
    disks_by_source: HashMap<String, String>,
    disks_by_export: HashMap<String, String>,
}

/// Takes note of what a daemon serves from now on.
pub(crate) fn know(document: &Document, config: &Config) {
    let mut known = Known::default();
    for disk in &config.disks {
        known.groups.insert(disk.name.clone(), disk.group.clone());
        let source = disk.source.driver().and_then(|driver| {
            let written = document.get(Kind::Disk, &disk.name)?.get(driver.driver())?;
            written.as_str().map(str::to_owned)
        });
        if let Some(source) = source {
            known.disks_by_source.insert(source, disk.name.clone());
        }
    }
    for export in &config.exports {
        let served: Vec<&str> = match &export.disks {
            Some(names) => names.iter().map(String::as_str).collect(),
            None => config.disks.iter().map(|disk| disk.name.as_str()).collect(),
        };
        let is_one_for_each = export.address.contains(PLACEHOLDER);
        for disk in served.iter().filter(|_| is_one_for_each || served.len() == 1) {
            let address = export.address.replace(PLACEHOLDER, disk);
            known.disks_by_export.insert(address, (*disk).to_owned());
        }
    }
    *KNOWN.write().unwrap_or_else(PoisonError::into_inner) = Some(known);
}

/// Adds what follows from the parts of a subject.
pub(super) fn complete(mut subject: Subject) -> Subject {
    let known = KNOWN.read().unwrap_or_else(PoisonError::into_inner);
    let Some(known) = &*known else { return subject };
    let found = |by: &HashMap<String, String>, name: &Option<String>| by.get(name.as_ref()?).cloned();
    subject.disk = subject
        .disk
        .or_else(|| found(&known.disks_by_source, &subject.source))
        .or_else(|| found(&known.disks_by_export, &subject.export));
    subject.group = subject.group.or_else(|| found(&known.groups, &subject.disk));
    subject
}

/// Of the process, as its log is.
static KNOWN: RwLock<Option<Known>> = RwLock::new(None);
/// What stands for a disk's name in an address that is one for each disk.
const PLACEHOLDER: &str = "{disk}";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn subject_gets_the_disk_of_its_file_or_address_and_the_group_of_its_disk() {
        let text = "[disk.vm1]\nfile = \"/images/1.raw\"\ngroup = \"/a/vm1\"\n[disk.vm2]\nnbd = \"nbd://h/2\"\n\
                    [[export]]\nnbd = \"unix:/run/one.sock\"\ndisks = [\"vm1\"]\n[[export]]\nnbd = \"unix:/run/all.sock\"\n\
                    [[export]]\nvhost-user = \"unix:/run/{disk}.vhost\"\n";
        know(
            &Document::from_toml(text).unwrap(),
            &Config::from_toml(text).unwrap(),
        );
        let of = |export: &str, source: &str| {
            let text = |text: &str| (!text.is_empty()).then(|| text.to_owned());
            let subject = Subject {
                export: text(export),
                source: text(source),
                ..Subject::default()
            };
            let known = complete(subject);
            (known.disk.unwrap_or_default(), known.group.unwrap_or_default())
        };
        let found = |disk: &str, group: &str| (disk.to_owned(), group.to_owned());
        assert_eq!(of("", "/images/1.raw"), found("vm1", "/a/vm1"));
        assert_eq!(of("", "nbd://h/2"), found("vm2", "/vm2"));
        assert_eq!(of("unix:/run/one.sock", ""), found("vm1", "/a/vm1"));
        assert_eq!(of("unix:/run/vm2.vhost", ""), found("vm2", "/vm2"));
        assert_eq!(of("unix:/run/all.sock", "/images/3.raw"), found("", ""));
    }
}
