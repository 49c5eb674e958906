//! Decides the form of the configuration file: TOML with `[daemon]`, `[queue.NAME]`, `[disk.NAME]` and `[[export]]`.
//! A disk's keys are those of `--disk`; see `docs/operate/configuration.md`.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use blkmq_core::time::Nanos;
use blkmq_host::driver::value;
use serde::Deserialize;
use toml::Value;

use super::{Config, DiskSpec, ExportSpec, QueueSettings, check_name, elevator};

/// The file as it stands.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default)]
    daemon: Daemon,
    #[serde(default)]
    queue: BTreeMap<String, Queue>,
    #[serde(default)]
    disk: toml::Table,
    #[serde(default)]
    export: Vec<Export>,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Daemon {
    reactors: Option<u16>,
    shutdown_limit: Option<String>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Queue {
    sched: Option<String>,
    depth: Option<u32>,
    timeout: Option<String>,
    merges: Option<bool>,
    #[serde(default)]
    tunables: BTreeMap<String, u64>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Export {
    nbd: String,
    disks: Option<Vec<String>>,
}

/// Reads a configuration file's text.
pub(super) fn parse(text: &str) -> Result<Config> {
    let file: File = toml::from_str(text)?;
    let default = Config::default();
    let shutdown_limit = match &file.daemon.shutdown_limit {
        Some(text) => duration("shutdown_limit", text).context("[daemon]")?,
        None => default.shutdown_limit,
    };
    let queue = |(name, queue): (String, Queue)| -> Result<_> {
        let context = format!("[queue.{name}]");
        check_name("queue", &name)?;
        Ok((name, queue.settings().context(context)?))
    };
    Ok(Config {
        reactors: file.daemon.reactors,
        shutdown_limit,
        disks: file.disk.into_iter().map(disk).collect::<Result<_>>()?,
        queues: file.queue.into_iter().map(queue).collect::<Result<_>>()?,
        exports: file.export.into_iter().map(export).collect::<Result<_>>()?,
    })
}

impl Queue {
    fn settings(self) -> Result<QueueSettings> {
        Ok(QueueSettings {
            sched: self.sched.as_deref().map(elevator).transpose()?,
            depth: self.depth,
            timeout: self
                .timeout
                .as_deref()
                .map(|text| duration("timeout", text))
                .transpose()?,
            merges: self.merges,
            tunables: self.tunables.into_iter().collect(),
        })
    }
}

fn disk((name, table): (String, Value)) -> Result<DiskSpec> {
    let Value::Table(table) = table else {
        bail!("[disk] {name} rejected: must be a table, as in [disk.{name}]");
    };
    let pair = |(key, value): (String, Value)| {
        let value = match value {
            Value::String(text) => text,
            Value::Integer(number) => number.to_string(),
            Value::Float(number) => number.to_string(),
            Value::Boolean(true) => "on".to_owned(),
            Value::Boolean(false) => "off".to_owned(),
            other => {
                bail!("[disk.{name}] {key} rejected: must be a text, a number or a boolean, not {other}")
            }
        };
        Ok((key, value))
    };
    let pairs = table.into_iter().map(pair).collect::<Result<_>>()?;
    DiskSpec::from_pairs(name, pairs)
}

fn export(export: Export) -> Result<ExportSpec> {
    Ok(ExportSpec {
        address: export.nbd.parse().context("[[export]] nbd")?,
        disks: export.disks,
    })
}

fn duration(key: &str, text: &str) -> Result<Duration> {
    let Nanos(ns) = value::time(key, text)?;
    Ok(Duration::from_nanos(ns))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Source;

    const EXAMPLE: &str = r#"
        [daemon]
        reactors = 2
        shutdown_limit = "5s"
        [queue.fast]
        sched = "mq-deadline"
        depth = 64
        tunables = { read_expire = 250 }
        [disk.vm1]
        file = "vm1.raw"
        ro = true
        queue = "fast"
        [disk.scratch]
        ram = "64M"
        [[export]]
        nbd = "unix:vm1.sock"
        disks = ["vm1"]
        [[export]]
        nbd = "tcp:127.0.0.1:10809"
    "#;

    #[test]
    fn a_file_says_the_same_as_flags() {
        let config = parse(EXAMPLE).unwrap();
        config.check().unwrap();
        assert_eq!(config.disks[0], DiskSpec::parse("name=scratch,ram=64M").unwrap());
        assert_eq!(
            config.disks[1],
            DiskSpec::parse("name=vm1,file=vm1.raw,ro=on,queue=fast").unwrap()
        );
        assert!(matches!(config.disks[0].source, Source::Ram { size: 0x400_0000 }));
        assert_eq!(
            (config.reactors, config.shutdown_limit),
            (Some(2), Duration::from_secs(5))
        );
        assert_eq!(config.queues["fast"].tunables, [("read_expire".to_owned(), 250)]);
    }

    #[test]
    fn the_example_of_the_documents_is_sound() {
        let config = parse(include_str!("../../../../docs/operate/blkmq.toml")).unwrap();
        config.check().unwrap();
        assert_eq!((config.disks.len(), config.exports.len()), (5, 2));
    }

    #[test]
    fn a_bad_file_is_answered_with_table_and_key() {
        for (text, part) in [
            ("[disk.a]\nram = \"1M\"\ncolour = 3", "colour"),
            ("[disk.a]\nram = [1]", "[disk.a] ram"),
            ("[queue.q]\nsched = \"cfq\"", "[queue.q]"),
            ("[demon]", "demon"),
            ("[[export]]\nnbd = \"smoke\"", "unix:PATH"),
            ("[daemon]\nshutdown_limit = \"soon\"", "shutdown_limit=soon"),
            ("disk = 3", "disk"),
        ] {
            let error = format!("{:#}", parse(text).unwrap_err());
            assert!(error.contains(part), "{text}: {error}");
        }
    }

    #[test]
    fn parts_that_do_not_fit_together_are_refused() {
        let check = |text: &str| format!("{:#}", parse(text).unwrap().check().unwrap_err());
        assert!(check("").contains("no disk"));
        assert!(
            check("[disk.a]\nram=\"1M\"\n[[export]]\nnbd=\"unix:x\"\ndisks=[\"b\"]").contains("no disk b")
        );
        assert!(check("[disk.a]\nram=\"1M\"\n[queue.q]\ndepth=3").contains("queue q"));
    }
}
