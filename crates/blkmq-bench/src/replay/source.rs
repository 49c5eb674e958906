//! The source of a replay: blktrace's files, or an I/O log of fio, become one list of I/Os in the order of
//! their times.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::bio::{Flags, Op};
use blkmq_core::trace::blktrace::{DISCARD, FLUSH, FUA, META, QUEUE, Record, SECTOR, WRITE, device_text};

/// One recorded I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Recorded {
    /// Nanoseconds since the recording began.
    pub(super) at: u64,
    /// The index of its device in the recording.
    pub(super) device: u32,
    pub(super) op: Op,
    pub(super) flags: Flags,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// What was recorded.
#[derive(Debug, Default)]
pub(super) struct Recording {
    /// The names of the devices, in the order of their indices.
    pub(super) devices: Vec<String>,
    /// In the order of their times.
    pub(super) ios: Vec<Recorded>,
}

impl Recording {
    /// Reads a recording: an I/O log, or blktrace's files by the part of their names before
    /// `.blktrace.`.
    ///
    /// # Errors
    /// If there is none, or it has neither format.
    pub(super) fn read(name: &Path) -> Result<Self> {
        let mut all = if name.is_file() && !is_blktrace(name) {
            let text = std::fs::read_to_string(name);
            let text = text.with_context(|| format!("{} cannot be read", name.display()))?;
            Self::of_iolog(&text).with_context(|| format!("{}", name.display()))?
        } else {
            Self::of_blktrace(&files(name)?)?
        };
        ensure!(!all.ios.is_empty(), "{}: no I/O was recorded", name.display());
        all.ios.sort_by_key(|io| io.at);
        let first = all.ios[0].at;
        all.ios.iter_mut().for_each(|io| io.at -= first);
        Ok(all)
    }

    /// The I/Os as they were queued, before any merging: the replay may merge them again.
    fn of_blktrace(files: &[PathBuf]) -> Result<Self> {
        let mut ios = Vec::new();
        for file in files {
            let bytes = std::fs::read(file).with_context(|| format!("{} cannot be read", file.display()))?;
            let mut rest = &bytes[..];
            while let Some((record, len)) =
                Record::parse(rest).with_context(|| format!("{}", file.display()))?
            {
                rest = &rest[len..];
                if record.is_event(QUEUE) {
                    ios.push(of_record(&record));
                }
            }
            if !rest.is_empty() {
                eprintln!("{}: the last record is not whole", file.display());
            }
        }
        let mut numbers: BTreeMap<u32, u32> = ios.iter().map(|io| (io.device, 0)).collect();
        numbers
            .values_mut()
            .zip(0..)
            .for_each(|(number, next)| *number = next);
        ios.iter_mut().for_each(|io| io.device = numbers[&io.device]);
        Ok(Self {
            devices: numbers.keys().map(|device| device_text(*device)).collect(),
            ios,
        })
    }

    /// Versions 2 and 3 of fio's I/O logs.
    fn of_iolog(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let has_times = match lines.next() {
            Some("fio version 2 iolog") => false,
            Some("fio version 3 iolog") => true,
            _ => bail!("neither blktrace's files nor an I/O log of fio's (write_iolog)"),
        };
        let mut recording = Self::default();
        let mut now = 0;
        for (line, number) in lines.zip(2..) {
            let entry = recording.take_line(line, has_times, &mut now);
            entry.with_context(|| {
                let shown: String = line.chars().take(SHOWN_MAX).collect();
                format!("line {number}: {shown:?}")
            })?;
        }
        Ok(recording)
    }

    fn take_line(&mut self, line: &str, has_times: bool, now: &mut u64) -> Result<()> {
        let mut words = line.split_whitespace();
        if has_times {
            // Times are in microseconds, as fio 3.33 writes them.
            let us: u64 = words.next().context("no time")?.parse().context("no time")?;
            *now = us.saturating_mul(1000);
        }
        let (Some(file), Some(action)) = (words.next(), words.next()) else {
            bail!("a file and an action are missing");
        };
        let mut number = || -> Result<u64> {
            let word = words.next().context("a number is missing")?;
            word.parse().with_context(|| format!("{word:?} is no number"))
        };
        let op = match action {
            "add" | "open" | "close" => return Ok(()),
            "wait" => {
                *now = now.saturating_add(number()?.saturating_mul(1000));
                return Ok(());
            }
            "read" => Op::Read,
            "write" => Op::Write,
            "trim" => Op::Discard,
            "sync" | "datasync" => Op::Flush,
            other => bail!("{other:?} is no action of an I/O log"),
        };
        let (offset, len) = match op {
            Op::Flush => (0, 0),
            _ => (number()?, number()?),
        };
        let device = self.device(file);
        self.ios.push(Recorded {
            at: *now,
            device,
            op,
            flags: Flags::NONE,
            offset,
            len,
        });
        Ok(())
    }

