//! The due share of each group in a queue: by weight among those that had work in the interval, at each level
//! of the tree.

/// A competing group: its weight, and whether it had work.
#[derive(Clone, Copy, Debug)]
pub(super) struct Competitor {
    pub(super) weight: u16,
    pub(super) is_active: bool,
}

/// The due share of each sibling of a parent's share; `None` for a sibling without work. `own`: the
/// parent had I/O of its own, which competes with its groups like one of them.
pub(super) fn due(of_parent: Option<f64>, own: bool, siblings: &[Competitor]) -> Vec<Option<f64>> {
    let active = siblings.iter().filter(|one| one.is_active);
    let weights: u32 = active.map(|one| u32::from(one.weight)).sum();
    let all = weights + if own { u32::from(OWN_WEIGHT) } else { 0 };
    let of_one = |one: &Competitor| {
        let due = of_parent? * f64::from(one.weight) / f64::from(all);
        one.is_active.then_some(due)
    };
    siblings.iter().map(of_one).collect()
}

/// The weight of a group's own I/O against the groups in it: the default.
const OWN_WEIGHT: u16 = blkmq_core::group::WEIGHT_DEFAULT;

#[cfg(test)]
mod tests {
    use super::*;

    fn one(weight: u16, is_active: bool) -> Competitor {
        Competitor { weight, is_active }
    }

    #[test]
    fn group_without_work_is_due_nothing_and_takes_nothing_from_others() {
        let shares = due(
            Some(1.0),
            false,
            &[one(300, true), one(100, true), one(500, false)],
        );
        assert_eq!(shares, [Some(0.75), Some(0.25), None]);
    }

    #[test]
    fn shares_are_parts_of_the_parents_and_its_own_work_competes() {
        assert_eq!(due(Some(0.5), false, &[one(100, true)]), [Some(0.5)]);
        assert_eq!(due(Some(0.5), true, &[one(100, true)]), [Some(0.25)]);
        assert_eq!(due(None, false, &[one(100, true)]), [None]);
    }
}
