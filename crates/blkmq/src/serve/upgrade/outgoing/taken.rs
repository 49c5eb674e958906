//! The end of a hand-over: the incoming daemon says in time that it serves, or never serves.

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use blkmq_export::handover::channel::{Channel, ChannelError};
use blkmq_export::handover::codec::Message;

use super::super::ANSWER_MAX;

/// The incoming daemon was told to go: it either reports that it serves, or has ended without serving
/// anybody. Older ones serve whatever they are told, and have no limit.
pub(super) fn wait_until_taken(channel: &mut Channel, limit: Option<Duration>) -> Result<()> {
    let until = limit.map(|limit| Instant::now() + limit);
    let is_over = |until: Instant| Instant::now() >= until;
    // What is there already counts, however late it is.
    let mut is_first = true;
    while std::mem::take(&mut is_first) || !until.is_some_and(is_over) {
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        if !channel.wait(left)? {
            break;
        }
        match channel.receive(left.unwrap_or(ANSWER_MAX).min(ANSWER_MAX)) {
            Ok((Message::Taken, _)) => return Ok(()),
            Err(ChannelError::Closed) => bail!("it has ended before it served anybody"),
            Ok(_) | Err(_) => {}
        }
    }
    refuse_late(channel, limit.unwrap_or_default())
}

/// Tells the incoming daemon that it is too late: it has to report that it serves before it does, cannot do so any
/// more, and serves nobody. A report that it has sent in this moment counts.
fn refuse_late(channel: &mut Channel, limit: Duration) -> Result<()> {
    channel.end_within(ANSWER_MAX);
    let reason = TOO_LATE.to_owned();
    // It may have closed the channel, after it has said that it serves.
    let _ = channel.send(&Message::Refused { reason }, &[], ANSWER_MAX);
    channel.end_hearing()?;
    loop {
        match channel.receive(ANSWER_MAX) {
            Ok((Message::Taken, _)) => return Ok(()),
            Err(ChannelError::Closed | ChannelError::Late) => {
                bail!("it has not said within {limit:?} that it serves")
            }
            Ok(_) | Err(_) => {}
        }
    }
}

const TOO_LATE: &str = "it is too late: the running daemon goes on";

#[cfg(test)]
mod tests {
    use std::io::Write;

    use std::os::unix::net::UnixStream;

    use super::*;
    use crate::serve::upgrade::incoming::tell_taken;

    /// The two ends of a channel.
    fn channels() -> [Channel; 2] {
        let (one, other) = UnixStream::pair().expect("a pair of sockets");
        [one, other].map(|stream| Channel::new(stream).expect("a process of this user"))
    }

    #[test]
    fn daemon_that_does_not_say_in_time_that_it_serves_cannot_say_so_later() {
        let [mut ours, mut theirs] = channels();
        let late = wait_until_taken(&mut ours, Some(Duration::from_millis(20)));
        assert!(late.expect_err("it is late").to_string().contains("20ms"));
        let refused = tell_taken(&mut theirs).expect_err("it may not serve");
        assert!(refused.to_string().contains(TOO_LATE), "{refused}");
    }

    #[test]
    fn daemon_that_sends_half_a_message_and_hangs_is_too_late() {
        let (ours, mut theirs) = UnixStream::pair().expect("a pair of sockets");
        let mut ours = Channel::new(ours).expect("a process of this user");
        theirs.write_all(&[0; 3]).expect("it takes three bytes");
        let start = Instant::now();
        wait_until_taken(&mut ours, Some(Duration::from_millis(50))).expect_err("it is late");
        assert!(start.elapsed() < ANSWER_MAX, "{:?}", start.elapsed());
    }

    #[test]
    fn daemon_that_says_in_the_last_moment_that_it_serves_and_lets_go_has_taken_over() {
        let [mut ours, mut theirs] = channels();
        tell_taken(&mut theirs).expect("it serves");
        drop(theirs);
        refuse_late(&mut ours, Duration::ZERO).expect("it has taken over");
    }

    #[test]
    fn daemon_that_says_that_it_serves_has_taken_over_even_if_that_is_read_late() {
        let [mut ours, mut theirs] = channels();
        tell_taken(&mut theirs).expect("it serves");
        wait_until_taken(&mut ours, Some(Duration::ZERO)).expect("it has taken over");
    }

    #[test]
    fn daemon_serves_where_the_other_one_has_ended_after_it_let_go() {
        let [ours, mut theirs] = channels();
        drop(ours);
        tell_taken(&mut theirs).expect("nobody else serves");
    }
}
