//! The modelled drive as a driver: each of its units serves one request at a time.

use super::*;

impl HctxDriver for Flash {
    fn issue(&mut self, rq: &Request, cookie: Cookie, _last: bool, now: Instant) -> Issued {
        let clock = &mut *self.clock.borrow_mut();
        if let Some(slow) = &mut clock.slow
            && (rq.group().index() <= slow.groups || rq.op() == Op::Flush)
            && now >= slow.next
        {
            slow.next = now + slow.period;
            clock.ends.push(Reverse((now + slow.takes, cookie.raw())));
            return Issued::Queued;
        }
        let Reverse(free) = clock.free.pop().expect("a drive has units");
        let time =
            clock.rng.from_to(SERVICE.0 - SPREAD.0, SERVICE.0 + SPREAD.0) * clock.slowness * longer(rq.op());
        let begin = free.max(now);
        let begin = clock.pauses.and_then(|it| it.until(begin)).unwrap_or(begin);
        let end = begin + Nanos(time);
        clock.free.push(Reverse(end));
        clock.ends.push(Reverse((end, cookie.raw())));
        Issued::Queued
    }

    fn reap(&mut self, now: Instant, done: &mut Vec<Done>) {
        let ends = &mut self.clock.borrow_mut().ends;
        while let Some(&Reverse((end, cookie))) = ends.peek()
            && end <= now
        {
            ends.pop();
            done.push(Done {
                cookie: Cookie::from_raw(cookie),
                status: Status::Ok,
            });
        }
    }

    fn next_event(&self) -> Option<Instant> {
        self.clock.borrow().ends.peek().map(|Reverse((end, _))| *end)
    }
}
