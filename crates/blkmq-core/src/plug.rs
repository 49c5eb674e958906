//! The plug: a submitter collects requests before they are issued or inserted, until there are 32, until
//! one is large, or until the submitter is about to wait. Filled by `sw_ctx`, emptied by `local`.

use crate::limits::Limits;
use crate::merge;
use crate::request::Request;

/// This many requests flush the plug.
pub(crate) const REQUESTS_MAX: usize = 32;
/// A request of this many bytes flushes the plug: it gains nothing from waiting longer.
const BYTES_MAX: u64 = 128 << 10;

/// A submitter's staged requests, in order of submission.
#[derive(Debug)]
pub(crate) struct Plug {
    pub(crate) list: Vec<Box<Request>>,
    is_due: bool,
}

impl Plug {
    pub(crate) fn new() -> Self {
        Self {
            list: Vec::with_capacity(REQUESTS_MAX),
            is_due: false,
        }
    }

    /// Adds a request, merged into the latest if it fits there. Returns whether it was merged.
    #[inline(always)]
    pub(crate) fn add(&mut self, mut rq: Box<Request>, limits: &Limits, merges: bool) -> bool {
        debug_assert!(self.list.len() < REQUESTS_MAX, "add to a full plug");
        if !merges {
            // A sealed request is not merged: not here, and not in an elevator.
            rq.seal();
        } else if let Some(latest) = self.list.last_mut() {
            match merge::try_merge(latest, rq, limits) {
                Ok(_) => {
                    self.is_due |= latest.len() >= BYTES_MAX;
                    return true;
                }
                Err(back) => rq = back,
            }
        }
        self.is_due |= rq.len() >= BYTES_MAX || self.list.len() + 1 == REQUESTS_MAX;
        self.list.push(rq);
        false
    }

    /// Says whether the plug should be flushed now.
    #[inline]
    pub(crate) fn is_due(&self) -> bool {
        self.is_due
    }

    /// Says whether no further request has room.
    pub(crate) fn is_full(&self) -> bool {
        self.list.len() >= REQUESTS_MAX
    }

    /// Takes all requests out; return the empty list with [`Plug::keep_list`].
    #[inline]
    pub(crate) fn take(&mut self) -> Vec<Box<Request>> {
        self.is_due = false;
        std::mem::take(&mut self.list)
    }

    /// Takes back the empty list, for its memory.
    #[inline]
    pub(crate) fn keep_list(&mut self, list: Vec<Box<Request>>) {
        debug_assert!(
            list.is_empty() && self.list.is_empty(),
            "plug filled while it was flushed"
        );
        self.list = list;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bio::Bio;
    use crate::ids::ReactorId;

    fn rq(offset: u64, len: u64) -> Box<Request> {
        Request::for_test(
            ReactorId(0),
            Bio {
                offset,
                len,
                ..Bio::default()
            },
            0,
        )
    }

    #[test]
    fn plug_is_due_at_32_requests_or_128_kib() {
        let limits = Limits::default();
        let mut plug = Plug::new();
        for i in 0..31 {
            assert!(!plug.add(rq(i << 20, 4096), &limits, true));
        }
        assert!(!plug.is_due());
        plug.add(rq(1 << 30, 4096), &limits, true);
        assert!(plug.is_due() && plug.is_full());
        let mut plug = Plug::new();
        plug.add(rq(0, 128 << 10), &limits, true);
        assert!(plug.is_due());
    }

    #[test]
    fn stream_is_merged_in_the_plug_unless_merging_is_off() {
        let limits = Limits::default();
        for (merges, requests) in [(true, 1), (false, 8)] {
            let mut plug = Plug::new();
            for i in 0..8 {
                plug.add(rq(i * 4096, 4096), &limits, merges);
            }
            assert_eq!(plug.list.len(), requests);
        }
    }
}
