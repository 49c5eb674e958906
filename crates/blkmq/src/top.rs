//! `blkmq top`: a daemon's activity, drawn after each interval and each key, until the user ends it.
//!
//! | part | decides |
//! |---|---|
//! | `feed`, `lists` | what comes from the daemon |
//! | `tree`, `shares` | what the lines are, with their numbers |
//! | `state` | which of them are on the screen, and in which order |
//! | `keys` | what keys do |
//! | `columns`, `view` | how it looks |

mod columns;
mod feed;
mod keys;
mod lists;
mod shares;
mod state;
mod tree;
mod view;

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::Args;
use ratatui::DefaultTerminal;
use ratatui::crossterm::event::{self, KeyEvent, KeyEventKind};
use ratatui::crossterm::queue;
use ratatui::crossterm::terminal::{BeginSynchronizedUpdate, EndSynchronizedUpdate};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use self::feed::Sample;
use self::state::State;
use crate::control::client::{Client, QUERY_MAX};
use crate::control::path_to_ask;

/// What `top` takes.
#[derive(Debug, Args)]
#[command(after_long_help = EXAMPLES)]
pub struct TopArgs {
    /// The daemon's control socket, unix:PATH [default: blkmq/control.sock in $XDG_RUNTIME_DIR, else in /run]
    #[arg(long, visible_alias = "control", value_name = "ADDRESS")]
    pub socket: Option<String>,
    /// Seconds between two updates, 0.1 to 3600
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = crate::iostat::interval)]
    pub interval: Duration,
}

/// An event.
enum Event {
    Sample(Box<Sample>),
    /// The daemon does not answer, with the reason.
    Lost(String),
    Key(KeyEvent),
    /// The terminal's size has changed.
    Resized,
    /// A signal, or the end of the terminal.
    End,
}

/// Shows the activity of a running daemon.
///
/// # Errors
/// There is no daemon, or no terminal.
pub fn main(args: &TopArgs) -> Result<()> {
    let path = path_to_ask(args.socket.as_deref())?;
    // A mistyped address is reported at once; a daemon that is lost later is waited for.
    Client::connect_within(&path, QUERY_MAX)?;
    if !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        bail!("top needs a terminal; for scripts there is blkmq iostat");
    }
    let (to, events) = mpsc::channel();
    watch_signals(to.clone())?;
    // Restores the terminal after a panic, too.
    let mut terminal = ratatui::try_init().context("the terminal cannot be used")?;
    let ended = start(path, args.interval, to).and_then(|()| run(&mut terminal, &events, args.interval));
    ratatui::try_restore().context("the terminal cannot be restored")?;
    ended
}

fn start(path: PathBuf, interval: Duration, to: Sender<Event>) -> Result<()> {
    feed::start(path, interval, to.clone())?;
    let keys = thread::Builder::new().name("keys".to_owned());
    keys.spawn(move || read_keys(&to))
        .context("no thread for the keys")?;
    Ok(())
}

fn run(terminal: &mut DefaultTerminal, events: &Receiver<Event>, interval: Duration) -> Result<()> {
    let mut state = State::default();
    let patience = interval * 3 + PATIENCE_MIN;
    while !state.is_over {
        draw(terminal, &mut state)?;
        let shown = view::shown(terminal.size()?.width);
        match events.recv_timeout(patience) {
            Ok(event) => take(&mut state, event, &shown),
            Err(RecvTimeoutError::Timeout) => state.lost = Some("the daemon says nothing".to_owned()),
            Err(RecvTimeoutError::Disconnected) => return Ok(()),
        }
        // Events that arrived meanwhile are drawn together.
        events
            .try_iter()
            .for_each(|event| take(&mut state, event, &shown));
    }
    Ok(())
}

fn take(state: &mut State, event: Event, shown: &[usize]) {
    match event {
        Event::Sample(sample) => state.take(*sample),
        Event::Lost(why) => state.lose(why),
        Event::Key(key) => keys::press(state, key, shown),
        Event::Resized => {}
        Event::End => state.is_over = true,
    }
}

/// Writes changes since the last time, which a capable terminal shows at once.
fn draw(terminal: &mut DefaultTerminal, state: &mut State) -> Result<()> {
    queue!(terminal.backend_mut(), BeginSynchronizedUpdate)?;
    terminal.draw(|frame| view::draw(frame, state))?;
    Ok(queue!(terminal.backend_mut(), EndSynchronizedUpdate)
        .and_then(|()| io::Write::flush(terminal.backend_mut()))?)
}

fn read_keys(to: &Sender<Event>) {
    loop {
        let sent = match event::read() {
            Ok(event::Event::Key(key)) if key.kind != KeyEventKind::Release => to.send(Event::Key(key)),
            Ok(event::Event::Resize(..)) => to.send(Event::Resized),
            Ok(_) => Ok(()),
            Err(_) => to.send(Event::End).and(Err(mpsc::SendError(Event::End))),
        };
        if sent.is_err() {
            return;
        }
    }
}

fn watch_signals(to: Sender<Event>) -> Result<()> {
    let mut signals = Signals::new([SIGTERM, SIGINT, SIGHUP])?;
    let thread = thread::Builder::new().name("signals".to_owned());
    let watch = move || {
        for (number, _) in signals.forever().enumerate() {
            // The terminal may be blocked: the second signal ends the process.
            if number > 0 || to.send(Event::End).is_err() {
                std::process::exit(1);
            }
        }
    };
    thread.spawn(watch).context("no thread for signals")?;
    Ok(())
}

/// How long a daemon may be silent, in addition to some intervals.
const PATIENCE_MIN: Duration = Duration::from_secs(2);

const EXAMPLES: &str = "\
Keys are those of htop, as far as they make sense; F1 or ? lists them.

Examples:
  blkmq top
  blkmq top --interval 5 --socket unix:/run/blkmq/control.sock";
