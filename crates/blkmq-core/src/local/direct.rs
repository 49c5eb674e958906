//! The direct path, without elevator and caps: from the plug to the driver. Requests that the driver
//! completes inline (all of them, at a drive that takes no time) are completed together.

use super::LocalQueue;
use crate::driver::Issued;
use crate::hw_ctx::Outcome;
use crate::ids::Cookie;
use crate::queue::Effects;
use crate::request::Request;
use crate::time::Instant;
use crate::trace::Step;

impl LocalQueue {
    /// Without an elevator: issues to this reactor's own hardware context, or sends to the owner of the
    /// context that it uses.
    #[inline]
    pub(super) fn send_direct(&mut self, list: &mut Vec<Box<Request>>, now: Instant, fx: &mut Effects) {
        if self.hw.is_some() {
            self.issue_direct(list, now, fx);
        } else {
            list.drain(..).for_each(|rq| self.send_to_owner(rq, now, fx));
        }
    }

    /// The direct path: issues the requests of a plug to this reactor's own hardware context.
    fn issue_direct(&mut self, list: &mut Vec<Box<Request>>, now: Instant, fx: &mut Effects) {
        let depth = self.queue.depth();
        let hw = self.hw.as_mut().expect("the direct path needs an own context");
        let mut answered = None;
        if hw.dispatch.is_empty() {
            let (done, answer) = hw.issue_while_done(list, depth, now);
            answered = answer;
            if done > 0 {
                if let Some(tracer) = &self.tracer {
                    tracer.each(Step::Completed, &list[..done], now);
                }
                self.queue.count_finished(self.me, done as u64);
                self.sw.end_bios(&self.queue, list, done, fx);
            }
        }
        if !list.is_empty() {
            self.issue_each(list, answered, depth, now, fx);
        }
    }

    /// The direct path of requests that do not end inline. The driver may have answered the first one already.
    fn issue_each(
        &mut self,
        list: &mut Vec<Box<Request>>,
        mut answered: Option<(Cookie, Issued)>,
        depth: u32,
        now: Instant,
        fx: &mut Effects,
    ) {
        let mut left = list.len();
        for mut rq in list.drain(..) {
            left -= 1;
            rq.inserted_at = now;
            let hw = self.hw.as_mut().expect("the caller has looked");
            let outcome = match answered.take() {
                Some((cookie, answer)) => hw.answered(rq, cookie, answer, now),
                None if hw.dispatch.is_empty() => hw.issue(rq, depth, left == 0, now),
                None => {
                    hw.add_to_dispatch_list(rq);
                    continue;
                }
            };
            match outcome {
                Outcome::Queued | Outcome::NeedsTag => {}
                Outcome::Ended { rq, status } => self.completed(rq, status, now, fx),
                Outcome::PushedBack(hold) => self.hold(hold, now),
            }
        }
        let hw = self.hw.as_mut().expect("the caller has looked");
        if !hw.dispatch_list_is_empty() {
            hw.driver.commit();
        }
    }
}
