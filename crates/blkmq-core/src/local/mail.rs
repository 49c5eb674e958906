//! Mail between reactors: requests to be issued, or on their way back to their owner. It is posted in
//! batches, when the call ends.

use super::LocalQueue;
use crate::ids::ReactorId;
use crate::plug;
use crate::queue::{Effects, Mail};
use crate::request::{Request, State};
use crate::time::Instant;

impl LocalQueue {
    /// Hands a request to a reactor that will issue it: the owner of the hardware context that its submitter
    /// uses, or a reactor with an event loop, if the submitter has none: it may stop running while its
    /// requests count against the depth.
    pub(super) fn send_to_owner(&mut self, mut rq: Box<Request>, now: Instant, fx: &mut Effects) {
        if rq.state == State::Staged {
            rq.inserted_at = now;
        }
        rq.state = State::Dispatched;
        let looks = self.queue.reactor(rq.owner).is_event_loop;
        let user = if looks {
            rq.owner
        } else {
            self.queue.event_loop().unwrap_or(rq.owner)
        };
        let to = self.queue.hctx_owner(user);
        match &mut self.hw {
            Some(hw) if to == self.me => hw.add_to_dispatch_list(rq),
            _ => self.send(to, Mail::Issue(rq), fx),
        }
    }

    pub(super) fn send(&mut self, to: ReactorId, mail: Mail, fx: &mut Effects) {
        let outbox = &mut self.outboxes[to.index()];
        outbox.push(mail);
        self.outgoing.insert(to);
        if outbox.len() == plug::REQUESTS_MAX {
            self.post_to(to);
        }
        self.shard().events.handed_over.add(1);
        fx.kicks.insert(to);
    }

    /// Posts all outgoing mail; the kicks follow.
    #[inline]
    pub(super) fn post(&mut self) {
        while let Some(to) = self.outgoing.pop() {
            self.post_to(to);
        }
    }

    pub(super) fn post_to(&mut self, to: ReactorId) {
        let outbox = &mut self.outboxes[to.index()];
        self.queue.reactor(to).mail.push_all(outbox);
        assert!(
            outbox.is_empty(),
            "reactor {to}: mailbox smaller than the requests there are"
        );
    }

    /// Takes in mail of other reactors. Says whether the context must run.
    #[inline]
    pub(super) fn take_mail(&mut self, fx: &mut Effects) -> bool {
        let mut must_run = false;
        while let Some(mail) = self.mailbox.pop() {
            self.mailbox.peek(MAIL_AHEAD, |mail| match mail {
                Mail::Complete(rq) | Mail::Issue(rq) => rq.fetch(),
            });
            match mail {
                Mail::Complete(rq) => self.sw.end_bio(&self.queue, rq, fx),
                Mail::Issue(rq) => {
                    must_run = true;
                    self.hw
                        .as_mut()
                        .expect("requests are sent to owners")
                        .add_to_dispatch_list(rq);
                }
            }
        }
        must_run
    }
}

/// How many mails ahead a request is prefetched.
const MAIL_AHEAD: u64 = 4;
