//! The sign of life for systemd (`WatchdogSec=`): sent as long as every reactor takes orders, so that a daemon one of
//! whose reactors hangs is restarted. `notify` has the socket.

use std::sync::Weak;
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use blkmq_core::ids::ReactorId;

use super::notify;
use super::running::Running;

/// Starts the thread that asks the reactors, if a service manager listens. It also listens to a daemon that has taken
/// over, and which it has told nothing of its interval.
///
/// # Errors
/// There can be no thread.
pub(super) fn start(watched: Weak<Running>) -> Result<()> {
    if !notify::is_asked_for() {
        return Ok(());
    }
    let interval = interval(std::env::var("WATCHDOG_USEC").ok().as_deref());
    let watch = move || {
        while let Some(running) = watched.upgrade() {
            let mut answers = running.control().ask_reactors();
            drop(running);
            let silent = answers.wait(interval);
            let is_silent = !silent.is_empty();
            if is_silent {
                tracing::error!("watchdog: no answer within {interval:?} from {}", listed(silent));
            }
            // They are not asked again before they answer, and nobody is told that all is well.
            while !answers.wait(interval).is_empty() {
                // Reactors that have ended never answer.
                if watched.strong_count() == 0 {
                    return;
                }
                thread::sleep(PAUSE);
            }
            if is_silent {
                tracing::info!("watchdog: every reactor answers again");
            }
            notify::is_alive();
            thread::sleep(interval);
        }
    };
    let thread = thread::Builder::new().name("watchdog".to_owned());
    thread
        .spawn(watch)
        .context("no thread for the watchdog can be made")?;
    Ok(())
}

/// Reactors by the names of their threads.
fn listed(reactors: &[ReactorId]) -> String {
    let names: Vec<String> = reactors
        .iter()
        .map(|reactor| format!("blkmq-r{}", reactor.0))
        .collect();
    names.join(", ")
}

/// How often a sign is sent: a third of what the service manager waits.
fn interval(told_us: Option<&str>) -> Duration {
    let told = told_us
        .and_then(|text| text.parse().ok())
        .map(Duration::from_micros);
    told.map_or(INTERVAL_MAX, |told| (told / 3).min(INTERVAL_MAX))
}

/// The unit waits for 30 s.
const INTERVAL_MAX: Duration = Duration::from_secs(5);
/// Between looks at answers that cannot come, while the daemon ends.
const PAUSE: Duration = Duration::from_millis(20);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_of_signs_of_life_is_a_third_of_what_is_waited_and_five_seconds_at_most() {
        assert_eq!(interval(Some("3000000")), Duration::from_secs(1));
        assert_eq!(interval(Some("30000000")), Duration::from_secs(5));
        assert_eq!(
            (interval(None), interval(Some("x"))),
            (INTERVAL_MAX, INTERVAL_MAX)
        );
    }
}
