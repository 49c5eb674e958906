//! Two sides compared round by round: sides alternate, so each round gives one ratio, and a slow moment of the machine
//! affects both.

/// How much better ours was in each round.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pairs {
    /// Sorted; above 1 ours was better.
    ratios: Vec<f64>,
}

/// What the rounds say together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Verdict {
    /// Ours is so many times better, by the median of the rounds; below 1 worse.
    Times(f64),
    /// Neither side was better in two thirds of the rounds.
    Even,
}

impl Pairs {
    /// Compares the rounds of two sides; `more` says whether more is better. None if they are not as many.
    pub(super) fn new(ours: &[f64], theirs: &[f64], more: bool) -> Option<Self> {
        if ours.len() != theirs.len() || ours.is_empty() {
            return None;
        }
        let ratio = |(ours, theirs): (&f64, &f64)| if more { ours / theirs } else { theirs / ours };
        // Nothing against nothing is neither better nor worse.
        let ratios = ours.iter().zip(theirs).map(ratio);
        let mut ratios: Vec<f64> = ratios
            .map(|ratio| if ratio.is_nan() { 1.0 } else { ratio })
            .collect();
        ratios.sort_by(f64::total_cmp);
        Some(Self { ratios })
    }

    pub(super) fn verdict(&self) -> Verdict {
        let (wins, losses) = (
            self.wins(),
            self.ratios.iter().filter(|ratio| **ratio < 1.0).count(),
        );
        if 3 * wins.max(losses) < 2 * self.ratios.len() {
            return Verdict::Even;
        }
        let middle = self.ratios.len() / 2;
        Verdict::Times(match self.ratios.len() {
            len if len % 2 == 1 => self.ratios[middle],
            _ => f64::midpoint(self.ratios[middle - 1], self.ratios[middle]),
        })
    }

    /// `7 of 9`: the rounds in which ours was better.
    pub(super) fn shown(&self) -> String {
        format!("{} of {}", self.wins(), self.ratios.len())
    }

    fn wins(&self) -> usize {
        self.ratios.iter().filter(|ratio| **ratio > 1.0).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ratio_is_the_median_of_the_rounds_ratios() {
        // The machine was ten times as slow in the second round. The ratio of the medians is 1.05.
        let pairs = Pairs::new(&[220.0, 20.0, 210.0], &[200.0, 10.0, 100.0], true).unwrap();
        assert_eq!(pairs.verdict(), Verdict::Times(2.0));
        assert_eq!(pairs.shown(), "3 of 3");
        let less = Pairs::new(&[1.0, 1.0], &[3.0, 5.0], false).unwrap();
        assert_eq!(less.verdict(), Verdict::Times(4.0));
    }

    #[test]
    fn rounds_that_do_not_agree_are_even() {
        let verdict = |ours: &[f64]| {
            let theirs = vec![10.0; ours.len()];
            Pairs::new(ours, &theirs, true).unwrap().verdict()
        };
        assert_eq!(verdict(&[11.0, 11.0, 11.0, 9.0, 9.0]), Verdict::Even);
        assert_eq!(verdict(&[11.0, 11.0, 9.0]), Verdict::Times(1.1));
        assert_eq!(verdict(&[9.0, 9.0, 11.0]), Verdict::Times(0.9));
        assert_eq!(verdict(&[10.0; 3]), Verdict::Even);
        assert_eq!(verdict(&[11.0, 9.0]), Verdict::Even);
    }

    #[test]
    fn sides_of_different_rounds_are_no_pairs() {
        assert_eq!(Pairs::new(&[1.0], &[1.0, 2.0], true), None);
        assert_eq!(Pairs::new(&[], &[], true), None);
        let nothing = Pairs::new(&[0.0], &[0.0], false).unwrap();
        assert_eq!(
            (nothing.verdict(), nothing.shown()),
            (Verdict::Even, "0 of 1".into())
        );
    }
}
