//! Decides how a running daemon's requests are traced: `blkmq trace` asks for it over the control socket, and writes what comes into
//! files that `blkparse` reads. `encode` is the daemon's side.

pub(crate) mod encode;

use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use blkmq_core::trace::blktrace::{MESSAGE, NOTIFY, Record, device_text};
use clap::Args;
use clap_complete::engine::ArgValueCompleter;
use serde_json::{Value, json};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::complete::Disks;
use crate::control::client::Client;
use crate::control::{default_path, socket_path};

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
    /// End after so many seconds [default: when interrupted]
    #[arg(short, long, value_name = "N", value_parser = seconds)]
    pub seconds: Option<Duration>,
    /// The daemon's control socket, unix:PATH [default: as for ctl]
    #[arg(long, value_name = "ADDRESS")]
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
        None => default_path(),
    };
    let is_over = Arc::<AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_over))?;
    }
    let mut client = Client::connect(&path)?;
    let started = client.call("trace.start", &json!({"disks": args.disks}))?;
    say_devices(&started);
    let mut stream = client.into_stream(LOOK_AGAIN)?;
    // blkparse wants a file for each CPU, from 0 on.
    let reactors = started["reactors"].as_u64().unwrap_or(1);
    let mut files = Files::create(&args.out, reactors.clamp(1, 128) as u32)?;
    let end = args.seconds.map(|seconds| Instant::now() + seconds);
    let is_due = || is_over.load(Ordering::Relaxed) || end.is_some_and(|end| Instant::now() >= end);
    let copied = copy(&mut stream, &mut files, is_due);
    note(&format!("{} events, {} dropped", files.events, files.dropped));
    match copied {
        // Whoever reads may have had enough.
        Err(error) if error.downcast_ref::<io::Error>().is_some_and(is_broken_pipe) => Ok(()),
        copied => copied,
    }
}

fn is_broken_pipe(error: &io::Error) -> bool {
    error.kind() == ErrorKind::BrokenPipe
}

/// Says which disk has which number.
fn say_devices(started: &Value) {
    let devices = started["devices"].as_object().into_iter().flatten();
    for (disk, device) in devices {
        note(&format!("{} is disk {disk}", device.as_str().unwrap_or_default()));
    }
}

/// Takes records until it is time, or the daemon ends.
fn copy(stream: &mut impl Read, files: &mut Files, is_due: impl Fn() -> bool) -> Result<()> {
    let mut input = vec![0; PIECE_BYTES];
    let mut filled = 0;
    while !is_due() {
        match stream.read(&mut input[filled..]) {
            Ok(0) => bail!(
                "the daemon has ended the trace: it has stopped, or nothing was read for some seconds; events are missing"
            ),
            Ok(len) => filled += len,
            Err(error) if is_for_later(&error) => continue,
            Err(error) => return Err(error).context("the daemon is gone"),
        }
        let taken = files.write(&input[..filled])?;
        input.copy_within(taken..filled, 0);
        filled -= taken;
    }
    Ok(())
}

fn is_for_later(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
    )
}

/// Where a trace goes: a file for each reactor, or one for all, the standard output.
struct Files {
    open: Vec<Output>,
    events: u64,
    dropped: u64,
}

/// A file, and how it is called.
struct Output {
    name: String,
    file: File,
}

impl Output {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.file
            .write_all(bytes)
            .with_context(|| format!("{} cannot be written", self.name))
    }
}

impl Files {
    fn create(prefix: &Path, reactors: u32) -> Result<Self> {
        let open: Vec<Output> = match prefix == Path::new("-") {
            // A duplicate of it, without the buffer of lines that the standard library has before it.
            true => vec![Output {
                name: "the standard output".to_owned(),
                file: File::from(io::stdout().as_fd().try_clone_to_owned()?),
            }],
            false => (0..reactors)
                .map(|number| create(prefix, number))
                .collect::<Result<_>>()?,
        };
        Ok(Self {
            open,
            events: 0,
            dropped: 0,
        })
    }

    /// Writes the whole records of these bytes, neighbours of one reactor in one piece. Returns how many bytes these were.
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let (mut written, mut end, mut file) = (0, 0, 0);
        while let Some((record, len)) = Record::parse(&bytes[end..])? {
            let its_file = (record.cpu as usize).min(self.open.len() - 1);
            if its_file != file {
                self.open[file].write(&bytes[written..end])?;
                (written, file) = (end, its_file);
            }
            end += len;
            self.count(&record);
        }
        self.open[file].write(&bytes[written..end])?;
        Ok(end)
    }

    fn count(&mut self, record: &Record) {
        if record.is_notice(MESSAGE) {
            self.dropped += encode::dropped(&record.text);
            if let Some(disk) = encode::disk(&record.text) {
                note(&format!("{} is disk {disk}", device_text(record.device)));
            }
        }
        self.events += u64::from(record.categories() & NOTIFY == 0);
    }
}

fn create(prefix: &Path, number: u32) -> Result<Output> {
    let mut path = prefix.as_os_str().to_owned();
    path.push(format!(".blktrace.{number}"));
    let name = Path::new(&path).display().to_string();
    let file = File::create(&path).with_context(|| format!("{name} cannot be written"))?;
    Ok(Output { name, file })
}

/// The standard output may be the trace.
fn note(text: &str) {
    let _ = writeln!(io::stderr(), "{text}");
}

const SECONDS_MAX: Duration = Duration::from_secs(366 * 24 * 3600);
/// How soon a signal, or the end of the time, is noticed.
const LOOK_AGAIN: Duration = Duration::from_millis(100);
/// As much as the socket holds, and more than the longest record.
const PIECE_BYTES: usize = 256 << 10;

const EXAMPLES: &str = "\
Examples:
  blkmq trace -s 10 vm1 && blkparse -i trace | less
  blkmq trace -s 10 && blkparse -i trace -d trace.bin -O && btt -i trace.bin
  blkmq trace -o - | blkparse -i -";
