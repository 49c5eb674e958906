//! The score of a visit, how fair it was: shares compared with the dues over every window of a second, Jain's
//! index, and how long a change took to have an effect. It sees only counts over time.

use std::time::Duration;

/// Bytes that each tenant of the crowd has moved so far, at moments some milliseconds apart.
#[derive(Clone, Debug, Default)]
pub(super) struct Series {
    pub(super) moments: Vec<(Duration, Vec<u64>)>,
}

impl Series {
    /// The largest difference of a tenant's share from its due, as a part of the due, in any window
    /// of `length`.
    pub(super) fn worst_share_error(&self, due: &[f64], length: Duration) -> f64 {
        let mut worst: f64 = 0.0;
        let mut end = 0;
        for (start, (at, before)) in self.moments.iter().enumerate() {
            end = end.max(start);
            while end < self.moments.len() && self.moments[end].0 < *at + length {
                end += 1;
            }
            let Some((_, after)) = self.moments.get(end) else {
                break;
            };
            worst = worst.max(share_error(before, after, due));
        }
        worst
    }

    /// The same for the whole series.
    pub(super) fn share_error(&self, due: &[f64]) -> f64 {
        let (Some(first), Some(last)) = (self.moments.first(), self.moments.last()) else {
            return 0.0;
        };
        share_error(&first.1, &last.1, due)
    }

    /// A tenant's share of all bytes in each step of time: the end of the step, in seconds from the
    /// beginning, and the share.
    pub(super) fn shares_of(&self, tenant: usize, step: Duration) -> Vec<(f64, f64)> {
        let mut shares = Vec::new();
        let Some((begin, first)) = self.moments.first() else {
            return shares;
        };
        let (mut since, mut before) = (*begin, first);
        for (at, after) in &self.moments {
            if *at < since + step {
                continue;
            }
            let each: Vec<f64> = moved(before, after).collect();
            let all: f64 = each.iter().sum();
            if all > 0.0 {
                shares.push((at.saturating_sub(*begin).as_secs_f64(), each[tenant] / all));
            }
            (since, before) = (*at, after);
        }
        shares
    }

    /// Jain's index of the shares, each divided by its due: 1 if all have the same part of their
    /// due, 1/n if one has everything.
    pub(super) fn jain(&self, due: &[f64]) -> f64 {
        let (Some(first), Some(last)) = (self.moments.first(), self.moments.last()) else {
            return 1.0;
        };
        let parts: Vec<f64> = moved(&first.1, &last.1)
            .zip(due)
            .map(|(moved, due)| moved / due)
            .collect();
        let (sum, squares) = parts
            .iter()
            .fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
        if squares == 0.0 {
            1.0
        } else {
            sum * sum / (parts.len() as f64 * squares)
        }
    }

    /// The time from `change` until, for the first time, the shares over the next `WINDOW` are
    /// within a tenth of the dues and the total is at least nine tenths of that before the change:
    /// other tenants then use what one leaves.
    pub(super) fn reaction(&self, change: Duration, due: &[f64]) -> Option<Duration> {
        let before_change = self.moments.iter().rfind(|(at, _)| *at <= change)?;
        let (start, first) = self.moments.first()?;
        let rate = |from: Duration, to: Duration, before: &[u64], after: &[u64]| {
            moved(before, after).sum::<f64>() / (to.saturating_sub(from)).as_secs_f64().max(1e-9)
        };
        let usual = rate(*start, before_change.0, first, &before_change.1);
        let after = self
            .moments
            .iter()
            .enumerate()
            .skip_while(|(_, (at, _))| *at < change);
        for (index, (at, before)) in after {
            let end = self.moments[index..]
                .iter()
                .find(|(end, _)| *end >= *at + WINDOW)?;
            let is_used = rate(*at, end.0, before, &end.1) >= (1.0 - CLOSE) * usual;
            if is_used && share_error(before, &end.1, due) < CLOSE {
                return Some(at.saturating_sub(change));
            }
        }
        None
    }

    /// The same of the first tenants only.
    pub(super) fn of_first(&self, tenants: usize) -> Self {
        let first = |(at, bytes): &(Duration, Vec<u64>)| (*at, bytes[..tenants].to_vec());
        Self {
            moments: self.moments.iter().map(first).collect(),
        }
    }

