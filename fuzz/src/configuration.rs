//! Text of an operator against the readers of the configuration: the file, a disk's string, a group's, an address.
//!
//! Every input is given to all of them. Broken would be: a panic, an error that names nothing, an address that does not
//! come back as it was written, settings that passed though they cannot be, or a document that means something else when it is
//! written down and read again.

use blkmq_config::diff::diff;
use blkmq_config::{Config, DiskSpec, Document, GroupSpec, group};
use blkmq_export::common::Address;

/// Runs one input.
///
/// # Panics
/// An invariant is broken.
pub fn run(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else {
        return;
    };
    file(text);
    disk(text);
    a_group(text);
    address(text);
}

fn file(text: &str) {
    let config = match Config::from_toml(text) {
        Ok(config) => config,
        Err(error) => return names(&format!("{error:#}"), &[""]),
    };
    written_again(text, &config);
    config.disks.iter().for_each(check_disk);
    config.groups.iter().for_each(check_group);
    match config.check() {
        Err(error) => names(&format!("{error:#}"), &["disk", "queue", "export"]),
        Ok(()) => {
            assert!(!config.disks.is_empty());
            for queue in config.queues.keys() {
                let is_on_it = |disk: &DiskSpec| disk.queue_name() == Some(queue);
                assert!(config.disks.iter().any(is_on_it), "nobody is on queue {queue}");
            }
        }
    }
}

/// What `ctl dump` prints of it starts the same daemon; from nothing to it, and back, there is a way or a reason.
fn written_again(text: &str, config: &Config) {
    let document = Document::from_toml(text).expect("it is TOML");
    let again = Document::from_toml(&document.to_string()).expect("what is written is TOML");
    assert_eq!(again, document);
    let meant = again.config().expect("it means something");
    assert_eq!(&meant, config);
    let served = config.disks.iter();
    let sizes = served.map(|disk| (disk.name.clone(), 1 << 20)).collect();
    assert_eq!(diff(config, &meant, &sizes).expect("nothing differs"), []);
    for (from, to) in [(&Config::default(), config), (config, &Config::default())] {
        if let Err(error) = diff(from, to, &sizes) {
            names(
                &error.to_string(),
                &["disk", "queue", "export", "[daemon]", "[control]"],
            );
        }
    }
}

fn disk(text: &str) {
    match DiskSpec::parse(text) {
        Ok(disk) => check_disk(&disk),
        Err(error) => names(&format!("{error:#}"), &["disk"]),
    }
}

fn a_group(text: &str) {
    match group::parse(text) {
        Ok(group) => check_group(&group),
        Err(error) => names(&format!("{error:#}"), &["group"]),
    }
}

fn check_group(group: &GroupSpec) {
    assert!(group.path.starts_with('/'), "{group:?}");
    assert!((1..=1000).contains(&group.weight()), "{group:?}");
    assert!(
        group.latency_target.is_none_or(|target| target.0 > 0),
        "{group:?}"
    );
}

fn check_disk(disk: &DiskSpec) {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    assert!(
        !disk.name.is_empty() && disk.name.chars().all(is_plain),
        "{disk:?}"
    );
    assert!(disk.group.starts_with('/'), "{disk:?}");
    if let Some(block) = disk.block_size {
        assert!(
            block.is_power_of_two() && (512..=65536).contains(&block),
            "{disk:?}"
        );
    }
}

fn address(text: &str) {
    match text.parse::<Address>() {
        Ok(address) => assert_eq!(address.to_string().parse::<Address>().ok(), Some(address)),
        Err(error) => names(&error.to_string(), &["address"]),
    }
}

/// An error must say something, and about what.
fn names(error: &str, objects: &[&str]) {
    assert!(!error.trim().is_empty(), "an error without words");
    assert!(
        objects.iter().any(|object| error.contains(object)),
        "names none of {objects:?}: {error}"
    );
}
