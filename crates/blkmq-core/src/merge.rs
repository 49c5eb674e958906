//! The test whether two requests may be merged, and in which order. `plug` calls it at submission and
//! elevators at insertion; the merge itself is in `request`.

use crate::bio::Op;
use crate::limits::Limits;
use crate::request::Request;

/// How a new request fits to one that is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fit {
    /// The new one starts where the queued one ends.
    Back,
    /// The new one ends where the queued one starts.
    Front,
}

/// Says whether `new` may be merged into `queued`, and at which end.
///
/// Both must be of one operation, disk, group and priority, unstarted, neither flush nor FUA, and together within the
/// drive's limits on size, segments and boundaries.
#[inline(always)]
pub fn fit(queued: &Request, new: &Request, limits: &Limits) -> Option<Fit> {
    let fit = if queued.position_end() == new.position() {
        Fit::Back
    } else if new.position_end() == queued.position() {
        Fit::Front
    } else {
        return None;
    };
    may_join(queued, new, limits).then_some(fit)
}

/// Merges `new` into `queued` if it may.
///
/// # Errors
/// Returns `new` if it does not fit.
#[inline(always)]
pub fn try_merge(queued: &mut Request, new: Box<Request>, limits: &Limits) -> Result<Fit, Box<Request>> {
    match fit(queued, &new, limits) {
        Some(Fit::Back) => {
            queued.absorb_back(new);
            Ok(Fit::Back)
        }
        Some(Fit::Front) => {
            queued.absorb_front(new);
            Ok(Fit::Front)
        }
        None => Err(new),
    }
}

fn may_join(queued: &Request, new: &Request, limits: &Limits) -> bool {
    let (a, b) = (&queued.bio, &new.bio);
    a.op == b.op
        && a.disk == b.disk
        && a.group == b.group
        && a.prio == b.prio
        && a.flags == b.flags
        && queued.is_mergeable()
        && new.is_mergeable()
        && within_limits(queued, new, limits)
}

fn within_limits(queued: &Request, new: &Request, limits: &Limits) -> bool {
    let start = queued.position().min(new.position());
    let joined = queued.len() + new.len();
    let segments = queued.segments + new.segments;
    let data = matches!(queued.op(), Op::Read | Op::Write);
    joined <= limits.length_max_with(queued.op(), queued.flags(), start)
        && (!data || segments <= u32::from(limits.segments_max))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bio::{Bio, Flags, Prio};
    use crate::ids::{DiskId, GroupId, ReactorId};

    fn rq(bio: Bio) -> Box<Request> {
        Request::for_test(ReactorId(0), bio, 0)
    }

    fn bio(offset: u64) -> Bio {
        Bio {
            offset,
            len: 4096,
            ..Bio::default()
        }
    }

    #[test]
    fn neighbours_merge_at_the_end_where_they_touch() {
        let limits = Limits::default();
        let queued = rq(bio(8192));
        assert_eq!(fit(&queued, &rq(bio(12288)), &limits), Some(Fit::Back));
        assert_eq!(fit(&queued, &rq(bio(4096)), &limits), Some(Fit::Front));
        assert_eq!(fit(&queued, &rq(bio(16384)), &limits), None);
    }

    #[test]
    fn merge_never_crosses_operation_disk_group_priority_or_flush() {
        let limits = Limits {
            discard_max: 1 << 30,
            ..Limits::default()
        };
        let queued = rq(bio(0));
        let next = bio(4096);
        let other_class = Prio {
            class: crate::bio::Class::Rt,
            level: 0,
        };
        for different in [
            Bio {
                op: Op::Write,
                ..next.clone()
            },
            Bio {
                disk: DiskId(1),
                ..next.clone()
            },
            Bio {
                group: GroupId(1),
                ..next.clone()
            },
            Bio {
                prio: other_class,
                ..next.clone()
            },
            Bio {
                flags: Flags::NO_MERGE,
                ..next.clone()
            },
        ] {
            assert_eq!(fit(&queued, &rq(different), &limits), None);
        }
        assert_eq!(fit(&queued, &rq(next), &limits), Some(Fit::Back));
    }

    #[test]
    fn merge_stays_within_size_segments_and_boundary() {
        let queued = rq(bio(0));
        let next = rq(bio(4096));
        let limits = |change: fn(&mut Limits)| {
            let mut limits = Limits::default();
            change(&mut limits);
            limits
        };
        assert_eq!(fit(&queued, &next, &limits(|l| l.transfer_max = 4096)), None);
        assert_eq!(fit(&queued, &next, &limits(|l| l.segments_max = 1)), None);
        assert_eq!(fit(&queued, &next, &limits(|l| l.boundary = 4096)), None);
        assert_eq!(
            fit(&queued, &next, &limits(|l| l.boundary = 8192)),
            Some(Fit::Back)
        );
    }
}
