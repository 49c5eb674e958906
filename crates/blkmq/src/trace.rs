//! `blkmq trace`, which traces a running daemon's requests: it starts the trace over the control socket,
//! reads events from memory that it shares with the daemon, and writes them into files that `blkparse` reads.
//!
//! | part | decides |
//! |---|---|
//! | `recording` | what the daemon provides |
//! | `encode` | the records of events |
//! | `output` | how records are written |

mod encode;
mod output;
pub(crate) mod recording;

use std::fs::File;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use blkmq_core::ids::ReactorId;
use blkmq_core::trace::Receiver;
use blkmq_core::trace::blktrace::device_text;
use blkmq_host::control::receivers;
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use self::encode::Encoder;
use self::output::Output;
use self::recording::{FORMAT, Started};
use crate::complete::Disks;
use crate::control::client::{Client, QUERY_MAX};
use crate::control::{default_path_to_ask, socket_path};
use crate::stdout::has_reader_left_within;

/// What `trace` takes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct TraceArgs {
    /// The disks [default: all]
    #[arg(add = ArgValueCompleter::new(Disks))]
    pub disks: Vec<String>,
    /// Write PREFIX.blktrace.0 and so on, one file for each reactor; - is the standard output
    #[arg(short, long, value_name = "PREFIX", default_value = "trace")]
    pub out: PathBuf,
    /// End after N seconds [default: when interrupted]
    #[arg(short, long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// The daemon's control socket, unix:PATH [default: as for ctl]
    #[arg(long, visible_alias = "control", value_name = "ADDRESS")]
    pub socket: Option<String>,
}

fn seconds(text: &str) -> Result<Duration> {
    let seconds = text.parse().context("not a number of seconds")?;
    let duration = Duration::try_from_secs_f64(seconds).context("not a time")?;
    if duration > SECONDS_MAX {
        bail!("more than a year");
    }
    if duration.is_zero() {
        bail!("nothing happens in no time");
    }
    Ok(duration)
}

/// Traces a running daemon.
///
/// # Errors
/// What the daemon says, or that a file cannot be written.
pub fn main(args: &TraceArgs) -> Result<()> {
    let path = match &args.socket {
        Some(address) => socket_path(address)?.context("--socket none: there is nobody to ask")?,
        None => default_path_to_ask(),
    };
    let is_over = Arc::<AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_over))?;
    }
    // A write beyond a limit of file sizes fails then, instead of ending the process.
    signal_hook::flag::register(libc::SIGXFSZ, Arc::default())?;
    let mut client = Client::connect_within(&path, QUERY_MAX)?;
    let (started, memory) = client.call_for_file("trace.start", &json!({"disks": args.disks}))?;
    let started: Started = serde_json::from_value(started).context(OTHER_VERSION)?;
    ensure!(started.format == FORMAT, OTHER_VERSION);
    for (disk, device) in &started.devices {
        note(&format!("{device} is disk {disk}"));
    }
    let mut reader = Reader::new(client, &memory, started.reactors)?;
    let mut outputs = outputs(&args.out, started.reactors)?;
    let end = args.seconds.map(|seconds| Instant::now() + seconds);
    let is_due = || is_over.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end);
    let read = reader.read(&mut outputs, is_due);
    note(&format!("{} events, {} dropped", reader.events, reader.dropped));
    match read {
        // The reader of the output may close it early.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(is_broken_pipe) => Ok(()),
        read => read,
    }
}

fn is_broken_pipe(error: &io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe
}

/// Reads the events in a daemon's memory.
struct Reader {
    rings: Vec<Receiver>,
    encoder: Encoder,
    events: u64,
    dropped: u64,
}

impl Reader {
    fn new(daemon: Client, memory: &File, reactors: usize) -> Result<Self> {
        let rings = receivers(memory, reactors).context("memory of the trace")?;
        Ok(Self {
            rings,
            encoder: Encoder::new(daemon, reactors)?,
            events: 0,
            dropped: 0,
        })
    }

    /// Reads until `is_due`, including the events recorded by then.
    fn read(&mut self, outputs: &mut [Output], is_due: impl Fn() -> bool) -> Result<()> {
        loop {
            let is_last = is_due();
            let is_half_full = self.read_once(outputs)?;
            if is_last {
                return outputs.iter_mut().try_for_each(Output::finish);
            }
            if let Err(gone) = self.encoder.check() {
                // The memory is still there, with what the daemon recorded last.
                let read = self.read_once(outputs);
                outputs.iter_mut().try_for_each(Output::finish)?;
                return read.and(Err(gone));
            }
            let pause = if is_half_full { EVERY_MIN } else { EVERY };
            // One is enough: the others have the same reader, or are files.
            if has_reader_left_within(&outputs[0], pause) {
                return Ok(());
            }
        }
    }

    /// Reads all rings once. Returns whether a ring was more than half full.
    fn read_once(&mut self, outputs: &mut [Output]) -> Result<bool> {
        let (mut is_half_full, last) = (false, outputs.len() - 1);
        for (number, ring) in self.rings.iter_mut().enumerate() {
            let (reactor, output) = (ReactorId(number as u16), &mut outputs[number.min(last)]);
            let count = ring.drain(|event| {
                self.events += u64::from(self.encoder.event(reactor, &event, output.room())?);
                output.write_if_full()
            })?;
            let dropped = ring.take_dropped();
            if dropped > 0 {
                self.dropped += dropped;
                self.encoder.dropped(reactor, dropped, output.room());
            }
            output.show()?;
            is_half_full |= count > ring.capacity() / 2;
        }
        Ok(is_half_full)
    }
}

/// Prints the device number of a disk.
fn say_device(device: u32, disk: &str) {
    note(&format!("{} is disk {disk}", device_text(device)));
}

/// The outputs of a trace: a file for each reactor, which blkparse takes for a CPU, or the standard output for all.
fn outputs(prefix: &Path, reactors: usize) -> Result<Vec<Output>> {
    if prefix == Path::new("-") {
        return Ok(vec![Output::stdout()?]);
    }
    let create = |reactor| {
        let mut path = prefix.as_os_str().to_owned();
        path.push(format!(".blktrace.{reactor}"));
        Output::create(Path::new(&path))
    };
    (0..reactors).map(create).collect()
}

/// The standard output may be the trace.
fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

const SECONDS_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// The pause between two reads of the rings. On a host whose processors are all busy, each wake-up displaces a reactor or a client:
/// 50 us of work each millisecond cost an NBD client 15 % of its I/Os, 500 us each 10 ms cost it 7 %.
const EVERY: Duration = Duration::from_millis(20);
/// The pause when a ring was more than half full.
const EVERY_MIN: Duration = Duration::from_millis(4);
const OTHER_VERSION: &str = "the daemon is of another version than this program";

const EXAMPLES: &str = "\
Examples:
  blkmq trace -s 10 vm1 && blkparse -i trace | less
  blkmq trace -s 10 && blkparse -i trace -d trace.bin -O && btt -i trace.bin
  blkmq trace -o - | blkparse -i -";