    /// Bytes per second of each tenant, over the whole series.
    pub(super) fn rates(&self) -> Vec<f64> {
        let (Some(first), Some(last)) = (self.moments.first(), self.moments.last()) else {
            return Vec::new();
        };
        let seconds = (last.0 - first.0).as_secs_f64().max(1e-9);
        moved(&first.1, &last.1).map(|moved| moved / seconds).collect()
    }

    /// Bytes per second of all tenants, from `from` on.
    pub(super) fn rate_since(&self, from: Duration) -> f64 {
        let Some((start, first)) = self.moments.iter().find(|(at, _)| *at >= from) else {
            return 0.0;
        };
        let Some((end, last)) = self.moments.last() else {
            return 0.0;
        };
        moved(first, last).sum::<f64>() / (*end - *start).as_secs_f64().max(1e-9)
    }
}

fn moved<'a>(before: &'a [u64], after: &'a [u64]) -> impl Iterator<Item = f64> + 'a {
    after
        .iter()
        .zip(before)
        .map(|(after, before)| (after - before) as f64)
}

/// The largest difference of a share from its due, as a part of the due. A tenant whose due is 0
/// does not count.
fn share_error(before: &[u64], after: &[u64], due: &[f64]) -> f64 {
    let total: f64 = moved(before, after).sum();
    if total == 0.0 {
        return 1.0;
    }
    let errors = moved(before, after)
        .zip(due)
        .filter(|(_, due)| **due > 0.0)
        .map(|(moved, due)| (moved / total / due - 1.0).abs());
    errors.fold(0.0, f64::max)
}

const WINDOW: Duration = Duration::from_millis(20);
const CLOSE: f64 = 0.1;

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    /// Two tenants; in each ms the second moves `second(t)` bytes, the first 100.
    fn series(second: impl Fn(u64) -> u64) -> Series {
        let mut sum = 0;
        let moments = (0..=2000).map(|t| {
            let moment = (ms(t), vec![100 * t, sum]);
            sum += second(t);
            moment
        });
        Series {
            moments: moments.collect(),
        }
    }

    #[test]
    fn equal_shares_have_no_error_and_an_index_of_one() {
        let fair = series(|_| 100);
        assert!(fair.worst_share_error(&[0.5, 0.5], ms(1000)) < 1e-9);
        assert!((fair.jain(&[0.5, 0.5]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn pause_shows_in_the_worst_window_and_not_in_the_whole() {
        let pause = series(|t| {
            if (500..600).contains(&t) {
                0
            } else if t < 500 {
                110
            } else {
                104
            }
        });
        assert!(pause.worst_share_error(&[0.5, 0.5], ms(100)) > 0.9);
        assert!(pause.share_error(&[0.5, 0.5]) < 0.02);
    }

    #[test]
    fn rates_are_of_each_and_a_part_leaves_the_others_out() {
        let series = series(|_| 300);
        assert_eq!(series.rates(), [100_000.0, 300_000.0]);
        assert_eq!(series.of_first(1).rates(), [100_000.0]);
        assert!(series.of_first(1).share_error(&[1.0]) < 1e-9);
    }

    #[test]
    fn one_who_gets_all_scores_one_part_of_their_number() {
        let mut unfair = series(|_| 0);
        assert!((unfair.jain(&[0.5, 0.5]) - 0.5).abs() < 1e-9);
        unfair.moments.clear();
        assert!((unfair.jain(&[0.5, 0.5]) - 1.0).abs() < 1e-9);
    }

    #[test]
    fn reaction_is_dated_by_the_first_window_that_fits() {
        let change = series(|t| if t < 1030 { 100 } else { 300 });
        let reaction = change.reaction(ms(1000), &[0.25, 0.75]).unwrap();
        assert!((ms(20)..=ms(30)).contains(&reaction), "{reaction:?}");
        assert!(change.reaction(ms(1000), &[0.9, 0.1]).is_none());
    }

    #[test]
    fn shares_over_time_are_those_of_each_step() {
        let change = series(|t| if t < 1000 { 100 } else { 300 });
        let shares = change.shares_of(1, ms(100));
        assert_eq!(shares.len(), 20);
        assert_eq!(shares[0], (0.1, 0.5));
        assert_eq!(shares[19], (2.0, 0.75));
        assert!(
            series(|_| 0)
                .shares_of(1, ms(100))
                .iter()
                .all(|share| share.1 == 0.0)
        );
    }
}
