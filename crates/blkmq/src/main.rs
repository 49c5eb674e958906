//! Runs the command that was typed: [`blkmq::cli`] defines the commands.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq::cli::{Cli, Command};
use blkmq::log::Log;
use blkmq::log::filter;
use blkmq::log::format::{self, Format, WithPriority};
use blkmq::log::journal::{Entries, Socket};
use blkmq::serve;
use blkmq_export::common::accounts::restrict_static_program;
use clap::Parser;
use tracing::Level;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{Layer, fmt, reload};

fn main() -> ExitCode {
    restrict_static_program();
    blkmq_export::fuse::answer_mount_probe();
    blkmq::complete::answer();
    let cli = Cli::parse();
    let format = Format::of_environment();
    let (format, log) = log_of(format);
    log.take_panics();
    let code = match start_tracing(&log, format).and_then(|()| run(cli.command, &log)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            log.print(Level::ERROR, &format!("blkmq: {error:#}"));
            ExitCode::FAILURE
        }
    };
    // What failed early is not written yet.
    if let Err(error) = log.start() {
        let _ = writeln!(io::stderr(), "blkmq: no thread for the log: {error}");
    }
    log.finish(LAST_WORDS_MAX);
    code
}

/// The log in a format, or in what comes nearest to it here.
fn log_of(format: Result<Format>) -> (Result<Format>, Log) {
    let format = match format {
        Ok(Format::Entries) => match Socket::of_environment() {
            Some(socket) => return (Ok(Format::Entries), Log::new(socket, Format::Entries)),
            None => Ok(Format::Journal),
        },
        format => format,
    };
    let log = Log::new(io::stderr(), *format.as_ref().unwrap_or(&Format::Text));
    (format, log)
}

/// Writes messages to the log, in the format of the environment, if that is one.
fn start_tracing(log: &Log, format: Result<Format>) -> Result<()> {
    let (filter, handle) = reload::Layer::new(filter::of_environment()?);
    log.take_filter(move |filter| Ok(handle.reload(filter)?));
    let messages = fmt::layer().with_writer(log.clone()).with_target(false);
    let messages = match format? {
        Format::Text => messages.fmt_fields(format::fields_of_lines()).boxed(),
        Format::Entries => Entries(log.clone()).boxed(),
        Format::Json => messages.json().flatten_event(true).boxed(),
        Format::Journal => {
            let text = fmt::format().with_target(false).with_ansi(false).without_time();
            let messages = messages.fmt_fields(format::fields_of_lines());
            messages.event_format(WithPriority(text)).boxed()
        }
    };
    tracing_subscriber::registry().with(filter).with(messages).init();
    Ok(())
}

fn run(command: Command, log: &Log) -> Result<()> {
    // A daemon starts it in its sandbox.
    if !matches!(command, Command::Serve(_)) {
        log.start().context("no thread for the log")?;
    }
    match command {
        #[cfg(feature = "demo")]
        Command::Demo(args) => blkmq::demo::main(&args),
        Command::Serve(args) => serve::main(&args, log),
        Command::Ctl(args) => blkmq::ctl::main(&args),
        Command::Trace(args) => blkmq::trace::main(&args),
        Command::Iostat(args) => blkmq::iostat::main(&args),
        #[cfg(feature = "top")]
        Command::Top(args) => blkmq::top::main(&args),
        Command::Image(args) => blkmq::image::main(&args),
        Command::Completions { shell } => {
            let mut text = Vec::new();
            blkmq::complete::register(shell, &mut text)?;
            Ok(print(&text)?)
        }
        Command::Man => {
            let mut text = Vec::new();
            blkmq::cli::manual(&mut text)?;
            Ok(print(&text)?)
        }
    }
}

/// Prints a text. A reader that closes early, as in `blkmq man | head`, is no failure.
fn print(text: &[u8]) -> io::Result<()> {
    match io::stdout().write_all(text) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        written => written,
    }
}

/// How long the end of the process waits until its last messages are written.
const LAST_WORDS_MAX: Duration = Duration::from_secs(1);
