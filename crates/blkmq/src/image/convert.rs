//! `image convert`: a disk as another file, with progress, until it is done or a signal comes.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Result, bail};
use blkmq_drivers::qcow2::{BaseFormat, Conversion, Copied};
use clap::{Args, ValueEnum};
use serde_json::json;
use signal_hook::consts::{SIGINT, SIGTERM};

use super::size;
use crate::stdout::{print, unless_reader_left};

/// What `image convert` takes.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The disk, which nobody may have open for writing
    pub source: PathBuf,
    /// Where the copy is to be
    pub target: PathBuf,
    /// Format of the disk; its content never decides it [default: by the end of its name, .raw or .qcow2]
    #[arg(long, value_name = "FORMAT")]
    pub from: Option<Format>,
    /// Format of the copy [default: by the end of its name, .raw or .qcow2]
    #[arg(long, value_name = "FORMAT")]
    pub to: Option<Format>,
    /// Size of a cluster of a qcow2 copy, a power of two from 512 to 2M [default: 64K]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub cluster: Option<u64>,
    /// Directories below which the disk's bases may be; may be given again [default: its own]
    #[arg(long = "dir", value_name = "PATH")]
    pub directories: Vec<PathBuf>,
    /// Replace the file that is there
    #[arg(long)]
    pub force: bool,
    /// Print how far it is to stderr, a line for each percent; on a terminal it is shown anyway
    #[arg(long)]
    pub progress: bool,
    /// Print a JSON object
    #[arg(long)]
    pub json: bool,
}

/// A format of a disk's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// The disk as it is
    Raw,
    /// An image of this format
    Qcow2,
}

/// Makes the copy.
///
/// # Errors
/// A file cannot be used, or a signal has come. Then there is no copy.
pub(super) fn main(args: &ConvertArgs) -> Result<()> {
    let target_format = format(args.to, &args.target, "--to")?;
    if args.cluster.is_some() && target_format == BaseFormat::Raw {
        bail!(
            "{:?}: a raw copy has no clusters: leave --cluster out",
            args.target
        );
    }
    let conversion = Conversion {
        source: args.source.clone(),
        source_format: format(args.from, &args.source, "--from")?,
        directories: args.directories.clone(),
        target: args.target.clone(),
        target_format,
        cluster: args.cluster.map(|bytes| u32::try_from(bytes).unwrap_or(u32::MAX)),
        replaces: args.force,
    };
    let is_over = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&is_over))?;
    }
    let mut progress = Progress::new(args.progress);
    let copied = conversion.run(|copied| {
        progress.show(copied);
        // Relaxed: nothing else is read for it.
        !is_over.load(Ordering::Relaxed)
    });
    progress.end();
    let Some(Copied { size, written, .. }) = copied? else {
        bail!("{:?}: given up at a signal: nothing was made", args.target);
    };
    let target = args.target.display();
    let text = match args.json {
        true => format!(
            "{}\n",
            json!({ "path": args.target, "size": size, "written": written })
        ),
        false => format!("{target}: a disk of {size} bytes, {written} of them written\n"),
    };
    unless_reader_left(print(&text))
}

/// What was said of a file's format, or what the end of its name says.
fn format(given: Option<Format>, path: &Path, option: &str) -> Result<BaseFormat> {
    match (given, path.extension().and_then(|end| end.to_str())) {
        (Some(Format::Raw), _) | (None, Some("raw")) => Ok(BaseFormat::Raw),
        (Some(Format::Qcow2), _) | (None, Some("qcow2")) => Ok(BaseFormat::Qcow2),
        (None, _) => {
            bail!("{path:?}: its name does not tell its format: give {option} raw or {option} qcow2")
        }
    }
}

/// How far it is, on stderr.
struct Progress {
    is_terminal: bool,
    has_lines: bool,
    percent: Option<u64>,
}

impl Progress {
    fn new(has_lines: bool) -> Self {
        Self {
            is_terminal: std::io::stderr().is_terminal(),
            has_lines,
            percent: None,
        }
    }

    fn show(&mut self, copied: Copied) {
        let percent = (copied.done / (copied.size / 100).max(1)).min(100);
        if self.percent == Some(percent) || !self.is_terminal && !self.has_lines {
            return;
        }
        self.percent = Some(percent);
        let text = format!(
            "{} % of {} bytes, {} written",
            percent, copied.size, copied.written
        );
        let mut stderr = std::io::stderr().lock();
        // Who does not see it misses nothing else.
        let _ = match self.is_terminal {
            true => write!(stderr, "\r\x1b[K{text}"),
            false => writeln!(stderr, "{text}"),
        };
    }

    fn end(&self) {
        if self.is_terminal && self.percent.is_some() {
            eprint!("\r\x1b[K");
        }
    }
}
