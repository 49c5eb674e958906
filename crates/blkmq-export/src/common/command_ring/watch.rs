//! The watch by which a reactor learns that commands have ended: its ring polls for that, or it looks in its
//! next turn.

use blkmq_host::ring::{Completion, RingClient};

use super::CommandRing;

/// What a service keeps to learn of the commands of one [`CommandRing`].
#[derive(Debug, Default)]
pub(crate) struct Watch {
    is_polling: bool,
    comes_again: bool,
}

impl Watch {
    /// Takes note of a completion of the reactor's ring.
    pub(crate) fn note(&mut self, completion: &Completion) {
        match completion.user {
            POLL => self.is_polling = false,
            AGAIN => self.comes_again = false,
            _ => {}
        }
    }

    /// Gives the service a turn when commands have ended. `is_full`: some are still to be submitted;
    /// `takes`: those that have ended are taken now.
    pub(crate) fn keep(&mut self, reactor: &RingClient, commands: &CommandRing, is_full: bool, takes: bool) {
        let has_ended = commands.has_ended();
        let is_due = is_full || has_ended && takes;
        if is_due && !std::mem::replace(&mut self.comes_again, true) {
            reactor.push_nop(AGAIN);
        }
        // If nothing is taken, a poll would complete at once, again and again.
        if takes && !has_ended && !std::mem::replace(&mut self.is_polling, true) {
            reactor.push_poll(commands.fd(), libc::POLLIN, false, POLL);
        }
    }

    /// Ends the poll.
    pub(crate) fn end(&mut self, reactor: &RingClient) {
        if std::mem::take(&mut self.is_polling) {
            reactor.push_cancel(POLL, CANCEL);
        }
    }
}

/// The number that a watch leaves to the service's other entries.
pub(crate) const FREE_USER: u64 = 3;
const POLL: u64 = 0;
const CANCEL: u64 = 1;
const AGAIN: u64 = 2;

#[cfg(all(test, feature = "ublk"))]
mod tests {
    use blkmq_host::ring::{RingConfig, RingHandle};

    use super::*;

    #[test]
    fn service_has_turns_for_commands_that_have_ended_and_no_others() {
        check(&CommandRing::new(2).unwrap());
        let of_thread = CommandRing::for_one_thread(2).unwrap();
        of_thread.enable().unwrap();
        check(&of_thread);
    }

    fn check(commands: &CommandRing) {
        let reactor = RingHandle::new(RingConfig::default()).unwrap();
        let client = reactor.open_client();
        let mut watch = Watch::default();
        // Returns how often the service is called.
        let mut turn = |is_full, takes| {
            watch.keep(&client, commands, is_full, takes);
            reactor.submit();
            reactor.reap();
            let mut completed = Vec::new();
            client.take(&mut completed);
            completed.iter().for_each(|completion| watch.note(completion));
            completed.len()
        };
        for _ in 0..3 {
            assert_eq!(turn(false, true), 0);
            commands.push_nop();
            assert!(commands.submit());
            assert_eq!(turn(false, true), 2, "by the poll, and since it takes");
            assert_eq!(turn(false, false), 0, "it does not take");
            assert_eq!(turn(false, true), 1, "it takes");
            commands.take(&mut Vec::new());
        }
        assert_eq!((turn(true, true), turn(true, true), turn(false, true)), (1, 1, 0));
        watch.end(&client);
        reactor.submit();
        while reactor.reap() > 0 {}
        assert_eq!(client.in_flight(), 0, "the poll has ended");
    }
}