    fn device(&mut self, name: &str) -> u32 {
        let known = self.devices.iter().position(|known| known == name);
        let index = known.unwrap_or_else(|| {
            self.devices.push(name.to_owned());
            self.devices.len() - 1
        });
        index as u32
    }
}

fn of_record(record: &Record) -> Recorded {
    let kind = record.categories();
    let op = match kind {
        _ if kind & FLUSH != 0 && record.bytes == 0 => Op::Flush,
        _ if kind & DISCARD != 0 => Op::Discard,
        _ if kind & (WRITE | META) == WRITE | META => Op::WriteZeroes,
        _ if kind & WRITE != 0 => Op::Write,
        _ => Op::Read,
    };
    let is_flush = op == Op::Flush;
    Recorded {
        at: record.time,
        device: record.device,
        op,
        flags: match kind & FUA != 0 && op == Op::Write {
            true => Flags::FUA,
            false => Flags::NONE,
        },
        offset: if is_flush {
            0
        } else {
            record.sector.saturating_mul(SECTOR)
        },
        len: record.bytes.into(),
    }
}

/// Says whether a file is one of blktrace's by its name.
fn is_blktrace(file: &Path) -> bool {
    let name = file.file_name().unwrap_or_default().to_string_lossy();
    name.contains(".blktrace.")
}

/// The files of a recording by blktrace: one, or one for each CPU.
fn files(name: &Path) -> Result<Vec<PathBuf>> {
    if name.is_file() {
        return Ok(vec![name.to_owned()]);
    }
    let of_cpu = |cpu: u32| PathBuf::from(format!("{}.blktrace.{cpu}", name.display()));
    let files: Vec<PathBuf> = (0..CPUS_MAX).map(of_cpu).filter(|file| file.exists()).collect();
    ensure!(
        !files.is_empty(),
        "{name}: there is no such file, and no {name}.blktrace.0",
        name = name.display()
    );
    Ok(files)
}

const CPUS_MAX: u32 = 1024;
/// Characters of a line that an error message shows.
const SHOWN_MAX: usize = 100;

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn logs_of_both_versions_are_read() {
        let two = "fio version 2 iolog\n/a add\n/a open\n/a write 4096 512\n/a wait 250\n/b read 0 1024\n/a sync 0 0\n/a close\n";
        let log = Recording::of_iolog(two).expect("it is one");
        assert_eq!(log.devices, ["/a", "/b"]);
        let seen: Vec<_> = log
            .ios
            .iter()
            .map(|io| (io.at, io.device, io.op, io.offset, io.len))
            .collect();
        let expected = [
            (0, 0, Op::Write, 4096, 512),
            (250_000, 1, Op::Read, 0, 1024),
            (250_000, 0, Op::Flush, 0, 0),
        ];
        assert_eq!(seen, expected);
        let three = "fio version 3 iolog\n2 /a open\n5 /a trim 0 8192\n";
        let log = Recording::of_iolog(three).expect("it is one");
        assert_eq!((log.ios[0].at, log.ios[0].op), (5000, Op::Discard));
    }

    #[test]
    fn fault_in_a_log_is_named_with_its_line() {
        for (text, what) in [
            ("", "neither blktrace's files"),
            ("fio version 2 iolog\n/a", "line 2"),
            ("fio version 2 iolog\n/a add\n/a write x 1", "\"x\" is no number"),
            ("fio version 2 iolog\n/a fly 0 1", "\"fly\" is no action"),
            ("fio version 3 iolog\n/a read 0 1", "no time"),
        ] {
            let error = format!("{:#}", Recording::of_iolog(text).expect_err(text));
            assert!(error.contains(what), "{text:?}: {error}");
        }
    }

    proptest! {
        #[test]
        fn log_of_anything_is_read_or_refused(
            version in 2..4,
            lines in vec("([0-9]{1,20} )?(/[a-b]|.{0,3}) (read|write|trim|sync|wait|add|.{0,5})( [0-9]{1,21}| .{0,3}){0,3}", 0..20),
        ) {
            let log = Recording::of_iolog(&format!("fio version {version} iolog\n{}", lines.join("\n")));
            if let Ok(log) = log {
                prop_assert!(log.ios.len() <= lines.len());
                prop_assert!(log.ios.iter().all(|io| (io.device as usize) < log.devices.len()));
            }
        }
    }
}
